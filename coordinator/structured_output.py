"""Says at the edge whether answers can be held to a grammar, before a worker sees it.

Compiling takes milliseconds, of a hostile schema a second: it is done in a thread, one after the other, with a bound
on how many may wait, and what came out is kept, under a digest of the grammar, which a thousand clients may have
written at full length. Its cost is bounded by counts (`grammar_check`), so the time limit here only meets a machine
that is overloaded: that is a 429, and what does not compile is a 400.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from common.errors import BadRequest, NotAdmitted
from common.request import Grammar
from coordinator.grammar_check import MAX_TEXT_BYTES, GrammarChecker
from coordinator.tokenizer import Tokenizer

MAX_KNOWN = 1024
MAX_WAITING = 64
TIME_LIMIT_S = 10.0


class StructuredOutput:
    """Grammars of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._checker = GrammarChecker(tokenizer.folder, tokenizer.vocab_size, tokenizer.end_ids)
        self._special_ids = tokenizer.special_ids
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._known: OrderedDict[bytes, str | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[str | None]] = {}

    def prepare(self) -> None:
        """Before serving: reading the tokenizer holds the interpreter for half a second."""
        self._checker.prepare()

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises BadRequest where answers cannot be held to it, NotAdmitted where nobody had time to see."""
        self.check_length(grammar, param)
        key = _digest(grammar)
        if key not in self._known:
            await self._judge(key, grammar)
        self._known.move_to_end(key)
        fault = self._known[key]
        if fault is not None:
            raise _refused(param, fault)

    def check_length(self, grammar: Grammar, param: str) -> None:
        """Raises BadRequest. Costs nothing, so that nobody walks through, copies or keeps what is too long."""
        if len(grammar.text) > MAX_TEXT_BYTES:
            raise _refused(param, f"is longer than {MAX_TEXT_BYTES} bytes")

    def check_stop_ids(self, stop_token_ids: list[int], written: Collection[int] = ()) -> None:
        """A token that stands for nothing but an end can end an answer where its grammar may end. One that has a text
        could be the only way on, and so could those special ones that a forced call is `written` with."""
        taken = self._special_ids - set(written)
        if any(token_id not in taken for token_id in stop_token_ids):
            raise BadRequest(
                "stop_token_ids: may hold special tokens only where the answer has a form, which says where it ends, "
                "and none that a forced call is written with.",
                param="stop_token_ids",
                code="invalid_value",
            )

    async def _judge(self, key: bytes, grammar: Grammar) -> None:
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= MAX_WAITING:
                raise _busy()
            loop = asyncio.get_running_loop()
            running = loop.run_in_executor(self._thread, self._checker.fault, grammar)
            self._running[key] = running
            running.add_done_callback(lambda done: self._judged(key, done))
        try:
            # Shielded: others may wait for the same one.
            fault = await asyncio.wait_for(asyncio.shield(running), TIME_LIMIT_S)
        except TimeoutError as error:
            raise _busy() from error
        self._known[key] = fault

    def _judged(self, key: bytes, done: asyncio.Future[str | None]) -> None:
        self._running.pop(key, None)
        if not done.cancelled() and done.exception() is None:
            self._known[key] = done.result()
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    whole = f"{grammar.kind} {grammar.text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(whole, digest_size=16).digest()


def _refused(param: str, fault: str) -> BadRequest:
    return BadRequest(f"{param}: {fault}.", param=param, code="invalid_value")


def _busy() -> NotAdmitted:
    return NotAdmitted("Too many grammars are being compiled.", retry_after_s=1.0, code="grammars_busy")
