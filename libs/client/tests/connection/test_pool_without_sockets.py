"""BookiePool over a directory and a network in memory, with a simulated clock: quarantine, choices, absent bookies."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from bindery_client.connection.pool import ABSENT_TIME_S, BookiePool
from bindery_client.connection.security import ClientSecurity
from bindery_core.errors import BookieUnavailable, NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.wire import v3
from bindery_core.wire.messages import ReadResponse, Status
from bindery_metadata.bookies.directory import BookieRecord
from fake_cluster import QUICK
from network_in_memory import NetworkInMemory
from sink import Sink

A, B, C, D = (BookieId(name) for name in "abcd")
SETTINGS = replace(
    QUICK,
    quarantine_s=5.0,
    revisit_timeout_s=1.0,
    connect_timeout_s=3.0,
    reconnect_pause_s=1000.0,
    reconnect_pause_s_max=1000.0,
)
DOWN = "failed recently: down"


class DirectoryInMemory:
    """The registered bookies; the test changes them."""

    def __init__(self, *bookie_ids: BookieId) -> None:
        self.bookies: Mapping[BookieId, BookieRecord] = {}
        self.registered_meanwhile: tuple[BookieId, ...] = ()
        """Bookies that the next refresh finds in addition."""
        self.refreshes = 0
        self.listeners: list[Callable[[Mapping[BookieId, BookieRecord]], None]] = []
        self.set(*bookie_ids)

    def set(self, *bookie_ids: BookieId, read_only: tuple[BookieId, ...] = ()) -> None:
        self.bookies = {b: BookieRecord(b, f"host-{b}", 3181, b in read_only) for b in bookie_ids}
        for listener in self.listeners:
            listener(self.bookies)

    def address(self, bookie_id: BookieId) -> tuple[str, int] | None:
        record = self.bookies.get(bookie_id)
        return (record.host, record.port) if record else None

    async def refresh(self) -> None:
        self.refreshes += 1
        if self.registered_meanwhile:
            self.set(*self.bookies, *self.registered_meanwhile)

    def on_change(self, listener: Callable[[Mapping[BookieId, BookieRecord]], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


class Bench:
    """A pool of these bookies."""

    def __init__(self, *bookie_ids: BookieId, security: ClientSecurity | None = None) -> None:
        self.network = NetworkInMemory()
        self.directory = DirectoryInMemory(*bookie_ids)
        options: dict[str, Any] = {} if security is None else {"security": security}
        self.pool = BookiePool(
            self.directory,  # type: ignore[arg-type]
            settings=SETTINGS,
            randomness=random.Random(1),
            **options,
        )

    async def make_unreachable(self, bookie_id: BookieId, wire_version: int = 3) -> None:
        self.network.refusal = ConnectionRefusedError()
        assert not await self.pool.connection(bookie_id, wire_version).probe()
        self.network.refusal = None

    def send(self, bookie_id: BookieId) -> Sink:
        sink = Sink()
        txn_id = self.pool.txn_id()
        self.pool.connection(bookie_id).send(b"<frame>", [txn_id], sink, timeout_s=1000.0)
        return sink


async def settle() -> None:
    """Return when every task is blocked."""
    await asyncio.sleep(0)
    await asyncio.sleep(1e-6)


# --- connections ------------------------------------------------------------------------------------------------------


async def test_transaction_ids_are_never_repeated() -> None:
    pool = Bench(A).pool
    ids = [pool.txn_id(), *pool.txn_ids(3), pool.txn_id(), *pool.txn_ids(0)]
    assert ids == [1, 2, 3, 4, 5], "0 belongs to the handshake"


async def test_a_connection_uses_the_settings_and_the_wire_version_asked_for() -> None:
    pool = Bench(A).pool
    assert pool.connection(A).wire_version == 3
    assert pool.connection(A, 2).wire_version == 2
    assert pool.connection(A) is pool.connection(A, 3)
    assert pool.connection(A) is not pool.connection(B)


async def test_a_connection_authenticates_with_the_token_of_the_pool() -> None:
    bench = Bench(A, security=ClientSecurity(token=b"a token"))
    probe = asyncio.create_task(bench.pool.connection(A).probe())
    await settle()
    assert b"a token" in bench.network.wires[0].written[0]
    await bench.pool.close()
    assert await probe is False


async def test_a_connection_goes_to_the_address_in_the_directory() -> None:
    bench = Bench(A)
    assert await bench.pool.connection(A).probe()
    assert bench.network.attempts == [("host-a", 3181)]
    assert bench.directory.refreshes == 0


async def test_a_bookie_that_is_not_in_the_snapshot_is_looked_up_once_more() -> None:
    bench = Bench()
    bench.directory.registered_meanwhile = (A,)
    assert await bench.pool.connection(A).probe()
    assert bench.directory.refreshes == 1


async def test_a_bookie_that_is_not_registered_is_not_contacted() -> None:
    bench = Bench()
    sink = bench.send(A)
    await sink.news()
    assert "bookie is not registered" in str(sink.errors[0].__cause__)
    assert bench.directory.refreshes == 1
    assert not bench.network.attempts


async def test_close_ends_every_connection_and_later_ones_fail_at_once() -> None:
    bench = Bench(A, B)
    before = bench.send(A)
    assert await bench.pool.connection(B, 2).probe()
    await settle()
    await bench.pool.close()
    assert len(bench.network.wires) == 2
    assert all(wire.aborted for wire in bench.network.wires)
    assert len(before.errors) == 1
    assert not bench.directory.listeners
    late = bench.send(A)
    await settle()
    assert [str(error).startswith("connection was closed") for error in late.errors] == [True]
    assert len(bench.network.wires) == 2


# --- absent bookies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_the_idle_connection_to_an_absent_bookie_is_closed_after_a_time(wire_version: int) -> None:
    bench = Bench(A, B)
    assert await bench.pool.connection(A, wire_version).probe()
    assert await bench.pool.connection(B, wire_version).probe()
    absent, present = bench.network.wires
    bench.directory.set(B)
    await asyncio.sleep(ABSENT_TIME_S - 0.1)
    assert not absent.aborted
    await asyncio.sleep(0.2)
    assert absent.aborted
    await asyncio.sleep(3 * ABSENT_TIME_S)
    assert not present.aborted


async def test_the_connection_to_a_bookie_that_returned_in_time_is_kept() -> None:
    bench = Bench(A, B)
    connection = bench.pool.connection(A)
    assert await connection.probe()
    bench.directory.set(B)
    await asyncio.sleep(ABSENT_TIME_S / 2)
    bench.directory.set(A, B)
    await asyncio.sleep(3 * ABSENT_TIME_S)
    assert connection.is_connected
    assert bench.pool.connection(A) is connection


async def test_the_connection_to_an_absent_bookie_is_kept_while_requests_are_in_flight() -> None:
    bench = Bench(A, B)
    sink = bench.send(A)
    await settle()
    (wire,) = bench.network.wires
    bench.directory.set(B)
    await asyncio.sleep(2.5 * ABSENT_TIME_S)
    assert not wire.aborted
    wire.receive(v3.encode_response(ReadResponse(1, Status.NO_ENTRY, 7, 0)))
    assert sink.txn_ids == [1]
    await asyncio.sleep(ABSENT_TIME_S)
    assert wire.aborted


async def test_close_waits_for_connections_that_are_closing_already() -> None:
    bench = Bench(A)
    connection = bench.pool.connection(A)
    bench.directory.set()
    await asyncio.sleep(ABSENT_TIME_S - 1.0)
    bench.directory.bookies = {A: BookieRecord(A, "host", 3181, False)}
    bench.network.reachable.clear()
    probe = asyncio.create_task(connection.probe())
    await settle()
    bench.directory.bookies = {}
    await asyncio.sleep(1.0 - 1e-6)  # now the connection is dropped, while it connects
    await bench.pool.close()
    assert asyncio.all_tasks() <= {asyncio.current_task(), probe}
    assert await probe is False


async def test_the_free_space_of_an_absent_bookie_is_forgotten() -> None:
    bench = Bench(A, B)
    bench.pool.free_bytes.update({A: 1, B: 2})
    bench.directory.set(B)
    assert bench.pool.free_bytes == {B: 2}
    assert [(c.bookie_id, c.free_bytes) for c in bench.pool.candidates()] == [(B, 2)]


# --- bookies to avoid -------------------------------------------------------------------------------------------------


async def test_quarantine_lasts_its_time_and_ends_then() -> None:
    pool = Bench(A, B).pool
    pool.quarantine(A, "down")
    assert pool.quarantined() == {A: DOWN}
    await asyncio.sleep(4.75)
    assert pool.quarantined() == {A: DOWN}
    assert pool.to_avoid() == {A}
    await asyncio.sleep(0.25)
    assert pool.quarantined() == {}
    assert pool.to_avoid() == frozenset()


async def test_a_bookie_that_registers_again_leaves_the_quarantine_and_is_tried_at_once() -> None:
    bench = Bench(A, B)
    await bench.make_unreachable(A)
    await bench.make_unreachable(A, 2)
    bench.pool.quarantine(A, "down")
    bench.pool.quarantine(B, "down")
    bench.pool.without_batch_reads.update({A, B})
    bench.directory.set(B)
    assert bench.pool.quarantined() == {A: DOWN, B: DOWN}
    bench.directory.set(A, B)
    assert bench.pool.quarantined() == {B: DOWN}
    assert bench.pool.without_batch_reads == {B}, "it may be another version of the bookie"
    attempts = len(bench.network.attempts)
    for wire_version in (2, 3):
        bench.pool.connection(A, wire_version).send(b"<frame>", [1], Sink(), timeout_s=1000.0)
    await settle()
    assert len(bench.network.attempts) == attempts + 2


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_an_unreachable_bookie_is_avoided(wire_version: int) -> None:
    bench = Bench(A, B)
    await bench.make_unreachable(A, wire_version)
    assert await bench.pool.connection(B).probe()
    assert bench.pool.is_unreachable(A) is True
    assert bench.pool.is_unreachable(B) is False
    assert bench.pool.to_avoid() == {A}


async def test_read_only_bookies_are_candidates_with_that_refusal() -> None:
    bench = Bench()
    bench.directory.set(A, B, read_only=(B,))
    assert [(c.bookie_id, c.refusal) for c in bench.pool.candidates()] == [(A, None), (B, "read-only")]


async def test_a_new_ledger_avoids_bookies_in_quarantine_while_there_are_others() -> None:
    pool = Bench(A, B, C, D).pool
    pool.quarantine(A, "down")
    for _ in range(20):
        assert set(pool.choose_ensemble(ensemble_size=3, write_quorum=2, ack_quorum=2)) == {B, C, D}


async def test_a_new_ledger_takes_bookies_in_quarantine_that_are_reachable_if_there_are_no_others() -> None:
    bench = Bench(A, B, C, D)
    await bench.make_unreachable(A)
    bench.pool.quarantine(A, "down")
    bench.pool.quarantine(B, "down")
    for _ in range(20):
        assert set(bench.pool.choose_ensemble(ensemble_size=3, write_quorum=2, ack_quorum=2)) == {B, C, D}


async def test_a_new_ledger_does_not_take_unreachable_bookies_and_names_the_reason() -> None:
    bench = Bench(A, B, C)
    await bench.make_unreachable(A)
    bench.pool.quarantine(A, "down")
    with pytest.raises(NotEnoughBookies) as error:
        bench.pool.choose_ensemble(ensemble_size=3, write_quorum=2, ack_quorum=2)
    assert DOWN in str(error.value)


async def test_replacements_are_never_members_nor_excluded_nor_in_quarantine() -> None:
    bench = Bench(A, B, C, D, BookieId("e"))
    bench.pool.quarantine(D, "down")
    assert bench.pool.choose_replacements((A, B), {1: B}, write_quorum=2, exclude={C: "tried"}) == {1: BookieId("e")}
    bench.pool.quarantine(BookieId("e"), "down")
    assert bench.pool.choose_replacements((A, B), {1: B}, write_quorum=2) == {1: C}
    chosen = {
        bench.pool.choose_replacements((A, B), {1: B}, write_quorum=2, exclude={C: "tried"})[1] for _ in range(50)
    }
    assert chosen == {D, BookieId("e")}, "quarantined, but reachable"


# --- revisit ----------------------------------------------------------------------------------------------------------


async def test_revisit_finds_a_quarantined_bookie_that_can_be_reached_again() -> None:
    bench = Bench(A, B)
    await bench.make_unreachable(A)
    bench.pool.quarantine(A, "down")
    assert await bench.pool.revisit() is True
    assert not bench.pool.is_unreachable(A)


async def test_revisit_reports_that_no_bookie_answers() -> None:
    bench = Bench(A, B)
    await bench.make_unreachable(A)
    bench.pool.quarantine(A, "down")
    bench.network.refusal = ConnectionRefusedError()
    assert await bench.pool.revisit() is False
    assert len(bench.network.attempts) == 2


async def test_revisit_connects_only_to_bookies_that_are_registered_in_quarantine_and_unreachable() -> None:
    bench = Bench(A, B, C)
    for bookie_id in (A, B):
        await bench.make_unreachable(bookie_id)
    bench.pool.quarantine(A, "down")
    assert await bench.pool.connection(C).probe()
    bench.pool.quarantine(C, "down")
    bench.directory.set(B, C)
    attempts = len(bench.network.attempts)
    assert await bench.pool.revisit() is False
    assert len(bench.network.attempts) == attempts, "A is absent, B is not in quarantine, C is connected"


async def test_revisit_waits_for_its_timeout_at_most_and_leaves_no_task() -> None:
    bench = Bench(A)
    await bench.make_unreachable(A)
    bench.pool.quarantine(A, "down")
    bench.network.reachable.clear()
    begin = asyncio.get_running_loop().time()
    assert await bench.pool.revisit() is False
    assert asyncio.get_running_loop().time() - begin == pytest.approx(SETTINGS.revisit_timeout_s, abs=0.01)
    await settle()
    assert len(asyncio.all_tasks()) == 2, "this test, and the attempt to connect, which has its own timeout"
    await bench.pool.close()


async def test_an_error_of_the_pool_is_that_of_an_unavailable_bookie() -> None:
    bench = Bench(A)
    bench.network.refusal = ConnectionRefusedError()
    sink = bench.send(A)
    await sink.news()
    assert [type(error) for error in sink.errors] == [BookieUnavailable]
