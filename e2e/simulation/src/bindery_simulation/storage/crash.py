"""Crash at every write: a power cut before each operation of disk and index, from one run of a seeded workload.

The workload lives several lives of one bookie: starts, traffic, orderly ends, power cuts. Before an operation that
changes disk or index the world can be *photographed*: what a power cut at that instant would leave (un-synced bytes
kept, torn or lost by lot), and what had been acknowledged by then. Nothing of the run changes by it, so one run gives
as many crash points as it has operations. Each photograph is then started, some of them lose power once more while they
replay, and questioned; some are stopped in order and started again, with or without their index.

A point is (seed, number of the operation): the same point is the same photograph, and the same answers.
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
from bindery_simulation.storage.verdict import Finding, Problem, Violation, question
from bindery_simulation.storage.workload import Note, Workload

PHOTOGRAPHED_SHARE: Final = 0.3
"""Of the operations of a seed, unless all are wanted."""
CRASHES_IN_REPLAY_MAX: Final = 3
DELETED_SIZE_MAX: Final = 4096
"""Bytes of entry logs that may be left when all ledgers are deleted: headers, and records that say so."""


@dataclass(slots=True)
class Photograph:
    """What the next start would find after a power cut before `operation`."""

    operation: int
    about: str
    """The operation that did not happen."""
    disk: CrashableDisk
    kv: CrashableKV
    history: History


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that was broken at a crash point."""

    operation: int
    """-1: it was seen while the power was on."""
    about: str
    """The operation that did not happen."""
    problem: Problem

    def __str__(self) -> str:
        return f"{self.problem}" + (f" (power cut before {self.about})" if self.about else "")


@dataclass(slots=True)
class Outcome:
    """One seed."""

    seed: int
    operations: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Operations by what they change, for the record: which writes were cut."""
    points: int = 0
    problems: list[Broken] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    """What happened, how often: in the workload, and in the points."""


class CrashWorld:
    """One bookie's disk and index through its lives. Invariant: photographs share nothing that changes."""

    def __init__(self, seed: int, *, wanted: Callable[[int], bool], note: Note, wrap: Callable[[Any], Any]) -> None:
        self.seed = seed
        self.rng = random.Random(f"crash {seed}")
        self.history = History()
        self.work = Workload(self.rng, self.history, note)
        self.operation = 0
        self.kinds: Counter[str] = Counter()
        self.photographs: list[Photograph] = []
        self.note = note
        self._wanted = wanted
        self._wrap = wrap
        self._cut_lots = random.Random(f"cut {seed}")
        self._worker, disk_kind = self.rng.choice(((TurnWorker, CrashableDisk), (SteppingWorker, SteppingDisk)))
        self.disk: CrashableDisk = disk_kind()
        self.kv = CrashableKV(self.disk)
        self.disk.before_change = self._before_change

    def engine(self) -> StorageEngine:
        rng = random.Random(self.rng.random())
        return crashable_engine(self._wrap(self.disk), self.kv, rng, worker=self._worker)

    def lose_power(self) -> None:
        seed = self._cut_lots.randrange(2**31)
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
        history = self.history.photograph()
        history.crashed()
        about = f"{name} {path}"
        self.photographs.append(Photograph(operation, about, disk, self.kv.after_power_cut(seed, disk), history))


def hash_of(seed: int, operation: int) -> int:
    """The same in every process."""
    return random.Random(f"{seed} {operation}").getrandbits(31)


def operation_kind(name: str, path: str) -> str:
    """What an operation changes, whatever its number."""
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
    """Several lives of one bookie, each ended by a power cut or in order. Raises Violation."""
    rng = world.rng
    work = world.work
    for _ in range(rng.choice((1, 2, 3, 4))):
        engine = world.engine()
        world.note("start")
        await engine.open()
        finding = await question(engine, world.history)
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
    """Raises Violation. A power cut is no damage: nothing may be in doubt after it."""
    if finding.problems:
        raise Violation(finding.problems[0])
    if finding.refused:
        raise Violation(Problem("entries-readable", None, f"undamaged, it cannot tell: {finding.first_refusal}"))
    if engine.limbo is not None:
        raise Violation(Problem("starts", None, f"a mere power cut is taken for lost storage: {engine.limbo.reason}"))
    if len(engine.damage):
        raise Violation(Problem("starts", None, f"a mere power cut is taken for damage: {engine.damage.items()[0]}"))


async def examine(photograph: Photograph, seed: int, wrap: Callable[[Any], Any], reached: Counter[str]) -> None:
    """Start it and ask for everything. Raises Violation."""
    rng = random.Random(f"examine {seed} {photograph.operation}")
    disk, kv, history = photograph.disk, photograph.kv, photograph.history
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
    await _ask(engine, history, reached)
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
        await _ask(engine, history, reached)


async def _delete_all(engine: StorageEngine, history: History) -> None:
    """The space of what was deleted comes back, also of what a crash left behind. Raises Violation."""
    for ledger_id in await engine.list_ledger_ids():
        await engine.delete_ledger(ledger_id)
    await engine.flush()
    result = await engine.compactor.run(force=True)
    if result.left:
        raise Violation(Problem("space-returns", None, f"entry logs are left: {result.left}"))
    held = sum(info.size for info in await engine.compactor.look())
    if held > DELETED_SIZE_MAX:
        raise Violation(Problem("space-returns", None, f"{held} bytes of entry logs hold nothing"))


async def _open(engine: StorageEngine) -> None:
    try:
        await engine.open()
    except (BinderyError, OSError) as error:
        raise Violation(Problem("starts", None, f"{type(error).__name__}: {error}")) from error


async def _ask(engine: StorageEngine, history: History, reached: Counter[str]) -> None:
    finding = await question(engine, history)
    reached["acknowledged entries read"] += finding.right
    _judge(engine, finding)


def _problem_of(error: Exception) -> Problem:
    """Whatever came out of the product: also an assertion of its own, or a bug."""
    return (
        error.problem if isinstance(error, Violation) else Problem("starts", None, f"{type(error).__name__}: {error}")
    )


def play(
    seed: int,
    *,
    wanted: Callable[[int], bool] | None = None,
    note: Note = lambda told: None,
    wrap: Callable[[Any], Any] = lambda disk: disk,
    problems_max: int = 1,
) -> Outcome:
    """One seed: its workload, and the points that are `wanted` (by lot if None). Stops at `problems_max`.

    `wrap`: what stands between engine and disk, for mutants.
    """
    share = random.Random(f"wanted {seed}")
    world = CrashWorld(
        seed, wanted=wanted or (lambda operation: share.random() < PHOTOGRAPHED_SHARE), note=note, wrap=wrap
    )
    outcome = Outcome(seed)
    try:
        turns.run(live(world))
    except Exception as error:
        outcome.problems.append(Broken(-1, "", _problem_of(error)))
    outcome.operations, outcome.kinds = world.operation, world.kinds
    outcome.reached["entry logs compacted"] += world.work.rewritten
    outcome.reached["dead entry logs removed"] += world.work.removed
    for photograph in world.photographs:
        if len(outcome.problems) >= problems_max:
            break
        outcome.points += 1
        try:
            turns.run(examine(photograph, seed, wrap, outcome.reached))
        except Exception as error:
            outcome.problems.append(Broken(photograph.operation, photograph.about, _problem_of(error)))
    return outcome
