"""Types of flags for the programs of bench/: argparse names the flag and ends with 2 where a value is none of them."""

from __future__ import annotations

import math
import os
from argparse import ArgumentTypeError
from pathlib import Path


def count(text: str) -> int:
    """A whole number above 0."""
    return _whole(text, 1)


def count_or_none(text: str) -> int:
    """A whole number, 0 too."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        found = int(text)
    except ValueError:
        found = least - 1
    if found < least:
        raise ArgumentTypeError(f"{text!r}: expected a whole number, {least} at least")
    return found


def seconds(text: str) -> float:
    return _above_0(text, "seconds")


def positive(text: str) -> float:
    return _above_0(text, "a number")


def _above_0(text: str, what: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise ArgumentTypeError(f"{text!r}: expected {what} above 0")
    return found


def model_folder(text: str) -> Path:
    if not (Path(text) / "config.json").is_file():
        raise ArgumentTypeError(f"{text}: no model folder (no config.json in it)")
    return Path(text)


def new_file(text: str) -> Path:
    """That can be written, or written over, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ArgumentTypeError(f"{text}: cannot be written there")
    return path
