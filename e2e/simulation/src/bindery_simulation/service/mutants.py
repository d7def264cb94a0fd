"""Mutants of whole clusters. An invariant of `verdict` or `healing.verdict` must report each of them for some seed.

The conditions name the faults and the kind of cluster that need the fewest seeds.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.journal.journal_writer import JournalWriter
from bindery_client.ledger.requests import LedgerRequests
from bindery_core.ledger.ledger_actions import SendAdds, SendLac, SendReads

from bindery_simulation import defects
from bindery_simulation.mutant import Kind, MutantTable, Replacement, Trial
from bindery_simulation.runner import collect
from bindery_simulation.service import faults
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.healing import defects as recovery
from bindery_simulation.service.healing import faults as healing
from bindery_simulation.service.healing.plan import HealingKind
from bindery_simulation.service.world import run_seed

_POWER: Final = (faults.cut_power, faults.cut_power_everywhere)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The faults and the kind of cluster that need the fewest seeds."""

    faults: tuple[Fault, ...] | None
    """Faults to choose from; None: the faults of the kind of cluster."""
    healing: HealingKind | None
    """Kind of cluster with auditors; None: a cluster without auditors."""


def _trials(seeds: Iterable[int], conditions: Conditions) -> Iterator[Trial]:
    for seed in seeds:
        violation = run_seed(seed, faults=conditions.faults, healing=conditions.healing or False).violation
        collect()
        yield Trial(seed, 1, None if violation is None else violation.invariant, str(violation or ""))


