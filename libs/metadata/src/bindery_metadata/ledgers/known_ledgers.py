"""Decide whether this metadata can ever have known a ledger, and store what that decision needs.

A ledger that a bookie stores and that the metadata does not contain was deleted, or it is newer than the metadata: a
ZooKeeper that was rolled back to an old snapshot, or restored from a backup, has lost it. Only the first may be
deleted. The high-water mark distinguishes the two, because it rolls back together with the metadata:

| a ledger id is                                                    | the metadata                            |
|-------------------------------------------------------------------|-----------------------------------------|
| in a skipped range                                                | never knew it: nobody generated the id  |
| else below the end of the id generator's counter (`id_counters`)  | may have known it                       |
| else below the recorded end, which bookies raise for ids that     | may have known it                       |
| clients chose themselves                                          |                                         |
| else                                                              | never knew it                           |

Short and long ids have ends of their own, so that a client that chooses large ids does not hide a rollback of the
generator.

| node below /bindery | value                                                 | kept                             |
|---------------------|-------------------------------------------------------|----------------------------------|
| collection/known    | JSON: KnownLedgers; ids are integers up to 2^63 - 1   | for good; another instance id    |
|                     |                                                       | than the cluster's: counts empty |

A bookie that stores a ledger that the metadata never knew adds a RollbackReport. While the node has a report, no bookie
deletes a ledger because its metadata is missing or names other bookies. `accept` removes all reports and raises the
ends above the reported ledgers, which bookies then delete. Every change is a compare-and-set.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    Conflict,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    VersionConflict,
)

from bindery_metadata.layout.layout import SHORT_ID_END, BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.id_counters import IdCounters
from bindery_metadata.stores import json_node
from bindery_metadata.stores.store import MetadataStore

SUSPECTED: Final = "metadata_rollback_suspected"
"""Name of the state, in logs, metrics, HTTP responses and errors."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
SKIPPED_MAX: Final = 64
"""Maximum number of skipped ranges that are kept; the oldest are removed first."""

Range = tuple[int, int]
"""First id, and first id after the range."""


class MetadataRollbackSuspected(Conflict):
    """Ledgers are kept, because a bookie stores ledgers that this metadata never knew."""

    code = SUSPECTED


