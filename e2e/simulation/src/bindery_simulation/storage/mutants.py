"""Mutants of the storage engine.

`crash` must report each mutant that breaks a guarantee of durability. `damage` must report each mutant that leaves out
a check.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from bindery_bookie.storage import control_records
from bindery_bookie.storage.collection import rewrite
from bindery_bookie.storage.collection.compaction import Compactor
from bindery_bookie.storage.collection.log_replacement import LogReplacement
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest
from bindery_bookie.storage.flushing import flush_loop
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.memory import ledgers
from bindery_bookie.storage.opening import opening, rebuild
from bindery_bookie.storage.opening.replay import Replay

from bindery_simulation import defects
from bindery_simulation.disk import LyingDisk
from bindery_simulation.mutant import Kind, MutantTable, Replacement, Trial, no_replacement
from bindery_simulation.storage.crash import play
from bindery_simulation.storage.damage import Choice, each_case
from bindery_simulation.storage.double_fault import CUT_AND_INDEX_LOST

SkippedSyncs = Callable[[str, str], bool]
"""Returns whether the disk reports the sync (operation, path) as done without doing it."""

_LOST: Final = ("entries-readable", "right-bytes")
"""Invariants that report the loss of an acknowledged entry: it is absent, or an older body is read in its place."""


def _crash_trials(seeds: Iterable[int], skipped: SkippedSyncs | None) -> Iterator[Trial]:
    for seed in seeds:
        outcome = play(seed, wrap=lambda disk: disk if skipped is None else LyingDisk(disk, skipped))
        for broken in outcome.problems:
            yield Trial(seed, outcome.points, broken.problem.name, str(broken))
            break
        else:
            yield Trial(seed, outcome.points, None)


def _damage_trials(seeds: Iterable[int], choice: Choice) -> Iterator[Trial]:
    for outcome in each_case(seeds, choice):
        yield Trial(outcome.seed, 1, outcome.problems[0].name if outcome.problems else None, str(outcome))


def _ends(operation: str, *suffixes: str) -> SkippedSyncs:
    return lambda name, path: name == operation and path.endswith(suffixes)


def _mark_before_index() -> list[Replacement]:
    async def flush(self: Any, flush: Flush) -> None:
        await self._journal_synced()
        await self._flusher.advance_mark(flush.position, is_stored=False)
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    return [(FlushLoop, "_flush", flush)]


def _mark_passes_what_came_later() -> list[Replacement]:
    async def flush(self: Any, flush: Flush) -> None:
        await self._journal_synced()
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(self._journal.position)

    return [(FlushLoop, "_flush", flush)]


def _flush_ahead_of_journal() -> list[Replacement]:
    async def flush(self: Any, flush: Flush) -> None:
        if not flush.is_stored:
            await self._flusher.store(flush)
            flush.is_stored = True
        await self._flusher.advance_mark(flush.position)

    return [(FlushLoop, "_flush", flush)]


def _journals_dropped_before_mark() -> list[Replacement]:
    real = Flusher._write_mark

    def write_mark(self: Any, mark: Any) -> Any:
        for name in self._disk.list_names(self._journal_directory):
            journal_id = journal_format.parse_file_name(name)
            if journal_id is not None and journal_id < mark.journal.journal_id:
                self._disk.remove(f"{self._journal_directory}/{name}")
        return real(self, mark)

    return [(Flusher, "_write_mark", write_mark)]


def _replay_stops_a_group_early() -> list[Replacement]:
    real = journal_files.replay_groups

    def replay_groups(*args: Any, **others: Any) -> Iterator[Any]:
        held: Any = None
        for found in real(*args, **others):
            if held is not None:
                yield held
            held = found

    return [(journal_files, "replay_groups", replay_groups)]


def _replay_forgets_fences() -> list[Replacement]:
    real = Replay._apply

    def apply(self: Any, group: Any) -> None:
        kept = [record for record in group.records if control_records.unpack_ids(record)[1] != control_records.FENCE]
        real(self, type(group)(group.offset, group.size, group.sequence, kept))

    return [(Replay, "_apply", apply)]


def _fence_not_journaled() -> list[Replacement]:
    async def fence(self: Any, ledger_id: int, master_key: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.is_fenced = True
        if parts:
            await self._journaled(parts)

    return [(StorageEngine, "fence", fence)]


def _lac_not_journaled() -> list[Replacement]:
    async def write_lac(self: Any, ledger_id: int, master_key: bytes, lac: int, packet: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.set_explicit_lac(packet)
        self.parts.ledgers.changed[ledger_id] = state
        if parts:
            await self._journaled(parts)

    return [(StorageEngine, "write_lac", write_lac)]


def _force_does_nothing() -> list[Replacement]:
    async def force(self: Any, ledger_id: int) -> None:
        return None

    return [(StorageEngine, "force", force)]


def _index_rebuild_left_out() -> list[Replacement]:
    def run(self: Any) -> None:
        self._index.commit(runs=[], merges={}, ledgers={}, deleted=(), generation=self._mark.generation)

    return [(rebuild.IndexRebuild, "run", run)]


def _keys_not_logged() -> list[Replacement]:
    """Leave out the keys. A ledger without its key is fenced and in limbo, and accepts the first key it receives."""
    return [(ledgers.LedgerState, "take_control_records", lambda self: [])]


def _deletions_not_logged() -> list[Replacement]:
    real = flush_loop.take_flush

    def take_flush(*args: Any) -> Any:
        flush = real(*args)
        if flush is not None:
            flush.control_records = []
            for state in flush.states.values():
                flush.control_records += state.take_control_records()
        return flush

    return [(flush_loop, "take_flush", take_flush)]


def _old_log_goes_first() -> list[Replacement]:
    real = LogReplacement._switch

    async def switch(self: Any, rewrite: Any) -> None:
        await self._remove_log(rewrite.source.log_id)
        await real(self, rewrite)

    return [(LogReplacement, "_switch", switch)]


def _for_space(owner: Any, attribute: str, broken: Callable[..., Any]) -> list[Replacement]:
    """Replace a method by `broken` while logs are rewritten because of dead bytes."""
    real, real_compact = getattr(owner, attribute), Compactor._compact_for_space
    is_on = False

    async def compact_for_space(self: Any, outcome: Any) -> None:
        nonlocal is_on
        is_on = True
        try:
            await real_compact(self, outcome)
        finally:
            is_on = False

    def method(*args: Any, **others: Any) -> Any:
        return (broken if is_on else real)(*args, **others)

    return [(Compactor, "_compact_for_space", compact_for_space), (owner, attribute, method)]


def _old_log_goes_first_for_space() -> list[Replacement]:
    real = LogReplacement._switch

    async def switch(self: Any, rewrite: Any) -> None:
        await self._remove_log(rewrite.source.log_id)
        await real(self, rewrite)

    return _for_space(LogReplacement, "_switch", switch)


def _index_not_switched_for_space() -> list[Replacement]:
    real = Index.switch

    def switch(self: Any, log_id: int, ledgers: Any, moved: Any, *, switches: int) -> None:
        real(self, log_id, (), moved, switches=switches)

    return _for_space(Index, "switch", switch)


def _live_ledger_dropped_for_space() -> list[Replacement]:
    real = rewrite.Rewrite._ledger_ids

    def ledger_ids(self: Any) -> Any:
        return list(real(self))[:-1]

    return _for_space(rewrite.Rewrite, "_ledger_ids", ledger_ids)


def _control_state_not_carried() -> list[Replacement]:
    return [(rewrite, "_control_records", lambda ledger_id, row: ())]


def _unsealed_not_named() -> list[Replacement]:
    return [(LogManifest, "with_unsealed", lambda self, sizes: replace(self, unsealed=self.unsealed or {}))]


def _unfinished_flush_kept() -> list[Replacement]:
    return [(opening, "clean_logs", lambda *args: [])]


# --- checks left out ------------------------------------------------------------------------------------------------


def _report_nothing(*args: Any, **others: Any) -> None:
    """Do nothing, as the replacement of a check."""


def _digests_unchecked() -> list[Replacement]:
    def intact_entry(data: bytes, at: int, size: int, ledger_id: int, entry_id: int) -> bytes | None:
        body = data[at : at + size]
        is_its = len(body) == size and entry_log_format.unpack_ids(body) == (ledger_id, entry_id)
        return body if is_its else None

    return [(entry_log_format, "intact_entry", intact_entry), (entry_log_format, "check_record", _report_nothing)]


def _batches_uncounted() -> list[Replacement]:
    return [(Index, "check_complete", _report_nothing), (opening, "check_files", _report_nothing)]


def _journal_size_unchecked() -> list[Replacement]:
    return [(journal_format, "check_size", _report_nothing)]


def _log_ends_unknown() -> list[Replacement]:
    def end(self: Any, log_id: int, *, mark: tuple[int, int]) -> LogEnd:
        return LogEnd(stop=mark[1]) if log_id == mark[0] else LogEnd()

    return [(LogManifest, "end", end)]


# --- the tables: name, what the defect does, invariants that may report it, first seed, conditions, defect -----------

# fmt: off
MUTANTS: Final[MutantTable[SkippedSyncs | None]] = MutantTable(Kind.CRASH, _crash_trials, (
    ("journal-without-datasync", "The journal acknowledges adds before its fdatasync.",
     (*_LOST, "starts", "fences-hold"), 0, _ends("datasync", ".txn"), no_replacement),
    ("journal-directory-unsynced", "A journal is used before its directory is synced.",
     (*_LOST, "starts"), 0, _ends("sync_directory", "/journal/current"), no_replacement),
    ("entry-log-without-datasync", "LastLogMark advances before the entry log is synced.",
     (*_LOST, "starts"), 0, _ends("datasync", ".log"), no_replacement),
    ("mark-file-unsynced", "LastLogMark is renamed before it is synced.",
     ("starts",), 0, _ends("sync", "LastLogMark.new"), no_replacement),
    ("ledger-directory-unsynced", "Old journals are removed before the directory of LastLogMark is synced.",
     (*_LOST, "starts"), 0, _ends("sync_directory", "/ledgers/current"), no_replacement),
    ("compacted-log-unsynced", "The index points to a compacted log that is not synced.",
     (*_LOST, "starts"), 2, lambda name, path: name.endswith("sync") and "compact" in path, no_replacement),
    ("mark-before-index", "LastLogMark advances past a flush that is not in the entry log and the index yet.",
     (*_LOST, "starts", "keys-hold"), 0, None, _mark_before_index),
    ("mark-passes-what-came-later",
     "LastLogMark advances past entries that were accepted during the flush, so that they are not replayed.",
     (*_LOST, "fences-hold", "starts"), 0, None, _mark_passes_what_came_later),
    ("flush-ahead-of-journal",
     "A flush does not wait for the journal, so that the index has entries that a crash removes from it.",
     (*_LOST, "starts"), 0, None, _flush_ahead_of_journal),
    ("journals-dropped-before-mark", "Old journals are removed before LastLogMark is written.",
     ("starts",), 0, None, _journals_dropped_before_mark),
    ("replay-stops-a-group-early", "Replay leaves out the last group.",
     (*_LOST, "fences-hold"), 0, None, _replay_stops_a_group_early),
    ("replay-forgets-fences", "Replay leaves out fences.",
     ("fences-hold",), 0, None, _replay_forgets_fences),
    ("fence-not-journaled", "A fence is kept in memory only.",
     ("fences-hold",), 0, None, _fence_not_journaled),
    ("lac-not-journaled", "An explicit LAC is kept in memory only.",
     ("lac-holds",), 0, None, _lac_not_journaled),
    ("ack-before-journal", "Adds are acknowledged before the journal wrote them.",
     (*_LOST,), 0, None, defects.ack_before_journal),
    ("force-does-nothing", "A force returns at once.",
     (*_LOST,), 2, None, _force_does_nothing),
    ("index-rebuild-left-out", "An index that is behind LastLogMark is used as it is.",
     (*_LOST,), 0, None, _index_rebuild_left_out),
    ("keys-not-logged", "Entry logs do not contain master keys, so that an index rebuilt from them has no ledgers.",
     (*_LOST, "fences-hold", "keys-hold"), 0, None, _keys_not_logged),
    ("deletions-not-logged", "Entry logs do not contain deletions.",
     ("right-bytes",), 0, None, _deletions_not_logged),
    ("old-log-goes-first", "Compaction removes the old log before the index points to the new one.",
     (*_LOST, "starts"), 2, None, _old_log_goes_first),
    ("control-state-not-carried",
     "Compaction copies entries only, so that key, fence and explicit LAC are in the index alone.",
     (*_LOST, "fences-hold", "keys-hold", "lac-holds", "starts"), 2, None, _control_state_not_carried),
    ("old-log-goes-first-for-space",
     "Compaction because of dead bytes removes the old log before the index points to the new one.",
     (*_LOST, "starts"), 6, None, _old_log_goes_first_for_space),
    ("index-not-switched-for-space",
     "Compaction because of dead bytes removes a log to which the index still points.",
     (*_LOST, "starts"), 6, None, _index_not_switched_for_space),
    ("live-ledger-dropped-for-space",
     "Compaction because of dead bytes leaves out the last live ledger of a log.",
     (*_LOST, "fences-hold", "keys-hold", "lac-holds", "starts"), 6, None, _live_ledger_dropped_for_space),
    ("unsealed-not-named",
     "The list of entry logs does not name those that a crash left open, so that they seem to be truncated.",
     ("entries-readable", "starts"), 1, None, _unsealed_not_named),
    ("unfinished-flush-kept", "Entries that a flush wrote beyond LastLogMark are not cut off.",
     ("starts",), 0, None, _unfinished_flush_kept),
), unit="crash points")

DAMAGE_MUTANTS: Final[MutantTable[Choice]] = MutantTable(Kind.DAMAGE, _damage_trials, (
    ("entry-digests-unchecked", "Digests of entries in entry logs are not checked.",
     ("right-bytes",), 0, Choice(("entry log",)), _digests_unchecked),
    ("index-batches-uncounted", "The batches of the index are not counted, and its files are not checked.",
     (*_LOST, "starts"), 350, Choice(("LevelDB CURRENT",), ("removed",)), _batches_uncounted),
    ("journal-cuts-unnoticed", "The size of a journal is not compared with the size in its header.",
     (*_LOST, "fences-hold", "lac-holds"), 302, Choice(("journal",), ("truncated",)), _journal_size_unchecked),
    ("cut-logs-unnoticed", "A closed entry log need not end with its trailer: only LastLogMark limits a log.",
     (*_LOST, "last-entry", "entries-listed", "fences-hold", "lac-holds", "keys-hold"), 100,
     Choice(("entry log",), (CUT_AND_INDEX_LOST,)), _log_ends_unknown),
), unit="damaged files")
# fmt: on
