"""A simulated connection delivers its bytes in order, or breaks."""

import asyncio
import random
from typing import Any

import pytest
from bindery_simulation.loop import Process, SimLoop
from bindery_simulation.network import ListeningSocket, Network
from bindery_simulation.trace import Trace
from bindery_simulation.transport import WINDOW_SIZE


class Recorder(asyncio.Protocol):
    def __init__(self) -> None:
        self.transport: Any = None
        self.received = bytearray()
        self.pieces = 0
        self.lost: list[Exception | None] = []
        self.pauses: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert not self.lost
        self.received += data
        self.pieces += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)

    def pause_writing(self) -> None:
        self.pauses.append("pause")

    def resume_writing(self) -> None:
        self.pauses.append("resume")


class Pair:
    """A server and a client on two hosts."""

    def __init__(self, seed: int = 0) -> None:
        self.loop = SimLoop()
        self.network = Network(self.loop, random.Random(seed), Trace())
        self.loop.network = self.network
        self.here, self.there = Process(self.loop, "here"), Process(self.loop, "there")
        self.accepted: list[Recorder] = []
        self.failures: list[dict[str, Any]] = []
        self.loop.on_exception = self.failures.append

    def play(self, script: Any) -> None:
        self.there.spawn(self._listen())
        task = self.here.spawn(script)
        self.loop.run_until(task.done, time_max=1000, callbacks_max=100_000)
        assert self.failures == []
        task.result()

    async def _listen(self) -> None:
        def accept() -> Recorder:
            self.accepted.append(Recorder())
            return self.accepted[-1]

        await asyncio.get_running_loop().create_server(accept, sock=ListeningSocket("there", 1))

    async def connect(self) -> tuple[Recorder, Recorder]:
        _, protocol = await asyncio.get_running_loop().create_connection(Recorder, "there", 1)
        assert isinstance(protocol, Recorder)
        return protocol, self.accepted[-1]


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("seed", range(20))
def test_bytes_arrive_in_order_and_once_in_any_pieces(seed) -> None:
    pair = Pair(seed)
    rng = random.Random(seed)
    sent = bytearray()

    async def script() -> None:
        mine, theirs = await pair.connect()
        for _ in range(50):
            data = rng.randbytes(rng.randint(1, 500))
            sent.extend(data)
            mine.transport.write(data)
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
        mine.transport.close()
        await asyncio.sleep(10)
        assert theirs.received == sent
        assert theirs.lost == [None]
        assert mine.lost == [None]

    pair.play(script())


def test_a_connect_without_a_listener_is_refused(pair) -> None:
    async def script() -> None:
        with pytest.raises(ConnectionRefusedError):
            await asyncio.get_running_loop().create_connection(Recorder, "there", 2)

    pair.play(script())


def test_a_host_without_power_does_not_answer_a_connect(pair) -> None:
    async def script() -> None:
        pair.network.power_off("there")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await pair.connect()

    pair.play(script())


@pytest.mark.parametrize("ways", [[("here", "there")], [("there", "here")], [("here", "there"), ("there", "here")]])
def test_bytes_arrive_after_a_partition(pair, ways) -> None:
    async def script() -> None:
        mine, theirs = await pair.connect()
        for way in ways:
            pair.network.block(*way)
        mine.transport.write(b"question")
        theirs.transport.write(b"answer")
        await asyncio.sleep(3)
        assert (theirs.received == b"question") is (("here", "there") not in ways)
        assert (mine.received == b"answer") is (("there", "here") not in ways)
        pair.network.heal()
        await asyncio.sleep(3)
        assert (theirs.received, mine.received) == (b"question", b"answer")

    pair.play(script())


def test_a_long_partition_breaks_the_connection_of_the_writer(pair) -> None:
    async def script() -> None:
        mine, theirs = await pair.connect()
        pair.network.block("here", "there")
        mine.transport.write(b"into the void")
        await asyncio.sleep(100)
        assert isinstance(mine.lost[0], TimeoutError)
        assert not theirs.lost
        assert theirs.received == b""

    pair.play(script())


def test_a_killed_process_resets_its_peers(pair) -> None:
    async def script() -> None:
        mine, theirs = await pair.connect()
        pair.there.kill()
        pair.network.process_killed(pair.there)
        await asyncio.sleep(1)
        assert isinstance(mine.lost[0], ConnectionResetError)
        assert theirs.lost == []

    pair.play(script())


def test_a_host_without_power_resets_old_connections_when_it_returns(pair) -> None:
    async def script() -> None:
        mine, _ = await pair.connect()
        pair.there.kill()
        pair.network.power_off("there")
        mine.transport.write(b"anybody?")
        await asyncio.sleep(10)
        assert mine.lost == []
        pair.network.power_on("there")
        await asyncio.sleep(1)
        assert isinstance(mine.lost[0], ConnectionResetError)

    pair.play(script())


@pytest.mark.parametrize("seed", range(10))
def test_a_reset_loses_the_last_bytes_of_both_directions(seed) -> None:
    pair = Pair(seed)

    async def script() -> None:
        mine, theirs = await pair.connect()
        for number in range(20):
            mine.transport.write(b"%02d" % number)
        assert pair.network.reset_some(1.0) == 1
        await asyncio.sleep(1)
        whole = b"".join(b"%02d" % number for number in range(20))
        assert whole.startswith(bytes(theirs.received))
        assert isinstance(mine.lost[0], ConnectionResetError)
        assert isinstance(theirs.lost[0], ConnectionResetError)

    pair.play(script())


def test_a_reader_that_stops_pauses_the_writer_until_it_continues(pair) -> None:
    async def script() -> None:
        mine, theirs = await pair.connect()
        mine.transport.set_write_buffer_limits(high=1000, low=100)
        theirs.transport.pause_reading()
        mine.transport.write(bytes(WINDOW_SIZE + 2000))
        await asyncio.sleep(5)
        assert theirs.received == b""
        assert mine.pauses == ["pause"]
        theirs.transport.resume_reading()
        await asyncio.sleep(5)
        assert len(theirs.received) == WINDOW_SIZE + 2000
        assert mine.pauses == ["pause", "resume"]

    pair.play(script())


def test_abort_resets_the_peer(pair) -> None:
    async def script() -> None:
        mine, theirs = await pair.connect()
        mine.transport.abort()
        await asyncio.sleep(1)
        assert mine.lost == [None]
        assert isinstance(theirs.lost[0], ConnectionResetError)

    pair.play(script())


def test_a_closed_listener_accepts_no_connection(pair) -> None:
    async def script() -> None:
        await pair.connect()
        for server in list(pair.network._servers.values()):
            server.close()
        with pytest.raises(ConnectionRefusedError):
            await pair.connect()

    pair.play(script())


def test_a_paused_process_accepts_connections_and_answers_when_it_resumes(pair) -> None:
    async def script() -> None:
        pair.there.pause()
        _, mine = await asyncio.get_running_loop().create_connection(Recorder, "there", 1)
        mine.transport.write(b"hello")
        await asyncio.sleep(5)
        assert pair.accepted == []
        pair.there.resume()
        await asyncio.sleep(1)
        assert pair.accepted[0].received == b"hello"

    pair.play(script())
