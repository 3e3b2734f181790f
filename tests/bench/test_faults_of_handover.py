"""The first token's hand-over, and answers that move: group E of the faults that users have met, in virtual time.

What a client reads is made here as the front makes it: from the deltas that came, by an `Answer` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.virtual_cluster import FRONT, Answer as Got
from bench.virtual_model import continuation
from bench.virtual_worker import Shape, StepTime, VirtualWorker
from common.batching import Batch, RowResult
from common.messages import Message, Offer, Role, Tokens
from common.request import Request, RequestId, SamplingParams, pack_ids
from coordinator.answer import Answer, Piece
from coordinator.front import Delta, Front
from coordinator.gateway import TokenDelta
from tests.bench.story_cluster import StoryCluster, check_exact, drawn


def owner(cluster: StoryCluster, name: str) -> str:
    """The decode worker of a request."""
    timeline = cluster.cluster.timeline(RequestId(name), cluster.now)
    assert timeline is not None
    return str(timeline["decode_worker"])


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("prefill", [1, 0])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_BR_072_as_many_tokens_as_were_asked_for(max_tokens: int, prefill: int) -> None:
    """Both pools or one; an answer of one token meets no decode worker where somebody else computes prompts."""
    cluster = StoryCluster(prefill, 1)
    prompts = {f"r{length}": drawn(f"r{length}", length) for length in (1, 15, 16, 17, 300)}
    answers = [cluster.ask(name, prompt, max_tokens) for name, prompt in prompts.items()]
    cluster.until_over(*answers)
    for answer, prompt in zip(answers, prompts.values(), strict=True):
        check_exact(answer, prompt, max_tokens)
    if prefill:
        assert cluster.saw(Offer) == (0 if max_tokens == 1 else len(prompts))
    cluster.settle()


SEAMS = ["as it is", "the first token is said by the decode worker alone", "late", "out of order", "twice"]


@pytest.mark.parametrize("seam", SEAMS)
def test_BR_074_each_token_once_at_the_seam_between_the_workers(seam: str) -> None:
    """The first token is said by both, the others by one: whatever becomes of the words, the answer is the same."""
    cluster = StoryCluster()
    prompt = drawn("r", 40)
    said: list[Message] = []

    def fate(message: Message) -> float | None:
        if not isinstance(message, Tokens):
            return 0.0
        said.append(message)
        of_prefill = len(said) == 1
        late_s = {"late": 0.2, "the first token is said by the decode worker alone": None}
        if of_prefill and seam in late_s:
            return late_s[seam]
        return 0.02 if seam == "out of order" and len(said) % 2 else 0.0

    cluster.fate = fate
    answer = cluster.ask("r", prompt, 20)
    if seam == "twice":
        usual = cluster.network.policy
        cluster.network.policy = lambda parcel: replace(usual(parcel), delays_s=(0.0003, 0.005))
    cluster.until_over(answer)
    check_exact(answer, prompt, 20)
    timeline = cluster.cluster.timeline(RequestId("r"), cluster.now)
    assert timeline is not None and timeline["attempts"] == 1
    cluster.settle()


@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("prefill", [1, 0])
def test_BR_077_what_was_said_counts_towards_what_was_asked_for(prefill: int, deaths: int) -> None:
    """Fifty tokens, of which its worker has said twenty when it dies, and the next one, that was told to leave, ten."""
    cluster = StoryCluster(prefill, 3)
    prompt = drawn("r", 60)
    answer = cluster.ask("r", prompt, 50)
    cluster.until(lambda: len(answer.ids) == 20)
    cluster.kill(owner(cluster, "r"), noticed=True)
    if deaths == 2:
        cluster.until(lambda: len(answer.ids) == 30)
        cluster.drain(owner(cluster, "r"), 0.0)
    cluster.until_over(answer)
    check_exact(answer, prompt, 50)
    timeline = cluster.cluster.timeline(RequestId("r"), cluster.now)
    assert timeline is not None
    assert (timeline["attempts"], timeline["output_tokens"]) == (1 + deaths, 50)
    cluster.settle()


@pytest.mark.parametrize("said", [1, 2, 7, 15, 16, 17])
def test_BR_078_the_place_in_every_choice_is_kept(said: int) -> None:
    """Two choices of one prompt, each with its seed and its number, from a worker that dies: each goes on as itself."""
    cluster = StoryCluster(1, 2)
    prompt = drawn("r", 60)
    requests = [
        Request(
            RequestId(f"c{child}"),
            pack_ids(prompt),
            SamplingParams(40, seed=5 + child, child=child),
            FRONT,
            leader="c0",
        )
        for child in range(2)
    ]
    answers = cluster.submit_group(requests)
    cluster.until(lambda: all(len(answer.ids) >= said for answer in answers))
    assert all(answer.end is None for answer in answers)
    cluster.kill(owner(cluster, "c1"), noticed=True)
    cluster.until_over(*answers)
    for child, answer in enumerate(answers):
        assert (answer.end, answer.ids) == ("length", continuation(prompt, 40, child, 5 + child))
    assert cluster.counted("requests_migrated_total") > 0
    cluster.settle()


# ---------------------------------------------------------------- text


class SaysScript(VirtualWorker):
    """Answers every request with the tokens 0, 1, 2 and so on: who goes on where another stopped says the next one."""

    def compute(self, batch: Batch) -> Sequence[RowResult]:
        rows = list(super().compute(batch))
        for row, seq, start, count in zip(rows, batch.rows, batch.starts, batch.counts, strict=True):
            if row.ids:
                row.ids = (start + count - seq.prompt_len,)  # type: ignore[misc]
        return rows


class HeardFront(Front):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Delta] = []

    def accept(
        self, tokens: Tokens, worker: str, incarnation: int, now: float
    ) -> tuple[list[Delta], list[Message]]:
        deltas, messages = super().accept(tokens, worker, incarnation, now)
        self.heard += deltas
        return deltas, messages


class ScriptedCluster(StoryCluster):
    """Two of each. Token i of an answer is `script[i]`, and one client reads it as text, up to a stop string."""

    def __init__(self, script: list[bytes], stops: Sequence[str] = ()) -> None:
        super().__init__(2, 2)
        self.front = self.heard_front = HeardFront()
        self.text = Answer(lambda id: script[id], SamplingParams(len(script)), stops)
        self.pieces: list[Piece] = []
        self.got: Got = self.ask("r", drawn("r", 50), len(script))

    def make_worker(self, name: str, role: Role, shape: Shape, step_time: StepTime) -> VirtualWorker:
        return SaysScript(name, role, shape, step_time)

    def read(self) -> None:
        """What came since the last time, as the front does it."""
        deltas, self.heard_front.heard = self.heard_front.heard, []
        for delta in deltas:
            if self.text.finish is None:
                self.pieces += self.text.push(TokenDelta(delta.ids, delta.logprobs, delta.finish, 0))
                if self.text.finish is not None and delta.finish is None:
                    self.stop(RequestId("r"))

    def to_the_end(self, kill_after: int | None) -> str:
        while self.got.end is None:
            assert self.clock.step(100.0), "it hangs"
            self.read()
            if kill_after is not None and len(self.got.ids) >= kill_after:
                self.kill(owner(self, "r"), noticed=True)
                kill_after = None
        self.settle()
        return "".join(piece.text for piece in self.pieces)


def split(text: str) -> list[bytes]:
    """Tokens of one to three bytes, so that characters, words and spaces lie across them."""
    raw, sizes = text.encode(), (1, 3, 2, 1, 1, 2)
    tokens: list[bytes] = []
    at = 0
    while at < len(raw):
        size = sizes[len(tokens) % len(sizes)]
        tokens.append(raw[at : at + size])
        at += size
    return tokens


TEXT = " go 😀 now  世界, and mid-word: naïve. The end"


def test_BR_079_characters_words_and_spaces_lie_across_the_seam() -> None:
    """Its worker dies after every single token in turn: the pieces that the client reads are the same."""
    script = split(TEXT)
    undisturbed = ScriptedCluster(script)
    assert undisturbed.to_the_end(None) == TEXT
    for said in range(1, len(script)):
        cluster = ScriptedCluster(script)
        assert cluster.to_the_end(said) == TEXT, said
        assert [p.text for p in cluster.pieces] == [p.text for p in undisturbed.pieces], said
        assert cluster.counted("requests_migrated_total") == (said > 1), (
            "before the hand-over only its place is taken"
        )


@pytest.mark.parametrize(
    ("stops", "kept"), [([" 世界,"], " go 😀 now "), (["mid-word: no", "mid-wort", "naïve."], None)]
)
def test_BR_078_a_stop_string_is_half_matched_when_its_worker_dies(
    stops: list[str], kept: str | None
) -> None:
    script = split(TEXT)
    kept = TEXT[: TEXT.index("naïve.")] if kept is None else kept
    for said in range(1, len(script)):
        cluster = ScriptedCluster(script, stops)
        assert cluster.to_the_end(said) == kept, said
        assert cluster.text.finish == cluster.got.end == "stop"
