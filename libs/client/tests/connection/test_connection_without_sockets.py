"""BookieConnection over a network in memory with a simulated clock: writes, delays, deadlines, limits, equal keys."""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from bindery_client.connection.connection import CLOSED_BY_PEER, BookieConnection
from bindery_client.connection.security import NO_SECURITY, ClientSecurity, load_security
from bindery_core.errors import BinderyError, BookieUnavailable
from bindery_core.ids import BookieId
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import AuthResponse, ErrorResponse, ReadRequest, ReadResponse, Response, Status
from fake_cluster import QUICK
from network_in_memory import NetworkInMemory, WireInMemory
from sink import Sink

BOOKIE = BookieId("b")
TICK_S = 0.5
SETTINGS = replace(
    QUICK,
    timer_tick_s=TICK_S,
    connect_timeout_s=3.0,
    reconnect_pause_s=1.0,
    reconnect_pause_s_max=4.0,
    in_flight_bytes_max=10,
    client_bytes_max=50,
    connection_bytes_max=100,
)
LONG_S = 1000.0
TOKEN = ClientSecurity(token=b"a token")


async def settle() -> None:
    """Return when every task is blocked."""
    await asyncio.sleep(0)
    await asyncio.sleep(1e-6)


def now() -> float:
    return asyncio.get_running_loop().time()


class Bench:
    """One connection, and the network that it uses."""

    def __init__(self, *, wire_version: int = 3, security: ClientSecurity = NO_SECURITY) -> None:
        self.network = NetworkInMemory()
        self.connection = BookieConnection(
            BOOKIE, resolve=self._resolve, settings=SETTINGS, wire_version=wire_version, security=security
        )

    async def _resolve(self, bookie_id: BookieId) -> tuple[str, int]:
        assert bookie_id == BOOKIE
        return "host", 3181

    @property
    def wire(self) -> WireInMemory:
        """The newest connection."""
        return self.network.wires[-1]

    def send(
        self, frames: bytes, keys: Sequence[Hashable], sink: Sink | None = None, *, timeout_s: float = LONG_S
    ) -> Sink:
        sink = sink or Sink()
        self.connection.send(frames, keys, sink, timeout_s=timeout_s)
        return sink

    async def connect(self) -> WireInMemory:
        assert await self.connection.probe()
        return self.wire

    def answer(self, *txn_ids: int) -> None:
        self.wire.receive(v3.encode_responses([read_response(txn_id) for txn_id in txn_ids]))

    def answer_v2(self, *entry_ids: int) -> None:
        self.wire.receive(v2.encode_responses([ReadResponse(2, Status.NO_ENTRY, 7, e) for e in entry_ids]))


def read_response(txn_id: int) -> Response:
    return ReadResponse(txn_id, Status.NO_ENTRY, 7, 0)


def key(entry_id: int) -> Hashable:
    return v2.key_of(ReadRequest(2, 7, entry_id))


# --- sending ----------------------------------------------------------------------------------------------------------


async def test_frames_sent_before_the_connection_is_open_are_one_write_in_their_order() -> None:
    bench = Bench()
    for number in range(3):
        bench.send(b"<%d>" % number, [number])
    assert bench.connection.requests_in_flight == 3
    assert bench.connection.bytes_in_flight == 9
    await settle()
    assert bench.network.attempts == [("host", 3181)], "one attempt for all"
    assert bench.wire.written == [b"<0><1><2>"]


async def test_each_turn_of_the_loop_is_one_write_that_repeats_nothing() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.send(b"<1>", [1])
    assert not wire.written, "not within send"
    await settle()
    bench.send(b"<2>", [2])
    bench.send(b"<3>", [3])
    await settle()
    bench.send(b"<4>", [4])
    await settle()
    assert wire.written == [b"<1>", b"<2><3>", b"<4>"]


async def test_nothing_is_written_while_the_transport_is_full() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.connection.pause_writing()
    bench.send(b"<1>", [1])
    await settle()
    bench.send(b"<2>", [2])
    await settle()
    assert not wire.written
    bench.connection.resume_writing()
    assert wire.written == [b"<1><2>"]
    bench.send(b"<3>", [3])
    await settle()
    assert wire.written == [b"<1><2>", b"<3>"]


