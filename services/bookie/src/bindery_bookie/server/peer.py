"""Peer: a connection as the operations see it."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from bindery_core.wire.detection import Codec
from bindery_core.wire.messages import BatchReadRequest, ReadRequest, StartTlsRequest


class Wait(Protocol):
    """A long poll that waits."""

    def end(self) -> bool: ...


class Peer(Protocol):
    """One client's connection."""

    adds_in_progress: int
    """Number of batches of adds that are not answered yet; the operations count them."""

    group: str
    """Its address (`address_counts.group_of`)."""

    @property
    def operation_count(self) -> int:
        """Number of its operations in progress, other than adds, plain reads and long polls."""
        ...

    @property
    def pending_read_count(self) -> int:
        """Number of its reads that are not issued yet."""
        ...

    @property
    def is_unsent(self) -> bool:
        """Whether the client leaves more than `unsent_size_max` bytes unread."""
        ...

    @property
    def is_gone(self) -> bool:
        """Whether the connection has closed."""
        ...

    async def until_read(self) -> None:
        """Return once the client has read most of its responses, or is gone."""

    def send(self, data: bytes) -> None:
        """Write frames. They are dropped if the connection is closed."""

    def enqueue_reads(self, reads: Sequence[ReadRequest | BatchReadRequest], codec: Codec) -> None:
        """Issue these reads when the budget has room for their responses."""

    def start_tls(self, request: StartTlsRequest) -> None:
        """Answer, and secure the connection if TLS is offered."""

    def spawn(self, work: Coroutine[Any, Any, None], *, is_long_poll: bool = False) -> asyncio.Task[None]:
        """Run `work` in a task, to which the server holds a reference. `is_long_poll`: it is the answer to a long poll,
        and does not count as an operation."""
        ...

    def hold_poll(self, poll: Wait) -> None:
        """Hold a long poll that waits, and end it when the connection closes or the server stops."""

    def drop_poll(self, poll: Wait) -> None:
        """Hold it no longer: its wait has ended."""

    def wait_for_adds(self) -> None:
        """Stop reading from this connection until the budget of adds is low."""
