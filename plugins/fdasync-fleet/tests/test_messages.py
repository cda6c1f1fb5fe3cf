"""What instances say to each other: every message there and back, and nothing else gets through."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from fdasync_fleet import messages
from fdasync_fleet.messages import (
    MAX_MESSAGE_NBYTES,
    PROTOCOL,
    BlocksOffer,
    BlocksTaken,
    Heartbeat,
    LeaseDrop,
    Message,
    decode,
    encode,
)
from hypothesis import given
from hypothesis import strategies as st

from fdasync.errors import ProtocolError
from tests.support.helpers import case_settings
from tests.support.message_strategies import INFOS, TYPES, is_sound, messages_of, of_info, raw

# headers that speak of more than there is: arrays, strings, bytes, maps, extensions
HOSTILE = [
    # of an array, of bytes, of a map
    b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xdd\x7f\xff\xff\xff", b"\xdc\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xda\xff\xff",
    b"\xc6\x00\x7f\xff\xff", b"\xde\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdd\x00\x40\x00\x00",
]  # fmt: skip


def test_every_message_is_in_the_union_and_has_a_tag_of_its_own():
    kinds = {kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)}
    assert kinds - {Message} == set(TYPES)
    tags = [info.tag for info in INFOS.values()]
    assert len(set(tags)) == len(tags)


# a hand-over, blocks, rows, answers, events, commands, and what has no field of its own
_KINDS = (
    messages.BlocksTaken, messages.Rows, messages.Outputs, messages.KvEventBatch, messages.Call, messages.Failed,
    messages.HandOff,
)  # fmt: skip


@pytest.mark.ci(after=len(_KINDS))
@pytest.mark.parametrize("kind", sorted(TYPES, key=lambda kind: kind not in _KINDS), ids=lambda kind: kind.__name__)
def test_every_message_goes_there_and_back(kind):
    @case_settings(60)
    @given(of_info(INFOS[kind]))
    def check(message):
        data = encode(message)
        for form in (data, bytearray(data), memoryview(data)):
            back = decode(form)
            assert back == message
            assert type(back) is kind
        assert is_sound(back)
        assert encode(back) == data

    check()


@st.composite
def damaged(draw):
    """A real encoding that was cut, changed, extended, or joined with another."""
    data = bytearray(encode(draw(messages_of())))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        to = draw(st.integers(at, min(len(data), at + 12)))
        how = draw(st.sampled_from(["cut", "byte", "insert", "remove", "splice", "hostile"]))
        if how == "cut":
            del data[at:]
        elif how == "byte" and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "remove":
            del data[at:to]
        elif how == "splice":
            other = encode(draw(messages_of()))
            data[at:] = other[draw(st.integers(0, len(other))) :]
        elif how == "hostile":
            data[at:to] = draw(st.sampled_from(HOSTILE))
    return bytes(data)


@pytest.mark.heavy("bytes of a stranger, in every message")
@case_settings(500)
@given(damaged() | st.binary(max_size=64))
def test_whatever_arrives_is_a_message_within_its_bounds_or_a_protocol_error(data):
    try:
        message = decode(data)
    except ProtocolError:
        return
    assert is_sound(message), message


@pytest.mark.ci(after=3)
@pytest.mark.parametrize("header", HOSTILE, ids=bytes.hex)
def test_a_header_takes_no_memory_for_what_is_not_there(header):
    """Wherever it stands: in the place of the message, and of any byte of any message."""
    bodies = [header, header * 20]
    for kind in TYPES:
        data = encode(minimal(kind))
        bodies += [data[:at] + header + rest for at in range(len(data) + 1) for rest in (b"", data[at + 1 :])]
    tracemalloc.start()
    try:
        for body in bodies:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                message = decode(body)
            except ProtocolError:
                message = None
            assert tracemalloc.get_traced_memory()[1] - before < 64 << 10, body.hex()
            assert message is None or is_sound(message)
    finally:
        tracemalloc.stop()


def minimal(kind):
    """The same message each time."""
    values = {field.name: _least(field.type) for field in INFOS[kind].fields if field.required}
    return kind(**values)


def _least(info):
    if isinstance(info, msgspec.inspect.StructType):
        return info.cls(**{field.name: _least(field.type) for field in info.fields if field.required})
    if isinstance(info, msgspec.inspect.UnionType):
        return _least(info.types[0])
    if isinstance(info, msgspec.inspect.TupleType):
        return tuple(map(_least, info.item_types))
    if isinstance(info, msgspec.inspect.LiteralType):
        return info.values[0]
    least = getattr(info, "min_length", None) or 0
    plain = {"StrType": "x" * least, "BytesType": b"x" * least, "BoolType": False, "NoneType": None}
    return plain.get(type(info).__name__, () if isinstance(info, msgspec.inspect.VarTupleType) else 0)


def test_nesting_without_end_is_refused():
    for body in (b"\x91" * 500_000, b"\x81\xa1x" * 500_000, b"\x92\xa4drop" + b"\x91" * 500_000):
        with pytest.raises(ProtocolError):
            decode(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\xc1",
        raw(),
        raw("nothing of ours"),
        raw("drop", "r", 0),
        raw("drop", "r", 0, "why", "and more"),
        raw("drop", "", 0, "an empty name"),
        raw("drop", "x" * 257, 0, "a long name"),
        raw("drop", "r", -1, "a negative attempt"),
        raw("drop", "r", 1 << 20, "a large attempt"),
        raw("drop", "r", 1.5, "no integer"),
        raw("drop", "r", True, "no integer either"),
        raw("drop", b"r", 0, "bytes for a name"),
        raw("drop", "r", 0, "x" * 4097),
        raw("drop", None, 0, ""),
        raw("answer", "r", 0, "perhaps"),
        raw("answer", "r", 0, "denied", 0, float("nan")),
        raw("answer", "r", 0, "denied", 0, -2.0),
        raw("blocks", b"", False, [b"short"], []),
        raw("hello", PROTOCOL, "n", "boss", ""),
        raw("drop", "r", 0, "fine") + b"\x00",
        b"\x94\xa4drop\xa1\xff\x00\xa0",
        {"type": "drop"}.__repr__().encode(),
        msgspec.msgpack.encode({"type": "drop", "request": "r", "attempt": 0, "reason": ""}),
    ],
)
def test_what_is_out_of_bounds_is_refused(body):
    with pytest.raises(ProtocolError, match="are no message"):
        decode(body)


def test_the_limit_of_a_message_holds_both_ways():
    long = messages.Wanted(
        b"c" * 16,
        bytes(4 << 20),
        (b"k" * 16,) * 300_000,
        b"n" * 16,
        "",
        messages.SamplingParams(),
        False,
        0,
        1.0,
        (),
        0,
    )
    with pytest.raises(ProtocolError, match=f"longer than the limit of {MAX_MESSAGE_NBYTES}"):
        encode(messages.LeaseRequest("r", 0, long, 1.0, 1.0))
    tracemalloc.start()
    body = bytes(MAX_MESSAGE_NBYTES + 1)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    with pytest.raises(ProtocolError, match="longer than the limit"):
        decode(body)
    assert tracemalloc.get_traced_memory()[1] - before < 64 << 10
    tracemalloc.stop()


def test_a_refused_field_is_named():
    with pytest.raises(ProtocolError, match=r"\$\[2\]"):
        decode(raw("drop", "r", "no number", ""))


def test_small_messages_are_small():
    assert len(encode(Heartbeat())) < 16
    assert len(encode(BlocksTaken("r" * 36, 0, 1))) < 64
    assert len(encode(LeaseDrop("r", 0, ""))) < 16
    part = messages.Part(0, 1 << 30, 1 << 20)
    offer = BlocksOffer("r", 0, 0, tuple(messages.BlockRef(n, (part, part), (1 << 63, 1 << 63)) for n in range(64)))
    assert len(encode(offer)) < 64 * 64
