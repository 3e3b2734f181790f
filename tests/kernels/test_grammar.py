"""Grammars as masks: what they allow, at which token, and that a failing one fails alone."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from bench.gpu_check.driving import Batch, Joined, Sampling
from common.request import Grammar
from kernels import grammar as grammars
from kernels.grammar import BadGrammar, GrammarCompiler, GrammarFault, end_ids
from kernels.runner import ModelRunner, load_runner
from kernels.sampler import choose_sampler
from kernels.sampling import Draw, Sampled, TokenCounts, adjust
from kernels.slots import NO_GRAMMARS
from kernels.step import TokenLogprob
from tests.kernels.driving import generate, random_prompts

VOCAB = 49_152
END = 2
YES_NO = Grammar("regex", "(yes|no)")
SCHEMA = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["Ada", "Zoë"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
            "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
        }
    ),
)
TOO_LARGE = Grammar("lark", 'start: "yes" B\nB: /(a{1000}){1000}/')  # may show only after a token
Outputs = list[tuple[int, TokenLogprob | None]]


@pytest.fixture(scope="module")
def compiler(smollm2_dir: Path) -> GrammarCompiler:
    made = GrammarCompiler(smollm2_dir, VOCAB)
    made.prepare()
    return made


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> ModelRunner:
    return load_runner(
        str(smollm2_dir), device="cpu", num_blocks=40, max_num_seqs=8, max_model_len=512, threads=1
    )


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31 - 1])
def test_outputs_of_no_vocabulary_are_a_fault_of_their_grammar(compiler: GrammarCompiler, wrong: int) -> None:
    """They come from the wire as a sequence joins, where nothing else may be raised."""
    with pytest.raises(GrammarFault):
        compiler.matcher("regex", "[a-z]+", [wrong])


def test_allowed_are_exactly_the_tokens_that_can_go_on(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher("regex", "(yes|no)", [])
    texts = [tokenizer.decode([id], skip_special_tokens=False) for id in range(VOCAB)]
    allowed = {texts[id] for id in np.flatnonzero(matcher.allowed((END,)))}
    assert allowed == {text for text in texts if text and ("yes".startswith(text) or "no".startswith(text))}
    matcher.consume(tokenizer.encode("ye").ids)
    assert {texts[id] for id in np.flatnonzero(matcher.allowed((END,)))} == {"s"}


def test_every_end_id_where_the_answer_may_end_and_none_before(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    matcher = compiler.matcher("regex", "a+", [])
    assert not matcher.allowed((END, 0, 17))[[END, 0, 17]].any()
    matcher.consume(tokenizer.encode("a").ids)
    after = matcher.allowed((END, 0, 17))
    assert after[[END, 0, 17]].all() and after[tokenizer.encode("a").ids].all()
    assert not matcher.allowed((0,))[END], "the model's own end id, where the request does not name it"


@pytest.mark.parametrize("spec", [YES_NO, SCHEMA, Grammar("lark", 'start: "a" start "b" | "c"')])
def test_a_replay_gives_the_same_masks(spec: Grammar, compiler: GrammarCompiler) -> None:
    walked, generator = compiler.matcher(spec.kind, spec.text, []), np.random.default_rng(1)
    ids: list[int] = []
    for _ in range(30):
        mask = walked.allowed((END,))
        assert np.array_equal(mask, compiler.matcher(spec.kind, spec.text, ids).allowed((END,)))
        if mask[END]:
            return
        ids.append(int(generator.choice(np.flatnonzero(mask))))
        walked.consume(ids[-1:])


def test_an_id_that_does_not_fit_is_a_fault(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarFault, match="its grammar is refused"):
        compiler.matcher("regex", "(yes|no)", tokenizer.encode("maybe").ids)


def test_bytes_that_no_token_has_are_a_fault(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarFault, match="no token of this model"):
        compiler.matcher("regex", "a\x04", tokenizer.encode("a").ids).allowed((END,))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Grammar("json_schema", '{"const": "a <|im_end|> é"}'), '"a <|im_end|> é"'),
        (Grammar("regex", r"<\|im_start\|>b limit"), "<|im_start|>b limit"),
        (Grammar("lark", 'start: "<|im_end|><|im_end|>"'), "<|im_end|><|im_end|>"),
    ],
)
def test_text_that_is_spelled_like_a_special_token_is_text(
    spec: Grammar, text: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    ids = _only_way(compiler, spec)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text and min(ids) > 16


def test_a_special_token_that_is_asked_for_by_its_id_is_that(compiler: GrammarCompiler) -> None:
    assert _only_way(compiler, Grammar("lark", 'start: <[1]> "b"'))[0] == 1


def test_text_that_the_tokenizer_would_write_otherwise_stays_as_it_is(
    smollm2_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """One that composes accents, as several do, before it looks for tokens."""
    spec = json.loads((smollm2_dir / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec | {"normalizer": {"type": "NFC"}}))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    ids = _only_way(GrammarCompiler(tmp_path, VOCAB), Grammar("regex", "cafe\u0301"))
    assert tokenizer.decode(ids) == "cafe\u0301"


def _only_way(compiler: GrammarCompiler, spec: Grammar) -> list[int]:
    matcher = compiler.matcher(spec.kind, spec.text, [])
    ids: list[int] = []
    while not (mask := matcher.allowed((END,)))[END]:
        assert mask.sum() == 1
        ids.append(int(mask.argmax()))
        matcher.consume(ids[-1:])
    return ids


# ---------------------------------------------------------------- compiling


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Grammar("json_schema", '{"uniqueItems": true}'), "refused by the grammar library"),
        (Grammar("json_schema", "{secret"), "refused by the grammar library"),
        (Grammar("json_schema", '["secret"]'), "refused by the grammar library"),
        (
            Grammar("json_schema", '{"type": "string", "pattern": "(?=secret)"}'),
            "refused by the grammar library",
        ),
        (Grammar("regex", "(secret"), "refused by the grammar library"),
        (Grammar("regex", "(a{1000}){1000}"), "too large"),
        (Grammar("regex", "a" * 70_000), "longer than 65536 bytes"),
        (Grammar("lark", "start: secret"), "refused by the grammar library"),
    ],
)
def test_a_refusal_says_why_and_quotes_nothing(spec: Grammar, words: str, compiler: GrammarCompiler) -> None:
    before = len(compiler)
    with pytest.raises(BadGrammar, match=words) as caught:
        compiler.compile(spec.kind, spec.text)
    assert "secret" not in str(caught.value)
    assert len(compiler) == before


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(BadGrammar, match=r"no tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB).compile("regex", "a")


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert end_ids(tmp_path) == [7, 9]


def test_the_last_used_are_kept(smollm2_dir: Path, compiler: GrammarCompiler) -> None:
    small = GrammarCompiler(smollm2_dir, VOCAB, capacity=2)
    small._tokenizer = compiler._tokenizer
    compiled: list[str] = []
    make = grammars.compile_grammar

    def counting(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
        compiled.append(text)
        return make(tokenizer, kind, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "compile_grammar", counting)
        for text in ("a", "b", "a", "c", "a", "b"):
            small.compile("regex", text)
    assert compiled == ["a", "b", "c", "b"] and len(small) == 2


def test_what_is_held_is_not_pushed_out(smollm2_dir: Path, compiler: GrammarCompiler) -> None:
    small = GrammarCompiler(smollm2_dir, VOCAB, capacity=2)
    small._tokenizer = compiler._tokenizer
    for text in "abc":
        small.compile("regex", text)
        small.hold("regex", text)
    small.hold("regex", "a")
    small.compile("regex", "d")
    small.compile("regex", "e")
    assert {text for text in "abcde" if ("regex", text) in small} == set("abce")
    for text in "abc":
        small.let_go("regex", text)
    assert {text for text in "abcde" if ("regex", text) in small} == set("ae") and len(small) == 2
    small.let_go("regex", "a")
    assert not small._holds


def test_what_others_have_read_under_a_grammar_fails_nobody(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Copies share the lexer's automaton: this one outgrows its limit after some forty different answers."""
    kind, text = "regex", "[ab]*a[ab]{18}c"
    a, b = tokenizer.encode("a").ids[0], tokenizer.encode("b").ids[0]
    first = compiler.compile(kind, text)
    generator = np.random.default_rng(1)
    for _ in range(60):
        matcher = compiler.matcher(kind, text, [])
        for token_id in generator.choice([a, b], 300).tolist():
            assert matcher.allowed((END,))[[a, b]].all()
            matcher.consume([token_id])
    assert compiler.compile(kind, text) is not first, "the limit was not met: this test says nothing"


