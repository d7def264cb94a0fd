"""A bookie's storage on a disk that can lose power, driven in one event loop, reproducible by seed."""

import asyncio
import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.kv import OpenKV
from bindery_bookie.storage.io.worker import Done
from bindery_bookie.storage.settings import StorageSettings
from bindery_core.wire.messages import AddRequest, Status
from bindery_simulation.disk import CrashableDisk, CrashableKV
from bindery_simulation.storage.engines import SMALL

KEY = b"k" * 20


def entry(ledger_id: int, entry_id: int, payload: bytes = b"", *, lac: int = -1) -> bytes:
    return struct.pack(">qqqq", ledger_id, entry_id, lac, len(payload)) + payload


def add_request(body: bytes, *, key: bytes = KEY, recovery: bool = False, flags: int = 0) -> AddRequest:
    ledger_id, entry_id = struct.unpack_from(">qq", body)
    return AddRequest(0, ledger_id, entry_id, key, body, recovery, flags)


def lac_packet(ledger_id: int, lac: int) -> bytes:
    return struct.pack(">qqI", ledger_id, lac, 7)


class InlineWorker:
    """A Worker without a thread: jobs run in the loop, after a random number of iterations."""

    def __init__(self, lots: random.Random) -> None:
        self._lots = lots
        self._jobs: deque[tuple[Callable[[], Any], Done]] = deque()
        self._is_running = False

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.append((job, done))
        if not self._is_running:
            self._is_running = True
            self._wait(self._lots.choice((0, 0, 1, 5)))

    def post(self, callback: Callable[..., None], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(callback, *args)

    def close(self) -> None:
        assert not self._jobs

    def _wait(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._wait, turns - 1)
        else:
            loop.call_soon(self._run)

    def _run(self) -> None:
        job, done = self._jobs.popleft()
        try:
            result, error = job(), None
        except Exception as raised:
            result, error = None, raised
        if self._jobs:
            self._wait(self._lots.choice((0, 0, 1, 5)))
        else:
            self._is_running = False
        done(result, error)


def small_settings(**changes: Any) -> StorageSettings:
    values: dict[str, Any] = {
        "journal_directory": "/journal",
        "ledger_directory": "/ledgers",
        **SMALL,
        "waiting_time_max_s": 5.0,  # real time here: a starved process must not refuse adds
        **changes,
    }
    return StorageSettings(**values)


class World:
    """The disks of one bookie over several starts."""

    def __init__(
        self, seed: int = 0, *, wrap: Callable[[CrashableDisk], Any] = lambda disk: disk, **settings: Any
    ) -> None:
        self.lots = random.Random(seed)
        self.wrap = wrap
        self.settings = small_settings(**settings)
        self.disk = CrashableDisk()
        self.kv = CrashableKV(self.disk)
        self.now_ms = 1_000

    def engine(self, kind: type[StorageEngine] = StorageEngine, *, open_kv: OpenKV | None = None) -> StorageEngine:
        """Return an engine that is not open yet. `open_kv`: replacement for the world's own index store."""
        lots = random.Random(self.lots.random())
        return kind(
            self.settings,
            disk=self.wrap(self.disk),
            open_kv=open_kv or (lambda path: self.kv),
            destroy_kv=lambda path: self.kv.clear(),
            start_worker=lambda name: InlineWorker(lots),
            wall_clock_ms=lambda: self.now_ms,
        )

    async def opened(self, kind: type[StorageEngine] = StorageEngine) -> StorageEngine:
        engine = self.engine(kind)
        await engine.open()
        return engine

    def lose_power(self, seed: int | None = None) -> None:
        """Cut the power. The next engine starts with the data that survived."""
        seed = self.lots.randrange(2**31) if seed is None else seed
        self.disk = self.disk.after_power_cut(seed)
        self.kv = self.kv.after_power_cut(seed, self.disk)


async def add(engine: StorageEngine, *adds: AddRequest) -> list[int]:
    answered: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    engine.add_many(adds, answered.set_result)
    return list(await answered)


async def read(engine: StorageEngine, *keys: tuple[int, int]) -> list[bytes | int]:
    answered: asyncio.Future[Sequence[bytes | int]] = asyncio.get_running_loop().create_future()
    engine.read_many(keys, answered.set_result)
    return list(await answered)


async def fill(engine: StorageEngine, ledger_id: int, count: int, *, first: int = 0, size: int = 100) -> list[bytes]:
    """Add entries and return their bodies."""
    bodies = [entry(ledger_id, e, bytes([e % 251]) * size, lac=e - 1) for e in range(first, first + count)]
    for start in range(0, count, 50):
        statuses = await add(engine, *map(add_request, bodies[start : start + 50]))
        assert set(statuses) == {Status.OK}
    return bodies


class Kit:
    """Helpers for test modules, which cannot import them because test directories are not packages."""

    World = World
    InlineWorker = InlineWorker
    KEY = KEY
    entry = staticmethod(entry)
    add_request = staticmethod(add_request)
    lac_packet = staticmethod(lac_packet)
    small_settings = staticmethod(small_settings)
    add = staticmethod(add)
    read = staticmethod(read)
    fill = staticmethod(fill)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def world() -> World:
    return World()
