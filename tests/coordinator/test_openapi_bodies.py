"""What fits the document is accepted, and what is accepted fits the document.

Bodies are made from the document, each field at its borders and beyond, then many fields at once, and given both to
a JSON schema validator and to the code that reads requests. Where they differ, the reason is one that a schema
cannot say: each is in `beyond_schema`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any

import pytest

from common.config import Tier
from common.errors import BadRequest
from common.request import FrontId
from coordinator.docs.openapi import Facts, document
from coordinator.door.json_body import parse_object
from coordinator.openai.schema import read_chat, read_text
from coordinator.request_builder import RequestBuilder
from coordinator.tiers import Tiers
from coordinator.tokenizer import Tokenizer
from tests.coordinator.beyond_schema import BEYOND
from tests.coordinator.schema_bodies import Bodies, validator
from tests.coordinator.scripted_gateway import ScriptedGateway

MODELS = ("m", "org/other")
TIERS = Tiers({"default": Tier(), "fast": Tier()}, one_tenant=True)
CONTEXT = 8192
NUM_MIXED = 500
LEAST_OF_EACH = 300


@pytest.mark.parametrize("name", ["ChatFields", "TextFields"])
def test_document_and_server_agree(tokenizer: Tokenizer, name: str) -> None:
    said = document(Facts(MODELS, TIERS.names, tokenizer.vocab_size, CONTEXT, 1 << 20, 1.0, False))
    builder = RequestBuilder(ScriptedGateway(context=CONTEXT), tokenizer, MODELS, TIERS, FrontId("f"))
    read: Any
    build: Any
    read, build = (read_chat, builder.chat) if name == "ChatFields" else (read_text, builder.text)
    bodies, fits = Bodies(said, name, seed=0), validator(said, name)
    seen: Counter[tuple[bool, bool]] = Counter()

    async def judge(body: dict[str, Any]) -> None:
        try:
            await build(read(parse_object(json.dumps(body).encode())), None)
            refusal = None
        except BadRequest as error:
            refusal = error.message
        fitting = fits.is_valid(body)
        seen[fitting, refusal is None] += 1
        if refusal is None:
            assert fitting, f"accepted, and not in the document: {shortest_complaint(body)}"
        elif fitting:
            assert any(re.search(reason, refusal) for reason in BEYOND), f"{refusal}\n{json.dumps(body)}"

    def shortest_complaint(body: dict[str, Any]) -> str:
        complaints = [f"{list(error.absolute_path)}: {error.message}" for error in fits.iter_errors(body)]
        return min(complaints, key=len)

    async def judge_all() -> None:
        for body in bodies.one_by_one():
            await judge(body)
        for _ in range(NUM_MIXED // 2):
            await judge(bodies.fitting())
            await judge(bodies.odd())

    asyncio.run(judge_all())
    assert min(seen[True, True], seen[False, False]) > LEAST_OF_EACH, seen
