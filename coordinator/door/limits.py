"""What the clients together may take of the front, and so what its memory is bounded by. Pure.

    one connection without a request      a head of 64 KiB and one read of 256 KiB
    one request whose body is arriving    max_body_bytes, twice while its parts are joined; the same again for the
                                          bodies of those that its client sent behind it
    one request that waits or is answered its prompt; then either
        a stream                          max_buffered_bytes of tokens that wait, as Python objects; one write, which
                                          is the text of one delta; SEND_BUFFER_BYTES in the system, which doubles it
        an answer sent whole              itself: at most max_model_len tokens, each with its top log-probabilities

The front holds at most `max_connections` of the first and `max_concurrent_requests` of the others, so for streams

    max_connections × 320 KiB + max_concurrent_requests × (max_buffered_bytes + prompt + one write)

beside what the process has when idle, and max_connections × 2 × SEND_BUFFER_BYTES of the system's memory. Under TLS add
64 KiB per connection, from its first byte on. None of it grows with time: a head, a body, and a write that stalls each have their limit.
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
