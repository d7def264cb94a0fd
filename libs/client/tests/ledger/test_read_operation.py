"""`read_range` over bookies in memory, with a simulated clock: the size of its steps, its requests and its timeouts."""

import asyncio
import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from bindery_client.ledger.read_operation import ReadOperation, read_entries
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import BookieUnavailable, NoSuchEntry
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire.messages import ReadResponse, Status

LEDGER = LedgerId(7)
DIGESTER = Digester(DigestType.CRC32C)
A, B, C, D = (BookieId(name) for name in "abcd")
OPEN = LedgerMetadata(ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),))
SETTINGS = ClientSettings(read_timeout_s=5.0, speculative_read_s=2.0)
DOWN = BookieUnavailable("down", bookie_id=A)


class Cluster:
    """Bookies that hold the same entries, whose payloads have the given sizes. Responses arrive after `delay_s`."""

    ledger_id = LEDGER
    digester = DIGESTER

    def __init__(self, sizes: Sequence[int]) -> None:
        self.pool = self
        self.sizes = sizes
        self.avoided: frozenset[BookieId] = frozenset()
        self.silent: set[BookieId] = set()
        self.down: set[BookieId] = set()
        self.missing: set[int] = set()
        self.delay_s = 0.0
        self.requests: list[tuple[BookieId, tuple[int, ...], bool, float]] = []
        """Bookie, entries, whether it fences, and timeout of each request."""
        self.sinks: list[Any] = []
        self.metadata_calls = 0
        self.lacs: list[int] = []

    def metadata(self) -> LedgerMetadata:
        self.metadata_calls += 1
        return OPEN

    def to_avoid(self) -> frozenset[BookieId]:
        return self.avoided

    def operation(self, first: int, last: int, **changes: Any) -> ReadOperation:
        return ReadOperation(self, OPEN, entry_ids=range(first, last + 1), settings=replace(SETTINGS, **changes))  # type: ignore[arg-type]

    async def read(self, first: int, last: int, *, average_size: int = 1, **changes: Any) -> list[tuple[int, int, int]]:
        """Read a range. Return the id, payload size and ledger length of each entry."""
        entries = await read_entries(
            self,  # type: ignore[arg-type]
            self.metadata,
            entry_ids=range(first, last + 1),
            average_size=average_size,
            settings=replace(SETTINGS, **changes),
            on_lac=self.lacs.append,
        )
        return [(entry.entry_id, len(entry.payload), entry.length) for entry in entries]

    def send_reads(self, action: SendReads, sink: Any, *, timeout_s: float) -> None:
        self.requests.append((action.bookie_id, tuple(action.entry_ids), action.fence, timeout_s))
        self.sinks.append(sink)
        loop = asyncio.get_running_loop()
        if action.bookie_id in self.down:
            loop.call_soon(sink.failed, action.bookie_id, DOWN)
        elif action.bookie_id not in self.silent:
            loop.call_later(self.delay_s, sink.answered, action.bookie_id, self.responses(action.entry_ids))

    def responses(self, entry_ids: Sequence[int]) -> list[ReadResponse]:
        return [
            ReadResponse(0, Status.NO_ENTRY, LEDGER, entry_id)
            if entry_id in self.missing
            else ReadResponse(0, Status.OK, LEDGER, entry_id, self.frame(entry_id), entry_id + 100)
            for entry_id in entry_ids
        ]

    def frame(self, entry_id: int) -> bytes:
        payload, length = b"x" * self.sizes[entry_id], sum(self.sizes[: entry_id + 1])
        return pack(DIGESTER, ledger_id=LEDGER, entry_id=entry_id, lac=entry_id - 1, length=length, payload=payload)


# --- one step ---------------------------------------------------------------------------------------------------------


async def test_a_range_is_returned_in_order_with_the_length_up_to_each_entry() -> None:
    cluster = Cluster([3, 4, 5, 6])
    assert await cluster.read(1, 3) == [(1, 4, 7), (2, 5, 12), (3, 6, 18)]
    assert cluster.metadata_calls == 1


async def test_each_entry_is_read_from_the_first_bookie_of_its_write_set_without_fencing() -> None:
    cluster = Cluster([1] * 4)
    await cluster.read(0, 3)
    assert sorted(cluster.requests) == [(A, (0, 3), False, 6.0), (B, (1,), False, 6.0), (C, (2,), False, 6.0)]


async def test_the_entries_of_a_read_are_freed_with_the_last_reference_to_them() -> None:
    """Not only by the next collection of cyclic garbage: reads of large entries would take all memory before it."""
    cluster = Cluster([100_000] * 3)
    gc.collect()
    gc.disable()
    try:
        operation = cluster.operation(0, 2)
        entries = await operation.run()
        assert len(entries) == 3
        freed = weakref.ref(operation)
        cluster.sinks.clear()
        del operation
        assert freed() is None
    finally:
        gc.enable()


async def test_bookies_to_avoid_are_read_last() -> None:
    cluster = Cluster([1] * 3)
    cluster.avoided = frozenset({A, C})
    await cluster.read(0, 2)
    assert cluster.requests == [(B, (0, 1, 2), False, 6.0)]


async def test_with_batch_reads_a_hundred_entries_in_a_row_are_read_from_one_bookie() -> None:
    cluster = Cluster([1] * 201)
    await cluster.read(0, 200, wire_version=2)
    assert [(bookie_id, ids[0], ids[-1], len(ids)) for bookie_id, ids, _, _ in cluster.requests] == [
        (A, 0, 99, 100),
        (B, 100, 199, 100),
        (C, 200, 200, 1),
    ]


