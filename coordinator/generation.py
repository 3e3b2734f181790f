"""One POST to a completion route, from its body to the last byte of its answer.

Two tasks run for a request: the work, and a watch on the connection. Whichever ends first ends the other, so a
client that leaves is noticed in every phase, tokenizing and waiting for admission included. Text is pulled: the
next delta is asked for when the last one is written, so a slow reader holds one write at a time here. One that
stops reading is cut off by its connection (`connection.py`), which is a client that left.

The status line waits for the first delta, so that what fails before it has its own status. If that takes longer
than `keep_alive_s`, the stream begins with a comment and a later failure is an `error` event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from common.errors import KvferryError, NotAdmitted
from common.lifecycle import LIVE_PHASES, Phase
from coordinator.answer import Answer, Piece
from coordinator.deadline_header import left_s, read_deadline_s
from coordinator.door.connection import CONNECTION, DROPPED
from coordinator.door.front_door import Arrival
from coordinator.door.http_body import (
    ClientLeft,
    Receive,
    Scope,
    Send,
    read_body,
    read_fields,
    until_disconnect,
)
from coordinator.door.limits import Limits
from coordinator.door.response_writer import ResponseWriter
from coordinator.echo import Echo, Shown
from coordinator.errors_http import code_of, internal_error
from coordinator.first_token import FirstTokenPacing
from coordinator.gateway import Gateway, TokenStream
from coordinator.metrics import Metrics, RequestMeter
from coordinator.openai.schema import read_chat, read_text
from coordinator.openai.shapes import (
    DONE,
    ChatChunks,
    ChunkShape,
    Heading,
    TextChunks,
    TokenBytes,
    Whole,
    chat_response,
    text_response,
    usage,
    whole_choice,
)
from coordinator.relay import Relay
from coordinator.request_builder import Job, RequestBuilder
from coordinator.streams import NothingToSay
from coordinator.tokenizer import Tokenizer

log = logging.getLogger("kvferry.http")

LARGE_CHARS = 8192
"""Of a whole answer above which it is read for calls and written in a thread, so that streams go on."""
CHARS_PER_SCORED_TOKEN = 16
"""What writing one costs, in that of text."""
LARGE_BYTES = 1 << 16
"""Of events that become due at once: more than that leaves in turns with other requests."""


@dataclass(frozen=True, slots=True)
class Surface:
    """What differs between chat and text completions."""

    name: str
    read: Callable[[dict[str, Any]], Any]
    """A body to the fields that `build` takes."""
    build: Callable[[RequestBuilder, Any, str | None], Awaitable[Job]]
    chunks: type[ChunkShape]
    respond: Callable[[Whole, TokenBytes], bytes]


CHAT = Surface("chat", read_chat, RequestBuilder.chat, ChatChunks, chat_response)
TEXT = Surface("text", read_text, RequestBuilder.text, TextChunks, text_response)


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What every request is made with."""

    gateway: Gateway
    tokenizer: Tokenizer
    builder: RequestBuilder
    metrics: Metrics
    limits: Limits
    pacing: FirstTokenPacing


