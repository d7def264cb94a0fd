"""Write ledgers or topics at a bounded rate, delete most of them soon, and record disk space and latencies.

Writers create them one after another (`churned`). One of `keep_each` is kept until the end; the others are deleted
between `delete_s_min` and `delete_s_max` seconds after they were closed. The phases are those of `judging.space`:
during quiet windows nothing is deleted and compaction is suspended, so that the latencies of both can be compared under
the same load. At the end all entries of what was kept are read.

The content of an entry is a function of the seed, of the number of its ledger or topic, and of its own.
"""

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
from bindery_core.errors import BinderyError
from bindery_core.ids import BookieId

from bindery_e2e.judging.space import COLLECTING, QUIET, SETTLING, SpaceSample, Window
from bindery_e2e.traffic.churned import Churned, Store

KIB: Final = 1024
MIB: Final = 1024 * KIB
SAMPLE_S: Final = 1.0
SAY_S: Final = 10.0
ERRORS_MAX: Final = 20
"""Number of errors after which the run ends."""


@dataclass(frozen=True, slots=True)
class ChurnSettings:
    seed: int
    seconds: float = 1200.0
    rate: int = 8 * MIB
    """Bytes of payload per second over all writers. Each bookie receives two thirds of them, or all of topics."""
    writers: int = 8
    entry_size: int = 16 * KIB
    size_min: int = 2 * MIB
    size_max: int = 24 * MIB
    """Bytes of payload of a ledger or topic."""
    keep_each: int = 10
    """One of this number is kept."""
    delete_s_min: float = 2.0
    delete_s_max: float = 60.0
    window_s: float = 15.0
    """Seconds of a collecting window, and of a quiet one."""


@dataclass(frozen=True, slots=True)
class ChurnBookie:
    """A bookie on this machine."""

    bookie_id: BookieId
    url: str
    """Of its HTTP port."""
    directory: Path
    """Contains its journal and its entry logs."""


@dataclass(slots=True)
class _Written:
    number: int
    stored: Churned
    entries: int = 0
    sizes: dict[BookieId, int] = field(default_factory=dict)


