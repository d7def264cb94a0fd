"""Check the invariants of recovery for every committed metadata transaction and every replica that a worker stores.

| invariant               | meaning                                                                            |
|-------------------------|------------------------------------------------------------------------------------|
| mark-removed-too-early  | a mark is removed only if no entry is missing that its worker could find missing   |
|                         | after it took the lock                                                             |
| two-leaders-wrote       | only the session of the lowest vote writes the nodes of the leading auditor        |
| metadata-points-to-hole | a bookie is replaced only by one that acknowledged every entry of the fragment     |
|                         | before                                                                             |
| copied-needlessly       | nothing is copied for a bookie that is back with all its entries, that is in       |
|                         | maintenance, or that was not down for the delay                                    |
| copied-from-limbo       | if a bookie in limbo answers "unknown" for an entry, workers do not copy the entry |
|                         | to it, do not replace the bookie, and do not count the entry as lost               |
| worked-without-lock     | copies, replacements and removals of marks come from processes that hold the lock  |
|                         | of the ledger                                                                      |
| hole-unnoted            | an under-replicated ledger is closed only after its closing record is written,     |
|                         | which is deleted only with the ledger, or when every bookie that the metadata      |
|                         | names has all its entries                                                          |
| not-healed              | after all faults no mark and no closing record is left, and each closed ledger has |
|                         | all its copies, on registered bookies                                              |

A worker may rely on the state that it read when it took the lock, or up to `SEEN_AFTER_S` earlier. The next audit
handles later changes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import ID_MAX, BookieId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments
from bindery_metadata.layout.layout import READONLY, VOTE_PREFIX, BinderyLayout, CheckKind
from bindery_metadata.stores.store import Create, Delete, Op, Set
from bindery_recovery.records.reasons import CHECKED_ALL

from bindery_simulation.loop import Process
from bindery_simulation.service.bookie_machine import BookieMachine
from bindery_simulation.service.healing.plan import HealingKind, HealingPlan
from bindery_simulation.service.site import Site

SEEN_AFTER_S: Final = 3.0
"""Time in seconds after which a process that reads again sees a change of the metadata."""
BACK_S: Final = 8.0
"""Maximum time in seconds from the return of a bookie to the end of the copying that replaces it."""
CHECKED_ALL_NAMES: Final = frozenset(str(reason) for reason in CHECKED_ALL)
"""Reasons of recovery records for which a repair reads every entry."""


@dataclass(slots=True)
class _Lock:
    """The state when a lock was taken."""

    at: float
    fragments: tuple[Fragment, ...]
    """Fragments that were closed at that time."""
    checks_all: bool


@dataclass(slots=True)
class HealingVerdict:
    """Collects observations of recovery and checks them.

    `sees(ops, owner)` is called before each transaction of the tree. The functions that it returns are called if the
    transaction succeeds.
    """

    site: Site
    plan: HealingPlan | None
    bookies: Sequence[BookieMachine]
    registered_since: dict[str, float] = field(default_factory=dict)
    away_since: dict[str, float] = field(default_factory=dict)
    intents: dict[str, tuple[str, float]] = field(default_factory=dict)
    """(intent, simulated time at which it was set) of each bookie's membership."""
    marks_made: int = 0
    marks_removed: int = 0
    _locks: dict[int, _Lock] = field(default_factory=dict)
    """State at the time of the last lock of each ledger."""
    _taken: dict[tuple[Process, int], float] = field(default_factory=dict)
    """Time at which a process last took the lock of a ledger, by (process, ledger)."""
    _copied: dict[tuple[int, str], float] = field(default_factory=dict)
    """Time at which replicas were last sent to a bookie, by (ledger, bookie)."""
    _writer: int = 0
    """Session of the current or last transaction."""
    _whole: dict[int, LedgerMetadata] = field(default_factory=dict)
    """Metadata of each ledger with which all its replicas were read."""

    # --- transactions -----------------------------------------------------------------------------------------------

    def sees(self, ops: Sequence[Op], owner: int) -> Sequence[Callable[[], None]]:
        self._writer = owner
        if self.plan is None:
            return ()
        layout, bindery = self.site.layout, BinderyLayout()
        checks: list[Callable[[], None]] = []
        for op in ops:
            path = op.path
            if path.startswith(f"{layout.available}/"):
                checks.append(lambda path=path: self._registration(path.rsplit("/", 1)[1]))  # type: ignore[misc]
            elif path.startswith(f"{bindery.memberships}/"):
                checks.append(lambda path=path: self._membership(path.rsplit("/", 1)[1]))  # type: ignore[misc]
            elif path.startswith(f"{layout.underreplication_locks}/") and isinstance(op, Create) and not op.sequential:
                checks.append(lambda path=path: self._locked(path, owner))  # type: ignore[misc]
            elif path.startswith(f"{layout.underreplication_ledgers}/"):
                checks += self._sees_mark(op, owner)
            elif path.startswith(f"{bindery.recovery_closings}/"):
                checks += self._sees_record(op, owner)
            elif isinstance(op, Create | Set) and op.data and path.startswith(f"{bindery.recovery_ledgers}/"):
                checks.append(lambda op=op: self._record(op))  # type: ignore[misc]
            elif isinstance(op, Create | Set) and op.data and self._is_auditors(path):
                checks += self._sees_guarded(path, owner)
        return checks

    def _is_auditors(self, path: str) -> bool:
        layout = self.site.layout
        singles = (layout.lost_bookie_delay, *(layout.check_time(kind) for kind in CheckKind))
        return path in singles or path.startswith(f"{BinderyLayout().recovery_cursors}/")

    # --- closing records --------------------------------------------------------------------------------------------

    def closed(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """Check that an under-replicated ledger has a closing record when it is closed, even without auditors."""
        record = BinderyLayout().recovery_closing(LedgerId(ledger_id))
        if self.site.tree.znodes.exists(record) is None:
            for fragment, missing in self._unacknowledged(ledger_id, metadata):
                message = f"ledger {ledger_id}: {fragment.bookie_id} has no entries {missing[:5]}, no closing record"
                self.site.verdict.broken("hole-unnoted", message)

    def _sees_record(self, op: Op, owner: int) -> list[Callable[[], None]]:
        name = op.path.rsplit("/", 1)[1]
        if not isinstance(op, Delete) or len(name) != len(str(ID_MAX)):
            return []  # a record is created, or the path is that of a directory
        ledger_id = LedgerId(int(name))
        if self.site.tree.znodes.exists(self.site.layout.ledger(ledger_id)) is None:
            return []  # the record is deleted with its ledger
        return [*self._sees_guarded(op.path, owner), lambda: self._record_removed(ledger_id)]

    def _record_removed(self, ledger_id: LedgerId) -> None:
        metadata = self.site.verdict.ledger(ledger_id).metadata
        if metadata is None:
            return
        if metadata.state is not LedgerState.CLOSED:
            self.site.verdict.broken(
                "hole-unnoted", f"ledger {ledger_id} is not closed, and its closing record was deleted"
            )
        now = self.site.loop.time()
        for fragment, missing in self._unacknowledged(ledger_id, metadata):
            if self.away_since.get(fragment.bookie_id, now) < now - SEEN_AFTER_S:
                message = f"{fragment.bookie_id} is down without {missing[:5]}, its closing record was deleted"
                self.site.verdict.broken("hole-unnoted", f"ledger {ledger_id}: {message}")
            self._check_entries(
                ledger_id, fragment.bookie_id, missing, "hole-unnoted", "its closing record was deleted"
            )

    def _unacknowledged(self, ledger_id: int, metadata: LedgerMetadata) -> list[tuple[Fragment, list[int]]]:
        """Return (fragment, entries that its bookie did not acknowledge) of each fragment with such entries.

        Bookies that lost their disk are left out: they are lost permanently, or they copy their entries back.
        """
        held, found = self.site.verdict.ledger(ledger_id).held, []
        for fragment in closed_fragments(metadata):
            machine = self._machine(fragment.bookie_id)
            missing = [one for one in fragment.entry_ids if machine.name not in held.get(one, ())]
            if missing and not machine.was_wiped and not machine.is_lost:
                found.append((fragment, missing))
        return found

    # --- leaders ----------------------------------------------------------------------------------------------------

    def _sees_guarded(self, path: str, owner: int) -> list[Callable[[], None]]:
        """Check that the writing session leads. Called before the write, because the write may change the leader."""
        leader = self._leader()
        if leader == owner:
            return []
        message = f"session {owner:x} wrote {path}, and session {leader:x} leads"
        return [lambda: self.site.verdict.broken("two-leaders-wrote", message)]

    def _leader(self) -> int:
        """Return the session of the lowest vote; 0: there is no vote."""
        znodes, election = self.site.tree.znodes, self.site.layout.auditor_election
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
        znodes, layout = self.site.tree.znodes, self.site.layout
        bookie_id = BookieId(name)
        now = self.site.loop.time()
        if any(znodes.exists(layout.bookie(bookie_id, read_only=one)) is not None for one in (False, True)):
            self.registered_since.setdefault(name, now)
            self.away_since.pop(name, None)
        else:
            self.away_since.setdefault(name, now)
            self.registered_since.pop(name, None)

    def _membership(self, name: str) -> None:
        path = BinderyLayout().membership(BookieId(name))
        znodes = self.site.tree.znodes
        intent = json.loads(znodes.get(path).data)["intent"] if znodes.exists(path) is not None else "active"
        self.intents[name] = intent, self.site.loop.time()

    def _is_since(self, intent: str, bookie_id: str, at: float) -> bool:
        said, since = self.intents.get(bookie_id, ("active", 0.0))
        return said == intent and since <= at

    def _machine(self, bookie_id: str) -> BookieMachine:
        return next(bookie for bookie in self.bookies if bookie.bookie_id == bookie_id)

    # --- marks and locks --------------------------------------------------------------------------------------------

    def _sees_mark(self, op: Op, owner: int) -> list[Callable[[], None]]:
        ledger_id = self.site.layout.mark_ledger_id(op.path)
        if ledger_id is None:
            return []  # a directory
        if isinstance(op, Create | Set):
            return [*self._sees_guarded(op.path, owner), lambda: self._marked(ledger_id)]
        if isinstance(op, Delete):
            lock = self._locks.get(ledger_id)
            stat = self.site.tree.znodes.exists(self.site.layout.mark_lock(ledger_id))
            if lock is None or stat is None or stat.ephemeral_owner != owner:
                message = f"the mark of ledger {ledger_id} was removed by session {owner:x}"
                return [lambda: self.site.verdict.broken("worked-without-lock", message)]
            return [lambda: self._unmarked(ledger_id, lock)]
        return []

    def _marked(self, ledger_id: LedgerId) -> None:
        self.marks_made += 1
        if self.plan is None or self.plan.kind is not HealingKind.RESTARTS:
            return
        metadata = self.site.verdict.ledger(ledger_id).metadata
        if metadata is not None and not self._unacknowledged(ledger_id, metadata):
            message = f"ledger {ledger_id} was marked, it has all its copies, and no bookie was down for the delay"
            self.site.verdict.broken("copied-needlessly", message)

    def _locked(self, path: str, owner: int) -> None:
        ledger_id = self.site.layout.mark_ledger_id(path)
        if ledger_id is None:
            return
        now = self.site.loop.time()
        metadata = self.site.verdict.ledger(ledger_id).metadata
        fragments = () if metadata is None else tuple(closed_fragments(metadata))
        record = BinderyLayout().recovery_record(ledger_id)
        znodes = self.site.tree.znodes
        reason = json.loads(znodes.get(record).data).get("reason") if znodes.exists(record) is not None else ""
        self._locks[ledger_id] = _Lock(now, fragments, checks_all=reason in CHECKED_ALL_NAMES)
        process = self.site.tree.process_of(owner)
        if process is not None:
            self._taken[process, ledger_id] = now

    def _unmarked(self, ledger_id: LedgerId, lock: _Lock) -> None:
        self.marks_removed += 1
        verdict = self.site.verdict
        metadata = verdict.ledger(ledger_id).metadata
        if metadata is None:
            return
        seen_at = lock.at - SEEN_AFTER_S
        for bookie_id in dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble):
            why = ""
            if self.away_since.get(bookie_id, lock.at) <= seen_at:
                why = "is down"
            elif self._is_since("draining", bookie_id, seen_at):
                why = "is draining"
            if why:
                verdict.broken(
                    "mark-removed-too-early",
                    f"ledger {ledger_id} names {bookie_id}, which {why}, and its mark was removed",
                )
        if lock.checks_all:
            for fragment in lock.fragments:
                self._check_fragment(ledger_id, metadata, fragment)

    def _check_fragment(self, ledger_id: LedgerId, metadata: LedgerMetadata, fragment: Fragment) -> None:
        """Read unacknowledged entries from their bookie, which may have stored them without an acknowledgement."""
        stored = self.site.verdict.ledger(ledger_id).held
        for now in closed_fragments(metadata):
            if (now.segment_first, now.index) != (fragment.segment_first, fragment.index):
                continue
            machine = self._machine(now.bookie_id)
            missing = [one for one in now.entry_ids if machine.name not in stored.get(one, ())]
            self._check_entries(ledger_id, now.bookie_id, missing, "mark-removed-too-early", "its mark was removed")

    def _check_entries(
        self, ledger_id: LedgerId, bookie_id: BookieId, entry_ids: Sequence[int], invariant: str, what: str
    ) -> None:
        machine = self._machine(bookie_id)
        process = machine.process
        if entry_ids and machine.is_serving and process is not None and not process.is_paused:
            process.spawn(self._check_answers(machine, ledger_id, entry_ids, invariant, what))

    async def _check_answers(
        self, machine: BookieMachine, ledger_id: LedgerId, entry_ids: Sequence[int], invariant: str, what: str
    ) -> None:
        for answer, entry_id in zip(
            await machine.read_here([(ledger_id, one) for one in entry_ids]), entry_ids, strict=True
        ):
            if isinstance(answer, int) and not machine.is_in_limbo(ledger_id):
                message = f"ledger {ledger_id}: {machine.name} answers {answer} to entry {entry_id}, and {what}"
                self.site.verdict.broken(invariant, message)

    def _record(self, op: Create | Set) -> None:
        """Check the record of an unrecoverable ledger: no bookie of the ledger may be in limbo."""
        record = json.loads(op.data)
        if record.get("state") != "unrecoverable":
            return
        ledger_id = int(op.path.rsplit("/", 1)[1])
        metadata, lock = self.site.verdict.ledger(ledger_id).metadata, self._locks.get(ledger_id)
        if metadata is None or lock is None:
            return
        for bookie_id in dict.fromkeys(b for segment in metadata.segments for b in segment.ensemble):
            machine = self._machine(bookie_id)
            is_there = self.registered_since.get(bookie_id, lock.at) < lock.at
            if is_there and machine.is_in_limbo(ledger_id) and machine.wiped_at < lock.at:
                message = f"ledger {ledger_id} is recorded as unrecoverable, and {bookie_id} is in limbo"
                self.site.verdict.broken("copied-from-limbo", message)

    # --- copies -----------------------------------------------------------------------------------------------------

    def copying(self, process: Process, ledger_id: LedgerId, bookie_id: BookieId, entry_ids: Sequence[int]) -> None:
        """Check the copies that a worker of `process` sends to a bookie."""
        verdict, now = self.site.verdict, self.site.loop.time()
        self.site.trace.add(process.host, "copies", ledger_id=ledger_id, to=bookie_id, entries=list(entry_ids))
        taken_at = self._taken.get((process, ledger_id))
        self._copied[ledger_id, bookie_id] = now
        if taken_at is None:
            verdict.broken("worked-without-lock", f"{process.host} copies entries of ledger {ledger_id}")
            return
        metadata, machine = verdict.ledger(ledger_id).metadata, self._machine(bookie_id)
        if self.plan is not None and self.plan.kind is HealingKind.RESTARTS:
            had = [one for one in entry_ids if machine.name in verdict.ledger(ledger_id).held.get(one, ())]
            message = f"ledger {ledger_id}: {machine.name} gets copies of {had[:5]}, which it has"
            verdict.check(not had, "copied-needlessly", message)
        if metadata is None or not machine.is_in_limbo(ledger_id) or machine.wiped_at > taken_at:
            return
        for fragment in closed_fragments(metadata):
            if fragment.bookie_id == bookie_id and not set(entry_ids).isdisjoint(fragment.entry_ids):
                message = f"ledger {ledger_id}: {process.host} copies to {bookie_id}, which is in limbo"
                verdict.broken("copied-from-limbo", message)

    def changed(self, ledger_id: int, before: LedgerMetadata, after: LedgerMetadata) -> None:
        """Check a change of metadata by the last transaction. Only workers replace bookies of closed segments."""
        if self.plan is None:
            return
        old = {(fragment.segment_first, fragment.index): fragment for fragment in closed_fragments(before)}
        for fragment in closed_fragments(after):
            was = old.get((fragment.segment_first, fragment.index))
            if was is not None and was.bookie_id != fragment.bookie_id:
                self._replaced(LedgerId(ledger_id), was, fragment)

    def _replaced(self, ledger_id: LedgerId, was: Fragment, fragment: Fragment) -> None:
        verdict, held = self.site.verdict, self.site.verdict.ledger(ledger_id).held
        process = self.site.tree.process_of(self._writer)
        taken_at = None if process is None else self._taken.get((process, ledger_id))
        replaced = f"{was.bookie_id} was replaced by {fragment.bookie_id}"
        where = f"ledger {ledger_id}, segment {fragment.segment_first}: {replaced}"
        new, gone = self._machine(fragment.bookie_id), self._machine(was.bookie_id)
        missing = [one for one in fragment.entry_ids if new.name not in held.get(one, ())]
        if missing:
            verdict.broken("metadata-points-to-hole", f"{where}, which has no entries {missing[:5]}")
        if taken_at is None:
            verdict.broken("worked-without-lock", where)
            return
        if self._is_since("draining", was.bookie_id, self.site.loop.time()):
            return
        is_there = self.registered_since.get(was.bookie_id, taken_at) < taken_at
        if is_there and gone.is_in_limbo(ledger_id) and gone.wiped_at < taken_at:
            verdict.broken("copied-from-limbo", f"{where}, although it was in limbo")
        seen_at = taken_at - SEEN_AFTER_S
        if (
            self._is_since("maintenance", was.bookie_id, seen_at)
            and self.away_since.get(was.bookie_id, taken_at) < seen_at
        ):
            verdict.broken("copied-needlessly", f"{where}, although it was in maintenance")
        copied_at = self._copied.get((ledger_id, fragment.bookie_id))
        is_back = copied_at is not None and self.registered_since.get(was.bookie_id, copied_at) < copied_at - BACK_S
        if is_back and self._is_calm and all(gone.name in held.get(one, ()) for one in was.entry_ids):
            verdict.broken("copied-needlessly", f"{where}, although it was back with all its entries")

    @property
    def _is_calm(self) -> bool:
        """Whether every registered bookie can be reached, because the only faults are stopped bookies."""
        return self.plan is not None and self.plan.kind is HealingKind.RETURNS

    # --- the end of the run -----------------------------------------------------------------------------------------

    def disk_lost(self, bookie: str) -> None:
        self.site.verdict.forget_disk(bookie)
        self._whole.clear()

    def unrepaired(self) -> str:
        """Return a description of a ledger that is not repaired according to the metadata; empty: there is none."""
        for ledger_id in sorted(self.site.verdict.ledgers):
            path = self.site.layout.mark(LedgerId(ledger_id))
            if self.site.tree.znodes.exists(path) is not None:
                return f"ledger {ledger_id} is marked"
            if self.site.tree.znodes.exists(BinderyLayout().recovery_closing(LedgerId(ledger_id))) is not None:
                return f"ledger {ledger_id} has a closing record"
        for ledger_id, history in sorted(self.site.verdict.ledgers.items()):
            if history.metadata is None:
                continue
            for bookie_id in dict.fromkeys(b for segment in history.metadata.segments for b in segment.ensemble):
                if bookie_id not in self.registered_since:
                    return f"ledger {ledger_id} names {bookie_id}, which is not registered"
                if self.intents.get(bookie_id, ("", 0.0))[0] in ("draining", "removed"):
                    return f"ledger {ledger_id} names {bookie_id}, which is draining"
        return ""

    @property
    def unread(self) -> Mapping[int, LedgerMetadata]:
        """Ledgers whose replicas have not all been read since the metadata last changed."""
        ledgers = self.site.verdict.ledgers
        return {
            ledger_id: metadata
            for ledger_id in sorted(ledgers)
            if (metadata := ledgers[ledger_id].metadata) is not None and self._whole.get(ledger_id) is not metadata
        }

    def copies_read(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """Record that every replica of a ledger was read."""
        self._whole[ledger_id] = metadata
