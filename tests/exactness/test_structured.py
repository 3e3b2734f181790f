"""An answer that is held to a grammar is the same bits on every path: what a matcher knows never travels, it is
replayed from the output by whoever goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.request import Grammar
from coordinator.openai.formats import grammar_of_schema
from kernels.grammar import GrammarCompiler
from kernels.model import CausalModel
from tests.exactness.conftest import greedy, seeded
from tests.exactness.real_cluster import Ask, RealCluster, Said, collocated, pools

pytestmark = pytest.mark.parametrize("model", ["bfloat16"], indirect=True)

END = 2
PERSON = grammar_of_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "ü"]}, "minItems": 9, "maxItems": 9},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
CALL = Grammar("lark", 'start: "<call>" ARG ("," ARG){7} "</call>"\nARG: /[0-9]{2,4}/')
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def asks(text_ids: list[int]) -> list[Ask]:
    """Greedy and seeded, the seeded ones with penalties, which count what the grammar let through."""
    settings = [(PERSON, greedy(MAX_TOKENS)), (PERSON, seeded(1, MAX_TOKENS)), (CALL, seeded(2, MAX_TOKENS))]
    return [
        Ask(
            tuple(text_ids[50 * place : 50 * place + 44]),
            replace(sampling, grammar=grammar, end_token_ids=(END,), min_tokens=40),
        )
        for place, (grammar, sampling) in enumerate(settings)
    ]


@pytest.fixture(scope="module")
def compiler(smollm2_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(smollm2_dir, 49_152)


@pytest.fixture(scope="module")
def wanted(model: CausalModel, asks: list[Ask], compiler: GrammarCompiler) -> list[Said]:
    """Each alone, on a worker that has seen no other."""
    return given(collocated(model, caching=False), compiler).alone(asks)


def given(cluster: RealCluster, compiler: GrammarCompiler) -> RealCluster:
    for worker in cluster.workers.values():
        cluster.worker(worker.name).runner.grammars = compiler
    return cluster


def test_the_answers_say_something(wanted: Sequence[Said], smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    texts = [tokenizer.decode(list(answer.ids)) for answer in wanted]
    assert all(answer.end == "stop" and answer.ids[-1] == END for answer in wanted)
    first, second = json.loads(texts[0]), json.loads(texts[1])
    assert set(first) == set(second) == {"name", "age", "tags"} and texts[0] != texts[1]
    assert texts[2].startswith("<call>") and texts[2].endswith("</call>")
    assert all(len(answer.ids) > 20 for answer in wanted), "each grows into its fifth block"


def test_both_pools(
    model: CausalModel, asks: list[Ask], compiler: GrammarCompiler, wanted: list[Said]
) -> None:
    """The first token is drawn by the prefill worker, under the same mask; then again from the prefix cache."""
    cluster = given(pools(model, chunk=32), compiler)
    assert cluster.together(asks) == wanted
    assert cluster.counted("decode-0", "kv_transfer_bytes_total") > 0
    assert cluster.together(asks[2:]) == wanted[2:]
    assert cluster.counted("prefill-0", "prefix_cache_hits_total") > 0


def test_collocated(
    model: CausalModel, asks: list[Ask], compiler: GrammarCompiler, wanted: list[Said]
) -> None:
    assert given(collocated(model, chunk=16), compiler).together(asks) == wanted


@pytest.mark.parametrize("path", ["pools", "collocated"])
def test_preempted(
    path: str, model: CausalModel, asks: list[Ask], compiler: GrammarCompiler, wanted: list[Said]
) -> None:
    """Three blocks to begin with, five to end: of all together, some are thrown out on the way."""
    if path == "pools":
        cluster = pools(model, decode_blocks=12, caching=False)
    else:
        cluster = collocated(model, blocks=12, caching=False)
    assert given(cluster, compiler).together(asks) == wanted
    assert cluster.counted("decode-0", "num_preemptions_total") > 0


@pytest.mark.parametrize("path", ["pools", "collocated"])
def test_BR_078_migrated(
    path: str, model: CausalModel, asks: list[Ask], compiler: GrammarCompiler, wanted: list[Said]
) -> None:
    """Half of the answer from a worker that dies, half from another that replays it."""
    make = pools if path == "pools" else collocated
    cluster = given(make(model, decode=2), compiler)
    answers = [cluster.open(ask) for ask in asks]
    cluster.run_until(lambda: all(len(answer.ids) >= 6 for answer in answers))
    assert all(answer.end is None for answer in answers)
    cluster.kill(max(("decode-0", "decode-1"), key=lambda name: len(cluster.worker(name).node.live_keys())))
    cluster.run_until(lambda: all(answer.end is not None for answer in answers))
    cluster.settle()
    assert [Said(tuple(a.ids), tuple(a.logprobs), a.end) for a in answers] == wanted
    timelines = [cluster.cluster.tracker.timeline(request_id, cluster.now) for request_id in cluster.answers]
    assert any(timeline is not None and timeline["attempts"] > 1 for timeline in timelines), "nobody migrated"


def test_a_matcher_that_forgets_is_seen(
    model: CausalModel,
    asks: list[Ask],
    compiler: GrammarCompiler,
    wanted: list[Said],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison can fail: a decode worker that begins each grammar anew instead of replaying the first token."""
    fresh = compiler.matcher
    cluster = given(pools(model), compiler)
    monkeypatch.setattr(
        compiler, "matcher", lambda kind, text, outputs: _forgetful(fresh(kind, text, []), outputs)
    )
    with pytest.raises(AssertionError):
        assert cluster.together(asks[:1]) == wanted[:1]


def _forgetful(matcher: object, outputs: Sequence[int]) -> object:
    matcher._consumed.extend([END] * len(outputs))  # type: ignore[attr-defined]
    return matcher
