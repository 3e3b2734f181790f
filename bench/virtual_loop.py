"""The loop around one worker, in virtual time: what `transfer/worker_loop.py` does with sockets and threads. Pure.

Also what can happen to its process: it is told to stop and drains, is killed, stands still for a while, starts again.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.virtual_clock import VirtualClock
from bench.virtual_network import COORDINATOR, Parcel, VirtualNetwork
from bench.virtual_worker import BLOCK_BYTES, VirtualWorker
from common.batching import Batch
from common.effects import Effect, SendBlock, ToCoordinator, ToFront, ToReceiver, ToSender
from common.messages import Block, Drain, HeartbeatAck, Message, Registered, SetRole
from common.request import Incarnation, WorkerId

HEARTBEAT_S = 0.5
REGISTER_AGAIN_S = 1.0
SILENCE_S = 2.5
MAX_UNREAD = 4096
_NEVER = float("inf")


class VirtualLoop:
    """`on_exit` hears of the end of a process that left by itself."""

    def __init__(
        self,
        worker: VirtualWorker,
        clock: VirtualClock,
        network: VirtualNetwork,
        on_exit: Callable[[VirtualWorker], None],
    ) -> None:
        self.worker = worker
        self._clock = clock
        self._network = network
        self._on_exit = on_exit
        self._begin()

    def _begin(self) -> None:
        self._network.join(self.worker.name, self._receive, self._peer_gone)
        self.alive = True
        self.frozen = False
        self.changes_role = False  # it is to leave in order to come back in the other one
        self._registered = False
        self._answered_at = self._clock.now
        self.batches: list[Batch] = []  # of the steps that are out, oldest first
        self._steps_until = self._clock.now  # one after the other
        self._late_steps: list[Callable[[], None]] = []  # came back while frozen
        self._unread: list[tuple[Parcel, bool]] = []  # came while frozen
        self._timer = _NEVER
        self._drain_until = _NEVER
        self._beat_in(0.0)

    # ------------------------------------------------------------ what happens to its process

    def stop(self, deadline_s: float) -> None:
        """SIGTERM, or a Drain: it ends what it has within `deadline_s`, gives back the rest and leaves. Asked again,
        the earlier deadline counts."""
        until = self._clock.now + deadline_s
        if until < self._drain_until:
            self._drain_until = until
            self._at(until, self._out_of_time)
        if not self.worker.node.draining:
            self.worker.node.draining = True
            self._send_heartbeat()
        self.turn()

    def kill(self) -> None:
        self.alive = False
        self._network.left(self.worker.name)

    def start(self, *, other_role: bool = False) -> None:
        """A new life of a worker that may still have been there."""
        if other_role:
            self.worker.change_role()
        self.worker.start()
        self._begin()

    def freeze(self) -> None:
        """It stands still: what is sent to it waits, and a step that is out comes back late."""
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        if not self.alive:
            return
        late, self._late_steps = self._late_steps, []
        for step in late:
            step()
        unread, self._unread = self._unread, []
        for parcel, intact in unread:
            self._receive(parcel, intact)
        self._beat()
        self._timer = _NEVER
        self._out_of_time()
        if self.alive:
            self.turn()

    def _at(self, time: float, action: Callable[[], None]) -> None:
        """Unless this life is over by then; what a frozen one misses, `thaw` makes up for."""
        life = self.worker.incarnation
        self._clock.at(time, lambda: action() if self._runs(life) else None)

    def _runs(self, life: Incarnation) -> bool:
        return self.alive and not self.frozen and self.worker.incarnation == life

    # ------------------------------------------------------------ drain

    def _out_of_time(self) -> None:
        if self._clock.now >= self._drain_until:
            self._leave()

    def _leave(self) -> None:
        self.give_back("the worker shuts down")
        self._send_heartbeat()
        self.kill()
        self._on_exit(self.worker)

    def give_back(self, reason: str) -> None:
        """Aborts all that is here, so that it goes on elsewhere."""
        node = self.worker.node
        for key in node.live_keys():
            self.carry_out(node.abort(key, reason, self._clock.now))
        self.carry_out(node.turn(self._clock.now))

    # ------------------------------------------------------------ heartbeats

    def _beat(self) -> None:
        if self._clock.now < self._beat_at:
            return
        if self._registered:
            self._send_heartbeat()
            if self._clock.now - self._answered_at > SILENCE_S:
                self._registered = False
            self._beat_in(HEARTBEAT_S)
        else:
            self._send(COORDINATOR, self.worker.card())
            self._beat_in(REGISTER_AGAIN_S)

    def _beat_in(self, seconds: float) -> None:
        self._beat_at = self._clock.now + seconds
        self._at(self._beat_at, self._beat)

    def _send_heartbeat(self) -> None:
        self._send(COORDINATOR, self.worker.node.heartbeat(0.0))

    # ------------------------------------------------------------ coming in

    def _receive(self, parcel: Parcel, intact: bool) -> None:
        if (
            not self.alive or parcel.target != self.worker.name
        ):  # it is late, and for who it was in another role
            return
        if self.frozen:
            if len(self._unread) < MAX_UNREAD:
                self._unread.append((parcel, intact))
            return
        match parcel.message:
            case Block() as header:
                self._block(header, parcel, intact)
            case Registered():
                self._heard_registered()
            case HeartbeatAck() as ack:
                self._heard_ack(ack)
            case Drain(deadline_s):
                self.stop(deadline_s)
            case SetRole(role, deadline_s):
                if role != self.worker.role:
                    self.changes_role = True
                    self.stop(deadline_s)
            case message:
                self.carry_out(self.worker.node.handle(message, WorkerId(parcel.source), self._clock.now))
        if self.alive:
            self.turn()

    def _peer_gone(self, peer: str) -> None:
        if peer != COORDINATOR and self._runs(self.worker.incarnation):
            self.carry_out(self.worker.node.peer_gone(WorkerId(peer), self._clock.now))
            self.turn()

    def _heard_registered(self) -> None:
        self._answered_at = self._clock.now
        if not self._registered:
            self._registered = True
            self._beat_in(0.0)

    def _heard_ack(self, ack: HeartbeatAck) -> None:
        self._answered_at = self._clock.now
        if not ack.known:
            self._registered = False
            self._send(COORDINATOR, self.worker.card())
        for key in ack.abort:
            self.carry_out(self.worker.node.abort(key, "not wanted", self._clock.now))

    def _block(self, header: Block, parcel: Parcel, intact: bool) -> None:
        """The bytes are put where they belong, good or not, as the real loop does; the answer tells."""
        worker, sender = self.worker, WorkerId(parcel.source)
        place = worker.node.place(header, sender)
        if place is not None:
            worker.write_block(place, parcel.content if intact else worker.damaged(parcel.content))
        worker.node.block(header, sender, place is None or intact, self._clock.now)

    # ------------------------------------------------------------ one turn

    def turn(self) -> None:
        """What an engine's loop does after every event."""
        worker, now = self.worker, self._clock.now
        while len(self.batches) < worker.max_inflight:
            batch = worker.node.schedule(now)
            if batch is None:
                break
            self.batches.append(batch)
            self._step(batch)
        self.carry_out(worker.node.turn(now))
        deadline = worker.node.next_deadline()
        if deadline is not None and (self._timer == _NEVER or not now < self._timer <= deadline):
            self._timer = max(deadline, now + 0.001)
            self._at(self._timer, self._on_time)
        if worker.node.draining and worker.node.idle:
            self._leave()

    def _on_time(self) -> None:
        if self._clock.now >= self._timer:
            self._timer = _NEVER
            self.turn()

    def _step(self, batch: Batch) -> None:
        step_s = self.worker.step_time.seconds(batch)
        life = self.worker.incarnation
        self._steps_until = max(self._clock.now, self._steps_until) + step_s
        self._clock.at(self._steps_until, lambda: self._step_done(batch, step_s, life))

    def _step_done(self, batch: Batch, step_s: float, life: Incarnation) -> None:
        if not self.alive or self.worker.incarnation != life:
            return
        if self.frozen:
            self._late_steps.append(lambda: self._step_done(batch, step_s, life))
            return
        self.batches.remove(batch)
        results = self.worker.compute(batch)
        self.carry_out(self.worker.node.finish(batch, results, step_s, self._clock.now))
        self.turn()

    # ------------------------------------------------------------ going out

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case ToCoordinator(message) | ToFront(_, message):
                    self._send(COORDINATOR, message)
                case ToReceiver(target, message):
                    self._send(target.worker, message)
                case ToSender(name, message):
                    self._send(name, message)
                case SendBlock(target, key, index, block):
                    header = Block(*key, index=index, part=0, checksum=0, size=BLOCK_BYTES)
                    self._send(target.worker, header, self.worker.read_block(block))

    def _send(self, target: str, message: Message, content: object = None) -> None:
        worker = self.worker
        self._network.send(Parcel(worker.name, target, message, worker.sender, content))
