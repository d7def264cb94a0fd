"""TLS of an HTTP port, between the socket and the protocol that has the limits (`http_limits`).

| state     | event                               | next    | effect                                                   |
|-----------|-------------------------------------|---------|----------------------------------------------------------|
| NEW       | the first byte begins no TLS record | ended   | an answer in clear: the port serves https                |
| NEW       | a TLS record                        | SHAKING | the handshake goes on                                    |
| SHAKING   | the handshake succeeds              | SECURE  | the protocol gets the connection, as a TlsTransport      |
| SHAKING   | the handshake fails                 | ended   | the alert is sent                                        |
| both      | `handshake_timeout_s` has passed    | ended   | cut off                                                  |
| both      | the connection's place is needed    | ended   | cut off, like the idle connections of `http_limits`      |
| SECURE    | bytes                               | SECURE  | the decrypted bytes of a read go to the protocol at once |
| SECURE    | the client ends TLS                 | ended   | closed, once what was written has been sent              |

Until the protocol has it, a connection counts for the limits of connections as one without a request. Afterwards the
bytes that a client leaves unread are those in the buffer of the socket's transport, encrypted: there is no second
buffer, so that `http_limits` counts and limits them as without TLS. asyncio's and uvloop's own TLS have one, do not
count the bytes that they have passed on, and report a connection only after its handshake.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any, Final, cast

from bindery_identity.tls import PeerCertificate, TlsFiles

from bindery_kit.access.held_credentials import CERTIFICATE
from bindery_kit.http.http_limits import ServerLimits, hang_up
from bindery_kit.limits.address_counts import group_of

HANDSHAKE_RECORD: Final = 0x16
"""First byte of a TLS connection: the type of a handshake record. Source: RFC 8446 section 5.1."""
READ_SIZE: Final = 64 * 1024
"""Maximum bytes that one call decrypts; a record has 16 KiB at most."""


class TlsTransport(asyncio.Transport):
    """The encrypted connection, as the protocol sees it."""

    def __init__(self, raw: asyncio.Transport, tls: ssl.SSLObject, outgoing: ssl.MemoryBIO) -> None:
        super().__init__()
        self._raw = raw
        self._tls = tls
        self._outgoing = outgoing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "sslcontext":
                return self._tls.context
            case "ssl_object":
                return self._tls
            case "peercert":
                return self._tls.getpeercert()
            case "cipher":
                return self._tls.cipher()
        return self._raw.get_extra_info(name, default)

    def send_pending(self) -> None:
        """Send what the last operation of TLS produced."""
        data = self._outgoing.read()
        if data and not self._raw.is_closing():
            self._raw.write(data)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data or self._raw.is_closing():
            return
        try:
            self._tls.write(data)
        except ssl.SSLError:  # the client has ended the connection
            self._raw.abort()
            return
        self.send_pending()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        if self._raw.is_closing():
            return
        with contextlib.suppress(ssl.SSLError, OSError):  # SSLWantReadError: the client's close_notify is not awaited
            self._tls.unwrap()
        self.send_pending()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def is_reading(self) -> bool:
        return self._raw.is_reading()

    def pause_reading(self) -> None:
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._raw.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._raw.get_write_buffer_limits()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._raw.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        raise NotImplementedError("the protocol of an encrypted connection stays")


class TlsConnection(asyncio.Protocol):
    """One connection. `connections`: those of the server, which it closes at its end."""

    __slots__ = (
        "_certificate",
        "_create",
        "_deadline",
        "_files",
        "_incoming",
        "_inner",
        "_outgoing",
        "_secured",
        "_shared",
        "_tls",
        "connections",
        "group",
        "transport",
    )

    def __init__(
        self,
        files: TlsFiles,
        shared: ServerLimits,
        create: Callable[[PeerCertificate | None], asyncio.Protocol],
        connections: set[Any],
    ) -> None:
        """`create`: returns the protocol of a connection whose handshake has succeeded."""
        self._files = files
        self._shared = shared
        self._create = create
        self.connections = connections
        self.transport = cast(asyncio.Transport, None)
        self.group = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLObject | None = None
        self._incoming = cast(ssl.MemoryBIO, None)
        self._outgoing = cast(ssl.MemoryBIO, None)
        self._secured: TlsTransport | None = None
        self._inner: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.group = group_of(transport.get_extra_info("peername"))
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._shared.handshake_timeout_s, self._is_late)
        self.connections.add(self)
        if not self._shared.begin_handshake(self, len(self.connections)):
            self._shared.refused("connections", peer=self.group)
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._tls is None:
            if data[0] != HANDSHAKE_RECORD:
                self._refuse_clear()
                return
            self._begin()
        self._incoming.write(data)
        if self._secured is None and not self._shake():
            return
        self._deliver()

    def _begin(self) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = self._files.context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def _shake(self) -> bool:
        """Go on with the handshake. Return whether the connection is secure."""
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send_pending()
            return False
        except (ssl.SSLError, ValueError) as error:
            self._send_pending()
            self._shared.refused("tls_handshake", peer=self.group, error=_reason(error))
            self.transport.close()
            return False
        self._send_pending()
        self._end_handshake()
        self._secured = TlsTransport(self.transport, self._tls, self._outgoing)
        certificate = PeerCertificate.presented(self._tls, self._files)
        inner = self._inner = self._create(certificate)
        inner.connection_made(self._secured)
        return True

    def _deliver(self) -> None:
        """Decrypt what has arrived, and pass it on as one piece, as without TLS."""
        assert self._tls is not None
        assert self._secured is not None
        assert self._inner is not None
        parts: list[bytes] = []
        is_ended = False
        incoming, tls = self._incoming, self._tls
        try:
            while incoming.pending or tls.pending():  # not until SSLWantReadError, which costs more than decrypting
                if not (part := tls.read(READ_SIZE)):
                    is_ended = True
                    break
                parts.append(part)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            is_ended = True
        except ssl.SSLError as error:
            self._send_pending()
            self._shared.refused("tls_record", peer=self.group, error=_reason(error))
            self.transport.abort()
            return
        self._send_pending()
        if parts:
            self._inner.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if is_ended:
            self._secured.close()

    def _send_pending(self) -> None:
        data = self._outgoing.read()
        if data and not self.transport.is_closing():
            self.transport.write(data)

    def _refuse_clear(self) -> None:
        self._shared.refused("clear_text", peer=self.group)
        detail = "this port serves https only; use an https:// URL, and the CA file of the cluster"
        hang_up(self.transport, 400, "https_required", detail)

    def _is_late(self) -> None:
        self._deadline = None
        self._shared.refused("tls_handshake_timeout", peer=self.group)
        self.transport.abort()

    def _end_handshake(self) -> None:
        """Give back the place of a connection without a protocol. Idempotent."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self in self.connections:
            self.connections.discard(self)
            self._shared.end_handshake(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake()
        inner, self._inner = self._inner, None
        self._secured = self._tls = None
        if inner is not None:
            inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        return None if self._inner is None else self._inner.eof_received()

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def end_soon(self) -> None:
        """A connection that has no request yet ends with the first one: see `HttpLimits.end_soon`."""

    def shutdown(self) -> None:
        """End a connection that has no request yet, because the server stops."""
        self.transport.abort()


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)


def over_tls(
    files: TlsFiles, protocol: Callable[..., asyncio.Protocol], shared: ServerLimits
) -> Callable[..., asyncio.Protocol]:
    """Return the factory of a server's connections: TLS first, then `protocol`, uvicorn's with the limits.

    The certificate of a client is in `scope["state"][CERTIFICATE]`; without one, nothing is.
    """

    def create(*, server_state: Any, app_state: dict[str, Any], **options: Any) -> asyncio.Protocol:
        def secured(certificate: PeerCertificate | None) -> asyncio.Protocol:
            state = app_state if certificate is None else {**app_state, CERTIFICATE: certificate}
            return protocol(server_state=server_state, app_state=state, **options)

        return TlsConnection(files, shared, secured, server_state.connections)

    return create
