"""What deciding about one KV block costs, its bytes not moved: paced and counted at the sender, placed, counted and
credited at the receiver. The production objects, told what the wire would have told them."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

from bench.overhead_workers import BLOCK_BYTES, request
from common.effects import Effect, SendBlock, ToReceiver, ToSender
from common.messages import Block, Delivered, Handover, Offer, PeerAddress
from common.request import Attempt, Incarnation, WorkerId, pack_ids
from transfer.receiver import TransferReceiver
from transfer.sender import TransferSender

SENDER = WorkerId("p/1")
TARGET = PeerAddress(WorkerId("d"), Incarnation(1), "c", "d")
BLOCKS = 16  # of a prompt of 256 tokens


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Processor microseconds per block, with `others` transfers under way that stand still."""

    others: int
    sender_us: float
    receiver_us: float


def block_cost(others: int, *, transfers: int = 50, rounds: int = 5) -> BlockCost:
    scene = _Scene(others)
    costs = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            scene.sender_ns = scene.receiver_ns = 0
            for _ in range(transfers):
                scene.one_transfer()
            blocks = transfers * BLOCKS * 1000
            costs.append((scene.sender_ns / blocks, scene.receiver_ns / blocks))
    finally:
        gc.enable()
    sender_us, receiver_us = (min(column) for column in zip(*costs, strict=True))
    return BlockCost(others, sender_us, receiver_us)


class _Scene:
    def __init__(self, others: int) -> None:
        self._sender = TransferSender(block_bytes=BLOCK_BYTES)
        self._receiver = TransferReceiver(block_bytes=BLOCK_BYTES)
        self._count = 0
        self.sender_ns = self.receiver_ns = 0
        for _ in range(others):
            self._open()

    def one_transfer(self) -> None:
        began = time.process_time_ns()
        offer = self._open()
        self._sender.blocks_computed(offer.key, BLOCKS, 0.0)
        opened = time.process_time_ns()
        self.sender_ns += opened - began
        answers = self._receiver.accept(offer.key, SENDER, list(range(BLOCKS)), 0, BLOCKS, 0.0)
        self.receiver_ns += time.process_time_ns() - opened
        said = self._to_sender(answers)
        began = time.process_time_ns()
        said += self._sender.prompt_computed(_handover(offer), 0.0)
        self.sender_ns += time.process_time_ns() - began
        while said:
            said = self._to_sender(self._to_receiver(said))
        assert offer.key not in self._sender and offer.key not in self._receiver

    def _open(self) -> Offer:
        self._count += 1
        asked = request(self._count, 16 * BLOCKS, 64)
        offer = Offer(
            asked.request_id,
            Attempt(1),
            request=asked,
            output_ids=b"",
            num_tokens=asked.prompt_tokens,
            hashes=b"",
            fingerprint="f",
        )
        self._sender.open(offer, TARGET, list(range(BLOCKS)), 0.0)
        return offer

    def _to_receiver(self, said: list[Effect]) -> list[Effect]:
        """What its blocks and the hand-over make the receiver say."""
        began = time.process_time_ns()
        answers: list[Effect] = []
        for effect in said:
            if isinstance(effect, SendBlock):
                header = Block(*effect.key, index=effect.index, part=0, checksum=0, size=BLOCK_BYTES)
                self._receiver.place(header, SENDER)
                self._receiver.block(header, SENDER, True, 0.0)
            elif isinstance(effect, ToReceiver) and isinstance(effect.message, Handover):
                answers += self._receiver.handed_over(effect.message, 0.0)
        answers += self._receiver.flush()
        answers += [ToSender(SENDER, Delivered(*ready.key)) for ready in self._receiver.ready()]
        self.receiver_ns += time.process_time_ns() - began
        return answers

    def _to_sender(self, answers: list[Effect]) -> list[Effect]:
        began = time.process_time_ns()
        said: list[Effect] = []
        for effect in answers:
            assert isinstance(effect, ToSender)
            message = effect.message
            effects, _ = self._sender.receive(message, TARGET.worker, 0.0)  # type: ignore[arg-type]
            said += effects
        said += self._sender.pump(0.0)
        self.sender_ns += time.process_time_ns() - began
        return said


def _handover(offer: Offer) -> Handover:
    return Handover(*offer.key, output_ids=pack_ids([5]), logprobs=None, num_blocks=BLOCKS, cached_tokens=0)
