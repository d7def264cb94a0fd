"""What a client is to the world: the receiver of answers, failures and timeouts."""

from typing import Any, Protocol

from bindery_core.ids import BookieId
from bindery_core.wire.messages import AddResponse, ReadLacResponse, ReadResponse

Message = tuple[Any, ...]
"""(method that delivers it, client, bookie id or None, argument, argument): a tuple, because histories are many."""


class Endpoint(Protocol):
    """A client with a name and connections."""

    name: str
    is_gone: bool
    """Its process has ended."""
    is_cut_off: bool
    """It has no connection to the metadata."""
    epoch: int
    """Number of the current round of requests. Answers carry the round of their request."""
    slow: set[BookieId]
    """Bookies to which its links are slow."""
    cuts: set[tuple[bool, BookieId]]
    """(towards the bookie?, bookie): messages in this direction are lost."""

    def next_deadline(self) -> float | None: ...
    def tick(self) -> None: ...
    def bookie_failed(self, bookie_id: BookieId) -> None: ...
    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None: ...
    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None: ...
    def receive_poll(self, bookie_id: BookieId, answer: ReadResponse) -> None: ...
    def receive_lac(self, bookie_id: BookieId, answer: ReadLacResponse) -> None: ...
    def describe(self) -> str: ...
