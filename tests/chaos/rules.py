"""What a test wants done to messages on their way: dropped, doubled, late, held, damaged, or only noticed.

Rules are made in the test's thread and judged in the proxy's. Of several that fit a message the first one acts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from common.messages import AboutRequest, Heartbeat, Message, Tokens
from common.request import RequestId

Action = Literal["see", "drop", "double", "delay", "hold", "corrupt"]


@dataclass(frozen=True, slots=True)
class Passing:
    """A message on its way from one process to another. `phases`: of the requests that it is about, by their salts;
    "" where it does not say."""

    source: str
    target: str
    message: Message
    phases: dict[str, str]


@dataclass(slots=True)
class Rule:
    """Acts on `times` messages after the first `skip` that fit, without end where `times` is None. `then` runs in the
    proxy's thread before the message goes on."""

    action: Action
    kinds: tuple[str, ...]
    about: str = ""  # a request, by its cache_salt: that is known before it has an id
    phase: str = ""
    source: str = ""  # a process, or a role that it begins with
    fits: Callable[[Message], bool] = lambda message: True
    skip: int = 0
    times: int | None = 1
    delay_s: float = 0.0
    then: Callable[[], None] = lambda: None
    seen: int = 0
    acted: int = 0
    _first: threading.Event = field(default_factory=threading.Event)
    _held: list[Callable[[], None]] = field(default_factory=list)
    _open: bool = False

    def takes(self, passing: Passing) -> bool:
        """Whether it acts on this one; counts it."""
        if self._open or not self._fits(passing):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.acted >= self.times):
            return False
        self.acted += 1
        self.then()
        self._first.set()
        return True

    def _fits(self, passing: Passing) -> bool:
        return (
            type(passing.message).__name__ in self.kinds
            and (not self.about or self.about in passing.phases)
            and self.phase in ("", passing.phases.get(self.about))
            and passing.source.startswith(self.source)
            and self.fits(passing.message)
        )

    def wait(self, limit_s: float = 30.0) -> None:
        """Until it has acted once."""
        assert self._first.wait(limit_s), (
            f"no {' or '.join(self.kinds)} to {self.action} within {limit_s:g} s"
        )

    # ------------------------------------------------------------ holding, in the proxy's thread

    def keep(self, go_on: Callable[[], None]) -> None:
        self._held.append(go_on)

    def let_go(self) -> None:
        """What was held goes on, in order, and what comes from now on is not held."""
        self._open = True
        held, self._held = self._held, []
        for go_on in held:
            go_on()


def phases_of(message: Message) -> dict[RequestId, str]:
    """Requests that a message is about, by id, and the phase that it says they are in."""
    if isinstance(message, Tokens):
        return {row.id: "" for row in message.rows} | {row.id: "" for row in message.prompts}
    if isinstance(message, Heartbeat):
        return {id: phase for id, _, phase in message.live}
    return {message.id: ""} if isinstance(message, AboutRequest) else {}
