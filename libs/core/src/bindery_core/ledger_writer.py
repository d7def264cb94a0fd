"""LedgerWriter: the single writer of an open ledger, as a state machine without I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from bindery_core.digest import Digester
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger_actions import WriterAction
from bindery_core.ledger_metadata import LedgerMetadata
from bindery_core.wire.messages import AddResponse


@dataclass(frozen=True, slots=True)
class WriterSettings:
    add_timeout_s: float = 10.0
    """A bookie that leaves an add unanswered for so long has failed. Seconds."""
    quorum_timeout_s: float | None = 60.0
    """An add that is not confirmed after so long breaks the handle (AddTimeout). Seconds; None: never."""
    replacement_retry_s: float = 5.0
    """Without a spare bookie: look again for one after so long. Seconds."""
    explicit_lac_idle_s: float | None = 0.1
    """With nothing in flight for so long, tell readers the last LAC by an explicit LAC. Seconds; None: never."""


class LedgerWriter:
    """Writes one ledger. Invariants: lac < next_entry_id; lac never decreases; entries confirm in order, without holes.

    Calls return actions, to be carried out in their order. `now` is monotonic, in seconds.
    """

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        digester: Digester,
        settings: WriterSettings | None = None,
    ) -> None:
        raise NotImplementedError

    # facts (read only)
    ledger_id: LedgerId
    metadata: LedgerMetadata
    """As last committed."""
    lac: int
    """Last add confirmed; -1: none."""
    next_entry_id: int
    length: int
    """Payload bytes of all entries pushed."""
    confirmed_length: int
    """Payload bytes of entries 0..lac."""
    error: BinderyError | None
    """Why the handle is broken; every later add fails with it."""

    @property
    def pending_count(self) -> int:
        """Entries pushed and not confirmed."""
        raise NotImplementedError

    @property
    def degraded(self) -> frozenset[BookieId]:
        """Bookies of this ledger that lack entries they should hold."""
        raise NotImplementedError

    def add_many(self, payloads: Sequence[bytes], *, now: float) -> list[WriterAction]:
        """Append; ids are next_entry_id, ... Raises `error` when broken, LedgerClosed after `close`."""
        raise NotImplementedError

    def receive_many(self, bookie_id: BookieId, responses: Sequence[AddResponse], *, now: float) -> list[WriterAction]:
        """Answers of one bookie; `entry_id` and `status` count."""
        raise NotImplementedError

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[WriterAction]:
        """The connection was refused or lost: everything outstanding there failed."""
        raise NotImplementedError

    def ensemble_changed(self, metadata: LedgerMetadata, *, now: float) -> list[WriterAction]:
        """The ChangeEnsemble asked for is committed as `metadata` (also when none was needed)."""
        raise NotImplementedError

    def ensemble_change_failed(self, error: BinderyError, *, now: float) -> list[WriterAction]:
        """NotEnoughBookies: go on without while an ack quorum is left. Any other error breaks the handle."""
        raise NotImplementedError

    def tick(self, *, now: float) -> list[WriterAction]:
        """Act on deadlines that have passed."""
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        """When to call `tick`; None: nothing pending. May be early, never late."""
        raise NotImplementedError

    def close(self, *, now: float) -> list[WriterAction]:
        """Take no more adds; SealLedger comes once all in flight are confirmed, or have failed.

        After an error that does not mean lost ownership the ledger is sealed at `lac`; else raises `error`.
        """
        raise NotImplementedError
