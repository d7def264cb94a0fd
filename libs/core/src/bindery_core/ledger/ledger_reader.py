"""Read a ledger, as state machines without I/O: choose bookies for each entry, and decide when a read has failed.

Each entry is read from the members of its write set in their order (bookies to avoid last), one at a time:
- after an error, the next member is read at once;
- after `speculative_s` without a response, the next member is read as well, and the first good response counts;
- `read_timeout_s` without a response is an error of that bookie.

If all members fail, the error with the highest rank is reported, and the first of several with that rank.
BookieUnavailable ranks above NoSuchEntry, and all other errors rank above both. An entry is therefore reported as
absent only if every replica denies it. Source: BookKeeper PendingReadOp, ReadLastConfirmedOp.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bindery_core.digest import Digester
from bindery_core.entry import Entry, unpack, unpack_lac
from bindery_core.errors import (
    BadVersion,
    BinderyError,
    BookieUnavailable,
    DamagedStorage,
    DigestMismatch,
    LedgerStateUnknown,
    NoSuchEntry,
    TooManyRequests,
    TryAgain,
    Unauthorized,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import Done, Fail, ReaderAction, SendReads
from bindery_core.placement.quorum import can_be_covered, is_covered
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import ReadLacResponse, ReadResponse, Status

_ERROR_OF: dict[int, tuple[type[BinderyError], str]] = {
    Status.NO_ENTRY: (NoSuchEntry, "no such entry"),
    Status.NO_LEDGER: (NoSuchEntry, "no such entry"),  # this bookie holds nothing of the ledger
    Status.IO_ERROR: (DamagedStorage, "the bookie could not read the entry"),
    Status.UNAUTHORIZED: (
        Unauthorized,
        "the bookie refuses this client: not authenticated, or wrong ledger password",
    ),
    Status.BAD_VERSION: (BadVersion, "the bookie does not speak this protocol version"),
    Status.TOO_MANY_REQUESTS: (TooManyRequests, "the bookie has too many requests"),
    Status.UNKNOWN_LEDGER_STATE: (LedgerStateUnknown, "it is unknown whether the bookie had the entry (limbo)"),
}


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    """Timeouts of a reader, in seconds."""

    speculative_s: float | None = 0.5
    """Time without a response after which the next replica is read as well; None: never. BookKeeper's default: 2."""
    read_timeout_s: float = 5.0
    """Time after which a bookie that has not answered a read counts as failed for it."""


class _Wanted:
    """One entry that has not been read yet."""

    __slots__ = ("error", "next", "replicas", "waiting")

    def __init__(self, replicas: Sequence[BookieId]) -> None:
        self.replicas = replicas
        self.next = 0
        self.waiting: set[BookieId] = set()
        self.error: BinderyError | None = None


