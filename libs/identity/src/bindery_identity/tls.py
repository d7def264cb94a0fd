"""TLS contexts from files that may change: new connections use the newest files that can be used.

| files                        | server                              | client                              |
|------------------------------|-------------------------------------|-------------------------------------|
| certificate, intermediate    | required                            | optional: presented to the server   |
| certificates, and key        |                                     |                                     |
| CA certificates              | required if clients may present a   | sign the server's; default: those   |
|                              | certificate                         | that the system trusts              |

Refused: a key that is encrypted or belongs to another certificate, a certificate that has expired, and files without
certificates.

A server takes TLS 1.2 and 1.3, and no renegotiation, by which clients of TLS 1.2 could make it compute without end. A
client checks that the server's certificate contains the name of the host to which it connects, unless that is switched
off.

A `FollowedContext` can be handed to anything that takes a context and keeps it, such as asyncio or an HTTP client: each
new connection is made with the newest context of its TlsFiles. Connections that exist keep what they began with. A
client's context polls its files before each new connection; a process may poll them, too, to report failures.

TLS checks the certificate of a client only when a connection begins. A server therefore asks `PeerCertificate.refusal`
later on: the certificate expires, or its CA may have been removed from the files. The CA of a certificate is the last
one of the chain that the handshake verified. If the chain is unknown, because the session of an earlier connection was
resumed, any change of the files counts as a removal, and the client has to connect again.
"""

import _ssl
import hashlib
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NoReturn, cast

from bindery_core.errors import BadRequest

from bindery_identity.followed import FollowedFiles

_BEGIN: Final = b"-----BEGIN "
_ENCRYPTED: Final = (b"BEGIN ENCRYPTED PRIVATE KEY", b"Proc-Type: 4,ENCRYPTED")


class ClientCertificates(StrEnum):
    """Whether the clients of a port present certificates."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


_VERIFY: Final = {
    ClientCertificates.NONE: ssl.CERT_NONE,
    ClientCertificates.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientCertificates.REQUIRED: ssl.CERT_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Trust:
    """Why the certificate of a client was trusted when its connection began."""

    files: "TlsFiles"
    authority: bytes | None
    """Digest of the CA certificate at the end of the verified chain; None: unknown."""
    replacements: int
    """`files.replacements` at that time; -1: the CA was removed during the handshake."""

    @property
    def is_in_force(self) -> bool:
        """Whether the CA is still among those of the files."""
        if self.authority is None:
            return self.files.replacements == self.replacements
        return self.authority in self.files.authorities


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCertificate:
    """The names in the certificate of a client, which a trusted CA signed. `expires_at_s`: seconds since 1970."""

    common_name: str | None = None
    dns_names: tuple[str, ...] = ()
    uris: tuple[str, ...] = ()
    expires_at_s: float | None = None
    trust: Trust | None = field(default=None, compare=False, repr=False)
    """None: nothing of it can change."""

    def refusal(self, now_s: float | None = None) -> str | None:
        """Return why the certificate is not accepted any more; None: it is. `now_s`: seconds since 1970; None: by the
        clock of the port."""
        if now_s is None:
            clock = None if self.trust is None else self.trust.files.now_s
            now_s = 0.0 if clock is None else clock()
        if self.expires_at_s is not None and now_s >= self.expires_at_s:
            return "the client certificate has expired; renew it, and connect with the new one"
        if self.trust is not None and not self.trust.is_in_force:
            return (
                "the CA of the client certificate was removed or replaced; connect with a certificate of a trusted CA"
            )
        return None

    @classmethod
    def presented(cls, connection: ssl.SSLObject, files: "TlsFiles | None") -> "PeerCertificate | None":
        """Return the certificate of a client after the handshake; None if it presented none. `files`: of the port."""
        found = cls.of(connection.getpeercert())
        if found is None or files is None:
            return found
        replacements = files.replacements
        authority = _authority(connection)
        if authority not in files.authorities:
            authority = None
            if connection.context is not files.value:  # the files were replaced during the handshake
                replacements = -1
        return replace(found, trust=Trust(files, authority, replacements))

    @classmethod
    def of(cls, decoded: Mapping[str, Any] | None) -> "PeerCertificate | None":
        """Return the names in a result of `getpeercert()`; None if the client presented no certificate."""
        if not decoded:
            return None
        subject = [pair for part in decoded.get("subject", ()) for pair in part]
        names = decoded.get("subjectAltName", ())
        expires = decoded.get("notAfter")
        return cls(
            common_name=next((value for kind, value in subject if kind == "commonName"), None),
            dns_names=tuple(value for kind, value in names if kind == "DNS"),
            uris=tuple(value for kind, value in names if kind == "URI"),
            expires_at_s=None if expires is None else float(ssl.cert_time_to_seconds(expires)),
        )


class FollowedContext(ssl.SSLContext):
    """The first context of a TlsFiles, which makes each connection with the newest one."""

    files: "TlsFiles | None" = None

    def _newest(self) -> ssl.SSLContext | None:
        """Return the context that replaced this one; None if none did."""
        files = self.files
        if files is None:
            return None
        if files.polls_itself:
            files.poll()
        newest = files.value
        return None if newest is self else newest

    def _expecting(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a connection, with the name that the server's certificate must contain."""
        name = self.files.server_name if self.files is not None else ""
        return {**wanted, "server_hostname": name} if name else wanted

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        newest, wanted = self._newest(), self._expecting(kwargs)
        return super().wrap_bio(*args, **wanted) if newest is None else newest.wrap_bio(*args, **wanted)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        newest, wanted = self._newest(), self._expecting(kwargs)
        return super().wrap_socket(*args, **wanted) if newest is None else newest.wrap_socket(*args, **wanted)

    def set_alpn_protocols(self, alpn_protocols: Any) -> None:
        super().set_alpn_protocols(alpn_protocols)
        newest = None if self.files is None else self.files.value
        if newest is not None and newest is not self:
            newest.set_alpn_protocols(alpn_protocols)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a TLS context cannot be pickled: pickle the names of its files")


