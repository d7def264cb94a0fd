"""The admin application over a store and a metadata tree in memory; other parts are fakes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.admin.app import AdminApp
from bindery_bookie.admin.context import AdminContext
from bindery_bookie.admin.shard import EngineShard
from bindery_bookie.state import BookieState
from bindery_bookie.storage.collection.collection_interface import (
    CollectionKind,
    GarbageState,
    LogExplanation,
    LogInfo,
    LogState,
    NoSuchEntryLog,
)
from bindery_bookie.storage.corruption.limbo import LimboState
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.scrub.scrub import ScrubState
from bindery_bookie.storage.scrub.scrub_state import Region
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_kit.observability.health import Health
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryTree

LAYOUT = LedgersLayout()


class Admin:
    """The real application. `context`: fields of its context that differ from the defaults."""

    def __init__(self, store: Any, **context: Any) -> None:
        self.store, self.state, self.health = store, BookieState(), Health()
        self.metadata = MemoryTree().connect()
        self.manager = LedgerManager(self.metadata, LAYOUT, randomness=random.Random(3))
        defaults: dict[str, Any] = {
            "bookie_id": "bookie-0",
            "store": store,
            "state": self.state,
            "health": self.health,
            "settings": lambda: {"port": "3181"},
            "is_open": lambda: True,
            "disk": RealDisk(),
            "layout": LAYOUT,
            "randomness": random.Random(5),
            "metadata": lambda: self.metadata,
        }
        self.app = AdminApp(AdminContext(**{**defaults, **context}))
        self.http = self.client()

    def client(self, **headers: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://bookie", headers=headers)

    async def initialize(self) -> None:
        await initialize_cluster(self.metadata, LAYOUT, randomness=random.Random(1))


class FakeCollector:
    """A collector with settable state, which records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool, bool]] = []
        self.running: CollectionKind | None = None
        self.minor_suspended = self.major_suspended = False
        self.infos = [
            LogInfo(31, "1f.log", LogState.SEALED, 1000, 250, 0.25, 2, 5, 31, 1_700_000_000_000),
            LogInfo(32, "20.log", LogState.OPEN, 500, 500, 1.0, 3, 0, 32, 1_700_000_000_000),
        ]

    def state(self) -> GarbageState:
        return GarbageState(
            self.running,
            None,
            0,
            0,
            self.minor_suspended,
            self.major_suspended,
            5,
            6,
            7,
            1.5,
            None,
            9.0,
            "",
            2,
            1500,
            750,
            750,
            None,
        )

    def logs(self) -> list[LogInfo]:
        return self.infos

    async def refresh(self) -> list[LogInfo]:
        return self.infos[:1]

    async def explain(self, log_id: int) -> LogExplanation:
        for info in self.infos:
            if info.log_id == log_id:
                return LogExplanation(info, [3, 4], [1], CollectionKind.MAJOR, 60.0, ["a quarter of it is alive"])
        raise NoSuchEntryLog(log_id=log_id)

    def request(self, *, minor: bool = False, major: bool = False, force: bool = False) -> None:
        self.asked.append(("force" if force else "request", minor, major))

    def suspend(self, *, minor: bool = False, major: bool = False) -> None:
        self.minor_suspended |= minor
        self.major_suspended |= major

    def resume(self, *, minor: bool = False, major: bool = False) -> None:
        self.minor_suspended &= not minor
        self.major_suspended &= not major


class FakeEngine:
    """The part of an engine that `EngineShard` uses."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.stats = StorageStats()
        self.limbo: LimboState | None = None
        self.compactions = 0
        self.fails = False

    async def compact_index(self) -> None:
        self.compactions += 1
        if self.fails:
            raise OSError("no")


class FakeScrubber:
    """A scrubber with fixed state, which records the requested rates."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def state(self) -> ScrubState:
        return ScrubState(True, "entries", (7, 8), 12.5, 3, 11, 9, 10, 9, 0, 100, 2000, 1e6, 1, "")

    def regions(self) -> list[Region]:
        return [Region("/l/1f.log", 64, 100, "digest differs", 7, 8, 1, 12)]

    def request(self, *, rate: int | None = None) -> bool:
        self.asked.append(rate)
        return False


@pytest.fixture
async def make_admin(memory_store: Any) -> Callable[..., Admin]:
    return lambda **context: Admin(memory_store, **context)


@pytest.fixture
async def admin(make_admin: Callable[..., Admin]) -> Admin:
    made = make_admin()
    await made.initialize()
    return made


@pytest.fixture
def engines(tmp_path: Path) -> list[FakeEngine]:
    """The engines of two shards, with empty directories."""
    made = []
    for at in range(2):
        for name in ("journal", "ledgers"):
            (tmp_path / f"{name}-{at}" / "current" / "index").mkdir(parents=True)
        made.append(
            FakeEngine(
                StorageSettings(
                    journal_directory=str(tmp_path / f"journal-{at}"), ledger_directory=str(tmp_path / f"ledgers-{at}")
                )
            )
        )
    return made


@pytest.fixture
def gc() -> list[FakeCollector]:
    return [FakeCollector(), FakeCollector()]


@pytest.fixture
def scrubs() -> list[FakeScrubber]:
    return [FakeScrubber(), FakeScrubber()]


@pytest.fixture
async def sharded(
    make_admin: Callable[..., Admin], engines: list[FakeEngine], gc: list[FakeCollector], scrubs: list[FakeScrubber]
) -> Admin:
    """A bookie of two shards."""
    shards = [
        EngineShard(engine, wall_clock_ms=lambda: 99, collector=lambda at=at: gc[at], scrubber=lambda at=at: scrubs[at])
        for at, engine in enumerate(engines)
    ]
    return make_admin(shards=lambda: shards)
