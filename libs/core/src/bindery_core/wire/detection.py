"""RequestDecoder: which protocol a connection speaks, found out frame by frame as BookKeeper's bookies do.

| mode | a frame                     | then                                                                         |
|------|-----------------------------|------------------------------------------------------------------------------|
| v3   | parses as a v3 request      | it is one                                                                    |
| v3   | does not                    | the mode is v2 for good, and this frame is the first to be read so           |
| v2   | any                         | read as v2; what cannot be ends the connection                               |

So v2 may follow v3 on a connection, never the other way round. A v2 packet begins with 0, 1 or 2, which as a protobuf
tag means field 0 and never parses; a v3 request begins with 0x0A. There is no greeting: a client just begins.
Source: BookieProtoEncoding.RequestDecoder.
"""

from collections.abc import Sequence
from typing import Protocol

from bindery_core.errors import BadRequest
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import AddRequest, Request, Response


class Codec(Protocol):
    """How a bookie writes its answers: the modules `v2` and `v3`."""

    @property
    def VERSION(self) -> int:
        """2 or 3."""
        ...

    def encode_response(self, response: Response) -> bytes: ...

    def encode_responses(self, responses: Sequence[Response]) -> bytes: ...

    def encode_add_responses(self, requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes: ...


class RequestDecoder:
    """The requests of one connection. Invariant: once `is_v2`, always."""

    __slots__ = ("is_v2",)

    def __init__(self) -> None:
        self.is_v2 = False

    def decode(self, messages: Sequence[bytes]) -> tuple[list[Request], list[Request]]:
        """(v3 requests, v2 requests that follow them), in order. Raises BadRequest: close the connection."""
        if self.is_v2:
            return [], v2.decode_requests(messages)
        requests: list[Request] = []
        decode = v3.decode_request
        for message in messages:
            try:
                requests.append(decode(message))
            except BadRequest:
                self.is_v2 = True
                break
        return requests, v2.decode_requests(messages[len(requests) :]) if self.is_v2 else []
