"""BatchRead: read consecutive entries from one bookie in few v2 requests; the sink gets one response per entry.

A bookie returns as many entries as fit, at least one; the rest is requested again. If a bookie ends the connection at
its first batch read, it does not support batch reads: from then on, entries are read from it one at a time.
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
"""Minimum number of entries for a batch read."""


def is_run(entry_ids: Sequence[int]) -> bool:
    """Return whether these are consecutive: always so if every bookie holds every entry (E == Qw)."""
    return entry_ids[0] >= 0 and all(b - a == 1 for a, b in pairwise(entry_ids))


class BatchRead:
    """The sink of the connection for one batch read, which passes responses on to the sink of the caller.

    Invariant: each entry is answered once, or all remaining ones fail together.
    """

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
        """Request the remaining entries."""
        request = BatchReadRequest(
            v2.VERSION,
            self._ledger_id,
            self._next,
            self._pool.txn_id(),
            self._end - self._next,
            self._pool.settings.frame_size_max,
        )
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
            # The first entry is missing or unreadable, or the response is empty, which the protocol forbids.
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
