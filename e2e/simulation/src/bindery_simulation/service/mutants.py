"""Mutants: the product with one promise broken on purpose. Each must be caught, by the invariant that it breaks.

`with mutant("journal-without-datasync"): run_seed(seed)`. A simulation that finds nothing is worth what it would find.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest.mock import patch

from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.journal.journal import JournalWriter
from bindery_client.ledger.requests import LedgerRequests
from bindery_core.digest import Digester
from bindery_core.ledger.ledger_actions import SendAdds, SendLac, SendReads
from bindery_core.ledger.ledger_writer import LedgerWriter

from bindery_simulation.engine_mutants import ack_before_journal
from bindery_simulation.service import faults
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.healing import faults as healing_faults
from bindery_simulation.service.healing import mutants as healing_mutants
from bindery_simulation.service.healing.plan import HealingKind

Patch = Callable[[], contextlib.AbstractContextManager[Any]]


def _journal_without_datasync() -> contextlib.AbstractContextManager[Any]:
    """The journal answers for bytes that are only in the page cache."""
    real = JournalWriter.create

    class _Unsynced:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return (lambda: None) if name == "datasync" else getattr(self._file, name)

    def create(self: Any, *args: Any, **others: Any) -> None:
        real(self, *args, **others)
        self._file = _Unsynced(self._file)

    return patch.object(JournalWriter, "create", create)


def _fence_not_journaled() -> contextlib.AbstractContextManager[Any]:
    """A fence is forgotten with the process's memory."""

    async def fence(self: Any, ledger_id: int, master_key: bytes) -> None:
        parts: list[bytes] = []
        state = self._state_for(ledger_id, master_key, parts)
        state.is_fenced = True
        state.wake()
        await self._journaled(parts)

    return patch.object(StorageEngine, "fence", fence)


def _confirm_before_ensemble_change() -> contextlib.AbstractContextManager[Any]:
    """The writer confirms while a change of its ensemble is under way, and counts what replaced members stored."""
    real = LedgerWriter._drain

    def drain(self: Any, now: float) -> Any:
        changing, self._changing = self._changing, False
        try:
            return real(self, now)
        finally:
            self._changing = changing

    return patch.object(LedgerWriter, "_drain", drain)


def _replaced_member_counts() -> contextlib.AbstractContextManager[Any]:
    """What a member stored that was replaced still counts towards the ack quorum."""
    real = LedgerWriter._replaced

    def replaced(self: Any, bit: int) -> None:
        acks = list(self._acks)
        real(self, bit)
        self._acks[:] = acks

    return patch.object(LedgerWriter, "_replaced", replaced)


def _digest_unchecked() -> contextlib.AbstractContextManager[Any]:
    """A reader believes whatever a bookie sends."""
    return patch.object(Digester, "verify", lambda self, header, digest, payload: True)


def _recovery_does_not_fence() -> contextlib.AbstractContextManager[Any]:
    """The fence flag is dropped from recovery's reads."""
    real = LedgerRequests.send_reads

    def send_reads(self: Any, action: SendReads, sink: Any, **others: Any) -> None:
        real(self, replace(action, fence=False), sink, **others)

    return patch.object(LedgerRequests, "send_reads", send_reads)


def _flush_without_sync() -> contextlib.AbstractContextManager[Any]:
    """LastLogMark moves on although the entry log is only in the page cache."""
    real = EntryLogWriter.sync

    def sync(self: Any) -> None:
        file = self._file
        if file is None:
            real(self)
            return

        class _Unsynced:
            def __getattr__(self, name: str) -> Any:
                return (lambda: None) if name in ("sync", "datasync") else getattr(file, name)

        self._file = _Unsynced()
        try:
            real(self)
        finally:
            self._file = file

    return patch.object(EntryLogWriter, "sync", sync)


def _early_lac() -> contextlib.AbstractContextManager[Any]:
    """Bookies are told that everything pushed is confirmed."""
    real = LedgerRequests.send_adds

    def send_adds(self: Any, actions: Sequence[SendAdds], sink: Any, *, timeout_s: float, **others: Any) -> None:
        real(self, actions, sink, timeout_s=timeout_s, **others)
        last = max(action.entry_ids[-1] for action in actions)
        self.send_lac(SendLac(tuple(action.bookie_id for action in actions), last), timeout_s=timeout_s)

    return patch.object(LedgerRequests, "send_adds", send_adds)


