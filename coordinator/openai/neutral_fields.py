"""Fields that OpenAI or vLLM know and we do not act on: the values that ask for nothing. Pure.

Null is neutral everywhere. Any other value asks for an effect we do not have and is refused by name, so no field
is ever silently ignored. A field that gains an implementation moves from here to `openai/schema`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_NULL_ONLY: tuple[Any, ...] = ()

SHARED: Neutral = {
    "store": (False,),
    "metadata": ({},),
    "safety_identifier": _NULL_ONLY,
    "prompt_cache_key": _NULL_ONLY,
    "prompt_cache_retention": _NULL_ONLY,
    "prompt_cache_options": _NULL_ONLY,
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": _NULL_ONLY,
    "truncation_side": _NULL_ONLY,
    "prompt_logprobs": _NULL_ONLY,
    "allowed_token_ids": _NULL_ONLY,
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "request_id": _NULL_ONLY,
    "structural_tag": _NULL_ONLY,
    "guided_decoding_backend": _NULL_ONLY,
    "guided_whitespace_pattern": _NULL_ONLY,
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "repetition_detection": _NULL_ONLY,
    "logprob_token_ids": _NULL_ONLY,
    "prompt_embeds": _NULL_ONLY,
    "cache_control": _NULL_ONLY,
    "thinking_token_budget": _NULL_ONLY,
    "lora_request": _NULL_ONLY,
}

CHAT: Neutral = {
    **SHARED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "moderation": _NULL_ONLY,
    "audio": _NULL_ONLY,
    "prediction": _NULL_ONLY,
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": _NULL_ONLY,
    # vLLM
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": _NULL_ONLY,
    "media_io_kwargs": ({},),
    "include_reasoning": (True,),
}

TEXT: Neutral = {
    **SHARED,
    "suffix": ("",),
    "add_special_tokens": (True,),
}

STRUCTURED_OUTPUTS: Neutral = {
    # There is one library and no fallback, and white space is never free.
    "disable_fallback": (True, False),
    "disable_any_whitespace": (True, False),
    "disable_additional_properties": (False,),
    "whitespace_pattern": _NULL_ONLY,
    "structural_tag": _NULL_ONLY,
}

TOKENIZE: Neutral = {
    "chat_template": _NULL_ONLY,
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}

STREAM_OPTIONS: Neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

MESSAGE: Neutral = {
    "function_call": _NULL_ONLY,
    "refusal": _NULL_ONLY,
    "audio": _NULL_ONLY,
    "annotations": ([],),
    "reasoning": _NULL_ONLY,
    "reasoning_content": _NULL_ONLY,
}


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True and 1 are different values, 1 and 1.0 are not."""
    return any(_same_kind(value, wanted) and value == wanted for wanted in neutral)


def _same_kind(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, (bool, str, list, dict)):
        return type(value) is type(wanted)
    return isinstance(value, (int, float)) and not isinstance(value, bool)
