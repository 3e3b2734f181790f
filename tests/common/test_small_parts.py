"""Request packing, prefix hashes, fingerprint, counters, ledger, outbox: the small parts everybody leans on."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from common.counters import HISTOGRAM_BUCKETS, Counters, labelled, split_label
from common.effects import ToFront
from common.fingerprint import Value, digest, first_difference
from common.ledger import Ledger
from common.messages import Ended, PromptRow, Sender, TokenRow, Tokens
from common.outbox import MAX_FRONTS, PART_BYTES, Outbox
from common.prefix import extend_chain, join_hashes, seed_hash, split_hashes
from common.request import (
    Attempt,
    FrontId,
    Incarnation,
    Key,
    RequestId,
    TokenLogprobs,
    first_attempt_of_epoch,
    pack_ids,
    unpack_ids,
)
from common.wire import MAX_MESSAGE_BYTES, encode


@given(st.lists(st.integers(0, (1 << 31) - 1)))
def test_ids_pack_and_unpack(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_ids_travel_little_endian() -> None:
    assert pack_ids([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_attempts_of_a_later_epoch_fence_all_of_an_earlier_one() -> None:
    assert first_attempt_of_epoch(0) == 0
    assert first_attempt_of_epoch(1_700_000_000) == 1_700_000_000 << 32
    assert first_attempt_of_epoch(2) - first_attempt_of_epoch(1) == 1 << 32


# Computed once by hand from the rule in common/prefix.py.
PINNED = [
    "9b1c41c0dbc92fa0cfc6b175b3ee2a1c",
    "dc485202b25e411de8d5f05023a38b11",
]


def _chain() -> list[bytes]:
    chain: list[bytes] = []
    extend_chain(chain, seed_hash("fp", "salt"), list(range(9)), 4)
    return chain


def test_BR_064_prefix_hashes_are_pinned() -> None:
    """Equal in every process and every version of the code; a change here empties every cache."""
    assert [content.hex() for content in _chain()] == PINNED


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_BR_064_prefix_hashes_do_not_depend_on_the_process(hash_seed: str) -> None:
    code = (
        "from common.prefix import *; c = []; extend_chain(c, seed_hash('fp', 'salt'), list(range(9)), 4);"
        "print(join_hashes(c).hex())"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "".join(PINNED)


def test_a_prefix_hash_names_everything_before_it() -> None:
    seed = seed_hash("fp")
    long: list[bytes] = []
    extend_chain(long, seed, list(range(16)), 4)
    short: list[bytes] = []
    extend_chain(short, seed, list(range(7)), 4)
    extend_chain(short, seed, list(range(16)), 4)  # goes on where it stopped
    assert short == long and len(long) == 4
    other: list[bytes] = []
    extend_chain(other, seed, [99, *range(1, 16)], 4)
    assert not set(other) & set(long), "equal blocks after different ones are different"
    assert split_hashes(join_hashes(long)) == long


def test_seeds_do_not_run_into_each_other() -> None:
    seeds = {
        seed_hash(*parts) for parts in [("a", "bc", ""), ("ab", "c", ""), ("a", "", "bc"), ("abc", "", "")]
    }
    assert len(seeds) == 4


def test_fingerprints_differ_by_name() -> None:
    ours: dict[str, Value] = {"dtype": "bfloat16", "block_size": 16, "heads": 9}
    assert first_difference(ours, dict(reversed(ours.items()))) is None
    assert digest(ours) == digest(dict(reversed(ours.items())))
    assert first_difference(ours, {**ours, "dtype": "float16"}) == ("dtype", "bfloat16", "float16")
    assert first_difference(ours, {"dtype": "bfloat16", "heads": 9}) == ("block_size", 16, None)
    assert digest(ours) != digest({**ours, "heads": 3})


def test_what_a_person_chose_is_named_before_what_follows_from_it() -> None:
    """`--dtype float32` beside bfloat16 said "block_bytes is 368640 there and 737280 here"."""
    ours: dict[str, Value] = {"block_bytes": 368640, "block_size": 16, "dtype": "bfloat16", "heads": 9}
    ours |= {"architecture": "llama", "linear_policy": "4:64", "kv_dtype": "bfloat16"}
    other_dtype: dict[str, Value] = {
        "dtype": "float32",
        "kv_dtype": "float32",
        "linear_policy": "4:1",
        "block_bytes": 737280,
    }
    other_model: dict[str, Value] = {"architecture": "qwen3", "heads": 4, "block_bytes": 1}

    assert first_difference(ours, {**ours, **other_dtype}) == ("dtype", "bfloat16", "float32")
    assert first_difference(ours, {**ours, "block_size": 32, "block_bytes": 737280}) == ("block_size", 16, 32)
    assert first_difference(ours, {**ours, **other_model}) == ("architecture", "llama", "qwen3")
    assert first_difference(ours, {**ours, "heads": 3, "block_bytes": 1}) == ("heads", 9, 3)
    assert first_difference(ours, {**ours, "block_bytes": 1}) == ("block_bytes", 368640, 1)


@pytest.mark.parametrize("amount", [-1.0, math.nan, math.inf])
def test_counting_cannot_stop_the_work(amount: float) -> None:
    """BR-136."""
    counters = Counters()
    counters.add("x_total", 2.0)
    counters.add("x_total", amount)
    counters.observe("step_seconds", amount)
    assert counters.values["x_total"] == 2.0
    dropped = {n: v for n, v in counters.values.items() if n.startswith("dropped")}
    assert sum(dropped.values()) == 2.0
    assert counters.histograms() == {}


def test_a_total_is_over_all_labels_of_that_name_alone() -> None:
    counters = Counters()
    counters.add("bytes_total", 3.0, channel="tcp")
    counters.add("bytes_total", 4.0, channel="shm")
    counters.add("bytes_total_of_another", 5.0)
    assert (counters.total("bytes_total"), counters.total("none_total")) == (7.0, 0.0)


def test_histograms_put_each_sample_in_one_bucket() -> None:
    counters = Counters()
    bounds = HISTOGRAM_BUCKETS["batch_size"]
    for value in (0.0, 1.0, 1.5, 2.0, 1e9):
        counters.observe("batch_size", value)
    total, count, *buckets = counters.histograms()["batch_size"]
    assert (total, count, len(buckets)) == (1e9 + 4.5, 5, len(bounds) + 1)
    assert (buckets[0], buckets[1], buckets[-1], sum(buckets)) == (2, 2, 1, 5)


def test_labels_are_read_back() -> None:
    name = labelled("late_messages_total", kind="Accept", role="decode")
    assert split_label(name) == ("late_messages_total", {"kind": "Accept", "role": "decode"})
    assert split_label("plain_total") == ("plain_total", {})
    name = labelled("tier_preemptions_total", tier='a","b}')
    assert split_label(name) == ("tier_preemptions_total", {"tier": "a___b_"}), (
        "what a person may call a tier"
    )


def _key(name: str, attempt: int) -> Key:
    return (RequestId(name), Attempt(attempt))


def test_ledger_fences_lower_attempts_only() -> None:
    ledger = Ledger()
    assert not ledger.is_stale(_key("a", 1))
    ledger.saw(_key("a", 5))
    ledger.saw(_key("a", 3))  # late: must not lower the fence
    assert ledger.is_stale(_key("a", 4))
    assert not ledger.is_stale(_key("a", 5)) and not ledger.is_stale(_key("a", 6))
    assert not ledger.is_stale(_key("b", 1))


def test_ledger_is_bounded_and_forgets_the_oldest() -> None:
    ledger = Ledger(limit=3)
    for number in range(5):
        ledger.saw(_key(f"r{number}", 9))
        ledger.end(Ended(*_key(f"r{number}", 9), outcome="finished"))
    assert [ledger.is_stale(_key(f"r{n}", 1)) for n in range(5)] == [False, False, True, True, True]
    assert [ledger.how_ended(_key(f"r{n}", 9)) is not None for n in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_fronts_whose_messages_are_numbered_are_bounded() -> None:
    outbox = Outbox()
    for number in range(MAX_FRONTS + 2):
        outbox.put(FrontId(f"f{number}"), TokenRow(*_key("r", 1), 0, (1,)))
        outbox.flush()
    assert len(outbox.last_seq) == MAX_FRONTS and "f0" not in outbox.last_seq


def test_outbox_sends_one_numbered_message_per_front() -> None:
    outbox = Outbox()
    assert outbox.flush() == []
    rows = [TokenRow(*_key("a", 1), index, (index,)) for index in range(3)]
    one, two = FrontId("f1"), FrontId("f2")
    outbox.put(one, rows[0])
    outbox.put(two, rows[1])
    outbox.put(one, rows[2])
    assert outbox.flush() == [
        ToFront(one, Tokens(1, (rows[0], rows[2]))),
        ToFront(two, Tokens(1, (rows[1],))),
    ]
    outbox.put(one, rows[0])
    assert outbox.flush() == [ToFront(one, Tokens(2, (rows[0],)))]
    assert outbox.last_seq == {"f1": 2, "f2": 1}


@pytest.mark.parametrize(("top", "rows"), [(None, 20_000), (0, 10_000), (20, 4_000), (20, 600)])
def test_outbox_cuts_the_tokens_of_many_steps(top: int | None, rows: int) -> None:
    """A loop that is late has several steps' to send at once. Whole and in order whatever the cuts."""
    logprobs = None if top is None else (TokenLogprobs(-0.123456789, ((2**31 - 1, -1.23456789),) * top),)
    outbox = Outbox()
    given = [
        TokenRow(RequestId(f"cmpl-{at % 256:032x}"), Attempt(2**61), at, (2**31 - 1,), logprobs, "length", 7)
        for at in range(rows)
    ]
    for row in given:
        outbox.put(FrontId("f"), row)
    tokens = [e.message for e in outbox.flush() if isinstance(e, ToFront) and isinstance(e.message, Tokens)]
    assert [message.seq for message in tokens] == list(range(1, len(tokens) + 1))
    assert [row for message in tokens for row in message.rows] == given
    sizes = [len(encode(message, Sender("w", Incarnation(1)))) for message in tokens]
    assert max(sizes) <= PART_BYTES + 200 < MAX_MESSAGE_BYTES
    assert len(sizes) <= 2 * sum(sizes) / PART_BYTES + 2, "hardly filled"
    outbox.put(FrontId("f"), given[0])
    assert len(outbox.flush()) == 1


