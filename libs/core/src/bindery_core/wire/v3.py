"""Protocol version 3: protobuf messages (bookkeeper.proto), one per frame, as the structs of `messages`.

Encoding returns whole frames, length included; decoding takes the messages of `framing.FrameDecoder`, without the
length. `v3_fast` codes adds and reads, `v3_generated` all other and unusual messages. The latter is imported when
needed, because importing protobuf would take a sixth of a bookie's start time.

How a bookie decodes requests that it cannot serve (source: BookKeeper's decoder, observed on 4.17):
- unreadable (no protobuf, a missing required field, an operation or version outside its enum): raises BadRequest, and
  the connection must be closed. (A server that also supports version 2 first decodes the frame as version 2.)
- version 1 or 2, an operation that is not served, or one whose sub-message is missing: OtherRequest.
- unknown fields, and unknown numbers in a flag, are ignored.

A response has two statuses. The outer one counts unless it is OK, as in BookKeeper's client; both are written.
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
"""Number of adds and reads of a connection that are needed before a pattern is made from the last of them.

Also the minimum number of requests that a pattern must decode to be worth its cost.
"""
PATTERN_PAUSE = 64
"""Number of adds and reads to skip after a pattern that was not worth its cost: they are probably of many ledgers."""

AUTH_DISABLED_PLUGIN = "AuthDisabledPlugin"
"""Plugin name that a bookie sends if it requires no authentication."""


def encode_request(request: Request) -> bytes:
    """Return the frame of one request, length included."""
    if type(request) is AddRequest:
        return b"".join(v3_fast.add_request_parts(request))
    if type(request) is ReadRequest:
        return v3_fast.encode_read_request(request)
    from bindery_core.wire import v3_generated

    return v3_generated.encode_request(request)


def encode_requests(requests: Iterable[Request]) -> bytes:
    """Return the frames of many requests, joined: one write for a whole batch, each body copied once."""
    parts: list[bytes] = []
    for request in requests:
        if type(request) is AddRequest:
            parts += v3_fast.add_request_parts(request)
        else:
            parts.append(encode_request(request))
    return b"".join(parts)


def decode_request(message: bytes) -> Request:
    """Decode one request. Raises BadRequest if it is unreadable."""
    request = v3_fast.decode_request(message)
    if request is not None:
        return request
    from bindery_core.wire import v3_generated

    return v3_generated.decode_request(message)


def decode_requests(messages: Sequence[bytes]) -> list[Request]:
    """Decode many requests, in order. Raises BadRequest at the first unreadable one."""
    requests, error = decode_readable(messages)
    if error is not None:
        raise error
    return requests


def decode_readable(messages: Sequence[bytes]) -> tuple[list[Request], BadRequest | None]:
    """Return the requests before the first unreadable one, in order, and the error of that one."""
    return RequestReader().decode_readable(messages)


class RequestReader:
    """Decodes the requests of one connection, batch by batch.

    A series of adds or of reads is decoded by the pattern of an earlier one, even if each arrives alone.
    """

    __slots__ = ("_follow", "_followed", "_wait")

    def __init__(self) -> None:
        self._follow: Callable[[bytes], AddRequest | ReadRequest | None] | None = None
        self._followed = 0
        """Number of requests that the pattern decoded so far, including the one that it was made from."""
        self._wait = PATTERN_COUNT_MIN - 1
        """Number of adds and reads to skip before a pattern is searched for."""

    def decode_readable(self, messages: Sequence[bytes]) -> tuple[list[Request], BadRequest | None]:
        """Like the function of this name. Patterns are kept from one call to the next."""
        requests: list[Request] = []
        append = requests.append
        follow, wait = self._follow, self._wait
        looked_at = -self._followed
        """Index in this batch of the request that the pattern was made from."""
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
    """Return the frame of one response, length included."""
    if type(response) is AddResponse:
        return v3_fast.encode_add_response(response)
    if type(response) is ReadResponse:
        return b"".join(v3_fast.read_response_parts(response))
    from bindery_core.wire import v3_generated

    return v3_generated.encode_response(response)


def encode_responses(responses: Iterable[Response]) -> bytes:
    """Return the frames of many responses, joined, each body copied once."""
    parts: list[bytes] = []
    for response in responses:
        if type(response) is ReadResponse:
            parts += v3_fast.read_response_parts(response)
        else:
            parts.append(encode_response(response))
    return b"".join(parts)


def encode_add_responses(requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes:
    """Return the responses to a group of adds, joined. The ids are those of the requests, not those in their bodies."""
    return v3_fast.encode_add_responses(requests, statuses)


def encode_read_responses(responses: Sequence[ReadResponse]) -> bytes:
    """Return the responses to a group of reads, joined, each body copied once."""
    return v3_fast.encode_read_responses(responses)


def decode_response(message: bytes) -> Response:
    """Decode one response. Raises BadRequest if it is unreadable."""
    response = v3_fast.decode_response(message)
    if response is not None:
        return response
    from bindery_core.wire import v3_generated

    return v3_generated.decode_response(message)


def decode_responses(messages: Sequence[bytes]) -> list[Response]:
    """Decode many responses, in order. Raises BadRequest at the first unreadable one."""
    fast = v3_fast.decode_response
    return [fast(message) or decode_response(message) for message in messages]