@dataclass(frozen=True, slots=True)
class Mutant:
    """How to make it, which invariants may catch it, and the faults under which that takes few seeds."""

    patch: Patch
    caught_by: tuple[str, ...]
    faults: tuple[Fault, ...] | None
    """None: those of the kind of world."""
    healing: HealingKind | None = None


_POWER: Final = (faults.cut_power, faults.cut_power_everywhere)

MUTANTS: Final[dict[str, Mutant]] = {
    "journal-without-datasync": Mutant(_journal_without_datasync, ("bookie-keeps", "bookie-starts"), _POWER),
    "ack-before-journal": Mutant(ack_before_journal, ("bookie-keeps", "no-ack-after-fence"), _POWER),
    "flush-without-sync": Mutant(_flush_without_sync, ("bookie-keeps", "bookie-starts"), _POWER),
    "fence-not-journaled": Mutant(_fence_not_journaled, ("no-ack-after-fence",), (*_POWER, faults.kill_bookie)),
    "confirm-before-ensemble-change": Mutant(
        _confirm_before_ensemble_change, ("quorum-in-metadata",), (faults.slow_and_flaky,)
    ),
    "replaced-member-counts": Mutant(_replaced_member_counts, ("quorum-in-metadata",), (faults.slow_and_flaky,)),
    "digest-unchecked": Mutant(_digest_unchecked, ("right-bytes",), (faults.bit_rot,)),
    "recovery-does-not-fence": Mutant(_recovery_does_not_fence, ("writer-metadata",), faults.FAULTS),
    "early-lac": Mutant(_early_lac, ("lac-safe",), faults.FAULTS),
    "mark-removed-before-copy": Mutant(
        healing_mutants.mark_removed_before_copy, ("mark-removed-too-early",), None, HealingKind.STORM
    ),
    "lock-ignored": Mutant(
        healing_mutants.lock_ignored, ("worked-without-lock",), (healing_faults.lose_for_a_while,), HealingKind.STORM
    ),
    "leader-unchecked": Mutant(
        healing_mutants.leader_unchecked,
        ("two-leaders-wrote",),
        (healing_faults.cut_auditor_from_metadata, healing_faults.pause_auditor, healing_faults.lose_for_a_while),
        HealingKind.STORM,
    ),
    "limbo-is-absence": Mutant(
        healing_mutants.limbo_is_absence, ("copied-from-limbo",), (healing_faults.wipe_bookie,), HealingKind.STORM
    ),
    "metadata-before-copies": Mutant(
        healing_mutants.metadata_before_copies, ("metadata-points-to-hole",), None, HealingKind.STORM
    ),
    "copies-unanswered": Mutant(
        healing_mutants.copies_unanswered,
        ("metadata-points-to-hole",),
        (healing_faults.partition_auditor,),
        HealingKind.STORM,
    ),
    "membership-not-asked-again": Mutant(
        healing_mutants.membership_not_asked_again, ("copied-needlessly",), None, HealingKind.RETURNS
    ),
    "lease-ignored": Mutant(
        healing_mutants.lease_ignored, ("copied-needlessly",), (healing_faults.maintain_bookie,), HealingKind.STORM
    ),
    "delay-ignored": Mutant(healing_mutants.delay_ignored, ("copied-needlessly",), None, HealingKind.RESTARTS),
    "recovery-without-note": Mutant(
        healing_mutants.recovery_without_note, ("hole-unnoted",), None, HealingKind.RESTARTS
    ),
    "note-removed-unlooked": Mutant(
        healing_mutants.note_removed_unlooked,
        ("hole-unnoted",),
        (healing_faults.lose_for_a_while, faults.kill_client),
        HealingKind.STORM,
    ),
    "no-second-attempt": Mutant(healing_mutants.no_second_attempt, ("not-healed",), None, HealingKind.RETURNS),
}


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    with MUTANTS[name].patch():
        yield
