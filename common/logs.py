"""Log lines of every process: one format, on stderr. Prompts, outputs and keys are never logged."""

from __future__ import annotations

import logging


def set_up_logging(level: str) -> None:
    """`level`: debug, info, warning or error."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(name)s: %(message)s")
    # It announces start and stop under the name uvicorn.error; our own lines say the same.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
