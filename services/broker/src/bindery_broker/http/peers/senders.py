"""Tell requests that other brokers have sent from those of clients, and drop what only brokers may say.

The headers OF_BROKERS change what a broker does with a request: it is not passed on, it concerns one partition of a
topic, it goes to the owner of another topic than that in its path. Any client can send them.

| request                                                    | its headers of brokers                           |
|------------------------------------------------------------|--------------------------------------------------|
| of this broker to itself, for a partition                  | count                                            |
| with the proof of a broker (`charging.passed_on`)          | count                                            |
| by the role of this broker's own token, its own or a       | count: all brokers have this role                |
| client's                                                   |                                                  |
| any other, if clients must authenticate                    | are removed                                      |
| any other, if they need not                                | count: every client may do everything anyway     |

Other roles of proxies are not believed, because a proxy may pass on any header of its clients.
"""

from collections.abc import Callable
from typing import Any, Final

from bindery_identity.principal import Principal
from bindery_kit.access.audit_trail import IS_PROXIED
from bindery_kit.access.authenticate import PRINCIPAL

from bindery_broker.http.charging.allowance import PARENT_KEY, Limiter
from bindery_broker.http.charging.passed_on import PASSED_ON_HEADER
from bindery_broker.http.exchange import (
    PARTITION_HEADER,
    PROXIED_HEADER,
    REQUEST_ID_HEADER,
    ROOM_HEADER,
    ROUTED_BY_HEADER,
    WAITED_HEADER,
)

OF_BROKERS: Final = frozenset(
    (
        PROXIED_HEADER,
        ROUTED_BY_HEADER,
        PARTITION_HEADER,
        ROOM_HEADER,
        WAITED_HEADER,
        REQUEST_ID_HEADER,
        PASSED_ON_HEADER,
    )
)
"""Names of the headers that only brokers may send."""


class Senders:
    """`limiter`: has the key of the proofs. `own_role`: returns the role of this broker's own token; None: it has none.
    `must_authenticate`: whether clients of the port must."""

    def __init__(self, limiter: Limiter, *, own_role: Callable[[], str | None], must_authenticate: bool) -> None:
        self._limiter = limiter
        self._own_role = own_role
        self._must_authenticate = must_authenticate

    def check(self, scope: Any) -> None:
        """Remove the headers of brokers from a request of a client, and record whether a broker has passed it on."""
        named = {name for name, _ in scope["headers"] if name in OF_BROKERS}
        if not named or PARENT_KEY in scope:
            return
        if self._must_authenticate and not self._is_broker(scope):
            scope["headers"] = [header for header in scope["headers"] if header[0] not in OF_BROKERS]
        elif PROXIED_HEADER in named:
            scope.setdefault("state", {})[IS_PROXIED] = True

    def may_join(self, scope: Any) -> bool:
        """Return whether the sender of a request may send others over the same connection, as brokers do."""
        return not self._must_authenticate or self._is_broker(scope)

    def _is_broker(self, scope: Any) -> bool:
        principal = scope.get("state", {}).get(PRINCIPAL)
        if isinstance(principal, Principal) and principal.role == self._own_role():
            return True
        passed_on = self._limiter.passed_on
        proofs = [value for name, value in scope["headers"] if name == PASSED_ON_HEADER]
        return passed_on is not None and len(proofs) == 1 and passed_on.read(proofs[0]) is not None
