"""Heads of requests and responses in frames: lines that end with a newline.

    POST /v1/topics/public/default/t/messages?producer=p     200
    host:broker-1:8080                                       content-type:application/json
    content-length:5                                         content-length:34

Names are lower case. The rules are those of the HTTP/1.1 port: nothing that an HTTP parser would refuse, or that two
programs could understand differently, reaches the application.

| head                                                     | is                                               |
|----------------------------------------------------------|--------------------------------------------------|
| with bytes that HTTP does not allow, or without its form | a `ProtocolViolation`: a broker does not send it |
| with more than HEADERS_MAX headers, or too many bytes    | the same                                         |
| with a header that concerns one connection (HOP_HEADERS) | the same                                         |
| with several `Content-Length`, or one that is no number  | the same                                         |

Source: RFC 9110 sections 5.5, 5.6.2, 7.6.1, 9.1; RFC 9112 section 6.3.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from bindery_kit.multiplex.frames import ProtocolViolation

HEAD_SIZE_MAX: Final = 36 * 1024
"""Maximum bytes of a head. More than that of an HTTP/1.1 request, because the passing broker adds headers."""
HEADERS_MAX: Final = 110
"""Maximum number of headers, for the same reason."""
HOP_HEADERS: Final = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"http2-settings",
    )
)  # fmt: skip
"""Headers that concern one connection, and `Expect`, which frames make needless."""

_LINES: Final = rb"((?:\n[!#$%&'*+\-.^_`|~0-9a-z]{1,256}:[\t\x20-\x7e\x80-\xff]*){0," + b"%d})" % HEADERS_MAX
_REQUEST: Final = re.compile(rb"([A-Z]{1,20}) (/[\x21-\x7e]*)" + _LINES)
_RESPONSE: Final = re.compile(rb"([1-5][0-9]{2})" + _LINES)
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")

Headers = list[tuple[bytes, bytes]]


class RequestHead(NamedTuple):
    method: str
    target: bytes
    """Path and query."""
    headers: Headers
    length: int | None
    """The announced bytes of the body; None: it is not announced."""


def encode_request(method: str, target: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the payload of a REQUEST frame. Raises ProtocolViolation for a request that must not be sent."""
    lines = [b"%b:%b" % (name.lower(), value) for name, value in headers]
    payload = b"\n".join((f"{method} {target}".encode("latin-1"), *lines))
    _check_size(payload)
    if payload.count(b"\n") != len(lines) or _REQUEST.fullmatch(payload) is None:
        raise ProtocolViolation("the request has characters that a head cannot have")
    return payload


def decode_request(payload: bytes) -> RequestHead:
    """Raises ProtocolViolation."""
    _check_size(payload)
    found = _REQUEST.fullmatch(payload)
    if found is None:
        raise ProtocolViolation("the head of a request has no valid form")
    method, target, lines = found.groups()
    headers = _headers(lines)
    length: int | None = None
    for name, value in headers:
        if name == b"content-length":
            if length is not None or not _LENGTH.fullmatch(value):
                raise ProtocolViolation("a request has no valid Content-Length")
            length = int(value)
        elif name in HOP_HEADERS:
            raise ProtocolViolation(f"a request has the header {name.decode('ascii')}")
    return RequestHead(method.decode("ascii"), target, headers, length)


def encode_response(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the payload of a RESPONSE frame. Raises ProtocolViolation if a header is not valid."""
    lines = [b"%b:%b" % (name.lower(), value) for name, value in headers]
    payload = b"\n".join((b"%d" % status, *lines))
    _check_size(payload)
    if payload.count(b"\n") != len(lines) or _RESPONSE.fullmatch(payload) is None:
        raise ProtocolViolation("the response has characters that a head cannot have")
    return payload


def decode_response(payload: bytes) -> tuple[int, Headers]:
    """Return status and headers. Raises ProtocolViolation."""
    _check_size(payload)
    found = _RESPONSE.fullmatch(payload)
    if found is None:
        raise ProtocolViolation("the head of a response has no valid form")
    return int(found[1]), _headers(found[2])


def _headers(lines: bytes) -> Headers:
    headers: Headers = []
    for line in lines.split(b"\n")[1:]:
        name, _, value = line.partition(b":")
        headers.append((name, value.strip(b" \t")))
    return headers


def _check_size(payload: bytes) -> None:
    if len(payload) > HEAD_SIZE_MAX:
        raise ProtocolViolation(f"a head of {len(payload)} bytes")
