"""The JSON of a request to a completion route. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from bench.load.prompts import PromptMaker
from bench.load.records import Planned


@dataclass(frozen=True, slots=True)
class BodyShape:
    """What all requests of a run have in common. `extra` wins over what stands here."""

    model: str
    chat: bool
    temperature: float
    ignore_eos: bool
    extra: dict[str, Any]

    def body(self, planned: Planned, prompts: PromptMaker) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.output_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        prompt = prompts.as_json(planned)
        asked = f'"messages":[{{"role":"user","content":{prompt}}}]' if self.chat else f'"prompt":{prompt}'
        return f"{json.dumps(fields)[:-1]},{asked}}}".encode()
