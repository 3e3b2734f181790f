"""How large one answer may be, known from the request and checked before any of it is made. Pure.

A stream leaves as it comes. What is held at once is an answer that is sent whole, and a prompt that is to be shown:
each of a hundred choices may be as long as the context, with twenty alternatives to every token, and that would be
gigabytes. The limits leave what is held of one request at some two hundred megabytes at the very most.
"""

from __future__ import annotations

from common.errors import BadRequest

MAX_WHOLE_TOKENS = 1 << 20
"""Over all choices of an answer that is not streamed: 128 of 8,192 tokens."""
MAX_WHOLE_LOGPROBS = 1 << 18
"""The same where log-probabilities are asked for, each alternative counted: 12,000 tokens with twenty."""
MAX_ECHOED_LOGPROBS = 1 << 18
"""Of prompts, over all choices of a request: a prompt of 12,000 tokens with twenty alternatives, some 6 MB."""
MAX_ECHOED_BYTES = 8 << 20
"""Of prompts, over all choices of a request."""


def most_tokens(choices: int, num_logprobs: int | None, stream: bool) -> int | None:
    """That each choice may have. None where only the context decides."""
    if stream:
        return None
    if num_logprobs is None:
        return MAX_WHOLE_TOKENS // choices
    return MAX_WHOLE_LOGPROBS // (choices * (1 + num_logprobs))


def check_whole(asked: int, most: int | None, field: str) -> None:
    """Raises BadRequest."""
    if most is not None and asked > most:
        raise BadRequest(
            f"{field}: with so many choices and log-probabilities, an answer that is sent whole has at most {most} "
            f"tokens in each choice. Lower {field}, n or the log-probabilities, or set stream to true.",
            param=field,
            code="answer_too_large",
        )


def check_echoed_logprobs(count: int) -> None:
    """Raises BadRequest."""
    if count > MAX_ECHOED_LOGPROBS:
        raise BadRequest(
            f"logprobs: with echo that is {count} log-probabilities of prompts, and one answer shows at most "
            f"{MAX_ECHOED_LOGPROBS}. Lower logprobs or n, or send fewer prompts.",
            param="logprobs",
            code="invalid_value",
        )


def check_echoed_bytes(num_bytes: int) -> None:
    """Raises BadRequest."""
    if num_bytes > MAX_ECHOED_BYTES:
        raise BadRequest(
            f"echo: the prompts of all choices are more than {MAX_ECHOED_BYTES} bytes, which is what one answer shows. "
            "Lower n, send fewer prompts, or leave echo out.",
            param="echo",
            code="answer_too_large",
        )