class LedgerRead:
    """Reads some entries of a ledger once. Ends with Done, after which `entries` is complete, or with Fail.

    Calls return actions, which the transport executes in order. `now` is monotonic, in seconds.
    """

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        entry_ids: Sequence[int],
        digester: Digester,
        avoid: Collection[BookieId] = (),
        run_size: int = 1,
        settings: ReaderSettings | None = None,
    ) -> None:
        """`entry_ids`: the entries, ascending, at least one. `avoid`: bookies to read from last (not connected, slow).

        `run_size`: number of consecutive entries to read from one bookie if every bookie holds every entry. The next
        run is read from the next bookie. A transport can read each run in one request.
        """
        assert entry_ids
        assert entry_ids[0] >= 0
        assert run_size >= 1
        self.ledger_id = ledger_id
        self.max_lac = -1
        """Highest LAC in a response (`ReadResponse.max_lac`); -1: none."""
        self.is_finished = False

        self._entry_ids = entry_ids
        self._digester = digester
        self._settings = settings or ReaderSettings()
        self._found: dict[int, Entry] = {}
        self._wanted: dict[int, _Wanted] = {
            entry_id: _Wanted(_replicas(metadata, entry_id, avoid, run_size)) for entry_id in entry_ids
        }
        # Both queues are in the order of time, because each timeout is constant.
        self._speculations: deque[tuple[float, list[tuple[int, int]]]] = deque()  # when, (entry, replicas read)
        self._timeouts: deque[tuple[float, list[tuple[int, BookieId]]]] = deque()

    def take_entries(self) -> list[Entry]:
        """Return all entries, in order, and forget them. To be called after Done, and once: a bookie that has not
        answered yet may keep the machine in memory for seconds, but not the entries."""
        assert not self._wanted
        found, self._found = self._found, {}
        return [found[entry_id] for entry_id in self._entry_ids]

    def start(self, *, now: float) -> list[ReaderAction]:
        """Read each entry from its first replica."""
        return self._ask(list(self._wanted), now)

    def receive_many(self, bookie_id: BookieId, responses: Sequence[ReadResponse], *, now: float) -> list[ReaderAction]:
        """Process responses of one bookie: their `entry_id`, `status`, `body` and `max_lac`."""
        if self.is_finished:
            return []
        unlucky: list[int] = []
        for response in responses:
            wanted = self._wanted.get(response.entry_id)
            if response.max_lac is not None and response.max_lac > self.max_lac:
                self.max_lac = response.max_lac
            if wanted is None:
                continue
            error: BinderyError
            if response.status == Status.OK:
                try:
                    self._found[response.entry_id] = unpack(
                        self._digester, response.body or b"", ledger_id=self.ledger_id, entry_id=response.entry_id
                    )
                except DigestMismatch as mismatch:
                    mismatch.facts["bookie_id"] = bookie_id
                    error = mismatch
                else:
                    del self._wanted[response.entry_id]
                    continue
            else:
                error = self._error_of(response.status, bookie_id, response.entry_id)
            if bookie_id in wanted.waiting:
                wanted.waiting.discard(bookie_id)
                wanted.error = _worse(wanted.error, error)
                unlucky.append(response.entry_id)
        return self._go_on(unlucky, now)

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[ReaderAction]:
        """Process a refused or lost connection: all outstanding reads of the bookie failed."""
        return [] if self.is_finished else self._lost(bookie_id, list(self._wanted), reason, now)

    def tick(self, *, now: float) -> list[ReaderAction]:
        """Process the deadlines that have passed."""
        actions: list[ReaderAction] = []
        late: dict[BookieId, list[int]] = {}
        while self._timeouts and self._timeouts[0][0] <= now:
            for entry_id, bookie_id in self._timeouts.popleft()[1]:
                late.setdefault(bookie_id, []).append(entry_id)
        for bookie_id, entry_ids in late.items():
            if not self.is_finished:
                actions += self._lost(bookie_id, entry_ids, f"no answer within {self._settings.read_timeout_s} s", now)
        slow: list[int] = []
        while self._speculations and self._speculations[0][0] <= now:
            for entry_id, asked in self._speculations.popleft()[1]:
                wanted = self._wanted.get(entry_id)
                if wanted is not None and wanted.next == asked and asked < len(wanted.replicas):
                    slow.append(entry_id)
        if slow and not self.is_finished:
            actions += self._ask(slow, now)
        return actions

    def next_deadline(self) -> float | None:
        """Return when to call `tick`; None: nothing is pending. May be early, never late."""
        if self.is_finished:
            return None
        return min((queue[0][0] for queue in (self._speculations, self._timeouts) if queue), default=None)

    def _ask(self, entry_ids: Sequence[int], now: float) -> list[ReaderAction]:
        """Read each entry from its next replica, which must exist."""
        ids_of: dict[BookieId, list[int]] = {}
        for entry_id in entry_ids:
            wanted = self._wanted[entry_id]
            bookie_id = wanted.replicas[wanted.next]
            wanted.next += 1
            wanted.waiting.add(bookie_id)
            ids_of.setdefault(bookie_id, []).append(entry_id)
        if self._settings.speculative_s is not None:
            at = now + self._settings.speculative_s
            self._speculations.append((at, [(entry_id, self._wanted[entry_id].next) for entry_id in entry_ids]))
        self._timeouts.append(
            (
                now + self._settings.read_timeout_s,
                [(entry_id, bookie) for bookie in ids_of for entry_id in ids_of[bookie]],
            )
        )
        return [SendReads(bookie_id, tuple(ids)) for bookie_id, ids in ids_of.items()]

    def _lost(self, bookie_id: BookieId, entry_ids: Iterable[int], reason: str, now: float) -> list[ReaderAction]:
        unlucky: list[int] = []
        for entry_id in entry_ids:
            wanted = self._wanted.get(entry_id)
            if wanted is not None and bookie_id in wanted.waiting:
                wanted.waiting.discard(bookie_id)
                error = BookieUnavailable(reason, ledger_id=self.ledger_id, entry_id=entry_id, bookie_id=bookie_id)
                wanted.error = _worse(wanted.error, error)
                unlucky.append(entry_id)
        return self._go_on(unlucky, now)

    def _go_on(self, unlucky: list[int], now: float) -> list[ReaderAction]:
        """Return Done, Fail, or reads of the next replica for the entries in `unlucky`, whose read just failed."""
        if not self._wanted:
            self.is_finished = True
            return [Done()]
        again: list[int] = []
        for entry_id in unlucky:
            wanted = self._wanted.get(entry_id)
            if wanted is None:
                continue
            if wanted.next < len(wanted.replicas):
                again.append(entry_id)
            elif not wanted.waiting:
                self.is_finished = True
                assert wanted.error is not None
                return [Fail(wanted.error)]
        return self._ask(again, now) if again else []

    def _error_of(self, status: int, bookie_id: BookieId, entry_id: int) -> BinderyError:
        kind, message = _ERROR_OF.get(status, (BookieUnavailable, f"the bookie answered with status {status}"))
        return kind(message, ledger_id=self.ledger_id, entry_id=entry_id, bookie_id=bookie_id)


