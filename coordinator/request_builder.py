"""A checked body and a tokenizer make the request that the cluster gets.

Here is what depends on the model: whether it is served, whether token ids are in its vocabulary, how much room
the context leaves. The rule for room: prompt + max_tokens may be as long as the context, which is the longest
that any pair of workers holds. `max_tokens` absent means what fits for chat, and 16 (or what fits) for text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.errors import BadRequest, NoWorker, UnsupportedField
from common.request import FrontId, Grammar, Request, RequestId, SamplingParams, pack_ids, unpack_ids
from coordinator.answer_size import check_echoed_bytes, check_echoed_logprobs, check_whole, most_tokens
from coordinator.echo import EchoedPrompt, echoed_prompt
from coordinator.errors_http import model_not_found, quoted
from coordinator.gateway import Gateway
from coordinator.openai.schema import MAX_CHOICES, ChatFields, CompletionFields, TextFields
from coordinator.openai.schema_keywords import first_fault
from coordinator.structured_output import StructuredOutput
from coordinator.tiers import Tiers
from coordinator.tokenizer import CHARS_PER_TOKEN, Tokenizer
from coordinator.tools.families import FAMILIES, Family
from coordinator.tools.use import ToolUse, tool_use

DEFAULT_TEXT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks for, a request for each choice in order, and how the answers are to be shown."""

    requests: tuple[Request, ...]
    model: str
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    tools: ToolUse | None = None
    echoed: tuple[EchoedPrompt, ...] = ()
    """The prompt that each choice begins with, if they do."""
    empty: bool = False
    """The prompts are all that is wanted."""

    @property
    def request(self) -> Request:
        """The first choice, whose id stands for all."""
        return self.requests[0]

    @property
    def needs_workers(self) -> bool:
        """Not where prompts are shown as they came and nothing else is wanted."""
        return not self.empty or self.request.sampling.prompt_logprobs is not None

    @property
    def leaders(self) -> list[int]:
        """Choices that are the first of their prompt."""
        return [choice for choice, request in enumerate(self.requests) if not request.follows]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once, however many choices it has."""
        return sum(self.requests[choice].prompt_tokens for choice in self.leaders)

    def with_tools(self, tools: ToolUse, grammar: Grammar | None) -> Job:
        if grammar is None:
            return replace(self, tools=tools)
        requests = tuple(
            replace(request, sampling=replace(request.sampling, grammar=grammar)) for request in self.requests
        )
        return replace(self, requests=requests, tools=tools)


class RequestBuilder:
    """`seed` starts the seeds of requests that bring none; None draws them from the system."""

    def __init__(
        self,
        gateway: Gateway,
        tokenizer: Tokenizer,
        served_models: tuple[str, ...],
        tiers: Tiers,
        front: FrontId,
        seed: int | None = None,
        structured: StructuredOutput | None = None,
        tool_family: Family = FAMILIES["hermes"],
    ) -> None:
        self.structured = structured or StructuredOutput(tokenizer)
        self._gateway = gateway
        self._tokenizer = tokenizer
        self._served_models = served_models
        self._tiers = tiers
        self._front = front
        self._family = tool_family
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    async def chat(self, fields: ChatFields, tenant: str | None) -> Job:
        """Raises BadRequest and its kinds, NoWorker, NotAdmitted."""
        context = self._check(fields, tenant)
        tools = tool_use(self._family, fields.tools, fields.tool_choice, fields.parallel_tool_calls)
        await self._check_form(fields)
        grammar = None if tools is None else await self._forced(fields, tools)
        ids = await self._tokenizer.encode_chat(fields.chat(), context)
        asked = fields.max_completion_tokens if fields.max_tokens is None else fields.max_tokens
        field = "max_tokens" if fields.max_tokens is not None else "max_completion_tokens"
        room = _room(len(ids), context, "messages")
        most = most_tokens(fields.n, fields.num_logprobs, fields.stream)
        if asked is None:
            max_tokens = room if most is None else min(room, most)
        else:
            max_tokens = _fitting(asked, len(ids), context, field)
            check_whole(max_tokens, most, field)
        job = self._job("chatcmpl", fields, [(ids, max_tokens)], fields.num_logprobs, tenant)
        return job if tools is None else job.with_tools(tools, grammar)

    async def text(self, fields: TextFields, tenant: str | None) -> Job:
        """Raises BadRequest and its kinds, NoWorker, NotAdmitted."""
        context = self._check(fields, tenant)
        if len(fields.prompt) * fields.n > MAX_CHOICES:
            asked = f"{len(fields.prompt)} prompts with n = {fields.n}"
            raise BadRequest(
                f"n: {asked} are more than {MAX_CHOICES} choices; send several requests.",
                param="n",
                code="invalid_value",
            )
        await self._check_form(fields)
        prompts = []
        given: Sequence[str | list[int]] = fields.prompt
        for index, prompt in enumerate(given):
            place = "prompt" if len(fields.prompt) == 1 else f"prompt[{index}]"
            ids = await self._prompt_ids(fields, prompt, place, context)
            prompts.append((ids, _text_max_tokens(fields, len(ids), context, place)))
            await asyncio.sleep(0)  # many small ones are as much work as a large one, which has a thread
        job = self._job("cmpl", fields, prompts, fields.num_logprobs, tenant)
        return await self._echoing(job, fields) if fields.echo else job

    async def _echoing(self, job: Job, fields: TextFields) -> Job:
        """The first choice of each prompt is asked for its log-probabilities, and all show them."""
        scored = fields.logprobs is not None
        if scored:
            tokens = sum(request.prompt_tokens for request in job.requests)
            check_echoed_logprobs(tokens * (1 + (fields.logprobs or 0)))
        requests = list(job.requests)
        for choice in job.leaders:
            sampling = replace(requests[choice].sampling, prompt_logprobs=fields.logprobs)
            requests[choice] = replace(requests[choice], sampling=sampling)
        echoed: list[EchoedPrompt] = []
        num_bytes = 0
        token_bytes = self._tokenizer.token_bytes
        for choice, prompt in zip(job.leaders, fields.prompt, strict=True):
            ids = unpack_ids(requests[choice].prompt_ids)
            given = prompt if isinstance(prompt, str) else None
            size = sum(len(token_bytes(id)) for id in ids) if given is None else len(given.encode())
            num_bytes += fields.n * size
            check_echoed_bytes(num_bytes)
            make = partial(echoed_prompt, ids, given, token_bytes, scored=scored)
            one = await self._tokenizer.off_the_loop(CHARS_PER_TOKEN * len(ids) if scored else 0, make)
            echoed += [one] * fields.n
            await asyncio.sleep(0)
        return replace(job, requests=tuple(requests), echoed=tuple(echoed), empty=fields.max_tokens == 0)

    def _check(self, fields: CompletionFields, tenant: str | None) -> int:
        """Everything that needs no prompt. Returns the length of the context."""
        if fields.model not in self._served_models:
            raise model_not_found(fields.model, self._served_models)
        self._tiers.priority(self._tiers.named(fields.service_tier, tenant), fields.priority)
        self._tokenizer.check_ids(fields.stop_token_ids, "stop_token_ids")
        self._logit_bias(fields)
        context = self._gateway.max_model_len()
        if context is None:
            raise NoWorker(self._gateway.health() or "No worker is registered yet.", code="no_worker")
        return context

    async def _prompt_ids(
        self, fields: TextFields, prompt: str | list[int], place: str, context: int
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = await self._tokenizer.encode(prompt, context)
            if not ids:
                raise BadRequest(
                    f"{place}: is empty; give at least one token.", param="prompt", code="invalid_value"
                )
            return ids
        _text_room(fields, len(prompt), context, place)
        self._tokenizer.check_ids(prompt, place)
        return prompt

    async def _check_form(self, fields: CompletionFields) -> None:
        if fields.form is not None:
            self.structured.check_stop_ids(fields.stop_token_ids)
            await self.structured.check(*fields.form)

    async def _forced(self, fields: ChatFields, tools: ToolUse) -> Grammar | None:
        """The grammar that makes sure of a call, checked, where one is forced. An answer has one form. Schemas are held
        to only where a call is forced; elsewhere the model reads them."""
        if fields.form is not None:
            raise UnsupportedField(
                f"{fields.form[1]}: a form of the answer does not go with tools that may be called. Leave one of them "
                "out, or set tool_choice to none.",
                param=fields.form[1],
                code="unsupported_value",
            )
        grammar = tools.grammar()
        if grammar is None:
            return None
        if fields.ignore_eos:
            raise BadRequest(
                "ignore_eos: cannot go with a forced call, which says where the answer ends.",
                param="ignore_eos",
                code="invalid_value",
            )
        self.structured.check_length(grammar, "tools")
        self.structured.check_stop_ids(fields.stop_token_ids, tools.shown_ids)
        for index, tool in enumerate(fields.tools):
            if tool.function.name in tools.functions and tool.function.parameters is not None:
                fault = first_fault(tool.function.parameters)
                if fault is not None:
                    place = f"tools[{index}].function.parameters"
                    raise BadRequest(f"{place}: {fault}.", param=place, code="invalid_value")
        await self.structured.check(grammar, "tools")
        return grammar

    def _logit_bias(self, fields: CompletionFields) -> tuple[tuple[int, float], ...]:
        biases = {}
        for key, value in fields.logit_bias.items():
            digits = key.isascii() and key.isdecimal() and len(key) <= 10
            id = int(key) if digits and key == str(int(key)) else -1  # "01" would be a second name of 1
            if not 0 <= id < self._tokenizer.vocab_size:
                raise BadRequest(
                    f"logit_bias: {quoted(key)} is not a token id of this model, which has 0 to "
                    f"{self._tokenizer.vocab_size - 1}.",
                    param="logit_bias",
                    code="invalid_value",
                )
            biases[id] = value
        return tuple(sorted(biases.items()))

    def _job(
        self,
        id_prefix: str,
        fields: CompletionFields,
        prompts: list[tuple[list[int], int]],
        num_logprobs: int | None,
        tenant: str | None,
    ) -> Job:
        """`prompts` are token ids, each with the most tokens that its answers may have."""
        tier = self._tiers.named(fields.service_tier, tenant)
        id = self._gateway.mint_id(id_prefix)
        biases = self._logit_bias(fields)
        requests: list[Request] = []
        for ids, max_tokens in prompts:
            request = Request(
                request_id=_choice_id(id, len(requests)),
                prompt_ids=pack_ids(ids),
                sampling=self._sampling(fields, max_tokens, num_logprobs, biases),
                front=self._front,
                priority=self._tiers.priority(tier, fields.priority),
                tier=tier,
                tenant=fields.user if tenant is None else tenant,
                cache_salt=fields.cache_salt,
                weight=self._tiers.weight(tier),
                deadline_s=self._tiers.ttft_s(tier),
                itl_s=self._tiers.itl_s(tier),
                ttft_s=self._tiers.ttft_s(tier),
            )
            requests += _choices(request, id, len(requests), fields.n)
        return Job(tuple(requests), fields.model, tuple(fields.stop), fields.stream, fields.include_usage)

    def _sampling(
        self,
        fields: CompletionFields,
        max_tokens: int,
        logprobs: int | None,
        biases: tuple[tuple[int, float], ...],
    ) -> SamplingParams:
        if fields.min_tokens > max_tokens:
            raise BadRequest(
                f"min_tokens: {fields.min_tokens} is more than the {max_tokens} tokens that the answer may have.",
                param="min_tokens",
                code="invalid_value",
            )
        end_ids = () if fields.ignore_eos else self._tokenizer.end_ids
        return SamplingParams(
            max_tokens=max_tokens,
            # A seed is taken as 64 bits, a negative one by its two's complement. Choices of one prompt have one seed
            # and differ by `child`; prompts without a seed get one each, so that the same one twice is no echo.
            seed=self._seeds.getrandbits(63) if fields.seed is None else fields.seed,
            temperature=float(fields.temperature),
            top_p=float(fields.top_p),
            top_k=0 if fields.top_k < 0 else min(fields.top_k, self._tokenizer.vocab_size),
            min_p=float(fields.min_p),
            repetition_penalty=float(fields.repetition_penalty),
            presence_penalty=float(fields.presence_penalty),
            frequency_penalty=float(fields.frequency_penalty),
            logit_bias=biases,
            min_tokens=fields.min_tokens,
            end_token_ids=tuple(sorted({*end_ids, *fields.stop_token_ids})),
            logprobs=logprobs,
            grammar=None if fields.form is None else fields.form[0],
        )


def _choice_id(id: RequestId, place: int) -> RequestId:
    """The first choice has the id that the client sees."""
    return RequestId(f"{id}.{place}") if place else id


def _choices(first: Request, id: RequestId, place: int, n: int) -> list[Request]:
    """`first`, and n - 1 more of the same prompt that follow it, from `place` on among all of the request."""
    if n == 1:
        return [first]
    first = replace(first, leader=first.request_id)
    return [first] + [
        replace(
            first,
            request_id=_choice_id(id, place + child),
            sampling=replace(first.sampling, child=child),
        )
        for child in range(1, n)
    ]


def _text_max_tokens(fields: TextFields, prompt_tokens: int, context: int, place: str) -> int:
    room = _text_room(fields, prompt_tokens, context, place)
    if not fields.max_tokens:
        # Of no token at all, a worker computes one, which is not shown.
        return 1 if fields.max_tokens == 0 else min(DEFAULT_TEXT_MAX_TOKENS, room)
    max_tokens = _fitting(fields.max_tokens, prompt_tokens, context, "max_tokens")
    most = most_tokens(len(fields.prompt) * fields.n, fields.num_logprobs, fields.stream)
    check_whole(max_tokens, most, "max_tokens")
    return max_tokens


def _text_room(fields: TextFields, prompt_tokens: int, context: int, place: str) -> int:
    if fields.max_tokens != 0:
        return _room(prompt_tokens, context, place)
    if fields.logprobs is None:
        return _room(prompt_tokens, context, place, least=0)
    return _room(
        prompt_tokens, context, place, why="; log-probabilities of a prompt need place for one answer token"
    )


def _room(prompt_tokens: int, context: int, place: str, least: int = 1, why: str = "") -> int:
    """Tokens that the context leaves for the answer, at least `least`."""
    if prompt_tokens + least > context:
        raise BadRequest(
            f"{place}: has {prompt_tokens} tokens. The context of this server is {context} tokens, prompt and answer "
            f"together{why}; shorten it to at most {context - least}.",
            param=place.split("[")[0],
            code="context_length_exceeded",
        )
    return context - prompt_tokens


def _fitting(max_tokens: int, prompt_tokens: int, context: int, field: str) -> int:
    if prompt_tokens + max_tokens > context:
        asked = str(max_tokens) if max_tokens < 10**18 else "over 10^18"
        raise BadRequest(
            f"{field}: the prompt has {prompt_tokens} tokens and {field} is {asked}; the context of this server is "
            f"{context} tokens for both. Set {field} to at most {context - prompt_tokens}, or leave it out.",
            param=field,
            code="context_length_exceeded",
        )
    return max_tokens
