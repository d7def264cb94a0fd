"""LedgerRequests over a pool in memory: which requests a bookie gets, in which version, and which bytes are shared."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from bindery_client.ledger.batch_read import BatchRead
from bindery_client.ledger.requests import IGNORE_RESPONSES, LedgerRequests, reason_of
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack, unpack_lac
from bindery_core.errors import BookieUnavailable, NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger.ledger_actions import SendAdds, SendLac, SendReads
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import (
    AddRequest,
    BatchReadRequest,
    ForceLedgerRequest,
    ListEntriesRequest,
    ReadFlag,
    ReadLacRequest,
    ReadRequest,
    Request,
    WriteLacRequest,
)
from sink import Sink

LEDGER = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C, b"password")
KEY = DIGESTER.master_key
A, B, C = (BookieId(name) for name in "abc")
TIMEOUT_S = 3.0


def frame(entry_id: int) -> bytes:
    return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=entry_id - 1, length=1, payload=b"x")


class Sent:
    """One call of `send` of the connection to a bookie."""

    def __init__(
        self,
        bookie_id: BookieId,
        wire_version: int,
        frames: bytes,
        keys: Sequence[object],
        sink: object,
        timeout_s: float,
    ) -> None:
        self.bookie_id = bookie_id
        self.wire_version = wire_version
        self.frames = frames
        self.keys = keys
        self.sink = sink
        self.timeout_s = timeout_s

    @property
    def requests(self) -> list[Request]:
        messages, rest = [], self.frames
        while rest:
            end = 4 + int.from_bytes(rest[:4], "big")
            messages.append(rest[4:end])
            rest = rest[end:]
        return v2.decode_requests(messages) if self.wire_version == 2 else v3.decode_requests(messages)


class ConnectionInMemory:
    def __init__(self, sent: list[Sent], bookie_id: BookieId, wire_version: int) -> None:
        self._sent = sent
        self._peer = bookie_id, wire_version

    def send(self, frames: bytes, keys: Sequence[object], sink: object, *, timeout_s: float) -> None:
        self._sent.append(Sent(*self._peer, frames, keys, sink, timeout_s))


class PoolInMemory:
    """Connections that record what is sent. Transaction ids begin at 100."""

    def __init__(self, **changes: Any) -> None:
        self.settings = replace(ClientSettings(), **changes)
        self.without_batch_reads: set[BookieId] = set()
        self.sent: list[Sent] = []
        self._txn_id = 99

    def txn_id(self) -> int:
        self._txn_id += 1
        return self._txn_id

    def txn_ids(self, number: int) -> list[int]:
        return [self.txn_id() for _ in range(number)]

    def connection(self, bookie_id: BookieId, wire_version: int = 3) -> ConnectionInMemory:
        return ConnectionInMemory(self.sent, bookie_id, wire_version)

    def only(self) -> Sent:
        (sent,) = self.sent
        return sent


def requests_over(pool: PoolInMemory) -> LedgerRequests:
    return LedgerRequests(LEDGER, DIGESTER, pool)  # type: ignore[arg-type]


# --- adds -------------------------------------------------------------------------------------------------------------


def test_the_same_entries_for_several_bookies_are_encoded_once() -> None:
    pool, sink = PoolInMemory(), Sink()
    ids, frames = [3, 4], [frame(3), frame(4)]
    requests_over(pool).send_adds([SendAdds(b, ids, frames) for b in (A, B, C)], sink, timeout_s=TIMEOUT_S)
    assert [sent.bookie_id for sent in pool.sent] == [A, B, C]
    assert all(sent.frames is pool.sent[0].frames and sent.keys is pool.sent[0].keys for sent in pool.sent)
    first = pool.sent[0]
    assert (first.wire_version, first.sink, first.timeout_s) == (3, sink, TIMEOUT_S)
    assert first.keys == [100, 101]
    assert first.requests == [
        AddRequest(100, LEDGER, 3, KEY, frames[0], recovery=False, write_flags=0, priority=0),
        AddRequest(101, LEDGER, 4, KEY, frames[1], recovery=False, write_flags=0, priority=0),
    ]


def test_an_entry_of_two_different_batches_keeps_its_frame_and_transaction() -> None:
    """With striping, the batches of two bookies overlap without being equal."""
    pool = PoolInMemory()
    three, four, five = frame(3), frame(4), frame(5)
    actions = [SendAdds(A, [3, 4], [three, four]), SendAdds(B, [4, 5], [four, five])]
    requests_over(pool).send_adds(actions, Sink(), timeout_s=TIMEOUT_S)
    assert [sent.keys for sent in pool.sent] == [[100, 101], [101, 102]]
    assert [[(r.txn_id, r.entry_id) for r in sent.requests] for sent in pool.sent] == [  # type: ignore[union-attr]
        [(100, 3), (101, 4)],
        [(101, 4), (102, 5)],
    ]


def test_another_call_uses_other_transactions() -> None:
    pool = PoolInMemory()
    requests = requests_over(pool)
    for _ in range(2):
        requests.send_adds([SendAdds(A, [3], [frame(3)])], Sink(), timeout_s=TIMEOUT_S)
    assert [sent.keys for sent in pool.sent] == [[100], [101]]


def test_a_batch_whose_entry_ids_and_frames_do_not_match_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        requests_over(PoolInMemory()).send_adds([SendAdds(A, [3, 4], [frame(3)])], Sink(), timeout_s=TIMEOUT_S)


def test_recovery_adds_have_the_flag_and_a_high_priority() -> None:
    pool = PoolInMemory()
    requests_over(pool).send_adds([SendAdds(A, [3], [frame(3)], recovery=True)], Sink(), timeout_s=TIMEOUT_S)
    assert pool.only().requests == [
        AddRequest(100, LEDGER, 3, KEY, frame(3), recovery=True, write_flags=0, priority=100)
    ]


def test_deferred_adds_have_the_flag_of_deferred_sync() -> None:
    pool = PoolInMemory()
    requests_over(pool).send_adds([SendAdds(A, [3], [frame(3)])], Sink(), timeout_s=TIMEOUT_S, deferred_sync=True)
    assert pool.only().requests == [
        AddRequest(100, LEDGER, 3, KEY, frame(3), recovery=False, write_flags=1, priority=0)
    ]


def test_adds_in_version_2_have_keys_without_transactions() -> None:
    pool = PoolInMemory(wire_version=2)
    requests_over(pool).send_adds([SendAdds(A, [3, 4], [frame(3), frame(4)])], Sink(), timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert sent.wire_version == 2
    assert [(r.ledger_id, r.entry_id, r.master_key, r.body, r.recovery) for r in sent.requests] == [  # type: ignore[union-attr]
        (7, 3, KEY, frame(3), False),
        (7, 4, KEY, frame(4), False),
    ]
    assert sent.keys == [v2.key_of(AddRequest(2, LEDGER, n, KEY, b"")) for n in (3, 4)]
    assert pool.txn_id() == 100, "no transaction was used"


@pytest.mark.parametrize(("recovery", "deferred_sync"), [(True, False), (False, True)])
def test_adds_that_version_2_cannot_express_use_version_3(recovery: bool, deferred_sync: bool) -> None:
    pool = PoolInMemory(wire_version=2)
    actions = [SendAdds(A, [3], [frame(3)], recovery=recovery)]
    requests_over(pool).send_adds(actions, Sink(), timeout_s=TIMEOUT_S, deferred_sync=deferred_sync)
    assert pool.only().wire_version == 3
    assert pool.only().keys == [100]
    assert pool.only().requests == [
        AddRequest(
            100, LEDGER, 3, KEY, frame(3), recovery, write_flags=int(deferred_sync), priority=100 if recovery else 0
        )
    ]


# --- reads ------------------------------------------------------------------------------------------------------------


def test_plain_reads_carry_no_key_and_no_flag() -> None:
    pool, sink = PoolInMemory(), Sink()
    requests_over(pool).send_reads(SendReads(B, [5, 2]), sink, timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert (sent.bookie_id, sent.wire_version, sent.sink, sent.timeout_s) == (B, 3, sink, TIMEOUT_S)
    assert sent.keys == [100, 101]
    assert sent.requests == [ReadRequest(100, LEDGER, 5), ReadRequest(101, LEDGER, 2)]


@pytest.mark.parametrize("wire_version", [2, 3])
def test_fencing_reads_use_version_3_with_the_key_and_a_high_priority(wire_version: int) -> None:
    pool, sink = PoolInMemory(wire_version=wire_version), Sink()
    requests_over(pool).send_reads(SendReads(A, [-1, 4], fence=True), sink, timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert (sent.wire_version, sent.sink, sent.timeout_s) == (3, sink, TIMEOUT_S)
    assert sent.keys == [100, 101]
    assert sent.requests == [
        ReadRequest(100, LEDGER, -1, ReadFlag.FENCE_LEDGER, KEY, priority=100),
        ReadRequest(101, LEDGER, 4, ReadFlag.FENCE_LEDGER, KEY, priority=100),
    ]


def test_a_run_of_entries_is_one_batch_read_in_version_2() -> None:
    pool = PoolInMemory(wire_version=2, frame_size_max=1_000_000)
    requests_over(pool).send_reads(SendReads(A, [4, 5]), Sink(), timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert (sent.bookie_id, sent.wire_version, sent.timeout_s) == (A, 2, TIMEOUT_S)
    assert isinstance(sent.sink, BatchRead)
    (request,) = sent.requests
    assert isinstance(request, BatchReadRequest)
    assert (request.ledger_id, request.entry_id, request.count_max, request.size_max) == (7, 4, 2, 1_000_000)


@pytest.mark.parametrize(
    ("entry_ids", "settings", "without_batch_reads"),
    [
        pytest.param([4], {}, set(), id="a single entry"),
        pytest.param([4, 6], {}, set(), id="no run"),
        pytest.param([4, 5], {"batch_reads": False}, set(), id="batch reads are off"),
        pytest.param([4, 5], {}, {A}, id="the bookie does not support them"),
    ],
)
def test_other_reads_in_version_2_are_one_request_per_entry(
    entry_ids: list[int], settings: dict[str, Any], without_batch_reads: set[BookieId]
) -> None:
    pool, sink = PoolInMemory(wire_version=2, **settings), Sink()
    pool.without_batch_reads = without_batch_reads
    requests_over(pool).send_reads(SendReads(A, entry_ids), sink, timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert (sent.bookie_id, sent.wire_version, sent.sink, sent.timeout_s) == (A, 2, sink, TIMEOUT_S)
    assert [(type(r), r.ledger_id, r.entry_id, r.flag) for r in sent.requests] == [  # type: ignore[union-attr]
        (ReadRequest, 7, n, 0) for n in entry_ids
    ]
    assert sent.keys == [v2.key_of(ReadRequest(2, LEDGER, n)) for n in entry_ids]


def test_a_bookie_that_does_not_support_batch_reads_does_not_change_the_others() -> None:
    pool = PoolInMemory(wire_version=2)
    pool.without_batch_reads = {B}
    requests_over(pool).send_reads(SendReads(A, [4, 5]), Sink(), timeout_s=TIMEOUT_S)
    assert [type(r) for r in pool.only().requests] == [BatchReadRequest]


# --- single requests --------------------------------------------------------------------------------------------------


def test_an_explicit_lac_goes_to_all_bookies_in_one_transaction_and_its_responses_are_ignored() -> None:
    pool = PoolInMemory(wire_version=2)
    requests_over(pool).send_lac(SendLac((A, B), 41), timeout_s=TIMEOUT_S)
    assert [(s.bookie_id, s.wire_version, s.sink, s.timeout_s) for s in pool.sent] == [
        (A, 3, IGNORE_RESPONSES, TIMEOUT_S),
        (B, 3, IGNORE_RESPONSES, TIMEOUT_S),
    ]
    for sent in pool.sent:
        assert tuple(sent.keys) == (100,)
        (request,) = sent.requests
        assert isinstance(request, WriteLacRequest)
        assert (request.txn_id, request.ledger_id, request.lac, request.master_key) == (100, 7, 41, KEY)
        assert unpack_lac(DIGESTER, request.body, ledger_id=LEDGER) == 41


def test_a_long_poll_waits_for_the_lac_after_the_known_one() -> None:
    pool, sink = PoolInMemory(), Sink()
    requests_over(pool).send_long_poll(A, sink, previous_lac=8, wait_s=2.5, timeout_s=TIMEOUT_S)
    sent = pool.only()
    assert (sent.bookie_id, sent.wire_version, sent.sink, sent.timeout_s) == (A, 3, sink, TIMEOUT_S)
    assert tuple(sent.keys) == (100,)
    assert sent.requests == [ReadRequest(100, LEDGER, -1, ReadFlag.ENTRY_PIGGYBACK, previous_lac=8, timeout_ms=2500)]


@pytest.mark.parametrize(
    ("send", "expected"),
    [
        (lambda r, sink: r.send_lac_read(A, sink, timeout_s=TIMEOUT_S), ReadLacRequest(100, LEDGER)),
        (lambda r, sink: r.send_force(A, sink, timeout_s=TIMEOUT_S), ForceLedgerRequest(100, LEDGER)),
        (lambda r, sink: r.send_list_entries(A, sink, timeout_s=TIMEOUT_S), ListEntriesRequest(100, LEDGER)),
    ],
    ids=["read lac", "force", "list entries"],
)
def test_requests_about_the_ledger_as_a_whole(send: Callable[[LedgerRequests, Sink], None], expected: Request) -> None:
    pool, sink = PoolInMemory(wire_version=2), Sink()
    send(requests_over(pool), sink)
    sent = pool.only()
    assert (sent.bookie_id, sent.wire_version, sent.sink, sent.timeout_s) == (A, 3, sink, TIMEOUT_S)
    assert tuple(sent.keys) == (100,)
    assert sent.requests == [expected]


# --- reasons ----------------------------------------------------------------------------------------------------------


def test_the_reason_of_an_unavailable_bookie_is_its_message_only() -> None:
    assert reason_of(BookieUnavailable("no answer in time", bookie_id=A)) == "no answer in time"
    assert "ledger_id=7" in reason_of(NoSuchLedger("no such ledger", ledger_id=7))
