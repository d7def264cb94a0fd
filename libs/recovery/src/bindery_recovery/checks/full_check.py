"""FullCheck: asks for every ledger whether its copies are there, and marks those that lack some.

One walk over all ledgers, ascending, at a rate that leaves bookies and ZooKeeper alone. Where it stands is kept in the
cursor CURSOR, so that the next leader goes on from there; a walk of a week that began anew with each leader would never
end.

What a ledger's check comes to:

| finding                                  | consequence                                                               |
|------------------------------------------|---------------------------------------------------------------------------|
| MISSING: entries absent or corrupt       | marked                                                                    |
| LOST, on a bookie that is lost for good  | marked: the audit does so too, but may have read other metadata           |
| LOST, on a bookie within its delay or on | nothing: that is for the audit to decide, when the time is over           |
| leave                                    |                                                                           |
| REFILLING: it heals itself               | counted                                                                   |
| UNSURE: an error, no answer              | counted: an error is no proof                                             |
| metadata changed under the check         | checked again, CHANGES_MAX times                                          |
| metadata gone                            | deleted: nothing                                                          |
| metadata that cannot be understood       | counted, logged                                                           |
| hangs longer than its time limit; breaks | counted, logged; the walk goes on                                         |
| the metadata store is away               | the walk stops, and goes on from its cursor later                         |

It waits while recovery is disabled and while an audit is pending.
Source: BookKeeper's AuditorCheckAllLedgersTask, which begins anew, marks for any error, and checks 500 at a time.
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
CURSOR_INTERVAL_S: Final = 5.0
CHANGES_MAX: Final = 3

log = get_logger(__name__)


class Bookies(Protocol):
    """What the check asks of a `BookieWatch`."""

    def registered(self) -> Mapping[BookieId, bool]: ...

    def definitely_lost(self) -> Collection[BookieId]: ...


@dataclass(slots=True)
class FullCheckResult:
    """Figures of one walk, over all the terms it took."""

    ledgers: int = 0
    """Looked at."""
    whole: int = 0
    marked: int = 0
    waiting: int = 0
    """Only bookies that may come back lack something."""
    refilling: int = 0
    unsure: int = 0
    unreadable: int = 0
    hung: int = 0
    failed: int = 0
    deleted: int = 0
    missing_entries: int = 0
    """Copies to be made of marked ledgers, as far as known."""
    entries_read: int = 0
    bytes_read: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def add(self, figure: str, check: LedgerCheck | None) -> None:
        """Count one ledger under `figure`, the name of a field."""
        self.ledgers += 1
        setattr(self, figure, getattr(self, figure) + 1)
        if check is not None:
            self.entries_read += check.entries_read
            self.bytes_read += check.bytes_read
            if figure == "marked":
                self.missing_entries += check.missing_entries

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> "FullCheckResult":
        """Of a cursor; what cannot be understood is 0."""
        names = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in kept.items() if name in names and isinstance(value, int)})


class FullCheck:
    """One walk. `run` returns when it is done; `progress` may be asked meanwhile."""

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
        """`may_go_on` returns when the walk may take its next ledger. `rate`: ledgers a second."""
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
        """Go on where the cursor stands, or begin. Raises NotLeader, MetadataUnavailable; call again later."""
        kept = await self._records.get_cursor(CURSOR) or {}
        if is_unfinished(kept):
            self.result = FullCheckResult.of(kept.get("result") or {})
            self.started_ms, self.next_ledger = int(kept["started_ms"]), int(kept["next_ledger"])
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
                        await self._save(kept)
                        save_at = self._loop.time() + CURSOR_INTERVAL_S
        except NotLeader:
            raise
        except BinderyError:
            await self._save(kept)
            raise
        await self._finish()
        return self.result

    async def _check(self, ledger_id: LedgerId) -> tuple[str, LedgerCheck]:
        """Return the name of the figure that the ledger adds to, and its check."""
        metadata = await self._client.metadata(ledger_id)
        for _ in range(CHANGES_MAX):
            check = await checker.check_ledger(
                self._client, ledger_id, metadata, bookies=self._bookies.registered(), depth=self._depth,
                randomness=self._randomness,
            )  # fmt: skip
            if check.is_whole:
                break
            newest = await self._client.metadata(ledger_id)
            if newest == metadata:
                break
            metadata = newest
        else:
            log.info("ledger_keeps_changing", ledger_id=ledger_id)  # so somebody is at it
            return "waiting", check
        bad = self._bad_members(check)
        if bad:
            is_missing = any(one.state is FragmentState.MISSING for one in check.bad)
            reason = Reason.ENTRY_MISSING if is_missing else Reason.BOOKIE_LOST
            await self._marker.mark(
                ledger_id, bad, reason, missing_entries=check.missing_entries,
                missing_bytes=check.missing_bytes, only_new=True,
            )  # fmt: skip
            log.warning("ledger_lacks_copies", ledger_id=ledger_id, bookies=sorted(bad), entries=check.missing_entries)
            return "marked", check
        states = {one.state for one in check.bad}
        if FragmentState.UNSURE in states:
            return "unsure", check
        if FragmentState.REFILLING in states:
            return "refilling", check
        return "whole" if check.is_whole else "waiting", check

    def _bad_members(self, check: LedgerCheck) -> set[BookieId]:
        """Whose replicas are missing for certain."""
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

    async def _save(self, kept: Mapping[str, Any]) -> None:
        data = {
            "last_finished_ms": kept.get("last_finished_ms"),
            "last_result": kept.get("last_result"),
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


def is_unfinished(kept: Mapping[str, Any]) -> bool:
    """Whether a cursor stands in the middle of a walk."""
    return isinstance(kept.get("started_ms"), int) and isinstance(kept.get("next_ledger"), int)
