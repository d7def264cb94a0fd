"""Service info of a registered bookie: the data of `available/<bookie id>` and `available/readonly/<bookie id>`.

The bytes are BookieServiceInfoFormat (bookie_service_info.proto). The data of a bookie from before BookKeeper 4.11 is
empty, and its id is its `host:port`. Clients take host and port from the endpoint whose protocol is `bookie-rpc`,
whatever its id. Source: BookKeeper BookieServiceInfoSerde.

Encoding is hand-written: every bookie encodes its service info when it starts, and importing protobuf would take a
sixth of the start time. Decoding uses protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from bindery_core import varint
from bindery_core.errors import Corrupt
from bindery_core.ids import BookieId

BOOKIE_RPC: Final = "bookie-rpc"
"""Protocol of the endpoint for the ledger protocol."""
HTTP: Final = "http"
"""Protocol of the endpoint for the admin HTTP server."""
HTTPS: Final = "https"
"""Protocol of that endpoint if it has TLS. Bindery's addition: BookKeeper's says http in both cases."""
PORT_MAX: Final = 65535
"""Greatest port number."""

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2
"""Wire types of protobuf."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A port on which a bookie serves one protocol."""

    id: str
    """`bookie` for the ledger protocol, `httpserver` for the admin HTTP server."""
    port: int
    host: str
    """Name or address that clients can reach."""
    protocol: str
    """`bookie-rpc`, `http` or `https`."""
    auth: tuple[str, ...] = ()
    extensions: tuple[str, ...] = ()
    """`tls` if the endpoint can be upgraded."""


@dataclass(frozen=True, slots=True)
class BookieServiceInfo:
    """The endpoints and properties that a registered bookie publishes."""

    endpoints: tuple[Endpoint, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)

    def rpc_address(self) -> tuple[str, int] | None:
        """Return (host, port) of the ledger protocol; None if the bookie publishes none and cannot be contacted."""
        for endpoint in self.endpoints:
            if endpoint.protocol == BOOKIE_RPC:
                return endpoint.host, endpoint.port
        return None


def of_bookie(*, host: str, port: int, http_port: int | None = None, http_is_secure: bool = False) -> BookieServiceInfo:
    """Return the service info that our bookie publishes, with the same endpoints as BookKeeper's.

    `http_port`: port of the admin HTTP server; None if that server does not run. `http_is_secure`: it has TLS.
    """
    endpoints = [Endpoint("bookie", port, host, BOOKIE_RPC)]
    if http_port is not None:
        endpoints.append(Endpoint("httpserver", http_port, host, HTTPS if http_is_secure else HTTP))
    return BookieServiceInfo(tuple(endpoints))


def encode(info: BookieServiceInfo) -> bytes:
    """Encode fields in the order of their numbers and properties by name, so that equal infos give equal bytes."""
    endpoints = (_text(6, _endpoint(endpoint)) for endpoint in info.endpoints)
    properties = (
        _text(7, _text(1, name.encode()) + _text(2, value.encode())) for name, value in sorted(info.properties.items())
    )
    return b"".join((*endpoints, *properties))


def _endpoint(endpoint: Endpoint) -> bytes:
    port = bytes((2 << 3 | _VARINT,)) + varint.encode(endpoint.port)
    return b"".join(
        (
            _text(1, endpoint.id.encode()),
            port,
            _text(3, endpoint.host.encode()),
            _text(4, endpoint.protocol.encode()),
            *(_text(5, auth.encode()) for auth in endpoint.auth),
            *(_text(6, extension.encode()) for extension in endpoint.extensions),
        )
    )


def _text(field_number: int, data: bytes) -> bytes:
    return bytes((field_number << 3 | _LENGTH_DELIMITED,)) + varint.encode(len(data)) + data


def decode(data: bytes, *, bookie_id: BookieId) -> BookieServiceInfo:
    """Decode the data; empty data means that the id is the address.

    Raises Corrupt for invalid bytes, and for empty data of a bookie whose id is not `host:port`.
    """
    if not data:
        host, _, port = bookie_id.rpartition(":")
        if not host or not port.isdigit() or int(port) > PORT_MAX:
            raise Corrupt("the bookie has no service info and its id is not host:port", bookie_id=bookie_id)
        return of_bookie(host=host, port=int(port))
    from google.protobuf.message import DecodeError

    from bindery_core.formats import bookie_service_info_pb2 as pb

    try:
        message = pb.BookieServiceInfoFormat.FromString(data)
        if not message.IsInitialized():
            raise Corrupt("a required field of the bookie service info is missing", bookie_id=bookie_id)
        return BookieServiceInfo(
            tuple(
                Endpoint(e.id, e.port, e.host, e.protocol, tuple(e.auth), tuple(e.extensions))
                for e in message.endpoints
            ),
            dict(message.properties),
        )
    except (DecodeError, UnicodeDecodeError) as error:
        raise Corrupt("bookie service info cannot be decoded", bookie_id=bookie_id, size=len(data)) from error
