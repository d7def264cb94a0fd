"""What must be true of healing, judged over every committed write to the metadata tree and every copy that is sent.

| invariant               | says |
|-------------------------|------|
| mark-removed-too-early  | a mark goes only when nothing is missing that its worker could see since it took its lock |
| two-leaders-wrote       | what only the auditor writes is written by the session of the lowest vote |
| metadata-points-to-hole | a replaced bookie gives way to one that acknowledged every entry of the fragment before |
| copied-needlessly       | nothing is copied for a bookie that is back with all its entries, that is away with leave, |
|                         | or that was not away for the delay |
| copied-from-limbo       | what a bookie in limbo cannot tell is not copied back to it by others, nor taken away from |
|                         | it, nor counted as lost |
| worked-without-lock     | a process copies, replaces bookies and removes marks only of ledgers whose lock it took |
| hole-unnoted            | a ledger that lacks copies is closed only once a note of it stands, which goes only with   |
|                         | the ledger, or when every bookie that the metadata name has all it should hold             |
| not-healed              | healed, no mark and no note is left, each closed ledger has all its copies, on bookies    |
|                         | that are there                                                                             |

A worker may go by what it saw when it took the lock, and a little before (`SEEN_AFTER_S`): what changes under its hands
is found by the next audit.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import ID_MAX, BookieId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments
from bindery_metadata.layout.layout import READONLY, VOTE_PREFIX, BinderyLayout, CheckKind
from bindery_metadata.stores.store import Create, Delete, Op, Set
from bindery_recovery.records.reasons import CHECKED_ALL

from bindery_simulation.loop import Process
from bindery_simulation.service.healing.plan import HealingKind, HealingPlan
from bindery_simulation.service.machine import BookieMachine

if TYPE_CHECKING:
    from bindery_simulation.service.world import World

SEEN_AFTER_S: Final = 3.0
"""Whatever stands in the metadata for so long is seen by whoever looks afresh."""
BACK_S: Final = 8.0
"""A copy that is under way may end so long after the bookie came back that it was made for."""
CHECKED_ALL_NAMES: Final = frozenset(str(reason) for reason in CHECKED_ALL)


@dataclass(slots=True)
class _Lock:
    """As it was taken."""

    at: float
    fragments: tuple[Fragment, ...]
    """Closed at that time."""
    checks_all: bool


@dataclass(slots=True)
class HealingVerdict:
    """`sees(ops, owner)` is asked before each transaction of the tree; what it returns is called after a good one."""

    world: "World"
    plan: HealingPlan | None
    registered_since: dict[str, float] = field(default_factory=dict)
    away_since: dict[str, float] = field(default_factory=dict)
    intents: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By bookie: what is said of it, and since when."""
    marks_made: int = 0
    marks_removed: int = 0
    _locks: dict[int, _Lock] = field(default_factory=dict)
    """By ledger: the one that stands."""
    _taken: dict[tuple[Process, int], float] = field(default_factory=dict)
    """(process, ledger) -> when it last took the lock."""
    _copied: dict[tuple[int, str], float] = field(default_factory=dict)
    """(ledger, bookie) -> when copies were last sent there."""
    _writer: int = 0
    """Session of the transaction that was committed last."""
    _whole: dict[int, LedgerMetadata] = field(default_factory=dict)

    # --- what the tree is asked for ---------------------------------------------------------------------------------

    def sees(self, ops: Sequence[Op], owner: int) -> Sequence[Callable[[], None]]:
        self._writer = owner
        if self.plan is None:
            return ()
        layout, bindery = self.world.layout, BinderyLayout()
        told: list[Callable[[], None]] = []
        for op in ops:
            path = op.path
            if path.startswith(f"{layout.available}/"):
                told.append(lambda path=path: self._registration(path.rsplit("/", 1)[1]))  # type: ignore[misc]
            elif path.startswith(f"{bindery.memberships}/"):
                told.append(lambda path=path: self._membership(path.rsplit("/", 1)[1]))  # type: ignore[misc]
            elif path.startswith(f"{layout.underreplication_locks}/") and isinstance(op, Create) and not op.sequential:
                told.append(lambda path=path: self._locked(path, owner))  # type: ignore[misc]
            elif path.startswith(f"{layout.underreplication_ledgers}/"):
                told += self._sees_mark(op, owner)
            elif path.startswith(f"{bindery.recovery_closings}/"):
                told += self._sees_note(op, owner)
            elif isinstance(op, Create | Set) and op.data and path.startswith(f"{bindery.recovery_ledgers}/"):
                told.append(lambda op=op: self._record(op))  # type: ignore[misc]
            elif isinstance(op, Create | Set) and op.data and self._is_auditors(path):
                told += self._sees_guarded(path, owner)
        return told

    def _is_auditors(self, path: str) -> bool:
        layout = self.world.layout
        singles = (layout.lost_bookie_delay, *(layout.check_time(kind) for kind in CheckKind))
        return path in singles or path.startswith(f"{BinderyLayout().recovery_cursors}/")

    # --- notes of closed ledgers ------------------------------------------------------------------------------------

    def closed(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """It is closed from now on: with or without auditors, for those to come."""
        note = BinderyLayout().recovery_closing(LedgerId(ledger_id))
        if self.world.tree.znodes.exists(note) is None:
            for fragment, missing in self._lacks(ledger_id, metadata):
                message = f"ledger {ledger_id} was closed without a note, and {fragment.bookie_id} lacks {missing[:5]}"
                self.world.verdict.broken("hole-unnoted", message)

    def _sees_note(self, op: Op, owner: int) -> list[Callable[[], None]]:
        name = op.path.rsplit("/", 1)[1]
        if not isinstance(op, Delete) or len(name) != len(str(ID_MAX)):
            return []  # a note is made, or it is a directory
        ledger_id = LedgerId(int(name))
        if self.world.tree.znodes.exists(self.world.layout.ledger(ledger_id)) is None:
            return []  # who deletes a ledger takes its note along
        return [*self._sees_guarded(op.path, owner), lambda: self._note_removed(ledger_id)]

    def _note_removed(self, ledger_id: LedgerId) -> None:
        metadata = self.world.verdict.ledger(ledger_id).metadata
        if metadata is None:
            return
        if metadata.state is not LedgerState.CLOSED:
            self.world.verdict.broken("hole-unnoted", f"ledger {ledger_id} is not closed, and its note went")
        now = self.world.loop.time()
        for fragment, missing in self._lacks(ledger_id, metadata):
            if self.away_since.get(fragment.bookie_id, now) < now - SEEN_AFTER_S:
                message = f"ledger {ledger_id}: {fragment.bookie_id} is away and lacks {missing[:5]}, and its note went"
                self.world.verdict.broken("hole-unnoted", message)
            self._ask_for(ledger_id, fragment.bookie_id, missing, "hole-unnoted", "its note went")

    def _lacks(self, ledger_id: int, metadata: LedgerMetadata) -> list[tuple[Fragment, list[int]]]:
        """What bookies did not say they stored. One that lost its disk counts as lost, or fills itself up."""
        held, found = self.world.verdict.ledger(ledger_id).held, []
        for fragment in closed_fragments(metadata):
            machine = self._machine(fragment.bookie_id)
            missing = [one for one in fragment.entry_ids if machine.name not in held.get(one, ())]
            if missing and not machine.was_wiped and not machine.is_lost:
                found.append((fragment, missing))
        return found

    # --- leaders ----------------------------------------------------------------------------------------------------

    def _sees_guarded(self, path: str, owner: int) -> list[Callable[[], None]]:
        """Before the write: whoever leads now, not whoever does afterwards."""
        leader = self._leader()
        if leader == owner:
            return []
        message = f"session {owner:x} wrote {path}, and session {leader:x} leads"
        return [lambda: self.world.verdict.broken("two-leaders-wrote", message)]

    def _leader(self) -> int:
        """Session of the lowest vote; 0: nobody."""
        znodes, election = self.world.tree.znodes, self.world.layout.auditor_election
        if znodes.exists(election) is None:
            return 0
        votes = [name for name in znodes.children(election) if name.startswith(VOTE_PREFIX)]
        if not votes:
            return 0
        lowest = min(votes, key=lambda name: int(name[len(VOTE_PREFIX) :]))
        stat = znodes.exists(f"{election}/{lowest}")
        assert stat is not None
        return stat.ephemeral_owner

    # --- bookies ----------------------------------------------------------------------------------------------------

    def _registration(self, name: str) -> None:
        if name == READONLY:
            return
        znodes, layout = self.world.tree.znodes, self.world.layout
        bookie_id = BookieId(name)
        now = self.world.loop.time()
        if any(znodes.exists(layout.bookie(bookie_id, read_only=one)) is not None for one in (False, True)):
            self.registered_since.setdefault(name, now)
            self.away_since.pop(name, None)
        else:
            self.away_since.setdefault(name, now)
            self.registered_since.pop(name, None)

    def _membership(self, name: str) -> None:
        path = BinderyLayout().membership(BookieId(name))
        znodes = self.world.tree.znodes
        intent = json.loads(znodes.get(path).data)["intent"] if znodes.exists(path) is not None else "active"
        self.intents[name] = intent, self.world.loop.time()

    def _is_since(self, intent: str, bookie_id: str, at: float) -> bool:
        said, since = self.intents.get(bookie_id, ("active", 0.0))
        return said == intent and since <= at

    def _machine(self, bookie_id: str) -> BookieMachine:
        return next(bookie for bookie in self.world.bookies if bookie.bookie_id == bookie_id)

    # --- marks and locks --------------------------------------------------------------------------------------------

    def _sees_mark(self, op: Op, owner: int) -> list[Callable[[], None]]:
        ledger_id = self.world.layout.mark_ledger_id(op.path)
        if ledger_id is None:
            return []  # a directory
        if isinstance(op, Create | Set):
            return [*self._sees_guarded(op.path, owner), lambda: self._marked(ledger_id)]
        if isinstance(op, Delete):
            lock = self._locks.get(ledger_id)
            stat = self.world.tree.znodes.exists(self.world.layout.mark_lock(ledger_id))
            if lock is None or stat is None or stat.ephemeral_owner != owner:
                message = f"the mark of ledger {ledger_id} was removed by session {owner:x}"
                return [lambda: self.world.verdict.broken("worked-without-lock", message)]
            return [lambda: self._unmarked(ledger_id, lock)]
        return []

    def _marked(self, ledger_id: LedgerId) -> None:
        self.marks_made += 1
        if self.plan is None or self.plan.kind is not HealingKind.RESTARTS:
            return
        metadata = self.world.verdict.ledger(ledger_id).metadata
        if metadata is not None and not self._lacks(ledger_id, metadata):
            message = f"ledger {ledger_id} was marked, it has all its copies, and no bookie was away for the delay"
            self.world.verdict.broken("copied-needlessly", message)

    def _locked(self, path: str, owner: int) -> None:
        ledger_id = self.world.layout.mark_ledger_id(path)
        if ledger_id is None:
            return
        now = self.world.loop.time()
        metadata = self.world.verdict.ledger(ledger_id).metadata
        fragments = () if metadata is None else tuple(closed_fragments(metadata))
        record = BinderyLayout().recovery_record(ledger_id)
        znodes = self.world.tree.znodes
        reason = json.loads(znodes.get(record).data).get("reason") if znodes.exists(record) is not None else ""
        self._locks[ledger_id] = _Lock(now, fragments, checks_all=reason in CHECKED_ALL_NAMES)
        process = self.world.tree.process_of(owner)
        if process is not None:
            self._taken[process, ledger_id] = now

    def _unmarked(self, ledger_id: LedgerId, lock: _Lock) -> None:
        self.marks_removed += 1
        verdict = self.world.verdict
        metadata = verdict.ledger(ledger_id).metadata
        if metadata is None:
            return
        seen_at = lock.at - SEEN_AFTER_S
        for bookie_id in dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble):
            why = ""
            if self.away_since.get(bookie_id, lock.at) <= seen_at:
                why = "is away"
            elif self._is_since("draining", bookie_id, seen_at):
                why = "drains"
            if why:
                verdict.broken(
                    "mark-removed-too-early", f"ledger {ledger_id} names {bookie_id}, which {why}, and its mark went"
                )
        if lock.checks_all:
            for fragment in lock.fragments:
                self._look_for_hole(ledger_id, metadata, fragment)

    def _look_for_hole(self, ledger_id: LedgerId, metadata: LedgerMetadata, fragment: Fragment) -> None:
        """Entries that were never acknowledged may be there all the same: their bookie is asked."""
        stored = self.world.verdict.ledger(ledger_id).held
        for now in closed_fragments(metadata):
            if (now.segment_first, now.index) != (fragment.segment_first, fragment.index):
                continue
            machine = self._machine(now.bookie_id)
            missing = [one for one in now.entry_ids if machine.name not in stored.get(one, ())]
            self._ask_for(ledger_id, now.bookie_id, missing, "mark-removed-too-early", "its mark went")

    def _ask_for(
        self, ledger_id: LedgerId, bookie_id: BookieId, entry_ids: Sequence[int], invariant: str, what: str
    ) -> None:
        machine = self._machine(bookie_id)
        process = machine.process
        if entry_ids and machine.is_serving and process is not None and not process.is_paused:
            process.spawn(self._ask(machine, ledger_id, entry_ids, invariant, what))

    async def _ask(
        self, machine: BookieMachine, ledger_id: LedgerId, entry_ids: Sequence[int], invariant: str, what: str
    ) -> None:
        for answer, entry_id in zip(
            await machine.read_here([(ledger_id, one) for one in entry_ids]), entry_ids, strict=True
        ):
            if isinstance(answer, int) and not machine.is_in_limbo(ledger_id):
                message = f"ledger {ledger_id}: {machine.name} answers {answer} to entry {entry_id}, and {what}"
                self.world.verdict.broken(invariant, message)

    def _record(self, op: Create | Set) -> None:
        """A ledger is said to be lost although a bookie that may have it fills itself up."""
        record = json.loads(op.data)
        if record.get("state") != "unrecoverable":
            return
        ledger_id = int(op.path.rsplit("/", 1)[1])
        metadata, lock = self.world.verdict.ledger(ledger_id).metadata, self._locks.get(ledger_id)
        if metadata is None or lock is None:
            return
        for bookie_id in dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble):
            machine = self._machine(bookie_id)
            is_there = self.registered_since.get(bookie_id, lock.at) < lock.at
            if is_there and machine.is_in_limbo(ledger_id) and machine.wiped_at < lock.at:
                message = f"ledger {ledger_id} is said to be lost, and {bookie_id} is in limbo"
                self.world.verdict.broken("copied-from-limbo", message)

    # --- copies -----------------------------------------------------------------------------------------------------

    def copying(self, process: Process, ledger_id: LedgerId, bookie_id: BookieId, entry_ids: Sequence[int]) -> None:
        """A worker of `process` sends copies to a bookie."""
        verdict, now = self.world.verdict, self.world.loop.time()
        self.world.trace.add(process.host, "copies", ledger_id=ledger_id, to=bookie_id, entries=list(entry_ids))
        taken_at = self._taken.get((process, ledger_id))
        self._copied[ledger_id, bookie_id] = now
        if taken_at is None:
            verdict.broken("worked-without-lock", f"{process.host} copies entries of ledger {ledger_id}")
            return
        metadata, machine = verdict.ledger(ledger_id).metadata, self._machine(bookie_id)
        if self.plan is not None and self.plan.kind is HealingKind.RESTARTS:
            had = [one for one in entry_ids if machine.name in verdict.ledger(ledger_id).held.get(one, ())]
            message = f"ledger {ledger_id}: {machine.name} is given {had[:5]}, which it has"
            verdict.check(not had, "copied-needlessly", message)
        if metadata is None or not machine.is_in_limbo(ledger_id) or machine.wiped_at > taken_at:
            return
        for fragment in closed_fragments(metadata):
            if fragment.bookie_id == bookie_id and not set(entry_ids).isdisjoint(fragment.entry_ids):
                message = f"ledger {ledger_id}: {process.host} copies to {bookie_id}, which is in limbo"
                verdict.broken("copied-from-limbo", message)

    def changed(self, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Metadata were changed by the transaction that was seen last. What was closed before and names another
        bookie now was changed by a worker."""
        if self.plan is None:
            return
        old = {(fragment.segment_first, fragment.index): fragment for fragment in closed_fragments(before)}
        for fragment in closed_fragments(after):
            was = old.get((fragment.segment_first, fragment.index))
            if was is not None and was.bookie_id != fragment.bookie_id:
                self._replaced(LedgerId(ledger_id), was, fragment)

    def _replaced(self, ledger_id: LedgerId, was: Fragment, fragment: Fragment) -> None:
        verdict, held = self.world.verdict, self.world.verdict.ledger(ledger_id).held
        process = self.world.tree.process_of(self._writer)
        taken_at = None if process is None else self._taken.get((process, ledger_id))
        where = (
            f"ledger {ledger_id}, segment {fragment.segment_first}: {was.bookie_id} gave way to {fragment.bookie_id}"
        )
        new, gone = self._machine(fragment.bookie_id), self._machine(was.bookie_id)
        missing = [one for one in fragment.entry_ids if new.name not in held.get(one, ())]
        if missing:
            verdict.broken("metadata-points-to-hole", f"{where}, which lacks {missing[:5]}")
        if taken_at is None:
            verdict.broken("worked-without-lock", where)
            return
        if self._is_since("draining", was.bookie_id, self.world.loop.time()):
            return
        is_there = self.registered_since.get(was.bookie_id, taken_at) < taken_at
        if is_there and gone.is_in_limbo(ledger_id) and gone.wiped_at < taken_at:
            verdict.broken("copied-from-limbo", f"{where}, although it only fills itself up")
        seen_at = taken_at - SEEN_AFTER_S
        if (
            self._is_since("maintenance", was.bookie_id, seen_at)
            and self.away_since.get(was.bookie_id, taken_at) < seen_at
        ):
            verdict.broken("copied-needlessly", f"{where}, although it was away with leave")
        copied_at = self._copied.get((ledger_id, fragment.bookie_id))
        is_back = copied_at is not None and self.registered_since.get(was.bookie_id, copied_at) < copied_at - BACK_S
        if is_back and self._is_calm and all(gone.name in held.get(one, ()) for one in was.entry_ids):
            verdict.broken("copied-needlessly", f"{where}, although it was back with all its entries")

    @property
    def _is_calm(self) -> bool:
        """Whoever is there can be reached: nothing but absences happens."""
        return self.plan is not None and self.plan.kind is HealingKind.RETURNS

    # --- the end of the run -----------------------------------------------------------------------------------------

    def disk_lost(self, bookie: BookieMachine) -> None:
        self.world.verdict.forget_disk(bookie.name)
        self._whole.clear()

    def what_is_left(self) -> str:
        """What metadata say is still to be healed; empty: nothing."""
        for ledger_id in sorted(self.world.verdict.ledgers):
            path = self.world.layout.mark(LedgerId(ledger_id))
            if self.world.tree.znodes.exists(path) is not None:
                return f"ledger {ledger_id} is marked"
            if self.world.tree.znodes.exists(BinderyLayout().recovery_closing(LedgerId(ledger_id))) is not None:
                return f"ledger {ledger_id} is noted, and not seen to be whole"
        for ledger_id, history in sorted(self.world.verdict.ledgers.items()):
            if history.metadata is None:
                continue
            for bookie_id in dict.fromkeys(b for segment in history.metadata.segments for b in segment.ensemble):
                if bookie_id not in self.registered_since:
                    return f"ledger {ledger_id} names {bookie_id}, which is not registered"
                if self.intents.get(bookie_id, ("", 0.0))[0] in ("draining", "removed"):
                    return f"ledger {ledger_id} names {bookie_id}, which drains"
        return ""

    @property
    def unseen(self) -> Mapping[int, LedgerMetadata]:
        """Ledgers whose copies were not all seen since their metadata last changed."""
        ledgers = self.world.verdict.ledgers
        return {
            ledger_id: metadata
            for ledger_id in sorted(ledgers)
            if (metadata := ledgers[ledger_id].metadata) is not None and self._whole.get(ledger_id) is not metadata
        }

    def is_whole(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """Every copy of it was read."""
        self._whole[ledger_id] = metadata
