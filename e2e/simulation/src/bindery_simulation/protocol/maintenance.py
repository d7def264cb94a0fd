"""Maintain the ledger: fence and delete it, and restore its write quorum if it is under-replicated."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bindery_core.entry import pack, unpack
from bindery_core.errors import BinderyError, DigestMismatch, NoSuchLedger, TryAgain
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger import ledger_plans
from bindery_core.ledger.ledger_actions import Done, Fail, SendAdds, SendReads
from bindery_core.ledger.ledger_reader import LedgerRead
from bindery_core.placement import replication_plan
from bindery_core.placement.replication_plan import Fragment
from bindery_core.wire.messages import AddResponse, ReadResponse, Status

from bindery_simulation.protocol.clients import Client, Recoverer
from bindery_simulation.protocol.ledger import LEDGER_ID
from bindery_simulation.protocol.world import DIGESTER, World

FENCE_TIMEOUT_S = 3.0
"""Maximum time in seconds that a deletion waits for answers to its fences."""
STEP_TIMEOUT_S = 8.0
"""Maximum time in seconds of one step of a replication."""


class Deleter(Client):
    """A client that deletes the ledger.

    The client tries to fence all bookies that may accept adds. It then removes the metadata node if the node still has
    the version that was read.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.is_done = False
        self._version = -1
        self._waiting: set[BookieId] = set()
        self._has_fenced = True
        self._deadline: float | None = None

    def start(self) -> None:
        self.world.update(self, (lambda metadata: None, self._found, self._failed))

    def _failed(self, error: BinderyError) -> None:
        self.is_done = isinstance(error, NoSuchLedger)
        self.failure = None if self.is_done else error

    def _found(self, metadata: LedgerMetadata) -> None:
        self.epoch += 1
        self._version = self.world.ledger.version
        self._has_fenced = True
        targets = ledger_plans.fence_targets(metadata)
        self._waiting = set(targets)
        self._deadline = self.world.now + FENCE_TIMEOUT_S
        for bookie_id in targets:
            self.world.send_reads(self, SendReads(bookie_id, (-1,), fence=True))
        self._delete_when_fenced()

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        if answers[0].txn_id != self.epoch:
            return
        if answers[0].status not in (Status.OK, Status.NO_ENTRY):
            self._has_fenced = False
        self._waiting.discard(bookie_id)
        self._delete_when_fenced()

    def bookie_failed(self, bookie_id: BookieId) -> None:
        if bookie_id in self._waiting:
            self._has_fenced = False
            self._waiting.discard(bookie_id)
            self._delete_when_fenced()

    def _delete_when_fenced(self) -> None:
        if not self._waiting and self._deadline is not None:
            self._deadline = None
            self.world.in_flight.append((self.meta_delete, self, None, None, self._version))

    def meta_delete(self, message: tuple[Any, ...]) -> None:
        if self.is_gone:
            return
        if self.world.ledger.delete(self._version, has_fenced=self._has_fenced):
            self.is_done = True
            self.world.count("deletes")
        else:
            self.start()

    def next_deadline(self) -> float | None:
        return self._deadline

    def tick(self) -> None:
        if self._deadline is not None and self._deadline <= self.world.now:
            self._has_fenced = False
            self._waiting.clear()
            self._delete_when_fenced()

    def describe(self) -> str:
        return f"unfenced={len(self._waiting)}"


