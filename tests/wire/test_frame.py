"""Frames: whatever is cut, flipped, made up or too large is refused before it costs memory."""

import contextlib
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ProtocolError
from holdfast.limits import FRAME_BODY_BYTES_MAX
from holdfast.wire.frame import HEADER_BYTES, RECEIVE_BYTES, encode, reply_reader, request_reader
from holdfast.wire.local import messages as m

keys = st.binary(max_size=64 * 16)
numbers = st.integers(0, 2**63 - 1)
requests = st.one_of(
    st.builds(m.Hello, protocol=numbers, peer=st.text(max_size=20), domain=st.text(max_size=8)),
    st.builds(m.Cover, keys=keys),
    st.builds(m.Fetch, keys=keys, deadline_s=st.floats(allow_nan=False)),
    st.builds(m.Release, lease=numbers),
    st.builds(m.Reserve, keys=keys, parent=st.binary(max_size=16), depth=numbers),
    st.builds(m.Commit, ticket=numbers),
    st.builds(m.Abort, ticket=numbers),
    st.just(m.Status()),
    st.just(m.List()),
    st.builds(m.Verify, fingerprint=st.text(max_size=32)),
    st.builds(m.Drop, fingerprint=st.text(max_size=32)),
)
ids = st.integers(0, 2**32 - 1)


def feed(reader, data):
    """Hand bytes over as a socket would, one receive at a time."""
    frames = []
    for start in range(0, len(data), RECEIVE_BYTES):
        reader.feed(data[start : start + RECEIVE_BYTES])
        while frame := reader.next():
            frames.append(frame)
    return frames


@given(st.lists(st.tuples(ids, requests), max_size=8), st.lists(st.integers(1, 400)))
def test_messages_arrive_whole_however_the_stream_is_cut(sent, cuts):
    stream = b"".join(encode(request_id, message) for request_id, message in sent)
    reader, got = request_reader(), []
    for size in cuts:
        got += feed(reader, stream[:size])
        stream = stream[size:]
    got += feed(reader, stream)
    assert [tuple(frame) for frame in got] == sent


@given(requests, st.integers(1, 1_000))
def test_half_a_frame_is_no_message(message, missing):
    data = encode(7, message)
    assert feed(request_reader(), data[: max(0, len(data) - missing)]) == []


@given(st.binary(max_size=4_000))
def test_garbage_raises_a_protocol_error_or_yields_only_decoded_messages(data):
    reader = request_reader()
    try:
        frames = feed(reader, data)
    except ProtocolError:
        return
    for frame in frames:
        assert isinstance(frame.message, msgspec.Struct)


