"""ModelRunner: slots, histories, settings per row. SmolLM2 beside transformers: `exactness/test_transformers.py`."""

import threading
from pathlib import Path

import pytest

from bench.gpu_check.driving import Batch, Joined, Sampling
from kernels.cache import AskedTooMuch
from kernels.loading import load_for_worker
from kernels.runner import ModelRunner, load_runner
from kernels.sampling import Draw, NumpySampler
from tests.kernels.driving import full_logits, generate, random_prompts
from tests.kernels.tiny_models import save_model


@pytest.fixture
def tiny(tmp_path: Path) -> ModelRunner:
    save_model("llama-gqa3-tied", tmp_path)
    return load_runner(
        str(tmp_path), device="cpu", num_blocks=60, max_num_seqs=4, max_model_len=300, threads=1
    )


def test_settings_belong_to_their_row(tiny: ModelRunner) -> None:
    prompts = random_prompts([20, 33, 5, 40], tiny.vocab_size)
    settings = [
        Sampling(),
        Sampling(temperature=1.0, seed=9, logprobs=2),
        Sampling(repetition_penalty=1.5, frequency_penalty=0.5),
        Sampling(temperature=0.7, top_k=5, min_tokens=4, end_token_ids=(2, 7), logit_bias=((7, 3.0),)),
    ]
    together = generate(tiny, prompts, 12, sampling=settings)
    alone = [generate(tiny, [p], 12, sampling=s)[0] for p, s in zip(prompts, settings, strict=True)]
    assert together == alone
    assert all((logprob is not None) == (row == 1) for row, out in enumerate(together) for _, logprob in out)
    assert not {2, 7} & {token for token, _ in together[3][:4]}
    assert together[2] != generate(tiny, [prompts[2]], 12, sampling=Sampling())[0]


def test_a_draw_is_addressed_by_its_place_in_the_output(tiny: ModelRunner) -> None:
    [prompt] = random_prompts([21], tiny.vocab_size)
    sampling = Sampling(temperature=1.0, seed=77, child=2)
    tokens = [token for token, _ in generate(tiny, [prompt], 10, sampling=sampling)[0]]
    logits = full_logits(tiny, prompt + tokens, 8).numpy()[20:-1]
    draws = [Draw(sampling, index) for index in range(10)]
    sampled = NumpySampler().sample(logits, draws)
    assert [row[0] for row in sampled if row is not None] == tokens


def test_a_sequence_that_comes_back_goes_on_as_if_it_had_stayed(tiny: ModelRunner) -> None:
    """Preempted and recomputed, or moved to another worker: prompt + outputs joins, penalties and draws go on."""
    [prompt] = random_prompts([30], tiny.vocab_size)
    sampling = Sampling(temperature=1.0, seed=4, repetition_penalty=1.3, presence_penalty=0.4, logprobs=2)
    [whole] = generate(tiny, [prompt], 14, sampling=sampling)
    tokens = prompt + [token for token, _ in whole[:6]]
    blocks = list(range(20, 26))
    batch = Batch(joined=[Joined(3, tokens, len(prompt), blocks, sampling)])
    batch.add(3, 0, tokens, True)
    rest = []
    for position in range(len(tokens), len(tokens) + 8):
        result = tiny.run(batch)
        logprob = result.logprobs[0]
        assert logprob is not None
        rest.append((result.ids[0][0], logprob[0]))
        batch = Batch()
        batch.add(3, position, [result.ids[0][0]], True)
    assert rest == whole[6:]


def test_rows_that_do_not_sample_give_nothing(tiny: ModelRunner) -> None:
    batch = Batch(joined=[Joined(0, [5] * 9, 9, [1], Sampling()), Joined(1, [6] * 9, 9, [2], Sampling())])
    batch.add(0, 0, [5] * 4, False)
    batch.add(1, 0, [6] * 9, True)
    result = tiny.run(batch)
    assert result.ids[0] == () and len(result.ids[1]) == 1 and result.logprobs == (None, None)
    assert tiny.run(Batch(left=[0, 1])).ids == ()


def test_an_overflow_is_a_fault_of_its_row_and_no_token(tiny: ModelRunner) -> None:
    good = Joined(0, [5] * 9, 9, [1], Sampling())
    alone = Batch(joined=[good])
    alone.add(0, 0, [5] * 9, True)
    expected = tiny.run(alone).ids[0]
    tiny.cache.tensor[2].fill_(float("nan"))  # what an overflow in an earlier step would have left there
    batch = Batch(joined=[good, Joined(1, [6] * 9, 9, [2], Sampling())])
    batch.add(0, 0, [5] * 9, True)
    batch.add(1, 8, [6], True)
    result = tiny.run(batch)
    assert result.ids == (expected, ()) and dict(result.faults) == {1: "its logits are not finite"}
    tiny.cache.tensor[2].fill_(0)