@pytest.mark.parametrize("top", [0, 20])
def test_outbox_cuts_prompts_into_messages_of_bounded_size(top: int) -> None:
    """Thirty rows of all lengths and one of a whole large chunk, whole and in order whatever the cuts."""
    best = tuple((2**31 - 1, -0.123456789) for _ in range(top))
    lengths = [*range(1, 30), 8192]
    outbox = Outbox()
    outbox.put(FrontId("f"), TokenRow(RequestId("r0"), Attempt(2**61), 0, (5,)))
    for index, length in enumerate(lengths):
        scores = tuple(TokenLogprobs(-float(n), best) for n in range(length))
        outbox.put_prompt(
            FrontId("f"), PromptRow(RequestId(f"{'r' * 100}{index}"), Attempt(2**61), 3, scores)
        )
    messages = [effect.message for effect in outbox.flush() if isinstance(effect, ToFront)]
    assert outbox.flush() == []
    tokens = [message for message in messages if isinstance(message, Tokens)]
    assert [message.seq for message in tokens] == list(range(1, len(messages) + 1))
    assert tokens[-1].rows and not any(message.rows for message in tokens[:-1])
    sizes = [len(encode(message, Sender("w", Incarnation(1)))) for message in tokens]
    assert max(sizes) <= PART_BYTES + 200 < MAX_MESSAGE_BYTES
    assert len(sizes) <= 2 * sum(sizes) / PART_BYTES + 2, "hardly filled"
    for index, length in enumerate(lengths):
        rows = [row for message in tokens for row in message.prompts if row.id.endswith(f"r{index}")]
        assert [row.first for row in rows] == [
            3 + sum(len(before.logprobs) for before in rows[:at]) for at in range(len(rows))
        ]
        assert [one.chosen for row in rows for one in row.logprobs] == [-float(n) for n in range(length)]
