from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from tokenizers import decoders, models, normalizers, processors

from common.errors import BadRequest, ModelCannotBeLoaded, NotAdmitted
from coordinator.openai.messages import Chat
from coordinator.tokenizer import Tokenizer

SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "12345 3.14159",
    "naïve café über 你好，世界 こんにちは мир 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x ** 2  # comment",
    "null \x00 byte and \ufeff mark",
    "x" * 5000,
]


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    from transformers import PreTrainedTokenizerFast  # as the folder says; to find that out takes ten seconds

    return PreTrainedTokenizerFast.from_pretrained(smollm2_dir)


@pytest.fixture
def model_dir(smollm2_dir: Path, tmp_path: Path) -> Path:
    for name in SMALL_FILES:
        shutil.copy(smollm2_dir / name, tmp_path / name)
    return tmp_path


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_transformers_does(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode_now(text) == reference(text)["input_ids"]


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=200))
def test_encodes_any_text_as_transformers_does(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode_now(text) == reference(text)["input_ids"]


CHATS = [
    [("user", "What is the capital of France?")],
    [("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "bye 😀")],
    [("assistant", "only me")],
    [("user", "one"), ("user", "two"), ("system", "late")],
    [("user", "")],
]


@pytest.mark.parametrize("chat", CHATS)
def test_renders_chats_as_transformers_does(
    tokenizer: Tokenizer, reference: Any, chat: list[tuple[str, str]]
) -> None:
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert asyncio.run(tokenizer.encode_chat(Chat(messages), 8192)) == expected
    assert tokenizer.render_chat(Chat(messages)) == reference.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


TOOL_TEMPLATE = (
    "{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{{ '<think>' if thinking }}{% endif %}"
)


def test_renders_tools_as_transformers_does(smollm2_dir: Path, reference: Any) -> None:
    function = {"name": "f", "description": "é", "parameters": {"type": "object", "properties": {"x": {}}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "<é>"]}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "20"},
        {"role": "assistant", "content": "It is "},
    ]
    tokenizer = Tokenizer(smollm2_dir, TOOL_TEMPLATE)
    for chat in (
        Chat(messages, tools),
        Chat(messages, kwargs={"thinking": True}),
        Chat(messages, tools, continue_final_message=True),
        Chat(messages, add_generation_prompt=False),
    ):
        assert tokenizer.render_chat(chat) == reference.apply_chat_template(
            messages,
            tools=list(chat.tools) or None,
            chat_template=TOOL_TEMPLATE,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            **chat.kwargs,
        )
    tokenizer.close()


def test_facts_of_the_default_model(tokenizer: Tokenizer, reference: Any) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.end_ids == (2,)
    assert set(reference.all_special_ids) <= tokenizer.special_ids
    assert len(tokenizer.tokenizer_hash) == 32


def test_bytes_of_every_token(tokenizer: Tokenizer, reference: Any) -> None:
    for id in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(id).decode("utf-8", "replace") == reference.decode([id]), id
    assert tokenizer.text_bytes(2) == b""
    assert tokenizer.token_bytes(2) == b"<|im_end|>"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(10**6) == b""


def test_a_text_that_cannot_fit_is_refused_before_it_is_cut(tokenizer: Tokenizer) -> None:
    longest = max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.vocab_size))
    with pytest.raises(BadRequest, match="context") as refused:
        asyncio.run(tokenizer.encode("é" * (10 * longest), 10))
    assert refused.value.param == "prompt"
    # The bound is sharp: the longest token, repeated, fits.
    id = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    text = (tokenizer.token_bytes(id) * 10).decode()
    assert len(asyncio.run(tokenizer.encode(text, 10))) <= 10


def test_large_texts_leave_the_loop_free(tokenizer: Tokenizer) -> None:
    text = "The quick brown fox, number 12345, said: “hello”. " * 6000  # 300 kB

    async def beat() -> tuple[float, float, list[int]]:
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(tokenizer.encode(text, 10**6))
        started_s = loop.time()
        worst_s, last_s = 0.0, started_s
        while not work.done():
            await asyncio.sleep(0.001)
            worst_s, last_s = max(worst_s, loop.time() - last_s), loop.time()
        return worst_s, loop.time() - started_s, work.result()

    worst_s, took_s, ids = asyncio.run(beat())
    assert worst_s < max(0.02, took_s / 2)
    assert ids == tokenizer.encode_now(text)


def test_large_texts_at_once_are_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_places", threading.Semaphore(2))
    text = "word " * 20_000

    async def three() -> list[Any]:
        return await asyncio.gather(
            *(tokenizer.encode(text, 10**6) for _ in range(3)), return_exceptions=True
        )

    results = asyncio.run(three())
    assert [type(result).__name__ for result in results] == ["list", "list", "NotAdmitted"]

    async def left_alone() -> None:
        works = [asyncio.ensure_future(tokenizer.encode(text * 5, 10**7)) for _ in range(2)]
        await asyncio.sleep(0.01)
        for work in works:
            work.cancel()
        await asyncio.sleep(0)
        with pytest.raises(NotAdmitted):  # the threads are still at it
            await tokenizer.encode(text, 10**6)

    asyncio.run(left_alone())
    tokenizer._places.acquire(timeout=10)
    tokenizer._places.release()
    assert isinstance(asyncio.run(tokenizer.encode(text, 10**6)), list)