async def test_a_new_connection_is_not_paused_although_the_lost_one_was() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.connection.pause_writing()
    wire.lose(None)
    await settle()
    bench.send(b"<1>", [1])
    await settle()
    assert bench.wire is not wire
    assert bench.wire.written == [b"<1>"]


async def test_frames_that_failed_with_a_lost_connection_are_not_sent_on_the_next() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.connection.pause_writing()
    sink = bench.send(b"<1>", [1])
    await settle()
    wire.lose(None)
    await settle()
    assert len(sink.errors) == 1
    assert bench.connection.bytes_in_flight == bench.connection.requests_in_flight == 0
    bench.send(b"<2>", [2])
    await settle()
    assert bench.wire.written == [b"<2>"]


@pytest.mark.parametrize(("size", "refused"), [(50, False), (51, True)])
async def test_bytes_in_flight_reach_their_limit_and_do_not_exceed_it(size: int, refused: bool) -> None:
    bench = Bench()
    await bench.connect()
    bench.send(b"x" * 50, [1])
    sink = bench.send(b"x" * size, [2])
    assert not sink.errors, "never within send"
    await settle()
    assert [error.facts for error in sink.errors] == [
        {"bookie_id": BOOKIE, "bytes_in_flight": 50, "bytes_in_flight_max": 100}
    ] * refused
    assert bench.connection.bytes_in_flight == (50 if refused else 100)
    bench.answer(1)
    assert bench.connection.bytes_in_flight == (0 if refused else 50)


async def test_a_request_above_the_limit_is_accepted_alone() -> None:
    bench = Bench()
    await bench.connect()
    sink = bench.send(b"x" * 101, [1])
    await settle()
    assert not sink.errors
    assert bench.connection.bytes_in_flight == 101


# --- connecting -------------------------------------------------------------------------------------------------------


async def test_a_new_connection_object_is_neither_connected_nor_unreachable() -> None:
    connection = Bench().connection
    assert connection.is_connected is False
    assert connection.is_unreachable is False
    assert connection.bytes_in_flight == connection.requests_in_flight == 0


async def test_after_a_failed_attempt_requests_fail_at_once_until_the_delay_is_over() -> None:
    bench = Bench()
    bench.network.refusal = ConnectionRefusedError("refused")
    failed = bench.send(b"<1>", [1])
    await settle()
    (error,) = failed.errors
    assert error.facts["cause"] == "ConnectionRefusedError('refused')"
    assert error.__cause__ is bench.network.refusal
    assert bench.connection.is_unreachable is True
    await asyncio.sleep(0.25)
    refused = bench.send(b"<2>", [2])
    assert not refused.errors, "never within send"
    await settle()
    assert refused.errors[0].facts["retry_in_s"] == pytest.approx(0.75, abs=0.0006)
    assert len(str(refused.errors[0].facts["retry_in_s"])) <= len("0.750"), "milliseconds"
    assert len(bench.network.attempts) == 1
    await asyncio.sleep(0.75)
    bench.network.refusal = None
    bench.send(b"<3>", [3])
    await settle()
    assert len(bench.network.attempts) == 2
    assert bench.wire.written == [b"<3>"]


async def test_the_delay_ends_at_its_exact_time() -> None:
    bench = Bench()
    bench.network.refusal = ConnectionRefusedError()
    bench.network.reachable.clear()
    bench.send(b"<1>", [1])
    await asyncio.sleep(0.5)
    bench.network.reachable.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(bench.network.attempts) == 1
    await asyncio.sleep(1.0)
    bench.send(b"<2>", [2])
    await settle()
    assert len(bench.network.attempts) == 2


