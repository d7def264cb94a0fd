"""Follow the bookies, the lost-bookie delay and the recovery switch during an auditor's term.

Three coroutines run until the term ends:

| coroutine      | follows                             | updates                                                     |
|----------------|-------------------------------------|-------------------------------------------------------------|
| follow_bookies | registrations, cookies, memberships | `lost`, which decides by the clock which bookies are lost   |
| follow_delay   | lostBookieRecoveryDelay             | the delay; the same value written again requests an audit   |
| follow_switch  | disable                             | `is_enabled`                                                |

Changes within `debounce_s` cause one poll. The bookies are also polled every `poll_interval_s`, because a lease expires
without any event. A bookie that moves between the lists of writable and read-only bookies is in both for a moment. The
lists are therefore read in the order writable, read-only, writable, which finds the bookie whichever way it moves.

Observed absences are stored in the cursor CURSOR for the next leader. Every write checks the leadership.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BadRequest, BinderyError, Corrupt, NoSuchNode
from bindery_core.ids import BookieId, validate_bookie_id
from bindery_kit.observability.logs import get_logger
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore, SessionState

from bindery_recovery.cluster.lost_bookies import Change, ChangeKind, LostBookies, Observation, Phase

CURSOR: Final = "lost-bookies"
"""Name of the cursor that stores observed absences."""
POLL_PAUSE_MIN_S: Final = 0.01
"""Minimum pause in seconds between two polls."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditorLimits:
    """Limits that only tests set. In seconds, unless the name contains another unit."""

    settle_s: float = 15.0
    """Time after the start of a term or a reconnect in which no bookie counts as lost. Longer than the session timeout
    of bookies plus the time that they need to register again."""

    debounce_s: float = 0.5
    """Time after a change in which further changes cause no additional poll."""

    poll_interval_s: float = 5.0
    """Maximum interval between two polls."""

    save_interval_s: float = 5.0
    """Interval at which observed absences are stored: a failover loses at most this much observed time."""

    retry_s: float = 5.0
    """Pause after a failure of the metadata store."""

    check_poll_s: float = 60.0
    """Maximum interval at which a periodic check tests whether it is due, because an operator may have set its time
    back."""

    marks_in_flight: int = 16
    """Number of ledgers that an audit marks at a time."""

    reads_in_flight: int = 64
    """Number of ledgers whose metadata is read at a time."""

    checks_in_flight: int = 8
    """Number of ledgers that the full check reads at a time."""

    ledger_timeout_s: float = 60.0
    """Timeout of the full check for one ledger."""

    replica_timeout_s: float = 120.0
    """Timeout of the replica check for one ledger."""

    def __post_init__(self) -> None:
        assert self.settle_s >= 0
        assert 0 <= self.debounce_s < self.poll_interval_s
        assert self.save_interval_s > 0
        assert self.retry_s > 0
        assert self.check_poll_s > 0


@dataclass(slots=True)
class BookieSnapshot:
    """The bookies as of the last poll."""

    registered: Mapping[BookieId, bool] = field(default_factory=dict)
    """Registered bookies; True: writable."""
    known: frozenset[BookieId] = frozenset()
    """Bookies with a cookie."""
    draining: frozenset[BookieId] = frozenset()
    draining_since_ms: Mapping[BookieId, int] = field(default_factory=dict)
    """Start of each drain. It distinguishes consecutive drains of one bookie."""
    removed: frozenset[BookieId] = frozenset()
    maintained: frozenset[BookieId] = frozenset()
    """Bookies in maintenance."""

    @property
    def gone(self) -> frozenset[BookieId]:
        """Bookies that an operator removed and that are not registered. The delay does not apply to them."""
        return self.removed - self.registered.keys()


