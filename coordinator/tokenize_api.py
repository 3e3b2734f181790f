"""`POST /tokenize` and `POST /detokenize`, as vLLM answers them: what a prompt is to the model, and back.

A text may be longer than the context: how much too long it is may be just what is asked. The body's limit bounds it,
and a large one is worked on in a thread, as any prompt is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from fastapi import FastAPI, Request
from starlette.responses import Response

from coordinator.door.json_answer import JsonAnswer
from coordinator.door.limits import Limits
from coordinator.errors_http import model_not_found
from coordinator.gateway import Gateway
from coordinator.openai.tokenize_schema import (
    DetokenizeFields,
    TokenizeFields,
    read_detokenize,
    read_tokenize,
)
from coordinator.tokenizer import CHARS_PER_TOKEN, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenizeApi:
    """Answers of both routes, as JSON."""

    gateway: Gateway
    tokenizer: Tokenizer
    served_models: tuple[str, ...]

    async def tokenize(self, fields: TokenizeFields) -> bytes:
        self._check_model(fields.model)
        if fields.prompt is not None:
            ids = await self.tokenizer.encode(fields.prompt, special_tokens=fields.special_tokens)
        else:
            ids = await self.tokenizer.encode_chat(fields.chat(), special_tokens=fields.special_tokens)
        strings = fields.return_token_strs

        def answer() -> bytes:
            found = {"count": len(ids), "max_model_len": self.gateway.max_model_len(), "tokens": ids}
            token_strs = [self.tokenizer.token_string(id) for id in ids] if strings else None
            return json.dumps({**found, "token_strs": token_strs}).encode()

        return await self.tokenizer.off_the_loop(CHARS_PER_TOKEN * len(ids), answer)

    async def detokenize(self, fields: DetokenizeFields) -> bytes:
        """The whole text, special tokens by their names."""
        self._check_model(fields.model)
        self.tokenizer.check_ids(fields.tokens, "tokens")

        def answer() -> bytes:
            text = b"".join(map(self.tokenizer.token_bytes, fields.tokens)).decode("utf-8", "replace")
            return json.dumps({"prompt": text}).encode()

        return await self.tokenizer.off_the_loop(CHARS_PER_TOKEN * len(fields.tokens), answer)

    def _check_model(self, model: str | None) -> None:
        if model is not None and model not in self.served_models:
            raise model_not_found(model, self.served_models)


def add_tokenize_routes(app: FastAPI, api: TokenizeApi, limits: Limits) -> None:
    @app.post("/tokenize")
    async def tokenize(_: Request) -> Response:
        return JsonAnswer(read_tokenize, api.tokenize, limits)

    @app.post("/detokenize")
    async def detokenize(_: Request) -> Response:
        return JsonAnswer(read_detokenize, api.detokenize, limits)
