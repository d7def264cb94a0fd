"""Frames are decoded for every split of the stream, and an invalid length ends the stream."""

import time
import tracemalloc

import pytest
from bindery_core.errors import BadRequest, TooLarge
from bindery_core.wire.framing import FRAME_SIZE_MAX, FrameDecoder
from hypothesis import given, settings
from hypothesis import strategies as st


def framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def test_every_split_point_gives_the_same_messages() -> None:
    messages = [b"a", b"bc" * 10, b"\x00\x00\x00\x01", b"d" * 300]
    stream = framed(*messages)
    for first in range(len(stream) + 1):
        for second in range(first, min(first + 7, len(stream) + 1)):
            decoder = FrameDecoder()
            pieces = (stream[:first], stream[first:second], stream[second:])
            assert [message for piece in pieces for message in decoder.feed(piece)] == messages
            assert decoder.buffered_size == 0


def test_every_truncation_holds_back_the_last_message() -> None:
    messages = [b"abc", b"defgh"]
    stream = framed(*messages)
    for cut in range(len(stream)):
        decoder = FrameDecoder()
        assert decoder.feed(stream[:cut]) == (messages[:1] if cut >= 7 else [])
        assert decoder.buffered_size == (cut - 7 if cut >= 7 else cut)
        assert decoder.needed_size >= decoder.buffered_size


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=50), max_size=20), st.lists(st.integers(1, 40), min_size=1))
def test_any_split_gives_the_same_messages(messages: list[bytes], sizes: list[int]) -> None:
    stream = framed(*messages)
    decoder = FrameDecoder()
    found = []
    at = step = 0
    while at < len(stream):
        size = sizes[step % len(sizes)]
        found += decoder.feed(stream[at : at + size])
        at += size
        step += 1
    assert found == messages


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
def test_a_length_that_is_not_positive_is_a_bad_request(length: int) -> None:
    with pytest.raises(BadRequest, match=f"length={length}"):
        FrameDecoder().feed(length.to_bytes(4, "big", signed=True))


def test_the_limit_counts_the_length_field() -> None:
    largest = bytes(FRAME_SIZE_MAX - 4)
    assert FrameDecoder().feed(framed(largest)) == [largest]
    with pytest.raises(TooLarge, match=f"frame_size_max={FRAME_SIZE_MAX}"):
        FrameDecoder().feed((FRAME_SIZE_MAX - 3).to_bytes(4, "big"))


def test_the_limit_is_checked_before_the_frame_arrives() -> None:
    decoder = FrameDecoder(frame_size_max=100)
    assert decoder.feed(framed(b"x" * 96)[:50]) == []
    assert decoder.feed(framed(b"x" * 96)[50:]) == [b"x" * 96]
    with pytest.raises(TooLarge):
        decoder.feed(b"\x00\x00\x00\x61")


def test_a_large_frame_in_many_small_feeds_takes_linear_time() -> None:
    """Quadratic copying would take minutes; the limit is far from both linear and quadratic time."""
    stream = framed(bytes(4 * 1024 * 1024))
    decoder = FrameDecoder()
    started = time.process_time()
    found = [message for at in range(0, len(stream), 100) for message in decoder.feed(stream[at : at + 100])]
    assert [len(message) for message in found] == [4 * 1024 * 1024]
    assert time.process_time() - started < 20


def test_a_large_frame_in_many_small_feeds_takes_about_its_size_in_memory() -> None:
    """An object per feed would take about 24 times the size of two bytes."""
    size = 512 * 1024
    decoder = FrameDecoder()
    tracemalloc.start()
    try:
        decoder.feed(size.to_bytes(4, "big"))
        for number in range(size // 2 - 1):
            assert decoder.feed(bytes((number & 0xFF, 1))) == []
        held, most = tracemalloc.get_traced_memory()
        assert max(held, most) < 1.5 * size
        (message,) = decoder.feed(b"ab")
        assert len(message) == size
        assert (message[:4], message[-4:]) == (b"\x00\x01\x01\x01", bytes((((size // 2 - 2) & 0xFF), 1)) + b"ab")
        del message
        assert tracemalloc.get_traced_memory()[0] < 4096, "nothing of the frame is kept"
    finally:
        tracemalloc.stop()
    assert decoder.buffered_size == 0