def test_copies_in_many_threads_do_not_disturb_each_other(compiler: GrammarCompiler) -> None:
    wanted = _walk(compiler, 0)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(_walk(compiler, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [wanted] * 4


def _walk(compiler: GrammarCompiler, seed: int) -> list[int]:
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    matcher = compiler.matcher(SCHEMA.kind, SCHEMA.text, [])
    while not (mask := matcher.allowed((END,)))[END]:
        ids.append(int(generator.choice(np.flatnonzero(mask))))
        matcher.consume(ids[-1:])
    return ids


def test_timing(compiler: GrammarCompiler) -> None:
    started = time.process_time()
    compiler.compile("json_schema", SCHEMA.text + " ")
    compiled_s = time.process_time() - started
    matcher = compiler.matcher("json_schema", SCHEMA.text, [])
    started = time.process_time()
    for _ in range(100):
        mask = matcher.allowed((END,))
    mask_s = (time.process_time() - started) / 100
    logits = np.zeros(VOCAB, dtype=np.float32)
    started = time.process_time()
    for _ in range(100):
        adjust(logits, Draw(Sampling(), 0, None, mask))
    print(
        f"compile {compiled_s * 1e3:.2f} ms, mask {mask_s * 1e6:.0f} us, "
        f"laid over the logits {(time.process_time() - started) * 1e4:.0f} us"
    )
    assert compiled_s < 1 and mask_s < 0.05


# ---------------------------------------------------------------- masks and the other rules of sampling


def sample_one(logits: np.ndarray, draw: Draw) -> Sampled:
    [sampled] = choose_sampler().sample(logits[None], [draw])
    assert sampled is not None
    return sampled


def test_min_tokens_gives_way_where_only_the_end_is_left() -> None:
    logits = np.array([5, 4, 3, 2], dtype=np.float32)
    only_end, end_or_one = np.array([0, 0, 0, 1], dtype=bool), np.array([0, 1, 0, 1], dtype=bool)
    asked = Sampling(min_tokens=9, end_token_ids=(3,), logit_bias=((3, 50.0),))
    assert sample_one(logits, Draw(asked, 0, None, only_end))[0] == 3
    assert sample_one(logits, Draw(asked, 0, None, end_or_one))[0] == 1
    assert sample_one(logits, Draw(asked, 9, None, end_or_one))[0] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0, 30.0])
