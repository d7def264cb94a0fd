"""Gate: reject the requests of a connection until it is authenticated. One gate per connection, without I/O.

The gate applies until the client has authenticated and, if TLS is required, until the connection is secured:

| request                              | v3                               | v2                                       |
|--------------------------------------|----------------------------------|------------------------------------------|
| AUTH, our plugin, good token         | OK and the plugin's name; open   | the plugin's name; open                  |
| AUTH, our plugin, bad token          | UNAUTHORIZED, close              | close                                    |
| AUTH, our plugin, in clear text      | UNAUTHORIZED, close              | close                                    |
|   although TLS is required           |                                  |                                          |
| AUTH, another plugin                 | UNAUTHORIZED                     | close                                    |
| START_TLS                            | passes                           | -                                        |
| ADD, READ                            | UNAUTHORIZED                     | UNAUTHORIZED in the operation's response |
| any other                            | UNAUTHORIZED                     | close                                    |

After the gate has opened, the credentials may expire or be taken back (`sessions`). The connection then answers all
requests as a shut gate does (`refusals`), until the operations in progress are answered and it is closed.

In v3, UNAUTHORIZED is a response with only a header and the outer status. An open gate passes every request, AUTH
included: the operations answer it as if authentication were off. A certificate opens the gate as soon as the connection
is secured. Source: BookKeeper AuthHandler.ServerSideHandler; it has no rows about required TLS.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bindery_core.errors import BinderyError, Unauthorized
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Operation, Request, Response, Status
from bindery_identity.tls import PeerCertificate
from bindery_identity.tokens import Bearer, TokenVerifier, is_subject

from bindery_bookie.access.roles import OPERATION_OF
from bindery_bookie.access.sessions import Held


class Authenticator(Protocol):
    """A method of authentication; shared by all connections."""

    plugin: str
    """Name of the plugin, which AUTH requests must contain."""

    def by_token(self, token: bytes) -> Bearer:
        """Return whom the token of an AUTH request names. Raises Unauthorized."""
        ...

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        """Return the client's name by the names in its certificate; None: certificates do not authenticate clients.

        Called when the connection is secured. `names`: None without a certificate. Raises Unauthorized for a
        certificate that is missing or not allowed.
        """
        ...


class TokenAuthenticator:
    """Clients send a token. `now_s`: seconds since 1970."""

    def __init__(self, verifier: TokenVerifier, *, plugin: str, now_s: Callable[[], float]) -> None:
        self.plugin = plugin
        self._verifier = verifier
        self._now_s = now_s

    def by_token(self, token: bytes) -> Bearer:
        return self._verifier.verify(token, now_s=self._now_s())

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        return None


class CertificateAuthenticator:
    """Clients present a certificate that our CA signed. `allowed`: names, one of which it must contain; empty: any."""

    def __init__(self, *, plugin: str, allowed: Collection[str] = ()) -> None:
        self.plugin = plugin
        self._allowed = frozenset(allowed)

    def by_token(self, token: bytes) -> Bearer:
        raise Unauthorized("this bookie authenticates clients by certificate, not by token")

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        if names is None:
            raise Unauthorized("the client presented no certificate")
        for name in names:
            if (not self._allowed or name in self._allowed) and is_subject(name):
                return name
        raise Unauthorized("no name in the certificate is allowed", names=_escaped(",".join(names))[:200])


def _escaped(text: str) -> str:
    """Return `text` with escapes for what is not printable ASCII, so that a log line that contains it is not forged."""
    return text.encode("unicode_escape").decode()


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str] | None:
    """Return the common names, then the alternative names, of a result of `ssl.SSLSocket.getpeercert`; None without a
    certificate."""
    if not certificate:
        return None
    names = [value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"]
    names += [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address")]
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for a batch: process `passed`, send `answers`, then close the connection if `close` is set."""

    passed: list[Request] = field(default_factory=list)
    answers: list[Response] = field(default_factory=list)
    close: BinderyError | None = None
    """Why the connection must be closed after the answers are sent. Later requests of the batch are ignored."""