class Replicator(Client):
    """A client that restores the write quorum.

    In each round it reads the version of the mark, surveys all closed fragments, and repairs one fragment. If no entry
    is missing, it starts the recovery of an open ledger, or removes the mark of a closed ledger.
    If a bookie answers, its missing entries are copied to it. If a bookie does not answer, it is replaced.
    """

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.is_done = False
        self.recoverer: Recoverer | None = None
        self._mark: int | None = None
        self._deadline: float | None = None
        self._metadata: LedgerMetadata | None = None
        self._fragments: list[Fragment] = []
        self._unseen: set[tuple[BookieId, int]] = set()  # (bookie, entry): survey answers awaited
        self._bad: dict[BookieId, bool] = {}  # bookie with missing entries -> whether it answers
        self._missing: set[tuple[BookieId, int]] = set()
        self._fragment: Fragment | None = None  # being repaired
        self._target: BookieId | None = None
        self._read: LedgerRead | None = None
        self._to_store: set[int] = set()
        self._is_surveying = False

    @property
    def is_busy(self) -> bool:
        return not self.is_gone and not self.is_done and self.failure is None

    def start(self) -> None:
        """Start a round with a read of the metadata. Answers to earlier rounds are ignored."""
        self.epoch += 1
        self._read = None
        self._fragment = self._target = None
        self._unseen.clear()
        self._to_store.clear()
        self._is_surveying = False
        self._deadline = self.world.now + STEP_TIMEOUT_S
        self._mark = self.world.ledger.mark
        if self._mark is None:
            self._end()
            return
        epoch = self.epoch
        self.world.update(
            self,
            (
                lambda metadata: None,
                partial(self._in_round, epoch, self._found),
                partial(self._in_round, epoch, self._failed),
            ),
        )

    def _in_round(self, epoch: int, call: Callable[[Any], None], argument: Any) -> None:
        """Handle an answer of the metadata, unless a later round has begun or the work is done."""
        if epoch == self.epoch and self.is_busy:
            call(argument)

    def _end(self, error: BinderyError | None = None) -> None:
        self.is_done = error is None
        self.failure = error
        self._deadline = None
        self._read = None
        self._unseen.clear()
        self._to_store.clear()
        if error is not None:
            self.world.count("replications failed")

    def _failed(self, error: BinderyError) -> None:
        self._end(None if isinstance(error, NoSuchLedger) else error)

    def _found(self, metadata: LedgerMetadata) -> None:
        self._metadata = metadata
        self._fragments = replication_plan.closed_fragments(metadata)
        if metadata.state is not LedgerState.CLOSED:
            self.world.count("replication of open ledgers" if self._fragments else "replication waits for recovery")
        self._bad.clear()
        self._missing.clear()
        self._unseen = {
            (fragment.bookie_id, entry_id) for fragment in self._fragments for entry_id in fragment.entry_ids
        }
        self._is_surveying = True
        self._deadline = self.world.now + STEP_TIMEOUT_S
        for fragment in self._fragments:
            if fragment.entry_ids:
                self.world.send_reads(self, SendReads(fragment.bookie_id, fragment.entry_ids))
        self._repair_after_survey()

    # -- survey ----------------------------------------------------------------------------------------------------

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        if self._read is not None:
            self._act(self._read.receive_many(bookie_id, answers, now=self.world.now))
            return
        for answer in answers:
            if answer.txn_id != self.epoch or (bookie_id, answer.entry_id) not in self._unseen:
                continue
            self._unseen.discard((bookie_id, answer.entry_id))
            if answer.status == Status.OK:
                try:
                    unpack(DIGESTER, answer.body or b"", ledger_id=LEDGER_ID, entry_id=answer.entry_id)
                    continue
                except DigestMismatch:
                    pass
            self._bad.setdefault(bookie_id, True)
            self._missing.add((bookie_id, answer.entry_id))
            self._repair_after_survey()
            return
        self._repair_after_survey()

    def _give_up_on(self, bookie_ids: set[BookieId]) -> None:
        for seen in [seen for seen in self._unseen if seen[0] in bookie_ids]:
            self._unseen.discard(seen)
            self._missing.add(seen)
        for bookie_id in sorted(bookie_ids):
            self._bad[bookie_id] = False
        self._repair_after_survey()

    def _repair_after_survey(self) -> None:
        if self._unseen or not self._is_surveying:
            return
        self._is_surveying = False
        for fragment in self._fragments:
            if any((fragment.bookie_id, entry_id) in self._missing for entry_id in fragment.entry_ids):
                self._repair(fragment)
                return
        if self._metadata is not None and self._metadata.state is not LedgerState.CLOSED:
            self._recover()
            return
        self._deadline = self.world.now + STEP_TIMEOUT_S
        self.world.in_flight.append((self.meta_remove_mark, self, None, self.epoch, None))

    def _recover(self) -> None:
        """Recover the open ledger, so that a later replication can survey its last fragments."""
        self.recoverer = Recoverer(self.world, f"{self.name}'s", entries_in_flight_max=4)
        self.recoverer.start()
        self._end(TryAgain("the ledger is open: it is recovered first"))

    def meta_remove_mark(self, message: tuple[Any, ...]) -> None:
        if message[3] != self.epoch or self._mark is None or not self.is_busy:
            return
        if self.world.ledger.remove_mark(self._mark):
            self.world.count("marks removed")
            self.world.note(f"{self.name} removes the mark")
            for bookie in self.world.bookies.values():
                if self._metadata is not None and any(bookie.bookie_id in s.ensemble for s in self._metadata.segments):
                    bookie.is_limbo = False  # the bookie has all its entries again, and the ledger is closed
            self._end()
        else:
            self.start()

    # -- repair ---------------------------------------------------------------------------------------------------

    def _repair(self, fragment: Fragment) -> None:
        assert self._metadata is not None
        self._fragment = fragment
        if self._bad.get(fragment.bookie_id, False):
            self._target = fragment.bookie_id
        else:
            segment = self._metadata.segment_of(fragment.entry_ids[0])  # type: ignore[arg-type]
            try:
                chosen = self.world.choose(segment.ensemble, {fragment.index: fragment.bookie_id})
            except BinderyError as error:
                self._end(error)
                return
            self._target = chosen[fragment.index]
        self.world.note(f"{self.name} copies {list(fragment.entry_ids)} of {fragment.bookie_id} to {self._target}")
        self.copy()

    def copy(self) -> None:
        """Read the entries of the fragment from other bookies."""
        assert self._fragment is not None
        assert self._metadata is not None
        fragment = self._fragment
        self._read = LedgerRead(
            LedgerId(LEDGER_ID),
            self._metadata,
            entry_ids=range(fragment.entry_ids[0], fragment.entry_ids[-1] + 1),
            digester=DIGESTER,
            avoid=(fragment.bookie_id,),
        )
        self._act(self._read.start(now=self.world.now))

    def _act(self, actions: Sequence[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is SendReads:
                self.world.send_reads(self, action)
            elif kind is Fail:
                self._end(action.error)
            elif kind is Done:
                self._store()

    def _store(self) -> None:
        assert self._read is not None
        assert self._fragment is not None
        assert self._target is not None
        wanted = set(self._fragment.entry_ids)
        entries = [entry for entry in self._read.take_entries() if entry.entry_id in wanted]
        self._read = None
        frames = []
        for entry in entries:
            self.world.ledger.was_read(entry, self.name)
            frames.append(
                pack(
                    DIGESTER,
                    ledger_id=LEDGER_ID,
                    entry_id=entry.entry_id,
                    lac=entry.entry_id - 1,
                    length=entry.length,
                    payload=entry.payload,
                )
            )
        ids = [entry.entry_id for entry in entries]
        self._to_store = set(ids)
        self._deadline = self.world.now + STEP_TIMEOUT_S
        self.world.count("fragments copied")
        self.world.send_adds(self, SendAdds(self._target, ids, frames, recovery=True))

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        if bookie_id != self._target or not self._to_store:
            return
        for answer in answers:
            if answer.status != Status.OK:
                self._end(TryAgain("a copy was refused"))
                return
            self._to_store.discard(answer.entry_id)
        if not self._to_store:
            self.publish()

    def publish(self) -> None:
        """Replace the bookie in the metadata after all copies are stored."""
        fragment, target = self._fragment, self._target
        assert fragment is not None
        assert target is not None
        if target == fragment.bookie_id:
            self.start()
            return
        plan = partial(
            replication_plan.plan_replacement,
            segment_first=fragment.segment_first,
            replacements={fragment.index: (fragment.bookie_id, target)},
        )
        self.world.count("fragments replaced")
        again = partial(self._in_round, self.epoch, lambda metadata: self.start())
        self.world.update(self, (plan, again, partial(self._in_round, self.epoch, self._failed)))

    # -- failures and time -----------------------------------------------------------------------------------------

    def bookie_failed(self, bookie_id: BookieId) -> None:
        if self._read is not None:
            self._act(self._read.bookie_failed(bookie_id, "connection lost", now=self.world.now))
        elif self._to_store:
            if bookie_id == self._target:
                self._end(TryAgain("connection lost while copying"))
        elif any(seen[0] == bookie_id for seen in self._unseen):
            self._give_up_on({bookie_id})

    def next_deadline(self) -> float | None:
        if self._read is not None:
            return self._read.next_deadline()
        return self._deadline

    def tick(self) -> None:
        if self._read is not None:
            self._act(self._read.tick(now=self.world.now))
        elif self._deadline is not None and self._deadline <= self.world.now:
            if self._unseen:
                self._give_up_on({bookie_id for bookie_id, _ in self._unseen})
            else:
                self._end(TryAgain("a step took too long"))

    def describe(self) -> str:
        return f"unseen={len(self._unseen)} to store={len(self._to_store)}"
