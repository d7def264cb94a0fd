"""Find the messages of a subscription whose time to live (TTL) is over. Pure.

The time to live of an entry begins when it was published, or at its delivery time if it is delayed. So a message that
is not due is never acknowledged by the policy. Entries that are not delayed expire in the order in which they were
published; delayed ones, which may expire much later, are skipped.

| entry                                         | what happens                                                       |
|-----------------------------------------------|--------------------------------------------------------------------|
| expired, and all unacknowledged before it too | the mark-delete position moves over it                             |
| expired, after an entry that is not           | is acknowledged by itself, unless a consumer has it                |
| delayed, not expired                          | is skipped                                                         |
| not delayed, not expired                      | the scan pauses here until it expires                              |
| unreadable                                    | expires as if it had been published when its ledger was closed     |

Nobody knows when an unreadable entry was published, but it was not after its ledger was closed. So it never expires too
early, and does not keep its ledger and all later ones for ever. In a ledger that is still open it is skipped.

A scan continues where the last one paused, and each reads a bounded number of entries. It begins again at the
mark-delete position when a skipped entry expires, or after a seek. So an entry is read about once by this
policy, and once more after another skipped one has expired.

Source: Pulsar's PersistentMessageExpiryMonitor. Unlike there, the time of delayed messages begins at their delivery
time, and does not hold up the messages after them.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from bindery_pulsar.message_id import Position

RETRY_MS: Final = 1_000
"""Milliseconds after which an expired entry that a consumer has is looked at again."""


class Expirable(NamedTuple):
    """An unacknowledged entry."""

    position: Position
    publish_ms: int | None
    """Publish time in ms since 1970; None: it cannot be read."""
    deliver_at_ms: int = 0
    """Delivery time in ms since 1970; 0 or less: not delayed."""
    is_in_use: bool = False
    """Whether a consumer has messages of it."""
    closed_ms: int = 0
    """When its ledger was closed, in ms since 1970; 0: it is open. Only used if `publish_ms` is None."""


class Expired(NamedTuple):
    upto: Position | None
    """The mark-delete position can move to this entry; None: it stays."""
    others: list[Position]
    """Entries after it to be acknowledged by themselves."""


class ExpiryScan:
    """Invariant: every unacknowledged entry before `position` expires at `next_ms` or later."""

    def __init__(self) -> None:
        self.position: Position | None = None
        """Where the scan continues; None: at the mark-delete position."""
        self.next_ms: int | None = None
        """When the first skipped entry may expire, in ms since 1970; None: none was skipped."""
        self.due_ms = 0
        """When the entry at `position` expires, as far as it was read, in ms since 1970."""
        self._has_skipped = False
        """Whether an entry before `position` was skipped."""
        self._ttl_ms = 0
        self._seeks = 0

    def begin(self, *, ttl_ms: int, mark_delete: Position, seeks: int, now_ms: int) -> Position | None:
        """Return where to read the next unacknowledged entries. None: nothing can have expired yet.

        `seeks`: number of seeks of the subscription so far, after which other entries may be unacknowledged.
        """
        has_come_due = self.next_ms is not None and self.next_ms <= now_ms
        is_passed = self.position is not None and self.position <= mark_delete
        if ttl_ms != self._ttl_ms or seeks != self._seeks or has_come_due or is_passed:
            self.position = self.next_ms = None
            self.due_ms = 0
            self._has_skipped = False
        self._ttl_ms, self._seeks = ttl_ms, seeks
        if self.due_ms > now_ms:
            return None
        return mark_delete if self.position is None else self.position

    @property
    def next_due_ms(self) -> int:
        """When the next run may find something expired, in ms since 1970; 0: it must look."""
        return self.due_ms if self.next_ms is None else min(self.due_ms, self.next_ms)

    def take(self, entries: Sequence[Expirable], following: Position, *, now_ms: int) -> tuple[Expired, bool]:
        """Judge the unacknowledged entries that follow, in order. Returns what has expired, and whether to read on now.

        `following`: where to read after the entries.
        """
        upto: Position | None = None
        others: list[Position] = []
        for entry in entries:
            if entry.publish_ms is None:
                is_delayed = True  # those after it may expire earlier
                expires_ms = (entry.closed_ms or now_ms) + self._ttl_ms
            else:
                is_delayed = entry.deliver_at_ms > entry.publish_ms
                expires_ms = max(entry.publish_ms, entry.deliver_at_ms) + self._ttl_ms
            if expires_ms > now_ms and not is_delayed:
                self.position, self.due_ms = entry.position, expires_ms
                return Expired(upto, others), False
            if expires_ms > now_ms or (entry.is_in_use and self._has_skipped):
                self._has_skipped = True
                again_ms = expires_ms if expires_ms > now_ms else now_ms + RETRY_MS
                self.next_ms = again_ms if self.next_ms is None else min(self.next_ms, again_ms)
            elif self._has_skipped:
                others.append(entry.position)
            else:
                upto = entry.position
        self.position, self.due_ms = following, 0
        return Expired(upto, others), bool(entries)
