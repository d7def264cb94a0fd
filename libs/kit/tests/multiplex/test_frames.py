"""Frames and heads of `bindery-requests/1`, as bytes."""

import pytest
from bindery_kit.multiplex.frames import (
    BODY_SIZE_MAX,
    HEADER,
    Frame,
    FrameReader,
    Kind,
    ProtocolViolation,
    encode,
    encode_number,
)
from bindery_kit.multiplex.heads import (
    HEAD_SIZE_MAX,
    HEADERS_MAX,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)

TRANSCRIPT = [
    (
        Frame(Kind.REQUEST, 1, b"POST /v1/topics/public/default/t/messages?producer=p\nhost:b:8080", False),
        "00000040 00000001 01 00 504f5354202f76312f746f706963732f7075626c69632f64656661756c742f742f6d65737361"
        "6765733f70726f64756365723d700a686f73743a623a38303830",
    ),
    (Frame(Kind.BODY, 1, b"hello", True), "00000005 00000001 03 01 68656c6c6f"),
    (Frame(Kind.RESPONSE, 1, b"200\ncontent-length:2", False), "00000014 00000001 02 00"
     "3230300a636f6e74656e742d6c656e6774683a32"),
    (Frame(Kind.BODY, 1, b"{}", True), "00000002 00000001 03 01 7b7d"),
    (Frame(Kind.CREDIT, 3, b"\x00\x00\x80\x00", False), "00000004 00000003 04 00 00008000"),
    (Frame(Kind.CANCEL, 3, b"\x01", False), "00000001 00000003 05 00 01"),
    (Frame(Kind.PING, 0, b"bindery?", False), "00000008 00000000 06 00 62696e646572793f"),
    (Frame(Kind.PONG, 0, b"bindery?", False), "00000008 00000000 07 00 62696e646572793f"),
    (Frame(Kind.LEAVING, 0, b"\x00\x00\x00\x03", False), "00000004 00000000 08 00 00000003"),
]  # fmt: skip
"""An exchange, in both directions."""
BYTES = b"".join(bytes.fromhex(text) for _, text in TRANSCRIPT)
FRAMES = [frame for frame, _ in TRANSCRIPT]


def test_frames_are_encoded_as_in_the_transcript():
    assert b"".join(encode(kind, stream, data, is_end=end) for kind, stream, data, end in FRAMES) == BYTES
    assert encode_number(Kind.CREDIT, 3, 0x8000) == bytes.fromhex("00000004 00000003 04 00 00008000")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 9, 10, 11, 64])
def test_bytes_may_be_divided_anywhere(size):
    reader = FrameReader()
    found = []
    for at in range(0, len(BYTES), size):
        found += reader.feed(BYTES[at : at + size])
    assert found == FRAMES
    assert reader.held_size == 0


def test_every_truncation_is_incomplete_and_not_wrong():
    for end in range(len(BYTES)):
        found = list(FrameReader().feed(BYTES[:end]))
        assert found == FRAMES[: len(found)]
        assert len(found) < len(FRAMES)


@pytest.mark.parametrize(
    ("size", "stream", "kind", "flags"),
    [
        (0, 1, 0, 0),
        (0, 1, 9, 0),
        (0, 0, Kind.BODY, 0),
        (1, 0, Kind.REQUEST, 0),
        (8, 1, Kind.PING, 0),
        (7, 0, Kind.PING, 0),
        (3, 1, Kind.CREDIT, 0),
        (2, 1, Kind.CANCEL, 0),
        (BODY_SIZE_MAX + 1, 1, Kind.BODY, 0),
        (2**32 - 1, 1, Kind.REQUEST, 0),
        (1, 2**31, Kind.CANCEL, 0),
        (5, 1, Kind.BODY, 2),
        (4, 1, Kind.CREDIT, 1),
    ],
)
def test_a_wrong_header_is_refused_before_its_payload_arrives(size, stream, kind, flags):
    with pytest.raises(ProtocolViolation):
        list(FrameReader().feed(HEADER.pack(size, stream, kind, flags)))


def test_a_reader_keeps_less_than_one_frame():
    reader = FrameReader()
    frame = encode(Kind.BODY, 1, bytes(BODY_SIZE_MAX))
    for _ in range(100):
        assert len(list(reader.feed(frame[:-1]))) == 0
        assert reader.held_size == len(frame) - 1
        assert len(list(reader.feed(frame[-1:]))) == 1


def test_heads_survive_the_way():
    headers = [(b"Host", b"b:8080"), (b"content-length", b"5"), (b"x", b"caf\xc3\xa9 \t;"), (b"y", b"")]
    head = decode_request(encode_request("POST", "/v1/a?b=%20", headers))
    assert head == (
        "POST",
        b"/v1/a?b=%20",
        [(b"host", b"b:8080"), (b"content-length", b"5"), (b"x", b"caf\xc3\xa9 \t;"), (b"y", b"")],
        5,
    )
    assert decode_response(encode_response(204, [(b"A", b"b")])) == (204, [(b"a", b"b")])


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"GET",
        b"get /\nhost:b",
        b"GET  /\nhost:b",
        b"GET / HTTP/1.1\nhost:b",
        b"GET http://b/\nhost:b",
        b"GET /\nHost:b",
        b"GET /\nhost b",
        b"GET /\nhost:b\n",
        b"GET /\n:b",
        b"GET /\nho st:b",
        b"GET /\nhost:b\r",
        b"GET /\nhost:b\0",
        b"GET /\nhost:b\r\nx:y",
        b"GET /caf\xc3\xa9\nhost:b",
        b"POST /\ncontent-length:1\ncontent-length:1",
        b"POST /\ncontent-length:-1",
        b"POST /\ncontent-length:+1",
        b"POST /\ncontent-length:",
        b"POST /\ncontent-length:1, 1",
        b"POST /\ntransfer-encoding:chunked",
        b"POST /\nconnection:close",
        b"POST /\nupgrade:websocket",
        b"POST /\nexpect:100-continue",
        b"GET /\n" + b"\n".join([b"x:y"] * (HEADERS_MAX + 1)),
        b"GET /" + b"x" * HEAD_SIZE_MAX,
    ],
)
def test_what_a_parser_of_http_refuses_is_refused(payload):
    with pytest.raises(ProtocolViolation):
        decode_request(payload)


@pytest.mark.parametrize(
    ("method", "target", "headers"),
    [
        ("GET", "/a b", []),
        ("GET", "/a\nx:y", []),
        ("GET", "/", [(b"x", b"y\nz:1")]),
        ("GET", "/", [(b"x\n", b"y")]),
        ("GET", "/", [(b"x", b"y" * HEAD_SIZE_MAX)]),
    ],
)
def test_a_head_that_would_be_understood_differently_is_not_sent(method, target, headers):
    with pytest.raises(ProtocolViolation):
        encode_request(method, target, headers)


@pytest.mark.parametrize("payload", [b"", b"99", b"2000", b"600", b"200 OK", b"200\nA:b", b"200\na:b\r"])
def test_a_wrong_head_of_a_response_is_refused(payload):
    with pytest.raises(ProtocolViolation):
        decode_response(payload)