@dataclass(slots=True)
class ChurnFigures:
    samples: dict[str, list[SpaceSample]] = field(default_factory=dict)
    windows: list[Window] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    written: int = 0
    """Number of ledgers or topics."""
    deleted: int = 0
    kept: int = 0
    entries_written: int = 0
    entries_verified: int = 0
    compacting_s: float = 0.0
    """Seconds in which at least one bookie compacted, to a second."""
    counters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each bookie at the end: what its garbage collection did."""


class Churn:
    """One run. `play` returns its figures; errors are in them."""

    def __init__(
        self,
        store: Store,
        bookies: Sequence[ChurnBookie],
        settings: ChurnSettings,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        self._store = store
        self._bookies = bookies
        self._settings = settings
        self._say = say
        self._random = random.Random(settings.seed)
        self._bytes = random.Random(settings.seed).randbytes(2 * MIB)
        self._http = httpx.AsyncClient(timeout=30.0)
        self._began = time.monotonic()
        self._over = asyncio.Event()
        """Set when the writers must end."""
        self._collecting = asyncio.Event()
        """Set while deletions are executed."""
        self._numbers = 0
        self._kept: list[_Written] = []
        self._live = {bookie.bookie_id: 0 for bookie in bookies}
        self._written = dict(self._live)
        self._deletions: set[asyncio.Task[None]] = set()
        self.figures = ChurnFigures(samples={bookie.bookie_id: [] for bookie in bookies})

    async def play(self) -> ChurnFigures:
        """Raises httpx.HTTPError if a bookie does not answer."""
        self._began = time.monotonic()
        tasks: list[asyncio.Task[None]] = []
        async with self._http:
            try:
                tasks = [asyncio.create_task(self._sample())]
                writers = [asyncio.create_task(self._write(number)) for number in range(self._settings.writers)]
                tasks += writers
                await self._windows()
                self._over.set()
                await asyncio.gather(*writers)
                await self._verify()
                await self._measure()
                for bookie in self._bookies:
                    self.figures.counters[bookie.bookie_id] = await self._get(bookie, "/api/v1/bookie/gc/state")
            finally:
                for task in (*tasks, *self._deletions):
                    task.cancel()
                await asyncio.gather(*tasks, *self._deletions, return_exceptions=True)
        return self.figures

    # --- phases

    async def _windows(self) -> None:
        while not self._is_done:
            self._begin(COLLECTING)
            await self._switch("resume")
            self._collecting.set()
            await self._sleep(self._settings.window_s)
            self._begin(SETTLING)
            self._collecting.clear()
            await self._switch("suspend")
            while not self._is_done and await self._is_compacting():
                await asyncio.sleep(0.2)
            self._begin(QUIET)
            await self._sleep(self._settings.window_s)
        self._begin(SETTLING)
        await self._switch("resume")

    def _begin(self, phase: str) -> None:
        self.figures.windows.append(Window(phase))

    @property
    def _is_done(self) -> bool:
        return time.monotonic() - self._began >= self._settings.seconds or len(self.figures.errors) >= ERRORS_MAX

    async def _sleep(self, seconds: float) -> None:
        left = self._settings.seconds - (time.monotonic() - self._began)
        await asyncio.sleep(max(0.0, min(seconds, left)))

    async def _switch(self, verb: str) -> None:
        for bookie in self._bookies:
            answer = await self._http.put(
                f"{bookie.url}/api/v1/bookie/gc/{verb}_compaction", json={f"{verb}Major": True, f"{verb}Minor": True}
            )
            answer.raise_for_status()

    async def _is_compacting(self) -> bool:
        states = [await self._get(bookie, "/api/v1/bookie/gc/state") for bookie in self._bookies]
        return any(shard["running"] in ("minor", "major") for state in states for shard in state["shards"])

    async def _get(self, bookie: ChurnBookie, path: str) -> Any:
        answer = await self._http.get(bookie.url + path)
        answer.raise_for_status()
        return answer.json()

    # --- load

    async def _write(self, writer: int) -> None:
        settings = self._settings
        step_s = settings.entry_size * settings.writers / settings.rate
        due = time.monotonic() + step_s * writer / settings.writers
        while not self._over.is_set():
            number, self._numbers = self._numbers, self._numbers + 1
            size = self._random.randint(settings.size_min, settings.size_max)
            delete_after_s = self._random.uniform(settings.delete_s_min, settings.delete_s_max)
            try:
                written = _Written(number, await self._store.create(number))
                for _ in range(size // settings.entry_size):
                    now = time.monotonic()
                    if now < due:
                        await asyncio.sleep(due - now)
                    due = max(due + step_s, now - 1.0)  # a writer that was late catches up for a second at most
                    await self._add(written)
                    if self._over.is_set():
                        break
                await written.stored.close()
            except (BinderyError, httpx.HTTPError) as error:
                self._failed(f"number {number} of the {self._store.name} was not written: {error!r}")
                await asyncio.sleep(1.0)
                continue
            self.figures.written += 1
            if number % settings.keep_each == 0:
                self._kept.append(written)
                self.figures.kept += 1
            else:
                task = asyncio.create_task(self._delete(written, delete_after_s))
                self._deletions.add(task)
                task.add_done_callback(self._deletions.discard)

    async def _add(self, written: _Written) -> None:
        payload = self._payload(written.number, written.entries)
        window = self.figures.windows[-1]
        began = time.monotonic()
        sizes = await written.stored.add(payload)
        if window is self.figures.windows[-1]:
            window.latencies_s.append(time.monotonic() - began)
        written.entries += 1
        self.figures.entries_written += 1
        for bookie, size in sizes.items():
            written.sizes[bookie] = written.sizes.get(bookie, 0) + size
            self._live[bookie] += size
            self._written[bookie] += size

    def _payload(self, number: int, entry_id: int) -> bytes:
        size = self._settings.entry_size - 16
        start = (number * 7919 + entry_id * 104_729) % (len(self._bytes) - size)
        return number.to_bytes(8, "big") + entry_id.to_bytes(8, "big") + self._bytes[start : start + size]

    async def _delete(self, written: _Written, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._collecting.wait()
        try:
            await written.stored.delete()
        except (BinderyError, httpx.HTTPError) as error:
            self._failed(f"number {written.number} of the {self._store.name} was not deleted: {error!r}")
            return
        self.figures.deleted += 1
        for bookie, size in written.sizes.items():
            self._live[bookie] -= size

    def _failed(self, text: str) -> None:
        self.figures.errors.append(text)

    # --- observation

    async def _sample(self) -> None:
        said = 0.0
        while True:
            await self._measure()
            try:
                self.figures.compacting_s += SAMPLE_S * await self._is_compacting()
            except httpx.HTTPError as error:
                self._failed(f"a bookie does not answer: {error!r}")
            at_s = time.monotonic() - self._began
            if at_s - said >= SAY_S:
                said = at_s
                self._say(self._progress(at_s))
            await asyncio.sleep(SAMPLE_S)

    async def _measure(self) -> None:
        for bookie in self._bookies:
            disk = await asyncio.to_thread(disk_of, bookie.directory)
            at_s = time.monotonic() - self._began
            bytes_here = self._live[bookie.bookie_id], self._written[bookie.bookie_id]
            self.figures.samples[bookie.bookie_id].append(SpaceSample(at_s, disk, *bytes_here))

    def _progress(self, at_s: float) -> str:
        spaces = []
        for bookie, samples in self.figures.samples.items():
            last = samples[-1]
            spaces.append(f"{bookie} {last.disk / MIB:,.0f} of {last.live / MIB:,.0f}/{last.written / MIB:,.0f}")
        return (
            f"{at_s:5.0f} s  {self.figures.windows[-1].phase:10}  MiB on disk of live/written: {', '.join(spaces)}  "
            f"{self._store.name} {self.figures.written}, deleted {self.figures.deleted}, "
            f"errors {len(self.figures.errors)}"
        )

    async def _verify(self) -> None:
        """Read all entries of what was kept."""
        for written in self._kept:
            what = f"number {written.number} of the {self._store.name}, which was kept"
            entries = 0
            try:
                async for payload in written.stored.payloads():
                    if payload != self._payload(written.number, entries):
                        self._failed(f"{what}: entry {entries} has another payload")
                    entries += 1
                    self.figures.entries_verified += 1
            except (BinderyError, httpx.HTTPError) as error:
                self._failed(f"{what}: cannot be read: {error!r}")
                continue
            if entries != written.entries:
                self._failed(f"{what}: has {entries} entries instead of {written.entries}")


def disk_of(directory: Path) -> int:
    """Return the bytes that the file system has allocated to all files below a directory."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(f"{path}/{name}").st_blocks * 512
    return total