async def test_the_delay_doubles_up_to_its_maximum_and_a_response_resets_it() -> None:
    bench = Bench()

    async def delay_after_failure() -> float:
        bench.network.refusal = ConnectionRefusedError()
        assert not await bench.connection.probe()
        sink = bench.send(b"<1>", [1])
        await sink.news()
        return float(round(sink.errors[0].facts["retry_in_s"]))

    assert [await delay_after_failure() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    bench.network.refusal = None
    await bench.connect()
    bench.send(b"<2>", [2])
    bench.answer(2)
    bench.wire.lose(None)
    await settle()
    assert bench.connection.is_unreachable
    assert await delay_after_failure() == 2.0, "the lost connection counts as one failure"


async def test_after_a_lost_connection_the_next_request_connects_at_once() -> None:
    bench = Bench()
    wire = await bench.connect()
    lost = bench.send(b"<1>", [1])
    wire.lose(ConnectionResetError("reset"))
    await settle()
    assert [error.facts["cause"] for error in lost.errors] == ["ConnectionResetError('reset')"]
    assert bench.connection.is_unreachable is True
    assert not bench.connection.is_connected
    bench.send(b"<2>", [2])
    await settle()
    assert bench.wire.written == [b"<2>"]
    assert bench.connection.is_unreachable is False


async def test_a_connection_that_the_peer_closed_names_that_cause() -> None:
    bench = Bench()
    wire = await bench.connect()
    sink = bench.send(b"<1>", [1])
    wire.lose(None)
    await settle()
    assert [error.facts["cause"] for error in sink.errors] == [CLOSED_BY_PEER]


async def test_a_bookie_that_registers_again_is_tried_at_once() -> None:
    bench = Bench()
    bench.network.refusal = ConnectionRefusedError()
    assert not await bench.connection.probe()
    bench.network.refusal = None
    bench.connection.retry_now()
    bench.send(b"<1>", [1])
    await settle()
    assert bench.wire.written == [b"<1>"]


async def test_an_attempt_to_connect_ends_at_its_timeout() -> None:
    bench = Bench()
    bench.network.reachable.clear()
    begin = now()
    sink = bench.send(b"<1>", [1])
    await sink.news()
    assert now() - begin == pytest.approx(SETTINGS.connect_timeout_s)
    assert isinstance(sink.errors[0].__cause__, TimeoutError)
    assert bench.connection.is_unreachable


async def test_a_probe_joins_the_attempt_that_is_under_way_and_reports_its_result() -> None:
    bench = Bench()
    bench.network.reachable.clear()
    probes = [asyncio.create_task(bench.connection.probe()) for _ in range(2)]
    bench.send(b"<1>", [1])
    await settle()
    assert not any(probe.done() for probe in probes)
    bench.network.reachable.set()
    assert [await probe for probe in probes] == [True, True]
    assert await bench.connection.probe() is True
    assert len(bench.network.attempts) == 1


# --- closing ----------------------------------------------------------------------------------------------------------


async def test_a_closed_connection_refuses_everything_and_never_connects() -> None:
    bench = Bench()
    await bench.connection.close()
    sink = bench.send(b"<1>", [1])
    assert await bench.connection.probe() is False
    await settle()
    assert [str(error).startswith("connection was closed") for error in sink.errors] == [True]
    assert not bench.network.attempts


async def test_close_ends_the_transport_and_fails_each_request_once() -> None:
    bench = Bench()
    wire = await bench.connect()
    sink = bench.send(b"<1>", [1], timeout_s=1.0)
    await bench.connection.close()
    assert wire.aborted
    assert not bench.connection.is_connected
    assert bench.connection.requests_in_flight == bench.connection.bytes_in_flight == 0
    await asyncio.sleep(5.0)
    assert len(sink.errors) == 1
    assert not sink.expiries
    assert not bench.connection.is_unreachable, "it was not lost"
    await bench.connection.close()


async def test_close_ends_an_attempt_to_connect() -> None:
    bench = Bench()
    bench.network.reachable.clear()
    sink = bench.send(b"<1>", [1])
    await settle()
    begin = now()
    await bench.connection.close()
    assert now() == begin
    assert len(sink.errors) == 1
    bench.network.reachable.set()
    await settle()
    assert not bench.network.wires


async def test_a_transport_that_opens_after_the_end_is_ended() -> None:
    bench = Bench()
    await bench.connection.close()
    wire = WireInMemory(bench.connection)
    bench.connection.connection_made(wire)
    assert wire.aborted
    assert not bench.connection.is_connected


# --- receiving --------------------------------------------------------------------------------------------------------


async def test_the_responses_of_one_read_are_one_call_per_sink() -> None:
    bench = Bench()
    await bench.connect()
    first, second = Sink(), Sink()
    bench.send(b"<1>", [1], first)
    bench.send(b"<2>", [2], second)
    bench.send(b"<3>", [3], first)
    bench.answer(1, 2, 3)
    assert [[response.txn_id for response in batch] for batch in first.batches] == [[1, 3]]
    assert [[response.txn_id for response in batch] for batch in second.batches] == [[2]]


async def test_bytes_of_a_batch_are_in_flight_until_its_last_response() -> None:
    bench = Bench()
    await bench.connect()
    sink = bench.send(b"<1><2><3>", [1, 2, 3])
    bench.answer(1)
    bench.answer(3)
    assert bench.connection.bytes_in_flight == 9
    assert bench.connection.requests_in_flight == 1
    bench.answer(2)
    assert bench.connection.bytes_in_flight == bench.connection.requests_in_flight == 0
    assert sink.txn_ids == [1, 3, 2]


async def test_an_unknown_response_is_ignored_and_those_after_it_are_not() -> None:
    bench = Bench()
    await bench.connect()
    sink = bench.send(b"<1>", [1])
    bench.answer(99, 1)
    assert sink.txn_ids == [1]
    assert bench.connection.is_connected


async def test_a_refused_operation_fails_its_sink_after_the_answers_of_the_same_read() -> None:
    bench = Bench()
    await bench.connect()
    answered, refused = Sink(), Sink()
    bench.send(b"<1>", [1], answered)
    bench.send(b"<2>", [2], refused)
    bench.wire.receive(v3.encode_responses([read_response(1), ErrorResponse(2, 2, Status.UNAUTHORIZED)]))
    assert answered.txn_ids == [1]
    assert not answered.errors
    assert not refused.batches, "no call without responses"
    (error,) = refused.errors
    assert error.facts == {"bookie_id": BOOKIE, "operation": 2, "status": Status.UNAUTHORIZED}
    assert bench.connection.requests_in_flight == 0


async def test_a_malformed_response_ends_the_connection_and_fails_what_is_in_flight() -> None:
    bench = Bench()
    wire = await bench.connect()
    sink = bench.send(b"<1>", [1])
    wire.receive(b"\x00\x00\x00\x03\xff\xff\xff")
    await settle()
    assert wire.aborted
    assert len(sink.errors) == 1


async def test_the_beginning_of_a_frame_is_forgotten_with_its_connection() -> None:
    bench = Bench()
    wire = await bench.connect()
    wire.receive(v3.encode_response(read_response(1))[:5])
    wire.lose(None)
    await settle()
    await bench.connect()
    sink = bench.send(b"<1>", [1])
    bench.answer(1)
    assert sink.txn_ids == [1]


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_s", "expires_after_s"), [(1.75, 2.0), (2.0, 2.5), (0.25, 0.5)])
async def test_a_request_expires_at_the_first_tick_after_its_deadline(timeout_s: float, expires_after_s: float) -> None:
    bench = Bench()
    bench.connection.connection_made(WireInMemory(bench.connection))
    begin = now()
    sink = bench.send(b"<1>", [1], timeout_s=timeout_s)
    await sink.news()
    assert now() - begin == expires_after_s
    (error,) = sink.expiries
    assert isinstance(error, BookieUnavailable)
    assert bench.connection.requests_in_flight == bench.connection.bytes_in_flight == 0


async def test_requests_of_different_deadlines_expire_in_their_order_and_once() -> None:
    bench = Bench()
    await bench.connect()
    order: list[str] = []

    class Named(Sink):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
            order.append(self.name)

    for name, txn_id, timeout_s in (("last", 1, 4.0), ("first", 2, 1.0), ("second", 3, 2.0)):
        bench.send(b"<x>", [txn_id], Named(name), timeout_s=timeout_s)
    bench.send(b"<y>", [4])
    bench.answer(4)
    for _ in range(8):
        await asyncio.sleep(0.6)
        bench.answer(99)  # something arrives, so the connection stays open
    assert order == ["first", "second", "last"]
    assert bench.connection.is_connected


async def test_one_late_tick_expires_everything_that_is_due() -> None:
    bench = Bench()
    await bench.connect()
    sinks = [bench.send(b"<x>", [n], timeout_s=n * TICK_S) for n in range(1, 6)]
    bench.answer(99)
    loop = asyncio.get_running_loop()
    loop._pass(10.0)  # type: ignore[attr-defined]  # the process was suspended
    await settle()
    assert [len(sink.expiries) + len(sink.errors) for sink in sinks] == [1] * 5


async def test_the_timer_starts_again_for_a_request_after_a_pause() -> None:
    bench = Bench()
    await bench.connect()
    bench.send(b"<1>", [1], timeout_s=0.1)
    bench.answer(1)
    await asyncio.sleep(100.25)
    begin = now()
    sink = bench.send(b"<2>", [2], timeout_s=1.0)
    await sink.news()
    assert TICK_S <= now() - begin <= 1.0 + 2 * TICK_S


async def test_an_expired_request_without_any_response_ends_the_connection() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.send(b"<1>", [1])
    bench.answer(1)
    sink = bench.send(b"<2>", [2], timeout_s=1.0)  # sent at the time of the last response
    await sink.news()
    await settle()
    assert wire.aborted


async def test_an_expired_request_leaves_a_connection_open_that_received_something_since() -> None:
    bench = Bench()
    wire = await bench.connect()
    bench.send(b"<1>", [1])
    sink = bench.send(b"<2>", [2], timeout_s=1.0)
    await asyncio.sleep(0.1)
    bench.answer(1)
    await sink.news()
    await settle()
    assert not wire.aborted
    assert len(sink.expiries) == 1
    bench.answer(2)  # too late
    assert not sink.batches
    assert bench.connection.bytes_in_flight == 0


async def test_the_time_of_the_last_response_does_not_count_for_a_new_connection() -> None:
    bench = Bench()
    wire = await bench.connect()
    sink = bench.send(b"<1>", [1], timeout_s=1.0)
    await asyncio.sleep(0.25)
    bench.answer(99)
    wire.lose(None)
    await settle()
    assert len(sink.errors) == 1
    late = bench.send(b"<2>", [2], timeout_s=1.0)
    await settle()
    await late.news()
    await settle()
    assert bench.wire is not wire
    assert bench.wire.aborted


async def test_a_batch_that_was_answered_in_part_expires_with_the_rest() -> None:
    bench = Bench()
    await bench.connect()
    sink = bench.send(b"<1><2>", [1, 2], timeout_s=1.0)
    await asyncio.sleep(0.1)
    bench.answer(1)
    await sink.news()
    await sink.news()
    assert sink.txn_ids == [1]
    assert len(sink.expiries) == 1
    assert bench.connection.requests_in_flight == bench.connection.bytes_in_flight == 0


# --- version 2: equal keys --------------------------------------------------------------------------------------------


async def test_equal_requests_are_answered_in_the_order_in_which_they_were_sent() -> None:
    bench = Bench(wire_version=2)
    await bench.connect()
    sinks = [bench.send(b"<%d>" % n, [key(5)]) for n in range(3)]
    other = bench.send(b"<4>", [key(6)])
    assert bench.connection.requests_in_flight == 4
    for answered in range(1, 4):
        bench.answer_v2(5)
        assert [len(sink.batches) for sink in sinks] == [1] * answered + [0] * (3 - answered)
        assert bench.connection.requests_in_flight == 4 - answered
    assert not other.batches
    bench.answer_v2(5, 6)
    assert [len(sink.batches) for sink in [*sinks, other]] == [1] * 4, "a fourth response belongs to nobody"
    assert bench.connection.bytes_in_flight == 0


async def test_equal_keys_of_one_batch_need_one_response_each() -> None:
    bench = Bench(wire_version=2)
    await bench.connect()
    first = bench.send(b"<1>", [key(5)])
    pair = bench.send(b"<2><3>", [key(5), key(5)])
    assert bench.connection.requests_in_flight == 3
    bench.answer_v2(5, 5)
    assert (len(first.txn_ids), len(pair.txn_ids)) == (1, 1)
    assert bench.connection.bytes_in_flight == 6
    bench.answer_v2(5)
    assert len(pair.txn_ids) == 2
    assert bench.connection.bytes_in_flight == bench.connection.requests_in_flight == 0


@pytest.mark.parametrize("hasty", [0, 1, 2])
async def test_one_of_equal_requests_that_expires_leaves_the_others_in_their_order(hasty: int) -> None:
    bench = Bench(wire_version=2)
    await bench.connect()
    sinks = [bench.send(b"<%d>" % n, [key(5)], timeout_s=1.0 if n == hasty else LONG_S) for n in range(3)]
    await asyncio.sleep(0.1)
    bench.answer_v2(99)  # something arrives, so the connection stays open
    await sinks[hasty].news()
    assert bench.connection.requests_in_flight == 2
    assert bench.connection.bytes_in_flight == 6
    rest = [sink for n, sink in enumerate(sinks) if n != hasty]
    bench.answer_v2(5)
    assert [len(sink.batches) for sink in rest] == [1, 0]
    bench.answer_v2(5)
    assert [len(sink.batches) for sink in rest] == [1, 1]
    assert not sinks[hasty].batches
    assert bench.connection.requests_in_flight == bench.connection.bytes_in_flight == 0


async def test_equal_requests_fail_together_when_the_connection_is_lost() -> None:
    bench = Bench(wire_version=2)
    wire = await bench.connect()
    sinks = [bench.send(b"<%d>" % n, [key(5)]) for n in range(3)]
    wire.lose(None)
    await settle()
    assert [len(sink.errors) for sink in sinks] == [1, 1, 1]
    assert bench.connection.requests_in_flight == bench.connection.bytes_in_flight == 0


# --- authentication ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_the_token_is_sent_first_and_requests_follow_its_acceptance(wire_version: int) -> None:
    codec = v3 if wire_version == 3 else v2
    bench = Bench(wire_version=wire_version, security=TOKEN)
    bench.send(b"<1>", [1])
    await settle()
    (frame,) = bench.wire.written
    (request,) = codec.decode_requests([frame[4:]])
    assert (request.plugin, request.payload) == (TOKEN.plugin, TOKEN.token)  # type: ignore[union-attr]
    assert not bench.connection.is_connected
    bench.wire.receive(codec.encode_response(AuthResponse(0, Status.OK, TOKEN.plugin)))
    await settle()
    assert bench.connection.is_connected
    assert bench.wire.written[1:] == [b"<1>"]


async def test_a_new_connection_sends_the_newest_token_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"the first")
    bench = Bench(security=load_security(token_file=file))

    async def token_sent() -> bytes:
        bench.send(b"<1>", [1])
        await settle()
        (request,) = v3.decode_requests([bench.wire.written[0][4:]])
        bench.wire.lose(None)
        await asyncio.sleep(2 * SETTINGS.reconnect_pause_s_max)
        return request.payload  # type: ignore[union-attr]

    assert await token_sent() == b"the first"
    file.with_name("new").write_bytes(b"the second\n")
    file.with_name("new").rename(file)
    assert await token_sent() == b"the second"
    file.write_bytes(b"")
    assert await token_sent() == b"the second", "an empty file changes nothing"