class BookieWatch:
    """The watch of one term. Invariant: `snapshot` and `lost` come from the same poll."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        marks: UnderreplicationManager,
        records: RecoveryRecords,
        memberships: MembershipStore,
        *,
        leadership: Leadership,
        delay_s: int,
        limits: AuditorLimits,
        clock_ms: Callable[[], int],
    ) -> None:
        """`delay_s`: written to lostBookieRecoveryDelay if that znode is missing."""
        self._store = store
        self._layout = layout
        self._marks = marks
        self._records = records
        self._memberships = memberships
        self._cookies = CookieStore(store, layout)
        self._leadership = leadership
        self._delay_s = delay_s
        self._limits = limits
        self._clock_ms = clock_ms
        self._loop = asyncio.get_running_loop()
        self.lost = LostBookies(delay_s, limits.settle_s)
        self.snapshot = BookieSnapshot()
        self.without_cookie: set[BookieId] = set()
        """Bookies without a cookie that ledgers name; they count as known."""
        self._is_enabled = False
        self.audit_requested = False
        """Whether an operator requested an audit by writing the delay again. The audit resets it."""
        self.changed = asyncio.Event()
        """Set when the state may have changed or a bookie may be due; wakes the audit."""
        self._poll_now = asyncio.Event()
        self._delay_changed = asyncio.Event()
        self._switch_changed = asyncio.Event()
        self._delay_seen: tuple[int, int, int] | None = None
        """Delay in seconds, version of the znode, time of its last write."""
        self._delay_known = asyncio.Event()
        self._events: list[HistoryEvent] = []
        self._saved: dict[str, Any] = {}
        self._save_at = 0.0

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def is_enabled(self) -> bool:
        """Whether ledgers may be marked. False until the switch has been read, and between a change and its next
        read."""
        return self._is_enabled and not self._switch_changed.is_set()

    @property
    def is_blind(self) -> bool:
        """Whether the store is disconnected or was connected again too recently: decisions must wait."""
        now = self._loop.time()
        return self.lost.is_quiet(now) or self._store.session_state is not SessionState.CONNECTED

    def due(self) -> frozenset[BookieId]:
        """Lost bookies whose ledgers are not all marked yet."""
        return frozenset() if self.is_blind else self.lost.due(self._loop.time())

    def definitely_lost(self) -> frozenset[BookieId]:
        """Bookies whose replicas no longer count: due or handled, or removed and not registered."""
        if self.is_blind:
            return frozenset()
        handled = {b for b, absence in self.lost.absences.items() if absence.phase is Phase.HANDLED}
        return self.due() | handled | self.snapshot.gone

    def left_s(self, bookie_id: BookieId) -> float | None:
        """Return the remaining seconds of the delay of a bookie; None: handled, or not absent."""
        return self.lost.left_s(bookie_id, self._loop.time())

    # --- coroutines -----------------------------------------------------------------------------------------------

    async def begin(self) -> Callable[[], None]:
        """Load the absences that the previous leader observed. Return a function that stops following the state of the
        session.

        Raises NotLeader, MetadataUnavailable.
        """
        kept = await self._records.get_cursor(CURSOR) or {}
        bookies = kept.get("bookies")
        if isinstance(bookies, dict):
            self.lost.resume(bookies)
        self._saved = self.lost.to_json()
        self.lost.begin(self._loop.time())
        return self._store.on_session_change(self._on_session)

    async def follow_bookies(self) -> None:
        await self._delay_known.wait()
        while True:
            self._poll_now.clear()
            pause_s = self._limits.poll_interval_s
            try:
                await self.poll()
                await self._save_if_due()
            except NotLeader:
                raise
            except BinderyError as error:
                log.warning("bookies_not_seen", error=str(error))
                pause_s = self._limits.retry_s
            next_s = self.lost.next_poll_s(self._loop.time())
            if next_s:  # a bookie will become due; one that is already due needs no earlier poll
                pause_s = min(pause_s, max(next_s, POLL_PAUSE_MIN_S))
            await self._wait(self._poll_now, pause_s)
            if self._poll_now.is_set():
                await asyncio.sleep(self._limits.debounce_s)

    async def poll(self) -> BookieSnapshot:
        """Read the bookies and update `snapshot` and `lost`. Raises NotLeader, MetadataUnavailable, NoSuchNode (no
        cluster)."""
        watch = self._poll_now.set
        writable = {*await self._names(self._layout.available, watch)}
        read_only = await self._names(self._layout.available_readonly, watch)
        writable |= {*await self._names(self._layout.available, watch)}
        known = frozenset(await self._cookies.bookies())
        now_ms = self._clock_ms()
        intents: dict[Intent, set[BookieId]] = {intent: set() for intent in Intent}
        memberships = await self._memberships.all(watch=watch)
        for bookie_id, membership in memberships.items():
            intents[membership.effective(now_ms)].add(bookie_id)
        self.snapshot = BookieSnapshot(
            registered={**dict.fromkeys(read_only, False), **dict.fromkeys(writable, True)},
            known=known,
            draining=frozenset(intents[Intent.DRAINING]),
            draining_since_ms={b: memberships[b].since_ms for b in intents[Intent.DRAINING]},
            removed=frozenset(intents[Intent.REMOVED]),
            maintained=frozenset(intents[Intent.MAINTENANCE]),
        )
        self.without_cookie -= known
        self.observe()
        self.changed.set()
        return self.snapshot

    def observe(self) -> None:
        """Update `lost` with the present `snapshot`."""
        if self._store.session_state is not SessionState.CONNECTED:
            return  # the snapshot may be as old as the last connection
        snapshot = self.snapshot
        view = Observation(
            known=snapshot.known | self.without_cookie,
            registered=frozenset(snapshot.registered),
            exempt=snapshot.maintained | snapshot.removed,
        )
        for change in self.lost.observe(view, self._loop.time(), self._clock_ms()):
            self._events.append(self._event(change))

    async def follow_delay(self) -> None:
        while True:
            self._delay_changed.clear()
            try:
                await self._read_delay()
            except NotLeader:
                raise
            except BinderyError as error:
                log.warning("lost_bookie_delay_not_read", error=str(error), used_s=self.lost.delay_s)
                if isinstance(error, Corrupt):
                    self._delay_known.set()
                await self._wait(self._delay_changed, self._limits.retry_s)
                continue
            self._delay_known.set()
            await self._delay_changed.wait()

    async def follow_switch(self) -> None:
        while True:
            self._switch_changed.clear()
            try:
                is_enabled = await self._marks.is_enabled(watch=self._switch_changed.set)
            except BinderyError as error:
                log.warning("recovery_switch_not_read", error=str(error))
                await asyncio.sleep(self._limits.retry_s)
                continue
            if is_enabled != self._is_enabled:
                log.info("recovery_switched", enabled=is_enabled)
                self._is_enabled = is_enabled
            self.changed.set()
            await self._switch_changed.wait()

    # --- storing --------------------------------------------------------------------------------------------------

    def record(self, event: HistoryEvent) -> None:
        """Add an event to the history with the next `save`."""
        self._events.append(event)

    async def save(self) -> None:
        """Store the observed absences and write pending events to the history."""
        events, self._events = self._events, []
        for number, event in enumerate(events):
            try:
                await self._records.append_history(event, guard=self._leadership)
            except BinderyError:
                self._events = [*events[number:], *self._events]
                raise
        kept = self.lost.to_json()
        if kept != self._saved:
            data = {"bookies": kept, "delay_s": self.lost.delay_s, "saved_ms": self._clock_ms()}
            await self._records.put_cursor(CURSOR, data, guard=self._leadership)
            self._saved = kept
        self._save_at = self._loop.time() + self._limits.save_interval_s

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _save_if_due(self) -> None:
        """Call `save` if a phase changed or events are pending; store mere growth of absences every
        `save_interval_s`."""
        phases = {b: fields["phase"] for b, fields in self.lost.to_json().items()}
        saved = {b: fields["phase"] for b, fields in self._saved.items()}
        if self._events or phases != saved or self._loop.time() >= self._save_at:
            await self.save()

    async def _names(self, path: str, watch: Callable[[], None]) -> list[BookieId]:
        try:
            names = await self._store.children(path, watch=watch)
        except NoSuchNode:
            if path == self._layout.available:
                raise  # the cluster does not exist
            return []
        found = []
        for name in names:
            with contextlib.suppress(BadRequest):  # `readonly`, or another name that is no bookie id
                found.append(validate_bookie_id(name))
        return found

    async def _read_delay(self) -> None:
        path = self._layout.lost_bookie_delay
        while True:
            before = await self._store.exists(path, watch=self._delay_changed.set)
            seconds = await self._marks.lost_bookie_delay_s()
            after = await self._store.exists(path)
            if before is None and after is None:
                await self._marks.set_lost_bookie_delay_s(self._delay_s, guard=self._leadership)
            elif before is not None and after is not None and seconds is not None and before.version == after.version:
                break
        found = (seconds, after.version, after.mtime_ms)
        seen, self._delay_seen = self._delay_seen, found
        if found == seen:
            return
        log.info("lost_bookie_delay", seconds=seconds)
        self.lost.set_delay(seconds)
        if seen is not None and seen[0] == seconds:
            log.info("audit_requested")
            self.audit_requested = True
            self.lost.force()
        self.changed.set()
        self._poll_now.set()

    def _on_session(self, state: SessionState) -> None:
        now = self._loop.time()
        if state is SessionState.CONNECTED:
            self.lost.begin(now)
            self._poll_now.set()
        else:
            self.lost.cut_off(now)

    def _event(self, change: Change) -> HistoryEvent:
        bookie_id, away = change.bookie_id, f"{change.absent_s:.0f} s"
        if change.kind is ChangeKind.ABSENT:
            left_s = self.left_s(bookie_id) or 0.0
            kind, text = "bookie_absent", f"{bookie_id} is not registered; it counts as lost in {left_s:.0f} s"
        elif change.kind is ChangeKind.EXEMPT and bookie_id in self.snapshot.removed:
            kind = "bookie_excused"
            text = (
                f"{bookie_id} was declared permanently lost after {away}; the lost-bookie delay no longer applies to it"
            )
        elif change.kind is ChangeKind.EXEMPT:
            kind = "bookie_excused"
            text = f"{bookie_id} is absent under a maintenance lease, after {away}; it does not count as lost"
        elif change.was_handled:
            kind = "bookie_back"
            text = f"{bookie_id} is back after {away}; entries that it still stores are no longer copied"
        else:
            kind, text = "bookie_back", f"{bookie_id} is back after {away}, in time: nothing was marked for it"
        fields: dict[str, Any] = {"absent_s": round(change.absent_s, 1), "bookie_id": bookie_id}
        if kind == "bookie_back":
            fields["returns_in_time"] = self.lost.flaps.get(bookie_id, 0)
        log.info(kind, **fields)
        return HistoryEvent(self._clock_ms(), kind, text, fields)

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