def test_a_chat_is_as_large_as_all_that_its_template_works_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only large ones need one of the few places of the threads."""
    monkeypatch.setattr(tokenizer, "_places", threading.Semaphore(0))
    hi = {"role": "user", "content": "hi"}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    asyncio.run(tokenizer.encode_chat(Chat([hi], [tool], kwargs={"thinking": True})))
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": "y" * 8192}}}
    for large in (
        Chat([hi | {"content": "x" * 8193}]),
        Chat([hi], [tool] * 200),
        Chat([hi], kwargs={"x": "y" * 8192}),
        Chat([hi, {"role": "assistant", "content": "", "tool_calls": [call]}]),
        Chat([hi] * 300),
    ):
        with pytest.raises(NotAdmitted):
            asyncio.run(tokenizer.encode_chat(large))


def test_end_ids_come_from_every_file(model_dir: Path) -> None:
    change(model_dir / "generation_config.json", eos_token_id=[5, 7])
    assert Tokenizer(model_dir).end_ids == (2, 5, 7)
    (model_dir / "generation_config.json").unlink()
    change(model_dir / "config.json", eos_token_id=9)
    assert Tokenizer(model_dir).end_ids == (2, 9)
    change(model_dir / "tokenizer_config.json", eos_token={"content": "<|im_start|>"})
    assert Tokenizer(model_dir).end_ids == (1, 9)


def test_BR_148_a_tokenizer_larger_than_the_model_is_refused(model_dir: Path) -> None:
    change(model_dir / "config.json", vocab_size=1000)
    with pytest.raises(ModelCannotBeLoaded, match="49151"):
        Tokenizer(model_dir)


def test_ids_beyond_the_tokenizer_have_no_bytes(model_dir: Path) -> None:
    change(model_dir / "config.json", vocab_size=49_200)
    padded = Tokenizer(model_dir)
    assert padded.vocab_size == 49_200
    assert padded.token_bytes(49_199) == b""


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelCannotBeLoaded, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_the_template_may_be_a_file_a_list_or_absent(model_dir: Path) -> None:
    settings_file = model_dir / "tokenizer_config.json"
    chat = Chat([{"role": "user", "content": "hi"}])
    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "D{{ messages[0].content }}"},
    ]
    change(settings_file, chat_template=named)
    assert Tokenizer(model_dir).render_chat(chat) == "Dhi"
    (model_dir / "chat_template.jinja").write_text("F{{ eos_token }}")
    assert Tokenizer(model_dir).render_chat(chat) == "F<|im_end|>"
    (model_dir / "chat_template.jinja").unlink()
    change(settings_file, chat_template=None)
    with pytest.raises(BadRequest, match="no chat template"):
        asyncio.run(Tokenizer(model_dir).encode_chat(chat, 100))


def test_a_template_of_the_operators_takes_its_place(model_dir: Path) -> None:
    chat = Chat([{"role": "user", "content": "hi"}])
    assert Tokenizer(model_dir, "O{{ messages[0].content }}").render_chat(chat) == "Ohi"
    with pytest.raises(ModelCannotBeLoaded, match=r"does not compile.*line 2"):
        Tokenizer(model_dir, "x\n{% for %}")


def sentencepiece_like(folder: Path) -> Tokenizer:
    """A tiny tokenizer of the older Llama kind: spaces marked, unknown bytes spelt out, BOS added by itself."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "i",
        "▁h",
        "▁hi",
        "é",
    ]
    merges = [("▁", "h"), ("▁h", "i")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    encoder = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    encoder.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens(["<s>", "</s>"])
    encoder.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    encoder.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(pieces), "eos_token_id": 2}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer(folder)


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    ids = tokenizer.encode_now("hi é😀 hi")
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = b"".join(map(tokenizer.text_bytes, ids)).decode()
    assert text == " " + reference.decode(ids) == " hi é😀 hi"


def test_BR_090_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = sentencepiece_like(tmp_path)
    assert tokenizer.encode_now("hi").count(1) == 1
    assert tokenizer.encode_now("<s>hi").count(1) == 1
    assert tokenizer.encode_now("") == [1]
    assert tokenizer.encode_now("hi<s>").count(1) == 2  # where the user put it himself


def test_a_decoder_that_we_do_not_know_is_refused(model_dir: Path) -> None:
    change(model_dir / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ModelCannotBeLoaded, match="WordPiece"):
        Tokenizer(model_dir)
