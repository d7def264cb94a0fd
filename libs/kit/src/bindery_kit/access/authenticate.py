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
credentials.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import unquote

from bindery_core.errors import BinderyError, Forbidden, Unauthorized
from bindery_identity.authenticator import Authenticator
from bindery_identity.principal import Principal

from bindery_kit.access.audit_trail import entry_of
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
CERTIFICATE: Final = "certificate"
"""Key of the names in the client's certificate in the state of the scope."""
PROBES: Final = ("/livez", "/readyz", "/startupz")

_NAMING: Final = frozenset((ROLE_HEADER, ORIGINAL_HEADER))
_ENCODED: Final = re.compile(rb"(?:[\x21-\x24\x26-\x7e]|%[0-9A-Fa-f]{2})+")

Refuse = Callable[[Scope, Receive, Send, BinderyError, list[str]], Awaitable[None]]
"""Answers a refused request. The last argument has the values of `WWW-Authenticate`; it is empty for 403."""


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        try:
            principal = self._principal(scope)
        except (Unauthorized, Forbidden) as error:
            self._counts["refused", "unknown"] += 1
            client = scope.get("client") or ("",)
            self._log.warning("authentication_failed", reason=error.message, client=client[0])
            challenges = self._authenticator.challenges if isinstance(error, Unauthorized) else []
            if (entry := entry_of(scope)) is not None:
                entry.code = error.code
            await self._refuse(scope, receive, send, error, challenges)
            return
        self._counts["admitted", principal.method.value] += 1
        scope.setdefault("state", {})[PRINCIPAL] = principal
        await self._app(scope, receive, send)

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

    def _principal(self, scope: Scope) -> Principal:
        headers = scope["headers"]
        sender = self._authenticator.by_headers(headers, scope.get("state", {}).get(CERTIFICATE))
        named = [(name, value) for name, value in headers if name in _NAMING]
        if not named:
            return self._authenticator.on_behalf_of(sender, None)
        if len(named) > 1 or len(named[0][1]) > ROLE_HEADER_SIZE_MAX:
            raise Unauthorized(f"one header {ROLE_HEADER.decode()} or {ORIGINAL_HEADER.decode()} is expected")
        role = _decoded(*named[0])
        if named[0][0] == ORIGINAL_HEADER and role == sender.role:  # as Pulsar's proxy says of what it only forwards
            return self._authenticator.on_behalf_of(sender, None)
        return self._authenticator.on_behalf_of(sender, role)


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
