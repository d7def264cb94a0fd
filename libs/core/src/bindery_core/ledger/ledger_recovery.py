"""LedgerRecovery: fence a ledger's writer, find its last entry, and close it; a state machine without I/O.

| step    | request                                                  | completed when                              |
|---------|----------------------------------------------------------|---------------------------------------------|
| begin   | metadata: OPEN -> IN_RECOVERY, by compare-and-set        | it is stored, or the ledger is CLOSED       |
| fence   | fencing reads of the last entry, to the last ensemble    | the definite responses cover the ensemble   |
| read    | each entry from lac + 1 on, from its whole write set;    | Qw - Qa + 1 definite denials of one entry:  |
|         | these reads fence too                                    | it and all after it were never acknowledged |
| write   | each entry read: recovery adds to its whole write set    | an ack quorum stored each                   |
| measure | entry lac, if its length is not known yet                | one valid copy was read                     |
| close   | metadata: IN_RECOVERY -> CLOSED, by compare-and-set      | it is CLOSED, by any client                 |

- A definite response is the entry itself, NO_ENTRY or NO_LEDGER. Timeouts, I/O errors, bad digests and
  UNKNOWN_LEDGER_STATE are not definite, because such a bookie may hold the entry.
- lac is at least the first entry of the last ensemble - 1. The bookies of that ensemble may not have a LAC yet, and an
  ensemble change below its first entry would put segments out of order (BookKeeper issue 2615).
- Reads fence, because a bookie that did not answer the fencing step may still accept adds: it could deny an entry and
  then acknowledge it to the writer (BookKeeper issue 2614).
- Entries are read from the ensembles in the metadata as of the start of recovery. Bookies that fail during the
  write-back are replaced in memory only; closing publishes the new ensembles.
- Entries written back carry the lac that recovery began with, never a newer one: see LedgerWriter.add_recovered.
- All replicas are read at once, so that a failed bookie costs no time and all are fenced.

Several clients may recover a ledger at the same time. After a failure (TryAgain), the metadata stays IN_RECOVERY, and
any client may start a new recovery.
Source: BookKeeper LedgerRecoveryOp, ReadLastConfirmedOp, LedgerOpenOp.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bindery_core.digest import Digester
from bindery_core.entry import Entry, unpack
from bindery_core.errors import BinderyError, DigestMismatch, TryAgain, Unauthorized
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import INVALID_ENTRY_ID, BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Confirm,
    Degraded,
    Fail,
    Recovered,
    RecoveryAction,
    SendAdds,
    SendReads,
    WriterAction,
)
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings
from bindery_core.placement.quorum import can_be_covered, denials_needed, is_covered
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import AddResponse, ReadResponse, Status

_DENIALS = (Status.NO_ENTRY, Status.NO_LEDGER)


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """Timeouts and limits of a recovery."""

    read_timeout_s: float = 5.0
    """Time in seconds after which a bookie that has not answered a recovery read is treated as failed."""
    add_timeout_s: float = 10.0
    """Time in seconds after which a bookie that has not answered a write-back is replaced."""
    entries_in_flight_max: int = 16
    """Maximum number of entries read ahead of the last one that was written back."""
    bytes_in_flight_max: int = 16 * 1024 * 1024
    """Maximum payload bytes of these entries, each counted as the largest one so far; one entry is always allowed."""


class _Step(Enum):
    NEW = "new"
    BEGIN = "begin"
    FENCE = "fence"
    READ = "read"
    MEASURE = "measure"
    CLOSE = "close"
    FINISHED = "finished"


class _EntryRead:
    """Responses of the replicas of one entry."""

    __slots__ = ("denied", "entry", "members", "silent")

    def __init__(self, ensemble: tuple[BookieId, ...], members: tuple[int, ...]) -> None:
        self.members = [ensemble[index] for index in members]
        self.entry: Entry | None = None
        self.denied: set[BookieId] = set()
        self.silent: set[BookieId] = set()
        """Bookies that timed out, failed, or sent no definite response."""

    @property
    def is_exhausted(self) -> bool:
        return len(self.denied | self.silent) == len(self.members)


class LedgerRecovery:
    """Recovers one ledger. Ends with Recovered or Fail; any client may start a failed recovery again.

    Calls return actions, which the transport executes in order. `now` is monotonic, in seconds.
    Invariant: all entries before `_front` were read, and no decision depends on later entries.
    """

    def __init__(self, ledger_id: LedgerId, *, digester: Digester, settings: RecoverySettings | None = None) -> None:
        self.ledger_id = ledger_id
        self._digester = digester
        self._settings = settings or RecoverySettings()
        self._step = _Step.NEW
        self._began: LedgerMetadata | None = None
        self._writer: LedgerWriter | None = None

        self._answered: set[int] = set()  # members of the last ensemble with a definite response to the fence
        self._unheard: dict[int, str] = {}  # members without one, with the reason
        self._lac = -1
        self._lengths: dict[int, int] = {}  # ledger length up to an entry, for the entries seen

        self._reads: dict[int, _EntryRead] = {}
        self._front = 0  # next entry to be decided
        self._next_read = 0
        self._end: int | None = None  # last entry of the ledger, once known
        self._largest = 0  # payload bytes
        self._read_deadlines: deque[tuple[float, int, int]] = deque()  # when, first, last

    @property
    def is_finished(self) -> bool:
        return self._step is _Step.FINISHED

    @property
    def step(self) -> str:
        """Name of the current step, for operators."""
        return self._step.value

    @property
    def metadata(self) -> LedgerMetadata:
        """Metadata as recovery read it, with the ensembles changed in memory. ChangeEnsemble is planned on this."""
        assert self._began is not None
        return self._writer.metadata if self._writer is not None else self._began

    # -- begin and fence -------------------------------------------------------------------------------------------

    def start(self, *, now: float) -> list[RecoveryAction]:
        """Request BeginRecovery."""
        assert self._step is _Step.NEW
        self._step = _Step.BEGIN
        return [BeginRecovery()]

    def recovery_begun(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        """Process the finished BeginRecovery; `metadata`: as stored now."""
        assert self._step is _Step.BEGIN
        if metadata.state is LedgerState.CLOSED:
            return self._finish(Recovered(metadata))
        assert metadata.state is LedgerState.IN_RECOVERY
        self._began = metadata
        self._step = _Step.FENCE
        self._read_deadlines.append((now + self._settings.read_timeout_s, INVALID_ENTRY_ID, INVALID_ENTRY_ID))
        last = (int(INVALID_ENTRY_ID),)
        return [SendReads(bookie_id, last, fence=True) for bookie_id in metadata.last_segment.ensemble]

    def _receive_fence(self, bookie_id: BookieId, response: ReadResponse, now: float) -> list[RecoveryAction]:
        assert self._began is not None
        ensemble = self._began.last_segment.ensemble
        if response.entry_id != INVALID_ENTRY_ID or bookie_id not in ensemble:
            return []
        index = ensemble.index(bookie_id)
        if response.status == Status.OK:
            try:
                entry = unpack(self._digester, response.body or b"", ledger_id=self.ledger_id, entry_id=None)
            except DigestMismatch as error:
                return self._not_fenced(index, str(error))
            self._saw(entry)
            self._lac = max(self._lac, entry.lac)
        elif response.status not in _DENIALS:
            return self._not_fenced(index, f"status {response.status}")
        self._answered.add(index)
        self._unheard.pop(index, None)
        return self._start_reading(now) if self._covered() else []

    def _covered(self) -> bool:
        assert self._began is not None
        return is_covered(
            self._answered,
            ensemble_size=self._began.ensemble_size,
            write_quorum=self._began.write_quorum,
            ack_quorum=self._began.ack_quorum,
        )

    def _not_fenced(self, index: int, reason: str) -> list[RecoveryAction]:
        assert self._began is not None
        if index in self._answered:
            return []
        self._unheard[index] = reason
        if can_be_covered(
            self._unheard,
            ensemble_size=self._began.ensemble_size,
            write_quorum=self._began.write_quorum,
            ack_quorum=self._began.ack_quorum,
        ):
            return []
        ensemble = self._began.last_segment.ensemble
        return self._fail(
            TryAgain(
                "too few bookies of the last ensemble answered to recover the ledger",
                ledger_id=self.ledger_id,
                answered=",".join(ensemble[i] for i in sorted(self._answered)) or "none",
                missing="; ".join(f"{ensemble[i]}: {why}" for i, why in sorted(self._unheard.items())),
            )
        )

    # -- read and write back ---------------------------------------------------------------------------------------

    def _start_reading(self, now: float) -> list[RecoveryAction]:
        assert self._began is not None
        self._step = _Step.READ
        self._read_deadlines.clear()
        self._lac = max(self._lac, self._began.last_segment.first_entry_id - 1)
        self._front = self._next_read = self._lac + 1
        self._writer = LedgerWriter(
            self.ledger_id,
            self._began,
            digester=self._digester,
            settings=WriterSettings(
                add_timeout_s=self._settings.add_timeout_s, quorum_timeout_s=None, explicit_lac_idle_s=None
            ),
            recovery=True,
            lac=self._lac,
        )
        return self._read_on(now)

    def _read_on(self, now: float) -> list[RecoveryAction]:
        """Read as many further entries as the limits allow."""
        assert self._writer is not None
        if self._end is not None:
            return []
        room = min(self._settings.entries_in_flight_max, self._settings.bytes_in_flight_max // max(1, self._largest))
        first, end = self._next_read, max(self._next_read, self._writer.lac + 1 + max(1, room))
        self._next_read = end
        return self._send_reads(first, end - 1, now, fence=True)

    def _send_reads(self, first: int, last: int, now: float, *, fence: bool) -> list[RecoveryAction]:
        assert self._began is not None
        if last < first:
            return []
        ids_of: dict[BookieId, list[int]] = {}
        for entry_id in range(first, last + 1):
            members = write_set(
                entry_id=entry_id,
                ensemble_size=self._began.ensemble_size,
                write_quorum=self._began.write_quorum,
            )
            read = _EntryRead(self._began.segment_of(EntryId(entry_id)).ensemble, members)
            self._reads[entry_id] = read
            for bookie_id in read.members:
                ids_of.setdefault(bookie_id, []).append(entry_id)
        self._read_deadlines.append((now + self._settings.read_timeout_s, first, last))
        return [SendReads(bookie_id, tuple(ids), fence=fence) for bookie_id, ids in ids_of.items()]

    def receive_reads(
        self, bookie_id: BookieId, responses: Sequence[ReadResponse], *, now: float
    ) -> list[RecoveryAction]:
        """Process responses of one bookie to SendReads: their `entry_id`, `status` and `body`."""
        actions: list[RecoveryAction] = []
        for response in responses:
            if self._step in (_Step.FENCE, _Step.READ, _Step.MEASURE) and response.status == Status.UNAUTHORIZED:
                return self._fail(
                    Unauthorized(
                        "the bookie refuses this client: not authenticated, or wrong ledger password",
                        ledger_id=self.ledger_id,
                        bookie_id=bookie_id,
                    )
                )
            if self._step is _Step.FENCE:
                actions += self._receive_fence(bookie_id, response, now)
            elif self._step in (_Step.READ, _Step.MEASURE):
                self._note(bookie_id, response)
        if self._step in (_Step.READ, _Step.MEASURE):
            actions += self._go_on(now)
        return actions

    def _note(self, bookie_id: BookieId, response: ReadResponse) -> None:
        read = self._reads.get(response.entry_id)
        if read is None or read.entry is not None or bookie_id not in read.members:
            return
        if response.status == Status.OK:
            try:
                read.entry = unpack(
                    self._digester, response.body or b"", ledger_id=self.ledger_id, entry_id=response.entry_id
                )
            except DigestMismatch:
                read.silent.add(bookie_id)
            else:
                self._saw(read.entry)
        elif response.status in _DENIALS:
            read.silent.discard(bookie_id)
            read.denied.add(bookie_id)
        else:
            read.silent.add(bookie_id)

    def _saw(self, entry: Entry) -> None:
        self._largest = max(self._largest, len(entry.payload))
        self._lengths[entry.entry_id] = entry.length
        self._lengths[entry.entry_id - 1] = entry.length - len(entry.payload)
        floor = max(self._lac, self._front - 1)
        for entry_id in [known for known in self._lengths if known < floor]:
            del self._lengths[entry_id]

    def _go_on(self, now: float) -> list[RecoveryAction]:
        """Decide entries in order, write back what was read, and move to the next step when this one is over."""
        assert self._began is not None
        assert self._writer is not None
        if self._step is _Step.MEASURE:
            return self._measured()
        needed = denials_needed(write_quorum=self._began.write_quorum, ack_quorum=self._began.ack_quorum)
        found: list[Entry] = []
        while self._end is None and (read := self._reads.get(self._front)) is not None:
            if read.entry is not None:
                found.append(read.entry)
                del self._reads[self._front]
                self._front += 1
            elif len(read.denied) >= needed:
                self._end = self._front - 1
                self._reads.clear()
                self._read_deadlines.clear()
            elif read.is_exhausted:
                return self._fail(self._undecided(self._front, read))
            else:
                break
        actions: list[RecoveryAction] = []
        if found:
            actions += self._from_writer(self._writer.add_recovered(found, now=now))
        if self._step is _Step.READ:
            actions += self._read_on(now)
        if self._step is _Step.READ and self._end is not None and self._writer.pending_count == 0:
            actions += self._measure(now)
        return actions

    def _undecided(self, entry_id: int, read: _EntryRead) -> TryAgain:
        return TryAgain(
            "cannot determine whether the entry exists",
            ledger_id=self.ledger_id,
            entry_id=entry_id,
            denied_by=",".join(sorted(read.denied)) or "none",
            no_answer_from=",".join(sorted(read.silent)) or "none",
        )

    def receive_adds(
        self, bookie_id: BookieId, responses: Sequence[AddResponse], *, now: float
    ) -> list[RecoveryAction]:
        """Process responses of one bookie to SendAdds."""
        if self._step is not _Step.READ or self._writer is None:
            return []
        actions = self._from_writer(self._writer.receive_many(bookie_id, responses, now=now))
        return actions + self._go_on_unless_finished(now)

    def ensemble_changed(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        """Process the finished ChangeEnsemble; `metadata`: the result, in memory."""
        if self._step is not _Step.READ or self._writer is None:
            return []
        actions = self._from_writer(self._writer.ensemble_changed(metadata, now=now))
        return actions + self._go_on_unless_finished(now)

    def ensemble_change_failed(self, error: BinderyError, *, now: float) -> list[RecoveryAction]:
        """Process a failed ChangeEnsemble. NotEnoughBookies: continue while an ack quorum is left."""
        if self._step is not _Step.READ or self._writer is None:
            return []
        actions = self._from_writer(self._writer.ensemble_change_failed(error, now=now))
        return actions + self._go_on_unless_finished(now)

    def _from_writer(self, actions: list[WriterAction]) -> list[RecoveryAction]:
        passed: list[RecoveryAction] = []
        for action in actions:
            match action:
                case SendAdds() | ChangeEnsemble() | Degraded():
                    passed.append(action)
                case Fail(error):
                    return self._fail(error)
                case Confirm():
                    pass
                case _:
                    raise AssertionError(f"recovery's writer must not request {action}")
        return passed

    def _go_on_unless_finished(self, now: float) -> list[RecoveryAction]:
        return self._go_on(now) if self._step is _Step.READ else []

    # -- measure and close -----------------------------------------------------------------------------------------

    def _measure(self, now: float) -> list[RecoveryAction]:
        """Determine the ledger's length, now that its last entry is known."""
        assert self._end is not None
        if self._end == -1 or self._end in self._lengths:
            return self._close()
        self._step = _Step.MEASURE  # fence responses contained older entries only, and no entry follows lac
        return self._send_reads(self._end, self._end, now, fence=False)

    def _measured(self) -> list[RecoveryAction]:
        assert self._end is not None
        read = self._reads[self._end]
        if read.entry is not None:
            return self._close()
        if read.is_exhausted:
            return self._fail(self._undecided(self._end, read))
        return []

    def _close(self) -> list[RecoveryAction]:
        assert self._began is not None
        assert self._end is not None
        self._step = _Step.CLOSE
        length = 0 if self._end == -1 else self._lengths[self._end]
        return [CloseRecovered(self._began.segments, self.metadata.segments, self._end, length)]

    def recovery_closed(self, metadata: LedgerMetadata, *, now: float) -> list[RecoveryAction]:
        """Process the finished CloseRecovered; `metadata`: as stored now, by this or another client."""
        assert self._step is _Step.CLOSE
        if metadata.state is not LedgerState.CLOSED:
            return self._fail(TryAgain("the ledger was opened again while it was recovered", ledger_id=self.ledger_id))
        return self._finish(Recovered(metadata))

    def metadata_failed(self, error: BinderyError, *, now: float) -> list[RecoveryAction]:
        """Process a BeginRecovery or CloseRecovered that failed and is not retried."""
        return [] if self.is_finished else self._fail(error, as_it_is=True)

    # -- failures and time -----------------------------------------------------------------------------------------

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[RecoveryAction]:
        """Process a refused or lost connection: all outstanding requests to the bookie failed."""
        if self._step is _Step.FENCE:
            assert self._began is not None
            ensemble = self._began.last_segment.ensemble
            return self._not_fenced(ensemble.index(bookie_id), reason) if bookie_id in ensemble else []
        if self._step not in (_Step.READ, _Step.MEASURE):
            return []
        assert self._writer is not None
        for read in self._reads.values():
            if bookie_id in read.members and bookie_id not in read.denied:
                read.silent.add(bookie_id)
        actions = self._from_writer(self._writer.bookie_failed(bookie_id, reason, now=now))
        return actions if self.is_finished else actions + self._go_on(now)

    def tick(self, *, now: float) -> list[RecoveryAction]:
        """Process the deadlines that have passed."""
        actions: list[RecoveryAction] = []
        reason = f"no answer within {self._settings.read_timeout_s} s"
        while self._read_deadlines and self._read_deadlines[0][0] <= now:
            _, first, last = self._read_deadlines.popleft()
            if self._step is _Step.FENCE:
                assert self._began is not None
                for index in range(self._began.ensemble_size):
                    if self._step is _Step.FENCE:
                        actions += self._not_fenced(index, self._unheard.get(index, reason))
                continue
            for entry_id in range(first, last + 1):
                read = self._reads.get(entry_id)
                if read is not None:
                    read.silent.update(set(read.members) - read.denied)
        if self._step is _Step.READ and self._writer is not None:
            actions += self._from_writer(self._writer.tick(now=now))
        if self._step in (_Step.READ, _Step.MEASURE):
            actions += self._go_on(now)
        return actions

    def next_deadline(self) -> float | None:
        """Return when to call `tick`; None: nothing is pending. May be early, never late."""
        if self.is_finished:
            return None
        deadlines = [self._read_deadlines[0][0]] if self._read_deadlines else []
        if self._writer is not None and self._step is _Step.READ:
            deadline = self._writer.next_deadline()
            deadlines += [] if deadline is None else [deadline]
        return min(deadlines, default=None)

    def _fail(self, error: BinderyError, *, as_it_is: bool = False) -> list[RecoveryAction]:
        if not as_it_is and not isinstance(error, TryAgain | Unauthorized):
            wrapped = TryAgain("ledger recovery failed", ledger_id=self.ledger_id, reason=str(error))
            wrapped.__cause__ = error
            error = wrapped
        return self._finish(Fail(error))

    def _finish(self, action: Recovered | Fail) -> list[RecoveryAction]:
        self._step = _Step.FINISHED
        self._reads.clear()
        self._read_deadlines.clear()
        return [action]