class Gate:
    """Invariant: an open gate stays open. `authenticator`: None if clients need not authenticate."""

    __slots__ = ("_authenticator", "_is_known", "_is_secure", "_tls_required", "held", "who")

    def __init__(self, authenticator: Authenticator | None, *, tls_required: bool) -> None:
        self._authenticator = authenticator
        self._tls_required = tls_required
        self._is_secure = False
        self._is_known = authenticator is None
        self.who: str | None = None
        """Name of the client; None until it has authenticated."""
        self.held: Held | None = None
        """The credentials of the client; None until it has authenticated."""

    @property
    def is_open(self) -> bool:
        return self._is_known and (self._is_secure or not self._tls_required)

    def secured(self, names: Collection[str] | None, certificate: PeerCertificate | None = None) -> None:
        """Record that the connection is encrypted. `names`: names in the client's certificate; None without one.
        `certificate`: the same certificate, to check later whether it is still accepted.

        Raises Unauthorized if certificates are required and this one is not accepted; the gate stays shut.
        """
        self._is_secure = True
        if not self._is_known and self._authenticator is not None:
            who = self._authenticator.by_certificate(names)
            if who is not None:
                self._know(_held_certificate(who, certificate))

    def admit(self, requests: Sequence[Request], *, version: int) -> Verdict:
        """Check requests of protocol `version` 2 or 3, in order."""
        answers: list[Response] = []
        passed: list[Request] = []
        for at, request in enumerate(requests):
            if self.is_open:
                return Verdict([*passed, *requests[at:]], answers)
            if type(request) is m.StartTlsRequest:
                passed.append(request)  # it neither authenticates the client nor affects the requests after it
                continue
            try:
                answer = self._authenticate(request) if type(request) is m.AuthRequest else None
            except Unauthorized as error:
                if version == 3:
                    answers.append(_refusal_v3(request))
                return Verdict([], answers, error)
            if answer is None:
                answer = _refusal_v3(request) if version == 3 else _refusal_v2(request)
            if answer is None:
                return Verdict([], answers, Unauthorized("request before authentication"))
            answers.append(answer)
        return Verdict(passed, answers)

    def _authenticate(self, request: m.AuthRequest) -> Response | None:
        """Return the response to an AUTH request; None for another plugin. Raises Unauthorized."""
        authenticator = self._authenticator
        if authenticator is None or request.plugin != authenticator.plugin:
            return None
        if self._tls_required and not self._is_secure:
            raise Unauthorized("a token was sent in clear: TLS is required")
        bearer, token = authenticator.by_token(request.payload), request.payload
        self._know(
            Held(
                who=bearer.subject,
                expires_at_s=bearer.expires_at_s,
                verify=lambda: authenticator.by_token(token).subject,
            )
        )
        return m.AuthResponse(request.txn_id, Status.OK, authenticator.plugin)

    def _know(self, held: Held) -> None:
        self.held = held
        self.who = held.who
        self._is_known = True


def _held_certificate(who: str, certificate: PeerCertificate | None) -> Held:
    def verify() -> str:
        reason = None if certificate is None else certificate.refusal()
        if reason is not None:
            raise Unauthorized(reason)
        return who

    return Held(who=who, expires_at_s=None if certificate is None else certificate.expires_at_s, verify=verify)


def refusals(requests: Sequence[Request], *, version: int) -> list[Response]:
    """Return the responses to requests of protocol `version` 2 or 3 that are refused as unauthorized. Requests that
    have no such response have none."""
    refuse = _refusal_v3 if version == 3 else _refusal_v2
    return [answer for request in requests if (answer := refuse(request)) is not None]


def _refusal_v3(request: Request) -> Response:
    operation = request.operation if isinstance(request, m.OtherRequest) else OPERATION_OF[type(request)]
    return m.ErrorResponse(request.txn_id, operation, Status.UNAUTHORIZED)


def _refusal_v2(request: Request) -> Response | None:
    """Return the response; None if v2 has none, so that the connection is closed."""
    match request:
        case m.AddRequest():
            return m.AddResponse(request.txn_id, Status.UNAUTHORIZED, request.ledger_id, request.entry_id)
        case m.ReadRequest():
            return m.ReadResponse(request.txn_id, Status.UNAUTHORIZED, request.ledger_id, request.entry_id)
        case m.OtherRequest() if request.operation == Operation.ADD_ENTRY:
            return m.AddResponse(request.txn_id, Status.UNAUTHORIZED, request.ledger_id, request.entry_id)
        case m.OtherRequest() if request.operation == Operation.READ_ENTRY:
            return m.ReadResponse(request.txn_id, Status.UNAUTHORIZED, request.ledger_id, request.entry_id)
    return None