class Generation:
    """One request."""

    def __init__(self, kitchen: Kitchen, surface: Surface, arrival: Arrival) -> None:
        self._kitchen = kitchen
        self._surface = surface
        self._arrival = arrival
        self._phase = Phase.WAITING
        self._leaving = "the server is stopping"
        self._job: Job | None = None
        self._meter: RequestMeter | None = None
        self._deadline_s: float | None = None
        self._prompt_tokens = 0
        self._answers: list[Answer] = []  # one for each choice
        self._echo: Echo | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        out = ResponseWriter(send, scope["state"].get(CONNECTION))
        limits = self._kitchen.limits
        try:
            body = await read_body(scope, receive, limits.max_body_bytes, limits.body_timeout_s)
        except ClientLeft:
            return
        except KvferryError as error:
            self._rejected(error)
            await out.error(error, unread=receive)
            return
        work = asyncio.create_task(self._serve(body, out))
        try:
            await self._supervise(work, scope, receive, out)
        except KvferryError as error:
            self._failed(error)
            await out.error(error)
        except Exception:
            log.exception("request %s failed", self._job.request.request_id if self._job else "-")
            fault = internal_error()
            self._failed(fault)
            await out.error(fault)

    # ------------------------------------------------------------ who watches

    async def _supervise(
        self, work: asyncio.Task[None], scope: Scope, receive: Receive, out: ResponseWriter
    ) -> None:
        """Ends with the work, or ends it when the connection is gone: closed by the client, or by a limit."""
        left = out.watch = asyncio.create_task(until_disconnect(receive))
        comments: list[asyncio.Task[None]] = []  # the latest, if any
        try:
            while not work.done():
                limit_s = self._kitchen.limits.keep_alive_s
                await asyncio.wait((work, left), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    break
                if left.done():
                    dropped = scope["state"].get(DROPPED)
                    self._leaving = f"its connection was cut: {dropped}" if dropped else "the client left"
                    self._left()
                    return
                if self._wants_comment(out):
                    # Not written here: a socket may be full for long, and a client that leaves meanwhile must be seen.
                    comments = [asyncio.create_task(out.comment())]
        finally:
            out.watch = None
            for task in (left, work, *comments):
                task.cancel()  # does nothing to one that is done
            await asyncio.gather(work, left, *comments, return_exceptions=True)
        work.result()

    def _wants_comment(self, out: ResponseWriter) -> bool:
        job = self._job
        quiet_s = time.monotonic() - out.last_write_s
        if job is None or not job.stream or out.writing or out.ended:
            return False
        # A request in the queue may yet be refused, and should be so with a status.
        return self._phase_now() != Phase.WAITING and quiet_s >= self._kitchen.limits.keep_alive_s

    def _phase_now(self) -> str:
        """As the cluster sees it; as the front does, where the cluster does not know the request (yet)."""
        known = self._kitchen.gateway.timeline(self._job.request.request_id) if self._job else None
        phase = known.get("phase") if known is not None else None
        return str(phase) if phase in LIVE_PHASES else str(self._phase)

    # ------------------------------------------------------------ who works

    async def _serve(self, body: bytes, out: ResponseWriter) -> None:
        kitchen, arrival = self._kitchen, self._arrival
        deadline_s = self._deadline_s = read_deadline_s(arrival.deadlines)
        fields = await read_fields(body, self._surface.read)
        job = self._job = await self._surface.build(kitchen.builder, fields, arrival.tenant)
        self._prompt_tokens = job.prompt_tokens
        self._answers = self._answers_to(job)
        if job.echoed:
            self._echo = Echo(job.echoed, job.leaders, job.request.sampling.logprobs is not None)
        stream: TokenStream
        if job.needs_workers:
            left = left_s(deadline_s, time.monotonic() - arrival.started_s)
            stream = await kitchen.gateway.submit(job.requests, left)
        else:
            stream = NothingToSay([request.request_id for request in job.requests])
        self._phase = Phase.PREFILLING
        self._meter = kitchen.metrics.meter(job.request.tier, self._arrival.started_s)
        try:
            await (self._stream(job, stream, out) if job.stream else self._whole(job, stream, out))
        except asyncio.CancelledError:
            stream.cancel(self._leaving)
            raise
        except BaseException:
            stream.cancel("the front failed")
            raise

    def _answers_to(self, job: Job) -> list[Answer]:
        shown_ids = job.tools.shown_ids if job.tools is not None else frozenset()
        text_bytes = self._kitchen.tokenizer.text_bytes_with(shown_ids)
        echoed_chars = [len(prompt.text) for prompt in job.echoed] or [0] * len(job.requests)
        return [
            Answer(text_bytes, request.sampling, job.stops, first_offset=chars, empty=job.empty)
            for request, chars in zip(job.requests, echoed_chars, strict=True)
        ]

    async def _next(self, stream: TokenStream, job: Job) -> tuple[int, Shown]:
        """The choice that has spoken, and what can be shown now."""
        assert self._meter is not None
        delta = await stream.next()
        answer = self._answers[delta.choice]
        before = answer.completion_tokens
        pieces = answer.push(delta)
        if delta.ids:
            self._phase = Phase.DECODING
            accepted = answer.completion_tokens - before
            now_s = time.monotonic()
            gap_s = self._meter.tokens_accepted(accepted, self._prompt_tokens, now_s, delta.choice)
            if gap_s is not None:
                self._kitchen.pacing.observed(gap_s)
        if answer.finish is not None and delta.finish is None:
            stream.stop(delta.choice)
        if self._echo is not None:
            return delta.choice, self._echo.push(delta, pieces)
        return delta.choice, [(delta.choice, piece) for piece in pieces]

    async def _stream(self, job: Job, stream: TokenStream, out: ResponseWriter) -> None:
        assert self._meter is not None
        answers, meter = self._answers, self._meter
        shape = self._surface.chunks(
            self._heading(job), self._kitchen.tokenizer.token_bytes, job.include_usage, job.tools
        )
        data = b"".join([shape.begin(choice) for choice in range(len(answers))])
        begun = self._echo.begin() if self._echo else []
        plain = job.tools is None and self._echo is None and all(answer.plain for answer in answers)
        relay = Relay(answers, shape, meter, self._kitchen.pacing, self._prompt_tokens, out)
        unfinished = len(answers)
        while unfinished:
            choice, shown = await self._next(stream, job)
            begun, shown = [], begun + shown
            for one in shown:
                data += shape.piece(*one)
                if len(data) > LARGE_BYTES:
                    await out.events(data)
                    data = b""
                    await asyncio.sleep(0)
            unfinished -= answers[choice].finish is not None
            if not unfinished:
                if job.include_usage:
                    data += shape.usage(self._usage(job))
                await out.events(data + DONE, more=False)
            elif data:
                if shown and meter.first_token_s is None:
                    await self._hold(job, stream)
                await out.events(data)
                data = b""
            if shown and answers[choice].completion_tokens:
                meter.token_out(time.monotonic(), choice)
                if plain:
                    stream.relay(relay.take)
        self._finished()

    async def _hold(self, job: Job, stream: TokenStream) -> None:
        """The first token, for the sake of the gap after it."""
        tier, began_s = job.request.tier, time.monotonic()
        hold_s = self._kitchen.pacing.hold_s(tier, began_s - self._arrival.started_s, self._deadline_s)
        if hold_s > 0:
            await stream.wait(hold_s)
            self._kitchen.metrics.held.labels(tier).inc(time.monotonic() - began_s)

    async def _whole(self, job: Job, stream: TokenStream, out: ResponseWriter) -> None:
        assert self._meter is not None
        answers, meter = self._answers, self._meter
        pieces: list[list[Piece]] = [[] for _ in answers]
        begun = self._echo.begin() if self._echo else []
        chars = 0
        unfinished = len(answers)
        while unfinished:
            before = meter.num_tokens
            choice, shown = await self._next(stream, job)
            begun, shown = [], begun + shown
            for shows, piece in shown:
                pieces[shows].append(piece)
                chars += len(piece.text) + CHARS_PER_SCORED_TOKEN * len(piece.tokens)
            unfinished -= answers[choice].finish is not None
            if meter.num_tokens > before:
                meter.token_out(time.monotonic(), choice)
        heading, total = self._heading(job), self._usage(job)

        def respond() -> bytes:
            choices = [
                whole_choice(of, str(answer.finish), request.sampling.logprobs is not None)
                for of, answer, request in zip(pieces, answers, job.requests, strict=True)
            ]
            whole = Whole(heading, choices, total, job.tools)
            return self._surface.respond(whole, self._kitchen.tokenizer.token_bytes)

        await out.whole(respond() if chars <= LARGE_CHARS else await asyncio.to_thread(respond))
        self._finished()

    def _heading(self, job: Job) -> Heading:
        request, fingerprint = job.request, self._kitchen.gateway.system_fingerprint()
        return Heading(request.request_id, job.model, int(time.time()), request.tier, fingerprint)

    def _usage(self, job: Job) -> dict[str, Any]:
        """What followers find of their leader's KV was computed here for this request: only a leader's hits were
        cached before it."""
        cached = sum(self._answers[choice].cached_tokens for choice in job.leaders)
        return usage(self._prompt_tokens, self._completion_tokens(), cached)

    def _completion_tokens(self) -> int:
        return sum(answer.completion_tokens for answer in self._answers)

    # ------------------------------------------------------------ how it ended

    def _failed(self, error: KvferryError) -> None:
        if self._meter is None:
            self._rejected(error)
        else:
            self._end("error", error.status, code_of(error))

    def _rejected(self, error: KvferryError) -> None:
        code = code_of(error)
        self._kitchen.metrics.rejected.labels(code).inc()
        if self._job is not None and isinstance(error, NotAdmitted):
            self._kitchen.metrics.refused(self._job.request.tier)
        self._log("rejected", error.status, code, time.monotonic())

    def _left(self) -> None:
        self._kitchen.metrics.aborted.labels(self._phase_now()).inc()
        self._end("abort", 499)

    def _finished(self) -> None:
        """One request has one reason in the log and the metrics, however many choices: the first one's."""
        self._end(str(self._answers[0].finish), 200)

    def _end(self, reason: str, status: int, code: str = "-") -> None:
        now_s = time.monotonic()
        if self._meter is not None:
            self._meter.end(reason, now_s)
        self._log(reason, status, code, now_s)

    def _log(self, reason: str, status: int, code: str, now_s: float) -> None:
        """One line for each request, without a word of what was asked or answered."""
        meter, job, arrival = self._meter, self._job, self._arrival
        first_s = meter.first_token_s if meter is not None else None
        log.info(
            "%s %s %d %s code=%s client_id=%r tier=%s prompt_tokens=%d completion_tokens=%d ttft_ms=%s "
            "total_ms=%.0f",
            self._surface.name,
            job.request.request_id if job else "-",
            status,
            reason,
            code,
            arrival.client_id,
            job.request.tier if job else "-",
            self._prompt_tokens,
            self._completion_tokens(),
            "-" if first_s is None else f"{(first_s - arrival.started_s) * 1e3:.0f}",
            (now_s - arrival.started_s) * 1e3,
        )