class TlsFiles(FollowedFiles[ssl.SSLContext]):
    """The files of a context, and the newest context that they made. Use `context`, which follows them."""

    def __init__(
        self,
        paths: Sequence[str],
        configure: Callable[[ssl.SSLContext, Sequence[bytes]], float | None],
        *,
        protocol: int,
        polls_itself: bool,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        """`configure`: sets up a new context with the contents, and returns when its certificate expires.

        Raises BadRequest.
        """
        self.polls_itself = polls_itself
        self.now_s = now_s
        """Seconds since 1970; None: the expiry of certificates is not compared."""
        self.expires_at_s: float | None = None
        """When the certificate in use expires, in seconds since 1970; None: there is none."""
        self.authorities: frozenset[bytes] = frozenset()
        """Digests of the CA certificates that may sign certificates of clients."""
        self.server_name = ""
        """Name that the certificate of a server must contain; empty: the host to which the client connects."""
        first = FollowedContext(protocol)
        waiting = [first]

        def load(contents: Sequence[bytes]) -> ssl.SSLContext:
            made = waiting.pop() if waiting else ssl.SSLContext(protocol)
            expires_at_s = configure(made, contents)
            self.expires_at_s = expires_at_s
            if protocol == ssl.PROTOCOL_TLS_SERVER:
                self.authorities = frozenset(_digest(one) for one in made.get_ca_certs(binary_form=True))
            return made

        super().__init__(paths, load)
        self.context = first
        first.files = self


def server_tls(
    *,
    certificate_file: str,
    key_file: str = "",
    ca_file: str = "",
    client_certificates: ClientCertificates = ClientCertificates.NONE,
    now_s: Callable[[], float],
) -> TlsFiles:
    """Return the TLS of a port. `key_file`: empty if the key is in `certificate_file`. `now_s`: seconds since 1970.

    The owner of the port polls it. Raises BadRequest for files that cannot be used.
    """

    def configure(context: ssl.SSLContext, contents: Sequence[bytes]) -> float | None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        expires_at_s = _load_pair(context, contents[0], contents[1], now_s=now_s)
        if ca_file:
            _trust(context, contents[-1])
        context.verify_mode = _VERIFY[client_certificates]
        return expires_at_s

    if client_certificates is not ClientCertificates.NONE and not ca_file:
        raise BadRequest("client certificates need the CA certificates that sign them")
    paths = [certificate_file, key_file or certificate_file, *([ca_file] if ca_file else [])]
    return TlsFiles(paths, configure, protocol=ssl.PROTOCOL_TLS_SERVER, polls_itself=False, now_s=now_s)


def client_tls(
    *,
    ca_file: str = "",
    certificate_file: str = "",
    key_file: str = "",
    check_hostname: bool = True,
    server_name: str = "",
    now_s: Callable[[], float] | None = None,
) -> TlsFiles:
    """Return the TLS of connections to servers whose certificates `ca_file` signs; empty: a CA that the system trusts.

    `server_name`: the name that the certificates contain, for servers that are reached by other names or by addresses;
    empty: the host to which the client connects.
    `now_s`: seconds since 1970, to refuse an own certificate that has expired; None: servers refuse it. Raises
    BadRequest for files that cannot be used.
    """

    def configure(context: ssl.SSLContext, contents: Sequence[bytes]) -> float | None:
        return configure_client(
            context,
            authorities=contents[0] if ca_file else None,
            pair=(contents[-2], contents[-1]) if certificate_file else None,
            check_hostname=check_hostname,
            now_s=now_s,
        )

    own = [certificate_file, key_file or certificate_file] if certificate_file else []
    paths = [*([ca_file] if ca_file else []), *own]
    files = TlsFiles(paths, configure, protocol=ssl.PROTOCOL_TLS_CLIENT, polls_itself=True, now_s=now_s)
    files.server_name = server_name
    return files


def configure_client(
    context: ssl.SSLContext,
    *,
    authorities: bytes | None,
    pair: tuple[bytes, bytes] | None,
    check_hostname: bool = True,
    now_s: Callable[[], float] | None = None,
) -> float | None:
    """Set up a context of PROTOCOL_TLS_CLIENT with the contents of files, for those that follow the files themselves.

    `authorities`: CA certificates of servers; None: those that the system trusts. `pair`: certificate and key to
    present. Returns when that certificate expires, in seconds since 1970; None without one, and without `now_s`.
    Raises BadRequest.
    """
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_hostname
    if authorities is None:
        context.load_default_certs()
    else:
        _trust(context, authorities)
    return None if pair is None else _load_pair(context, *pair, now_s=now_s)


def _load_pair(
    context: ssl.SSLContext, certificate: bytes, key: bytes, *, now_s: Callable[[], float] | None
) -> float | None:
    """Load a certificate and its key. Return when it expires; None without `now_s`. Raises BadRequest."""
    if any(mark in key for mark in _ENCRYPTED):
        raise BadRequest("the private key is encrypted; store it without a passphrase, readable by the service only")
    if b"PRIVATE KEY-----" not in key:
        raise BadRequest("the key file contains no private key in PEM format")
    expires_at_s = None
    if now_s is not None:
        expires_at_s = _expiry(certificate)
        if expires_at_s <= now_s():
            raise BadRequest("the certificate has expired; renew it", expired_at_s=int(expires_at_s))
    descriptor = os.memfd_create("tls")  # ssl takes paths only, and the files may have been replaced meanwhile
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as memory:
            memory.write(certificate + b"\n" + (b"" if key == certificate else key))
        path = f"/proc/self/fd/{descriptor}"
        context.load_cert_chain(path, path, password=lambda: b"")
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error) or "KEY_TYPE_MISMATCH" in str(error):
            raise BadRequest("the private key does not belong to the certificate") from error
        raise BadRequest(f"the certificate or its key cannot be used: {error.reason or error}") from error
    finally:
        os.close(descriptor)
    return expires_at_s


def _authority(connection: ssl.SSLObject) -> bytes | None:
    """Return the digest of the last certificate of the verified chain of the peer; None if the chain is unknown."""
    chain = cast(Any, connection)._sslobj.get_verified_chain()  # public since Python 3.13
    return _digest(chain[-1].public_bytes(_ssl.ENCODING_DER)) if chain else None


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _expiry(certificate: bytes) -> float:
    from cryptography.x509 import load_pem_x509_certificate  # loads slowly, and few processes need it

    try:
        return load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()
    except ValueError as error:
        raise BadRequest("the certificate file contains no certificate in PEM format") from error
    except Exception as error:  # for example of an unknown version, or of an algorithm that is not supported
        raise BadRequest(
            f"the certificate has a form that is not supported ({type(error).__name__}); issue an X.509 certificate "
            "of version 3"
        ) from error


def _trust(context: ssl.SSLContext, authorities: bytes) -> None:
    if _BEGIN not in authorities:
        raise BadRequest("the CA file contains no certificate in PEM format")
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", errors="ignore"))
    except ssl.SSLError as error:
        raise BadRequest(f"the CA certificates cannot be used: {error.reason or error}") from error
