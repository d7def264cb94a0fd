"""Create real directories of a bookie with their History. `damage` damages copies of them.

The bookie of a template was started several times and then closed or killed. The directory of a killed bookie has a
journal to replay and a log of LevelDB.
"""

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from bindery_bookie.membership import identity
from bindery_bookie.storage import control_records
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.corruption.limbo import LimboLedger
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.journal import journal_files, journal_format
from bindery_bookie.storage.journal.mark import read_mark
from bindery_core.formats.cookie import Cookie

from bindery_simulation.storage import turns
from bindery_simulation.storage.calls import MASTER_KEY
from bindery_simulation.storage.engines import real_engine
from bindery_simulation.storage.history import History, Key
from bindery_simulation.storage.workload import Workload

COOKIE: Final = Cookie(bookie_id="b-1:3181", journal_dirs=("/j",), ledger_dirs=("/l",), instance_id="a-b-c")
"""Cookie in the directories."""
SCRUB_RATE: Final = 1 << 30
"""Rate of the scrub in bytes per simulated second."""
FAST_DIRECTORY: Final = "/dev/shm"
"""Directory in memory, for the files of a search."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A journal group that a start replays."""

    path: str
    """Path of the journal relative to the template's directory."""
    offset: int
    size: int
    keys: frozenset[Key]
    """Keys of the entries in the group."""
    ledgers: frozenset[int]
    """Ledgers with entries or control records in the group."""


@dataclass(frozen=True, slots=True)
class Template:
    """A directory and its history."""

    directory: str
    history: History
    is_killed: bool
    groups: tuple[GroupPlace, ...]
    """Groups to replay, in order; none after a clean stop."""
    files: tuple[tuple[str, int], ...]
    """(relative path, size in bytes) of each file, sorted."""


@contextlib.contextmanager
def scratch_directory(parent: str | None = None) -> Iterator[str]:
    """Create a directory that is removed after the block, in FAST_DIRECTORY if that exists and `parent` is None."""
    if parent is None and os.path.isdir(FAST_DIRECTORY):
        parent = FAST_DIRECTORY
    with tempfile.TemporaryDirectory(prefix="bindery-damage-", dir=parent) as directory:
        yield directory


def make_template(seed: int, directory: str) -> Template:
    """Run a bookie in `directory`/live, and keep its files in `directory`/kept."""
    rng = random.Random(f"template {seed}")
    live, kept = f"{directory}/live", f"{directory}/kept"
    history = History()
    work = Workload(rng, history, lambda text: None, ledgers=rng.choice((1, 3, 6)))
    write_buffer_size = rng.choice((64, 64, 8 * 1024)) * 1024
    is_killed = rng.random() < 0.6
    is_in_limbo = rng.random() < 0.15

    async def run_bookie() -> None:
        for life in reversed(range(rng.choice((1, 2, 3, 5)))):
            engine = real_engine(live, rng, write_buffer_size=write_buffer_size)
            await engine.open()
            await work.work(engine, rng.choice((15, 40, 80)))
            if rng.random() < 0.5:
                engine.scrubber.request(rate=SCRUB_RATE)
                await asyncio.sleep(rng.choice((0.01, 5.0)))
            is_last = life == 0 and not is_in_limbo
            if is_last and is_killed:
                shutil.copytree(live, kept)
            await engine.close()
        if is_in_limbo:
            limbo.write_marker(RealDisk(), f"{live}/ledgers/current", "something was lost", 1_000)
            engine = real_engine(live, rng, write_buffer_size=write_buffer_size)
            await engine.open()
            await list_ledgers(engine, history)
            if is_killed:
                shutil.copytree(live, kept)
            await engine.close()
        if not is_killed:
            shutil.copytree(live, kept)

    for place in ("journal", "ledgers"):
        RealDisk().make_directories(f"{live}/{place}/current")
        identity.write_version(RealDisk(), f"{live}/{place}", COOKIE.text())
    turns.run(run_bookie())
    shutil.rmtree(live)
    history.crashed()
    files = tuple(sorted(_files(kept)))
    return Template(kept, history, is_killed, tuple(_groups(kept)), files)


async def list_ledgers(engine: StorageEngine, history: History) -> None:
    """Give a bookie in limbo the list of its ledgers, which it otherwise reads from the metadata before it serves."""
    assert engine.limbo is not None
    if engine.limbo.is_listing:
        ledgers = sorted(history.keyed)
        await engine.repair.enter_limbo_ledgers([LimboLedger(ledger_id, MASTER_KEY) for ledger_id in ledgers])
        await engine.repair.finish_listing()


def _files(directory: str) -> Iterator[tuple[str, int]]:
    for parent, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(parent, name)
            yield os.path.relpath(path, directory), os.path.getsize(path)


def _groups(directory: str) -> Iterator[GroupPlace]:
    disk = RealDisk()
    journals = f"{directory}/journal/current"
    mark = read_mark(disk, f"{directory}/ledgers/current")
    assert mark is not None
    for journal_id, group in journal_files.replay_groups(disk, journals, mark.journal):
        path = f"journal/current/{journal_format.file_name(journal_id)}"
        ids = [control_records.unpack_ids(record) for record in group.records]
        keys = frozenset((ledger_id, entry_id) for ledger_id, entry_id in ids if entry_id >= 0)
        yield GroupPlace(path, group.offset, group.size, keys, frozenset(ledger_id for ledger_id, _ in ids))
