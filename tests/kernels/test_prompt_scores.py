"""Log-probabilities of prompt tokens: the reference's numbers, and the same bits in any chunk, slice and company."""

from collections.abc import Sequence

import pytest
import torch

import kernels.prompt_scores
from bench.gpu_check.driving import Batch, Joined, Sampling
from kernels.prompt_scores import PromptToScore
from kernels.runner import ModelRunner, load_runner
from kernels.step import StepResult, TokenLogprob
from tests.kernels.driving import full_logits, random_prompts
from tests.kernels.tiny_models import save_model

LENGTH = 150


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("tiny")
    save_model("llama-gqa3-tied", folder)
    return load_runner(str(folder), device="cpu", num_blocks=60, max_num_seqs=4, max_model_len=300, threads=1)


def run_prompt(
    runner: ModelRunner, tokens: Sequence[int], chunk: int, *, scored: int = 1, top: int | None = 3
) -> list[list[TokenLogprob]]:
    """What each chunk of the prompt tells, beside a neighbour that only decodes."""
    blocks = list(range(15, -1, -1))
    said = []
    for start in range(0, len(tokens), chunk):
        batch = Batch()
        if start == 0:
            neighbour = Joined(0, [5, 6], 2, [30], Sampling(logprobs=1))
            mine = Joined(3, tokens, len(tokens), blocks, Sampling(prompt_logprobs=top), scored)
            batch.joined += [neighbour, mine]
        batch.add(0, 0, [5, 6], True)
        part = tokens[start : start + chunk]
        batch.add(3, start, part, start + len(part) == len(tokens))
        result = runner.run(batch)
        assert 0 not in result.prompts and not result.faults
        said.append(list(result.prompts.get(1, ())))
    runner.run(Batch(left=[0, 3]))
    return said


def flat(said: list[list[TokenLogprob]]) -> list[TokenLogprob]:
    return [one for part in said for one in part]


def test_they_equal_a_plain_log_softmax(tiny: ModelRunner) -> None:
    [tokens] = random_prompts([LENGTH], tiny.vocab_size)
    found = flat(run_prompt(tiny, tokens, LENGTH))
    wanted = torch.log_softmax(full_logits(tiny, tokens, 64).double(), dim=-1)[:-1]
    assert [one.token_id for one in found] == tokens[1:]
    chosen = wanted[range(LENGTH - 1), tokens[1:]]
    torch.testing.assert_close(
        torch.tensor([one.logprob for one in found], dtype=torch.float64), chosen, rtol=0, atol=1e-9
    )
    best = wanted.topk(3)
    assert [[id for id, _ in one.top] for one in found] == best.indices.tolist()
    tops = torch.tensor([[value for _, value in one.top] for one in found], dtype=torch.float64)
    torch.testing.assert_close(tops, best.values, rtol=0, atol=1e-9)


def test_same_bits_in_any_chunk_and_slice(tiny: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    [tokens] = random_prompts([LENGTH], tiny.vocab_size)
    whole = flat(run_prompt(tiny, tokens, LENGTH))
    assert len(whole) == LENGTH - 1
    for chunk in (1, 7, 64, LENGTH - 1):
        assert flat(run_prompt(tiny, tokens, chunk)) == whole, chunk
    for rows in (1, 5, 200):
        monkeypatch.setattr(kernels.prompt_scores, "SLICE_ROWS", rows)
        assert flat(run_prompt(tiny, tokens, LENGTH)) == whole, rows


def test_what_is_said_is_not_said_again(tiny: ModelRunner) -> None:
    [tokens] = random_prompts([LENGTH], tiny.vocab_size)
    whole = flat(run_prompt(tiny, tokens, LENGTH))
    assert [len(part) for part in run_prompt(tiny, tokens, 40, scored=60)] == [0, 21, 40, 29]
    assert flat(run_prompt(tiny, tokens, 40, scored=60)) == whole[59:]
    assert flat(run_prompt(tiny, tokens, 40, scored=LENGTH)) == []
    assert flat(run_prompt(tiny, tokens, 40, top=None)) == []
    assert all(one.top == () for one in flat(run_prompt(tiny, tokens, 40, top=0)))


def test_targets_of_a_chunk() -> None:
    prompt = PromptToScore([10, 11, 12, 13, 14], 1, 0)
    assert [list(prompt.targets(start, start + 2)) for start in (0, 2, 4)] == [[1, 2], [3, 4], []]
    assert list(prompt.targets(7, 8)) == []  # an output token


def test_an_overflow_is_a_fault_of_its_row(tiny: ModelRunner) -> None:
    tokens = [6] * 40

    def step(content: float) -> StepResult:
        good = Joined(0, tokens, 40, [1, 2, 3], Sampling(prompt_logprobs=1))
        bad = Joined(1, tokens, 40, [4, 5, 6], Sampling(prompt_logprobs=1), scored=17)
        batch = Batch(joined=[good, bad])
        batch.add(0, 0, tokens[:20], False)
        batch.add(1, 16, tokens[16:20], False)
        tiny.cache.tensor[4].fill_(content)  # what an overflow in an earlier step would have left there
        return tiny.run(batch)

    broken, whole = step(float("nan")), step(0.0)
    assert dict(broken.faults) == {1: "its logits are not finite"} and set(broken.prompts) == {0}
    assert not whole.faults and len(whole.prompts[1]) == 4
    assert broken.prompts[0] == whole.prompts[0] and len(whole.prompts[0]) == 20
