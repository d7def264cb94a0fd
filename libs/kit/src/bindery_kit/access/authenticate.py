"""Authenticate: the ASGI application of a port whose clients must authenticate, in front of another application.

| path                                         | without valid credentials                                             |
|----------------------------------------------|-----------------------------------------------------------------------|
| /livez, /readyz, /startupz                   | passed on: Kubernetes sends none                                      |
| /metrics, unless `guards_metrics`            | passed on: Prometheus may send none                                   |
| all others                                   | 401 with `WWW-Authenticate`, or 403 for a misuse of the role header   |

The principal of an admitted request is in `scope["state"]["principal"]`. ROLE_HEADER names the client on whose behalf a
proxy sends a request, percent-encoded; ORIGINAL_HEADER does so as it is (`bindery_identity.authenticator` has the
rules). The state's `certificate` has
the names in the client's certificate, if the port uses TLS.

Nothing of a refused request is read. The log has the reason of a refusal at most once per second, and never the
credentials. Passwords are checked in threads, within limits (`password_checks`); above them, the answer is 429.

Calls that wait for long learn that their credentials are not accepted any more: `scope["state"]["credentials"]` has the
Credentials of the request. When a file of keys, passwords or CAs was replaced, `check_again` verifies the credentials
of all watched requests again, and ends those that would be refused now, or have another role.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from bindery_core.errors import BinderyError, Forbidden, TooManyRequests, Unauthorized
from bindery_identity.authenticator import Authenticator
from bindery_identity.principal import Principal

from bindery_kit.access.audit_trail import entry_of
from bindery_kit.access.held_credentials import CERTIFICATE, Rechecks
from bindery_kit.access.password_checks import PasswordChecks
from bindery_kit.limits.address_counts import group_of
from bindery_kit.observability.health import METRICS_PATHS, AsgiApp, Receive, Scope, Send
from bindery_kit.observability.metrics_page import Page, labels
from bindery_kit.observability.quiet_log import QuietLog

ROLE_HEADER: Final = b"bindery-role"
"""Header of a proxy's request: the role of the client, percent-encoded."""
ORIGINAL_HEADER: Final = b"x-original-principal"
"""The same, as UTF-8 without an encoding. Source: Pulsar's proxy (X-Original-Principal)."""
ROLE_HEADER_SIZE_MAX: Final = 4096
"""Maximum bytes of the value of these headers."""
PRINCIPAL: Final = "principal"
"""Key of the principal in the state of the scope."""
CREDENTIALS: Final = "credentials"
"""Key of the Credentials of the request in the state of the scope."""
PROBES: Final = ("/livez", "/readyz", "/startupz")

_NAMING: Final = frozenset((ROLE_HEADER, ORIGINAL_HEADER))
_ENCODED: Final = re.compile(rb"(?:[\x21-\x24\x26-\x7e]|%[0-9A-Fa-f]{2})+")

Refuse = Callable[[Scope, Receive, Send, BinderyError, list[str]], Awaitable[None]]
"""Answers a refused request. The last argument has the values of `WWW-Authenticate`; it is empty for 403."""


class Credentials:
    """Those of one admitted request."""

    __slots__ = ("_generation", "_rechecks", "certificate", "headers", "principal", "watchers")

    def __init__(
        self, rechecks: "Rechecks[Credentials]", headers: Sequence[tuple[bytes, bytes]], certificate: Any
    ) -> None:
        self.headers = headers
        self.certificate = certificate
        self.principal: Principal | None = None
        self.watchers: dict[object, Callable[[], None]] = {}
        self._rechecks = rechecks
        self._generation = rechecks.generation
        """Generation of the files with which they are verified first."""

    def watch(self, on_refused: Callable[[], None]) -> Callable[[], None]:
        """Call `on_refused` once, in the event loop, if the credentials are not accepted any more. Return a function
        that ends this."""
        key = object()
        is_first = not self.watchers
        self.watchers[key] = on_refused
        if is_first:
            self._rechecks.watch(self, generation=self._generation)

        def end() -> None:
            self.watchers.pop(key, None)
            if not self.watchers:
                self._rechecks.forget(self)

        return end


