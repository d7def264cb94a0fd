"""A topic's entries: a series of ledgers that reads as one.

(Signatures first: bodies follow.)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

from bindery_client.api import LedgerClient
from bindery_metadata.store import MetadataStore

from bindery_broker.managed_ledger.cursor import ManagedCursor
from bindery_broker.managed_ledger.entry_cache import EntryCache
from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.message_id import Position

WallClock = Callable[[], int]
"""Milliseconds since 1970."""


class ManagedLedger:
    """The entries of one (partition of a) topic and its cursors, owned by this broker."""

    name: str
    """`tenant/namespace/persistent/encTopic` (`TopicName.managed_ledger_name`)."""

    @classmethod
    async def open(
        cls,
        name: str,
        *,
        client: LedgerClient,
        store: MetadataStore,
        clock: WallClock,
        settings: ManagedLedgerSettings | None = None,
        cache: EntryCache | None = None,
        create: bool = True,
        properties: Mapping[str, str] | None = None,
    ) -> Self:
        """Take the topic over: fence and recover its last ledger, start a new one, load its cursors.

        `create`: make the topic if it is not there, else NoSuchTopic. `cache`: shared by the broker's topics.
        Raises TopicFenced when another broker is just doing the same, TryAgain when bookies or ZooKeeper cannot.
        """
        raise NotImplementedError

    @property
    def is_open(self) -> bool:
        """False once closed, fenced or deleted: open it anew then."""
        raise NotImplementedError

    @property
    def is_terminated(self) -> bool: ...

    @property
    def properties(self) -> Mapping[str, str]: ...

    def on_fenced(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in the loop, once, when the topic is lost to another broker. Returns its removal."""
        raise NotImplementedError

    # --- adding

    async def add_many(self, payloads: Sequence[bytes]) -> list[Position]:
        """Store the entries in order; return their positions once all are durable (Qa fsyncs each).

        Calls overlap, are pipelined and complete in the order they were made. Errors: TopicFenced (what was in flight
        may be stored), TooManyRequests and other TryAgain (nothing was stored), AddTimeout (unknown), TooLarge (an
        entry exceeds ENTRY_SIZE_MAX; nothing stored), Conflict (terminated). Cancelling takes back only what was not sent.
        """
        raise NotImplementedError

    # --- positions

    @property
    def last_confirmed(self) -> Position:
        """The last acknowledged entry; entry -1 of the first ledger when there is none."""
        raise NotImplementedError

    @property
    def first_position(self) -> Position:
        """The oldest entry that still exists, or where the first one will stand."""
        raise NotImplementedError

    @property
    def entries_count(self) -> int: ...

    @property
    def size(self) -> int:
        """Payload bytes of all entries."""
        raise NotImplementedError

    def next_position(self, position: Position) -> Position:
        """The entry after `position`, trimmed ones skipped; for the last one: where the next may stand."""
        raise NotImplementedError

    def previous_position(self, position: Position) -> Position:
        """The entry before `position`; entry -1 of the first ledger when there is none."""
        raise NotImplementedError

    def contains(self, position: Position) -> bool:
        """Whether `position` is an acknowledged entry that still exists."""
        raise NotImplementedError

    def clamp(self, position: Position) -> Position:
        """The first existing entry >= `position`, or where the next one will stand. Takes EARLIEST and LATEST."""
        raise NotImplementedError

    def entries_between(self, *, after: Position, upto: Position) -> int:
        """Entries in (after, upto]."""
        raise NotImplementedError

    # --- reading

    async def read(self, position: Position, *, entries_max: int, size_max: int) -> list[tuple[Position, bytes]]:
        """Acknowledged entries from `position` (inclusive, clamped) on, in order, across ledgers.

        At most `entries_max`; stops before `size_max` payload bytes are exceeded, but gives at least one entry when
        there is one. Empty: nothing to read yet. Errors: NoSuchEntry/NoSuchLedger (lost), Corrupt, TryAgain,
        TopicFenced.
        """
        raise NotImplementedError

    async def find_first(self, predicate: Callable[[bytes], bool]) -> Position:
        """The first entry for which `predicate` holds, where it holds for all later ones too (binary search); where the
        next entry will stand when there is none. For seek by time:
        `find_first(lambda entry: publish_time_ms(entry) >= timestamp_ms)`."""
        raise NotImplementedError

    def on_new_entries(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in the loop each time last_confirmed moved. Returns its removal. Must not raise."""
        raise NotImplementedError

    async def wait_for_entry(self, position: Position, *, timeout_s: float) -> bool:
        """True once last_confirmed >= position, False at the timeout. Raises TopicFenced when the topic is lost."""
        raise NotImplementedError

    # --- cursors

    @property
    def cursors(self) -> Mapping[str, ManagedCursor]:
        """By subscription name."""
        raise NotImplementedError

    async def open_cursor(
        self, name: str, *, start: Position, properties: Mapping[str, str] | None = None
    ) -> ManagedCursor:
        """The cursor of subscription `name`; made durably if it is not there, its next entry then being `start`
        (clamped; EARLIEST, LATEST). An existing cursor keeps its position and properties."""
        raise NotImplementedError

    async def delete_cursor(self, name: str) -> None:
        """Durably. NoSuchSubscription when there is none."""
        raise NotImplementedError

    # --- keeping and ending

    async def trim(self) -> int:
        """Delete ledgers that nobody needs any more, oldest first; how many. Called by a timer and after acks."""
        raise NotImplementedError

    async def roll(self) -> None:
        """End the current ledger, if it holds anything, and go on in a new one."""
        raise NotImplementedError

    async def close(self) -> None:
        """Flush cursors, seal the ledger, so that the next open is quick. Adds in flight complete first."""
        raise NotImplementedError

    async def delete(self) -> None:
        """Remove the topic with all cursors (atomically, from metadata), then its ledgers."""
        raise NotImplementedError

    def internal_stats(self) -> dict[str, object]:
        """Pulsar's `internalStats` JSON."""
        raise NotImplementedError
