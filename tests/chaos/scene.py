"""One cell over real processes: a request is brought to a phase and kept there, a fault falls, and what is left is
compared with what was there before."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.proxy import COORDINATOR
from tests.chaos.rules import Action, Rule
from tests.chaos.service import SETTLE_S, HandStarted
from tests.chaos.stream import Answer, Stream

_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Shape:
    """A piece of the text to go on from, and how long the answer is."""

    start: int
    prompt_tokens: int
    max_tokens: int

    def fields(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 1, "seed": self.start}


QUEUED = Shape(100, 90, 8)  # fits behind a filler
LONG = Shape(0, 640, 8)  # five chunks
SHORT = Shape(700, 40, 32)
BIG = Shape(900, 736, 60)  # two of them and what they grow by do not fit into one decode worker
BIG_FILLER = Shape(1200, 720, 400)
FILLER = Shape(300, 120, 2)
WITNESS = Shape(400, 30, 12)


class Oracle:
    """What each shape's answer is while nobody disturbs it."""

    def __init__(self, service: HandStarted, text_ids: list[int]) -> None:
        self._service = service
        self._text_ids = text_ids
        self._answers: dict[Shape, Answer] = {}

    def ask(self, shape: Shape, salt: str) -> Stream:
        prompt = self._text_ids[shape.start : shape.start + shape.prompt_tokens]
        return Stream(self._service.port, prompt, cache_salt=salt, **shape.fields())

    def answer(self, shape: Shape) -> Answer:
        if shape not in self._answers:
            answer = self.ask(shape, f"undisturbed-{next(_salts)}").answer()
            assert (answer.error, answer.output_tokens) == ("", shape.max_tokens), answer
            self._answers[shape] = answer
        return self._answers[shape]


class Witness:
    """One short stream after another, exact all the while. `breaks`: its coordinator dies, so it may be hung up on."""

    def __init__(self, oracle: Oracle, *, breaks: bool = False) -> None:
        self._oracle = oracle
        self._breaks = breaks
        self._expected = oracle.answer(WITNESS)
        self._over = threading.Event()
        self.answers = 0
        self.fault = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.is_set() or not self.answers:
            try:
                answer = self._oracle.ask(WITNESS, "witness").answer()
            except OSError as error:
                answer = Answer("", error=f"hung up: {error!r}")
            if answer.error and self._breaks:
                time.sleep(0.1)
            elif answer != self._expected:
                self.fault = f"the witness got {answer} instead of {self._expected}"
                return
            else:
                self.answers += 1

    def stop(self) -> None:
        """The answer that is under way is its last."""
        self._over.set()

    def end(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the witness hangs"
        assert not self.fault, self.fault


@dataclass(slots=True)
class Scene:
    """`stream` is the victim's, from when a phase has been reached; `salt` names it to the proxy."""

    service: HandStarted
    oracle: Oracle
    shape: Shape
    note: str = ""  # what a person may want to know of it
    salt: str = field(default_factory=lambda: f"victim-{next(_salts)}")
    _stream: Stream | None = None
    _fillers: list[Stream] = field(default_factory=list)
    _held: list[Rule] = field(default_factory=list)
    _frozen: dict[str, None] = field(default_factory=dict)
    _stopped: dict[str, None] = field(default_factory=dict)
    killed: dict[str, None] = field(default_factory=dict)
    _leaving: dict[str, None] = field(default_factory=dict)
    _exit_codes: dict[str, int] = field(default_factory=dict)

    # ------------------------------------------------------------ who

    @property
    def stream(self) -> Stream:
        assert self._stream is not None
        return self._stream

    @property
    def prefill(self) -> str:
        return self.service.proxy.place(self.salt)[0]

    @property
    def decode(self) -> str:
        return self.service.proxy.place(self.salt)[1]

    def who(self, letter: str) -> str:
        return {"P": self.prefill, "D": self.decode, "C": COORDINATOR}[letter]

    # ------------------------------------------------------------ the way to a phase

    def ask(self) -> Stream:
        self._stream = self.oracle.ask(self.shape, self.salt)
        return self._stream

    def fill(self, shape: Shape, rule: Callable[..., Rule], kind: str) -> Rule:
        """Another request, which ends with the scene, and a rule about it."""
        salt = f"filler-{next(_salts)}"
        made = rule(kind, about=salt)
        self._fillers.append(self.oracle.ask(shape, salt))
        return made

    def rule(self, action: Action, *kinds: str, **fields: Any) -> Rule:
        return self.service.proxy.add(Rule(action, kinds, **({"about": self.salt} | fields)))

    def see(self, *kinds: str, **fields: Any) -> Rule:
        return self.rule("see", *kinds, **fields)

    def hold(self, *kinds: str, **fields: Any) -> Rule:
        """All such messages, until the fault has fallen."""
        rule = self.rule("hold", *kinds, **({"times": None} | fields))
        self._held.append(rule)
        return rule

    def freeze(self, letter: str) -> None:
        """It stands still until the fault has fallen. Also for the proxy's thread."""
        name = self.who(letter)
        self.service.signal(name, signal.SIGSTOP)
        self._frozen[name] = None

    def go_on(self) -> None:
        """The fault has fallen: whoever was kept back goes on, unless that is the fault."""
        self.thaw()
        for rule in self._held:
            self.service.proxy.let_go(rule)
        self._held.clear()

    def thaw(self) -> bool:
        """Whether anybody was frozen."""
        frozen, self._frozen = self._frozen, {}
        for name in frozen:
            if name not in self._stopped and name not in self.killed:
                self.service.signal(name, signal.SIGCONT)
        return bool(frozen)

    def fillers_leave(self) -> None:
        for filler in self._fillers:
            if not filler.is_over:
                filler.leave()
        self._fillers.clear()

    # ------------------------------------------------------------ faults

    def kill(self, name: str) -> None:
        self.killed[name] = None
        self.service.kill(name)

    def stop(self, name: str) -> None:
        """It answers nobody until the request is over."""
        self._stopped[name] = None
        self.service.signal(name, signal.SIGSTOP)

    def terminate(self, name: str) -> None:
        self._leaving[name] = None
        self.service.signal(name, signal.SIGTERM)

    # ------------------------------------------------------------ afterwards

    def undo(self) -> None:
        """Everything that was done to the service."""
        self.go_on()
        self.fillers_leave()
        self.service.proxy.restore()
        for name in self._stopped:
            self.service.signal(name, signal.SIGCONT)
        for name in self._leaving:
            self._exit_codes[name] = self.service.until_left(name)

    def settle(self) -> float:
        """Seconds until the survivors are as they were."""
        assert set(self._exit_codes.values()) <= {0}, f"no clean end: {self._exit_codes}"
        started = time.monotonic()
        while left := {**self.service.busy(), **self.service.too_many_files()}:
            assert time.monotonic() - started < SETTLE_S, f"after {SETTLE_S:g} s there is left: {left}"
            time.sleep(0.02)
        return time.monotonic() - started
