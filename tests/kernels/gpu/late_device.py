"""A device that is late: what it is asked for is there when somebody has waited for it, and rubbish before."""

from __future__ import annotations

import pytest
import torch

import kernels.gpu.sampler
import kernels.runner

RUBBISH = 123_456


class LateDevice:
    """In place of the stream of a runner on the CPU, for one test. Computes at once: only what comes down is late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waits = 0
        device = self

        class Point:
            def __init__(self, _: torch.device) -> None:
                self._mine = list(device.coming)

            def wait(self) -> None:
                device.waits += 1
                with torch.inference_mode():
                    for here, there in self._mine:
                        here.copy_(there)
                device.coming = [one for one in device.coming if not any(one is mine for mine in self._mine)]

        monkeypatch.setattr(kernels.runner, "StreamPoint", Point)
        monkeypatch.setattr(kernels.gpu.sampler, "bring_down", self._bring_down)

    def _bring_down(self, there: torch.Tensor) -> torch.Tensor:
        here = torch.full_like(there, RUBBISH)
        self.coming.append((here, there.clone()))
        return here
