"""The interface of a client to the world: it receives answers, failures and timeouts."""

from typing import Any, Protocol

from bindery_core.ids import BookieId
from bindery_core.wire.messages import AddResponse, ReadLacResponse, ReadResponse

Message = tuple[Any, ...]
"""(method that delivers the message, client, bookie id or None, argument, argument). A tuple, because it is fast."""


class Endpoint(Protocol):
    """A client with a name and connections."""

    name: str
    is_gone: bool
    """Whether the client's process has ended."""
    is_cut_off: bool
    """Whether the client has no connection to the metadata."""
    epoch: int
    """Number of the current round of requests. Answers contain the round of their request."""
    slow: set[BookieId]
    """Bookies with slow links to the client."""
    cuts: set[tuple[bool, BookieId]]
    """(whether towards the bookie, bookie) of each direction in which messages are lost."""

    def next_deadline(self) -> float | None: ...
    def tick(self) -> None: ...
    def bookie_failed(self, bookie_id: BookieId) -> None: ...
    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None: ...
    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None: ...
    def receive_poll(self, bookie_id: BookieId, answer: ReadResponse) -> None: ...
    def receive_lac(self, bookie_id: BookieId, answer: ReadLacResponse) -> None: ...
    def describe(self) -> str: ...
