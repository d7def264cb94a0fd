"""Gate: who may send requests, one gate per connection, without I/O. Requests in; what passes and what is answered out.

Until a client has shown who it is, and, where TLS is required, until the connection is secured:

| request                              | v3                               | v2                                     |
|--------------------------------------|----------------------------------|----------------------------------------|
| AUTH, our plugin, good token         | OK and the plugin's name; open   | the plugin's name; open                |
| AUTH, our plugin, bad token          | UNAUTHORIZED, close              | close                                  |
| AUTH, our plugin, in clear where TLS | UNAUTHORIZED, close              | close                                  |
|   is required                        |                                  |                                        |
| AUTH, another plugin                 | UNAUTHORIZED                     | close                                  |
| START_TLS                            | passes                           | -                                      |
| ADD, READ                            | UNAUTHORIZED                     | UNAUTHORIZED in the operation's answer |
| everything else                      | UNAUTHORIZED                     | close                                  |

UNAUTHORIZED in v3 is the header and the outer status alone. Once open, everything passes, AUTH too: the operations
answer it as if nobody were asked to authenticate. A certificate opens the gate the moment the connection is secured.
Source: BookKeeper AuthHandler.ServerSideHandler; the rows about required TLS are ours.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from bindery_core.auth_token import TokenVerifier
from bindery_core.errors import BinderyError, Unauthorized
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Operation, Request, Response, Status

_OPERATIONS: Final[dict[type, int]] = {
    m.AddRequest: Operation.ADD_ENTRY,
    m.ReadRequest: Operation.READ_ENTRY,
    m.WriteLacRequest: Operation.WRITE_LAC,
    m.ReadLacRequest: Operation.READ_LAC,
    m.BookieInfoRequest: Operation.GET_BOOKIE_INFO,
    m.ForceLedgerRequest: Operation.FORCE_LEDGER,
    m.ListEntriesRequest: Operation.GET_LIST_OF_ENTRIES_OF_LEDGER,
    m.AuthRequest: Operation.AUTH,
}


class Authenticator(Protocol):
    """How clients show who they are; shared by all connections."""

    plugin: str
    """The name that AUTH requests must carry."""

    def by_token(self, token: bytes) -> str:
        """Whom the token of an AUTH request names. Raises Unauthorized."""
        ...

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        """Whom a certificate with these names shows, now that the connection is secured; None: it does not say.

        `names` None: the client showed no certificate. Raises Unauthorized for a certificate that is not enough.
        """
        ...


class TokenAuthenticator:
    """Clients send a token. `now_s`: seconds of 1970."""

    def __init__(self, verifier: TokenVerifier, *, plugin: str, now_s: Callable[[], float]) -> None:
        self.plugin = plugin
        self._verifier = verifier
        self._now_s = now_s

    def by_token(self, token: bytes) -> str:
        return self._verifier.verify(token, now_s=self._now_s())

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        return None


class CertificateAuthenticator:
    """Clients show a certificate of our authority. `allowed`: names of which it must carry one; empty: any will do."""

    def __init__(self, *, plugin: str, allowed: Collection[str] = ()) -> None:
        self.plugin = plugin
        self._allowed = frozenset(allowed)

    def by_token(self, token: bytes) -> str:
        raise Unauthorized("a certificate is asked for, not a token")

    def by_certificate(self, names: Collection[str] | None) -> str | None:
        if names is None:
            raise Unauthorized("no certificate shown")
        for name in names:
            if not self._allowed or name in self._allowed:
                return name
        raise Unauthorized("none of the certificate's names is allowed", names=",".join(names)[:200])


def certificate_names(certificate: Mapping[str, Any] | None) -> list[str] | None:
    """Common names, then alternative names, of a certificate as `ssl.SSLSocket.getpeercert` gives it; None: none."""
    if not certificate:
        return None
    names = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]  # fmt: skip
    names += [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "IP Address")]
    return list(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of a batch: `passed` goes on, `answers` go back, in that order; then perhaps the connection ends."""

    passed: list[Request] = field(default_factory=list)
    answers: list[Response] = field(default_factory=list)
    close: BinderyError | None = None
    """Why the connection is to be closed once the answers were sent. Nothing behind it was looked at."""


class Gate:
    """Invariant: once `is_open`, always. `authenticator` None: nobody is asked who it is."""

    __slots__ = ("_authenticator", "_is_known", "_is_secure", "_tls_required", "who")

    def __init__(self, authenticator: Authenticator | None, *, tls_required: bool) -> None:
        self._authenticator = authenticator
        self._tls_required = tls_required
        self._is_secure = False
        self._is_known = authenticator is None
        self.who: str | None = None
        """Who the client is, once that is known."""

    @property
    def is_open(self) -> bool:
        return self._is_known and (self._is_secure or not self._tls_required)

    def secured(self, names: Collection[str] | None) -> None:
        """The connection is encrypted now; `names` of the client's certificate, None: it showed none.

        Raises Unauthorized when a certificate should have opened the gate and did not: it stays shut.
        """
        self._is_secure = True
        if not self._is_known and self._authenticator is not None:
            self._know(self._authenticator.by_certificate(names))

    def admit(self, requests: Sequence[Request], *, version: int) -> Verdict:
        """Look at requests of protocol `version` 2 or 3, in order."""
        verdict: list[Response] = []
        passed: list[Request] = []
        for at, request in enumerate(requests):
            if self.is_open:
                return Verdict([*passed, *requests[at:]], verdict)
            if type(request) is m.StartTlsRequest:
                passed.append(request)  # it says nothing of who sent it, nor of what stands behind it
                continue
            try:
                answer = self._authenticate(request) if type(request) is m.AuthRequest else None
            except Unauthorized as error:
                if version == 3:
                    verdict.append(_refusal_v3(request))
                return Verdict([], verdict, error)
            if answer is None:
                answer = _refusal_v3(request) if version == 3 else _refusal_v2(request)
            if answer is None:
                return Verdict([], verdict, Unauthorized("request before authentication"))
            verdict.append(answer)
        return Verdict(passed, verdict)

    def _authenticate(self, request: m.AuthRequest) -> Response | None:
        """None: not our plugin. Raises Unauthorized."""
        authenticator = self._authenticator
        if authenticator is None or request.plugin != authenticator.plugin:
            return None
        if self._tls_required and not self._is_secure:
            raise Unauthorized("a token was sent in clear: TLS is required")
        self._know(authenticator.by_token(request.payload))
        return m.AuthResponse(request.txn_id, Status.OK, authenticator.plugin)

    def _know(self, who: str | None) -> None:
        if who is not None:
            self.who = who
            self._is_known = True


def _refusal_v3(request: Request) -> Response:
    operation = request.operation if isinstance(request, m.OtherRequest) else _OPERATIONS[type(request)]
    return m.ErrorResponse(request.txn_id, operation, Status.UNAUTHORIZED)


def _refusal_v2(request: Request) -> Response | None:
    """None: there is no answer, only the end."""
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
