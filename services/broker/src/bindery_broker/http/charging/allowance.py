"""Apply the limits of clients, tenants and namespaces (`limits.accounts`) to HTTP requests.

| when                                    | what                                                                       |
|-----------------------------------------|----------------------------------------------------------------------------|
| when the head has arrived (`begin`)     | for the client: a request, its connection, and the body that               |
|                                         | `Content-Length` announces                                                 |
| when it is allowed (`allow`)            | the same for the tenant and the namespace                                  |
| after a piece of a chunked body         | its bytes                                                                  |
| before messages are read or leased      | waits until the bytes that went out are paid: a receive and a stream as    |
|                                         | long as they may wait for messages, a GET `wait_s_max`, then LimitExceeded |
| when bytes of the response go out       | counts them, of every response                                             |
| when a topic is created                 | one topic; for a partitioned topic, its partitions at once                 |

Permissions are checked between `begin` and `allow`, so that a client without permission uses up nothing but its own
rates. Both together wait `wait_s_max` at most. The body is read after them.

The client is the role that it has proved, or on whose behalf a proxy sends the request; the address of a client that
has proved none, also if it has the role of anonymous clients. Tenant and namespace are those in the path. A request
that another broker has passed on, and a request of this broker to itself for a partition, belong to a request that was
counted already: they count nothing but the topics that they create.
"""

import asyncio
import functools
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final
from urllib.parse import unquote

from bindery_core.sources import MonotonicClock
from bindery_identity.principal import Method, Principal
from bindery_kit.access.authenticate import PRINCIPAL
from bindery_kit.limits.address_counts import group_of
from bindery_pulsar.topic_name import TopicName

from bindery_broker.http.charging.passed_on import PassedOn, Sender
from bindery_broker.limits.accounts import Account, Accounts, Limit, Owner

PARENT_KEY: Final = "bindery.allowance"
"""Key of the scope of a request to a partition: the Allowance of the request to the whole topic."""
SCOPES_CACHED_MAX: Final = 4_096
"""Maximum number of paths whose tenant and namespace are cached."""
CACHED_PATH_SIZE_MAX: Final = 512
"""Maximum bytes of such a path."""
_PREFIXES: Final = (
    (b"v1", b"topics"), (b"v1", b"namespaces"), (b"v1", b"tenants"),
    (b"admin", b"v2", b"persistent"), (b"admin", b"v2", b"non-persistent"), (b"admin", b"v2", b"namespaces"),
    (b"admin", b"v2", b"tenants"), (b"admin", b"v2", b"schemas"),
    (b"lookup", b"v2", b"topic", b"persistent"), (b"lookup", b"v2", b"topic", b"non-persistent"),
)  # fmt: skip
"""Beginnings of the paths that continue with a tenant, and then with a namespace if there is more."""
_OF_TENANT: Final = b"tenants"
_current: ContextVar["Allowance | None"] = ContextVar("allowance", default=None)


def scopes_in(raw_path: bytes) -> tuple[tuple[Owner, str], ...]:
    """Return the tenant and the namespace in a path; without those that it does not have."""
    return _cached_scopes(raw_path) if len(raw_path) <= CACHED_PATH_SIZE_MAX else _scopes_in(raw_path)


def _scopes_in(raw_path: bytes) -> tuple[tuple[Owner, str], ...]:
    parts = raw_path.strip(b"/").split(b"/")
    for prefix in _PREFIXES:
        size = len(prefix)
        if tuple(parts[:size]) != prefix or len(parts) <= size or not parts[size]:
            continue
        tenant = unquote(parts[size].decode("latin-1"))
        if prefix[-1] == _OF_TENANT or len(parts) == size + 1:
            return ((Owner.TENANT, tenant),)
        return ((Owner.TENANT, tenant), (Owner.NAMESPACE, f"{tenant}/{unquote(parts[size + 1].decode('latin-1'))}"))
    return ()


_cached_scopes = functools.lru_cache(SCOPES_CACHED_MAX)(_scopes_in)


