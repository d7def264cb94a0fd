"""LedgerWriter: the single writer of an open ledger, as a state machine without I/O.

Life of an entry: pushed (numbered, packed, sent to its write set) -> complete (an ack quorum stored it) -> confirmed
(complete, and so is everything before it: `lac` moves, Confirm) -> settled (every member of its write set stored it or
was given up; nothing is remembered of it any more).

When a member of the ensemble fails
1. Nothing is confirmed from here until the change is over, because the new ensemble begins at lac + 1.
2. ChangeEnsemble asks for replacements; failures that arrive meanwhile start one more round.
3. Committed: acks of a replaced member no longer count, also of entries that were complete, and each pending entry goes
   to the newcomer. Only then may entries be confirmed again: an ack never rests on an ensemble that is not in metadata.
4. No spare (NotEnoughBookies): the member is left out while each entry can still reach its ack quorum, with Degraded;
   an entry that cannot breaks the handle. After `replacement_retry_s` it asks again; still none, and the member is
   given another chance, for it may have been restarted.
A member that fails after an entry was confirmed leaves a hole that no ensemble change repairs: Degraded tells of it.

A broken handle (`error`) never confirms again.
Memory: the frames of pending entries, one int per unsettled entry, two tuples per batch.
Source: BookKeeper LedgerHandle and PendingAddOp; design.md section 4 for 4., which BookKeeper answers with an error.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

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
from bindery_core.placement.write_set import write_set, write_set_masks
from bindery_core.wire.messages import AddResponse, Status

_OK = int(Status.OK)


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """When a writer loses patience."""

    add_timeout_s: float = 10.0
    """A bookie that leaves an add unanswered for so long has failed. Seconds. BookKeeper: addEntryTimeoutSec, 5."""
    quorum_timeout_s: float | None = 60.0
    """An add that is not confirmed after so long breaks the handle (AddTimeout). Seconds; None: never (BookKeeper)."""
    replacement_retry_s: float = 5.0
    """Without a spare bookie: look again for one after so long. Seconds."""
    explicit_lac_idle_s: float | None = 0.1
    """When no add carried the newest LAC for so long, send it alone, for those who tail. Seconds; None: never."""


class LedgerWriter:
    """Writes one ledger. Invariants: lac < next_entry_id; lac never decreases; entries confirm in order, without holes.

    Calls return actions, to be carried out in their order. `now` is monotonic, in seconds.
    `recovery=True` makes the writer that recovery writes back with: it goes on after `lac` and `length`, flags its
    adds so that a fenced ledger takes them, and asks for ensemble changes in memory only.
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
        """As last committed."""
        self.lac = lac
        """Last add confirmed; -1: none."""
        self.next_entry_id = lac + 1
        self.length = length
        """Payload bytes of all entries pushed."""
        self.confirmed_length = length
        """Payload bytes of entries 0..lac."""
        self.error: BinderyError | None = None
        """Why the handle is broken; every later add fails with it."""

        self._digester = digester
        self._settings = settings or WriterSettings()
        self._recovery = recovery
        self._recovery_lac = lac
        self._ensemble_size = metadata.ensemble_size
        self._ack_quorum = metadata.ack_quorum
        self._masks = write_set_masks(ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
        self._everywhere = metadata.write_quorum == metadata.ensemble_size
        self._bearable = failures_bearable(write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum)
        self._frame_overhead = entry_frame.HEADER_SIZE + digester.size
        self._set_ensemble(metadata)

        self._base = self.next_entry_id  # oldest unsettled entry; _acks[i] belongs to entry _base + i
        self._acks: list[int] = []  # members (as bits) that stored the entry; only bits of its write set
        self._frames: list[bytes] = []  # of entries lac + 1 .. next_entry_id - 1
        self._lost: dict[int, int] = {}  # entry -> members (as bits) given up on; absent: none. Empty on a good day
        self._silent = 0  # members that failed: nothing is sent to them
        self._down = 0  # those of them that were left out for want of a spare
        self._failed: dict[int, BookieId] = {}  # members to be replaced
        self._asked: dict[int, BookieId] = {}  # those that the running change was asked to replace
        self._resend = 0  # members that the running change has replaced so far
        self._changing = False
        self._retrying = False  # the running change began because `_retry_at` had come
        self._degraded: set[BookieId] = set()
        self._unanswered: dict[BookieId, EntryId] = {}  # when `error` came
        self._no_spare: NotEnoughBookies | None = None  # the last attempt's, for whom it breaks later
        self._closing = False
        self._sealed = False

        self._add_deadlines: deque[tuple[float, int, int, int]] = deque()  # when, first, last, members: unanswered yet?
        self._quorum_deadlines: deque[tuple[float, int]] = deque()  # when, last
        self._retry_at: float | None = None
        self._explicit_lac_at: float | None = None
        self._announced_lac = lac

    @property
    def pending_count(self) -> int:
        """Entries pushed and not confirmed."""
        return self.next_entry_id - 1 - self.lac

    @property
    def published_lac(self) -> int:
        """What readers may be told: entries up to here are durable on an ack quorum, and so is all before them."""
        return self.lac

    @property
    def unsettled_count(self) -> int:
        """Entries of which some member of the write set has neither answered nor been given up."""
        return self.next_entry_id - self._base

    @property
    def degraded(self) -> frozenset[BookieId]:
        """Bookies of this ledger that lack entries they should hold."""
        return frozenset(self._degraded)

    @property
    def is_changing(self) -> bool:
        """Whether a ChangeEnsemble waits for its answer."""
        return self._changing

    # -- adding ----------------------------------------------------------------------------------------------------

    def add_many(self, payloads: Sequence[bytes], *, now: float) -> list[WriterAction]:
        """Append; ids are next_entry_id, ... Raises `error` when broken, LedgerClosed after `close`."""
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
        """Write entries back as recovery read them: their ids and lengths kept. Raises `error`.

        Their frames carry the LAC that recovery began with, although more is confirmed by now: that may rest on
        ensembles changed in memory, and if this recovery dies they are never published. The next one would start above
        such a LAC and close the ledger over entries without an ack quorum.
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
        self._acks.extend(repeat(0, len(frames)))
        self._frames.extend(frames)
        self._announced_lac = self.lac
        self._explicit_lac_at = None
        if self._down:
            self._lose(self._down, first, end)
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
        size, masks = self._ensemble_size, self._masks
        for index, bookie_id in enumerate(self._ensemble):
            bit = 1 << index
            if not members & bit:
                continue
            if self._everywhere:
                ids: Sequence[int] = range(first, first + len(frames))
                own_frames = frames
            else:
                ids = [entry_id for entry_id in range(first, first + len(frames)) if masks[entry_id % size] & bit]
                own_frames = [frames[entry_id - first] for entry_id in ids]
            if ids:
                actions.append(SendAdds(bookie_id, ids, own_frames, self._recovery))
        return actions

    # -- answers ---------------------------------------------------------------------------------------------------

    def receive_many(self, bookie_id: BookieId, responses: Sequence[AddResponse], *, now: float) -> list[WriterAction]:
        """Answers of one bookie; `entry_id` and `status` count. Those of a bookie that was replaced are ignored."""
        index = self._index_of.get(bookie_id)
        if index is None or self.error is not None:
            return []
        if self._sealed:
            self._note_late(1 << index, responses)
            return []
        bit = 1 << index
        acks, base, count = self._acks, self._base, len(self._acks)
        refused: list[AddResponse] = []
        if self._everywhere:
            for response in responses:
                position = response.entry_id - base
                if response.status != _OK:
                    refused.append(response)
                elif 0 <= position < count:
                    acks[position] |= bit
        else:
            size, masks = self._ensemble_size, self._masks
            for response in responses:
                entry_id = response.entry_id
                if response.status != _OK:
                    refused.append(response)
                elif 0 <= entry_id - base < count and masks[entry_id % size] & bit:
                    acks[entry_id - base] |= bit
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
        """The connection was refused or lost: everything outstanding there failed.

        Ignored when nothing is: an idle ledger keeps its ensemble while a bookie restarts, the next add will tell.
        """
        index = self._index_of.get(bookie_id)
        if index is None or self.error is not None or self._sealed or not self._is_awaited(1 << index):
            return []
        return self._members_failed(1 << index, reason, now)

    def _is_awaited(self, bit: int) -> bool:
        """Whether the member has not stored an entry that it should, and was not given up for it."""
        size, masks = self._ensemble_size, self._masks
        return any(
            masks[entry_id % size] & bit and not (acks | self._lost.get(entry_id, 0)) & bit
            for entry_id, acks in enumerate(self._acks, self._base)
        )

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
        """Confirm what is complete from the front, forget what is settled, seal when closing and done."""
        if self._changing:
            return []
        acks, base, ack_quorum = self._acks, self._base, self._ack_quorum
        position = confirmed = self.lac + 1 - base
        count = len(acks)
        while position < count and acks[position].bit_count() >= ack_quorum:
            position += 1
        actions: list[WriterAction] = []
        newly = position - confirmed
        if newly:
            first, self.lac = self.lac + 1, self.lac + newly
            self.confirmed_length += sum(map(len, self._frames[:newly])) - newly * self._frame_overhead
            del self._frames[:newly]
            actions.append(Confirm(first, self.lac))
            while self._quorum_deadlines and self._quorum_deadlines[0][1] <= self.lac:
                self._quorum_deadlines.popleft()
            if self._settings.explicit_lac_idle_s is not None and self.lac > self._announced_lac:
                self._explicit_lac_at = now + self._settings.explicit_lac_idle_s
        self._settle(position)
        if self._closing and not self._sealed and self.lac == self.next_entry_id - 1:
            self._sealed = True
            actions.append(SealLedger(self.lac, self.confirmed_length))
        return actions

    def _settle(self, confirmed: int) -> None:
        """Forget the leading entries, of the first `confirmed` tracked, whose members all answered or were given up."""
        acks, base, lost = self._acks, self._base, self._lost
        size, masks = self._ensemble_size, self._masks
        settled = 0
        if lost:
            while settled < confirmed:
                entry_id = base + settled
                if acks[settled] | lost.get(entry_id, 0) != masks[entry_id % size]:
                    break
                lost.pop(entry_id, None)
                settled += 1
        elif self._everywhere:
            everyone = masks[0]
            while settled < confirmed and acks[settled] == everyone:
                settled += 1
        else:
            while settled < confirmed and acks[settled] == masks[(base + settled) % size]:
                settled += 1
        if settled:
            del acks[:settled]
            self._base = base + settled
            while self._add_deadlines and self._add_deadlines[0][2] < self._base:
                self._add_deadlines.popleft()

    # -- failed members --------------------------------------------------------------------------------------------

    def _members_failed(self, members: int, reason: str, now: float) -> list[WriterAction]:
        """Stop sending to `members` (bits) and have them replaced. What is known already is not said again."""
        actions: list[WriterAction] = []
        for index in _indexes(members & ~self._silent):
            self._silent |= 1 << index
            self._failed[index] = self._ensemble[index]
            hole = self._lose(1 << index, self._base, self.lac + 1)
            if hole is not None:
                self._degraded.add(self._ensemble[index])
                actions.append(Degraded(self._ensemble[index], hole, reason))
        return actions + self._ask_for_change()

    def _ask_for_change(self) -> list[WriterAction]:
        if self._changing or self._failed.keys() <= set(_indexes(self._down)):
            return []
        return self._start_change()

    def _start_change(self) -> list[WriterAction]:
        self._changing = True
        self._asked = dict(self._failed)
        return [ChangeEnsemble(dict(self._failed), self.lac + 1, publish=not self._recovery)]

    def ensemble_changed(self, metadata: LedgerMetadata, *, now: float) -> list[WriterAction]:
        """The ChangeEnsemble asked for is committed as `metadata` (also when none was needed)."""
        if self.error is not None:
            return []
        assert self._changing
        before = self._ensemble
        self._set_ensemble(metadata)
        for index, (old, new) in enumerate(zip(before, self._ensemble, strict=True)):
            if old != new:
                self._replaced(1 << index)
                self._failed.pop(index, None)
        if (
            self._failed.keys() - self._asked.keys()
        ):  # more failed meanwhile: lac did not move, so one segment holds both
            return self._start_change()
        actions: list[WriterAction] = []
        if self._failed:  # a partial replacement: there was no spare for these
            actions += self._go_on_without(NotEnoughBookies("not enough bookies to replace all that failed"), now)
        else:
            self._no_spare = None
            self._retry_at = None
            self._retrying = False
        return actions if self.error is not None else actions + self._leave_change(now)

    def ensemble_change_failed(self, error: BinderyError, *, now: float) -> list[WriterAction]:
        """NotEnoughBookies: go on without while an ack quorum is left. Any other error breaks the handle.

        NotEnoughBookies must mean that metadata still is `self.metadata`: `plan_ensemble_change` sees to it.
        """
        if self.error is not None:
            return []
        assert self._changing
        if not isinstance(error, NotEnoughBookies):
            return self._fail(error)
        actions = self._go_on_without(error, now)
        return actions if self.error is not None else actions + self._leave_change(now)

    def _replaced(self, bit: int) -> None:
        """The member `bit` is another bookie now: what the old one said of pending entries no longer counts."""
        self._silent &= ~bit
        self._down &= ~bit
        self._resend |= bit
        self._add_deadlines = deque(  # they were for the old one
            (at, first, last, members & ~bit) for at, first, last, members in self._add_deadlines
        )
        for entry_id in range(self.lac + 1, self.next_entry_id):
            self._acks[entry_id - self._base] &= ~bit
            if entry_id in self._lost:
                self._lost[entry_id] &= ~bit

    def _go_on_without(self, error: NotEnoughBookies, now: float) -> list[WriterAction]:
        """There is no spare for those in `_failed`: leave them out; after a retry try those again that were."""
        self._no_spare = error
        self._retry_at = now + self._settings.replacement_retry_s
        again = self._down if self._retrying else 0
        self._retrying = False
        self._down &= ~again
        self._silent &= ~again
        for index in _indexes(again):
            del self._failed[index]
        newly = sum(1 << index for index in self._failed) & ~self._down
        self._down |= newly
        actions: list[WriterAction] = []
        for index in _indexes(newly):
            hole = self._lose(1 << index, self.lac + 1, self.next_entry_id)
            self._degraded.add(self._ensemble[index])
            actions.append(Degraded(self._ensemble[index], self.next_entry_id if hole is None else hole, str(error)))
        return actions + self._check_reachable(self.lac + 1)

    def _leave_change(self, now: float) -> list[WriterAction]:
        """Confirming may go on; newcomers get what is pending."""
        self._changing = False
        self._asked = {}
        members, self._resend = self._resend & ~self._silent, 0
        actions: list[WriterAction] = []
        if members and self._frames:
            first, last = self.lac + 1, self.next_entry_id - 1
            self._add_deadlines.append((now + self._settings.add_timeout_s, first, last, members))
            actions += self._sends(first, list(self._frames), members)
        actions += self._drain(now)
        return actions

    def _lose(self, members: int, first: int, end: int) -> int | None:
        """Expect no ack of `members` (bits) for first..end-1 any more. The first entry that this concerns, if any."""
        hole = None
        for entry_id in range(first, end):
            missing = self._masks[entry_id % self._ensemble_size] & members & ~self._acks[entry_id - self._base]
            if missing:
                self._lost[entry_id] = self._lost.get(entry_id, 0) | missing
                hole = entry_id if hole is None else hole
        return hole

    def _check_reachable(self, first: int) -> list[WriterAction]:
        """Fail when an entry from `first` on lost more members than its ack quorum can bear."""
        for entry_id in range(first, self.next_entry_id):
            lost = self._lost.get(entry_id, 0) & ~self._acks[entry_id - self._base]
            if lost.bit_count() > self._bearable:
                assert self._no_spare is not None
                return self._fail(self._no_spare)
        return []

    # -- time ------------------------------------------------------------------------------------------------------

    def tick(self, *, now: float) -> list[WriterAction]:
        """Act on deadlines that have passed."""
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
            for entry_id in range(max(first, self._base), last + 1):
                unanswered = ~(self._acks[entry_id - self._base] | self._lost.get(entry_id, 0))
                late |= self._masks[entry_id % self._ensemble_size] & members & unanswered
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
        """When to call `tick`; None: nothing pending. May be early, never late."""
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
        """Take no more adds; SealLedger comes once all in flight are confirmed. Fail may come instead: call again.

        After an error that does not mean lost ownership the ledger is sealed at `lac`: this drops whatever of the
        failed adds reached a bookie. Raises `error` when it is LostOwnership or Unauthorized. Twice does nothing.
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
        self._lost.clear()
        self._add_deadlines.clear()
        self._quorum_deadlines.clear()
        return [Fail(error)]

    def unanswered(self) -> dict[BookieId, EntryId]:
        """Of a sealed ledger: who has not said yet that it stored all that it should, and the first entry of that.

        An ack quorum is enough to seal, so copies may still be on their way, or lost. Without those of Degraded.
        After an error: as it was then, for nobody is listened to any more.
        """
        if self.error is not None:
            return self._unanswered
        missing: dict[BookieId, EntryId] = {}
        size, masks = self._ensemble_size, self._masks
        for entry_id, acks in enumerate(self._acks[: self.lac + 1 - self._base], self._base):
            for index in _indexes(masks[entry_id % size] & ~(acks | self._lost.get(entry_id, 0))):
                missing.setdefault(self._ensemble[index], EntryId(entry_id))
        return {bookie_id: entry_id for bookie_id, entry_id in missing.items() if bookie_id not in self._degraded}

    def _note_late(self, bit: int, responses: Sequence[AddResponse]) -> None:
        for response in responses:
            position = response.entry_id - self._base
            if response.status == _OK and 0 <= position < len(self._acks):
                self._acks[position] |= bit

    def _set_ensemble(self, metadata: LedgerMetadata) -> None:
        self.metadata = metadata
        self._ensemble = metadata.last_segment.ensemble
        self._index_of = {bookie_id: index for index, bookie_id in enumerate(self._ensemble)}


def _indexes(members: int) -> list[int]:
    return [index for index in range(members.bit_length()) if members >> index & 1]


def _status_name(status: int) -> str:
    try:
        return Status(status).name
    except ValueError:
        return f"status {status}"