class Authenticate:
    """`app`: the application of the port. `refuse`: how the service answers errors. `clock`: monotonic seconds."""

    def __init__(
        self,
        app: AsgiApp,
        authenticator: Authenticator,
        *,
        refuse: Refuse,
        clock: Callable[[], float],
        guards_metrics: bool = False,
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._refuse = refuse
        self._open = frozenset((*PROBES, *(() if guards_metrics else METRICS_PATHS)))
        self._log = QuietLog(__name__, clock=clock)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._passwords = PasswordChecks(clock=clock)
        self._rechecks: Rechecks[Credentials] = Rechecks(self._is_accepted, _end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        credentials = Credentials(self._rechecks, scope["headers"], state.get(CERTIFICATE))
        try:
            if self._authenticator.is_slow(credentials.headers):
                principal = await self._verified_in_thread(credentials, scope.get("client"))
            else:
                principal = self._verified(credentials)
            credentials.principal = principal
        except (Unauthorized, Forbidden, TooManyRequests) as error:
            self._counts["refused", "unknown"] += 1
            client = scope.get("client") or ("",)
            self._log.warning("authentication_failed", reason=error.message, client=client[0])
            challenges = self._authenticator.challenges if isinstance(error, Unauthorized) else []
            if (entry := entry_of(scope)) is not None:
                entry.code = error.code
            await self._refuse(scope, receive, send, error, challenges)
            return
        self._counts["admitted", principal.method.value] += 1
        state[PRINCIPAL], state[CREDENTIALS] = principal, credentials
        await self._app(scope, receive, send)

    def check_again(self) -> None:
        """A file of keys, passwords or CAs was replaced: verify the credentials of the watched requests."""
        self._rechecks.check_again()

    async def _is_accepted(self, credentials: Credentials) -> bool:
        before = credentials.principal
        try:
            if self._authenticator.is_slow(credentials.headers):
                now = await asyncio.to_thread(self._verified, credentials)
            else:
                now = self._verified(credentials)
        except (Unauthorized, Forbidden):
            return False
        return before is not None and (now.role, now.original_role) == (before.role, before.original_role)

    def render(self) -> bytes:
        """Return the metric as text for Prometheus."""
        page = Page()
        page.add(
            "bindery_authentications_total",
            "counter",
            "Requests whose client was authenticated or refused, by method.",
            [
                (labels({"outcome": outcome, "method": method}), count)
                for (outcome, method), count in sorted(self._counts.items())
            ],
        )
        return page.render()

    async def _verified_in_thread(self, credentials: Credentials, client: Any) -> Principal:
        address = group_of(tuple(client) if client else None)
        return await self._passwords.run(partial(self._verified, credentials), address=address)

    def _verified(self, credentials: Credentials) -> Principal:
        """Raises Unauthorized, Forbidden. May be called in a thread."""
        headers = credentials.headers
        sender = self._authenticator.by_headers(headers, credentials.certificate)
        named = [(name, value) for name, value in headers if name in _NAMING]
        if not named:
            return self._authenticator.on_behalf_of(sender, None)
        if len(named) > 1 or len(named[0][1]) > ROLE_HEADER_SIZE_MAX:
            raise Unauthorized(f"one header {ROLE_HEADER.decode()} or {ORIGINAL_HEADER.decode()} is expected")
        role = _decoded(*named[0])
        if named[0][0] == ORIGINAL_HEADER and role == sender.role:  # as Pulsar's proxy says of what it only forwards
            return self._authenticator.on_behalf_of(sender, None)
        return self._authenticator.on_behalf_of(sender, role)


def _end(credentials: Credentials) -> None:
    """End the calls that wait with these credentials, which are not accepted any more."""
    for refused in list(credentials.watchers.values()):
        refused()


def _decoded(name: bytes, value: bytes) -> str:
    """Return the role in a header. Raises Unauthorized, because another role would act if it were repaired."""
    try:
        if name == ORIGINAL_HEADER:
            return value.decode()
        if _ENCODED.fullmatch(value):
            return unquote(value.decode("ascii"), errors="strict")
    except UnicodeDecodeError:
        pass
    encoding = "UTF-8" if name == ORIGINAL_HEADER else "percent-encoded UTF-8"
    raise Unauthorized(f"the header {name.decode()} is not a role as {encoding}")