def test_a_prompt_of_no_vocabulary_is_a_fault_of_its_row(tiny: ModelRunner) -> None:
    """Taken over from another worker, it is never computed with here; what changes for others in its step must hold."""
    good = Joined(0, [5] * 9, 9, [1], Sampling())
    first, second = Batch(joined=[good]), Batch()
    first.add(0, 0, [5] * 9, True)
    [token] = expected = tiny.run(first).ids[0]
    second.add(0, 9, [token], True)
    expected += tiny.run(second).ids[0]
    penal = Sampling(repetition_penalty=1.3)
    first = Batch(joined=[Joined(1, [5, tiny.vocab_size, 6], 2, [2], penal), good])
    first.add(1, 2, [6], True)
    first.add(0, 0, [5] * 9, True)
    result = tiny.run(first)
    assert result.ids == ((), expected[:1]) and list(result.faults) == [0]
    assert str(tiny.vocab_size) in result.faults[0]
    second.left = [1]
    assert tiny.run(second).ids == (expected[1:],)


def test_a_caller_that_errs_is_stopped(tiny: ModelRunner) -> None:
    unknown = Batch()
    unknown.add(2, 0, [5], True)
    with pytest.raises(AssertionError, match="slot 2"):
        tiny.run(unknown)
    short = Batch(joined=[Joined(0, [5] * 17, 17, [1], Sampling())])
    short.add(0, 0, [5] * 17, True)
    with pytest.raises(AssertionError, match="no block"):
        tiny.run(short)


def test_blocks_are_all_that_a_sequence_needs(tiny: ModelRunner, tmp_path: Path) -> None:
    """Disaggregation in small: one runner computes a prompt, its blocks' bytes go to another, which goes on."""
    other = load_runner(str(tmp_path), device="cpu", num_blocks=10, max_model_len=300, threads=1)
    [prompt] = random_prompts([37], tiny.vocab_size)
    [whole] = generate(tiny, [prompt], 5)
    batch = Batch(joined=[Joined(0, prompt, 37, [7, 3, 11], Sampling(logprobs=3))])
    batch.add(0, 0, prompt, True)
    token = tiny.run(batch).ids[0][0]
    assert token == whole[0][0]
    other.cache.write_blocks([0, 9, 4], tiny.cache.read_blocks([7, 3, 11]))
    batch = Batch(joined=[Joined(5, [*prompt, token], 37, [0, 9, 4], Sampling(logprobs=3))])
    for position in range(37, 41):
        batch.add(5, position, [token], True)
        result = other.run(batch)
        logprob = result.logprobs[0]
        token = result.ids[0][0]
        assert logprob is not None and (token, logprob[0]) == whole[position - 36]
        batch = Batch()


def test_another_thread_may_run(tiny: ModelRunner) -> None:
    [prompt] = random_prompts([50], tiny.vocab_size)
    here, there = generate(tiny, [prompt], 5), []
    thread = threading.Thread(target=lambda: there.extend(generate(tiny, [prompt], 5)))
    thread.start()
    thread.join()
    assert there == here


def test_describe_separates_what_must_not_mix(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    described = [
        load_runner(
            str(tmp_path), device="cpu", num_blocks=4, threads=1, dtype=dtype, block_size=size
        ).describe()
        for dtype, size in (("float32", 16), ("float32", 16), ("bfloat16", 16), ("float32", 32))
    ]
    assert described[0] == described[1]
    assert {k for k in described[0] if described[0][k] != described[2][k]} == {
        "dtype",
        "kv_dtype",
        "kv_layout",
        "linear_policy",
        "block_bytes",
    }
    assert {k for k in described[0] if described[0][k] != described[3][k]} == {"block_size", "block_bytes"}
    assert all(isinstance(value, (str, int, float)) for value in described[0].values())


def test_loading_says_what_it_does_and_refuses_by_name(tmp_path: Path) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    seen: list[tuple[str, int, int]] = []
    runner = load_runner(
        str(tmp_path), device="cpu", kv_cache_bytes=1 << 20, progress=lambda *report: seen.append(report)
    )
    assert runner.cache.num_blocks == (1 << 20) // runner.layout.block_bytes and runner.max_model_len == 2048
    assert seen[-1] == ("layers", 2, 2)
    with pytest.raises(AskedTooMuch, match=r"--max-model-len 4096.* 2048 at most"):
        load_runner(str(tmp_path), device="cpu", num_blocks=4, max_model_len=4096)
    with pytest.raises(ValueError, match="num_blocks or kv_cache_bytes"):
        load_runner(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kv_cache_bytes": 1000}, "--kv-cache-memory 1000: one KV block of this model takes [0-9]+ bytes"),
        ({"kv_cache_bytes": 900 << 40}, "--kv-cache-memory .*: 921600.0 GiB of KV cache"),
        ({"num_blocks": 1 << 40}, "--num-kv-blocks 1099511627776: .* GiB of KV cache"),
    ],
)
def test_a_cache_that_cannot_be_had_is_refused_before_loading(
    tmp_path: Path, asked: dict[str, int], words: str
) -> None:
    save_model("llama-gqa3-tied", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(AskedTooMuch, match=words):
        load_for_worker(
            model=str(tmp_path),
            dtype="auto",
            device="cpu",
            block_size=16,
            num_blocks=asked.get("num_blocks"),
            kv_cache_bytes=asked.get("kv_cache_bytes", 1 << 20),
            max_num_seqs=4,
            max_model_len=None,
            threads=1,
        )
