"""Workers as the coordinator sees them: they hold attempts and go on with one by a small step when they are told to.

Honest, and without memory beyond that of a real one: the highest attempt of each request fences those below, and what
has ended is answered with its end. A hand-over happens at once between two of them; what may go wrong on that way are
histories of other machines. What they say is returned for a network to carry, or not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.messages import (
    Abort,
    AboutRequest,
    Accepted,
    Decode,
    Drain,
    Ended,
    Heartbeat,
    HeartbeatAck,
    Message,
    PeerAddress,
    Prefill,
    Rebind,
    Refused,
    Register,
    Registered,
    Sender,
    SetRole,
    Started,
    Stop,
    TokenRow,
    Tokens,
)
from common.request import Attempt, Incarnation, Key, Request, RequestId
from tests.coordinator.cluster_bench import address, card, heartbeat

Stage = Literal["queued", "prefilling", "kv_ready", "decoding"]


def token_of(request_id: RequestId, index: int) -> int:
    """A token is a function of the request."""
    return int(request_id[1:]) * 1000 + index


@dataclass
class Held:
    request: Request
    outputs: int
    stage: Stage
    target: PeerAddress | None
    transfer: bool = False  # reserved at a decode worker, its KV not there yet


@dataclass
class ScriptedWorker:
    name: str
    incarnation: int = 1
    alive: bool = True
    registered: bool = False
    draining: bool = False
    held: dict[Key, Held] = field(default_factory=dict)
    highest: dict[RequestId, Attempt] = field(default_factory=dict)
    ended: dict[Key, Ended] = field(default_factory=dict)
    seq: int = 0

    @property
    def sender(self) -> Sender:
        return Sender(self.name, Incarnation(self.incarnation))

    @property
    def address(self) -> PeerAddress:
        return address(self.name, self.incarnation)

    def restart(self) -> None:
        """A new life that remembers nothing."""
        self.__init__(self.name, self.incarnation + 1)  # type: ignore[misc]

    def card(self) -> Register:
        return card(self.name, self.incarnation, blocks=16, max_num_seqs=3)

    def beat(self) -> Heartbeat | Register:
        if not self.registered:
            return self.card()
        live = ((key, "kv_ready" if held.transfer else held.stage) for key, held in self.held.items())
        return heartbeat(*live, draining=self.draining)

    # ------------------------------------------------------------ told

    def hear(self, message: Message) -> list[Message]:
        match message:
            case Registered():
                self.registered = True
            case HeartbeatAck():
                self.registered = message.known
                return [said for key in message.abort for said in self.end(key, "aborted")]
            case Drain() | SetRole():  # and comes back as it was: it died on its way
                self.draining = True
            case Prefill():
                return [self._take(message, message.request, message.output_ids, message.target)]
            case Decode():
                return [self._take(message, message.request, message.output_ids, None)]
            case Rebind():
                return [self._rebound(message)]
            case Abort():
                return self.end(message.key, "aborted") or [self._how_ended(message.key)]
            case Stop():
                return self.end(message.key, "finished") or [self._how_ended(message.key)]
        return []

    def _how_ended(self, key: Key) -> Ended:
        return self.ended.get(key, Ended(*key, outcome="unknown"))

    def _take(
        self, command: AboutRequest, request: Request, outputs: bytes, target: PeerAddress | None
    ) -> Message:
        key = command.key
        if key in self.held:
            return Accepted(*key, self.held[key].target)
        if key in self.ended:
            return self.ended[key]
        if self.draining or not self._may_take(key):
            return Refused(*key, "draining" if self.draining else "a later attempt was dispatched")
        self.held[key] = Held(request, len(outputs) // 4, "queued", target)
        return Accepted(*key, target)

    def _may_take(self, key: Key) -> bool:
        """Fences: an older attempt is not taken, and ends for a later one."""
        if key[1] < self.highest.get(key[0], key[1]):
            return False
        self.highest[key[0]] = key[1]
        for older in [k for k in self.held if k[0] == key[0] and k[1] < key[1]]:
            self.end(older, "aborted")
        return True

    def _rebound(self, message: Rebind) -> Message:
        held = self.held.get(message.key)
        if held is None:
            return self._how_ended(message.key)
        held.target = message.target
        return Accepted(*message.key, message.target)

    def end(
        self,
        key: Key,
        outcome: Literal["finished", "aborted", "failed", "handed_over"],
        *,
        retryable: bool = True,
    ) -> list[Message]:
        if self.held.pop(key, None) is None:
            return []
        ended = self.ended[key] = Ended(*key, outcome=outcome, reason="said so", retryable=retryable)
        return [ended]

    # ------------------------------------------------------------ working

    def go_on(self, key: Key, peers: dict[str, ScriptedWorker]) -> list[tuple[ScriptedWorker, Message]]:
        """One small step of one attempt: who says what."""
        held = self.held[key]
        if held.transfer:
            return []
        match held.stage:
            case "queued":
                held.stage = "prefilling"
                return [(self, Started(*key, "prefilling"))]
            case "prefilling":
                held.stage = "kv_ready" if held.target is not None else "decoding"
                return self._token(key, held)
            case "decoding":
                return self._token(key, held)
            case "kv_ready":
                return self._hand_over(key, held, peers)

    def _token(self, key: Key, held: Held) -> list[tuple[ScriptedWorker, Message]]:
        index, held.outputs = held.outputs, held.outputs + 1
        over = held.outputs >= held.request.sampling.max_tokens
        finish: Literal["length"] | None = "length" if over else None
        said: list[tuple[ScriptedWorker, Message]] = [(self, self._row(key, index, finish))]
        return said + [(self, ended) for ended in (self.end(key, "finished") if over else [])]

    def _row(self, key: Key, index: int, finish: Literal["length"] | None) -> Tokens:
        """Every third one says the token before once more."""
        self.seq += 1
        first = index - 1 if index % 3 == 2 else index
        ids = tuple(token_of(key[0], i) for i in range(first, index + 1))
        return Tokens(self.seq, (TokenRow(*key, first, ids, None, finish),))

    def _hand_over(
        self, key: Key, held: Held, peers: dict[str, ScriptedWorker]
    ) -> list[tuple[ScriptedWorker, Message]]:
        """Asks for room first, then hands over: two steps."""
        assert held.target is not None
        peer = peers[held.target.worker]
        if not peer.alive or peer.incarnation != held.target.incarnation:
            return []
        theirs = peer.held.get(key)
        if theirs is None:
            if key in peer.ended or not peer._may_take(key):
                return [(self, ended) for ended in self.end(key, "failed")]
            peer.held[key] = Held(held.request, held.outputs, "queued", None, transfer=True)
            return []
        said: list[tuple[ScriptedWorker, Message]] = []
        if theirs.transfer:
            theirs.transfer, theirs.stage = False, "decoding"
            said = [(peer, peer._row(key, held.outputs - 1, None)), (peer, Started(*key, "decode_ready"))]
        return said + [(self, ended) for ended in self.end(key, "handed_over")]
