"""A grammar is held for each request that the worker has, once, and let go when it has it no more."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import MagicMock

from common.messages import Message, Stop
from common.request import Grammar, Key
from tests.transfer.test_grammar_gate import COORDINATOR, A, B, decode, offer, prefill
from transfer.grammars_in_use import GrammarsInUse
from transfer.worker_loop import WorkerLoop


class Holds:
    def __init__(self) -> None:
        self.count: Counter[Grammar] = Counter()

    def hold(self, grammar: Grammar) -> None:
        self.count[grammar] += 1

    def let_go(self, grammar: Grammar) -> None:
        self.count[grammar] -= 1


def test_held_as_long_as_the_worker_has_it() -> None:
    holds = Holds()
    in_use = GrammarsInUse(holds)
    first, second, third = prefill("1"), decode("2"), offer("3", B)
    for message in (first, first, second, third, decode("4", None), Stop(*first.key)):
        in_use.handed_on(message)
    assert (holds.count[A], holds.count[B], len(in_use)) == (2, 1, 3)
    in_use.still_there([second.key, third.key])
    assert (holds.count[A], holds.count[B]) == (1, 1)
    in_use.handed_on(first)
    assert holds.count[A] == 2, "it came again"
    in_use.still_there([])
    assert not +holds.count and len(in_use) == 0


class Grammars(Holds):
    def is_compiled(self, grammar: Grammar) -> bool:
        return True

    def compile(self, grammar: Grammar) -> str | None:
        return None


def test_the_loop_holds_before_the_worker_sees_it_and_lets_go_with_a_heartbeat() -> None:
    grammars, live = Grammars(), [prefill("1").key]
    node: Any = MagicMock()

    def handle(message: Message, *_: object) -> list[Any]:
        assert grammars.count[A] == 1
        return []

    def live_keys() -> list[Key]:
        return live

    node.handle, node.live_keys = handle, live_keys
    links: Any = MagicMock()
    card: Any = None
    loop = WorkerLoop(node, MagicMock(), grammars, card, links, card, shutdown_timeout_s=1.0)
    loop._take(prefill("1"), COORDINATOR)
    loop._send_heartbeat()
    assert grammars.count[A] == 1
    live.clear()
    loop._send_heartbeat()
    assert grammars.count[A] == 0
