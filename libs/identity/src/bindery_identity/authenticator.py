"""Authenticator: from the credentials of a client, in any protocol, to its principal.

| credentials                                        | role                                                            |
|----------------------------------------------------|-----------------------------------------------------------------|
| `Authorization: Bearer TOKEN`, Pulsar's `token`    | the bearer that the token names                                 |
| `Authorization: Basic ...`, Pulsar's `basic`       | the name, if the password is right                              |
| none of these, and a client certificate            | the name that CertificateRole chooses                           |
| none                                               | the role for anonymous clients, if one is configured            |

The certificate of a connection is checked at each request: while the connection is open, it may expire, and its CA may
be removed.

Wrong credentials are refused, also where anonymous clients are allowed. Credentials of a kind that is not configured
are refused, too.

A proxy sends requests on behalf of clients. It authenticates by itself and names the client:

| role of the sender     | named client         | result                                                               |
|------------------------|----------------------|----------------------------------------------------------------------|
| one of `proxy_roles`   | a role               | the principal of the proxy, with the named role as `original_role`   |
| one of `proxy_roles`   | its own role         | the principal of the proxy: its own request                          |
| that of `own_role`     | another proxy        | as for a role: it is a request of that proxy itself                  |
| one of `proxy_roles`   | another proxy        | Forbidden                                                            |
| one of `proxy_roles`   | none                 | Forbidden: a client would have the permissions of the proxy          |
| any other              | any                  | Forbidden: a client would choose its role                            |
| any other              | none                 | the principal of the sender                                          |

Source: Pulsar's AuthenticationService and its rules for proxyRoles and the original principal.
"""

import base64
import binascii
import enum
import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Final, Protocol

from bindery_core.errors import Forbidden, Unauthorized

from bindery_identity.basic import PASSWORD_SIZE_MAX
from bindery_identity.principal import Method, Principal
from bindery_identity.tokens import SUBJECT_SIZE_MAX, TOKEN_SIZE_MAX, Bearer, TokenVerifier, is_subject

BEARERS_CACHED_MAX: Final = 1_024
"""Maximum number of bearers whose principals are kept, because clients repeat their token in each request."""
_BASIC_SIZE_MAX: Final = 4 * (SUBJECT_SIZE_MAX * 4 + PASSWORD_SIZE_MAX)
"""Maximum bytes of the base64 of a name and a password."""


class CertificateRole(enum.StrEnum):
    """Which name in a client's certificate is its role."""

    NONE = "none"
    """Certificates do not authenticate clients."""
    COMMON_NAME = "common_name"
    """The common name of the subject, as in Pulsar."""
    DNS = "dns"
    """The only alternative name of the type DNS."""
    URI = "uri"
    """The only alternative name of the type URI, as of SPIFFE."""


class CertificateNames(Protocol):
    """The names in the certificate of a client, which a trusted CA has signed."""

    @property
    def common_name(self) -> str | None: ...

    @property
    def dns_names(self) -> tuple[str, ...]: ...

    @property
    def uris(self) -> tuple[str, ...]: ...

    @property
    def expires_at_s(self) -> float | None: ...

    def refusal(self, now_s: float) -> str | None:
        """Return why the certificate is not accepted any more; None: it is."""
        ...


class PasswordVerifier(Protocol):
    def verify(self, name: str, password: bytes) -> str:
        """Return the role. May take milliseconds, in any thread. Raises Unauthorized."""
        ...

    def remembers(self, name: str, password: bytes) -> bool:
        """Return whether the password was right before, so that `verify` returns at once."""
        ...


