"""The key pair of one cluster, the same in all its processes, in a file that its owner alone may read.

Every process is both sides of every connection to the others, so one pair does for both: its public half says whom to
trust, its secret half proves who one is. Two clusters have two pairs, and nothing of the one is let into the other.
"""

from __future__ import annotations

import os
import stat
import struct
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from common.errors import BadConfiguration

KEY_BYTES = 32  # of a half, which are 40 characters in Z85
MAX_FILE_BYTES = 4096

_TEXT = """\
# The key of a kvferry cluster. Whoever has its secret half is let in: no one but the owner may read this file (0600).
public = "{public}"
secret = "{secret}"
"""


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """Halves in Z85, as ZeroMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)


def new_key(path: Path) -> ClusterKey:
    """Makes a pair and its file. Raises BadConfiguration where there is one: a key that is in use must not be lost."""
    public, secret = zmq.curve_keypair()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadConfiguration(f"{path} is there already, and is left as it is: name another file") from None
    except OSError as error:
        raise BadConfiguration(f"{path} cannot be made: {error.strerror}") from error
    try:
        with os.fdopen(file, "w") as written:
            written.write(_TEXT.format(public=public.decode(), secret=secret.decode()))
    except OSError as error:
        path.unlink(missing_ok=True)  # half a key would only stand in the way of the next one
        raise BadConfiguration(f"{path} cannot be written: {error.strerror}") from error
    return ClusterKey(public, secret)


def read_key(path: Path) -> ClusterKey:
    """Raises BadConfiguration, which says what is wrong with the file and what to do."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        raise _fault(path, "is not there; `kvferry keys new FILE` makes one, for all machines") from None
    except OSError as error:
        raise _fault(path, f"cannot be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _fault(path, f"may be read or changed by others than its owner: chmod 600 {path}")
    key = _parsed(path, text)
    if zmq.curve_public(key.secret) != key.public:
        raise _fault(path, "holds two halves that do not belong together; copy the file whole")
    return key


def key_of(path: Path | None) -> ClusterKey | None:
    """Of --curve-key. Raises BadConfiguration."""
    return None if path is None else read_key(path)


def _parsed(path: Path, text: bytes) -> ClusterKey:
    """Whatever else the file holds is not repeated: it may be half a secret."""
    try:
        found = tomllib.loads(text.decode("ascii"))
        public, secret = (found.pop(name).encode("ascii") for name in ("public", "secret"))
        if not found and all(len(z85.decode(half)) == KEY_BYTES for half in (public, secret)):
            return ClusterKey(public, secret)
    except (ValueError, KeyError, AttributeError, TypeError, struct.error):
        pass
    raise _fault(
        path, "is no key of kvferry: two lines, public and secret, as `kvferry keys new FILE` writes them"
    )


def _fault(path: Path, what: str) -> BadConfiguration:
    return BadConfiguration(f"the key file {path} {what}")
