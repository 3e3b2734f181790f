"""What the clients together may take of the front, and so what its memory is bounded by. Pure.

    one connection without a request      a head of 64 KiB and one read of 256 KiB
    one request whose body is arriving    max_body_bytes, twice while its parts are joined; the same again for the
                                          bodies of those that its client sent behind it
    one request that waits or is answered its prompts, however many choices it has; then either
        a stream                          max_buffered_bytes of tokens that wait, as Python objects; one write, which
                                          is 64 KiB or the text of one delta; SEND_BUFFER_BYTES in the system, which
                                          doubles it; with echo up to 8 MiB of text and 2^18 log-probabilities
        an answer sent whole              itself over all choices, as objects and as text: by `answer_size` at most
                                          2^20 tokens, or 2^18 log-probabilities, so some 200 MB; of usual size, one
                                          choice of max_model_len tokens, 1 KB a token with twenty alternatives

The front holds at most `max_connections` of the first and `max_concurrent_requests` of the others, so for streams
without echo

    max_connections × 320 KiB + max_concurrent_requests × (max_buffered_bytes + prompts + one write)

beside what the process has when idle, and max_connections × 2 × SEND_BUFFER_BYTES of the system's memory. Under TLS
add 64 KiB per connection, from its first byte on. None of it grows with time: a head, a body, and a write that stalls
each have their limit. Whole answers add up as far as `max_concurrent_requests` lets them: lower it where clients that
are not trusted may ask for many choices.
"""

from __future__ import annotations

from dataclasses import dataclass

SEND_BUFFER_BYTES = 64 << 10
"""Of a socket. Left alone, the system lets it grow to megabytes for a client that reads slowly."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = 4 << 20
    max_buffered_bytes: int = 1 << 20
    max_concurrent_requests: int = 2048
    max_connections: int = 4096
    head_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