@pytest.mark.parametrize(
    "response", [AuthResponse(0, Status.UNAUTHORIZED, "bindery"), ErrorResponse(0, 8, Status.UNAUTHORIZED)]
)
async def test_rejected_credentials_end_the_connection_and_fail_requests(response: Response) -> None:
    bench = Bench(security=TOKEN)
    sink = bench.send(b"<1>", [1])
    await settle()
    wire = bench.wire
    wire.receive(v3.encode_response(response))
    await settle()
    assert wire.aborted
    assert len(wire.written) == 1, "no request"
    assert "rejects the credentials" in str(sink.errors[0].__cause__)
    assert bench.connection.is_unreachable


async def test_a_connection_lost_during_authentication_fails_at_once() -> None:
    bench = Bench(security=TOKEN)
    begin = now()
    sink = bench.send(b"<1>", [1])
    await settle()
    bench.wire.lose(ConnectionResetError("reset"))
    await sink.news()
    assert now() - begin < 0.1
    assert "before it was ready" in str(sink.errors[0].__cause__)
    assert not bench.connection.is_connected


async def test_a_second_response_to_the_token_ends_the_connection() -> None:
    bench = Bench(security=TOKEN)
    sink = bench.send(b"<1>", [1])
    await settle()
    wire = bench.wire
    accepted = v3.encode_response(AuthResponse(0, Status.OK, TOKEN.plugin))
    wire.receive(accepted + accepted)
    await settle()
    assert wire.aborted
    assert len(sink.errors) == 1


async def test_a_malformed_frame_during_authentication_fails_at_once() -> None:
    bench = Bench(security=TOKEN)
    begin = now()
    sink = bench.send(b"<1>", [1])
    await settle()
    wire = bench.wire
    wire.receive(b"\xff\xff\xff\xff")
    await sink.news()
    assert now() - begin < 0.1
    assert wire.aborted
    assert not bench.connection.is_connected


async def test_close_during_authentication_ends_the_transport() -> None:
    bench = Bench(security=TOKEN)
    sink = bench.send(b"<1>", [1])
    await settle()
    await bench.connection.close()
    assert bench.wire.aborted
    assert len(sink.errors) == 1
