"""What is planned to be asked, and what became of it. Pure."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["ok", "rejected", "failed", "left", "interrupted"]
"""ok: whole, with text. rejected: 429 or 503. left: we hung up on purpose (`--abort-fraction`). interrupted: the run
was ended by Ctrl-C before the answer was."""

OUTCOMES: tuple[Outcome, ...] = ("ok", "rejected", "failed", "left", "interrupted")


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to come. `due_s` counts from the start of the run."""

    index: int
    due_s: float
    prompt_tokens: int
    output_tokens: int
    shared: tuple[int, ...] = ()
    """Names of blocks that begin the prompt: the same name is the same tokens in every prompt of a run."""
    leave_after: int | None = None
    """Hang up after so many chunks with text."""


@dataclass(frozen=True, slots=True)
class Record:
    """One request that was sent. Times count from the start of the run, on the client's monotonic clock.

    `text_s` has the time of each chunk with text: when the first byte of the chunk came. Chunks without text are
    nowhere in it. `prompt_tokens` and `output_tokens` are the server's count (`usage`), None where it gave none.
    """

    index: int
    outcome: Outcome
    due_s: float
    sent_s: float
    end_s: float
    asked_prompt_tokens: int
    asked_output_tokens: int
    text_s: tuple[float, ...] = ()
    connect_s: float = 0.0  # of `sent_s` to the first byte out; 0 on a connection kept from before
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0
    fault: str = ""
    words: str = ""
    request_id: str = ""

    @property
    def ttft_s(self) -> float | None:
        return self.text_s[0] - self.sent_s if self.text_s else None

    @property
    def gaps_s(self) -> list[float]:
        """From each chunk with text to the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.text_s)]

    @property
    def tokens(self) -> int:
        """The server's count, or a token for each chunk with text where it gave none."""
        return self.output_tokens if self.output_tokens is not None else len(self.text_s)

    @property
    def tpot_s(self) -> float | None:
        """From first to last text, for each token after the first."""
        if len(self.text_s) < 2 or self.tokens < 2:
            return None
        return (self.text_s[-1] - self.text_s[0]) / (self.tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def late_s(self) -> float:
        """How long after its time it was sent: our own slowness, or `--max-concurrency` that held it."""
        return self.sent_s - self.due_s


@dataclass(frozen=True, slots=True)
class Run:
    """`cpu_s` is what this process took of the processor in `wall_s`; `stalls_s` how late its event loop woke, 50 times
    a second: a client that is kept from the processor sees late what came in time, and has to know it."""

    records: tuple[Record, ...]
    wall_s: float
    cpu_s: float
    interrupted: bool
    stalls_s: tuple[float, ...] = ()
