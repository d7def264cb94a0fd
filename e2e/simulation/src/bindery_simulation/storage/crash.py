"""Simulate power cuts before the operations of disk and index in one run of a seeded workload.

The workload starts one bookie several times, with traffic, clean stops and power cuts. A *snapshot* can be taken before
an operation that changes disk or index. It contains the state that a power cut at this moment leaves (unsynced bytes
are kept, partly written or lost at random), and the acknowledgements until then. A snapshot does not influence the run,
so that one run gives as many crash points as it has operations. The engine is started on each snapshot and checked.
Some engines lose power again during the replay. Others are stopped cleanly and started again, with or without their
index.

A crash point is (seed, number of the operation). Equal points give equal snapshots and equal answers.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_core.errors import BinderyError

from bindery_simulation.disk import CrashableDisk, CrashableKV
from bindery_simulation.storage import turns
from bindery_simulation.storage.engines import crashable_engine
from bindery_simulation.storage.history import History
from bindery_simulation.storage.turns import SteppingDisk, SteppingWorker, TurnWorker
from bindery_simulation.storage.verdict import Finding, Problem, Violation, check_engine
from bindery_simulation.storage.workload import Note, Workload

SNAPSHOT_SHARE: Final = 0.3
"""Share of the operations of a seed before which a snapshot is taken by default."""
DEAD_BYTES_SHARE: Final = 0.3
"""Share of the seeds whose compactions begin because of dead bytes, and not by their kinds."""
CRASHES_IN_REPLAY_MAX: Final = 3
"""Maximum number of further power cuts during the replay of one snapshot."""
DELETED_SIZE_MAX: Final = 4096
"""Maximum size of all entry logs in bytes after all ledgers are deleted: headers and deletion records."""


@dataclass(slots=True)
class Snapshot:
    """The state after a power cut before `operation`."""

    operation: int
    about: str
    """The operation that was not executed."""
    disk: CrashableDisk
    kv: CrashableKV
    history: History


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that was broken at a crash point."""

    operation: int
    """Number of the operation before which power was cut; -1: found in the workload itself."""
    about: str
    """The operation that was not executed."""
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem}" + (f" (power cut before {self.about})" if self.about else "")


