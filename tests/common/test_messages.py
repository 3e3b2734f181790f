"""Messages: every type survives the wire, and nothing but ProtocolViolation comes of what is not a message."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import TypeAdapter

from common.bounds import MAX_WHY_CHARS
from common.errors import ProtocolViolation
from common.group_messages import Join, Published
from common.messages import (
    Abort,
    Accept,
    Blocks,
    DevicePool,
    Handover,
    Heartbeat,
    Later,
    Load,
    Message,
    Nack,
    Offer,
    PeerAddress,
    Prefill,
    Rebind,
    Registered,
    Sender,
    TokenRow,
    Tokens,
)
from common.request import (
    Attempt,
    FrontId,
    Incarnation,
    Request,
    RequestId,
    SamplingParams,
    TokenLogprobs,
    WorkerId,
    pack_ids,
)
from common.wire import MAX_MESSAGE_BYTES, PROTOCOL_MAJOR, TYPES, decode, encode, longest_model_len

WHO = Sender("prefill-0", Incarnation(7))
ID, ATTEMPT = RequestId("r1"), Attempt(3)
REQUEST = Request(
    ID, pack_ids([1, 2, 3]), SamplingParams(max_tokens=4, logit_bias=((5, -1.5),)), FrontId("f")
)
PEER = PeerAddress(
    WorkerId("decode-0"), Incarnation(9), "tcp://h:1", "tcp://h:2", {"shm": "kvferry-9", "tcp": ""}
)

SAMPLES: dict[str, dict[str, Any]] = {
    "Register": {
        "role": "decode",
        "fingerprint": {"dtype": "bfloat16", "heads": 9, "eps": 1e-5, "tied": True, "scaling": None},
        "address": PEER,
        "channels": ("tcp", "shm"),
        "blocks_total": 100,
        "block_size": 16,
        "block_bytes": 1000,
        "max_model_len": 1600,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "device": "cpu",
        "threads": 1,
        "pid": 5,
        "host": "h",
        "versions": {"torch": "2"},
    },
    "Registered": {"max_model_len": 5, "heartbeat_interval_s": 0.5, "fronts": {"f": "tcp://h:3"}},
    "RegistrationRefused": {"field": "dtype", "ours": "a", "theirs": "b"},
    "Heartbeat": {
        "load": {
            "running": 1,
            "waiting": 2,
            "queued_tokens": 3,
            "blocks_free": 4,
            "blocks_held": 5,
            "blocks_cached": 6,
            "step_s": 0.25,
            "step_model": (0.01, 0.0, 1e-6, 1e-4),
        },
        "progress_age_s": 0.0,
        "live": ((ID, ATTEMPT, "decoding"),),
        "last_seq": {"f": 3},
        "counters": {"x_total": 2.0},
        "histograms": {"step_seconds": (1.0, 2.0)},
    },
    "HeartbeatAck": {"known": True, "abort": ((ID, ATTEMPT),)},
    "Prefill": {"request": REQUEST, "output_ids": pack_ids([9]), "target": PEER},
    "Decode": {"request": REQUEST, "output_ids": b""},
    "Rebind": {"target": PEER},
    "Abort": {"reason": "client left"},
    "Started": {"phase": "decode_ready"},
    "Ended": {"outcome": "failed", "durations_s": {"queued": 0.5}, "retryable": False},
    "Drain": {"deadline_s": 3.0},
    "SetRole": {"role": "prefill", "deadline_s": 1.0},
    "Accepted": {"target": PEER},
    "Later": {"retry_after_s": 0.1},
    "Refused": {"reason": "no"},
    "Offer": {
        "request": REQUEST,
        "output_ids": b"",
        "num_tokens": 3,
        "hashes": bytes(16),
        "fingerprint": "f",
    },
    "Accept": {"wanted": (0, 2), "credit_bytes": 10},
    "Block": {"index": 0, "part": 0, "checksum": (1 << 64) - 1, "size": 1000},
    "Blocks": {
        "channel": "shm",
        "rows": ((ID, ATTEMPT, 0, 0, (1 << 64) - 1, 1000, 64000), (ID, ATTEMPT, 1, 0, 5, 9, 0)),
    },
    "Segment": {"worker": "decode-0", "incarnation": 9, "size": 64000, "block_bytes": 1000},
    "DevicePool": {
        "worker": "decode-0",
        "incarnation": 9,
        "size": 64000,
        "block_bytes": 1000,
        "handle": bytes(range(64)),
        "offset": 512,
        "device": bytes(range(16)),
    },
    "NotMapped": {"reason": "not sealed"},
    "Join": {"worker": "decode-0", "incarnation": 9, "block_bytes": 1000, "first": 1 << 40},
    "Published": {"key": "0/1", "value": bytes(range(256))},
    "NotJoined": {"reason": "another life of it"},
    "Credit": {"indices": (0, 1)},
    "Nack": {"indices": (1,), "reason": "checksum"},
    "Handover": {
        "output_ids": pack_ids([4]),
        "logprobs": TokenLogprobs(-0.5, ((4, -0.5), (5, -2.0))),
        "num_blocks": 1,
        "cached_tokens": 0,
    },
    "Revoke": {"reason": "out of blocks"},
    "Cancel": {"reason": "rebound"},
    "Tokens": {
        "seq": 4,
        "rows": (
            TokenRow(ID, ATTEMPT, 0, (4, 5), (TokenLogprobs(-0.5), TokenLogprobs(-1.0)), "stop", 16),
            TokenRow(ID, ATTEMPT, 2, ()),
        ),
    },
    "Submit": {"requests": (REQUEST, REQUEST), "deadline_s": 2.0},
    "Rejected": {"error": "NotAdmitted", "reason": "full", "retry_after_s": 2.0},
    "Progress": {"rows": ((ID, 0, (4, 5)),), "gaps": ((ID, ATTEMPT),)},
    "CancelRequest": {"reason": "client left"},
    "RequestFinished": {"finish": "length"},
    "RequestEnded": {"error": "RequestFailed", "reason": "x"},
}


def sample(name: str) -> Message:
    cls = TYPES[name]
    fields = dict(SAMPLES.get(name, {}))
    for field, value in (("id", ID), ("attempt", ATTEMPT)):
        if field in cls.__dataclass_fields__:
            fields[field] = value
    return TypeAdapter(cls).validate_python(fields)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_round_trip(name: str) -> None:
    message = sample(name)
    assert decode(encode(message, WHO)) == (WHO, message)


def test_bytes_are_pinned() -> None:
    """The envelope and the field names are the protocol: a change here is a new version."""
    assert encode(Abort(ID, ATTEMPT, "left"), WHO) == (
        b"\x87\xa1v\x92\x02\x03\xa1t\xa5Abort\xa4from\xa9prefill-0\xa3inc\x07"
        b"\xa2id\xa2r1\xa7attempt\x03\xa6reason\xa4left"
    )


def raw(**changes: object) -> bytes:
    body: dict[str, object] = {"v": [PROTOCOL_MAJOR, 0], "t": "Abort", "from": "w", "inc": 1}
    body |= {"id": "r", "attempt": 1, "reason": ""}
    packed = msgpack.packb({k: v for k, v in (body | changes).items() if v is not ...})
    assert isinstance(packed, bytes)
    return packed


def test_unknown_fields_of_a_newer_minor_are_ignored() -> None:
    _, message = decode(raw(v=[PROTOCOL_MAJOR, 99], colour="green", nested={"a": [1]}))
    assert message == Abort(RequestId("r"), Attempt(1), "")


@pytest.mark.parametrize(
    "changes",
    [
        {"v": [PROTOCOL_MAJOR + 1, 0]},
        {"v": 1},
        {"v": ...},
        {"t": "Nonsense"},
        {"t": "AboutRequest"},
        {"t": 5},
        {"from": ""},
        {"from": "x" * 201},
        {"from": ...},
        {"inc": "1"},
        {"inc": True},
        {"id": ...},
        {"id": 7},
        {"attempt": "later"},
        {"attempt": None},
        {"reason": 3},
    ],
)
def test_what_is_not_ours_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation):
        decode(raw(**changes))


@pytest.mark.parametrize(
    "message",
    [
        Nack(ID, ATTEMPT, (-1,), "an index counts from the end if it is negative"),
        Accept(ID, ATTEMPT, (0, -2), 10),
        Accept(ID, ATTEMPT, (0,), -1),
        Later(ID, ATTEMPT, float("nan")),
        Later(ID, ATTEMPT, float("inf")),
        Later(ID, ATTEMPT, -1.0),
        Handover(ID, ATTEMPT, b"abc", None, 1, 0),
        Prefill(ID, ATTEMPT, REQUEST, b"abcde", None),
        Prefill(ID, ATTEMPT, Request(ID, b"ab", SamplingParams(1), FrontId("f")), b"", None),
        Offer(ID, ATTEMPT, REQUEST, b"", 0, b"", "f"),
        Offer(RequestId("another"), ATTEMPT, REQUEST, b"", 3, b"", "f"),
        Rebind(ID, ATTEMPT, replace(PEER, control="ipc:///tmp/x")),
        DevicePool(PEER.worker, PEER.incarnation, 4096, 1024, bytes(63), 0, bytes(16)),
        DevicePool(PEER.worker, PEER.incarnation, 4096, 1024, bytes(64), 0, bytes(17)),
        DevicePool(PEER.worker, PEER.incarnation, 4096, 1024, bytes(64), -1, bytes(16)),
        Registered(5, 0.0, {}),
        Registered(5, 0.5, {str(n): "tcp://h:1" for n in range(65)}),
        Abort(RequestId("x" * 2000), ATTEMPT, ""),
        Join(WorkerId("decode-0"), Incarnation(9), 0, 0),
        Join(WorkerId("decode-0"), Incarnation(9), 1000, -1),
        Blocks("tcp", ((ID, ATTEMPT, -1, 0, 5, 9, 0),)),
        Blocks("tcp", ((ID, ATTEMPT, 1, 0, 5, 9, -9),)),
        Blocks("tcp", ((ID, ATTEMPT, 1, 0, 5, 9, 0),) * 65),
        Published("k" * 1025, b""),
        Published("k", bytes(4097)),
        Tokens(1, (TokenRow(ID, ATTEMPT, -1, (5,)),)),
        Tokens(-1, ()),
        *(
            Heartbeat(Load(0, 0, 0, 0, 0, 0, 0.0, model), 0.0, (), {}, {}, {})  # type: ignore[arg-type]
            for model in ((0.1, 0.1, 0.1), (0.1,) * 5, (0.1, 0.1, -0.1, 0.1), (0.1, 0.1, 0.1, float("nan")))
        ),
    ],
)
def test_values_that_would_break_who_uses_them_are_refused(message: Message) -> None:
    with pytest.raises(ProtocolViolation):
        decode(encode(message, WHO))


def test_what_only_people_read_is_cut() -> None:
    (_, message) = decode(encode(Abort(ID, ATTEMPT, "x" * 100_000), WHO))
    assert isinstance(message, Abort) and len(message.reason) == MAX_WHY_CHARS


def test_too_long() -> None:
    with pytest.raises(ProtocolViolation, match="over the limit"):
        decode(encode(Abort(ID, ATTEMPT, "x" * MAX_MESSAGE_BYTES), WHO))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81",
        b"\x91" * 3000 + b"\xc0",
        b"\x81\xa1v" * 3000 + b"\xc0",
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgpack.packb([1, 2]),
        msgpack.packb("text"),
        msgpack.packb({1: 2}),
        msgpack.packb({b"v": 1}),
        msgpack.packb(msgpack.ExtType(4, b"x")),
        msgpack.packb(msgpack.Timestamp(1, 2)),
        b"\xa2\xff\xff",
        raw() + b"\x00",
    ],
)
def test_garbage(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(data)


def test_deep_nesting_inside_a_field() -> None:
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    with pytest.raises(ProtocolViolation):
        decode(raw(reason=deep))
    assert decode(raw(extra=deep))[1] == Abort(RequestId("r"), Attempt(1), "")


def _only_violations(data: bytes) -> None:
    try:
        decode(data)
    except ProtocolViolation:
        return


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_random_bytes(data: bytes) -> None:
    _only_violations(data)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(TYPES)), st.data())
@settings(max_examples=300, deadline=None)
def test_messages_with_one_field_changed(name: str, data: st.DataObject) -> None:
    body = msgpack.unpackb(encode(sample(name), WHO))
    field = data.draw(st.sampled_from(sorted(body)))
    body[field] = data.draw(_VALUES)
    _only_violations(msgpack.packb(body))


@given(st.sampled_from(sorted(TYPES)), st.data())
@settings(max_examples=200, deadline=None)
def test_messages_with_bytes_changed(name: str, data: st.DataObject) -> None:
    whole = bytearray(encode(sample(name), WHO))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    _only_violations(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_longest_prompt_fits_an_offer(block_size: int) -> None:
    length = longest_model_len(block_size)
    request = Request(ID, pack_ids([1]) * length, SamplingParams(5), FrontId("f"))
    offer = Offer(ID, ATTEMPT, request, b"", length, bytes(16 * (length // block_size)), "f" * 32)
    assert len(encode(offer, WHO)) <= MAX_MESSAGE_BYTES
