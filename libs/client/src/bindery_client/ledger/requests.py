"""LedgerRequests: send the requests of the state machines as frames on the connections to the bookies.

A batch is encoded once, also if it goes to several bookies: transaction ids belong to the client, not the connection.

With `wire_version` 2, ordinary adds and plain reads use that version, and runs of entries are batch reads. Requests
whose responses must not be confused with others use version 3: recovery adds, which a bookie accepts where it rejects
the writer's adds, and reads that fence. Requests that version 2 does not have also use version 3.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Final

from bindery_core.digest import Digester
from bindery_core.entry import pack_lac
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger.ledger_actions import SendAdds, SendLac, SendReads
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import (
    HIGH_PRIORITY,
    AddRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadFlag,
    ReadLacRequest,
    ReadRequest,
    Request,
    WriteFlag,
    WriteLacRequest,
)

from bindery_client.connection.connection import ResponseSink
from bindery_client.connection.pool import BookiePool
from bindery_client.ledger.batch_read import BATCH_COUNT_MIN, BatchRead, is_run

DEADLINE_SLACK_S: Final = 1.0
"""Seconds by which deadlines of connections are later than those of the state machines. The state machines act first;
the deadlines of connections only release memory."""

OnDegraded = Callable[[LedgerId, BookieId, str], None]
"""(ledger, bookie on which entries are missing and that no spare replaced, reason): called once per bookie and
handle."""


class IgnoreResponses:
    """A sink for requests whose responses do not matter."""

    def answered(self, bookie_id: BookieId, responses: Sequence[object]) -> None:
        pass

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        pass

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        pass


IGNORE_RESPONSES: Final = IgnoreResponses()
"""The instance that all such requests share."""


class LedgerRequests:
    """Requests about one ledger."""

    def __init__(self, ledger_id: LedgerId, digester: Digester, pool: BookiePool) -> None:
        self.ledger_id: Final = ledger_id
        self.digester: Final = digester
        self.pool: Final = pool

    def send_adds(
        self, actions: Sequence[SendAdds], sink: ResponseSink, *, timeout_s: float, deferred_sync: bool = False
    ) -> None:
        """Send the actions of one call of a state machine: if they share entries, the bytes are shared too.

        `deferred_sync`: bookies respond after they wrote an entry, before they force it.
        """
        pool = self.pool
        in_v2 = pool.settings.wire_version == v2.VERSION and not deferred_sync
        write_flags = WriteFlag.DEFERRED_SYNC if deferred_sync else WriteFlag.NONE
        ready: dict[int, tuple[bytes, list[Hashable]]] = {}
        encoded: dict[int, tuple[bytes, Hashable]] = {}
        for action in actions:
            wire_version = v2.VERSION if in_v2 and not action.recovery else v3.VERSION
            shared = ready.get(id(action.frames))
            if shared is None:
                frames: list[bytes] = []
                keys: list[Hashable] = []
                for entry_id, body in zip(action.entry_ids, action.frames, strict=True):
                    known = encoded.get(entry_id)
                    if known is None:
                        known = encoded[entry_id] = self._encode_add(
                            entry_id, body, recovery=action.recovery, write_flags=write_flags, wire_version=wire_version
                        )
                    frames.append(known[0])
                    keys.append(known[1])
                shared = ready[id(action.frames)] = (b"".join(frames), keys)
            pool.connection(action.bookie_id, wire_version).send(shared[0], shared[1], sink, timeout_s=timeout_s)

    def _encode_add(
        self, entry_id: int, body: bytes, *, recovery: bool, write_flags: int, wire_version: int
    ) -> tuple[bytes, Hashable]:
        """Return the frame and its key."""
        key = self.digester.master_key
        if wire_version == v2.VERSION:
            request = AddRequest(v2.VERSION, self.ledger_id, entry_id, key, body)
            return v2.encode_request(request), v2.key_of(request)
        txn_id = self.pool.txn_id()
        request = AddRequest(
            txn_id, self.ledger_id, entry_id, key, body, recovery, int(write_flags), HIGH_PRIORITY if recovery else 0
        )
        return v3.encode_request(request), txn_id

    def send_reads(self, action: SendReads, sink: ResponseSink, *, timeout_s: float) -> None:
        settings = self.pool.settings
        if settings.wire_version == v2.VERSION and not action.fence:
            if (
                settings.batch_reads
                and len(action.entry_ids) >= BATCH_COUNT_MIN
                and is_run(action.entry_ids)
                and action.bookie_id not in self.pool.without_batch_reads
            ):
                BatchRead(self.pool, self.ledger_id, action, sink, timeout_s=timeout_s).send()
            else:
                reads = [ReadRequest(v2.VERSION, self.ledger_id, entry_id) for entry_id in action.entry_ids]
                self.pool.connection(action.bookie_id, v2.VERSION).send(
                    v2.encode_requests(reads), [v2.key_of(read) for read in reads], sink, timeout_s=timeout_s
                )
            return
        txn_ids = self.pool.txn_ids(len(action.entry_ids))
        if action.fence:
            requests = [
                ReadRequest(
                    txn_id,
                    self.ledger_id,
                    entry_id,
                    ReadFlag.FENCE_LEDGER,
                    self.digester.master_key,
                    priority=HIGH_PRIORITY,
                )
                for txn_id, entry_id in zip(txn_ids, action.entry_ids, strict=True)
            ]
        else:
            requests = [
                ReadRequest(txn_id, self.ledger_id, entry_id)
                for txn_id, entry_id in zip(txn_ids, action.entry_ids, strict=True)
            ]
        self.pool.connection(action.bookie_id).send(v3.encode_requests(requests), txn_ids, sink, timeout_s=timeout_s)

    def send_lac(self, action: SendLac, *, timeout_s: float) -> None:
        packet = pack_lac(self.digester, ledger_id=self.ledger_id, lac=action.lac)
        txn_id = self.pool.txn_id()
        request = WriteLacRequest(txn_id, self.ledger_id, action.lac, self.digester.master_key, packet)
        for bookie_id in action.bookie_ids:
            self._send_one(bookie_id, request, IGNORE_RESPONSES, timeout_s)

    def send_lac_read(self, bookie_id: BookieId, sink: ResponseSink, *, timeout_s: float) -> None:
        self._send_one(bookie_id, ReadLacRequest(self.pool.txn_id(), self.ledger_id), sink, timeout_s)

    def send_long_poll(
        self, bookie_id: BookieId, sink: ResponseSink, *, previous_lac: int, wait_s: float, timeout_s: float
    ) -> None:
        request = ReadRequest(
            self.pool.txn_id(),
            self.ledger_id,
            -1,
            ReadFlag.ENTRY_PIGGYBACK,
            previous_lac=previous_lac,
            timeout_ms=int(wait_s * 1000),
        )
        self._send_one(bookie_id, request, sink, timeout_s)

    def send_force(self, bookie_id: BookieId, sink: ResponseSink, *, timeout_s: float) -> None:
        self._send_one(bookie_id, ForceLedgerRequest(self.pool.txn_id(), self.ledger_id), sink, timeout_s)

    def send_list_entries(self, bookie_id: BookieId, sink: ResponseSink, *, timeout_s: float) -> None:
        self._send_one(bookie_id, ListEntriesRequest(self.pool.txn_id(), self.ledger_id), sink, timeout_s)

    def _send_one(self, bookie_id: BookieId, request: Request, sink: ResponseSink, timeout_s: float) -> None:
        self.pool.connection(bookie_id).send(v3.encode_request(request), (request.txn_id,), sink, timeout_s=timeout_s)


def reason_of(error: BinderyError) -> str:
    """Return a short reason for the failure of a bookie."""
    return error.message if isinstance(error, BookieUnavailable) else str(error)