def test_no_setting_leads_out_of_the_grammar(temperature: float) -> None:
    """Bias, penalties, top-k, top-p and min-p choose among what is allowed, never beside it."""
    generator = np.random.default_rng(3)
    for index in range(200):
        logits = generator.normal(0, 4, 64).astype(np.float32)
        allowed = generator.random(64) < 0.05
        allowed[index % 64] = True
        asked = Sampling(
            temperature=temperature,
            seed=index,
            top_k=int(generator.integers(0, 5)),
            top_p=float(generator.choice([0.1, 0.9, 1.0])),
            min_p=float(generator.choice([0.0, 0.9])),
            frequency_penalty=2.0,
            logit_bias=tuple((id, float(generator.choice([-100, 100]))) for id in range(0, 64, 3)),
            logprobs=1,
        )
        counts = TokenCounts(64, [1, 2], [int(np.flatnonzero(allowed)[0])] * 9)
        token_id, logprob = sample_one(logits, Draw(asked, index, counts, allowed))
        assert allowed[token_id]
        plain = dataclasses.replace(asked, logit_bias=(), temperature=0.0)
        assert logprob is not None
        best, unmasked = sample_one(logits, Draw(plain, index))
        assert unmasked is not None and logprob.top == unmasked.top, "log-probabilities are the model's own"
        assert best == logprob.top[0][0]


# ---------------------------------------------------------------- in the runner


def held_to(grammar: Grammar | None, **how: object) -> Sampling:
    return dataclasses.replace(Sampling(end_token_ids=(END,), grammar=grammar, logprobs=2), **how)  # type: ignore[arg-type]