@given(requests, st.data())
def test_a_flipped_byte_never_crashes_the_reader(message, data):
    frame = bytearray(encode(7, message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        assert len(feed(request_reader(), bytes(frame))) <= 1


@given(st.binary(max_size=300))
def test_a_body_that_is_no_message_is_refused(body):
    header = struct.pack("<IIQ", len(body), 1, 0)
    try:
        msgspec.msgpack.decode(body, type=m.Request)
    except (msgspec.MsgspecError, ValueError):
        with pytest.raises(ProtocolError, match="the message of request 1 cannot be decoded"):
            feed(request_reader(), header + body)
    else:
        assert len(feed(request_reader(), header + body)) == 1


@pytest.mark.parametrize("nbytes", [FRAME_BODY_BYTES_MAX + 1, 2**32 - 1])
def test_a_frame_over_the_limit_is_refused_before_memory_is_taken(nbytes):
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match=f"{nbytes} bytes, the limit is"):
            feed(request_reader(), struct.pack("<IIQ", nbytes, 3, 0))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_payload_on_a_connection_without_payloads_is_refused():
    with pytest.raises(ProtocolError, match="payload of 5 bytes"):
        feed(request_reader(), struct.pack("<IIQ", 0, 3, 5))


def test_a_message_too_large_to_send_is_refused_with_the_remedy():
    with pytest.raises(ProtocolError, match=f"the limit is {FRAME_BODY_BYTES_MAX}; send fewer"):
        encode(1, m.Cover(bytes(FRAME_BODY_BYTES_MAX)))


def test_the_largest_message_passes_and_its_memory_is_given_back():
    message = m.Cover(bytes(FRAME_BODY_BYTES_MAX - 128))
    reader = request_reader()
    assert [frame.message for frame in feed(reader, bytes(encode(1, message)))] == [message]
    assert sys.getsizeof(reader._received) < 1 << 10


def test_many_messages_of_one_receive_come_in_their_order():
    reader = request_reader()
    reader.feed(b"".join(encode(number, m.Release(number)) for number in range(10_000)))
    for number in range(10_000):
        assert reader.next() == (number, m.Release(number))
    assert reader.next() is None
    assert not reader._received


@pytest.mark.parametrize(
    "said",
    [{"type": "cover\nWARNING all is well"}, {"type": "\x1b[2J\n" + "a" * 100_000}],
)
def test_an_error_about_garbage_is_one_short_printable_line(said):
    body = msgspec.msgpack.encode(said)
    with pytest.raises(ProtocolError) as caught:
        feed(request_reader(), struct.pack("<IIQ", len(body), 1, 0) + body)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_nested_garbage_is_refused():
    body = b"\x82\xa1x" + b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        feed(request_reader(), struct.pack("<IIQ", len(body), 1, 0) + body)


@pytest.mark.parametrize(
    "reply",
    [
        m.Welcome(1, "abc", b"k" * 32, 4096),
        m.Refused("no"),
        m.Covered(2, 2, {"host": 2}),
        m.Fetched(1, [0, 4096], {"host": 2}, "ok", "all"),
        m.Released(valid=False),
        m.Reserved(1, [-1, 4096], "full"),
        m.Committed(2),
        m.Done(),
        m.ReportReply({"a": [1, {"b": None}]}),
    ],
)
def test_every_reply_survives_the_wire(reply):
    (frame,) = feed(reply_reader(), encode(2**32 - 1, reply))
    assert frame == (2**32 - 1, reply)


def test_header_is_sixteen_little_endian_bytes():
    frame = encode(0x01020304, m.Status())
    assert HEADER_BYTES == 16
    assert frame[:16] == struct.pack("<IIQ", len(frame) - 16, 0x01020304, 0)


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (
            m.Covered(3, 2, {"disk": 2}, 7, 0.5, 0.25, 1.0, "why"),
            (
                "8f0000000500000000000000000000008ba474797065a7636f7665726564a6626c6f636b7303a5776f72746802"
                "a7736f757263657381a46469736b02a4706c616e07aa646561646c696e655f73cb3fe0000000000000aa657870"
                "65637465645f73cb3fd0000000000000ab7265636f6d707574655f73cb3ff0000000000000a6726561736f6ea3"
                "776879aa756e616e73776572656480a770656e64696e6700"
            ),
        ),
        (
            m.Observed([(2048, 0, 0.5)], [(7, 0.04, 0.41)]),
            (
                "4100000005000000000000000000000083a474797065a86f62736572766564a573746570739193cd080000cb3f"
                "e0000000000000a7656e64696e6773919307cb3fa47ae147ae147bcb3fda3d70a3d70a3d"
            ),
        ),
    ],
)
def test_encoded_messages_equal_the_bytes_in_the_wire_reference(message, golden):
    page = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
    assert bytes(encode(5, message)).hex() == golden
    assert golden in "".join(page.read_text().split())


@pytest.mark.parametrize("kind", get_args(m.Request) + get_args(m.Reply))
def test_the_wire_reference_names_every_message_and_its_fields(kind):
    page = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
    fields = ", ".join(kind.__struct_fields__)
    said = (
        f"`{kind.__struct_config__.tag}` {fields}" if fields else f"`{kind.__struct_config__.tag}`"
    )
    assert said in page.read_text()
