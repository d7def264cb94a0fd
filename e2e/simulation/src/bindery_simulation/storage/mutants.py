"""Mutants: the product with one of its durability promises broken, or one check left out. The searches must notice.

A search that finds nothing is worth what it would find.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest.mock import patch

from bindery_bookie.storage import control_records
from bindery_bookie.storage.collection import rewrite
from bindery_bookie.storage.collection.log_replacement import LogReplacement
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest
from bindery_bookie.storage.flushing import flush_loop
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.memory import ledgers
from bindery_bookie.storage.opening import opening, rebuild
from bindery_bookie.storage.opening.replay import Replay

from bindery_simulation.disk import LyingDisk
from bindery_simulation.engine_mutants import ack_before_journal
from bindery_simulation.storage.crash import Broken, play
from bindery_simulation.storage.damage import CASES_PER_TEMPLATE, Choice, Outcome, run_cases
from bindery_simulation.storage.double_fault import CUT_AND_INDEX_LOST

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """How to make it, and the promises that may catch it."""

    caught_by: tuple[str, ...]
    patch: Patch = contextlib.nullcontext
    skipped: Callable[[str, str], bool] | None = None
    """(operation, path) of syncs that the disk only claims to have done."""

    def wrap(self, disk: Any) -> Any:
        return disk if self.skipped is None else LyingDisk(disk, self.skipped)


def _ends(operation: str, *suffixes: str) -> Callable[[str, str], bool]:
    return lambda name, path: name == operation and path.endswith(suffixes)


def _mark_before_index() -> contextlib.AbstractContextManager[Any]:
    """LastLogMark passes a flush that is not in entry log and index yet."""

    async def flush(self: Any, flush: Flush) -> None:
        await self._journal_synced()
        await self._flusher.advance_mark(flush.position, is_stored=False)
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    return patch.object(FlushLoop, "_flush", flush)


def _mark_passes_what_came_later() -> contextlib.AbstractContextManager[Any]:
    """LastLogMark takes the journal's end from after the flush: what was accepted meanwhile is not replayed."""

    async def flush(self: Any, flush: Flush) -> None:
        await self._journal_synced()
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(self._journal.position)

    return patch.object(FlushLoop, "_flush", flush)


def _flush_ahead_of_journal() -> contextlib.AbstractContextManager[Any]:
    """A flush does not wait until the journal is durable: what a crash un-happens is in the index."""

    async def flush(self: Any, flush: Flush) -> None:
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    return patch.object(FlushLoop, "_flush", flush)


def _journals_dropped_before_mark() -> contextlib.AbstractContextManager[Any]:
    """Old journals go before LastLogMark says that they are not needed."""
    real = Flusher._write_mark

    def write_mark(self: Any, mark: Any) -> Any:
        for name in self._disk.list_names(self._journal_directory):
            journal_id = journal_format.parse_file_name(name)
            if journal_id is not None and journal_id < mark.journal.journal_id:
                self._disk.remove(f"{self._journal_directory}/{name}")
        return real(self, mark)

    return patch.object(Flusher, "_write_mark", write_mark)


def _replay_stops_a_group_early() -> contextlib.AbstractContextManager[Any]:
    real = opening.replay_groups

    def replay_groups(*args: Any, **others: Any) -> Iterator[Any]:
        held: Any = None
        for found in real(*args, **others):
            if held is not None:
                yield held
            held = found

    return patch.object(opening, "replay_groups", replay_groups)


def _replay_forgets_fences() -> contextlib.AbstractContextManager[Any]:
    real = Replay._apply

    def apply(self: Any, group: Any) -> None:
        kept = [record for record in group.records if control_records.unpack_ids(record)[1] != control_records.FENCE]
        real(self, type(group)(group.offset, group.size, group.sequence, kept))

    return patch.object(Replay, "_apply", apply)


