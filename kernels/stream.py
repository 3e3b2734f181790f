"""Between host and device without waiting: copies that are put into the device's stream, and places in it to wait for.

A device takes what is put into a stream in that order, and later. A copy to or from the host's ordinary memory would
make the host wait for all that was put there before; from pinned memory it does not. Where there is no stream, on a
CPU, everything is done at once.
"""

from __future__ import annotations

import numpy as np
import torch


class StreamPoint:
    """Where the current stream of `device` ends now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()


def send_up(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device."""
    # Pinned memory comes from torch's cache, which does not give it out again before the copy is over.
    pinned = torch.from_numpy(array).pin_memory() if device.type == "cuda" else torch.from_numpy(array.copy())
    return pinned.to(device, non_blocking=True)


def bring_down(there: torch.Tensor) -> torch.Tensor:
    """A copy on the host: to be read when the device has come past it."""
    here = torch.empty(there.shape, dtype=there.dtype, pin_memory=there.device.type == "cuda")
    return here.copy_(there, non_blocking=True)