@dataclass(frozen=True, slots=True)
class HighWaterMark:
    """The ids that the metadata may have known. Pure."""

    short_end: int
    long_end: int
    skipped: tuple[Range, ...] = ()

    def may_know(self, ledger_id: int) -> bool:
        """Return whether this metadata can ever have known the ledger."""
        if any(start <= ledger_id < end for start, end in self.skipped):
            return False
        return ledger_id < (self.short_end if ledger_id < SHORT_ID_END else self.long_end)

    def above(self, ledger_ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """Return the short and the long ids at or above their end. `ledger_ids` and the results are ascending."""
        long_at = bisect_left(ledger_ids, SHORT_ID_END)
        short = ledger_ids[bisect_left(ledger_ids, self.short_end, 0, long_at) : long_at]
        return short, ledger_ids[bisect_left(ledger_ids, self.long_end, long_at) :]

    def within_skipped(self, ledger_ids: Sequence[int]) -> Iterator[int]:
        """Yield the ids below their end in a skipped range. `ledger_ids` are ascending."""
        for start, end in self.skipped:
            for at in range(bisect_left(ledger_ids, start), bisect_left(ledger_ids, end)):
                ledger_id = ledger_ids[at]
                if ledger_id < (self.short_end if ledger_id < SHORT_ID_END else self.long_end):
                    yield ledger_id


@dataclass(frozen=True, slots=True)
class RollbackReport:
    """The ledgers of one bookie that the metadata never knew. Times in ms since 1970."""

    found_ms: int
    unknown: int
    """Number of these ledgers."""
    first: int
    """Lowest id."""
    last: int
    """Highest id."""
    short_end: int = 0
    """First id after the short ones among them; 0: none."""
    long_end: int = 0
    """First id after the long ones among them; 0: none."""
    missing: int | None = None
    """Number of stored ledgers that the metadata does not contain, these included: what `accept` lets the bookie
    delete. None: not counted yet."""
    ids_protected: bool = False
    """Whether the id generator was advanced, so that their ids are not used again."""


@dataclass(frozen=True, slots=True)
class KnownLedgers:
    """The value of the node. The ends do not include the counters."""

    instance_id: str
    short_end: int = 0
    long_end: int = SHORT_ID_END
    skipped: tuple[Range, ...] = ()
    reports: Mapping[str, RollbackReport] = field(default_factory=dict)
    """Bookie id -> its report."""
    accepted_ms: int = 0
    """Time of the last `accept`; 0: never."""
    accepted_by: str = ""

    def mark(self, counters: IdCounters) -> HighWaterMark:
        """Return the high-water mark with the present `counters`, which must have been read before this value."""
        return HighWaterMark(
            max(self.short_end, counters.short_end), max(self.long_end, counters.long_end), self.skipped
        )

    def raised(self, *, short_end: int = 0, long_end: int = 0) -> "KnownLedgers":
        """Return a copy whose ends are at least these."""
        return dataclasses.replace(
            self, short_end=max(self.short_end, short_end), long_end=max(self.long_end, long_end)
        )

    def with_skipped(self, *ranges: Range) -> "KnownLedgers":
        """Return a copy with these ranges of ids, which the generator never generated. Empty ranges are left out."""
        added = tuple(one for one in ranges if one[0] < one[1] and one not in self.skipped)
        return dataclasses.replace(self, skipped=(*self.skipped, *added)[-SKIPPED_MAX:])

    def with_report(self, bookie_id: str, report: RollbackReport) -> "KnownLedgers":
        """Return a copy with the report. A report of the same bookie keeps its time and its ends."""
        before = self.reports.get(bookie_id)
        if before is not None:
            report = dataclasses.replace(
                report,
                found_ms=before.found_ms,
                short_end=max(before.short_end, report.short_end),
                long_end=max(before.long_end, report.long_end),
                missing=before.missing if report.missing is None else report.missing,
            )
        return dataclasses.replace(self, reports={**self.reports, bookie_id: report})

    def accepted(self, *, by: str, at_ms: int) -> "KnownLedgers":
        """Return a copy in which all reported ledgers count as known, hence as deleted."""
        reports = self.reports.values()
        known = self.raised(
            short_end=max((one.short_end for one in reports), default=0),
            long_end=max((one.long_end for one in reports), default=0),
        )
        return dataclasses.replace(known, skipped=(), reports={}, accepted_ms=at_ms, accepted_by=by)


class KnownLedgersStore:
    """Reads and changes the node. Every method may raise MetadataUnavailable, and Corrupt if it cannot be decoded."""

    def __init__(self, store: MetadataStore, *, instance_id: str) -> None:
        self._store = store
        self._instance_id = instance_id
        self._path = BinderyLayout().known_ledgers

    async def read(self) -> tuple[KnownLedgers, int | None]:
        """Return the value and the version of its node; None: there is no node."""
        try:
            node = await self._store.get(self._path)
        except NoSuchNode:
            return KnownLedgers(self._instance_id), None
        known = json_node.decode(node.data, KnownLedgers, path=self._path)
        if known.instance_id != self._instance_id:  # the znodes of a cluster that was initialized again
            known = KnownLedgers(self._instance_id)
        return known, node.stat.version

    async def update(self, transform: Callable[[KnownLedgers], KnownLedgers]) -> KnownLedgers:
        """Apply `transform`, which may be called several times, and return the stored value."""
        for _ in range(ATTEMPTS_MAX):
            known, version = await self.read()
            changed = transform(known)
            if changed == known:
                return known
            try:
                await self._write(changed, version)
                return changed
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
            except MetadataOutcomeUnknown:
                await self._store.sync(self._path)
        raise MetadataUnavailable("the known ledgers keep changing", path=self._path, attempts=ATTEMPTS_MAX)

    async def accept(self, *, version: int | None, by: str, at_ms: int) -> KnownLedgers:
        """Accept the metadata as it is, and return the value before. `version`: of the node that the operator saw.

        Raises Conflict if the node has changed since, or if nothing is reported; MetadataOutcomeUnknown.
        """
        known, found = await self.read()
        if found != version:
            raise Conflict("the reports have changed meanwhile; read them again", expected=version, found=found)
        if not known.reports:
            raise Conflict("no bookie suspects a rollback of the metadata; there is nothing to accept")
        try:
            await self._write(known.accepted(by=by, at_ms=at_ms), found)
        except (AlreadyExists, NoSuchNode, VersionConflict) as error:
            raise Conflict("the reports have changed meanwhile; read them again", expected=version) from error
        return known

    async def _write(self, known: KnownLedgers, version: int | None) -> None:
        data = json_node.encode(known)
        if version is None:
            await self._store.create(self._path, data, make_parents=True)
        else:
            await self._store.set(self._path, data, version=version)


async def refuse_if_suspected(store: MetadataStore, layout: LedgersLayout, what: str) -> None:
    """Raise MetadataRollbackSuspected if a bookie suspects a rollback. `what`: the refusal, as `nothing is deleted`.

    A cluster that is not initialized has no reports. Raises MetadataUnavailable, Corrupt.
    """
    await store.sync(layout.root)
    try:
        instance_id = (await store.get(layout.instance_id)).data.decode("ascii", "replace")
    except NoSuchNode:
        return
    known, _ = await KnownLedgersStore(store, instance_id=instance_id).read()
    if known.reports:
        raise MetadataRollbackSuspected(suspicion(what, known.reports))


def suspicion(what: str, reports: Mapping[str, RollbackReport]) -> str:
    """Return the message of a refusal of `what`."""
    unknown = sum(report.unknown for report in reports.values())
    return (
        f"{what}: bookies ({', '.join(sorted(reports))}) store {unknown} replicas of ledgers that this metadata never "
        "knew, so ZooKeeper was probably rolled back to an older state. Restore the newer metadata, or run "
        "`bindery cluster accept-metadata` to give these ledgers up"
    )
