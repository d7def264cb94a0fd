"""RequestDecoder: detect the protocol version of a connection frame by frame, as BookKeeper's bookies do.

| mode | frame                       | effect                                                                       |
|------|-----------------------------|------------------------------------------------------------------------------|
| v3   | parses as a v3 request      | it is a v3 request                                                           |
| v3   | does not parse              | the mode becomes v2 for good, and this frame is the first v2 packet          |
| v2   | a START_TLS, which is v3    | the mode stays v2                                                            |
| v2   | any other                   | decoded as v2; an unreadable packet ends the connection                      |

So v2 may follow v3 on a connection, but v3 never follows v2, except for START_TLS. A v2 packet begins with 0, 1 or 2,
which as a protobuf tag means field 0 and never parses; a v3 request begins with 0x0A. There is no greeting. Source:
BookieProtoEncoding.RequestDecoder.

START_TLS after v2 is our addition. Apache's v2 client sends its AUTH when the channel is active, and START_TLS from a
listener that it adds after the connect. On a busy machine, START_TLS occasionally arrives after AUTH
(PerChannelBookieClient.connect, AuthHandler.ClientSideHandler). Apache's bookies then close the connection.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from bindery_core.errors import BadRequest
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import AddRequest, ReadResponse, Request, Response, StartTlsRequest

_V3_START: Final = 0x0A


class Codec(Protocol):
    """Encodes the responses of a bookie. The modules `v2` and `v3` have this shape."""

    @property
    def VERSION(self) -> int:
        """Protocol version: 2 or 3."""
        ...

    def encode_response(self, response: Response) -> bytes: ...

    def encode_responses(self, responses: Sequence[Response]) -> bytes: ...

    def encode_read_responses(self, responses: Sequence[ReadResponse]) -> bytes: ...

    def encode_add_responses(self, requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes: ...


class RequestDecoder:
    """Decodes the requests of one connection. Invariant: `is_v2` never becomes False again."""

    __slots__ = ("_v3", "is_v2")

    def __init__(self) -> None:
        self.is_v2 = False
        self._v3 = v3.RequestReader()

    def decode(self, messages: Sequence[bytes]) -> tuple[list[Request], list[Request]]:
        """Return the v3 requests and the v2 requests after them. Raises BadRequest if the connection must be closed."""
        if self.is_v2:
            return self._decode_v2(messages)
        requests, error = self._v3.decode_readable(messages)
        if error is None:
            return requests, []
        self.is_v2 = True
        start_tls, behind = self._decode_v2(messages[len(requests) :])
        return requests + start_tls, behind

    def _decode_v2(self, messages: Sequence[bytes]) -> tuple[list[Request], list[Request]]:
        start_tls: list[Request] = []
        packets: list[bytes] = []
        for message in messages:
            request = _start_tls(message) if message[0] == _V3_START else None
            if request is None:
                packets.append(message)
            else:
                start_tls.append(request)
        return start_tls, v2.decode_requests(packets)


def _start_tls(message: bytes) -> StartTlsRequest | None:
    try:
        request = v3.decode_request(message)
    except BadRequest:
        return None
    return request if type(request) is StartTlsRequest else None