def text_of(outputs: Outputs, tokenizer: Tokenizer) -> str:
    ids = [id for id, _ in outputs]
    return str(tokenizer.decode(ids[: ids.index(END)] if END in ids else ids, skip_special_tokens=False))


@pytest.mark.parametrize(("temperature", "chunk"), [(0.0, 512), (1.0, 8)])
def test_the_first_token_and_all_others_obey(
    temperature: float, chunk: int, runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    """In a batch with one that has no grammar, which is not disturbed."""
    prompts = random_prompts([20, 7, 9], VOCAB)
    free = held_to(None, temperature=temperature, seed=5)
    asked = [held_to(spec, temperature=temperature, seed=seed) for seed, spec in enumerate((YES_NO, SCHEMA))]
    yes_no, person, witness = generate(runner, prompts, 18, chunk=chunk, sampling=[*asked, free])
    assert text_of(yes_no, tokenizer) in ("yes", "no")
    assert set(json.loads(text_of(person, tokenizer))) == {"name", "age"}
    assert witness[:6] == generate(runner, prompts[2:], 6, chunk=chunk, sampling=free)[0]


def test_a_grammar_that_grows_too_large_fails_its_own_request(
    runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    [prompt, other] = random_prompts([5, 9], VOCAB)
    rows = (held_to(TOO_LARGE), held_to(None), held_to(Grammar("regex", "(")), held_to(YES_NO))
    batch = Batch()
    batch_tokens = [prompt, other, prompt, prompt]
    for slot, (sampling, tokens) in enumerate(zip(rows, batch_tokens, strict=True)):
        batch.joined.append(Joined(slot, tokens, len(tokens), [slot], sampling))
        batch.add(slot, 0, tokens, True)
    first = runner.run(batch)
    assert dict(first.faults)[2] == "its grammar is refused by the grammar library" and first.ids[2] == ()
    ids, faults = [list(row) for row in first.ids], dict(first.faults)
    for step in range(4):
        batch = Batch()
        for slot in range(4):
            if slot not in faults and ids[slot][-1] != END:
                batch.add(slot, len(batch_tokens[slot]) + step, ids[slot][-1:], True)
        slots = list(batch.slots)
        result = runner.run(batch)
        for place, slot in enumerate(slots):
            ids[slot] += result.ids[place]
        faults |= {slots[place]: why for place, why in result.faults.items()}
    assert sorted(faults) == [0, 2] and "too large" in faults[0]
    assert tokenizer.decode(ids[3]) in ("yes", "no")
    alone = generate(runner, [other], 5, sampling=held_to(None))[0]
    assert [id for id, _ in alone] == ids[1]


def test_a_step_that_is_run_again_gives_the_same(runner: ModelRunner) -> None:
    """As happens when another row of it raised."""
    [prompt] = random_prompts([6], VOCAB)
    batch = Batch(joined=[Joined(0, prompt, 6, [3, 4], held_to(SCHEMA))])
    batch.add(0, 0, prompt, True)
    [(first,)] = runner.run(batch).ids
    again = Batch()
    again.add(0, 6, [first], True)
    results = [runner.run(again) for _ in range(3)]
    assert results[0] == results[1] == results[2] and not results[0].faults


def test_a_worker_without_grammars_fails_the_request(runner: ModelRunner) -> None:
    bare = ModelRunner(runner.model, runner.cache, 2, 512, 1, "test")
    [prompt] = random_prompts([6], VOCAB)
    batch = Batch(joined=[Joined(0, prompt, 6, [1], held_to(YES_NO))])
    batch.add(0, 0, prompt, True)
    assert dict(bare.run(batch).faults) == {0: f"its grammar {NO_GRAMMARS}"}
    assert bare.compile_grammar("regex", "a") == NO_GRAMMARS
    assert runner.compile_grammar("regex", "a") is None
    assert "refused" in str(runner.compile_grammar("regex", "("))


def test_the_library_is_part_of_what_two_workers_must_share(runner: ModelRunner) -> None:
    assert runner.describe()["grammar_library"] == grammars.LIBRARY
    assert grammars.LIBRARY.startswith("llguidance 1.")
