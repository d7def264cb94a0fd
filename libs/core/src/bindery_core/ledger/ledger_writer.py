"""LedgerWriter: the single writer of an open ledger, as a state machine without I/O.

Life of an entry: pushed (numbered, packed, sent to its write set) -> complete (an ack quorum stored it) -> confirmed
(complete, and so is every entry before it: `lac` moves, Confirm) -> settled (every member of its write set stored it or
was given up; the writer forgets the entry). `ack_table` tracks which members stored which entry.

When a member of the ensemble fails:
1. Nothing is confirmed until the ensemble change is over, because the new ensemble begins at lac + 1.
2. ChangeEnsemble requests replacements. Failures that arrive before it is committed start one more round.
3. When the change is committed, acks of a replaced member no longer count, also for entries that were complete, and
   each pending entry is sent to the new member. Only then are entries confirmed again: an ack never depends on an
   ensemble that is not in the metadata.
4. Without a spare bookie (NotEnoughBookies), the member is left out, and Degraded reports it. If an entry can then no
   longer reach its ack quorum, the handle breaks. After `replacement_retry_s` the writer requests a replacement again.
   If there is still no spare, entries are sent to the member again, because it may have been restarted.

If a member fails after an entry was confirmed, no ensemble change repairs the missing copy; Degraded reports it.

A handle that broke (`error` is set) never confirms an entry again.
Memory: the frames of pending entries, one int per unsettled entry, two tuples per batch.
Source: BookKeeper LedgerHandle and PendingAddOp. Step 4 differs: BookKeeper returns an error.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from bindery_core import entry as entry_frame
from bindery_core.digest import Digester
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    LedgerClosed,
    LedgerFenced,
    LostOwnership,
    NotEnoughBookies,
    Unauthorized,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ack_table import AckTable, indexes_of
from bindery_core.ledger.ledger_actions import (
    ChangeEnsemble,
    Confirm,
    Degraded,
    Fail,
    SealLedger,
    SendAdds,
    SendLac,
    WriterAction,
)
from bindery_core.placement.quorum import failures_bearable
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import AddResponse, Status


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """Timeouts of a writer, in seconds."""

    add_timeout_s: float = 10.0
    """Time after which a bookie that has not answered an add counts as failed. BookKeeper: addEntryTimeoutSec, 5."""
    quorum_timeout_s: float | None = 60.0
    """Time after which an unconfirmed add breaks the handle (AddTimeout); None: never, as in BookKeeper."""
    replacement_retry_s: float = 5.0
    """Interval at which a replacement is searched for while there is no spare bookie."""
    explicit_lac_idle_s: float | None = 0.1
    """Time after which a LAC that no add carried is sent alone, for tailing readers; None: never."""


class LedgerWriter:
    """Writes one ledger.

    Invariants: lac < next_entry_id; lac never decreases; entries confirm in order, without holes.

    Calls return actions, which the transport executes in order. `now` is monotonic, in seconds.
    Recovery uses a writer with `recovery=True` to write entries back. Such a writer continues after `lac` and `length`,
    sets the recovery flag in its adds, so that a fenced ledger accepts them, and requests ensemble changes in memory
    only.
    """

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        digester: Digester,
        settings: WriterSettings | None = None,
        recovery: bool = False,
        lac: int = -1,
        length: int = 0,
    ) -> None:
        assert recovery or metadata.state is LedgerState.OPEN
        assert recovery or lac == -1
        self.ledger_id = ledger_id
        self.metadata = metadata
        """As last committed to the metadata store."""
        self.lac = lac
        """Last add confirmed; -1: none."""
        self.next_entry_id = lac + 1
        self.length = length
        """Payload bytes of all entries pushed."""
        self.confirmed_length = length
        """Payload bytes of entries 0..lac."""
        self.error: BinderyError | None = None
        """Error that broke the handle; every later add fails with it."""

        self._digester = digester
        self._settings = settings or WriterSettings()
        self._recovery = recovery
        self._recovery_lac = lac
        self._ensemble_size = metadata.ensemble_size
        self._bearable = failures_bearable(write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum)
        self._frame_overhead = entry_frame.HEADER_SIZE + digester.size
        self._set_ensemble(metadata)

        self._acks = AckTable(metadata, first_entry_id=self.next_entry_id)
        self._frames: list[bytes] = []  # of entries lac + 1 .. next_entry_id - 1
        self._silent = 0  # failed members (as bits): nothing is sent to them
        self._down = 0  # the failed members that were left out because there was no spare
        self._failed: dict[int, BookieId] = {}  # members to be replaced
        self._requested: dict[int, BookieId] = {}  # members that the running change is to replace
        self._resend = 0  # members that the running change has replaced so far
        self._changing = False
        self._retrying = False  # the running change was started by `_retry_at`
        self._degraded: set[BookieId] = set()
        self._unanswered: dict[BookieId, EntryId] = {}  # as it was when `error` was set
        self._no_spare: NotEnoughBookies | None = None  # error of the last change: breaks the handle later
        self._closing = False
        self._sealed = False

        self._add_deadlines: deque[tuple[float, int, int, int]] = deque()  # when, first, last, members
        self._quorum_deadlines: deque[tuple[float, int]] = deque()  # when, last
        self._retry_at: float | None = None
        self._explicit_lac_at: float | None = None
        self._announced_lac = lac

    @property
    def pending_count(self) -> int:
        """Number of entries pushed and not confirmed."""
        return self.next_entry_id - 1 - self.lac

    @property
    def published_lac(self) -> int:
        """LAC for readers: entries up to here are durable on an ack quorum."""
        return self.lac

    @property
    def unsettled_count(self) -> int:
        """Number of entries that a member of the write set has neither stored nor been given up for."""
        return self.next_entry_id - self._acks.base

    @property
    def degraded(self) -> frozenset[BookieId]:
        """Bookies of this ledger on which entries are missing."""
        return frozenset(self._degraded)

    @property
    def is_changing(self) -> bool:
        """Whether a ChangeEnsemble is pending."""
        return self._changing

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_many(self, payloads: Sequence[bytes], *, now: float) -> list[WriterAction]:
        """Append entries; their ids start at `next_entry_id`. Raises `error` if broken, LedgerClosed after `close`."""
        if self.error is not None:
            raise self.error
        if self._closing:
            raise LedgerClosed("the handle was closed", ledger_id=self.ledger_id)
        frames = entry_frame.pack_many(
            self._digester,
            payloads,
            ledger_id=self.ledger_id,
            first_entry_id=self.next_entry_id,
            lac=self.published_lac,
            length=self.length,
        )
        return self._push(frames, self.length + sum(map(len, payloads)), now)

    def add_recovered(self, entries: Sequence[entry_frame.Entry], *, now: float) -> list[WriterAction]:
        """Write entries back as recovery read them, with their ids and lengths. Raises `error`.

        Their frames carry the LAC that recovery began with, although later entries are confirmed by now. The
        confirmation may depend on ensembles that were changed in memory only, and these are never published if this
        recovery fails. The next recovery would start above such a LAC and close the ledger over entries without an ack
        quorum.
        """
        assert self._recovery
        if self.error is not None:
            raise self.error
        frames = []
        for entry_id, entry in enumerate(entries, self.next_entry_id):
            assert entry.entry_id == entry_id
            frames.append(
                entry_frame.pack(
                    self._digester,
                    ledger_id=self.ledger_id,
                    entry_id=entry_id,
                    lac=self._recovery_lac,
                    length=entry.length,
                    payload=entry.payload,
                )
            )
        return self._push(frames, entries[-1].length if entries else self.length, now)

    def _push(self, frames: list[bytes], length: int, now: float) -> list[WriterAction]:
        if not frames:
            return []
        first = self.next_entry_id
        self.next_entry_id = end = first + len(frames)
        self.length = length
        self._acks.extend(len(frames))
        self._frames.extend(frames)
        self._announced_lac = self.lac
        self._explicit_lac_at = None
        if self._down:
            self._acks.give_up(self._down, first, end)
            actions = self._check_reachable(first)
            if self.error is not None:
                return actions
        members = ((1 << self._ensemble_size) - 1) & ~self._silent
        self._add_deadlines.append((now + self._settings.add_timeout_s, first, end - 1, members))
        if self._settings.quorum_timeout_s is not None:
            self._quorum_deadlines.append((now + self._settings.quorum_timeout_s, end - 1))
        return self._sends(first, frames, members)

    def _sends(self, first: int, frames: list[bytes], members: int) -> list[WriterAction]:
        """Send consecutive entries from `first` to each of `members` (bits) that holds them."""
        actions: list[WriterAction] = []
        end = first + len(frames)
        all_ids = range(first, end)
        for index, bookie_id in enumerate(self._ensemble):
            bit = 1 << index
            if not members & bit:
                continue
            if self._acks.is_everywhere:
                actions.append(SendAdds(bookie_id, all_ids, frames, self._recovery))
                continue
            ids = self._acks.entries_of(bit, first, end)
            if ids:
                own_frames = [frames[entry_id - first] for entry_id in ids]
                actions.append(SendAdds(bookie_id, ids, own_frames, self._recovery))
        return actions

    # -- responses -------------------------------------------------------------------------------------------------

    def receive_many(self, bookie_id: BookieId, responses: Sequence[AddResponse], *, now: float) -> list[WriterAction]:
        """Process responses of one bookie: their `entry_id` and `status`. A replaced bookie is ignored."""
        index = self._index_of.get(bookie_id)
        if index is None or self.error is not None:
            return []
        bit = 1 << index
        refused = self._acks.record(bit, responses)
        if self._sealed:
            return []
        actions: list[WriterAction] = []
        if refused:
            error = self._ownership_error(bookie_id, refused)
            if error is not None:
                return self._fail(error)
            first = refused[0]
            reason = f"add of entry {first.entry_id} refused: {_status_name(first.status)}"
            actions += self._members_failed(bit, reason, now)
        actions += self._drain(now)
        return actions

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[WriterAction]:
        """Process a refused or lost connection: all requests to the bookie failed.

        Ignored if none is outstanding: an idle ledger keeps its ensemble while a bookie restarts, and the next add
        detects a bookie that is still down.
        """
        index = self._index_of.get(bookie_id)
        if index is None or self.error is not None or self._sealed or not self._acks.is_awaited(1 << index):
            return []
        return self._members_failed(1 << index, reason, now)

    def _ownership_error(self, bookie_id: BookieId, refused: list[AddResponse]) -> BinderyError | None:
        for response in refused:
            facts = {"ledger_id": self.ledger_id, "entry_id": response.entry_id, "bookie_id": bookie_id}
            if response.status == Status.FENCED:
                return LedgerFenced("the ledger was fenced: another client recovers or owns it", **facts)
            if response.status == Status.UNAUTHORIZED:
                return Unauthorized(
                    "the bookie refuses this client: not authenticated, or wrong ledger password",
                    **facts,
                )
        return None

    def _drain(self, now: float) -> list[WriterAction]:
        """Confirm complete entries in order, drop settled ones, and seal a closing ledger without pending entries."""
        if self._changing:
            return []
        actions: list[WriterAction] = []
        newly = self._acks.complete_count(self.lac + 1) if self._frames else 0
        if newly:
            first, self.lac = self.lac + 1, self.lac + newly
            self.confirmed_length += sum(map(len, self._frames[:newly])) - newly * self._frame_overhead
            del self._frames[:newly]
            actions.append(Confirm(first, self.lac))
            while self._quorum_deadlines and self._quorum_deadlines[0][1] <= self.lac:
                self._quorum_deadlines.popleft()
            if self._settings.explicit_lac_idle_s is not None and self.lac > self._announced_lac:
                self._explicit_lac_at = now + self._settings.explicit_lac_idle_s
        if self._acks.base <= self.lac and self._acks.settle(self.lac + 1):
            while self._add_deadlines and self._add_deadlines[0][2] < self._acks.base:
                self._add_deadlines.popleft()
        if self._closing and not self._sealed and self.lac == self.next_entry_id - 1:
            self._sealed = True
            actions.append(SealLedger(self.lac, self.confirmed_length))
        return actions

    # -- failed members --------------------------------------------------------------------------------------------

    def _members_failed(self, members: int, reason: str, now: float) -> list[WriterAction]:
        """Stop sending to `members` (bits) and request replacements. Members that failed before are ignored."""
        actions: list[WriterAction] = []
        for index in indexes_of(members & ~self._silent):
            self._silent |= 1 << index
            self._failed[index] = self._ensemble[index]
            hole = self._acks.give_up(1 << index, self._acks.base, self.lac + 1)
            if hole is not None:
                self._degraded.add(self._ensemble[index])
                actions.append(Degraded(self._ensemble[index], hole, reason))
        return actions + self._request_change()

    def _request_change(self) -> list[WriterAction]:
        if self._changing or self._failed.keys() <= set(indexes_of(self._down)):
            return []
        return self._start_change()

    def _start_change(self) -> list[WriterAction]:
        self._changing = True
        self._requested = dict(self._failed)
        return [ChangeEnsemble(dict(self._failed), self.lac + 1, publish=not self._recovery)]

    def ensemble_changed(self, metadata: LedgerMetadata, *, now: float) -> list[WriterAction]:
        """Process the committed ChangeEnsemble; `metadata` may be unchanged if no change was needed."""
        if self.error is not None:
            return []
        assert self._changing
        before = self._ensemble
        self._set_ensemble(metadata)
        for index, (old, new) in enumerate(zip(before, self._ensemble, strict=True)):
            if old != new:
                self._replaced(1 << index)
                self._failed.pop(index, None)
        if self._failed.keys() - self._requested.keys():
            # More members failed meanwhile. `lac` did not move, so that one segment holds both replacements.
            return self._start_change()
        actions: list[WriterAction] = []
        if self._failed:  # a partial replacement: there were too few spares
            actions += self._continue_without(NotEnoughBookies("not enough bookies to replace all that failed"), now)
        else:
            self._no_spare = None
            self._retry_at = None
            self._retrying = False
        return actions if self.error is not None else actions + self._end_change(now)

    def ensemble_change_failed(self, error: BinderyError, *, now: float) -> list[WriterAction]:
        """Process a failed ChangeEnsemble. NotEnoughBookies: continue while every entry can reach its ack quorum.

        Any other error breaks the handle. After NotEnoughBookies the metadata must still equal `self.metadata`;
        `plan_ensemble_change` guarantees it.
        """
        if self.error is not None:
            return []
        assert self._changing
        if not isinstance(error, NotEnoughBookies):
            return self._fail(error)
        actions = self._continue_without(error, now)
        return actions if self.error is not None else actions + self._end_change(now)

    def _replaced(self, bit: int) -> None:
        """Process the replacement of a member: acks of the old bookie for pending entries no longer count."""
        self._silent &= ~bit
        self._down &= ~bit
        self._resend |= bit
        self._add_deadlines = deque(  # the deadlines were those of the old bookie
            (at, first, last, members & ~bit) for at, first, last, members in self._add_deadlines
        )
        self._acks.discard(bit, self.lac + 1, self.next_entry_id)

    def _continue_without(self, error: NotEnoughBookies, now: float) -> list[WriterAction]:
        """Leave the members in `_failed` out. After a retry, send again to the members that were left out before."""
        self._no_spare = error
        self._retry_at = now + self._settings.replacement_retry_s
        again = self._down if self._retrying else 0
        self._retrying = False
        self._down &= ~again
        self._silent &= ~again
        for index in indexes_of(again):
            del self._failed[index]
        newly = sum(1 << index for index in self._failed) & ~self._down
        self._down |= newly
        actions: list[WriterAction] = []
        for index in indexes_of(newly):
            hole = self._acks.give_up(1 << index, self.lac + 1, self.next_entry_id)
            self._degraded.add(self._ensemble[index])
            actions.append(Degraded(self._ensemble[index], self.next_entry_id if hole is None else hole, str(error)))
        return actions + self._check_reachable(self.lac + 1)

    def _end_change(self, now: float) -> list[WriterAction]:
        """Send pending entries to new members and confirm entries again."""
        self._changing = False
        self._requested = {}
        members, self._resend = self._resend & ~self._silent, 0
        actions: list[WriterAction] = []
        if members and self._frames:
            first, last = self.lac + 1, self.next_entry_id - 1
            self._add_deadlines.append((now + self._settings.add_timeout_s, first, last, members))
            actions += self._sends(first, list(self._frames), members)
        actions += self._drain(now)
        return actions

    def _check_reachable(self, first: int) -> list[WriterAction]:
        """Fail if too many members were given up for an entry from `first` on, so that it cannot reach its quorum."""
        if self._acks.lost_count_max(first, self.next_entry_id) <= self._bearable:
            return []
        assert self._no_spare is not None
        return self._fail(self._no_spare)

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[WriterAction]:
        """Process the deadlines that have passed."""
        if self.error is not None or self._sealed:
            return []
        if self._quorum_deadlines and self._quorum_deadlines[0][0] <= now:
            return self._fail(
                AddTimeout(
                    "adds were not confirmed in time",
                    ledger_id=self.ledger_id,
                    first_entry_id=self.lac + 1,
                    last_entry_id=self.next_entry_id - 1,
                    limit_s=self._settings.quorum_timeout_s,
                )
            )
        actions: list[WriterAction] = []
        late = 0
        while self._add_deadlines and self._add_deadlines[0][0] <= now:
            _, first, last, members = self._add_deadlines.popleft()
            for entry_id in range(max(first, self._acks.base), last + 1):
                late |= self._acks.awaited(entry_id) & members
        if late & ~self._silent:
            actions += self._members_failed(late, f"no answer to an add within {self._settings.add_timeout_s} s", now)
        if self._retry_at is not None and self._retry_at <= now and not self._changing:
            self._retry_at = None
            if self._failed:
                self._retrying = True
                actions += self._start_change()
        if self._explicit_lac_at is not None and self._explicit_lac_at <= now:
            self._explicit_lac_at = None
            self._announced_lac = self.lac
            actions.append(SendLac(self._lac_holders(), self.lac))
        return actions + self._drain(now)

    def next_deadline(self) -> float | None:
        """Return when to call `tick`; None: nothing is pending. May be early, never late."""
        if self.error is not None or self._sealed:
            return None
        deadlines = [at for at in (self._explicit_lac_at, None if self._changing else self._retry_at) if at is not None]
        if self._add_deadlines:
            deadlines.append(self._add_deadlines[0][0])
        if self._quorum_deadlines:
            deadlines.append(self._quorum_deadlines[0][0])
        return min(deadlines, default=None)

    def _lac_holders(self) -> tuple[BookieId, ...]:
        indexes = write_set(
            entry_id=self.lac, ensemble_size=self._ensemble_size, write_quorum=self.metadata.write_quorum
        )
        return tuple(self._ensemble[index] for index in indexes if not self._silent & 1 << index)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, now: float) -> list[WriterAction]:
        """Accept no more adds. SealLedger follows when all entries in flight are confirmed; after Fail, call it again.

        After an error other than lost ownership the ledger is sealed at `lac`: entries of failed adds that reached a
        bookie are dropped. Raises `error` if it is LostOwnership or Unauthorized. A repeated call does nothing.
        """
        self._closing = True
        if self._sealed:
            return []
        if isinstance(self.error, LostOwnership | Unauthorized):
            raise self.error
        if self.error is not None:
            self._sealed = True
            return [SealLedger(self.lac, self.confirmed_length)]
        return self._drain(now)

    def _fail(self, error: BinderyError) -> list[WriterAction]:
        self._unanswered = self.unanswered()
        self.error = error
        self._changing = False
        self._frames.clear()
        self._acks.clear()
        self._add_deadlines.clear()
        self._quorum_deadlines.clear()
        return [Fail(error)]

    def unanswered(self) -> dict[BookieId, EntryId]:
        """Return the bookies that have not confirmed all their entries, each with its first unconfirmed entry.

        A ledger is sealed with an ack quorum, so copies may still be in flight, or lost. Bookies reported by Degraded
        are left out. After an error, the result is that of the time of the error: later responses are ignored.
        """
        if self.error is not None:
            return self._unanswered
        missing: dict[BookieId, EntryId] = {}
        for entry_id in range(self._acks.base, self.lac + 1):
            for index in indexes_of(self._acks.awaited(entry_id)):
                missing.setdefault(self._ensemble[index], EntryId(entry_id))
        return {bookie_id: entry_id for bookie_id, entry_id in missing.items() if bookie_id not in self._degraded}

    def _set_ensemble(self, metadata: LedgerMetadata) -> None:
        self.metadata = metadata
        self._ensemble = metadata.last_segment.ensemble
        self._index_of = {bookie_id: index for index, bookie_id in enumerate(self._ensemble)}


def _status_name(status: int) -> str:
    try:
        return Status(status).name
    except ValueError:
        return f"status {status}"
