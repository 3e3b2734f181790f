"""How a worker becomes known to the coordinator and stays so: registers until it is answered, then sends heartbeats,
and registers anew with a coordinator that does not know it any more, or that has fallen silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from common.errors import BadConfiguration
from common.messages import HeartbeatAck, Register, Registered, RegistrationRefused
from transfer.links import Links

log = logging.getLogger(__name__)

REGISTER_AGAIN_S = 1.0
SILENCE_S = 2.5  # under the time after which the coordinator takes a silent worker for lost
_REMEDIES = {
    "worker_id": "give it another --worker-id",
    "transfer": "let one --transfer be possible for both",
}
_OTHERWISE = (
    "KV may only pass between equals: start it with the model, dtype, block size and release of the others"
)


class Registration:
    def __init__(self, links: Links, card: Register, send_heartbeat: Callable[[], None]) -> None:
        self._links = links
        self._card = card
        self._send_heartbeat = send_heartbeat
        self._registered = asyncio.Event()
        self._heartbeat_interval_s = 0.5
        self._answered_at = time.monotonic()

    async def keep(self) -> None:
        """Heartbeats; while they stay unanswered, registrations too: the coordinator may be another one by now."""
        while True:
            if self._registered.is_set():
                self._send_heartbeat()
                self._notice_silence()
                await asyncio.sleep(self._heartbeat_interval_s)
            else:
                self._links.to_coordinator(self._card)
                try:
                    await asyncio.wait_for(self._registered.wait(), REGISTER_AGAIN_S)
                except TimeoutError:
                    log.info("waiting for the coordinator")
                    if time.monotonic() - self._answered_at > SILENCE_S:
                        self._connect_again()

    def accepted(self, message: Registered) -> None:
        self._answered_at = time.monotonic()
        self._heartbeat_interval_s = message.heartbeat_interval_s
        self._links.connect_fronts(message.fronts)
        if not self._registered.is_set():
            self._say_limit(message.max_model_len)
        self._registered.set()

    def answered(self, message: HeartbeatAck) -> None:
        self._answered_at = time.monotonic()
        if not message.known:
            self._registered.clear()
            self._links.to_coordinator(self._card)

    def _notice_silence(self) -> None:
        silent_s = time.monotonic() - self._answered_at
        if silent_s > SILENCE_S:
            log.warning(
                "the coordinator has not answered for %.1f s; connecting and registering again", silent_s
            )
            self._registered.clear()
            self._connect_again()

    def _connect_again(self) -> None:
        self._answered_at = time.monotonic()
        self._links.reconnect_control()

    def _say_limit(self, tokens: int) -> None:
        log.info("registered; longest prompt and answer together: %d tokens", tokens)
        if tokens < self._card.max_model_len:
            log.warning(
                "that is less than the %d tokens that this worker's model takes: some worker's pool is smaller "
                "(--kv-cache-memory, --num-kv-blocks), or its --max-model-len",
                self._card.max_model_len,
            )


def why_refused(message: RegistrationRefused) -> BadConfiguration:
    return BadConfiguration(
        f"refused by the coordinator: {message.field} is {message.ours} there and {message.theirs} here; "
        f"{_REMEDIES.get(message.field, _OTHERWISE)}"
    )
