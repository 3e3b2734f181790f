"""Valid messages of every type, made from the fields of their dataclasses: a type added there is in it at once."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Annotated, Any, Literal, NewType, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen

from common.bounds import Endpoint
from common.messages import Decode, Message, Offer, Prefill
from common.request import Grammar, PackedIds, pack_ids
from common.wire import TYPES

WORDS = (
    "",
    "a",
    "tcp",
    "shm",
    "ipc",
    "gloo",
    "decoding",
    "stop",
    "decode-0",
    "prefill-0",
    "x" * 40,
    "é",
    "a b\n",
)


@cache
def fields_of(cls: Any) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    return get_type_hints(cls, include_extras=True)


class Corpus:
    """Draws them. `ids` and `attempts` are those that the messages are about, live ones among them."""

    def __init__(self, random: Random, ids: Sequence[str], attempts: Sequence[int]) -> None:
        self._random = random
        self._ids = ids
        self._attempts = attempts

    def message(self, kinds: Sequence[type[Message]] = ()) -> Message:
        return self.of(self._random.choice(kinds or list(TYPES.values())))

    def of(self, cls: type[Message]) -> Message:
        message: Message = self._dataclass(cls)
        if isinstance(message, (Prefill, Decode, Offer)):
            request = dataclasses.replace(message.request, request_id=message.id)
            return dataclasses.replace(message, request=request)
        return message

    def _dataclass(self, cls: Any) -> Any:
        return cls(**{name: self._field(name, kind) for name, kind in fields_of(cls).items()})

    def _field(self, name: str, kind: Any) -> Any:
        if name in ("id", "request_id", "leader"):
            return self._random.choice(self._ids)
        if name == "attempt":
            return self._random.choice(self._attempts)
        return self._value(kind)

    def _value(self, kind: Any) -> Any:
        random, origin, inside = self._random, get_origin(kind), get_args(kind)
        if kind is PackedIds:
            return pack_ids([random.randrange(1000) for _ in range(random.randrange(40))])
        if kind is Endpoint:
            return f"tcp://127.0.0.1:{random.randrange(1, 10)}"  # nobody is there
        if origin is Annotated:
            return self._within(inside[0], inside[1:])
        if origin is Literal:
            return random.choice(inside)
        if origin in (Union, types.UnionType):
            return self._value(random.choice(inside))
        if origin is tuple:
            if inside[1:] == (...,):
                return tuple(self._value(inside[0]) for _ in range(random.choice((0, 1, 2, 5))))
            return tuple(self._value(one) for one in inside)
        if origin is dict:
            return {self._value(inside[0]): self._value(inside[1]) for _ in range(random.randrange(4))}
        return self._plain(kind)

    def _plain(self, kind: Any) -> Any:
        random = self._random
        if isinstance(kind, NewType):
            return self._value(kind.__supertype__)
        if kind is Grammar:
            return Grammar("regex", "a")
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            return self._dataclass(kind)
        if kind is str:
            return random.choice(WORDS)
        if kind is bytes:
            return random.randbytes(random.choice((0, 16, 32)))
        if kind is bool:
            return random.random() < 0.5
        if kind is int:
            return random.choice((0, 1, 2, 7, 1000, (1 << 61) + 1))
        if kind is float:
            return random.choice((0.0, 0.5, 1.0, 1e6))
        if kind in (None, type(None)):
            return None
        raise AssertionError(f"the corpus has no value for {kind}")

    def _within(self, kind: Any, rules: Sequence[Any]) -> Any:
        """A value that keeps the bounds of its field."""
        bounds = [bound for rule in rules for bound in getattr(rule, "metadata", ())]
        value = self._value(kind)
        for bound in bounds:
            match bound:
                case Ge(ge=least):
                    value = max(value, least)
                case Gt(gt=below):
                    value = value if value > below else type(value)(1)
                case Le(le=most):
                    value = min(value, most)
                case Lt(lt=above):
                    value = value if value < above else type(value)(7)
                case MinLen(min_length=shortest) if isinstance(value, bytes):
                    value = value.ljust(shortest, b"x")
                case MaxLen(max_length=longest):
                    value = (
                        value[:longest]
                        if hasattr(value, "__getitem__") and not isinstance(value, dict)
                        else value
                    )
                case _:
                    pass
        return [*value, self._value(get_args(kind)[0])] if isinstance(value, tuple) and not value else value
