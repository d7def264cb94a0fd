"""Mutants of the protocol. An invariant of `invariants` must report each of them in some history.

The names are sentences. `profile` names the profile that needs the fewest seeds; None: any profile.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bindery_core import entry
from bindery_core.digest import Digester
from bindery_core.entry import Entry, pack, unpack
from bindery_core.errors import LostOwnership
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId
from bindery_core.ledger import ack_table, ledger_plans, ledger_reader, ledger_recovery
from bindery_core.ledger.ledger_actions import Confirm, SealLedger
from bindery_core.ledger.ledger_reader import LacRead
from bindery_core.ledger.ledger_recovery import LedgerRecovery
from bindery_core.ledger.ledger_writer import LedgerWriter
from bindery_core.placement import quorum, write_set
from bindery_core.wire.messages import ReadLacResponse

from bindery_simulation import defects
from bindery_simulation.mutant import Defect, Kind, MutantTable, Replacement, Trial
from bindery_simulation.protocol import maintenance
from bindery_simulation.protocol.bookie import NO_ENTRY, OK, Bookie
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.invariants import Invariant
from bindery_simulation.protocol.ledger import Ledger
from bindery_simulation.protocol.maintenance import Replicator


def _trials(seeds: Iterable[int], profile: str | None) -> Iterator[Trial]:
    for seed in seeds:
        violation = play(seed, profile=profile).violation
        yield Trial(seed, 1, None if violation is None else violation.invariant.value, str(violation or ""))


MUTANTS: MutantTable[str | None] = MutantTable(Kind.PROTOCOL, _trials, unit="histories")


def mutant(name: str, *caught_by: Invariant, seed: int, profile: str | None = None) -> Callable[[Defect], Defect]:
    """Add the decorated defect to the table."""

    def register(defect: Defect) -> Defect:
        MUTANTS.add(name, name, [one.value for one in caught_by], seed, profile, defect)
        return defect

    return register


# -- fencing and recovery ----------------------------------------------------------------------------------------------


@mutant(
    "recovery reads do not fence (BookKeeper issue 2614)",
    Invariant.NO_ACK_AFTER_FENCE,
    Invariant.READABLE,
    seed=666,
    profile="fence race",
)
def _reads_do_not_fence() -> list[Replacement]:
    original = LedgerRecovery._send_reads

    def send(self: LedgerRecovery, first: int, last: int, now: float, *, fence: bool) -> Any:
        return original(self, first, last, now, fence=False)

    return [(LedgerRecovery, "_send_reads", send)]


class _Zero(int):
    def __sub__(self, other: int) -> int:
        return -1


@mutant("recovery starts at -1 (BookKeeper issue 2615)", Invariant.SEGMENTS, seed=2295, profile="rival recoveries")
def _recovery_from_minus_one() -> list[Replacement]:
    original = LedgerRecovery._start_reading

    def start(self: LedgerRecovery, now: float) -> Any:
        began = self._began
        assert began is not None
        last = began.last_segment
        disguised = Segment(_Zero(last.first_entry_id), last.ensemble)  # type: ignore[arg-type]
        self._began = began.with_changes(segments=(*began.segments[:-1], disguised))
        return original(self, now)

    return [(LedgerRecovery, "_start_reading", start)]


@mutant("a fence does not survive a restart", Invariant.NO_ACK_AFTER_FENCE, seed=24, profile="rival recoveries")
def _fence_is_forgotten() -> list[Replacement]:
    original = Bookie.restart

    def restart(self: Bookie) -> None:
        original(self)
        self.is_fenced = False

    return [(Bookie, "restart", restart)]


@mutant(
    "a bookie in limbo accepts ordinary adds",
    Invariant.NO_ACK_AFTER_FENCE,
    Invariant.READABLE,
    seed=202,
    profile="lost disks",
)
def _limbo_is_not_fenced() -> list[Replacement]:
    original = Bookie.lose_storage

    def lose(self: Bookie, *, is_listed: bool) -> None:
        original(self, is_listed=is_listed)
        self.is_fenced = False

    return [(Bookie, "lose_storage", lose)]


@mutant("a bookie in limbo denies entries that it lost", Invariant.READABLE, seed=0, profile="lost disks")
def _limbo_denies() -> list[Replacement]:
    def read(self: Bookie, entry_id: int) -> tuple[int, bytes | None]:
        frame = self.entries.get(max(self.entries, default=-1) if entry_id < 0 else entry_id)
        return (NO_ENTRY, None) if frame is None else (OK, frame)

    return [(Bookie, "read", read)]


@mutant("a fenced bookie refuses the recovery's adds too", Invariant.TERMINATES, seed=3, profile="fence race")
def _recovery_adds_are_refused() -> list[Replacement]:
    original = Bookie.add

    def add(self: Bookie, entry_id: int, frame: bytes, *, recovery: bool) -> int:
        return original(self, entry_id, frame, recovery=False)

    return [(Bookie, "add", add)]


@mutant("coverage is off by one", Invariant.LAC_RECENT, seed=82, profile="tail")
def _coverage_off_by_one() -> list[Replacement]:
    """LAC reads become stale. Recoveries are not affected, because their reads also fence and need enough denials."""
    original = quorum.is_covered

    def covered(answered: Any, *, ensemble_size: int, write_quorum: int, ack_quorum: int) -> bool:
        return original(answered, ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum + 1)

    return [(ledger_recovery, "is_covered", covered), (ledger_reader, "is_covered", covered)]


@mutant(
    "recovery treats an entry as absent after one denial",
    Invariant.READABLE,
    Invariant.NO_ACK_AFTER_FENCE,
    seed=9,
    profile="fence race",
)
def _one_denial() -> list[Replacement]:
    return [(ledger_recovery, "denials_needed", lambda **_: 1)]


@mutant(
    "recovery counts a missing answer as a denial",
    Invariant.READABLE,
    Invariant.NO_ACK_AFTER_FENCE,
    seed=9,
    profile="rival recoveries",
)
def _silence_is_denial() -> list[Replacement]:
    original = LedgerRecovery._go_on

    def go_on(self: LedgerRecovery, now: float) -> Any:
        for read in self._reads.values():
            read.denied |= read.silent
        return original(self, now)

    return [(LedgerRecovery, "_go_on", go_on)]


@mutant(
    "recovery closes before its write-back is done",
    Invariant.DENSE,
    Invariant.READABLE,
    seed=90,
    profile="rival recoveries",
)
def _closes_too_early() -> list[Replacement]:
    return [(LedgerWriter, "pending_count", property(lambda self: 0))]


@mutant(
    "recovery reads from the ensembles that it changed itself",
    Invariant.READABLE,
    Invariant.DENSE,
    Invariant.NO_ACK_AFTER_FENCE,
    seed=138,
    profile="rival recoveries",
)
def _reads_from_newcomers() -> list[Replacement]:
    original = LedgerRecovery.ensemble_changed

    def changed(self: LedgerRecovery, metadata: LedgerMetadata, *, now: float) -> Any:
        self._began = metadata
        return original(self, metadata, now=now)

    return [(LedgerRecovery, "ensemble_changed", changed)]


@mutant(
    "recovered entries carry a LAC that depends on unpublished ensembles",
    Invariant.READABLE,
    Invariant.DENSE,
    Invariant.LAC_SAFE,
    seed=26,
)
def _fresh_lac_in_recovered_entries() -> list[Replacement]:
    original = LedgerWriter.add_recovered

    def add(self: LedgerWriter, entries: list[Entry], *, now: float) -> Any:
        self._recovery_lac = self.lac
        return original(self, entries, now=now)

    return [(LedgerWriter, "add_recovered", add)]


# -- adding and ensemble changes ---------------------------------------------------------------------------------------


mutant(
    "entries are confirmed before the metadata change",
    Invariant.NO_DIVERGENCE,
    Invariant.READABLE,
    seed=13,
    profile="change race",
)(defects.confirm_before_ensemble_change)


mutant("acks of a replaced bookie still count", Invariant.NO_DIVERGENCE, seed=3, profile="change race")(
    defects.replaced_member_counts
)


@mutant("an entry is confirmed before the preceding entry", Invariant.DENSE, seed=5)
def _out_of_order() -> list[Replacement]:
    original = LedgerWriter._drain

    def drain(self: LedgerWriter, now: float) -> Any:
        actions = original(self, now)
        second = self.lac + 2
        is_pending = not actions and not self._changing and second < self.next_entry_id
        if is_pending and self._acks.complete_count(second):
            actions.append(Confirm(second, second))
        return actions

    return [(LedgerWriter, "_drain", drain)]


@mutant("the writer's write sets are off by one", Invariant.NO_DIVERGENCE, seed=4)
def _write_set_off_by_one() -> list[Replacement]:
    original = write_set.write_set_masks

    def masks(*, ensemble_size: int, write_quorum: int) -> tuple[int, ...]:
        found = original(ensemble_size=ensemble_size, write_quorum=write_quorum)
        return found[1:] + found[:1]

    return [(ack_table, "write_set_masks", masks)]


@mutant(
    "metadata is written without compare-and-set",
    Invariant.SEGMENTS,
    Invariant.FINAL,
    Invariant.READABLE,
    Invariant.NO_ACK_AFTER_FENCE,
    seed=19,
)
def _no_compare_and_set() -> list[Replacement]:
    original = Ledger.compare_and_set

    def overwrite(self: Ledger, planned: LedgerMetadata, version: int) -> bool:
        return original(self, planned, self.version)

    return [(Ledger, "compare_and_set", overwrite)]


@mutant(
    "an ensemble change ignores that recovery has begun",
    Invariant.SEGMENTS,
    Invariant.FINAL,
    seed=8,
    profile="change race",
)
def _change_ignores_state() -> list[Replacement]:
    def plan(
        metadata: LedgerMetadata, *, failed: Mapping[int, BookieId], first_entry_id: int, choose: Any
    ) -> LedgerMetadata | None:
        changed = ledger_plans.replace_failed(metadata, failed=failed, first_entry_id=first_entry_id, choose=choose)
        return None if changed is None else changed.with_changes(state=LedgerState.OPEN)

    return [(ledger_plans, "plan_ensemble_change", plan)]


@mutant(
    "a partial ensemble change of unknown outcome is treated as not executed",
    Invariant.NO_DIVERGENCE,
    seed=109,
    profile="change race",
)
def _partial_change_denied() -> list[Replacement]:
    original = ledger_plans.replace_failed

    def replace(
        metadata: LedgerMetadata, *, failed: Mapping[int, BookieId], first_entry_id: int, choose: Any
    ) -> LedgerMetadata | None:
        ensemble = metadata.last_segment.ensemble
        left = {index: bookie_id for index, bookie_id in failed.items() if ensemble[index] == bookie_id}
        return original(metadata, failed=left, first_entry_id=first_entry_id, choose=choose) if left else None

    return [(ledger_plans, "replace_failed", replace)]


@mutant("the writer closes at the last entry pushed", Invariant.DENSE, Invariant.FINAL, seed=21)
def _close_at_lap() -> list[Replacement]:
    original = LedgerWriter.close

    def close(self: LedgerWriter, *, now: float) -> Any:
        if not isinstance(self.error, LostOwnership) and not self._sealed:
            self._closing = self._sealed = True
            return [SealLedger(self.next_entry_id - 1, self.length)]
        return original(self, now=now)

    return [(LedgerWriter, "close", close)]


@mutant("the writer closes with the length of all entries pushed", Invariant.FINAL, seed=19)
def _close_with_wrong_length() -> list[Replacement]:
    original = LedgerWriter.close

    def close(self: LedgerWriter, *, now: float) -> Any:
        self.confirmed_length = self.length
        return original(self, now=now)

    return [(LedgerWriter, "close", close)]


# -- readers -----------------------------------------------------------------------------------------------------------


@mutant("entries carry the last entry pushed as their LAC", Invariant.LAC_SAFE, Invariant.DENSE, seed=1, profile="tail")
def _early_lac() -> list[Replacement]:
    original = entry.pack_many

    def pack_many(digester: Digester, payloads: Any, *, first_entry_id: int, lac: int, **rest: Any) -> list[bytes]:
        return original(digester, payloads, first_entry_id=first_entry_id, lac=first_entry_id - 1, **rest)

    return [(entry, "pack_many", pack_many)]


@mutant("a reader uses the last entry as the LAC", Invariant.LAC_SAFE, seed=0, profile="tail")
def _last_entry_is_lac() -> list[Replacement]:
    def lac_in(self: LacRead, answer: ReadLacResponse) -> int:
        if answer.last_entry_body is None:
            return -1
        return unpack(self._digester, answer.last_entry_body, ledger_id=self.ledger_id, entry_id=None).entry_id

    return [(LacRead, "_lac_in", lac_in)]


@mutant("a reader treats an entry as absent after one denial", Invariant.READABLE, seed=21)
def _first_denial_is_absence() -> list[Replacement]:
    original = ledger_reader._replicas
    return [(ledger_reader, "_replicas", lambda *args: original(*args)[:1])]


mutant("digests are not checked", Invariant.AGREE, Invariant.MARK, seed=4, profile="lost disks")(
    defects.digest_unchecked
)


# -- maintenance ------------------------------------------------------------------------------------------------------


@mutant("a ledger is deleted without fencing", Invariant.NO_ACK_AFTER_FENCE, seed=6, profile="deletion")
def _delete_without_fence() -> list[Replacement]:
    return [(ledger_plans, "fence_targets", lambda metadata: ())]


@mutant("the mark is removed before the entries are copied", Invariant.MARK, seed=5, profile="repair")
def _mark_removed_first() -> list[Replacement]:
    original = Replicator.copy

    def copy(self: Replicator) -> None:
        assert self._mark is not None
        self.world.ledger.remove_mark(self._mark)
        original(self)

    return [(Replicator, "copy", copy)]


@mutant(
    "the metadata names a new bookie before its copies exist",
    Invariant.READABLE,
    Invariant.DENSE,
    seed=0,
    profile="repair",
)
def _published_before_copied() -> list[Replacement]:
    original = Replicator.copy

    def copy(self: Replicator) -> None:
        assert self._fragment is not None
        if self._target == self._fragment.bookie_id:
            original(self)
        else:
            self.publish()

    return [(Replicator, "copy", copy)]


@mutant("copies carry a wrong length in the entry header", Invariant.AGREE, seed=0, profile="repair")
def _copies_get_another_length() -> list[Replacement]:
    def longer(digester: Digester, *, length: int, **rest: Any) -> bytes:
        return pack(digester, length=length + 1, **rest)

    return [(maintenance, "pack", longer)]


@mutant(
    "a delete ignores an ensemble change made after its fencing",
    Invariant.NO_ACK_AFTER_FENCE,
    seed=4170,
    profile="deletion",
)
def _unconditional_delete() -> list[Replacement]:
    original = Ledger.delete

    def delete(self: Ledger, version: int, *, has_fenced: bool) -> bool:
        return original(self, self.version, has_fenced=has_fenced)

    return [(Ledger, "delete", delete)]