class LacRead:
    """Reads the LAC from the last ensemble: send READ_LAC to all `targets` and pass in responses until `result` is set.

    The transport passes in the response or failure of each target and applies its own time limit. `error` is set if
    the LAC cannot be determined.
    """

    def __init__(self, ledger_id: LedgerId, metadata: LedgerMetadata, *, digester: Digester) -> None:
        self.ledger_id = ledger_id
        self.targets: tuple[BookieId, ...] = metadata.last_segment.ensemble
        self.best = metadata.last_segment.first_entry_id - 1
        """Highest LAC known so far: safe to use without `result`, but possibly not the newest. -1: none."""
        self.result: int | None = None
        """The LAC, once enough bookies answered; -1: none."""
        self.error: BinderyError | None = None
        self._metadata = metadata
        self._digester = digester
        self._answered: set[int] = set()
        self._failed: dict[int, str] = {}

    def receive(self, bookie_id: BookieId, response: ReadLacResponse) -> None:
        """Process one bookie's response: the greater of its explicit LAC and its last entry's LAC counts."""
        if bookie_id not in self.targets:
            return
        if response.status not in (Status.OK, Status.NO_ENTRY, Status.NO_LEDGER):
            self.bookie_failed(bookie_id, f"status {response.status}")
            return
        if response.status == Status.OK:
            try:
                lac = self._lac_in(response)
            except DigestMismatch as error:
                self.bookie_failed(bookie_id, str(error))
                return
            self.best = max(self.best, lac)
        index = self.targets.index(bookie_id)
        self._answered.add(index)
        self._failed.pop(index, None)
        if is_covered(
            self._answered,
            ensemble_size=self._metadata.ensemble_size,
            write_quorum=self._metadata.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
        ):
            self.result = self.best
            self.error = None

    def _lac_in(self, response: ReadLacResponse) -> int:
        lac = -1
        if response.lac_body is not None:
            try:
                lac = unpack_lac(self._digester, response.lac_body, ledger_id=self.ledger_id)
            except DigestMismatch:
                lac = -1  # as in BookKeeper, counts as "no explicit LAC"
        if response.last_entry_body is not None:
            last = unpack(self._digester, response.last_entry_body, ledger_id=self.ledger_id, entry_id=None)
            lac = max(lac, last.lac)
        return lac

    def bookie_failed(self, bookie_id: BookieId, reason: str) -> None:
        """Process a missing connection, a timeout, or an invalid response."""
        if bookie_id not in self.targets or self.targets.index(bookie_id) in self._answered:
            return
        self._failed[self.targets.index(bookie_id)] = reason
        if not can_be_covered(
            self._failed,
            ensemble_size=self._metadata.ensemble_size,
            write_quorum=self._metadata.write_quorum,
            ack_quorum=self._metadata.ack_quorum,
        ):
            self.error = TryAgain(
                "too few bookies answered to determine the last add confirmed",
                ledger_id=self.ledger_id,
                missing="; ".join(f"{self.targets[index]}: {why}" for index, why in sorted(self._failed.items())),
            )


def long_poll_targets(metadata: LedgerMetadata, *, entry_id: int, avoid: Collection[BookieId] = ()) -> list[BookieId]:
    """Return the bookies to long-poll for `entry_id` (previous LAC entry_id - 1): its write set, `avoid` last.

    A response without an entry means that the poll timed out, or that this bookie does not have the entry. In both
    cases, poll the next bookie.
    """
    return _replicas(metadata, entry_id, avoid)


def _replicas(
    metadata: LedgerMetadata, entry_id: int, avoid: Collection[BookieId], run_size: int = 1
) -> list[BookieId]:
    ensemble = metadata.segment_of(EntryId(entry_id)).ensemble
    everywhere = metadata.write_quorum == metadata.ensemble_size
    members = write_set(
        entry_id=entry_id // run_size if everywhere else entry_id,  # any order is valid if every bookie has all
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
    )
    replicas = [ensemble[index] for index in members]
    if avoid:
        replicas.sort(key=lambda bookie_id: bookie_id in avoid)  # stable
    return replicas


def _worse(first: BinderyError | None, later: BinderyError) -> BinderyError:
    """Return the error to report of two, by the rule in the module docstring."""
    if first is None or _weight(later) > _weight(first):
        return later
    return first


def _weight(error: BinderyError) -> int:
    if isinstance(error, NoSuchEntry):
        return 0
    return 1 if isinstance(error, BookieUnavailable) else 2
