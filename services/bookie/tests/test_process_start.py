"""The order of start and stop, in this process, with the in-memory metadata store and real disks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from bindery_bookie import process as process_module
from bindery_bookie.state import READ_ONLY_DISK, READ_ONLY_SESSION
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.store import ReplayProgress
from bindery_core.errors import BadRequest, MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_kit.http.listening import BindRefused
from bindery_kit.process import cluster_wait
from bindery_kit.process.runtime import EXIT_ERROR
from bindery_metadata.stores.memory import MemoryStore
from bookie_world import LAYOUT, BookieWorld, running


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[BookieWorld]:
    world = BookieWorld(tmp_path, wall_clock_ms=lambda: 0)
    async with running(world):
        yield world


async def test_the_progress_of_a_long_replay_is_visible_and_no_client_is_served_before_its_end(
    world: BookieWorld, monkeypatch: pytest.MonkeyPatch, connect_raw
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
    async with asyncio.timeout(30):
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
    page = (await world.get("/metrics")).text
    assert "\nbookie_SERVER_STATUS -1\n" in page
    assert "\nbindery_bookie_metrics_broken 0\n" in page
    assert "bookie_ledgers_count" not in page, "not counted yet"
    assert (await world.get("/api/v1/bookie/disks")).status_code == 200
    assert (await world.get("/api/v1/bookie/gc")).json()["code"] == "starting"
    with pytest.raises(ConnectionRefusedError):
        await connect_raw(world.process.port)
    assert await world.observer.exists(LAYOUT.bookie(BookieId("b0"), read_only=False)) is None
    go_on.set()
    await starting
    assert (await world.get("/startupz")).status_code == (await world.get("/readyz")).status_code == 200
    await connect_raw(world.process.port)


async def test_the_bookie_registers_with_both_ports_and_unregisters_when_it_stops(
    world: BookieWorld, connect_raw
) -> None:
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


async def test_a_lost_journal_ends_the_process_with_an_error(world: BookieWorld) -> None:
    await world.process.start()
    running = asyncio.create_task(world.process.life.until_shutdown())
    world.process.shards[0].stats.journal_failed = True
    async with asyncio.timeout(30):
        await running
    assert world.shutdown.exit_code == EXIT_ERROR
    assert world.shutdown.reason == "the journal could not be written"
    assert (await world.get("/livez")).status_code == 503


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error", "/data"), "cannot use /data: Input/output error; the disk fails"),
        (None, "without a request to stop"),
    ],
)
async def test_the_end_of_a_part_ends_the_process_with_the_error(
    world: BookieWorld, error: Exception | None, said: str
) -> None:
    async def part() -> None:
        if error is not None:
            raise error

    await world.process.start()
    world.process.life.start_part("scrub", part())
    async with asyncio.timeout(30):
        await world.process.life.until_shutdown()
    assert world.shutdown.exit_code == EXIT_ERROR
    assert world.shutdown.reason.startswith(f"scrub ended: {said}")


async def test_a_requested_shutdown_ends_the_run(world: BookieWorld) -> None:
    await world.process.start()
    running = asyncio.create_task(world.process.life.until_shutdown())
    world.shutdown.request("SIGTERM")
    async with asyncio.timeout(30):
        await running


@pytest.mark.parametrize("asked", ["/bindery/membership", "/cookies", "/available"])
async def test_the_start_waits_for_a_zookeeper_that_restarts(
    world: BookieWorld, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """ZooKeeper may be restarted in an upgrade; a bookie that ended would replay its journal again."""
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.01)
    refused = []

    def matches(_: str, path: str) -> bool:
        if asked in path:
            refused.append(path)
        return asked in path

    async def connect() -> MemoryStore:
        store = await world.connect()
        for _ in range(3):
            store.fail_next(MetadataUnavailable("zookeeper did not respond"), matching=matches)
        return store

    monkeypatch.setattr(world.process, "_connect", connect)
    async with asyncio.timeout(30):
        await world.process.start()
    assert len(refused) >= 3
    assert await world.observer.exists(LAYOUT.bookie(BookieId("b0"), read_only=False)) is not None


async def test_a_start_that_fails_half_way_can_be_stopped(world: BookieWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_zookeeper() -> MemoryStore:
        raise MetadataUnavailable("no zookeeper server responds")

    monkeypatch.setattr(world.process, "_connect", no_zookeeper)
    with pytest.raises(MetadataUnavailable):
        await world.process.start()
    await world.process.stop()
    assert not (await is_listening(world.process.port))


async def test_a_port_in_use_fails_before_any_directory_is_created(world: BookieWorld, tmp_path: Path) -> None:
    await world.process.start()
    second = BookieWorld(tmp_path / "second", wall_clock_ms=lambda: 0)
    second.process._settings = world.settings.model_copy(update={"port": world.process.port})
    with pytest.raises(BindRefused, match="cannot listen"):
        await second.process.start()
    await second.process.stop()
    assert not (tmp_path / "second").exists()


async def test_an_invalid_id_is_refused(world: BookieWorld) -> None:
    world.process._settings = world.settings.model_copy(update={"bookie_id": "a/b"})
    with pytest.raises(BadRequest, match="not a bookie id"):
        await world.process.start()


async def test_a_read_only_bookie_is_ready_with_a_note_about_the_cause(world: BookieWorld) -> None:
    await world.process.start()
    world.process.state.set_read_only(READ_ONLY_DISK, "the ledger disk is full: 96 %")
    answer = await world.get("/readyz")
    assert (answer.status_code, answer.json()["notes"]) == (
        200,
        {"read_only": "no adds are accepted: the ledger disk is full: 96 %"},
    )
    assert (await world.get("/livez")).status_code == 200
    world.process.state.set_read_only(READ_ONLY_DISK, None)
    assert (await world.get("/readyz")).json() == {"status": "ready"}


async def test_a_lost_session_does_not_fail_liveness(world: BookieWorld) -> None:
    await world.process.start()
    world.process.state.set_read_only(READ_ONLY_SESSION, "the ZooKeeper session was lost")
    world.process.health.block("metadata", "the ZooKeeper session was lost; registering again")
    assert (await world.get("/readyz")).status_code == 503
    assert (await world.get("/livez")).status_code == 200
    assert (await world.get("/startupz")).status_code == 200
