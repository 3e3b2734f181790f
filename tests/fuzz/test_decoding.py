"""Every type of message, mutated, through the one function that reads what sockets bring: nothing but a valid message
or ProtocolViolation comes of it."""

from __future__ import annotations

from random import Random

import pytest

from common.errors import ProtocolViolation
from common.messages import Sender
from common.request import Incarnation
from common.wire import TYPES, decode, encode
from tests.fuzz.corpus import Corpus
from tests.fuzz.mutations import Mutator

CASES = 200  # of each type


@pytest.mark.parametrize("name", sorted(TYPES))
def test_a_mutated_message_is_a_message_or_a_violation(name: str) -> None:
    random = Random(name)
    corpus = Corpus(random, ["a", "live"], [1, 2, (1 << 63) - 1])
    mutator = Mutator(random, ["decode-0", "live", "x"], [1, 0, -1, (1 << 64) - 1])
    who = Sender("w", Incarnation(1))
    accepted = 0
    for _ in range(CASES):
        valid = encode(corpus.of(TYPES[name]), who)
        assert isinstance(decode(valid)[1], TYPES[name]), "the corpus is not valid"
        data = mutator.mutate(valid)
        try:
            sender, message = decode(data)
        except ProtocolViolation:
            continue
        accepted += 1
        assert decode(encode(message, sender)) == (sender, message) or "nan" in repr(message)
    assert 0 < accepted < CASES
