"""Protocol version 3: protobuf messages (bookkeeper.proto), one per frame, as the structs of `messages`.

Encoding gives whole frames, length included; decoding takes what `framing.FrameDecoder` cut out, without the length.
Adds and reads go through `v3_fast`; all that is rare, and all that is odd, through `v3_generated`, which is imported
when it is needed: protobuf takes a sixth of a bookie's start.

What a bookie makes of requests that it cannot serve (source: BookKeeper's decoder, observed on 4.17):
- unreadable: no protobuf, a required field missing, an operation or version outside its enum: BadRequest is raised, and
  the connection is to be closed. (A server that also speaks version 2 tries that first.)
- version 1 or 2, an operation nobody serves, or one whose sub-message is missing: OtherRequest.
- unknown fields, and unknown numbers in a flag, do not matter.
A response has two statuses. The outer one counts unless it is OK, as for BookKeeper's client; we write both.
"""

from collections.abc import Callable, Iterable, Sequence

from bindery_core.errors import BadRequest
from bindery_core.wire import v3_fast
from bindery_core.wire.messages import (
    AddRequest,
    AddResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
)

VERSION = 3
PATTERN_COUNT_MIN = 4
"""Adds or reads before looking for a pattern in them is worth it, and that one must serve to have been worth it."""
PATTERN_PAUSE = 64
"""As many to go by after a pattern that was not worth it: they are of many ledgers."""

AUTH_DISABLED_PLUGIN = "AuthDisabledPlugin"
"""The plugin name by which a bookie says that it asks for no authentication."""


def encode_request(request: Request) -> bytes:
    """The frame of one request, length included."""
    if type(request) is AddRequest:
        return b"".join(v3_fast.add_request_parts(request))
    if type(request) is ReadRequest:
        return v3_fast.encode_read_request(request)
    from bindery_core.wire import v3_generated

    return v3_generated.encode_request(request)


def encode_requests(requests: Iterable[Request]) -> bytes:
    """The frames of many requests, one behind the other: one write for a whole batch, each body copied once."""
    parts: list[bytes] = []
    for request in requests:
        if type(request) is AddRequest:
            parts += v3_fast.add_request_parts(request)
        else:
            parts.append(encode_request(request))
    return b"".join(parts)


def decode_request(message: bytes) -> Request:
    """One request. Raises BadRequest when it is unreadable."""
    request = v3_fast.decode_request(message)
    if request is not None:
        return request
    from bindery_core.wire import v3_generated

    return v3_generated.decode_request(message)


def decode_requests(messages: Sequence[bytes]) -> list[Request]:
    """Many requests, in order. Raises BadRequest at the first unreadable one."""
    requests, error = decode_readable(messages)
    if error is not None:
        raise error
    return requests


def decode_readable(messages: Sequence[bytes]) -> tuple[list[Request], BadRequest | None]:
    """Requests in order, up to the first unreadable one; then what is wrong with it."""
    return RequestReader().decode_readable(messages)


class RequestReader:
    """The requests of one connection, batch after batch: a row of adds or of reads is read by the pattern of its first
    ones, even when each comes alone."""

    __slots__ = ("_follow", "_followed", "_wait")

    def __init__(self) -> None:
        self._follow: Callable[[bytes], AddRequest | ReadRequest | None] | None = None
        self._followed = 0
        """Requests that the pattern served so far, and the one that it was made of."""
        self._wait = PATTERN_COUNT_MIN - 1
        """Adds and reads to go by before a pattern is looked for."""

    def decode_readable(self, messages: Sequence[bytes]) -> tuple[list[Request], BadRequest | None]:
        """As the function of this name."""
        requests: list[Request] = []
        append = requests.append
        follow, wait = self._follow, self._wait
        looked_at = -self._followed
        """Where the pattern was made, by its place in this batch."""
        error: BadRequest | None = None
        try:
            for message in messages:
                if follow is not None:
                    followed = follow(message)
                    if followed is not None:
                        append(followed)
                        continue
                    follow = None
                    wait = 0 if len(requests) - looked_at >= PATTERN_COUNT_MIN else PATTERN_PAUSE
                request = decode_request(message)
                append(request)
                if type(request) is AddRequest or type(request) is ReadRequest:
                    if wait:
                        wait -= 1
                    else:
                        pattern = v3_fast.pattern_of(message, request)
                        if pattern is not None:
                            follow, looked_at = pattern.decode, len(requests) - 1
        except BadRequest as unreadable:
            error = unreadable
        self._follow, self._wait, self._followed = follow, wait, len(requests) - looked_at
        return requests, error


def encode_response(response: Response) -> bytes:
    """The frame of one response, length included."""
    if type(response) is AddResponse:
        return v3_fast.encode_add_response(response)
    if type(response) is ReadResponse:
        return b"".join(v3_fast.read_response_parts(response))
    from bindery_core.wire import v3_generated

    return v3_generated.encode_response(response)


def encode_responses(responses: Iterable[Response]) -> bytes:
    """The frames of many responses, one behind the other, each body copied once."""
    parts: list[bytes] = []
    for response in responses:
        if type(response) is ReadResponse:
            parts += v3_fast.read_response_parts(response)
        else:
            parts.append(encode_response(response))
    return b"".join(parts)


def encode_add_responses(requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes:
    """The answers to a group of adds, in one piece. The ids are those of the requests, not those of their bodies."""
    return v3_fast.encode_add_responses(requests, statuses)


def encode_read_responses(responses: Sequence[ReadResponse]) -> bytes:
    """The answers to a group of reads, in one piece, each body copied once."""
    return v3_fast.encode_read_responses(responses)


def decode_response(message: bytes) -> Response:
    """One response. Raises BadRequest when it is unreadable."""
    response = v3_fast.decode_response(message)
    if response is not None:
        return response
    from bindery_core.wire import v3_generated

    return v3_generated.decode_response(message)


def decode_responses(messages: Sequence[bytes]) -> list[Response]:
    """Many responses, in order. Raises BadRequest at the first unreadable one."""
    fast = v3_fast.decode_response
    return [fast(message) or decode_response(message) for message in messages]
