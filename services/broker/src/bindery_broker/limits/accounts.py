"""Count what clients, tenants and namespaces use, and limit it. Pure; times are monotonic seconds.

A request belongs to up to three owners: the client (the role that it has proved, or its address), and the tenant and
the namespace in its path. Each owner with a limit has an Account. The client's is charged first, the others once the
request is known to be allowed.

| limit       | counts                                              | above it, a request                              |
|-------------|-----------------------------------------------------|--------------------------------------------------|
| requests    | requests, per second                                | waits for its turn, `wait_s_max` at most; if its |
| bytes_in    | bytes of request bodies, per second                 | turn comes later: LimitExceeded                  |
| topics      | topics created, per minute                          |                                                  |
| bytes_out   | bytes of response bodies, per second                | for messages waits until the debt is paid        |
| connections | connections with a request in progress              | LimitExceeded at once                            |

`take` takes what a request needs from all of the given accounts, or from none. Each request has its own turn, so that
a client above its limit delays nobody else. In any span of t seconds, an owner uses at most rate * t and `burst_s`
seconds of its rate, or one request if that is larger. Bytes that go out are known only when they go, so that there the
responses in progress are added.

Memory: at most `tracked_max` accounts. The account that was not used for the longest time is dropped, of the oldest
SEARCHED one that is full and has no connections if there is one: it would be created again in the same state.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from bindery_core.errors import BadRequest
from bindery_kit.limits.token_bucket import TokenBucket

from bindery_broker.errors import LimitExceeded

SEARCHED: Final = 16
"""Number of accounts, from the one that was not used for the longest time, that are searched for one that is full."""
ENTRIES_MAX: Final = 10_000
"""Maximum number of entries of a file of overrides."""
BUSY_RETRY_S: Final = 1.0
"""Seconds after which a client may try again that has too many connections: when one gets free is not known."""


class Owner(enum.StrEnum):
    """Whose limit it is. Values are those in errors, metrics and answers."""

    ROLE = "role"
    ADDRESS = "address"
    """The address of a client that has proved no role; an IPv6 network of 64 bits is one address."""
    TENANT = "tenant"
    NAMESPACE = "namespace"


class Limit(enum.StrEnum):
    REQUESTS = "requests"
    BYTES_IN = "bytes_in"
    BYTES_OUT = "bytes_out"
    CONNECTIONS = "connections"
    TOPICS = "topics"


_TEXTS: Final = {
    Limit.REQUESTS: "requests per second",
    Limit.BYTES_IN: "bytes of requests per second",
    Limit.BYTES_OUT: "bytes of responses per second",
    Limit.CONNECTIONS: "connections with requests in progress",
    Limit.TOPICS: "new topics per minute",
}
_TOPICS_PERIOD_S: Final = 60.0


class OwnerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one owner. 0: no limit; None: that of the settings."""

    requests_rate: float | None = None
    bytes_in_rate: float | None = None
    bytes_out_rate: float | None = None
    connections_max: int | None = None
    topics_rate: float | None = None

    def values(self) -> dict[Limit, float | None]:
        return {
            Limit.REQUESTS: self.requests_rate,
            Limit.BYTES_IN: self.bytes_in_rate,
            Limit.BYTES_OUT: self.bytes_out_rate,
            Limit.CONNECTIONS: self.connections_max,
            Limit.TOPICS: self.topics_rate,
        }


class Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits that differ from the settings, by name. The content of the file of overrides, which is JSON."""

    roles: dict[str, OwnerLimits] = {}
    addresses: dict[str, OwnerLimits] = {}
    tenants: dict[str, OwnerLimits] = {}
    namespaces: dict[str, OwnerLimits] = {}
    """By `tenant/namespace`."""

    def of(self, owner: Owner) -> Mapping[str, OwnerLimits]:
        return {
            Owner.ROLE: self.roles,
            Owner.ADDRESS: self.addresses,
            Owner.TENANT: self.tenants,
            Owner.NAMESPACE: self.namespaces,
        }[owner]


NO_OVERRIDES: Final = Overrides()


def decode_overrides(content: bytes) -> Overrides:
    """Return the content of a file of overrides. Raises BadRequest with the place of the first error.

    An empty file is an error, because a file that was cut off must not remove the limits of owners.
    """
    if not content.strip():
        raise BadRequest("the file of limits is empty; write {} if no owner has limits of its own")
    try:
        found = msgspec.json.decode(content, type=Overrides)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"not a file of limits: {error}") from error
    count = 0
    for owner in Owner:
        for name, limits in found.of(owner).items():
            count += 1
            if owner is Owner.NAMESPACE and name.count("/") != 1:
                raise BadRequest("a namespace has the form TENANT/NAMESPACE", name=name[:300])
            for limit, value in limits.values().items():
                if value is not None and not 0 <= value <= 1e15:
                    raise BadRequest("a limit is 0 (none) to 1e15", owner=owner, name=name[:300], limit=limit)
    if count > ENTRIES_MAX:
        raise BadRequest("too many entries in a file of limits", entries=count, entries_max=ENTRIES_MAX)
    return found


class Usage(NamedTuple):
    """One limit in force and its use."""

    limit: Limit
    rate: float
    """What passes in a second; of topics in a minute; for connections their maximum number."""
    burst: float
    """What may pass at once."""
    available: float
    """What may pass now; below 0: the debt."""
    retry_after_s: float
    """Seconds until something may pass."""


class Account:
    """What one owner may use and has used. Invariant: a bucket exists for exactly the rates that are above 0."""

    __slots__ = ("_buckets", "connections", "connections_max", "name", "owner", "version")

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner = owner
        self.name = name
        self.version = -1
        """Version of the limits that are in force here."""
        self.connections = 0
        self.connections_max = 0
        """0: no limit."""
        self._buckets: dict[Limit, TokenBucket] = {}

    def set(self, values: Mapping[Limit, float], *, burst_s: float, now: float) -> None:
        """Put other limits in force. Debts stay."""
        self.connections_max = int(values[Limit.CONNECTIONS])
        for limit, value in values.items():
            if limit is Limit.CONNECTIONS:
                continue
            if not value:
                self._buckets.pop(limit, None)
                continue
            rate, period_s = (value / _TOPICS_PERIOD_S, _TOPICS_PERIOD_S) if limit is Limit.TOPICS else (value, burst_s)
            bucket = self._buckets.get(limit)
            if bucket is None:
                self._buckets[limit] = TokenBucket(rate=rate, period_s=period_s, now=now)
            else:
                bucket.change(rate=rate, period_s=period_s, now=now)

    def bucket(self, limit: Limit) -> TokenBucket | None:
        """Return the bucket of a rate; None: it is not limited."""
        return self._buckets.get(limit)

    def is_idle(self, now: float) -> bool:
        """Whether a new account would be in the same state."""
        return not self.connections and all(bucket.is_full(now) for bucket in self._buckets.values())

    def usage(self, now: float) -> Iterator[Usage]:
        """Yield the limits in force."""
        for limit in Limit:
            bucket = self._buckets.get(limit)
            if bucket is not None:
                scale = _TOPICS_PERIOD_S if limit is Limit.TOPICS else 1.0
                yield Usage(limit, bucket.rate * scale, bucket.burst, bucket.tokens(now), bucket.wait_s(now))
            elif limit is Limit.CONNECTIONS and self.connections_max:
                left = self.connections_max - self.connections
                yield Usage(limit, self.connections_max, self.connections_max, left, 0.0 if left > 0 else BUSY_RETRY_S)

    def exceeded(self, limit: Limit, *, retry_after_s: float) -> LimitExceeded:
        """Return the error for a request above a limit."""
        bucket = self._buckets.get(limit)
        rate: float = self.connections_max
        if bucket is not None:
            rate = bucket.rate * (_TOPICS_PERIOD_S if limit is Limit.TOPICS else 1.0)
        return LimitExceeded(
            f"the {self.owner} {self.name} is above its limit of {rate:g} {_TEXTS[limit]}; retry after "
            f"{max(retry_after_s, 0.001):.3g} s, or ask the operator for a higher limit. Nothing was done",
            limit=limit.value,
            kind=self.owner.value,
            name=self.name,
            rate=rate,
            retry_after_s=round(retry_after_s, 3),
        )


class Accounts:
    """The accounts of a process."""

    def __init__(
        self,
        defaults: Mapping[Owner, OwnerLimits],
        *,
        burst_s: float,
        wait_s_max: float,
        tracked_max: int,
        overrides: Callable[[], Overrides] = lambda: NO_OVERRIDES,
    ) -> None:
        """`defaults`: the limits of owners without an override. `burst_s`: seconds of a rate that may pass at once.
        `overrides`: returns those in force, always the same object until they change."""
        self._defaults = {owner: {k: v or 0.0 for k, v in defaults[owner].values().items()} for owner in Owner}
        self._burst_s = burst_s
        self.wait_s_max = wait_s_max
        """Maximum seconds that a request waits for its turn."""
        self._tracked_max = tracked_max
        self._accounts: OrderedDict[tuple[Owner, str], Account] = OrderedDict()
        self._read_overrides = overrides
        self._overrides = NO_OVERRIDES
        self._limited = self._find_limited()
        self._version = 0
        self.refused: dict[tuple[Owner, Limit], int] = {}
        """Number of requests above a limit, until now."""
        self.delayed = 0
        """Number of requests that waited for their turn, until now."""

    def __len__(self) -> int:
        """Number of accounts in memory."""
        return len(self._accounts)

    @property
    def is_off(self) -> bool:
        """Whether nothing is limited, so that nothing needs to be counted."""
        if self._read_overrides() is not self._overrides:
            self._overrides = self._read_overrides()
            self._version += 1  # for the accounts that are in memory
            self._limited = self._find_limited()
        return not self._limited

    def account(self, owner: Owner, name: str, now: float) -> Account | None:
        """Return the account of an owner; None: it has no limits."""
        if self.is_off or owner not in self._limited:
            return None
        key = (owner, name)
        account = self._accounts.get(key)
        if account is None:
            values = self._values(owner, name)
            if not any(values.values()):
                return None
            if len(self._accounts) >= self._tracked_max:
                self._drop_one(now)
            account = self._accounts[key] = Account(owner, name)
        else:
            self._accounts.move_to_end(key)
        if account.version != self._version:
            account.version = self._version
            account.set(self._values(owner, name), burst_s=self._burst_s, now=now)
        return account

    def connect(self, accounts: Sequence[Account]) -> None:
        """Count a connection of each. Raises LimitExceeded, with nothing counted. `disconnect` ends it."""
        for account in accounts:
            if account.connections_max and account.connections >= account.connections_max:
                raise self._refusal(account, Limit.CONNECTIONS, BUSY_RETRY_S)
        for account in accounts:
            account.connections += 1

    def disconnect(self, accounts: Sequence[Account]) -> None:
        for account in accounts:
            account.connections -= 1

    def take(
        self,
        accounts: Sequence[Account],
        needs: Mapping[Limit, float],
        now: float,
        *,
        wait_s_max: float | None = None,
    ) -> float:
        """Take what a request needs from each account. Returns the seconds until it is its turn.

        Raises LimitExceeded if that is more than `wait_s_max` (None: that of the settings); then nothing was taken.
        """
        wait_s_max = self.wait_s_max if wait_s_max is None else wait_s_max
        longest, most, exceeded = 0.0, None, Limit.REQUESTS
        for account in accounts:
            for limit, count in needs.items():
                bucket = account.bucket(limit)
                if bucket is not None and (wait_s := bucket.wait_for_s(count, now)) > longest:
                    longest, most, exceeded = wait_s, account, limit
        if most is not None and longest > wait_s_max:
            raise self._refusal(most, exceeded, longest)
        for account in accounts:
            for limit, count in needs.items():
                bucket = account.bucket(limit)
                if bucket is not None:
                    bucket.take(count, now)
        self.delayed += longest > 0
        return longest

    def spend(self, accounts: Sequence[Account], limit: Limit, count: float, now: float) -> None:
        """Count what has passed already. The debt is waited for by those that follow."""
        for account in accounts:
            bucket = account.bucket(limit)
            if bucket is not None:
                bucket.take(count, now)

    def debt_s(self, accounts: Sequence[Account], limit: Limit, now: float) -> float:
        """Return the seconds until the debts of all accounts are paid; 0: there are none."""
        return max(
            (bucket.wait_s(now) for account in accounts if (bucket := account.bucket(limit)) is not None), default=0.0
        )

    def refuse_debt(self, accounts: Sequence[Account], limit: Limit, now: float) -> LimitExceeded:
        """Return the error for a request that has waited for a debt long enough."""
        worst = max(accounts, key=lambda account: self.debt_s([account], limit, now))
        return self._refusal(worst, limit, self.debt_s([worst], limit, now))

    def room(self, accounts: Sequence[Account], limit: Limit, now: float) -> float | None:
        """Return what may pass now without a debt; None: any number."""
        rooms = [bucket.tokens(now) for account in accounts if (bucket := account.bucket(limit)) is not None]
        return min(rooms) if rooms else None

    def _refusal(self, account: Account, limit: Limit, retry_after_s: float) -> LimitExceeded:
        key = (account.owner, limit)
        self.refused[key] = self.refused.get(key, 0) + 1
        return account.exceeded(limit, retry_after_s=retry_after_s)

    def _values(self, owner: Owner, name: str) -> dict[Limit, float]:
        values = self._defaults[owner]
        override = self._overrides.of(owner).get(name)
        if override is None:
            return values
        return {limit: values[limit] if own is None else own for limit, own in override.values().items()}

    def _find_limited(self) -> frozenset[Owner]:
        return frozenset(owner for owner in Owner if any(self._defaults[owner].values()) or self._overrides.of(owner))

    def _drop_one(self, now: float) -> None:
        oldest = list(islice(self._accounts.items(), SEARCHED))
        key = next((key for key, account in oldest if account.is_idle(now)), oldest[0][0])
        del self._accounts[key]