@pytest.mark.parametrize(("wire_version", "batch_reads"), [(3, True), (2, False)])
async def test_without_batch_reads_entries_are_read_in_turn(wire_version: int, batch_reads: bool) -> None:
    cluster = Cluster([1] * 3)
    await cluster.read(0, 2, wire_version=wire_version, batch_reads=batch_reads)
    assert sorted(ids for _, ids, _, _ in cluster.requests) == [(0,), (1,), (2,)]


# --- replicas that fail -----------------------------------------------------------------------------------------------


async def test_a_bookie_that_is_down_is_replaced_at_once_by_the_next() -> None:
    cluster = Cluster([1])
    cluster.down = {A}
    assert await cluster.read(0, 0) == [(0, 1, 1)]
    assert [bookie_id for bookie_id, *_ in cluster.requests] == [A, B]


async def test_an_entry_that_no_bookie_could_return_fails_with_the_reason_of_a_bookie() -> None:
    cluster = Cluster([1])
    cluster.down = {A, B, C}
    with pytest.raises(BookieUnavailable, match="down"):
        await cluster.read(0, 0)


async def test_an_entry_that_every_bookie_denies_does_not_exist() -> None:
    cluster = Cluster([1, 1])
    cluster.missing = {1}
    with pytest.raises(NoSuchEntry):
        await cluster.read(0, 1)


@pytest.mark.parametrize(("speculative_read_s", "seconds"), [(2.0, 2.0), (0.5, 0.5), (0.0, 5.0)])
async def test_a_silent_bookie_delays_a_read_by_the_speculative_time(speculative_read_s: float, seconds: float) -> None:
    """0: no speculative reads, so that the next bookie is read at the read timeout."""
    cluster = Cluster([1])
    cluster.silent = {A}
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    assert await cluster.read(0, 0, speculative_read_s=speculative_read_s) == [(0, 1, 1)]
    assert loop.time() - began_at == pytest.approx(seconds)
    assert [bookie_id for bookie_id, *_ in cluster.requests] == [A, B]


async def test_responses_after_the_end_and_expired_requests_change_nothing() -> None:
    cluster = Cluster([1])
    cluster.silent = {A}
    operation = cluster.operation(0, 0)
    entries = await operation.run()
    sink = cluster.sinks[0]
    sink.expired(A, DOWN)
    sink.failed(A, DOWN)
    sink.answered(A, cluster.responses([0]))
    assert [entry.entry_id for entry in entries] == [0]
    await asyncio.sleep(100.0)
    assert len(cluster.requests) == 2


async def test_an_expired_request_alone_does_not_count_as_a_failure() -> None:
    """The timeouts of the reader are earlier than those of connections."""
    cluster = Cluster([1])
    cluster.delay_s = 1.0
    reading = asyncio.create_task(cluster.read(0, 0))
    await asyncio.sleep(0.5)
    cluster.sinks[0].expired(A, DOWN)
    assert await reading == [(0, 1, 1)]
    assert [bookie_id for bookie_id, *_ in cluster.requests] == [A]


async def test_a_read_that_is_cancelled_sends_no_speculative_read() -> None:
    cluster = Cluster([1])
    cluster.silent = {A}
    reading = asyncio.create_task(cluster.read(0, 0))
    await asyncio.sleep(1.0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(100.0)
    assert [bookie_id for bookie_id, *_ in cluster.requests] == [A]


# --- steps ------------------------------------------------------------------------------------------------------------


async def read_in_steps(sizes: Sequence[int], *, average_size: int, **changes: Any) -> list[int]:
    """Read entries of these sizes. Return the number of entries of each step."""
    cluster = Cluster(sizes)
    cluster.avoided = frozenset({B, C})  # so that each step is one request
    found = await cluster.read(0, len(sizes) - 1, average_size=average_size, **changes)
    assert [entry_id for entry_id, _, _ in found] == list(range(len(sizes)))
    assert cluster.metadata_calls == len(cluster.requests), "the metadata may change between steps"
    return [len(ids) for _, ids, _, _ in cluster.requests]


async def test_a_step_has_at_most_the_entries_of_the_settings() -> None:
    assert await read_in_steps([1] * 10, average_size=1, read_batch_entries_max=4) == [4, 4, 2]


async def test_the_first_step_is_sized_by_the_average_size_and_the_next_by_the_entries_read() -> None:
    assert await read_in_steps([10] * 20, average_size=40, read_batch_bytes_max=80) == [2, 8, 8, 2]


async def test_the_average_counts_each_entry_of_the_last_step() -> None:
    assert await read_in_steps([10, 30, 20, 20, 20, 20, 20], average_size=50, read_batch_bytes_max=100) == [2, 5]


async def test_a_step_has_at_least_one_entry() -> None:
    assert await read_in_steps([10] * 3, average_size=1000, read_batch_bytes_max=5) == [1, 1, 1]


async def test_empty_entries_are_read_as_if_they_had_one_byte() -> None:
    assert await read_in_steps([0] * 5, average_size=0, read_batch_bytes_max=3) == [3, 2]


async def test_the_highest_lac_in_the_responses_of_each_step_is_reported() -> None:
    cluster = Cluster([1] * 5)
    await cluster.read(0, 4, read_batch_entries_max=2)
    assert cluster.lacs == [101, 103, 104]


async def test_the_caller_need_not_be_told_the_lac() -> None:
    cluster = Cluster([1])
    entries = await read_entries(
        cluster,  # type: ignore[arg-type]
        cluster.metadata,
        entry_ids=[0],
        average_size=1,
        settings=SETTINGS,
    )
    assert [entry.payload for entry in entries] == [b"x"]
