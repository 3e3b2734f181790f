"""How a message becomes bytes and back. Pure.

A message on the wire is one msgpack map: the envelope (`v` version, `t` type, `from` worker or "coordinator",
`inc` incarnation) and the fields of the dataclass named by `t`. Whatever comes in is checked by pydantic against
that dataclass and bounded in size; another major version is refused, unknown fields of a newer minor are ignored.
The rows of a step's tokens lie in columns (`token_columns.py`).
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from common import front_messages, group_messages, messages
from common.errors import ProtocolViolation
from common.messages import AboutRequest, Blocks, Decode, Message, Offer, Prefill, Sender, ShownPool, Tokens
from common.prefix import HASH_BYTES
from common.request import Incarnation
from common.token_columns import columns_of, rows_of

PROTOCOL_MAJOR = 2  # since 2 rows of tokens travel as columns
PROTOCOL_MINOR = 3
"""2.1: a data message may hold several blocks, where the receiver's address says so. 2.2: loads hold a step
model, requests weight, deadline and ITL target. 2.3: blocks of a message may share a header, where the receiver's
address says so."""
MAX_MESSAGE_BYTES = 1 << 20

_BASES = (Message, AboutRequest, ShownPool)
TYPES: dict[str, type[Message]] = {
    name: cls
    for module in (messages, front_messages, group_messages)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and issubclass(cls, Message) and cls not in _BASES
}


@cache
def _adapter(name: str) -> TypeAdapter[Message]:
    return TypeAdapter(TYPES[name])


_LEAVES = frozenset({int, str, bytes, float, bool, type(None)})


def _plain(value: Any) -> Any:
    """Dataclasses as maps, field by field (dataclasses.asdict copies every leaf and takes four times as long)."""
    if type(value) in _LEAVES:
        return value
    names = _fields_of(type(value))
    if names is not None:  # most are leaves: not worth a call each
        return {
            name: item if type(item := getattr(value, name)) in _LEAVES else _plain(item) for name in names
        }
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


_fields: dict[type, tuple[str, ...] | None] = {}


def _fields_of(cls: type) -> tuple[str, ...] | None:
    """None where it is no dataclass."""
    try:
        return _fields[cls]
    except KeyError:
        names = tuple(one.name for one in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None
        return _fields.setdefault(cls, names)


def longest_model_len(block_size: int) -> int:
    """Tokens that an Offer can carry with their block hashes, leaving an eighth for everything else."""
    return MAX_MESSAGE_BYTES * 7 // 8 * block_size // (4 * block_size + HASH_BYTES)


def encode(message: Message, sender: Sender) -> bytes:
    """The message as it goes on the wire."""
    body: dict[str, Any]
    if isinstance(message, Tokens):
        body = {"seq": message.seq, "rows": columns_of(message.rows), "prompts": _plain(message.prompts)}
    elif isinstance(message, Blocks):  # plain as they are
        body = {"channel": message.channel, "rows": message.rows}
    else:
        body = _plain(message)
    envelope = {
        "v": (PROTOCOL_MAJOR, PROTOCOL_MINOR),
        "t": type(message).__name__,
        "from": sender.name,
        "inc": sender.incarnation,
    }
    packed = msgpack.packb({**envelope, **body})
    assert isinstance(packed, bytes)
    return packed


def decode(data: bytes | memoryview) -> tuple[Sender, Message]:
    """Checks and reads one message.

    Raises ProtocolViolation for anything that is not a whole, valid message of our protocol major.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolViolation(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        body = msgpack.unpackb(data, max_map_len=100_000, max_array_len=400_000)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolViolation(f"not msgpack: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolViolation("not a map")
    return _sender(body), _message(body)


def _sender(body: dict[Any, Any]) -> Sender:
    version, name, incarnation = body.get("v"), body.get("from"), body.get("inc")
    if not isinstance(version, list) or len(version) != 2 or version[0] != PROTOCOL_MAJOR:
        raise ProtocolViolation(f"protocol version {version!r}, ours is {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}")
    if not isinstance(name, str) or not 0 < len(name) <= 200 or type(incarnation) is not int:
        raise ProtocolViolation("envelope without a valid `from` and `inc`")
    return Sender(name, Incarnation(incarnation))


def _message(body: dict[Any, Any]) -> Message:
    name = body.get("t")
    if not isinstance(name, str) or name not in TYPES:
        raise ProtocolViolation(f"unknown message type {str(name)[:50]!r}")
    try:
        if name == Tokens.__name__:
            body = {**body, "rows": rows_of(body.get("rows"))}
        message = _adapter(name).validate_python(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolViolation(f"invalid {name}: {_first_fault(error)}") from error
    if isinstance(message, (Prefill, Decode, Offer)) and message.request.request_id != message.id:
        raise ProtocolViolation(f"invalid {name}: it is not about the request inside it")
    return message


def _first_fault(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error) or type(error).__name__
