"""Read the ledger without recovery: confirmed entries, then new entries by long polls, with metadata changes."""

from collections.abc import Sequence
from typing import Any

from bindery_core.entry import unpack
from bindery_core.errors import BinderyError, DigestMismatch, NoSuchEntry
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId
from bindery_core.ledger.ledger_actions import Done, Fail, SendReads
from bindery_core.ledger.ledger_reader import LacRead, LedgerRead, long_poll_targets
from bindery_core.wire.messages import ReadLacResponse, ReadResponse, Status

from bindery_simulation.protocol.clients import Client
from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import LEDGER_ID
from bindery_simulation.protocol.world import DIGESTER, World

LAC_TIMEOUT_S = 5.0
"""Maximum time in seconds of one LAC read."""
POLL_TIMEOUT_S = 5.0
"""Maximum time in seconds of one long poll."""


class Reader(Client):
    """A client that reads in rounds: the metadata, the LAC, the entries not read yet, then long polls.

    It ends after it has read a closed ledger, or after `rounds` rounds.
    """

    def __init__(self, world: World, name: str, *, rounds: int) -> None:
        super().__init__(world, name)
        self.rounds = rounds
        self.next_entry_id = 0
        self.lac = -1
        self._metadata: LedgerMetadata | None = None
        self._version = -1
        self._lac_expected = -1
        self._lac_read: LacRead | None = None
        self._read: LedgerRead | None = None
        self._polled: list[BookieId] = []
        self._deadline: float | None = None
        world.count("readers")

    def start(self) -> None:
        """Start the next round, if there is one."""
        self.epoch += 1
        self._lac_read = self._read = None
        self._polled = []
        self._deadline = None
        if self.rounds > 0:
            self.rounds -= 1
            self.world.update(self, (lambda metadata: None, self._opened, self._failed))

    def _failed(self, error: BinderyError) -> None:
        self.failure = error
        self.rounds = 0

    def _opened(self, metadata: LedgerMetadata) -> None:
        self._metadata, self._version = metadata, self.world.ledger.version
        if metadata.state is LedgerState.CLOSED:
            self.rounds = 0
            self._saw_lac(metadata.last_entry_id)
            self._read_entries()
            return
        self._lac_expected = self.world.ledger.lac_to_be_found()
        self._lac_read = LacRead(LEDGER_ID, metadata, digester=DIGESTER)
        self._deadline = self.world.now + LAC_TIMEOUT_S
        for bookie_id in self._lac_read.targets:
            self.world.post((self.world.to_read_lac, self, bookie_id, self.epoch, None))

    def _saw_lac(self, lac: int) -> None:
        if lac > self.lac:
            self.world.ledger.saw_lac(lac, self.name)
            self.lac = lac
            self.world.count("lacs learned")

    def receive_lac(self, bookie_id: BookieId, answer: ReadLacResponse) -> None:
        if self._lac_read is not None and answer.txn_id == self.epoch:
            self._lac_read.receive(bookie_id, answer)
            self._end_lac_read()

    def _end_lac_read(self) -> None:
        found = self._lac_read
        assert found is not None
        if found.result is not None or found.error is not None:
            self._lac_read = None
            self._deadline = None
            if found.result is not None:
                self.world.ledger.covered_lac(
                    found.result, self.name, version=self._version, at_least=self._lac_expected
                )
            self._saw_lac(found.best)
            self._read_entries()

    # -- entries ---------------------------------------------------------------------------------------------------

    def _read_entries(self) -> None:
        assert self._metadata is not None
        if self.lac < self.next_entry_id:
            self._poll()
            return
        entry_ids = range(self.next_entry_id, self.lac + 1)
        self._read = LedgerRead(LEDGER_ID, self._metadata, entry_ids=entry_ids, digester=DIGESTER)
        self._act(self._read.start(now=self.world.now))

    def _act(self, actions: Sequence[Any]) -> None:
        for action in actions:
            kind = type(action)
            if kind is SendReads:
                self.world.send_reads(self, action)
            elif kind is Done:
                assert self._read is not None
                entries = self._read.take_entries()
                for entry in entries:
                    self.world.ledger.was_read(entry, self.name)
                self.next_entry_id += len(entries)
                self.world.count("reads")
                self._saw_lac(self._read.max_lac)
                self._read = None
                self._poll()
            elif kind is Fail:
                self._read = None
                self._check_failed_read(action.error)
                self.start()

    def _check_failed_read(self, error: BinderyError) -> None:
        """Check a failed read. If the metadata is unchanged, every entry up to the LAC must exist."""
        ledger = self.world.ledger
        if isinstance(error, NoSuchEntry) and ledger.version == self._version and not ledger.is_deleted:
            raise Violation(Invariant.READABLE, f"{self.name} gets {error}, below lac {self.lac}")
        self.world.count("reads failed")

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        if self._read is not None:
            self._act(self._read.receive_many(bookie_id, answers, now=self.world.now))

    # -- tailing ---------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        assert self._metadata is not None
        if self._metadata.state is LedgerState.CLOSED or self.rounds <= 0:
            return
        targets = long_poll_targets(self._metadata, entry_id=self.lac + 1, avoid=self._polled)
        if targets[0] in self._polled:
            self.start()
            return
        self._polled.append(targets[0])
        self._deadline = self.world.now + POLL_TIMEOUT_S
        self.world.count("long polls")
        self.world.post((self.world.to_poll, self, targets[0], self.lac, self.epoch))

    def receive_poll(self, bookie_id: BookieId, answer: ReadResponse) -> None:
        if (
            answer.txn_id != self.epoch
            or not self._polled
            or bookie_id != self._polled[-1]
            or self._deadline is None
            or self._read is not None
        ):
            return
        self._deadline = None
        previous = self.lac
        if answer.max_lac is not None:
            self._saw_lac(answer.max_lac)
        if answer.status == Status.OK and answer.body is not None:
            try:
                entry = unpack(DIGESTER, answer.body, ledger_id=LEDGER_ID, entry_id=answer.entry_id)
            except DigestMismatch:
                self._poll()
                return
            self.world.ledger.was_read(entry, self.name)
            self.world.count("long polls with an entry")
            if entry.entry_id == previous + 1 == self.next_entry_id:
                self.next_entry_id += 1
            self._polled = []
        if self.lac >= self.next_entry_id:
            self._read_entries()
        else:
            self._poll()

    # -- failures and time -----------------------------------------------------------------------------------------

    def bookie_failed(self, bookie_id: BookieId) -> None:
        if self._lac_read is not None:
            self._lac_read.bookie_failed(bookie_id, "connection lost")
            self._end_lac_read()
        elif self._read is not None:
            self._act(self._read.bookie_failed(bookie_id, "connection lost", now=self.world.now))
        elif self._deadline is not None and self._polled and self._polled[-1] == bookie_id:
            self._deadline = None
            self._poll()

    def next_deadline(self) -> float | None:
        return self._read.next_deadline() if self._read is not None else self._deadline

    def tick(self) -> None:
        if self._read is not None:
            self._act(self._read.tick(now=self.world.now))
        elif self._deadline is not None and self._deadline <= self.world.now:
            self._deadline = None
            if self._lac_read is not None:
                for bookie_id in self._lac_read.targets:
                    self._lac_read.bookie_failed(bookie_id, "no answer in time")
                found, self._lac_read = self._lac_read, None
                self._saw_lac(found.best)
                self._read_entries()
            else:
                self._poll()

    def describe(self) -> str:
        return f"lac={self.lac} next={self.next_entry_id}"
