"""Decide whether the backlog of a topic exceeds its quotas, and what is evicted then. Pure.

| quota | is exceeded if                                                                                       |
|-------|------------------------------------------------------------------------------------------------------|
| size  | a subscription has more than `limit` bytes to read, by the estimate of its backlog                   |
| age   | the oldest message that a subscription has not acknowledged is older than `limit` seconds            |

Cursors of the broker itself and readers, which keep no data, never count. An eviction acknowledges the oldest entries
of the subscriptions that exceed the limit, until EVICTED_TO of it is left.
Source: Pulsar's BacklogQuotaManager.
"""

import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from bindery_broker.namespaces.policies import BacklogQuota, QuotaAction

EVICTED_TO: Final = 0.9
"""Part of the limit to which an eviction reduces a backlog. As in Pulsar."""


class SubscriptionBacklog(NamedTuple):
    subscription: str
    entries: int
    size: int
    """Payload bytes; an estimate."""
    oldest_id: str
    """Id of the oldest message that is not acknowledged."""
    oldest_ms: int | None = None
    """Its publish time in ms since 1970; None: it is not known, or there is none."""


class Excess(NamedTuple):
    """A quota that is exceeded."""

    quota: str
    """`size` or `age`."""
    action: QuotaAction
    limit: int
    """Bytes or seconds."""
    value: int
    """Bytes or seconds that exceed it."""
    backlog: SubscriptionBacklog
    """The subscription that exceeds it most."""

    @property
    def text(self) -> str:
        backlog, unit = self.backlog, "bytes" if self.quota == "size" else "seconds"
        what = f"has {self.value} bytes to read" if self.quota == "size" else f"is {self.value} seconds behind"
        return (
            f"subscription {backlog.subscription} {what}, the quota is {self.limit} {unit}; "
            f"its oldest message is {backlog.oldest_id}"
        )


def find_excess(
    backlogs: Iterable[SubscriptionBacklog], *, size: BacklogQuota | None, age: BacklogQuota | None, now_ms: int
) -> list[Excess]:
    """Return the quotas that are exceeded, that of the size first. `now_ms`: in ms since 1970."""
    found: list[Excess] = []
    some = [backlog for backlog in backlogs if backlog.entries]
    if size is not None and some:
        largest = max(some, key=lambda backlog: backlog.size)
        if largest.size > size.limit:
            found.append(Excess("size", size.action, size.limit, largest.size, largest))
    if age is not None:
        oldest = min(
            (backlog for backlog in some if backlog.oldest_ms is not None),
            key=lambda backlog: backlog.oldest_ms or 0,
            default=None,
        )
        if oldest is not None and oldest.oldest_ms is not None and now_ms - oldest.oldest_ms > age.limit * 1_000:
            found.append(Excess("age", age.action, age.limit, (now_ms - oldest.oldest_ms) // 1_000, oldest))
    return found


def evicted_entries(backlog: SubscriptionBacklog, limit: int) -> int:
    """Return how many of the oldest entries to acknowledge, so that about EVICTED_TO of `limit` bytes is left."""
    if backlog.size <= limit:
        return 0
    surplus = backlog.size - EVICTED_TO * limit
    return min(backlog.entries, math.ceil(backlog.entries * surplus / backlog.size))


def evicted_before_ms(limit: int, now_ms: int) -> int:
    """Return the publish time before which entries are acknowledged at the quota of age, in ms since 1970."""
    return now_ms - round(EVICTED_TO * limit * 1_000)
