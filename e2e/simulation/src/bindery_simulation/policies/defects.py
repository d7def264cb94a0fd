"""Defects of the policies: each function returns the attributes to replace."""

from collections.abc import Mapping, Sequence
from typing import Any

from bindery_broker.limits import inactivity
from bindery_broker.limits.expiry import Expirable, ExpiryScan
from bindery_broker.managed_ledger import retention, trimming
from bindery_broker.managed_ledger.ledger_list import LedgerList
from bindery_broker.managed_ledger.retention import RetentionRule
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_broker.topics import enforcing, topics
from bindery_broker.topics.admission import Admission
from bindery_pulsar.message_id import Position

from bindery_simulation.mutant import Replacement


def delay_does_not_count() -> list[Replacement]:
    """The time to live of a delayed message begins when it is published."""
    original = ExpiryScan.take

    def take(self: ExpiryScan, entries: Sequence[Expirable], following: Position, *, now_ms: int) -> Any:
        return original(self, [one._replace(deliver_at_ms=0) for one in entries], following, now_ms=now_ms)

    return [(ExpiryScan, "take", take)]


def delayed_never_expire() -> list[Replacement]:
    """A scan does not come back to the delayed messages that it has skipped."""
    original = ExpiryScan.take

    def take(self: ExpiryScan, entries: Sequence[Expirable], following: Position, *, now_ms: int) -> Any:
        found = original(self, entries, following, now_ms=now_ms)
        self.next_ms = None
        return found

    return [(ExpiryScan, "take", take)]


def expires_at_half() -> list[Replacement]:
    """Messages expire after half of their time to live."""
    original = ExpiryScan.begin

    def begin(self: ExpiryScan, *, ttl_ms: int, **others: Any) -> Any:
        return original(self, ttl_ms=ttl_ms // 2, **others)

    return [(ExpiryScan, "begin", begin)]


def retention_ignored() -> list[Replacement]:
    """Acknowledged ledgers are deleted, whatever the retention says."""
    return [(retention, "_is_released", lambda record, size, rule, *, now_ms: True)]


def retention_needs_both() -> list[Replacement]:
    """A ledger is deleted only once it is too old and the topic is too large."""

    def is_released(record: Any, size: int, rule: RetentionRule, *, now_ms: int) -> bool:
        is_old = rule.time_s is None or now_ms - record.closed_ms >= rule.time_s * 1_000
        is_large = rule.size_max is None or size > rule.size_max
        return is_old and is_large and rule != RetentionRule(None, None)

    return [(retention, "_is_released", is_released)]


def cursors_ignored() -> list[Replacement]:
    """Ledgers are deleted although subscriptions need them."""
    original = retention.trimmable

    def trimmable(ledgers: LedgerList, mark_deletes: Mapping[str, Position], **others: Any) -> int:
        return original(ledgers, {}, **others)

    return [(trimming, "trimmable", trimmable)]


def trimmed_not_deleted() -> list[Replacement]:
    """The ledgers that a topic no longer names are not deleted."""

    async def delete_ledger(self: trimming.Trimmer, ledger_id: int) -> bool:
        return True

    return [(trimming.Trimmer, "delete_ledger", delete_ledger)]


def open_ledger_is_kept() -> list[Replacement]:
    """No ledger is trimmed: maintenance does nothing."""

    async def trim(self: trimming.Trimmer) -> int:
        return 0

    return [(trimming.Trimmer, "trim", trim)]


def quota_ignored() -> list[Replacement]:
    """No quota refuses a message."""

    async def excess(self: Admission, *, is_waiting: bool = False) -> Any:
        return None

    return [(Admission, "excess", excess)]


def quota_sticks() -> list[Replacement]:
    """A quota that was exceeded once refuses producers until the topic is loaded again."""
    original = Admission.excess

    async def excess(self: Admission, *, is_waiting: bool = False) -> Any:
        return self._excess or await original(self, is_waiting=is_waiting)

    return [(Admission, "excess", excess)]


def evicts_all() -> list[Replacement]:
    """An eviction by size acknowledges the whole backlog."""
    return [(enforcing, "evicted_entries", lambda backlog, limit: backlog.entries)]


def evicts_nothing() -> list[Replacement]:
    """Backlogs above a quota stay as they are."""

    async def evict_backlog(topic: Any, *, clock: Any) -> None:
        pass

    return [(enforcing, "evict_backlog", evict_backlog)]


def changes_ignored() -> list[Replacement]:
    """A loaded topic keeps the policies that it had when it was loaded."""
    original = PolicyStore.effective

    def effective(self: PolicyStore, name: Any) -> Any:
        kept = self.__dict__.setdefault("kept_policies", {})
        if name not in kept and name in self._effective:
            kept[name] = original(self, name)
        return kept.get(name) or original(self, name)

    return [(PolicyStore, "effective", effective)]


def inactive_at_once() -> list[Replacement]:
    """A topic is inactive as soon as nobody is connected."""
    original = inactivity.is_inactive

    def is_inactive(use: Any, policy: Any) -> bool:
        return original(use._replace(idle_s=10**9), policy)

    return [(enforcing, "is_inactive", is_inactive)]


def inactive_with_backlog() -> list[Replacement]:
    """An inactive topic is deleted although a subscription has messages to read."""
    original = inactivity.is_inactive

    def is_inactive(use: Any, policy: Any) -> bool:
        return original(use._replace(backlogs=dict.fromkeys(use.backlogs, 0), has_retained=False), policy)

    return [(enforcing, "is_inactive", is_inactive)]


def inactive_kept() -> list[Replacement]:
    """Inactive topics are kept."""
    return [(topics, "topic_is_inactive", lambda topic, *, now, is_in_use: False)]