def _fence_not_journaled() -> contextlib.AbstractContextManager[Any]:
    async def fence(self: Any, ledger_id: int, master_key: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.is_fenced = True
        if parts:
            await self._journaled(parts)

    return patch.object(StorageEngine, "fence", fence)


def _lac_not_journaled() -> contextlib.AbstractContextManager[Any]:
    async def write_lac(self: Any, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.set_explicit_lac(packet)
        self.parts.ledgers.changed[ledger_id] = state
        if parts:
            await self._journaled(parts)

    return patch.object(StorageEngine, "write_lac", write_lac)


def _force_does_nothing() -> contextlib.AbstractContextManager[Any]:
    async def force(self: Any, ledger_id: int) -> None:
        return None

    return patch.object(StorageEngine, "force", force)


def _index_rebuild_left_out() -> contextlib.AbstractContextManager[Any]:
    """An index that is behind LastLogMark is taken as it is."""

    def run(self: Any) -> None:
        self._index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=self._mark.generation)

    return patch.object(rebuild.IndexRebuild, "run", run)


def _keys_not_logged() -> contextlib.AbstractContextManager[Any]:
    """Entry logs do not say whose key a ledger has, so that an index rebuilt from them knows no ledger."""
    return patch.object(ledgers.LedgerState, "take_control_records", lambda self: [])


def _deletions_not_logged() -> contextlib.AbstractContextManager[Any]:
    """Entry logs do not say what was deleted."""
    real = flush_loop.take_flush

    def take_flush(*args: Any) -> Any:
        flush = real(*args)
        if flush is not None:
            flush.control_records = []
            for state in flush.states.values():
                flush.control_records += state.take_control_records()
        return flush

    return patch.object(flush_loop, "take_flush", take_flush)


def _unfinished_flush_kept() -> contextlib.AbstractContextManager[Any]:
    """What a flush left behind LastLogMark is not cut off."""
    return patch.object(opening, "clean_logs", lambda *args: [])


def _old_log_goes_first() -> contextlib.AbstractContextManager[Any]:
    """Compaction removes the old log before the index points to the new one."""
    real = LogReplacement._switch

    async def switch(self: Any, rewrite: Any) -> None:
        await self._remove_log(rewrite.source.log_id)
        await real(self, rewrite)

    return patch.object(LogReplacement, "_switch", switch)


def _control_state_not_carried() -> contextlib.AbstractContextManager[Any]:
    """Compaction copies entries only: key, fence and explicit LAC are in the index alone then."""
    return patch.object(rewrite, "_control_records", lambda ledger_id, row: ())


def _unsealed_not_named() -> contextlib.AbstractContextManager[Any]:
    """The list of entry logs does not say which ones a crash left open: they look as if they had been cut."""
    return patch.object(LogManifest, "with_unsealed", lambda self, sizes: replace(self, unsealed=self.unsealed or {}))


_LOST: Final = ("entries-readable", "right-bytes")
"""An acknowledged entry that is lost is absent, or there is an older one in its place."""

MUTANTS: Final[dict[str, Mutant]] = {
    "journal-without-datasync": Mutant((*_LOST, "starts", "fences-hold"), skipped=_ends("datasync", ".txn")),
    "journal-directory-unsynced": Mutant((*_LOST, "starts"), skipped=_ends("sync_directory", "/journal/current")),
    "entry-log-without-datasync": Mutant((*_LOST, "starts"), skipped=_ends("datasync", ".log")),
    "mark-file-unsynced": Mutant(("starts",), skipped=_ends("sync", "LastLogMark.new")),
    "ledger-directory-unsynced": Mutant((*_LOST, "starts"), skipped=_ends("sync_directory", "/ledgers/current")),
    "mark-before-index": Mutant((*_LOST, "starts", "keys-hold"), _mark_before_index),
    "mark-passes-what-came-later": Mutant((*_LOST, "fences-hold", "starts"), _mark_passes_what_came_later),
    "flush-ahead-of-journal": Mutant((*_LOST, "starts"), _flush_ahead_of_journal),
    "journals-dropped-before-mark": Mutant(("starts",), _journals_dropped_before_mark),
    "replay-stops-a-group-early": Mutant((*_LOST, "fences-hold"), _replay_stops_a_group_early),
    "replay-forgets-fences": Mutant(("fences-hold",), _replay_forgets_fences),
    "fence-not-journaled": Mutant(("fences-hold",), _fence_not_journaled),
    "lac-not-journaled": Mutant(("lac-holds",), _lac_not_journaled),
    "ack-before-journal": Mutant(_LOST, ack_before_journal),
    "force-does-nothing": Mutant(_LOST, _force_does_nothing),
    "index-rebuild-left-out": Mutant(_LOST, _index_rebuild_left_out),
    # A ledger without its key is fenced, in limbo, and takes the first key that is shown.
    "keys-not-logged": Mutant((*_LOST, "fences-hold", "keys-hold"), _keys_not_logged),
    "deletions-not-logged": Mutant(("right-bytes",), _deletions_not_logged),
    "compacted-log-unsynced": Mutant(
        (*_LOST, "starts"), skipped=lambda name, path: name.endswith("sync") and "compact" in path
    ),
    "old-log-goes-first": Mutant((*_LOST, "starts"), _old_log_goes_first),
    "control-state-not-carried": Mutant(
        (*_LOST, "fences-hold", "keys-hold", "lac-holds", "starts"), _control_state_not_carried
    ),
    "unsealed-not-named": Mutant(("entries-readable", "starts"), _unsealed_not_named),
    "unfinished-flush-kept": Mutant(("starts",), _unfinished_flush_kept),
}


@dataclass(frozen=True, slots=True)
class DamageMutant:
    """A check of the product's left out, the harm by which that shows soon, and the promises that may catch it."""

    patch: Patch
    choice: Choice
    caught_by: tuple[str, ...]


def _nothing_checked(*places: tuple[Any, str]) -> Patch:
    """These functions find nothing wrong."""

    @contextlib.contextmanager
    def patched() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                stack.enter_context(patch.object(owner, name, lambda *args, **others: None))
            yield

    return patched


@contextlib.contextmanager
def _digests_unchecked() -> Iterator[None]:
    """Whatever lies in an entry log under an entry's ids is that entry."""

    def intact_entry(data: bytes, at: int, size: int, ledger_id: int, entry_id: int) -> bytes | None:
        body = data[at : at + size]
        is_its = len(body) == size and entry_log_format.unpack_ids(body) == (ledger_id, entry_id)
        return body if is_its else None

    with (
        patch.object(entry_log_format, "intact_entry", intact_entry),
        _nothing_checked((entry_log_format, "check_record"))(),
    ):
        yield


def _ends_unknown() -> contextlib.AbstractContextManager[Any]:
    """Of the end of a log nothing is known but LastLogMark's."""

    def end(self: Any, log_id: int, *, mark: tuple[int, int]) -> LogEnd:
        return LogEnd(stop=mark[1]) if log_id == mark[0] else LogEnd()

    return patch.object(LogManifest, "end", end)


DAMAGE_MUTANTS: Final[dict[str, DamageMutant]] = {
    "entry-digests-unchecked": DamageMutant(_digests_unchecked, Choice(("entry log",)), ("right-bytes",)),
    "index-batches-uncounted": DamageMutant(
        _nothing_checked((Index, "check_complete"), (opening, "check_files")),
        Choice(("LevelDB CURRENT",), ("removed",)),
        (*_LOST, "starts"),
    ),
    "journal-cuts-unnoticed": DamageMutant(
        _nothing_checked((journal_format, "check_size")),
        Choice(("journal",), ("truncated",)),
        (*_LOST, "fences-hold", "lac-holds"),
    ),
    "cut-logs-unnoticed": DamageMutant(
        _ends_unknown,
        Choice(("entry log",), (CUT_AND_INDEX_LOST,)),
        (*_LOST, "last-entry", "entries-listed", "fences-hold", "lac-holds", "keys-hold"),
    ),
}


def hunt_damage(name: str, *, cases_max: int, first: int = 0) -> tuple[int, Outcome] | None:
    """Harm files with the mutant until one case notices: (cases, that case). None: none did."""
    mutant = DAMAGE_MUTANTS[name]
    with mutant.patch():
        for start in range(first, first + cases_max, CASES_PER_TEMPLATE):
            tally = run_cases(start, CASES_PER_TEMPLATE, mutant.choice)
            if tally.failed:
                seed, outcome = tally.failed[0]
                return seed - first + 1, outcome
    return None


FIRST_SEEDS: Final = {"force-does-nothing": 2, "old-log-goes-first": 7, "index-batches-uncounted": 350}
"""Seeds at which the tests begin to search, for mutants that few seeds catch: else these take minutes. The others
begin at 0."""


@dataclass(frozen=True, slots=True)
class Caught:
    name: str
    seed: int
    points: int
    """Looked at until it was caught, this one included; 0: it was seen before any power cut."""
    broken: Broken


def hunt(name: str, *, points_max: int, first: int = 0) -> Caught | None:
    """Play seeds with the mutant until one notices. None: none did within about `points_max` points."""
    mutant = MUTANTS[name]
    points = 0
    seed = first
    with mutant.patch():
        while points < points_max:
            outcome = play(seed, wrap=mutant.wrap)
            points += outcome.points
            if outcome.problems:
                return Caught(name, seed, points, outcome.problems[0])
            seed += 1
    return None
