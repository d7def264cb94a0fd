"""Check every ledger for missing replicas, and mark under-replicated ledgers.

The check goes through all ledgers in ascending order, at a limited rate. Its position is stored in the cursor CURSOR,
and the next leader continues from there: a check that takes a week would otherwise never finish.

| finding                                  | consequence                                                               |
|------------------------------------------|---------------------------------------------------------------------------|
| MISSING: entries absent or corrupt       | the ledger is marked                                                      |
| LOST, on a bookie that counts as lost    | marked too: the audit may have read older metadata                        |
| LOST, on a bookie within its delay or in | none: the audit decides when that time is over                            |
| maintenance                              |                                                                           |
| REFILLING: the bookie repairs itself     | counted                                                                   |
| UNSURE: an error, no response            | counted: an error is not proof of a missing entry                         |
| the metadata changed during the check    | checked again, at most CHANGES_MAX checks in all                          |
| the metadata is missing                  | none: the ledger was deleted                                              |
| the metadata cannot be parsed            | counted, logged                                                           |
| the check exceeds its timeout, or fails  | counted, logged; the other ledgers are checked                            |
| the metadata store is unavailable        | the check stops and continues from its cursor later                       |

The check pauses while recovery is disabled and while an audit is pending. Source: BookKeeper's
AuditorCheckAllLedgersTask, which starts from the beginning each time, marks for any error, and checks 500 ledgers at a
time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Protocol

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomFloats
from bindery_kit.observability.logs import get_logger
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryRecords

from bindery_recovery.checks import checker
from bindery_recovery.checks.bookie_audit import LedgerMarker
from bindery_recovery.checks.checker import Depth, FragmentState, LedgerCheck
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip

CURSOR: Final = "ledger-check"
"""Name of the cursor that stores the position and the counters."""
CURSOR_INTERVAL_S: Final = 5.0
"""Interval in seconds between two writes of the position that the check has reached."""
CHANGES_MAX: Final = 3
"""Maximum number of checks of a ledger whose metadata changes during each check."""

log = get_logger(__name__)


class Bookies(Protocol):
    """The part of `BookieWatch` that the check uses."""

    def registered(self) -> Mapping[BookieId, bool]: ...

    def definitely_lost(self) -> Collection[BookieId]: ...


@dataclass(slots=True)
class FullCheckResult:
    """Counters of one check, over all terms that it took."""

    ledgers: int = 0
    """Ledgers checked."""
    whole: int = 0
    marked: int = 0
    waiting: int = 0
    """Ledgers with replicas missing only on bookies that may return, or with metadata that changed in each check."""
    refilling: int = 0
    unsure: int = 0
    unreadable: int = 0
    hung: int = 0
    failed: int = 0
    deleted: int = 0
    missing_entries: int = 0
    """Replicas known to be missing from marked ledgers."""
    entries_read: int = 0
    bytes_read: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def add(self, figure: str, check: LedgerCheck | None) -> None:
        """Count one ledger in `figure`, the name of a field."""
        self.ledgers += 1
        setattr(self, figure, getattr(self, figure) + 1)
        if check is not None:
            self.entries_read += check.entries_read
            self.bytes_read += check.bytes_read
            if figure == "marked":
                self.missing_entries += check.missing_entries

    @classmethod
    def of(cls, cursor: Mapping[str, Any]) -> "FullCheckResult":
        """Load the counters of a cursor; a missing or invalid counter is 0."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in cursor.items() if name in names and isinstance(value, int)})


