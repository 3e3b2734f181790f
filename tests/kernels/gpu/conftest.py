"""Triton kernels run here in its interpreter, on the CPU. It must be chosen before the first import of triton."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
