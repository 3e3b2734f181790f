"""What clients ask of a service for a long time: ten fixed greedy prompts over and over, and everything else beside."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.e2e.service import MODEL

FIXED = 10
CLIENTS = 4
LIMIT_S = 180.0


@dataclass(slots=True)
class Load:
    """`expected` are the fixed answers; `wrong` those that were not as expected; `counted` what was asked, and how it
    went. An error is one only where nothing was killed that could explain it: `excused` says so."""

    url: str
    ids: list[int]
    random: Random
    expected: dict[int, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    excused: bool = False
    over: bool = False

    def body(self, index: int) -> dict[str, Any]:
        """Fixed prompt `index`: of different lengths, greedy."""
        start = 90 * index
        prompt = self.ids[start : start + (5, 15, 16, 17, 33, 64, 100, 150, 257, 400)[index]]
        return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def learn(self) -> None:
        async with self._client() as client:
            for index in range(FIXED):
                answer = await client.post("/v1/completions", json=self.body(index))
                assert answer.status_code == 200, answer.text
                self.expected[index] = answer.json()["choices"][0]["text"]

    async def ask_fixed(self) -> None:
        """All ten, one after the other, until it is over."""
        async with self._client() as client:
            while not self.over:
                for index in range(FIXED):
                    await self._fixed(client, index)

    async def _fixed(self, client: httpx.AsyncClient, index: int) -> None:
        answer = await self._post(client, "fixed", self.body(index))
        if answer is None or self.over:
            return
        if (text := answer["choices"][0]["text"]) != self.expected[index]:
            self.wrong.append(f"prompt {index}: {len(text)} characters that are not the first ones")

    async def ask_anything(self) -> None:
        async with self._client() as client:
            while not self.over:
                kind = self.random.choice(("sampled", "choices", "structured", "stream", "leave", "long"))
                if kind in ("stream", "leave"):
                    await self._stream(client, leaves=kind == "leave")
                else:
                    await self._post(client, kind, self._anything(kind))

    def _anything(self, kind: str) -> dict[str, Any]:
        start, length = self.random.randrange(1500), self.random.choice((3, 20, 60, 200))
        body: dict[str, Any] = {"model": MODEL, "prompt": self.ids[start : start + length], "max_tokens": 16}
        if kind == "choices":
            return body | {"n": 3, "seed": self.random.randrange(100)}
        if kind == "structured":
            schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
            return body | {"structured_outputs": {"json": schema}, "max_tokens": 30}
        if kind == "long":
            return body | {"prompt": self.ids[start : start + 700], "ignore_eos": True, "max_tokens": 40}
        return body | {"temperature": 1.2, "top_p": 0.9, "logprobs": 2}

    async def _post(self, client: httpx.AsyncClient, kind: str, body: dict[str, Any]) -> Any:
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            await self._failed(kind, type(error).__name__)
            return None
        if answer.status_code != 200:
            await self._failed(kind, f"{answer.status_code} {answer.text[:200]}")
            return None
        self.counted[kind] += 1
        return answer.json()

    async def _stream(self, client: httpx.AsyncClient, *, leaves: bool) -> None:
        body = self._anything("long" if leaves else "sampled") | {"stream": True}
        stay = self.random.randrange(6) if leaves else 1 << 30
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    stay -= line.startswith("data: ")
                    if line.startswith('data: {"error"'):
                        await self._failed("stream", json.loads(line[6:])["error"]["code"])
                        return
                    if stay < 0:
                        self.counted["left"] += 1
                        return
        except httpx.HTTPError as error:
            await self._failed("stream", type(error).__name__)
            return
        self.counted["stream"] += 1

    async def _failed(self, kind: str, why: str) -> None:
        """While the coordinator is away nobody can be served; everything else is to be survived."""
        if not self.over:
            self.counted["excused" if self.excused else "failed"] += 1
            if not self.excused:
                self.errors.append(f"{kind}: {why}")
        await asyncio.sleep(0.2)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=LIMIT_S, trust_env=False)