class FullCheck:
    """One check of all ledgers. `run` returns at its end; `result` may be read before."""

    def __init__(
        self,
        client: LedgerClient,
        records: RecoveryRecords,
        marker: LedgerMarker,
        bookies: Bookies,
        *,
        leadership: Leadership,
        may_go_on: Callable[[], Awaitable[None]],
        rate: float,
        in_flight: int,
        ledger_timeout_s: float,
        depth: Depth,
        clock_ms: Callable[[], int],
        randomness: RandomFloats,
    ) -> None:
        """`may_go_on` returns when the next ledger may be checked. `rate`: maximum number of ledgers per second."""
        assert rate > 0
        self._client = client
        self._records = records
        self._marker = marker
        self._bookies = bookies
        self._leadership = leadership
        self._walk = LedgerWalk(
            in_flight,
            rate=rate,
            may_go_on=may_go_on,
            timeout_s=ledger_timeout_s,
            hung_event="ledger_check_hung",
            failed_event="ledger_check_failed",
        )
        self._depth = depth
        self._clock_ms = clock_ms
        self._randomness = randomness
        self._loop = asyncio.get_running_loop()
        self.result = FullCheckResult()
        self.started_ms = 0
        self.next_ledger = 0

    async def run(self) -> FullCheckResult:
        """Continue from the cursor, or start from the beginning. Raises NotLeader, MetadataUnavailable; a later call
        continues."""
        cursor = await self._records.get_cursor(CURSOR) or {}
        if is_unfinished(cursor):
            self.result = FullCheckResult.of(cursor.get("result") or {})
            self.started_ms, self.next_ledger = int(cursor["started_ms"]), int(cursor["next_ledger"])
            log.info("ledger_check_goes_on", next_ledger=self.next_ledger, ledgers=self.result.ledgers)
        else:
            self.result = FullCheckResult()
            self.started_ms, self.next_ledger = self._clock_ms(), 0
            log.info("ledger_check_begins")
        save_at = self._loop.time() + CURSOR_INTERVAL_S
        try:
            async with self._walk.run(self._client.list_ledgers(), self._check, start_at=self.next_ledger) as checked:
                async for ledger_id, found in checked:
                    self.result.add(*((found, None) if isinstance(found, Skip) else found))
                    self.next_ledger = ledger_id + 1
                    if self._loop.time() >= save_at:
                        await self._save(cursor)
                        save_at = self._loop.time() + CURSOR_INTERVAL_S
        except NotLeader:
            raise
        except BinderyError:
            await self._save(cursor)
            raise
        await self._finish()
        return self.result

    async def _check(self, ledger_id: LedgerId) -> tuple[str, LedgerCheck]:
        """Return the name of the counter for this ledger, and its check."""
        metadata = await self._client.metadata(ledger_id)
        for _ in range(CHANGES_MAX):
            check = await checker.check_ledger(
                self._client,
                ledger_id,
                metadata,
                bookies=self._bookies.registered(),
                depth=self._depth,
                randomness=self._randomness,
            )
            if check.is_whole:
                break
            newest = await self._client.metadata(ledger_id)
            if newest == metadata:
                break
            metadata = newest
        else:
            log.info("ledger_keeps_changing", ledger_id=ledger_id)  # another process is repairing or writing it
            return "waiting", check
        bad = self._bad_members(check)
        if bad:
            is_missing = any(one.state is FragmentState.MISSING for one in check.bad)
            reason = Reason.ENTRY_MISSING if is_missing else Reason.BOOKIE_LOST
            await self._marker.mark(
                ledger_id,
                bad,
                reason,
                missing_entries=check.missing_entries,
                missing_bytes=check.missing_bytes,
                only_new=True,
            )
            log.warning("ledger_lacks_copies", ledger_id=ledger_id, bookies=sorted(bad), entries=check.missing_entries)
            return "marked", check
        states = {one.state for one in check.bad}
        if FragmentState.UNSURE in states:
            return "unsure", check
        if FragmentState.REFILLING in states:
            return "refilling", check
        return "whole" if check.is_whole else "waiting", check

    def _bad_members(self, check: LedgerCheck) -> set[BookieId]:
        """Return the bookies whose replicas are certainly missing."""
        lost = self._bookies.definitely_lost()
        bad = {
            one.fragment.bookie_id
            for one in check.bad
            if one.state is FragmentState.MISSING
            or (one.state is FragmentState.LOST and one.fragment.bookie_id in lost)
        }
        if check.tail is not None:
            bad |= {bookie_id for bookie_id in check.tail.lost.values() if bookie_id in lost}
        return bad

    async def _save(self, cursor: Mapping[str, Any]) -> None:
        data = {
            "last_finished_ms": cursor.get("last_finished_ms"),
            "last_result": cursor.get("last_result"),
            "next_ledger": self.next_ledger,
            "result": self.result.to_json(),
            "started_ms": self.started_ms,
        }
        await self._records.put_cursor(CURSOR, data, guard=self._leadership)

    async def _finish(self) -> None:
        now_ms, result = self._clock_ms(), self.result.to_json()
        data = {"last_finished_ms": now_ms, "last_result": result, "last_started_ms": self.started_ms}
        await self._records.put_cursor(CURSOR, data, guard=self._leadership)
        figures = self.result
        took_s = max(0, now_ms - self.started_ms) / 1000
        text = (
            f"{figures.ledgers} ledgers were checked in {took_s:.0f} s: {figures.whole} whole, {figures.marked} marked"
        )
        left = {name: value for name, value in result.items() if value and name in _LEFT_OPEN}
        if left:
            text += "; not decided: " + ", ".join(f"{value} {name}" for name, value in left.items())
        log.info("ledger_check_finished", **result)
        event = HistoryEvent(now_ms, "check_finished", text, {**result, "check": "ledgers", "took_s": round(took_s, 1)})
        await self._records.append_history(event, guard=self._leadership)


_LEFT_OPEN: Final = frozenset({"waiting", "refilling", "unsure", "unreadable", "hung", "failed"})


def is_unfinished(cursor: Mapping[str, Any]) -> bool:
    """Return True if the cursor belongs to a check that has not finished."""
    return isinstance(cursor.get("started_ms"), int) and isinstance(cursor.get("next_ledger"), int)
