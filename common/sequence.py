"""One request on a worker, as the batching core sees it: its tokens, blocks and place. Pure."""

from __future__ import annotations

from common.lifecycle import Life, Phase
from common.ordering import Lane, Place
from common.request import Attempt, Key, Request, SamplingParams, unpack_ids

NO_SLOT = -1


class Sequence:
    """One request on this worker.

    `scored` counts the prompt tokens whose log-probabilities are said; where none are asked for, it is all of them.
    The first token has none. An attempt that starts with output tokens owes none either: the front takes no output
    before the prompt's are complete. `found_tokens` are those whose KV was in a cache when the present blocks were
    taken; `lost_tokens` is set by its end. While it has fewer than `plain_until` tokens, the next one is of note to
    nobody but its reader, unless it is an end token: it completes no block, needs none and does not end the answer.
    """

    __slots__ = (
        "arrival",
        "blocks",
        "cached_tokens",
        "chain",
        "charged_outputs",
        "end_token_ids",
        "found_tokens",
        "in_batch",
        "key",
        "lane",
        "life",
        "lost_tokens",
        "max_len",
        "max_outputs",
        "num_computed",
        "on_host",
        "order",
        "over",
        "place",
        "plain_until",
        "preemptions",
        "prompt_len",
        "published",
        "request",
        "scored",
        "seed",
        "served_at",
        "slot",
        "start_len",
        "tokens",
    )

    def __init__(
        self, request: Request, attempt: Attempt, output_ids: bytes, arrival: int, phase: Phase, now: float
    ) -> None:
        self.request = request
        self.key: Key = (request.request_id, attempt)
        self.tokens = unpack_ids(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.tokens += unpack_ids(output_ids)
        self.start_len = len(self.tokens)
        self.scored = self.prompt_len if request.sampling.prompt_logprobs is None or output_ids else 1
        self.max_outputs = request.sampling.max_tokens
        self.max_len = self.prompt_len + self.max_outputs
        self.end_token_ids = request.sampling.end_token_ids
        self.on_host = _drawn_on_host(request.sampling)
        self.num_computed = 0
        self.plain_until = 0
        self.cached_tokens = self.found_tokens = 0
        self.lost_tokens = 0
        self.blocks: list[int] = []
        self.chain: list[bytes] = []
        self.seed = b""
        self.published = 0
        self.slot = NO_SLOT
        self.in_batch = 0  # of the batches that are out
        self.over = False
        self.preemptions = 0
        self.arrival = arrival
        self.order = (request.priority, arrival)
        self.lane: Lane = (request.priority, "", "")  # this, and the next two, are `common/turns.py`'s
        self.place: Place = (0.0, arrival)
        self.served_at = now  # since when it waits for the next thing to be done for it
        self.charged_outputs = self.num_outputs
        self.life = Life(phase, now)

    def above(self, other: Sequence) -> bool:
        """Whether it is of a higher class."""
        return self.lane[0] < other.lane[0]

    @property
    def owes_scores(self) -> bool:
        """Prompt tokens from `scored` on have no log-probabilities yet, and are to have some."""
        return self.scored < self.prompt_len

    @property
    def computed_tokens(self) -> int:
        """Tokens whose KV was computed for it, here or on the way here, and would be lost with its blocks."""
        return self.num_computed - self.found_tokens

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def left(self) -> int:
        """Tokens without KV."""
        return len(self.tokens) - self.num_computed


def _drawn_on_host(sampling: SamplingParams) -> bool:
    """Grammars and the counts of penalties are the host's."""
    return (
        sampling.grammar is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def may_go_ahead(seq: Sequence) -> bool:
    """Whether the token after the one that is on its way can be computed before the host has seen that one. What ends
    an answer by its length is known; an end token is not, and then the row comes to nothing."""
    return not seq.on_host and len(seq.tokens) + 1 < seq.max_len


def finish_reason(seq: Sequence, token: int) -> str | None:
    """Whether the answer ends with `token`, just appended to `seq`: "stop", "length", or None."""
    if token in seq.end_token_ids:
        return "stop"
    return "length" if len(seq.tokens) >= seq.max_len else None