@dataclass(slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Number of operations by kind (`operation_kind`)."""
    points: int = 0
    problems: list[Broken] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    """Number of rare events in the workload and at the crash points, by name."""


class CrashWorld:
    """Disk and index of one bookie over several starts. Later operations do not affect snapshots."""

    def __init__(self, seed: int, *, wanted: Callable[[int], bool], note: Note, wrap: Callable[[Any], Any]) -> None:
        self.seed = seed
        self.rng = random.Random(f"crash {seed}")
        self.history = History()
        self.limits_dead_bytes = random.Random(f"dead bytes {seed}").random() < DEAD_BYTES_SHARE
        self.work = Workload(self.rng, self.history, note, compacts_by_kind=not self.limits_dead_bytes)
        self.operation = 0
        self.kinds: Counter[str] = Counter()
        self.snapshots: list[Snapshot] = []
        self.note = note
        self._wanted = wanted
        self._wrap = wrap
        self._cut_rng = random.Random(f"cut {seed}")
        self._worker, disk_kind = self.rng.choice(((TurnWorker, CrashableDisk), (SteppingWorker, SteppingDisk)))
        self.disk: CrashableDisk = disk_kind()
        self.kv = CrashableKV(self.disk)
        self.disk.before_change = self._before_change

    def engine(self) -> StorageEngine:
        rng = random.Random(self.rng.random())
        return crashable_engine(
            self._wrap(self.disk), self.kv, rng, worker=self._worker, limits_dead_bytes=self.limits_dead_bytes
        )

    def lose_power(self) -> None:
        seed = self._cut_rng.randrange(2**31)
        self.disk = self.disk.after_power_cut(seed)
        self.kv = self.kv.after_power_cut(seed, self.disk)
        self.disk.before_change = self._before_change
        self.history.crashed()

    def _before_change(self, name: str, path: str) -> None:
        operation, self.operation = self.operation, self.operation + 1
        self.kinds[operation_kind(name, path)] += 1
        if not self._wanted(operation):
            return
        self.note(f"operation {operation}: power cut before {name} {path}")
        seed = hash_of(self.seed, operation)
        disk = self.disk.after_power_cut(seed)
        history = self.history.snapshot()
        history.crashed()
        about = f"{name} {path}"
        self.snapshots.append(Snapshot(operation, about, disk, self.kv.after_power_cut(seed, disk), history))


def hash_of(seed: int, operation: int) -> int:
    """Return the same number in every process."""
    return random.Random(f"{seed} {operation}").getrandbits(31)


def operation_kind(name: str, path: str) -> str:
    """Return the kind of an operation: the kind of file and the operation, without numbers of files."""
    what = path.split(" ")[0].rpartition("/")[2]
    if name == "kv":
        return "index batch"
    if name == "sync_directory":
        return f"{path.split('/')[1]} directory sync"
    for suffix, kind in ((".txn", "journal"), (".log", "entry log"), (".compacting", "compacted log")):
        if what.endswith(suffix):
            return f"{kind} {name}"
    return f"{what.removesuffix('.new')} {name}"


async def live(world: CrashWorld) -> None:
    """Start one bookie several times, and stop it cleanly or cut its power. Raises Violation."""
    rng = world.rng
    work = world.work
    for _ in range(rng.choice((1, 2, 3, 4))):
        engine = world.engine()
        world.note("start")
        await engine.open()
        finding = await check_engine(engine, world.history)
        _judge(engine, finding)
        await work.work(engine, rng.randint(5, 60))
        if rng.random() < 0.4:
            world.note("orderly end")
            await engine.close()
            world.history.erased.update(world.history.hidden)
        else:
            world.note("power cut")
            world.disk.cut_after(0)
            await engine.close()
            world.lose_power()


def _judge(engine: StorageEngine, finding: Finding) -> None:
    """Raise Violation for any problem. A power cut is not damage, so no read may be refused."""
    if finding.problems:
        raise Violation(finding.problems[0])
    if finding.refused:
        raise Violation(Problem("entries-readable", None, f"refused without damage: {finding.first_refusal}"))
    if engine.limbo is not None:
        raise Violation(Problem("starts", None, f"limbo after a power cut: {engine.limbo.reason}"))
    if len(engine.damage):
        raise Violation(Problem("starts", None, f"corruption reported after a power cut: {engine.damage.items()[0]}"))


async def examine(snapshot: Snapshot, seed: int, wrap: Callable[[Any], Any], reached: Counter[str]) -> None:
    """Start the engine on a snapshot and check everything. Raises Violation."""
    rng = random.Random(f"examine {seed} {snapshot.operation}")
    disk, kv, history = snapshot.disk, snapshot.kv, snapshot.history
    for _ in range(rng.choice((0, 0, 1, CRASHES_IN_REPLAY_MAX))):
        disk.cut_after(rng.choice((rng.randint(0, 8), rng.randint(0, 40))))
        try:
            await crashable_engine(wrap(disk), kv, rng).open()
        except OSError:
            reached["power lost again in the start"] += 1
        cut = rng.randrange(2**31)
        disk = disk.after_power_cut(cut)
        kv = kv.after_power_cut(cut, disk)
    engine = crashable_engine(wrap(disk), kv, rng)
    await _open(engine)
    reached["entries replayed"] += engine.stats.replay_entries
    await _check_engine(engine, history, reached)
    if rng.random() < 0.1:
        await _delete_all(engine, history)
        reached["everything deleted"] += 1
    elif rng.random() < 0.3:
        await engine.close()
        is_index_lost = rng.random() < 0.6
        if is_index_lost:
            reached["index lost and rebuilt"] += 1
            kv.clear()
        engine = crashable_engine(wrap(disk), kv, rng)
        await _open(engine)
        if engine.stats.replay_entries:
            raise Violation(Problem("replayed-once", None, f"{engine.stats.replay_entries} entries replayed"))
        await _check_engine(engine, history, reached)


async def _delete_all(engine: StorageEngine, history: History) -> None:
    """Delete all ledgers, and check that their space is reclaimed. Raises Violation."""
    for ledger_id in await engine.list_ledger_ids():
        await engine.delete_ledger(ledger_id)
    await engine.flush()
    result = await engine.compactor.run(force=True)
    if result.left:
        raise Violation(Problem("space-returns", None, f"entry logs are left: {result.left}"))
    held = sum(info.size for info in await engine.compactor.refresh())
    if held > DELETED_SIZE_MAX:
        raise Violation(Problem("space-returns", None, f"{held} bytes of entry logs hold nothing"))


async def _open(engine: StorageEngine) -> None:
    try:
        await engine.open()
    except (BinderyError, OSError) as error:
        raise Violation(Problem("starts", None, f"{type(error).__name__}: {error}")) from error


async def _check_engine(engine: StorageEngine, history: History, reached: Counter[str]) -> None:
    finding = await check_engine(engine, history)
    reached["acknowledged entries read"] += finding.right
    _judge(engine, finding)


def _problem_of(error: Exception) -> Problem:
    """Return the problem that an exception of the product, such as a failed assertion, reveals."""
    return (
        error.problem if isinstance(error, Violation) else Problem("starts", None, f"{type(error).__name__}: {error}")
    )


def play(
    seed: int,
    *,
    wanted: Callable[[int], bool] | None = None,
    note: Note = lambda text: None,
    wrap: Callable[[Any], Any] = lambda disk: disk,
    problems_max: int = 1,
) -> Outcome:
    """Run the workload of one seed and its `wanted` crash points (None: a random sample).

    Ends after `problems_max` problems. `wrap`: replaces the disk of the engine, for mutants.
    """
    share = random.Random(f"wanted {seed}")
    world = CrashWorld(seed, wanted=wanted or (lambda operation: share.random() < SNAPSHOT_SHARE), note=note, wrap=wrap)
    outcome = Outcome(seed)
    try:
        turns.run(live(world))
    except Exception as error:
        outcome.problems.append(Broken(-1, "", _problem_of(error)))
    outcome.operations, outcome.kinds = world.operation, world.kinds
    outcome.reached["entry logs compacted"] += world.work.rewritten
    outcome.reached["entry logs compacted because of dead bytes"] += world.work.rewritten_for_space
    outcome.reached["dead entry logs removed"] += world.work.removed
    for snapshot in world.snapshots:
        if len(outcome.problems) >= problems_max:
            break
        outcome.points += 1
        try:
            turns.run(examine(snapshot, seed, wrap, outcome.reached))
        except Exception as error:
            outcome.problems.append(Broken(snapshot.operation, snapshot.about, _problem_of(error)))
    return outcome
