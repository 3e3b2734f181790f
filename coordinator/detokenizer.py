"""Token ids to the text that may be shown so far, one request's state. Pure.

Held back are the bytes of a character that is not complete, and text that could begin a stop string. What is left
at the end is released once: a cut character becomes one replacement character. The text of the answer depends
only on the ids, not on how they were grouped on their way.

A stop string counts only if the token that completes it is number `min_tokens` or later; one that was complete
earlier is plain text and stays so.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from coordinator.stop_strings import StopStrings

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """`text_bytes(id)` is what one token adds to the text.

    `decoded_chars` counts the characters decoded so far, `released_chars` those given out. Once `stopped`, they
    are settled: `released_chars` is the length of the whole answer.
    """

    def __init__(
        self, text_bytes: Callable[[int], bytes], stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._text_bytes = text_bytes
        self._decoder = _utf8_decoder("replace")
        self._in_character = False  # the decoder holds the beginning of one
        self._stops = StopStrings(stops) if stops else None
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""
        self.decoded_chars = 0
        self.released_chars = 0
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes safe to show, often empty. Not to be called once `stopped`."""
        assert not self.stopped
        self._num_tokens += 1
        text = self._decode(self._text_bytes(token_id))
        self.decoded_chars += len(text)
        return self._release(text)

    def finish(self) -> str:
        """The rest, when no more tokens come. It may complete a stop string only by a cut character, which is
        not looked for: what the model wrote there is not known."""
        text, self._held = self._held, ""
        text += self._decoder.decode(b"", final=True)
        self.released_chars += len(text)
        return text

    def _decode(self, raw: bytes) -> str:
        if not self._in_character:
            try:
                return (
                    raw.decode()
                )  # whole characters, as nearly every token is: a sixth of the decoder's time
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(raw)
        self._in_character = bool(self._decoder.getstate()[0])
        return text

    def _release(self, new: str) -> str:
        if self._stops is None:
            self.released_chars += len(new)
            return new
        match = self._stops.feed(new, armed=self._num_tokens >= self._min_tokens)
        text = self._held + new
        if match is None:
            keep = len(text) - self._stops.held_chars
            text, self._held = text[:keep], text[keep:]
        else:
            end, length = match
            text, self._held = text[: len(self._held) + end - length], ""
            self.stopped = True
        self.released_chars += len(text)
        return text