class Authenticator:
    """The configured methods. `now_s`: seconds since 1970. `tokens`, `passwords`: None refuses such credentials.
    `anonymous_role`: of clients without credentials; None refuses them. `proxy_roles`: roles of proxies. `own_role`:
    returns the role with which this service authenticates at its other processes, one of `proxy_roles`; None: none.
    These processes pass on requests of the service's clients, and a proxy may be such a client."""

    def __init__(
        self,
        *,
        now_s: Callable[[], float],
        tokens: TokenVerifier | None = None,
        passwords: PasswordVerifier | None = None,
        certificate_role: CertificateRole = CertificateRole.NONE,
        anonymous_role: str | None = None,
        proxy_roles: Collection[str] = (),
        own_role: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._now_s = now_s
        self._tokens = tokens
        self._passwords = passwords
        self._certificate_role = certificate_role
        self._anonymous_role = anonymous_role
        self._proxy_roles = frozenset(proxy_roles)
        self._own_role = own_role

    @property
    def challenges(self) -> list[str]:
        """Values of `WWW-Authenticate`, one for each scheme that is configured. Source: RFC 9110 section 11.6.1."""
        found = []
        if self._tokens is not None:
            found.append('Bearer realm="bindery"')
        if self._passwords is not None:
            found.append('Basic realm="bindery", charset="UTF-8"')
        return found

    def by_headers(
        self, headers: Iterable[tuple[bytes, bytes]], certificate: CertificateNames | None = None
    ) -> Principal:
        """Return the principal of an HTTP request. Raises Unauthorized, without any part of the credentials."""
        given = [value for name, value in headers if name == b"authorization"]
        if not given:
            return self.without_credentials(certificate)
        if len(given) > 1:
            raise Unauthorized("one header Authorization is expected")
        scheme, _, credentials = given[0].partition(b" ")
        match scheme.lower():
            case b"bearer":
                return self.by_token(credentials.strip())
            case b"basic":
                return self.by_basic(credentials.strip())
        raise Unauthorized("the scheme of Authorization is neither Bearer nor Basic")

    def is_slow(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Return whether `by_headers` has to check a password, and should not run on an event loop."""
        if self._passwords is None:
            return False
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, credentials = given[0].partition(b" ") if given else (b"", b"", b"")
        if len(given) != 1 or scheme.lower() != b"basic":
            return False
        try:
            name, password = _name_and_password(_decoded(credentials.strip()))
        except Unauthorized:
            return False
        return not self._passwords.remembers(name, password)

    def by_method(self, method: str, data: bytes, certificate: CertificateNames | None = None) -> Principal:
        """Return the principal by `auth_method_name` and `auth_data` of Pulsar's binary protocol. Raises Unauthorized.

        Clients that authenticate by certificate send the method `tls` without data.
        """
        match method:
            case "token":
                return self.by_token(data)
            case "basic":
                return self._by_name_and_password(data)
            case "" | "none" | "tls":
                return self.without_credentials(certificate)
        raise Unauthorized("the authentication method is not supported", method=_printable(method))

    def by_token(self, token: bytes) -> Principal:
        """Return the principal that a token names. Raises Unauthorized."""
        if self._tokens is None:
            raise Unauthorized("this service does not accept tokens")
        if len(token) > TOKEN_SIZE_MAX:
            raise Unauthorized("not a signed token")
        return _principal_of(self._tokens.verify(token, now_s=self._now_s()))

    def by_basic(self, encoded: bytes) -> Principal:
        """Return the principal by the base64 of `name:password`. Raises Unauthorized."""
        return self._by_name_and_password(_decoded(encoded))

    def without_credentials(self, certificate: CertificateNames | None) -> Principal:
        """Return the principal by the certificate of the connection, or that of anonymous clients.

        Raises Unauthorized.
        """
        if certificate is not None and self._certificate_role is not CertificateRole.NONE:
            return self._by_certificate(certificate)
        if self._anonymous_role is not None:
            return Principal(role=self._anonymous_role, method=Method.NONE)
        raise Unauthorized(f"this request needs credentials: {self._remedy()}")

    def on_behalf_of(self, sender: Principal, named: str | None) -> Principal:
        """Return the principal of a request of `sender` that names the role of a client; None: it names nobody.

        Raises Forbidden and Unauthorized, by the table of the module.
        """
        is_proxy = sender.role in self._proxy_roles
        if named is None:
            if is_proxy:
                raise Forbidden("the role of a proxy must name the client of each request", role=sender.role)
            return sender
        if not is_proxy:
            raise Forbidden("only the role of a proxy may name another client", role=sender.role)
        if not is_subject(named):
            raise Unauthorized("the named client is not a role")
        if named == sender.role:
            return sender
        if named in self._proxy_roles and sender.role != self._own_role():
            raise Forbidden("a proxy may not send requests on behalf of another proxy", role=sender.role)
        return replace(sender, original_role=named)

    def _by_name_and_password(self, text: bytes) -> Principal:
        if self._passwords is None:
            raise Unauthorized("this service does not accept passwords")
        return Principal(role=self._passwords.verify(*_name_and_password(text)), method=Method.BASIC)

    def _by_certificate(self, certificate: CertificateNames) -> Principal:
        match self._certificate_role:
            case CertificateRole.URI:
                names = certificate.uris
            case CertificateRole.DNS:
                names = certificate.dns_names
            case _:
                names = () if certificate.common_name is None else (certificate.common_name,)
        if len(names) != 1 or not is_subject(names[0]):
            raise Unauthorized(
                "the client certificate must have exactly one printable name of the type that is the role",
                type=self._certificate_role.value,
                names=len(names),
            )
        if (reason := certificate.refusal(self._now_s())) is not None:
            raise Unauthorized(reason)
        return Principal(role=names[0], method=Method.CERTIFICATE, expires_at_s=certificate.expires_at_s)

    def _remedy(self) -> str:
        ways = []
        if self._tokens is not None:
            ways.append("send Authorization: Bearer <token>")
        if self._passwords is not None:
            ways.append("send a name and a password (Basic)")
        if self._certificate_role is not CertificateRole.NONE:
            ways.append("connect with a client certificate")
        return " or ".join(ways)


@functools.lru_cache(BEARERS_CACHED_MAX)
def _principal_of(bearer: Bearer) -> Principal:
    return Principal(role=bearer.subject, method=bearer.method, expires_at_s=bearer.expires_at_s)


def _decoded(encoded: bytes) -> bytes:
    if len(encoded) > _BASIC_SIZE_MAX:
        raise Unauthorized("wrong name or password")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise Unauthorized("the credentials of Basic are not base64") from None


def _name_and_password(text: bytes) -> tuple[str, bytes]:
    name, separator, password = text.partition(b":")
    if not separator:
        raise Unauthorized("the credentials of Basic are not name:password")
    return name.decode("utf-8", "replace"), password


def _printable(text: str) -> str:
    return text[:SUBJECT_SIZE_MAX].encode("unicode_escape").decode()
