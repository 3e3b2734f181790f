"""`python -m bench`, the same as `kvferry bench`."""

from __future__ import annotations

import sys

from bench.load.command import main

if __name__ == "__main__":
    sys.exit(main())
