"""Verdict: what must be true of a cluster whatever happened to it, judged from outside over what was seen.

What is seen: what the bookies' stores answered, every committed version of ledger metadata, what writers were told and
what readers got. Payloads say where they belong, so that wrong bytes cannot look right.

| invariant              | says |
|------------------------|------|
| acknowledged-readable  | an acknowledged entry is there with its payload once the ledger is closed |
| writer-metadata        | a closed ledger ends at or after what its writer was told; what its writer closed stays so |
| quorum-in-metadata     | an acknowledged entry was stored by Qa bookies of the write set that metadata names |
| metadata-valid         | quorums, digest and password never change, ensembles have no bookie twice, closed is final |
| no-ack-after-fence     | a bookie that answered a fence acknowledges no ordinary add to that ledger any more |
| lac-safe               | a last add confirmed that a reader saw names an entry with its quorum, and never goes back |
| ids-dense              | entry ids are given without holes in the order of the calls; reads give what was asked |
| right-bytes            | an entry read is the one that was written |
| bookie-keeps           | what a bookie answered OK to it has from then on, whatever befell it |
| bookie-starts          | a bookie never refuses its own disk, nor misses anything on it        |
| no-crash               | no exception that nobody expects |
| liveness               | healed, everything goes on: ledgers can be closed and read, bookies serve, writes are taken |

What must hold of healing besides: `healing.verdict`. In worlds with auditors the ensembles of closed segments change,
and what `healing.verdict` says of that replaces that they do not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from bindery_client.ledger.api import Entry
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import EntryId
from bindery_core.placement.write_set import write_set

from bindery_simulation.trace import Trace

INVARIANTS: Final = (
    "acknowledged-readable", "writer-metadata", "quorum-in-metadata", "metadata-valid", "no-ack-after-fence",
    "lac-safe", "ids-dense", "right-bytes", "bookie-keeps", "bookie-starts", "no-crash", "liveness",
    "mark-removed-too-early", "two-leaders-wrote", "metadata-points-to-hole", "copied-needlessly",
    "copied-from-limbo", "worked-without-lock", "not-healed", "hole-unnoted",
)  # fmt: skip

_SIZES = (0, 5, 40, 300, 1500, 5000)


class Violation(AssertionError):
    """An invariant that was seen broken."""

    def __init__(self, invariant: str, message: str) -> None:
        assert invariant in INVARIANTS
        self.invariant = invariant
        super().__init__(f"{invariant}: {message}")


@lru_cache(maxsize=4096)
def payload_of(ledger_id: int, entry_id: int) -> bytes:
    """What a writer puts into this entry: unique, and of a size that the ids decide."""
    number = (ledger_id * 2654435761 + entry_id * 40503) & 0xFFFFFFFF
    size = _SIZES[number % 97 % len(_SIZES)]
    name = b"%d/%d;" % (ledger_id, entry_id)
    return name + bytes([number & 0xFF]) * size


@dataclass(slots=True)
class LedgerHistory:
    """What is known of one ledger from outside."""

    ledger_id: int
    password: bytes = b""
    metadata: LedgerMetadata | None = None
    """As last committed; None: not yet, or deleted."""
    acknowledged: int = -1
    """Highest entry id its writer was told of; all below were told too."""
    lac_seen: int = -1
    closed_by_writer: LedgerMetadata | None = None
    delete_tried: bool = False
    deleted: bool = False
    stored: dict[int, set[str]] = field(default_factory=dict)
    """Entry id -> bookies that answered OK."""
    held: dict[int, set[str]] = field(default_factory=dict)
    """The same, without those that lost their disk since."""


class Verdict:
    """Collects; nothing is raised into the code that is looked at. `violation` is the first, and ends the run."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.heals = False
        """Workers replace bookies of closed segments."""
        self.on_change: Callable[[int, LedgerMetadata, LedgerMetadata], None] = lambda ledger_id, before, after: None
        self.on_close: Callable[[int, LedgerMetadata], None] = lambda ledger_id, metadata: None
        self.violation: Violation | None = None
        self.ledgers: dict[int, LedgerHistory] = {}
        self._fenced: set[tuple[str, int]] = set()
        self._forgetful: set[str] = set()
        """Bookies that lost their disk once."""
        self.acknowledged_count = 0

    def broken(self, invariant: str, message: str) -> None:
        if self.violation is None:
            self.violation = Violation(invariant, message)
            self._trace.add("VERDICT", str(self.violation))

    def check(self, is_good: bool, invariant: str, message: str) -> None:
        if not is_good:
            self.broken(invariant, message)

    def ledger(self, ledger_id: int) -> LedgerHistory:
        found = self.ledgers.get(ledger_id)
        if found is None:
            found = self.ledgers[ledger_id] = LedgerHistory(ledger_id)
        return found

    # --- what bookies answered --------------------------------------------------------------------------------------

    def stored(self, bookie: str, ledger_id: int, entry_id: int, *, recovery: bool) -> None:
        if not recovery and self._is_bound(bookie, ledger_id):
            self.broken(
                "no-ack-after-fence",
                f"{bookie} acknowledged entry {entry_id} of ledger {ledger_id}, which it had fenced",
            )
        history = self.ledger(ledger_id)
        history.stored.setdefault(entry_id, set()).add(bookie)
        history.held.setdefault(entry_id, set()).add(bookie)

    def forget_disk(self, bookie: str) -> None:
        """What it answered for it may have lost. That it answered still counts."""
        self._forgetful.add(bookie)
        for history in self.ledgers.values():
            for bookies in history.held.values():
                bookies.discard(bookie)

    def fenced(self, bookie: str, ledger_id: int) -> None:
        self._fenced.add((bookie, ledger_id))

    def fenced_at(self, bookie: str) -> list[int]:
        """Ledgers whose fence it answered."""
        return sorted(
            ledger_id for name, ledger_id in self._fenced if name == bookie and self._is_bound(bookie, ledger_id)
        )

    def _is_bound(self, bookie: str, ledger_id: int) -> bool:
        """By a fence that it answered. Who lost its disk finds its ledgers in the metadata: what names it no more when
        it looks, because it was healed, is closed by then, and needs no fence there."""
        if (bookie, ledger_id) not in self._fenced:
            return False
        if bookie not in self._forgetful:
            return True
        metadata = self.ledger(ledger_id).metadata
        return metadata is not None and any(
            member.partition(":")[0] == bookie for segment in metadata.segments for member in segment.ensemble
        )

    def kept_at(self, bookie: str) -> list[tuple[int, int]]:
        """(ledger id, entry id) that it must have: of ledgers that nobody tried to delete."""
        return [
            (history.ledger_id, entry_id)
            for history in self.ledgers.values()
            if not history.delete_tried
            for entry_id, bookies in history.held.items()
            if bookie in bookies
        ]

    def inspected(self, bookie: str, keys: Sequence[tuple[int, int]], answers: Sequence[bytes | int]) -> None:
        """What its store gives for entries that it must have."""
        for (ledger_id, entry_id), answer in zip(keys, answers, strict=True):
            if isinstance(answer, int):
                self.broken("bookie-keeps", f"{bookie} answers {answer} to entry {entry_id} of ledger {ledger_id}")
            elif not answer.endswith(payload_of(ledger_id, entry_id)):
                self.broken("bookie-keeps", f"{bookie} has another entry {entry_id} of ledger {ledger_id}")

    # --- what was committed -----------------------------------------------------------------------------------------

    def committed(self, ledger_id: int, metadata: LedgerMetadata | None) -> None:
        history = self.ledger(ledger_id)
        before, history.metadata = history.metadata, metadata
        if metadata is None:
            history.deleted = True
            return
        self._trace.add(
            "metadata", "ledger", ledger_id=ledger_id, state=metadata.state.name, last=metadata.last_entry_id,
            segments=[(segment.first_entry_id, segment.ensemble) for segment in metadata.segments],
        )  # fmt: skip
        name = f"ledger {ledger_id}"
        for segment in metadata.segments:
            is_good = len(set(segment.ensemble)) == len(segment.ensemble)
            self.check(is_good, "metadata-valid", f"{name}: a bookie twice in {segment}")
        if before is not None:
            self._check_change(history, before, metadata)
        if metadata.state is LedgerState.CLOSED:
            if before is None or before.state is not LedgerState.CLOSED:
                self.on_close(ledger_id, metadata)
            self.check(
                metadata.last_entry_id >= history.acknowledged, "writer-metadata",
                f"{name} is closed at {metadata.last_entry_id}, but its writer was told of {history.acknowledged}",
            )  # fmt: skip
            self.check(
                metadata.last_entry_id >= history.lac_seen, "lac-safe",
                f"{name} is closed at {metadata.last_entry_id}, but a reader saw {history.lac_seen} confirmed",
            )  # fmt: skip

    def _check_change(self, history: LedgerHistory, before: LedgerMetadata, after: LedgerMetadata) -> None:
        name = f"ledger {history.ledger_id}"
        is_good = before.state is not LedgerState.CLOSED or self._is_same(before, after)
        self.check(is_good, "metadata-valid", f"{name}: changed after it was closed")
        self.check(_fixed(before) == _fixed(after), "metadata-valid", f"{name}: what never changes changed")
        if before.segments != after.segments:
            self.on_change(history.ledger_id, before, after)
            for entry_id in map(EntryId, range(history.acknowledged + 1)):
                if before.segment_of(entry_id).ensemble != after.segment_of(entry_id).ensemble:
                    self._check_quorum(history, after, entry_id, "quorum-in-metadata", "moved, although acknowledged")

    def _is_same(self, one: LedgerMetadata, other: LedgerMetadata) -> bool:
        return _end(one) == _end(other) if self.heals else _same(one, other)

    # --- what writers were told -------------------------------------------------------------------------------------

    def acknowledged(self, ledger_id: int, first: int, count: int, *, expected: int) -> None:
        history = self.ledger(ledger_id)
        self._trace.add("writer", "acknowledged", ledger_id=ledger_id, first=first, count=count)
        self.check(first == expected, "ids-dense", f"ledger {ledger_id}: entry {expected} was given the id {first}")
        self.check(
            first == history.acknowledged + 1, "ids-dense",
            f"ledger {ledger_id}: {first} acknowledged next after {history.acknowledged}",
        )  # fmt: skip
        last = first + count - 1
        metadata = history.metadata
        if metadata is not None:
            self.check(
                metadata.state is not LedgerState.CLOSED or last <= metadata.last_entry_id, "writer-metadata",
                f"ledger {ledger_id}: {last} acknowledged after it was closed at {metadata.last_entry_id}",
            )  # fmt: skip
            for entry_id in range(first, last + 1):
                self._check_quorum(history, metadata, entry_id, "quorum-in-metadata", "acknowledged")
        history.acknowledged = max(history.acknowledged, last)
        self.acknowledged_count += count

    def closed_by_writer(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        history = self.ledger(ledger_id)
        history.closed_by_writer = metadata
        self.check(
            metadata.last_entry_id >= history.acknowledged, "writer-metadata",
            f"ledger {ledger_id}: its writer closed it at {metadata.last_entry_id}, below {history.acknowledged}",
        )  # fmt: skip

    def _check_quorum(
        self, history: LedgerHistory, metadata: LedgerMetadata, entry_id: int, invariant: str, what: str
    ) -> None:
        ensemble = metadata.segment_of(EntryId(entry_id)).ensemble
        indexes = write_set(entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
        stored = history.stored.get(entry_id, set())
        holders = [ensemble[index] for index in indexes if ensemble[index].partition(":")[0] in stored]
        if len(holders) < metadata.ack_quorum:
            self.broken(
                invariant,
                f"ledger {history.ledger_id}: entry {entry_id} {what}, stored by {sorted(stored)}, "
                f"metadata says {[ensemble[index] for index in indexes]} with Qa={metadata.ack_quorum}",
            )

    # --- what readers got -------------------------------------------------------------------------------------------

    def saw_lac(self, ledger_id: int, lac: int, *, before: int) -> None:
        """A handle that had said `before` says `lac`."""
        history = self.ledger(ledger_id)
        self.check(
            lac >= before, "lac-safe", f"ledger {ledger_id}: last add confirmed went back from {before} to {lac}"
        )
        metadata = history.metadata
        if metadata is not None:
            for entry_id in range(max(before, history.lac_seen) + 1, lac + 1):
                self._check_quorum(history, metadata, entry_id, "lac-safe", "seen as confirmed")
        history.lac_seen = max(history.lac_seen, lac)

    def read(self, ledger_id: int, first: int, entries: Sequence[Entry]) -> None:
        for expected, entry in enumerate(entries, first):
            if entry.entry_id != expected:
                self.broken("ids-dense", f"ledger {ledger_id}: asked for {expected}, got {entry.entry_id}")
            if entry.payload != payload_of(ledger_id, expected):
                what = f"{entry.payload[:40]!r} ({len(entry.payload)} bytes)"
                self.broken("right-bytes", f"ledger {ledger_id}: entry {expected} reads {what}")

    def final(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """The end of the run: it is closed, and all of it was read."""
        history = self.ledger(ledger_id)
        last = metadata.last_entry_id
        name = f"ledger {ledger_id}"
        self.check(metadata.state is LedgerState.CLOSED, "writer-metadata", f"{name} was opened and is not closed")
        complaint = f"{name} ends at {last}, {history.acknowledged} was acknowledged"
        self.check(last >= history.acknowledged, "acknowledged-readable", complaint)
        complaint = f"{name} ends at {last}, a reader saw {history.lac_seen} confirmed"
        self.check(last >= history.lac_seen, "lac-safe", complaint)
        length = sum(len(payload_of(ledger_id, entry_id)) for entry_id in range(last + 1))
        complaint = f"{name}: length {metadata.length}, entries give {length}"
        self.check(metadata.length == length, "writer-metadata", complaint)
        if history.closed_by_writer is not None:
            is_good = self._is_same(history.closed_by_writer, metadata)
            self.check(is_good, "writer-metadata", f"{name} is not as its writer closed it")
        for entry_id in range(last + 1):
            self._check_quorum(history, metadata, entry_id, "quorum-in-metadata", "part of the closed ledger")

    def unreadable(self, ledger_id: int, why: str) -> None:
        """A closed ledger does not read back."""
        self.broken("acknowledged-readable", f"ledger {ledger_id} is closed and does not read back: {why}")


def _fixed(metadata: LedgerMetadata) -> tuple[object, ...]:
    return (
        metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum, metadata.digest_type, metadata.password,
    )  # fmt: skip


def _same(one: LedgerMetadata, other: LedgerMetadata) -> bool:
    return (one.state, one.last_entry_id, one.length, one.segments) == (
        other.state, other.last_entry_id, other.length, other.segments,
    )  # fmt: skip


def _end(metadata: LedgerMetadata) -> tuple[object, ...]:
    """What no worker changes of a closed ledger."""
    starts = [segment.first_entry_id for segment in metadata.segments]
    return metadata.state, metadata.last_entry_id, metadata.length, starts
