"""Text to token ids and ids to bytes, from a model's folder, with `tokenizers` and jinja2 alone.

Why not transformers: it would bring torch into the coordinator (1.5 s, 250 MB). What it would add, this file
reads from the same JSON files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer as Encoder

from common.errors import BadRequest, ModelCannotBeLoaded, NotAdmitted
from coordinator.chat_template import ChatTemplate, TookTooLong, find_templates
from coordinator.openai.messages import Chat
from coordinator.token_bytes import UnknownDecoder, bytes_rule

# One text at a time needs no pool of threads in the library, which would also warn at every child we start.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

Result = TypeVar("Result")

LARGE_TEXT_CHARS = 8192
CHARS_PER_TOKEN = 4
"""What work on a token costs, in that on characters."""
MAX_LARGE_TEXTS = 32
SHRINK_OF_NORMALIZER = {"Prepend": 1, "Replace": 1, "NFC": 3, "NFKC": 3}
"""How many bytes of text may become one byte before it is cut into tokens. `Replace` is SentencePiece's space
mark; NFC and NFKC fold at most three code points of a like size into one."""
KEEPING_CUTS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
"""Pre-tokenizers that lose no text (`Split` unless it removes)."""


class Tokenizer:
    """Encodes prompts, renders chats, and knows the bytes of every token id.

    `vocab_size` is the model's: ids are valid from 0 to vocab_size − 1. `end_ids` end an answer. `added_ids` are the
    tokens that stand outside the vocabulary's rules, special ones among them, by their text. `chat_template` takes
    the place of the model's own.
    """

    def __init__(self, model_dir: Path, chat_template: str | None = None) -> None:
        self.folder = model_dir
        text = _read(model_dir, "tokenizer.json")
        spec = json.loads(text)
        config = _read_json(model_dir, "config.json")
        settings = _read_json(model_dir, "tokenizer_config.json")
        self.tokenizer_hash = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._encoder = Encoder.from_str(text)
        self._encoder.no_truncation()
        self._encoder.no_padding()
        tokens = {id: token for token, id in self._encoder.get_vocab(with_added_tokens=True).items()}
        self.vocab_size = _vocab_size(config, max(tokens) + 1)
        self.added_ids: dict[str, int] = {added["content"]: added["id"] for added in spec["added_tokens"]}
        self.special_ids = frozenset(added["id"] for added in spec["added_tokens"] if added["special"])
        special_tokens = _special_tokens(model_dir, settings)
        self.end_ids = _end_ids(
            model_dir, config, self._encoder.token_to_id(special_tokens.get("eos_token", ""))
        )
        self._bos_id = self._encoder.token_to_id(special_tokens.get("bos_token", ""))
        self._adds_bos = self._bos_id is not None and self._ids("", special_tokens=True)[:1] == [self._bos_id]
        self._bytes = self._table(spec, tokens)
        self._bytes_per_token = _longest_token_bytes(spec, self._bytes)
        source, tool_source = (chat_template, None) if chat_template else find_templates(model_dir, settings)
        self.template = None if source is None else ChatTemplate(source, special_tokens, tool_source)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._places = threading.Semaphore(MAX_LARGE_TEXTS)

    def _table(self, spec: dict[str, Any], tokens: dict[int, str]) -> list[bytes]:
        try:
            rule = bytes_rule(spec.get("decoder"))
        except UnknownDecoder as error:
            raise ModelCannotBeLoaded(str(error)) from error
        table = [b""] * self.vocab_size
        for id, token in tokens.items():
            table[id] = token.encode() if id in self.special_ids else rule(token)
        return table

    # ------------------------------------------------------------ ids to bytes

    def token_bytes(self, id: int) -> bytes:
        """What the token stands for; its own name if it is special, nothing if the vocabulary has no such id."""
        return self._bytes[id] if 0 <= id < len(self._bytes) else b""

    def text_bytes(self, id: int) -> bytes:
        """What the token adds to an answer's text: special tokens add nothing."""
        return b"" if id in self.special_ids else self.token_bytes(id)

    def text_bytes_with(self, shown_ids: frozenset[int]) -> Callable[[int], bytes]:
        """`text_bytes`, but that these special tokens add their names: an answer's parser must see them."""
        if not shown_ids:
            return self.text_bytes
        return lambda id: self.token_bytes(id) if id in shown_ids else self.text_bytes(id)

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        """Raises BadRequest where one is not in the vocabulary."""
        size = self.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            index = next(index for index, id in enumerate(ids) if not 0 <= id < size)
            raise BadRequest(
                f"{field}[{index}]: is not a token id of this model, which has 0 to {size - 1}.",
                param=field.split("[")[0],
                code="invalid_value",
            )

    def token_string(self, id: int) -> str:
        """How the vocabulary spells it."""
        return self._encoder.id_to_token(id) or ""

    # ------------------------------------------------------------ text to ids

    async def encode(
        self, text: str, max_tokens: int | None = None, special_tokens: bool = True
    ) -> list[int]:
        """A text prompt, with the special tokens that the tokenizer's post-processor adds.

        Raises BadRequest when its bytes alone show that it is longer than `max_tokens`, NotAdmitted when too many
        large texts are already being worked on.
        """
        self._check_bytes([text], max_tokens, "prompt")
        return await self.off_the_loop(len(text), lambda: self.encode_now(text, special_tokens))

    async def encode_chat(
        self, chat: Chat, max_tokens: int | None = None, special_tokens: bool = False
    ) -> list[int]:
        """A chat, rendered by the template, which itself writes every special token. Raises as `encode`."""
        if self.template is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.",
                param="messages",
                code="no_chat_template",
            )
        texts = [message["content"] for message in chat.messages]
        self._check_bytes(texts, max_tokens, "messages")
        if chat.chars <= LARGE_TEXT_CHARS:
            with contextlib.suppress(TookTooLong):
                return self._encode_rendered(chat, max_tokens, special_tokens, quick=True)
        # A short chat whose template makes much of it is a large text all the same.
        return await self.off_the_loop(
            LARGE_TEXT_CHARS + 1, lambda: self._encode_rendered(chat, max_tokens, special_tokens)
        )

    def encode_now(self, text: str, special_tokens: bool = True) -> list[int]:
        ids = self._ids(text, special_tokens)
        # A prompt that spells out the BOS which the post-processor adds as well would have it twice.
        return ids[1:] if special_tokens and self._adds_bos and ids[1:2] == [self._bos_id] else ids

    def render_chat(self, chat: Chat, quick: bool = False) -> str:
        assert self.template is not None
        return self.template.render(chat, quick)

    def _encode_rendered(
        self, chat: Chat, max_tokens: int | None, special_tokens: bool, quick: bool = False
    ) -> list[int]:
        text = self.render_chat(chat, quick)
        self._check_bytes([text], max_tokens, "messages")
        return self.encode_now(text, special_tokens)

    def _ids(self, text: str, special_tokens: bool) -> list[int]:
        # A batch of one, because only the batch calls free the GIL: `encode` of 300 kB stops every thread for 0.2 s.
        return self._encoder.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids

    def _check_bytes(self, texts: Sequence[str], max_tokens: int | None, param: str) -> None:
        if self._bytes_per_token is None or max_tokens is None:
            return
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        limit = max_tokens * self._bytes_per_token
        if size > limit:
            raise BadRequest(
                f"The text has {size} bytes. The context of {max_tokens} tokens holds at most {limit} bytes, as no "
                f"token stands for more than {self._bytes_per_token}.",
                param=param,
                code="context_length_exceeded",
            )

    async def off_the_loop(self, chars: int, encode: Callable[[], Result]) -> Result:
        """Large texts in a thread (the library frees the GIL), so that streams and health checks go on."""
        if chars <= LARGE_TEXT_CHARS:
            return encode()
        places = self._places
        if not places.acquire(blocking=False):
            raise NotAdmitted(
                "Too many large prompts are already being tokenized.",
                retry_after_s=1.0,
                code="tokenizer_busy",
            )
        work = self._threads.submit(encode)
        # Given back when the thread is done, which is later than the client's leaving.
        work.add_done_callback(lambda _: places.release())
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(model_dir: Path, name: str) -> str:
    try:
        return (model_dir / name).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelCannotBeLoaded(f"cannot read {model_dir / name}: {error.strerror}") from error


