"""Copy the missing entries of a segment of a ledger.

Each entry is read once, from any bookie of its write set that has a good replica, verified by its digest, and stored
unchanged on all targets that lack it. A target is done only when all its entries were acknowledged; only then may the
metadata name it. If copying is interrupted, the replicas stored so far are not referenced by any metadata, and the copy
can be repeated.

If no bookie can return an entry, every target that needs it fails. A replacement then gets no further entries: the
metadata must not name it, because the bookie that it was to replace may return with that entry. A bookie that the
metadata already names still gets all other entries, unless a source did not respond, because each further read may take
a full timeout. The next attempt passes the unreadable entries in `first`: they are read before the others, so that a
fragment with a hole is not copied up to the hole each time.

A bookie that reports lost storage (UNKNOWN_LEDGER_STATE) is not a source, but its answer is not "no such entry" either:
as long as it may refill its storage, an entry that no other bookie has is not lost.

Invariants: only one batch is in memory, bounded in entries and bytes; every read and store is charged to the budget; no
unverified entry is stored.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict, status_name
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import Fragment
from bindery_core.placement.write_set import write_set, write_set_contains
from bindery_core.wire.messages import Status
from bindery_kit.observability.logs import get_logger
from bindery_metadata.recovery.recovery_records import Obstacle

from bindery_recovery.budget import RepairBudget
from bindery_recovery.checks.checker import timed_read

BATCH_ENTRIES_MAX: Final = 100
"""Maximum number of entries in a batch."""
FIRST_BATCH_ENTRIES: Final = 8
"""Number of entries in the first batch, whose sizes are unknown."""
BATCH_SIZE_MAX: Final = 512 * 1024
"""Maximum target size of a batch in bytes."""
BATCH_SIZE_MIN: Final = 64 * 1024
"""Minimum target size of a batch in bytes."""
BATCH_S: Final = 0.1
"""Target duration of a batch in seconds at the present rate, which determines its target size. At a low rate this keeps
bursts small. The number of entries follows from the largest entry of the previous batch."""
BATCH_SIZE_HELD_MAX: Final = 8 * 2**20
"""Maximum bytes of a batch in memory, except for a single larger entry: entries may be far larger than those before.
The entries beyond the limit are read again, in a smaller batch."""
SILENT_BATCHES_MAX: Final = 2
"""Consecutive batches without a response after which a source is used only for entries that no other bookie has: each
may have taken a full timeout."""
WANTED_CHECK_S: Final = 1.0
"""Minimum interval in seconds between two checks whether the copies are still needed."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """A bookie that receives entries of one fragment."""

    fragment: Fragment
    new: BookieId
    """The receiving bookie. If it is the fragment's own bookie, its missing entries are restored; otherwise it replaces
    that bookie."""
    only: frozenset[int] | None = None
    """Entries to copy; None: the whole fragment."""

    @property
    def index(self) -> int:
        return self.fragment.index

    @property
    def is_replacement(self) -> bool:
        return self.new != self.fragment.bookie_id


@dataclass(frozen=True, slots=True)
class Sources:
    """What is known about the bookies when copying begins."""

    bookies: Collection[BookieId]
    """Registered bookies."""
    gone: Collection[BookieId] = ()
    """Bookies that are not registered and will not return."""
    refilling: Collection[BookieId] = ()
    bad: Mapping[BookieId, Collection[int]] = field(default_factory=dict)
    """Entries of the segment that are known to be missing or corrupt, by bookie."""


@dataclass(frozen=True, slots=True)
class CopyFailure:
    """Why a target did not receive all its entries."""

    obstacle: Obstacle
    detail: str
    is_final: bool = False
    """Whether no bookie that is registered or may return has a good replica."""
    refusing: BookieId | None = None
    """The target that rejected entries."""


@dataclass(slots=True)
class CopyResult:
    """The result of copying one segment."""

    done: list[Target] = field(default_factory=list)
    """Targets that have received all their entries."""
    failed: dict[int, CopyFailure] = field(default_factory=dict)
    """Failures of the other targets, by ensemble index."""
    is_abandoned: bool = False
    """Whether the copies were no longer needed; `done` is then empty."""
    unreadable: list[int] = field(default_factory=list)
    """Entries that no bookie could return."""
    entries: int = 0
    """Replicas stored, including those of failed targets."""
    bytes: int = 0


class Copier:
    """Copies entries. `on_copied(replicas, bytes)` is called after each batch."""

    def __init__(
        self, client: LedgerClient, budget: RepairBudget, *, on_copied: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._client = client
        self._budget = budget
        self._on_copied = on_copied

    async def copy(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        targets: Sequence[Target],
        *,
        sources: Sources,
        is_wanted: Callable[[], Awaitable[bool]],
        first: Collection[int] = (),
    ) -> CopyResult:
        """Copy the missing entries of `targets`, which all belong to one segment. Each target ends in `done` or in
        `failed`. `first`: entries to copy first.

        Raises what `is_wanted` raises.
        """
        run = _Run(self._client, self._budget, ledger_id, metadata, targets, sources, first)
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while batch := run.next_batch():
            if loop.time() - asked_at >= WANTED_CHECK_S:
                if not await is_wanted():
                    run.result.is_abandoned = True
                    return run.result
                asked_at = loop.time()
            entries, size = await run.copy(batch)
            self._on_copied(entries, size)
            await self._budget.pay(size)
        run.result.done = [target for target in run.targets.values() if target.index not in run.result.failed]
        return run.result


class _Run:
    def __init__(
        self,
        client: LedgerClient,
        budget: RepairBudget,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        targets: Sequence[Target],
        sources: Sources,
        first: Collection[int],
    ) -> None:
        assert len({target.fragment.segment_first for target in targets}) == 1
        assert len({target.index for target in targets}) == len(targets)
        self.result = CopyResult()
        self.targets = {target.index: target for target in targets}
        """Targets that still receive entries."""
        self.batch_count = min(FIRST_BATCH_ENTRIES, budget.entries_in_flight_max)
        self._client = client
        self._budget = budget
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._fragment = targets[0].fragment
        self._ensemble = metadata.segment_of(EntryId(self._fragment.segment_first)).ensemble
        self._sources = sources
        self._refilling = set(sources.refilling)
        self._first = frozenset(first)
        self._ids = self.entry_ids()
        self._again: deque[int] = deque()
        """Entries that exceeded the size of their batch."""
        self._silent: dict[BookieId, int] = {}
        """Consecutive batches that a source did not answer."""

    def next_batch(self) -> Sequence[int]:
        """Return the entry ids of the next batch; empty: all were tried."""
        batch: list[int] = []
        while len(batch) < self.batch_count:
            entry_id = self._again.popleft() if self._again else next(self._ids, None)
            if entry_id is None:
                break
            # the target may have failed in the meantime
            if any(self._takes(target, entry_id) for target in self.targets.values()):
                batch.append(entry_id)
        return batch

    def entry_ids(self) -> Iterator[int]:
        """Yield the entries that some remaining target needs: `first`, then the others, ascending."""
        if all(target.only is not None for target in self.targets.values()):
            ids: Sequence[int] = sorted(set().union(*(target.only or () for target in self.targets.values())))
        else:
            ids = range(self._fragment.segment_first, self._fragment.last + 1)
        for entry_id in chain(sorted(self._first), (one for one in ids if one not in self._first)):
            if any(self._takes(target, entry_id) for target in self.targets.values()):
                yield entry_id

    def _takes(self, target: Target, entry_id: int) -> bool:
        if target.only is not None:
            return entry_id in target.only
        # `first` may contain entries of other segments
        if not self._fragment.segment_first <= entry_id <= self._fragment.last:
            return False
        return write_set_contains(
            target.index,
            entry_id=entry_id,
            ensemble_size=self._metadata.ensemble_size,
            write_quorum=self._metadata.write_quorum,
        )

    async def copy(self, batch: Sequence[int]) -> tuple[int, int]:
        """Read and store a batch. Return the number of replicas stored and their bytes."""
        async with self._budget.entries(len(batch)):
            frames = await self._read(batch)
            stored = await asyncio.gather(*(self._store(target, frames) for target in list(self.targets.values())))
        entries, size = (sum(part) for part in zip(*stored, strict=True)) if stored else (0, 0)
        self.result.entries += entries
        self.result.bytes += size
        largest = max((len(frame) for frame in frames.values()), default=1)
        size_wanted = min(BATCH_SIZE_MAX, max(BATCH_SIZE_MIN, int(BATCH_S * self._budget.bytes_per_s)))
        count_max = min(BATCH_ENTRIES_MAX, self._budget.entries_in_flight_max)
        self.batch_count = max(1, min(2 * self.batch_count, count_max, size_wanted // largest))
        if self._again:
            self.batch_count = max(1, len(frames) // 2)
        return entries, size

    # --- reading --------------------------------------------------------------------------------------------------

    async def _read(self, batch: Sequence[int]) -> dict[int, bytes]:
        """Return good frames by entry id. Record a failure for each target that needs an entry which no bookie
        returned."""
        frames: dict[int, bytes] = {}
        why_not: dict[int, dict[BookieId, _WhyNot]] = {entry_id: {} for entry_id in batch}
        too_much: set[int] = set()
        held = 0
        order = {entry_id: self._members(entry_id) for entry_id in batch}
        for turn in range(self._metadata.write_quorum):
            by_source: dict[BookieId, list[EntryId]] = {}
            for entry_id in batch:
                if entry_id in frames or entry_id in too_much:
                    continue
                member = order[entry_id][turn]
                reason = self._why_not_asked(member, entry_id)
                if reason is not None:
                    why_not[entry_id][member] = reason
                else:
                    by_source.setdefault(member, []).append(EntryId(entry_id))

            silent = set(by_source)

            def take(replica: ReplicaRead, silent: set[BookieId] = silent) -> None:
                nonlocal held
                if replica.verdict is not Verdict.ERROR or replica.status != Status.IO_ERROR:
                    silent.discard(replica.bookie_id)
                if replica.verdict is not Verdict.GOOD or replica.frame is None:
                    why_not[replica.entry_id][replica.bookie_id] = self._why_not(replica)
                elif held and held + len(replica.frame) > BATCH_SIZE_HELD_MAX:
                    too_much.add(replica.entry_id)
                else:
                    held += len(replica.frame)
                    frames[replica.entry_id] = replica.frame

            await asyncio.gather(
                *(
                    timed_read(self._client, self._budget, self._ledger_id, self._metadata, source, ids, take)
                    for source, ids in by_source.items()
                )
            )
            for source in by_source:
                self._silent[source] = self._silent.get(source, 0) + 1 if source in silent else 0
        self._again.extendleft(sorted(too_much, reverse=True))
        for entry_id in batch:
            if entry_id not in frames and entry_id not in too_much:
                self._unreadable(entry_id, why_not[entry_id])
        return frames

    def _members(self, entry_id: int) -> Sequence[BookieId]:
        """Return the write set of an entry in the order of reading. It starts after a target, so that a fragment is
        read from few sources; sources that do not respond come last."""
        indexes = write_set(
            entry_id=entry_id, ensemble_size=self._metadata.ensemble_size, write_quorum=self._metadata.write_quorum
        )
        at = next((place + 1 for place, index in enumerate(indexes) if index in self.targets), 0)
        members = (self._ensemble[index] for index in (*indexes[at:], *indexes[:at]))
        return sorted(members, key=lambda member: self._silent.get(member, 0) >= SILENT_BATCHES_MAX)

    def _why_not_asked(self, member: BookieId, entry_id: int) -> "_WhyNot | None":
        if member in self._sources.gone:
            return _WhyNot("was removed permanently", is_definite=True)
        if member not in self._sources.bookies:
            return _WhyNot("is not registered")
        if member in self._refilling:
            return _REFILLING
        if entry_id in self._sources.bad.get(member, ()):
            return _WhyNot("has no good copy", is_definite=True)
        return None

    def _why_not(self, replica: ReplicaRead) -> "_WhyNot":
        if replica.status == Status.UNKNOWN_LEDGER_STATE:
            self._refilling.add(replica.bookie_id)
            return _REFILLING
        if replica.verdict is Verdict.ABSENT:
            return _WhyNot("does not have it", is_definite=True)
        if replica.verdict is Verdict.CORRUPT and self._metadata.digest_type is None:
            return _WhyNot("has a copy that cannot be verified: the metadata does not record its digest type")
        if replica.verdict is Verdict.CORRUPT:
            return _WhyNot("has a corrupt copy", is_definite=True)
        return _WhyNot(f"did not return it ({replica.reason})", is_silence=True)

    def _unreadable(self, entry_id: int, why_not: "Mapping[BookieId, _WhyNot]") -> None:
        answers = ", ".join(f"{bookie_id} {reason.text}" for bookie_id, reason in why_not.items())
        detail = f"entry {entry_id} cannot be read from any bookie: {answers}"
        if any(reason is _REFILLING for reason in why_not.values()):
            failure = CopyFailure(Obstacle.SOURCE_IN_LIMBO, detail)
        elif all(reason.is_definite for reason in why_not.values()):
            failure = CopyFailure(Obstacle.NO_COPY_LEFT, detail, is_final=True)
        else:
            failure = CopyFailure(Obstacle.SOURCE_UNAVAILABLE, detail)
        self.result.unreadable.append(entry_id)
        is_asked_in_vain = any(reason.is_silence for reason in why_not.values())
        for target in list(self.targets.values()):
            if self._takes(target, entry_id):
                self._fail(target, failure, goes_on=not (target.is_replacement or is_asked_in_vain))

    # --- storing --------------------------------------------------------------------------------------------------

    async def _store(self, target: Target, frames: Mapping[int, bytes]) -> tuple[int, int]:
        mine = [frame for entry_id, frame in frames.items() if self._takes(target, entry_id)]
        if not mine:
            return 0, 0
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            statuses = await self._client.store_replicas(self._ledger_id, self._metadata, target.new, mine)
        except BookieUnavailable as error:
            self._refused(target, f"cannot be reached ({error.message})")
            return 0, 0
        self._budget.observe(loop.time() - began)
        bad = [status for status in statuses if status != Status.OK]
        if bad:
            self._refused(target, f"answered {status_name(bad[0])}")
        stored = [len(frame) for frame, status in zip(mine, statuses, strict=True) if status == Status.OK]
        return len(stored), sum(stored)

    def _refused(self, target: Target, reason: str) -> None:
        detail = f"{target.new}, chosen for copies of this ledger, {reason}"
        self._fail(target, CopyFailure(Obstacle.TARGET_REFUSES, detail, refusing=target.new))

    def _fail(self, target: Target, failure: CopyFailure, *, goes_on: bool = False) -> None:
        """Record a failure of a target. `goes_on`: it still receives other entries. Of several failures, one that is
        not final is reported."""
        if not goes_on:
            self.targets.pop(target.index, None)
        before = self.result.failed.get(target.index)
        if before is not None and failure.refusing is None and (failure.is_final or not before.is_final):
            return
        self.result.failed[target.index] = failure
        if before is not None:
            return
        log.info(
            "copy_failed",
            ledger_id=self._ledger_id,
            segment_first=self._fragment.segment_first,
            index=target.index,
            obstacle=str(failure.obstacle),
            detail=failure.detail,
        )


@dataclass(frozen=True, slots=True)
class _WhyNot:
    """Why a bookie is not a source of an entry."""

    text: str
    is_definite: bool = False
    """Whether the bookie will never be a source of the entry."""
    is_silence: bool = False
    """Whether the bookie did not answer a read; each further read may take a full timeout."""


_REFILLING: Final = _WhyNot("is refilling its lost storage")
