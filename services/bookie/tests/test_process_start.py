"""The order of a start and of an end, in process, over the in-memory metadata store and real disks."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from bindery_bookie import process as process_module
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.engine import StorageEngine
from bindery_bookie.store import ReplayProgress
from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_kit.runtime import EXIT_ERROR, Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout import LedgersLayout
from bindery_metadata.memory import MemoryStore, MemoryTree

LAYOUT = LedgersLayout()


class World:
    def __init__(self, directory: Path) -> None:
        self.tree = MemoryTree()
        self.observer = self.tree.connect()
        self.shutdown = Shutdown()
        self.settings = BookieSettings(
            port=0,
            http_port=0,
            bookie_id="b0",
            journal_dir=str(directory / "journal"),
            ledger_dir=str(directory / "ledgers"),
        )
        self.process = BookieProcess(
            self.settings, self.shutdown, connect=self.connect, clock=time.monotonic, wall_clock_ms=lambda: 0
        )

    async def connect(self, _: BookieSettings) -> MemoryStore:
        return self.tree.connect()

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient() as http:
            return await http.get(f"http://127.0.0.1:{self.process.http_port}{path}")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await initialize_cluster(world.observer, LAYOUT, randomness=random.Random(1))
    yield world
    await world.process.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_long_replay_is_seen_from_outside_and_nobody_is_served_before_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch, connect_raw
) -> None:
    replaying, go_on = asyncio.Event(), asyncio.Event()
    really_open = StorageEngine.open

    async def slow_open(engine: StorageEngine, *, on_progress: Callable[[ReplayProgress], None]) -> None:
        on_progress(ReplayProgress(bytes_done=30, bytes_total=120, entries=7))
        replaying.set()
        await go_on.wait()
        await really_open(engine, on_progress=on_progress)

    monkeypatch.setattr(StorageEngine, "open", slow_open)
    monkeypatch.setattr(process_module, "HTTP_EARLY_S", 0.01)
    starting = asyncio.create_task(world.process.start())
    async with asyncio.timeout(10):
        await replaying.wait()
        while True:
            try:
                answer = await world.get("/startupz")
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.01)
    assert answer.status_code == 503
    assert answer.json()["progress"] == {
        "step": "replaying the journal (25 %, 7 entries)",
        "done": 30,
        "total": 120,
        "unit": "bytes",
    }
    assert (await world.get("/readyz")).status_code == 503
    assert (await world.get("/livez")).status_code == 200
    with pytest.raises(ConnectionRefusedError):
        await connect_raw(world.process.port)
    assert await world.observer.exists(LAYOUT.bookie(BookieId("b0"), read_only=False)) is None
    go_on.set()
    await starting
    assert (await world.get("/startupz")).status_code == (await world.get("/readyz")).status_code == 200
    await connect_raw(world.process.port)


async def test_it_registers_with_both_ports_and_leaves_before_it_stops_serving(world: World, connect_raw) -> None:
    await world.process.start()
    path = LAYOUT.bookie(BookieId("b0"), read_only=False)
    data = (await world.observer.get(path)).data
    assert b"bookie-rpc" in data
    assert b"httpserver" in data
    client = await connect_raw(world.process.port)
    await world.process.stop()
    assert await world.observer.exists(path) is None
    assert await client.is_closed()
    assert not (await is_listening(world.process.http_port))


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_a_lost_journal_ends_the_process_with_an_error(world: World) -> None:
    await world.process.start()
    running = asyncio.create_task(world.process.run())
    world.process._stats.journal_failed = True
    async with asyncio.timeout(10):
        await running
    assert world.shutdown.exit_code == EXIT_ERROR
    assert world.shutdown.reason == "the journal could not be written"
    assert (await world.get("/livez")).status_code == 503


async def test_a_shutdown_ends_the_run(world: World) -> None:
    await world.process.start()
    running = asyncio.create_task(world.process.run())
    world.shutdown.request("SIGTERM")
    async with asyncio.timeout(10):
        await running


async def test_a_start_that_fails_half_way_can_be_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_zookeeper(_: BookieSettings) -> MemoryStore:
        raise MetadataUnavailable("no zookeeper answers")

    monkeypatch.setattr(world.process, "_connect", no_zookeeper)
    with pytest.raises(MetadataUnavailable):
        await world.process.start()
    await world.process.stop()
    assert not (await is_listening(world.process.port))


async def test_a_taken_port_fails_before_anything_is_touched(world: World, tmp_path: Path) -> None:
    await world.process.start()
    second = World(tmp_path / "second")
    second.process._settings = world.settings.model_copy(update={"port": world.process.port})
    with pytest.raises(BadRequest, match="cannot listen"):
        await second.process.start()
    await second.process.stop()
    assert not (tmp_path / "second").exists()


async def test_an_id_that_is_no_id_is_refused(world: World) -> None:
    world.process._settings = world.settings.model_copy(update={"bookie_id": "a/b"})
    with pytest.raises(BadRequest, match="not a bookie id"):
        await world.process.start()
