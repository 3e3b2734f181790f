"""What the routes beside completions answer, as the document declares it: models, health, workers, timelines. Pure.

Written by the registry and the tracker; held against real answers as those of `docs/answers` are.
"""

from __future__ import annotations

from typing import Literal

from common.lifecycle import Phase
from coordinator.docs.answers import Answer, Count, Seconds


class Model(Answer):
    """A served model."""

    id: str
    """Its name, for the field model."""
    object: Literal["model"]
    """What this is."""
    created: Count
    """When this server began to serve it, in seconds since 1970."""
    owned_by: Literal["kvferry"]
    """Always kvferry."""
    max_model_len: Count | None
    """Tokens of prompt and answer together; null while no worker is there."""


class Models(Answer):
    """All served models."""

    object: Literal["list"]
    """What this is."""
    data: list[Model]
    """The models."""


class Health(Answer):
    """A request could be served now."""

    status: Literal["ok"]
    """Always ok: what is not is a 503 with the reason."""


class Version(Answer):
    """Which kvferry this is."""

    version: str
    """Of the server."""


class WorkerRow(Answer):
    """One worker."""

    id: str
    """Its name."""
    role: Literal["prefill", "decode"]
    """Which half of the work it does."""
    pid: int
    """Its process on its host."""
    host: str
    """The name of its machine."""
    address: str
    """Where other workers reach it."""
    state: Literal["starting", "ready", "draining", "lost"]
    """Only a ready one gets requests. Starting: it has left its role, and is about to come back in the other one."""
    left: bool
    """Whether a lost or starting one went as it was told to, and did not die."""
    overdue: bool
    """Whether it was to leave, and has not though its deadline has passed: it hangs."""
    becomes: Literal["prefill", "decode"] | None
    """The role that it was told to change to, under an id of its own; null while it is to stay what it is."""
    running: Count
    """Requests in its batch."""
    waiting: Count
    """Requests that wait there for room."""
    blocks_total: Count
    """Blocks of its KV pool."""
    blocks_free: Count
    """Blocks that hold nothing."""
    blocks_held: Count
    """Blocks that requests hold."""
    blocks_cached: Count
    """Blocks that only the prefix cache keeps."""
    block_size: Count
    """Tokens in one block."""
    block_bytes: Count
    """Bytes of one block."""
    step_ms: Seconds
    """Milliseconds that its last steps took."""
    step_model: list[Seconds]
    """How long a step takes: at least, for each row, each token of context, each of a prompt; empty while unknown."""
    max_num_seqs: Count
    """Most requests in one step."""
    max_num_batched_tokens: Count
    """Most tokens in one step."""
    batching: Literal["continuous", "dynamic"]
    """Whether requests join and leave its batch at every step, or whole batches begin and end together."""
    threads: Count
    """Threads that it computes with."""
    device: str
    """What it computes on."""
    versions: dict[str, str]
    """Of kvferry and what it computes with there."""
    incarnation: int
    """Which life of the worker this is: rises with every start."""


class WorkerPart(Answer):
    """What one worker did for a request in one attempt."""

    worker: str
    """Its name."""
    attempt: str
    """In which attempt, by its fencing number."""
    outcome: str
    """How its part ended."""
    reason: str
    """Why, where it was cut short."""
    seconds: dict[Phase, Seconds]
    """How long the request was in each phase there."""
    cached_tokens: Count
    """Prompt tokens found in its prefix cache."""
    blocks: Count
    """Blocks that it held."""
    transferred_bytes: Count
    """Bytes of KV that it got from another worker, and verified."""


class Try(Answer):
    """One attempt at a request."""

    number: Count
    """Which of this request's attempts: 1 for the first."""
    attempt: str
    """Its fencing number, of 64 bits: rises with every dispatch of any request."""
    prefill_worker: str | None
    """Who was to make its KV; null where its decode worker was to."""
    decode_worker: str | None
    """Who was to make its answer."""
    fault: str
    """What went wrong with it, if anything did."""


class Timeline(Answer):
    """A request's way through the cluster. That of the 1024 requests that ended last is kept."""

    id: str
    """Its id."""
    phase: Phase
    """Where it is, or how it ended."""
    choices: list[str]
    """Ids of its other choices, each with a timeline of its own."""
    attempts: Count
    """How often it was given to workers."""
    prompt_tokens: Count
    """Tokens of the prompt."""
    output_tokens: Count
    """Tokens of the answer so far."""
    prefill_worker: str | None
    """Who made its KV."""
    decode_worker: str | None
    """Who makes its answer."""
    seconds: Seconds
    """From its admission to its end, or until now."""
    coordinator_seconds: dict[Phase, Seconds]
    """How long it was in each phase, as the coordinator saw it: together, the seconds above."""
    unattributed_seconds: Seconds
    """What neither the queue nor any worker accounts for: ways between processes, and workers that died."""
    workers: list[WorkerPart]
    """What each worker did."""
    blocks: Count
    """Blocks that it held where it held most."""
    transferred_bytes: Count
    """Bytes of KV that went between workers."""
    cached_tokens: Count
    """Prompt tokens found in a prefix cache."""
    last_fault: str
    """Why it failed, or its last attempt that did."""
    tries: list[Try]
    """Its last attempts, 32 at most."""
