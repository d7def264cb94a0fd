"""BatchRead: a run of entries from one bookie in few requests of wire version 2, told as if each had been asked alone.

A bookie returns as many entries as fit, at least one; the rest is asked for again. One that ends the connection over
its first batch read is an old one that does not know them: it is asked for one entry at a time from then on.
Source: BookKeeper's BatchedReadOp, and its fallback in LedgerHandle.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import structlog
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire import v2
from bindery_core.wire.messages import BatchReadRequest, BatchReadResponse, ReadRequest, ReadResponse, Status

from bindery_client.connection.connection import CLOSED_BY_PEER, ResponseSink

if TYPE_CHECKING:
    from bindery_client.connection.pool import BookiePool

log = structlog.get_logger()

BATCH_COUNT_MIN: Final = 2
"""Fewer entries are read as they are."""


def is_run(entry_ids: Sequence[int]) -> bool:
    """Whether these are consecutive: always so where every bookie holds every entry (E == Qw)."""
    return entry_ids[0] >= 0 and all(b - a == 1 for a, b in pairwise(entry_ids))


class BatchRead:
    """Stands between a connection and the sink that asked. Invariant: each entry is answered once, or all that are
    left fail together."""

    def __init__(
        self, pool: "BookiePool", ledger_id: LedgerId, action: SendReads, sink: ResponseSink, *, timeout_s: float
    ) -> None:
        self._pool = pool
        self._ledger_id = ledger_id
        self._bookie_id = action.bookie_id
        self._next = action.entry_ids[0]
        self._end = action.entry_ids[-1] + 1
        self._sink = sink
        self._timeout_s = timeout_s
        self._answers = 0

    def send(self) -> None:
        """Ask for what is left."""
        request = BatchReadRequest(
            v2.VERSION, self._ledger_id, self._next, self._pool.txn_id(), self._end - self._next,
            self._pool.settings.frame_size_max,
        )  # fmt: skip
        connection = self._pool.connection(self._bookie_id, v2.VERSION)
        connection.send(v2.encode_request(request), [v2.key_of(request)], self, timeout_s=self._timeout_s)

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        for response in responses:
            self._take(response)

    def _take(self, response: BatchReadResponse) -> None:
        self._answers += 1
        bodies = response.bodies[: self._end - self._next]
        first = self._next
        answers = [
            ReadResponse(v2.VERSION, int(Status.OK), self._ledger_id, first + n, body) for n, body in enumerate(bodies)
        ]
        self._next += len(bodies)
        if not bodies:
            # The first one is missing or unreadable, or, against the protocol, the answer holds nothing.
            status = response.status or int(Status.IO_ERROR)
            answers.append(ReadResponse(v2.VERSION, status, self._ledger_id, self._next))
            self._next += 1
        if self._next < self._end:
            self.send()
        self._sink.answered(self._bookie_id, answers)

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        cause = str(error.facts.get("cause"))
        if self._answers or not (cause == CLOSED_BY_PEER or cause.startswith("ConnectionResetError")):
            self._sink.failed(bookie_id, error)
            return
        log.info("bookie_without_batch_reads", bookie_id=bookie_id, error=repr(error))
        self._pool.without_batch_reads.add(bookie_id)
        reads = [ReadRequest(v2.VERSION, self._ledger_id, entry_id) for entry_id in range(self._next, self._end)]
        self._pool.connection(bookie_id, v2.VERSION).send(
            v2.encode_requests(reads), [v2.key_of(read) for read in reads], self._sink, timeout_s=self._timeout_s
        )

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._sink.expired(bookie_id, error)
