"""Reading a ledger: which bookie to ask for which entry, whom next, and when to give up."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bindery_core.digest import Digester
from bindery_core.entry import Entry
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger_actions import ReaderAction
from bindery_core.ledger_metadata import LedgerMetadata
from bindery_core.wire.messages import ReadLacResponse, ReadResponse


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    speculative_s: float | None = 0.5
    """Ask the next replica too when nobody asked so far has answered for so long. Seconds; None: never."""
    read_timeout_s: float = 5.0
    """A bookie that leaves a read unanswered for so long has failed that read. Seconds."""


class LedgerRead:
    """Reads entries first..last of a ledger once. Ends with Done (then `entries`) or Fail."""

    entries: list[Entry]
    """All, in order, after Done."""
    max_lac: int
    """Highest LAC that an answer carried (`ReadResponse.max_lac`); -1: none. The handle may raise its own."""

    def __init__(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        first: int,
        last: int,
        digester: Digester,
        avoid: Collection[BookieId] = (),
        settings: ReaderSettings | None = None,
    ) -> None:
        """`avoid`: bookies to ask last (not connected, slow)."""
        raise NotImplementedError

    def start(self, *, now: float) -> list[ReaderAction]:
        raise NotImplementedError

    def receive_many(self, bookie_id: BookieId, responses: Sequence[ReadResponse], *, now: float) -> list[ReaderAction]:
        raise NotImplementedError

    def bookie_failed(self, bookie_id: BookieId, reason: str, *, now: float) -> list[ReaderAction]:
        raise NotImplementedError

    def tick(self, *, now: float) -> list[ReaderAction]:
        raise NotImplementedError

    def next_deadline(self) -> float | None:
        raise NotImplementedError


class LacRead:
    """Asks the last ensemble for the LAC: send READ_LAC to all `targets`, feed the answers, until `result` is set.

    The transport feeds each target's answer or failure (a time limit is its own); `error` says it cannot succeed.
    """

    targets: tuple[BookieId, ...]
    result: int | None
    """The LAC, once enough bookies answered; -1: none."""
    error: Exception | None

    def __init__(self, ledger_id: LedgerId, metadata: LedgerMetadata, *, digester: Digester) -> None:
        raise NotImplementedError

    def receive(self, bookie_id: BookieId, response: ReadLacResponse) -> None:
        raise NotImplementedError

    def bookie_failed(self, bookie_id: BookieId, reason: str) -> None:
        raise NotImplementedError


def long_poll_targets(metadata: LedgerMetadata, *, entry_id: int, avoid: Collection[BookieId] = ()) -> list[BookieId]:
    """Bookies to long-poll for `entry_id`, best first: its write set in the current ensemble, `avoid` last."""
    raise NotImplementedError
