"""A request: who it is, what it asks for, how its token ids are packed. Pure.

`request_id` is minted by the coordinator and is unique for ever; `attempt` rises with every dispatch and names
one try at it; `incarnation` names one life of a worker process. All three travel on every message, and the
highest attempt wins everywhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, NewType

from pydantic import AfterValidator, Field

from common.bounds import SHORT, Amount, Count, Seconds, TokenId, Word

RequestId = NewType("RequestId", str)
Attempt = NewType("Attempt", int)
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", int)
FrontId = NewType("FrontId", str)

Key = tuple[RequestId, Attempt]
"""One try at one request: what tables of live work are keyed by."""

_ATTEMPTS_PER_EPOCH = 1 << 32


def first_attempt_of_epoch(epoch_s: int) -> Attempt:
    """Attempts of a coordinator started at `epoch_s` (whole seconds since 1970) rise from here.

    A restarted coordinator has a later epoch, so each of its attempts fences all of the old one's.
    """
    return Attempt(epoch_s * _ATTEMPTS_PER_EPOCH)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as they travel: a binary array of little-endian int32."""
    return array("i", ids).tobytes()


def _whole(packed: bytes) -> bytes:
    if len(packed) % 4:
        raise ValueError(f"{len(packed)} bytes are not whole int32 numbers")
    return packed


PackedIds = Annotated[bytes, AfterValidator(_whole)]
"""Token ids from `pack_ids`; a message whose bytes do not divide into ids is refused where it is read."""


def unpack_ids(packed: bytes) -> list[int]:
    ids = array("i")
    ids.frombytes(packed)
    return ids.tolist()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must look like, as text. Only this and the output ids travel; whoever continues replays them."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when the answer ends. A token is a function of this and the tokens before it.

    `seed` is always set (minted when the user gave none). `end_token_ids` end the answer and are masked while
    fewer than `min_tokens` tokens are out: the model's end ids unless the user ignores them, and the user's own.
    `logprobs` is `None` (not asked) or how many alternatives to report beside the chosen token; `prompt_logprobs` is
    the same for every prompt token but the first. `child` numbers the choices of one prompt (`n`).
    """

    max_tokens: Count
    seed: int = 0
    child: Count = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Amount = 1.0
    top_k: TokenId = 0
    min_p: Amount = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    presence_penalty: Amount = 0.0
    frequency_penalty: Amount = 0.0
    logit_bias: tuple[tuple[TokenId, Amount], ...] = ()
    min_tokens: Count = 0
    end_token_ids: tuple[TokenId, ...] = ()
    logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] | None = None
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What the coordinator dispatches. `prompt_ids` is packed int32 (see `pack_ids`).

    `leader` is the request of the same prompt whose KV this one shares (choices 1 and up of `n`); its own id where
    others share this one's; empty where nobody shares. `itl_s` is its tier's target for the gaps of its answer,
    `ttft_s` the one for its first token, `weight` its tier's share. `deadline_s`: seconds left until its first token
    is due, when this was said; for the order alone, nothing ends by it.
    """

    request_id: Annotated[RequestId, SHORT]
    prompt_ids: PackedIds
    sampling: SamplingParams
    front: Annotated[FrontId, SHORT]
    priority: int = 0
    tier: Word = "default"
    tenant: Word = ""
    cache_salt: Word = ""
    leader: Word = ""
    itl_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    deadline_s: Seconds | None = None
    ttft_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids) // 4

    @property
    def follows(self) -> bool:
        """Another request of the same prompt goes first, and this one finds its KV."""
        return self.leader not in ("", self.request_id)

    @property
    def scored_prompt_tokens(self) -> int:
        """The prompt's tokens where their log-probabilities are asked for, else none."""
        return 0 if self.sampling.prompt_logprobs is None else self.prompt_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and longest answer together."""
        return self.prompt_tokens + self.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token: its own, and the best alternatives as (id, log-probability)."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
