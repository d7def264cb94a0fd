"""Check the invariants of a cluster from outside. They hold under all injected faults.

The verdict uses the answers of the bookies' stores, every committed version of ledger metadata, and the results of
writers and readers. A payload contains its ledger and entry id, so that wrong bytes are always detected.

| invariant              | meaning |
|------------------------|------|
| acknowledged-readable  | an acknowledged entry has its payload after the ledger is closed |
| writer-metadata        | a closed ledger has every acknowledged entry; a ledger closed by its writer is final |
| quorum-in-metadata     | an acknowledged entry was stored by Qa bookies of the write set in the metadata |
| metadata-valid         | quorums, digest and password never change, no ensemble has a bookie twice, CLOSED is final |
| no-ack-after-fence     | a bookie that answered a fence acknowledges no ordinary add to that ledger |
| lac-safe               | every entry up to a LAC that a reader saw has its quorum, and the LAC never decreases |
| ids-dense              | entry ids have no gaps and the order of the calls; reads return the entries requested |
| right-bytes            | an entry that is read is the one that was written |
| bookie-keeps           | a bookie keeps every entry that it acknowledged |
| bookie-starts          | a bookie starts on its disk, and reports no missing data |
| no-crash               | no unexpected exception |
| liveness               | after all faults, ledgers can be closed and read, bookies serve, and writes succeed |

`healing.verdict` has the invariants of recovery. In clusters with auditors, the ensembles of closed segments change.
`healing.verdict` also checks these changes.
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
    "acknowledged-readable",
    "writer-metadata",
    "quorum-in-metadata",
    "metadata-valid",
    "no-ack-after-fence",
    "lac-safe",
    "ids-dense",
    "right-bytes",
    "bookie-keeps",
    "bookie-starts",
    "no-crash",
    "liveness",
    "mark-removed-too-early",
    "two-leaders-wrote",
    "metadata-points-to-hole",
    "copied-needlessly",
    "copied-from-limbo",
    "worked-without-lock",
    "not-healed",
    "hole-unnoted",
)

_SIZES = (0, 5, 40, 300, 1500, 5000)


class Violation(AssertionError):
    """A violated invariant."""

    def __init__(self, invariant: str, message: str) -> None:
        self.invariant, self.message = invariant, message
        super().__init__(f"{invariant}: {message}")

    def __reduce__(self) -> tuple[type["Violation"], tuple[str, str]]:
        """Pickle the arguments of the constructor: a search with several processes sends violations between them."""
        return Violation, (self.invariant, self.message)


@lru_cache(maxsize=4096)
def payload_of(ledger_id: int, entry_id: int) -> bytes:
    """Return the payload of an entry. It is unique, and its size depends on the ids."""
    number = (ledger_id * 2654435761 + entry_id * 40503) & 0xFFFFFFFF
    size = _SIZES[number % 97 % len(_SIZES)]
    name = b"%d/%d;" % (ledger_id, entry_id)
    return name + bytes([number & 0xFF]) * size


@dataclass(slots=True)
class LedgerHistory:
    """The observed history of one ledger."""

    ledger_id: int
    password: bytes = b""
    metadata: LedgerMetadata | None = None
    """The last committed version; None: not created yet, or deleted."""
    acknowledged: int = -1
    """The highest acknowledged entry id. All entries below it are acknowledged too."""
    lac_seen: int = -1
    closed_by_writer: LedgerMetadata | None = None
    delete_tried: bool = False
    deleted: bool = False
    stored: dict[int, set[str]] = field(default_factory=dict)
    """Names of the bookies that acknowledged each entry."""
    held: dict[int, set[str]] = field(default_factory=dict)
    """Like `stored`, but without bookies that have lost their disk since."""


class Verdict:
    """Collects observations and checks them. A violation is recorded, not raised. The first one ends the run."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.heals = False
        """Whether replication workers replace bookies of closed segments."""
        self.on_change: Callable[[int, LedgerMetadata, LedgerMetadata], None] = lambda ledger_id, before, after: None
        self.on_close: Callable[[int, LedgerMetadata], None] = lambda ledger_id, metadata: None
        self.violation: Violation | None = None
        self.ledgers: dict[int, LedgerHistory] = {}
        self._fenced: set[tuple[str, int]] = set()
        self._lost_disk: set[str] = set()
        """Bookies that lost their disk."""
        self.acknowledged_count = 0

    def broken(self, invariant: str, message: str) -> None:
        """Record the violation of an invariant, unless another violation was recorded before."""
        assert invariant in INVARIANTS
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

    # --- answers of bookies -----------------------------------------------------------------------------------------

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
        """Record that a bookie lost its disk. Its acknowledgements still count for quorums."""
        self._lost_disk.add(bookie)
        for history in self.ledgers.values():
            for bookies in history.held.values():
                bookies.discard(bookie)

    def fenced(self, bookie: str, ledger_id: int) -> None:
        self._fenced.add((bookie, ledger_id))

    def fenced_at(self, bookie: str) -> list[int]:
        """Return the ledgers whose fence a bookie must still honor."""
        return sorted(
            ledger_id for name, ledger_id in self._fenced if name == bookie and self._is_bound(bookie, ledger_id)
        )

    def _is_bound(self, bookie: str, ledger_id: int) -> bool:
        """Return whether a bookie answered a fence and must still honor it.

        A bookie that lost its disk fences the ledgers that name it in the metadata. If a ledger no longer names the
        bookie, the ledger was repaired and is closed, so that it needs no fence on this bookie.
        """
        if (bookie, ledger_id) not in self._fenced:
            return False
        if bookie not in self._lost_disk:
            return True
        metadata = self.ledger(ledger_id).metadata
        return metadata is not None and any(
            member.partition(":")[0] == bookie for segment in metadata.segments for member in segment.ensemble
        )

    def kept_at(self, bookie: str) -> list[tuple[int, int]]:
        """Return (ledger id, entry id) of entries that a bookie must have, except in ledgers that clients deleted."""
        return [
            (history.ledger_id, entry_id)
            for history in self.ledgers.values()
            if not history.delete_tried
            for entry_id, bookies in history.held.items()
            if bookie in bookies
        ]

    def inspected(self, bookie: str, keys: Sequence[tuple[int, int]], answers: Sequence[bytes | int]) -> None:
        """Check the answers of a store to reads of entries that it must have."""
        for (ledger_id, entry_id), answer in zip(keys, answers, strict=True):
            if isinstance(answer, int):
                self.broken("bookie-keeps", f"{bookie} answers {answer} to entry {entry_id} of ledger {ledger_id}")
            elif not answer.endswith(payload_of(ledger_id, entry_id)):
                self.broken("bookie-keeps", f"{bookie} has another entry {entry_id} of ledger {ledger_id}")

    # --- committed metadata ----------------------------------------------------------------------------------------

    def committed(self, ledger_id: int, metadata: LedgerMetadata | None) -> None:
        history = self.ledger(ledger_id)
        before, history.metadata = history.metadata, metadata
        if metadata is None:
            history.deleted = True
            return
        self._trace.add(
            "metadata",
            "ledger",
            ledger_id=ledger_id,
            state=metadata.state.name,
            last=metadata.last_entry_id,
            segments=[(segment.first_entry_id, segment.ensemble) for segment in metadata.segments],
        )
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
                metadata.last_entry_id >= history.acknowledged,
                "writer-metadata",
                f"{name} is closed at {metadata.last_entry_id}, but its writer was acknowledged {history.acknowledged}",
            )
            self.check(
                metadata.last_entry_id >= history.lac_seen,
                "lac-safe",
                f"{name} is closed at {metadata.last_entry_id}, but a reader saw {history.lac_seen} confirmed",
            )

    def _check_change(self, history: LedgerHistory, before: LedgerMetadata, after: LedgerMetadata) -> None:
        name = f"ledger {history.ledger_id}"
        is_good = before.state is not LedgerState.CLOSED or self._is_same(before, after)
        self.check(is_good, "metadata-valid", f"{name}: changed after it was closed")
        self.check(_fixed(before) == _fixed(after), "metadata-valid", f"{name}: quorums, digest or password changed")
        if before.segments != after.segments:
            self.on_change(history.ledger_id, before, after)
            for entry_id in map(EntryId, range(history.acknowledged + 1)):
                if before.segment_of(entry_id).ensemble != after.segment_of(entry_id).ensemble:
                    self._check_quorum(history, after, entry_id, "quorum-in-metadata", "moved, although acknowledged")

    def _is_same(self, one: LedgerMetadata, other: LedgerMetadata) -> bool:
        return _end(one) == _end(other) if self.heals else _same(one, other)

    # --- results of writers ----------------------------------------------------------------------------------------

    def acknowledged(self, ledger_id: int, first: int, count: int, *, expected: int) -> None:
        history = self.ledger(ledger_id)
        self._trace.add("writer", "acknowledged", ledger_id=ledger_id, first=first, count=count)
        self.check(first == expected, "ids-dense", f"ledger {ledger_id}: entry {expected} was given the id {first}")
        self.check(
            first == history.acknowledged + 1,
            "ids-dense",
            f"ledger {ledger_id}: {first} acknowledged next after {history.acknowledged}",
        )
        last = first + count - 1
        metadata = history.metadata
        if metadata is not None:
            self.check(
                metadata.state is not LedgerState.CLOSED or last <= metadata.last_entry_id,
                "writer-metadata",
                f"ledger {ledger_id}: {last} acknowledged after it was closed at {metadata.last_entry_id}",
            )
            for entry_id in range(first, last + 1):
                self._check_quorum(history, metadata, entry_id, "quorum-in-metadata", "acknowledged")
        history.acknowledged = max(history.acknowledged, last)
        self.acknowledged_count += count

    def closed_by_writer(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        history = self.ledger(ledger_id)
        history.closed_by_writer = metadata
        self.check(
            metadata.last_entry_id >= history.acknowledged,
            "writer-metadata",
            f"ledger {ledger_id}: its writer closed it at {metadata.last_entry_id}, below {history.acknowledged}",
        )

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

    # --- results of readers -----------------------------------------------------------------------------------------

    def saw_lac(self, ledger_id: int, lac: int, *, before: int) -> None:
        """Check the LAC of a read handle. `before`: its previous LAC."""
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
                self.broken("ids-dense", f"ledger {ledger_id}: expected {expected}, read {entry.entry_id}")
            if entry.payload != payload_of(ledger_id, expected):
                what = f"{entry.payload[:40]!r} ({len(entry.payload)} bytes)"
                self.broken("right-bytes", f"ledger {ledger_id}: entry {expected} reads {what}")

    def final(self, ledger_id: int, metadata: LedgerMetadata) -> None:
        """Check the metadata of a ledger at the end of the run, when the ledger must be closed."""
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
        """Record that a closed ledger cannot be read."""
        self.broken("acknowledged-readable", f"ledger {ledger_id} is closed and cannot be read: {why}")


def _fixed(metadata: LedgerMetadata) -> tuple[object, ...]:
    return (
        metadata.ensemble_size,
        metadata.write_quorum,
        metadata.ack_quorum,
        metadata.digest_type,
        metadata.password,
    )


def _same(one: LedgerMetadata, other: LedgerMetadata) -> bool:
    return (one.state, one.last_entry_id, one.length, one.segments) == (
        other.state,
        other.last_entry_id,
        other.length,
        other.segments,
    )


def _end(metadata: LedgerMetadata) -> tuple[object, ...]:
    """Return the properties of a closed ledger that replication workers never change."""
    starts = [segment.first_entry_id for segment in metadata.segments]
    return metadata.state, metadata.last_entry_id, metadata.length, starts