class Allowance:
    """What one request may use. It is the current one of its task until `close`, which must be called there."""

    def __init__(
        self,
        accounts: Accounts,
        of_client: tuple[Account, ...],
        of_path: tuple[tuple[Owner, str], ...],
        *,
        sender: Sender,
        now: MonotonicClock,
    ) -> None:
        """`of_path`: the tenant and the namespace. They count nothing before `allow`, which also creates their
        accounts: names that a client invents must not displace the accounts of others."""
        self._accounts = accounts
        self._of_request = of_client
        self._of_path = of_path
        self._now = now
        self._needs: dict[Limit, float] = {}
        self._turn_ends = 0.0
        """When the time ends that `begin` and `allow` may wait."""
        self._sending_ends: float | None = None
        """When the time ends for which `wait_to_send` may wait; None: it was not called."""
        self._connected: tuple[Account, ...] = ()
        self._is_closed = False
        self._before = _current.set(self)
        self.sender = sender
        """Whose request it is, for the brokers that it is passed on to."""

    async def begin(self, *, body_size: int) -> None:
        """Return when it is the request's turn by the limits of its client. `body_size`: what is known of the body.
        Raises LimitExceeded."""
        self._needs = {Limit.REQUESTS: 1, **({Limit.BYTES_IN: body_size} if body_size else {})}
        self._turn_ends = self._now() + self._accounts.wait_s_max
        await self._charge(self._of_request)

    async def allow(self) -> None:
        """The request is allowed. Return when it is its turn by the limits of the tenant and the namespace, which count
        it from now on. Raises LimitExceeded; then they count nothing. Only the first call has an effect."""
        owners, self._of_path = self._of_path, ()
        added = accounts_of(self._accounts, owners, self._now())
        if not added:
            return
        await self._charge(added)
        self._of_request += added
        if self._sending_ends is not None:
            await self._wait_to_send_until(self._sending_ends)

    async def _charge(self, accounts: tuple[Account, ...]) -> None:
        if not accounts:
            return
        self._accounts.connect(accounts)
        self._connected += accounts
        now = self._now()
        left_s = max(0.0, self._turn_ends - now)
        await _sleep(self._accounts.take(accounts, self._needs, now, wait_s_max=left_s))

    async def received(self, size: int) -> None:
        """Count bytes of the body of which `begin` did not know. Raises LimitExceeded."""
        if size and self._of_request:
            await self._take({Limit.BYTES_IN: size})

    def sent(self, size: int) -> None:
        """Count bytes of the response."""
        if size and self._of_request:
            self._accounts.spend(self._of_request, Limit.BYTES_OUT, size, self._now())

    def sending_debt_s(self) -> float:
        """Return the seconds until more may be sent; 0: now."""
        return self._accounts.debt_s(self._of_request, Limit.BYTES_OUT, self._now()) if self._of_request else 0.0

    async def wait_to_send(self, *, wait_s_max: float | None = None) -> None:
        """Return when more may be sent. Raises LimitExceeded after `wait_s_max`; None: that of the settings. `allow`
        then also waits for the debts of the tenant and the namespace, until the same time."""
        self._sending_ends = self._now() + (self._accounts.wait_s_max if wait_s_max is None else wait_s_max)
        await self._wait_to_send_until(self._sending_ends)

    async def _wait_to_send_until(self, ends: float) -> None:
        debt_s = self.sending_debt_s()
        if not debt_s:
            return
        self._accounts.delayed += 1
        while debt_s:
            left_s = ends - self._now()
            if debt_s > left_s:
                raise self._accounts.refuse_debt(self._of_request, Limit.BYTES_OUT, self._now())
            await asyncio.sleep(debt_s)
            debt_s = self.sending_debt_s()

    def sending_room(self, wanted: int) -> int:
        """Return how many of the `wanted` bytes may be sent without a debt, at least 1."""
        room = self._accounts.room(self._of_request, Limit.BYTES_OUT, self._now()) if self._of_request else None
        return wanted if room is None else max(1, min(wanted, int(room)))

    async def create_topics(self, name: TopicName, count: int) -> None:
        """Return when `count` topics may be created, the partitions of `name` or the topic itself. Raises
        LimitExceeded."""
        owners = [self.sender.client] if self.sender.client is not None else []
        owners += [(Owner.TENANT, name.tenant), (Owner.NAMESPACE, f"{name.tenant}/{name.namespace}")]
        now = self._now()
        accounts = accounts_of(self._accounts, owners, now)
        await _sleep(self._accounts.take(accounts, {Limit.TOPICS: count}, now))

    def close(self) -> None:
        """The request has ended. Idempotent."""
        connected, self._connected = self._connected, ()
        self._accounts.disconnect(connected)
        if not self._is_closed:
            self._is_closed = True
            _current.reset(self._before)

    async def _take(self, needs: dict[Limit, float]) -> None:
        await _sleep(self._accounts.take(self._of_request, needs, self._now()))