def _read_json(model_dir: Path, name: str) -> dict[str, Any]:
    """An absent file is an empty one: only tokenizer.json is in every model folder."""
    if not (model_dir / name).is_file():
        return {}
    value = json.loads(_read(model_dir, name))
    if not isinstance(value, dict):
        raise ModelCannotBeLoaded(f"{model_dir / name} is not a JSON object")
    return value


def _vocab_size(config: dict[str, Any], tokenizer_size: int) -> int:
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", tokenizer_size))
    if tokenizer_size > size:
        raise ModelCannotBeLoaded(
            f"the tokenizer has ids up to {tokenizer_size - 1}, the model's vocab_size is {size}: they do not "
            "belong together"
        )
    return int(size)


def _special_tokens(model_dir: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Name → text, such as bos_token → <s>. An entry is a string, or an object with `content`."""
    entries = _read_json(model_dir, "special_tokens_map.json") | settings
    texts = {
        name: entry.get("content") if isinstance(entry, dict) else entry
        for name, entry in entries.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _end_ids(model_dir: Path, config: dict[str, Any], tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that the model's files call the end: an instruct model often has two, in different files."""
    listed = _read_json(model_dir, "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({int(id) for id in (*ids, tokenizer_eos) if id is not None}))


def _longest_token_bytes(spec: dict[str, Any], table: Sequence[bytes]) -> int | None:
    """The most bytes of text that one token can take up, or None where there is no such number.

    There is none if a token may swallow any run of spaces beside it, or of unknown characters, or if text is
    dropped before it is cut. (What a chat template trims, and characters that a vocabulary lacks, do
    count: a text of little else is refused early.)
    """
    model = spec["model"]
    swallows = any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"])
    if swallows or (model.get("fuse_unk") and not model.get("byte_fallback")):
        return None
    normalizers = _parts(spec.get("normalizer"), "normalizers")
    if any(step["type"] not in SHRINK_OF_NORMALIZER for step in normalizers):
        return None
    cuts = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] not in KEEPING_CUTS or step.get("behavior") == "Removed" for step in cuts):
        return None
    shrink = max((SHRINK_OF_NORMALIZER[step["type"]] for step in normalizers), default=1)
    return shrink * max(map(len, table))


def _parts(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The steps of a section of tokenizer.json, which holds nothing, one step, or a sequence."""
    if step is None:
        return []
    return list(step[name]) if step["type"] == "Sequence" else [step]
