"""`echo` through real pools: the prompt's log-probabilities, cold and warm, alone and before an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.e2e.service import Service, completion


def test_a_prompt_is_scored_the_same_on_every_way(
    undisturbed: Service, text_ids: list[int], smollm2_dir: Path
) -> None:
    """Longer than one chunk. What an answer says of its own tokens, an echo says of them as a prompt's."""
    prompt = text_ids[300:900]
    asks: dict[str, Any] = {"ignore_eos": True, "logprobs": 2, "echo": True}
    first = scored(undisturbed, prompt, max_tokens=4, **asks)
    said = first["logprobs"]
    assert len(said["tokens"]) == 604 and said["token_logprobs"][0] is None
    assert all(value < 0 for value in said["token_logprobs"][1:])
    assert "".join(said["tokens"]) == first["text"], "no character of this text is cut"

    assert scored(undisturbed, prompt, max_tokens=4, **asks) == first, "with the prompt in the caches"
    pair = undisturbed.post("/v1/completions", completion(prompt, max_tokens=4, n=2, **asks)).json()
    assert [choice["logprobs"] for choice in pair["choices"]] == [said, said], (
        "greedy, so the same answer twice"
    )
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    answer = [tokenizer.encode(name, add_special_tokens=False).ids for name in said["tokens"][600:]]
    assert all(len(ids) == 1 for ids in answer)
    longer = scored(undisturbed, prompt + [ids[0] for ids in answer], max_tokens=0, **asks)
    assert longer == {**first, "finish_reason": "length"}


def scored(service: Service, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer = service.complete(prompt, **fields)
    return {key: answer[key] for key in ("text", "logprobs", "finish_reason")}