class _Unsynced:
    """A file whose syncs do nothing."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name in ("sync", "datasync") else getattr(self._file, name)


def _journal_without_datasync() -> list[Replacement]:
    original = JournalWriter.create

    def create(self: Any, *args: Any, **others: Any) -> None:
        original(self, *args, **others)
        self._file = _Unsynced(self._file)

    return [(JournalWriter, "create", create)]


def _flush_without_sync() -> list[Replacement]:
    original = EntryLogWriter.sync

    def sync(self: Any) -> None:
        file = self._file
        if file is None:
            original(self)
            return
        self._file = _Unsynced(file)
        try:
            original(self)
        finally:
            self._file = file

    return [(EntryLogWriter, "sync", sync)]


def _fence_not_journaled() -> list[Replacement]:
    async def fence(self: Any, ledger_id: int, master_key: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.is_fenced = True
        state.wake()
        await self._journaled(parts)

    return [(StorageEngine, "fence", fence)]


def _recovery_does_not_fence() -> list[Replacement]:
    original = LedgerRequests.send_reads

    def send_reads(self: Any, action: SendReads, sink: Any, **others: Any) -> None:
        original(self, replace(action, fence=False), sink, **others)

    return [(LedgerRequests, "send_reads", send_reads)]


def _early_lac() -> list[Replacement]:
    original = LedgerRequests.send_adds

    def send_adds(self: Any, actions: Sequence[SendAdds], sink: Any, *, timeout_s: float, **others: Any) -> None:
        original(self, actions, sink, timeout_s=timeout_s, **others)
        last = max(action.entry_ids[-1] for action in actions)
        self.send_lac(SendLac(tuple(action.bookie_id for action in actions), last), timeout_s=timeout_s)

    return [(LedgerRequests, "send_adds", send_adds)]


# --- the table: name, what the defect does, invariants that may report it, first seed, conditions, defect ------------

STORM, RESTARTS, RETURNS = HealingKind.STORM, HealingKind.RESTARTS, HealingKind.RETURNS

# fmt: off
MUTANTS: Final[MutantTable[Conditions]] = MutantTable(Kind.SERVICE, _trials, (
    ("ack-before-journal", "Adds are acknowledged before the journal wrote them.",
     ("bookie-keeps", "no-ack-after-fence"), 6, Conditions(_POWER, None), defects.ack_before_journal),
    ("confirm-before-ensemble-change", "The writer confirms entries before an ensemble change is committed.",
     ("quorum-in-metadata",), 17, Conditions((faults.slow_and_flaky,), None), defects.confirm_before_ensemble_change),
    ("replaced-member-counts", "Acknowledgements of a replaced bookie still count.",
     ("quorum-in-metadata",), 8, Conditions((faults.slow_and_flaky,), None), defects.replaced_member_counts),
    ("digest-unchecked", "Digests are not checked on reads.",
     ("right-bytes",), 0, Conditions((faults.bit_rot,), None), defects.digest_unchecked),
    ("journal-without-datasync", "The journal acknowledges bytes that are only in the page cache.",
     ("bookie-keeps", "bookie-starts"), 0, Conditions(_POWER, None), _journal_without_datasync),
    ("flush-without-sync", "LastLogMark advances although the entry log is only in the page cache.",
     ("bookie-keeps", "bookie-starts"), 0, Conditions(_POWER, None), _flush_without_sync),
    ("fence-not-journaled", "A fence is kept in memory only.",
     ("no-ack-after-fence",), 1, Conditions((*_POWER, faults.kill_bookie), None), _fence_not_journaled),
    ("recovery-does-not-fence", "The reads of recovery do not carry the fence flag.",
     ("writer-metadata",), 2, Conditions(faults.FAULTS, None), _recovery_does_not_fence),
    ("early-lac", "The explicit LAC names the last entry pushed instead of the last one confirmed.",
     ("lac-safe",), 3, Conditions(faults.FAULTS, None), _early_lac),
    ("mark-removed-before-copy", "The mark is removed when the work on a ledger begins, not when it is done.",
     ("mark-removed-too-early",), 1, Conditions(None, STORM), recovery.mark_removed_before_copy),
    ("lock-ignored", "A worker ignores the lock of another worker.",
     ("worked-without-lock",), 5, Conditions((healing.lose_for_a_while,), STORM), recovery.lock_ignored),
    ("leader-unchecked", "The writes of an auditor do not check that its vote is still the lowest.",
     ("two-leaders-wrote",), 0,
     Conditions((healing.cut_auditor_from_metadata, healing.pause_auditor,
     healing.lose_for_a_while), STORM), recovery.leader_unchecked),
    ("limbo-is-absence", "The answer of a bookie in limbo counts as the absence of the entry.",
     ("copied-from-limbo",), 7, Conditions((healing.wipe_bookie,), STORM), recovery.limbo_is_absence),
    ("metadata-before-copies", "The metadata names a replacement before it has the copies.",
     ("metadata-points-to-hole",), 1, Conditions(None, STORM), recovery.metadata_before_copies),
    ("copies-unanswered", "Copies count as stored whatever the bookie answers.",
     ("metadata-points-to-hole",), 1, Conditions((healing.partition_auditor,), STORM), recovery.copies_unanswered),
    ("membership-not-asked-again", "A worker does not read the membership again before and during copying.",
     ("copied-needlessly",), 12, Conditions(None, RETURNS), recovery.membership_not_read_again),
    ("lease-ignored", "A bookie that is in maintenance counts as lost.",
     ("copied-needlessly",), 8, Conditions((healing.maintain_bookie,), STORM), recovery.lease_ignored),
    ("delay-ignored", "A bookie counts as lost as soon as it is absent.",
     ("copied-needlessly",), 1, Conditions(None, RESTARTS), recovery.delay_ignored),
    ("recovery-without-note", "Ledgers are closed without a closing record.",
     ("hole-unnoted",), 2, Conditions(None, RESTARTS), recovery.recovery_without_record),
    ("note-removed-unlooked", "A closing record is deleted though a bookie did not answer or has missing entries.",
     ("hole-unnoted",), 6,
     Conditions((healing.lose_for_a_while, faults.kill_client), STORM), recovery.record_removed_unchecked),
    ("no-second-attempt", "A ledger that could not be repaired at once is not tried again.",
     ("not-healed",), 1, Conditions(None, RETURNS), recovery.no_second_attempt),
), unit="seeds")
# fmt: on
