"""LedgerRequests: what the state machines ask for, as frames on the connections to the bookies.

A batch is encoded once, also when it goes to several bookies: transaction ids are the client's, not the connection's.
"""

from collections.abc import Callable, Sequence
from typing import Final

from bindery_core.digest import Digester
from bindery_core.entry import pack_lac
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger_actions import SendAdds, SendLac, SendReads
from bindery_core.wire import v3
from bindery_core.wire.messages import (
    HIGH_PRIORITY,
    AddRequest,
    ReadFlag,
    ReadLacRequest,
    ReadRequest,
    Request,
    WriteLacRequest,
)

from bindery_client.connection import ResponseSink
from bindery_client.pool import BookiePool

DEADLINE_SLACK_S: Final = 1.0
"""Added to the state machines' own deadlines, so that theirs pass first and the connection only tidies up."""

OnDegraded = Callable[[LedgerId, BookieId, str], None]
"""(ledger, bookie that lacks entries which no spare took over, reason): told once per bookie and handle."""


class Unheard:
    """A sink for requests whose answers do not matter."""

    def answered(self, bookie_id: BookieId, responses: Sequence[object]) -> None:
        pass

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        pass

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        pass


UNHEARD: Final = Unheard()


class LedgerRequests:
    """Requests about one ledger."""

    def __init__(self, ledger_id: LedgerId, digester: Digester, pool: BookiePool) -> None:
        self.ledger_id: Final = ledger_id
        self.digester: Final = digester
        self.pool: Final = pool

    def send_adds(self, actions: Sequence[SendAdds], sink: ResponseSink, *, timeout_s: float) -> None:
        """Actions of one call of a state machine: where they share entries, the bytes are shared too."""
        pool = self.pool
        ready: dict[int, tuple[bytes, list[int]]] = {}
        encoded: dict[int, tuple[bytes, int]] = {}
        for action in actions:
            shared = ready.get(id(action.frames))
            if shared is None:
                frames: list[bytes] = []
                txn_ids: list[int] = []
                for entry_id, body in zip(action.entry_ids, action.frames, strict=True):
                    known = encoded.get(entry_id)
                    if known is None:
                        txn_id = pool.txn_id()
                        frame = v3.encode_request(
                            AddRequest(
                                txn_id, self.ledger_id, entry_id, self.digester.master_key, body,
                                action.recovery, 0, HIGH_PRIORITY if action.recovery else 0,
                            )
                        )  # fmt: skip
                        known = encoded[entry_id] = (frame, txn_id)
                    frames.append(known[0])
                    txn_ids.append(known[1])
                shared = ready[id(action.frames)] = (b"".join(frames), txn_ids)
            pool.connection(action.bookie_id).send(shared[0], shared[1], sink, timeout_s=timeout_s)

    def send_reads(self, action: SendReads, sink: ResponseSink, *, timeout_s: float) -> None:
        txn_ids = self.pool.txn_ids(len(action.entry_ids))
        if action.fence:
            requests = [
                ReadRequest(
                    txn_id, self.ledger_id, entry_id, ReadFlag.FENCE_LEDGER, self.digester.master_key,
                    priority=HIGH_PRIORITY,
                )
                for txn_id, entry_id in zip(txn_ids, action.entry_ids, strict=True)
            ]  # fmt: skip
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
            self._send_one(bookie_id, request, UNHEARD, timeout_s)

    def send_lac_read(self, bookie_id: BookieId, sink: ResponseSink, *, timeout_s: float) -> None:
        self._send_one(bookie_id, ReadLacRequest(self.pool.txn_id(), self.ledger_id), sink, timeout_s)

    def send_long_poll(
        self, bookie_id: BookieId, sink: ResponseSink, *, previous_lac: int, wait_s: float, timeout_s: float
    ) -> None:
        request = ReadRequest(
            self.pool.txn_id(), self.ledger_id, -1, ReadFlag.ENTRY_PIGGYBACK,
            previous_lac=previous_lac, timeout_ms=int(wait_s * 1000),
        )  # fmt: skip
        self._send_one(bookie_id, request, sink, timeout_s)

    def _send_one(self, bookie_id: BookieId, request: Request, sink: ResponseSink, timeout_s: float) -> None:
        self.pool.connection(bookie_id).send(v3.encode_request(request), (request.txn_id,), sink, timeout_s=timeout_s)


def reason_of(error: BinderyError) -> str:
    """Why a bookie failed, in a few words."""
    return error.message if isinstance(error, BookieUnavailable) else str(error)