def accounts_of(accounts: Accounts, owners: Sequence[tuple[Owner, str]], now: float) -> tuple[Account, ...]:
    """Return the accounts of those owners that have limits."""
    return tuple(account for owner in owners if (account := accounts.account(*owner, now)) is not None)


async def _sleep(wait_s: float) -> None:
    if wait_s:
        await asyncio.sleep(wait_s)


class Limiter:
    """Makes the allowances of requests. `by_address`: whether clients without a role are limited by their address."""

    def __init__(self, accounts: Accounts, *, by_address: bool, now: MonotonicClock) -> None:
        self.accounts = accounts
        self.passed_on: PassedOn | None = None
        """Reads and makes the proofs of brokers; None: those of other brokers are not known."""
        self._by_address = by_address
        self._now = now

    @property
    def is_off(self) -> bool:
        """Whether nothing is limited."""
        return self.accounts.is_off

    def allowance(self, scope: Any, raw_path: bytes, passed_on: bytes) -> Allowance:
        """Return that of a request. `passed_on`: its header PASSED_ON_HEADER."""
        parent: Allowance | None = scope.get(PARENT_KEY)
        of_client: tuple[Account, ...] = ()
        of_path: tuple[tuple[Owner, str], ...] = ()
        if parent is not None:
            sender: Sender | None = Sender(is_part=True, client=parent.sender.client)
        elif self.passed_on is not None and passed_on:
            sender = self.passed_on.read(passed_on)
            if sender is not None and not sender.is_charged:
                sender = None
        else:
            sender = None
        if sender is None:
            sender = Sender(is_part=False, client=client_of(scope, by_address=self._by_address))
            if sender.client is not None:
                of_client = accounts_of(self.accounts, [sender.client], self._now())
            of_path = scopes_in(raw_path)
        return Allowance(self.accounts, of_client, of_path, sender=sender, now=self._now)

    async def create_topics(self, name: TopicName, count: int) -> None:
        """Count topics that the current request creates. Raises LimitExceeded. A single partition counts only if it is
        created by itself, because those of a partitioned topic are counted with it."""
        current = _current.get()
        if self.is_off or (current is None) or (name.partition >= 0 and current.sender.is_part):
            return
        await current.create_topics(name, count)

    def passing_headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request that the current request sends to another broker."""
        if self.passed_on is None:
            return []
        current = _current.get()
        if current is not None:
            return [self.passed_on.header(current.sender)]
        return [self.passed_on.header(Sender(is_part=False, client=None, is_charged=not self.is_off))]


def client_of(scope: Any, *, by_address: bool) -> tuple[Owner, str] | None:
    """Return whose limits a request of this connection counts for; None: nobody's."""
    principal: Principal | None = scope.get("state", {}).get(PRINCIPAL)
    if principal is not None and principal.method is not Method.NONE:
        return Owner.ROLE, principal.original_role or principal.role
    client = scope.get("client")
    return (Owner.ADDRESS, group_of(tuple(client) if client else None)) if by_address else None


def announced_size(header: bytes, *, size_max: int) -> int:
    """Return the size of the body by `Content-Length`; 0 if it is not known, or above `size_max`: it is refused."""
    if not header.isdigit() or len(header) > 20:
        return 0
    size = int(header)
    return size if size <= size_max else 0
