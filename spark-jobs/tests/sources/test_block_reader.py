"""Blocks for audits: the driver's plan, the rows of a task, and copies in blocks, with a fake in place of Spark."""

import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_spark.reading.blocks import MISSING, READ, UNREPORTED
from bindery_spark.reading.partitions import Task
from bindery_spark.schemas import BLOCKS, REPLICAS
from bindery_spark.sources import block_reader as module
from bindery_spark.sources.block_reader import entries_of, plan_blocks, read_blocks, read_rows
from bindery_spark.sources.cluster import Cluster
from bindery_spark.sources.options import LedgersOptions

LAYOUT = LedgersLayout()
OPTIONS = LedgersOptions(zookeeper="h:1")
A, B, C = (BookieId(name) for name in "abc")


class FakeSpark:
    """Creates "DataFrames" that are the rows themselves, and notes how they were made."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.slices: list[int] = []
        self.created: list[tuple[Any, bool]] = []
        self._tasks: list[Task] = []

    def parallelize(self, tasks: list[Task], slices: int) -> "FakeSpark":
        self._tasks = tasks
        self.slices.append(slices)
        return self

    def flatMap(self, rows_of: Callable[[Task], Iterable[Any]]) -> list[Any]:
        return [row for task in self._tasks for row in rows_of(task)]

    def createDataFrame(self, rows: Any, schema: Any, *, verifySchema: bool) -> list[Any]:
        self.created.append((schema, verifySchema))
        return list(rows)


class World:
    """Two closed ledgers: one on a and b, one on b and c. d is registered and stores nothing.

    A task yields two batches that name its bookie and its first ledger.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = MemoryTree()
        self.open = 0
        self.read: list[tuple[LedgersOptions, Task, tuple[str, bool]]] = []
        self.ids: list[LedgerId] = []
        monkeypatch.setattr(module, "connected_to", self._connected)
        monkeypatch.setattr(module, "read_task", self._read_task)
        monkeypatch.setattr(module, "Blocks", lambda bookie_id, *, ends_only: (bookie_id, ends_only))

    @asynccontextmanager
    async def _connected(self, options: LedgersOptions) -> AsyncIterator[Cluster]:
        assert options.zookeeper == "h:1"
        store = self.tree.connect()
        manager = LedgerManager(store, LAYOUT, randomness=random.Random(2))
        self.open += 1
        self.ids = []
        for ledger_id, bookies in ((7, (A, B)), (9, (B, C))):
            metadata = LedgerMetadata(
                ensemble_size=2,
                write_quorum=2,
                ack_quorum=1,
                state=LedgerState.CLOSED,
                last_entry_id=EntryId(3_999),
                length=40_000,
                segments=(Segment(EntryId(0), bookies),),
            )
            if await store.exists(LAYOUT.ledger(LedgerId(ledger_id))) is None:
                await manager.create_with_id(LedgerId(ledger_id), metadata)
        registered = SimpleNamespace(bookies=("a", "b", "c", "d"))
        yield Cluster(store, LAYOUT, registered, manager, None)  # type: ignore[arg-type]
        self.open -= 1

    async def _read_task(
        self, here: Cluster, options: LedgersOptions, task: Task, blocks: tuple[str, bool]
    ) -> AsyncIterator[pa.RecordBatch]:
        assert self.open == 1
        self.read.append((options, task, blocks))
        bookie, first = str(task.bookie_id), task.ledger_range[0]
        yield pa.RecordBatch.from_pydict({"bookie": [bookie, bookie], "ledger_id": [first, first + 1]})
        yield pa.RecordBatch.from_pydict({"bookie": [bookie], "ledger_id": [100]})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def ids(*given: int) -> list[LedgerId]:
    return [LedgerId(each) for each in given]


def outline(tasks: Iterable[Task]) -> list[tuple[str, list[int], tuple[int, int] | None]]:
    return [(task.bookie_id, [each.ledger.ledger_id for each in task.fragments], task.unexpected_in) for task in tasks]


def test_the_plan_has_a_task_for_each_bookie_of_the_ledgers(world: World) -> None:
    assert outline(plan_blocks(OPTIONS, ids(7, 9), None)) == [("a", [7], None), ("b", [7, 9], None), ("c", [9], None)]
    assert outline(plan_blocks(OPTIONS, ids(9), None)) == [("b", [9], None), ("c", [9], None)]
    assert plan_blocks(OPTIONS, [], None) == []
    assert world.open == 0, "connections are closed"


def test_large_fragments_are_split_at_blocks(world: World) -> None:
    options = LedgersOptions(zookeeper="h:1", partition_entries=1_500)
    tasks = plan_blocks(options, ids(7), None)
    firsts = [fragment.first for task in tasks if task.bookie_id == "a" for fragment in task.fragments]
    assert firsts == [0, 1_024, 2_048, 3_072]


def test_orphaned_data_is_listed_on_every_registered_bookie(world: World) -> None:
    options = LedgersOptions(zookeeper="h:1", include_unexpected=True)
    assert outline(plan_blocks(options, ids(9), (5, 9))) == [
        ("b", [9], None),
        ("c", [9], None),
        *((name, [], (5, 9)) for name in "abcd"),
    ]


def test_each_task_is_a_partition_and_its_rows_are_tuples(world: World) -> None:
    spark = FakeSpark()
    rows: Any = read_blocks(spark, OPTIONS, ids(7), unexpected_in=None)  # type: ignore[arg-type]
    assert rows == [("a", 7), ("a", 8), ("a", 100), ("b", 7), ("b", 8), ("b", 100)]
    assert (spark.slices, spark.created) == ([2], [(BLOCKS, False)])
    assert [options.include_unexpected for options, _, _ in world.read] == [False, False]
    assert world.open == 0


def test_orphaned_data_is_listed_only_if_a_range_is_given(world: World) -> None:
    spark = FakeSpark()
    rows: Any = read_blocks(spark, OPTIONS, ids(7), unexpected_in=(5, 9))  # type: ignore[arg-type]
    assert {name for name, _ in rows} == {"a", "b", "c", "d"}
    assert spark.slices == [6]
    assert all(options.include_unexpected for options, _, _ in world.read)
    world.read.clear()
    stale = LedgersOptions(zookeeper="h:1", include_unexpected=True)
    read_blocks(spark, stale, ids(7), unexpected_in=None)  # type: ignore[arg-type]
    assert outline(task for _, task, _ in world.read) == [("a", [7], None), ("b", [7], None)]


def test_orphaned_data_may_be_limited_to_one_bookie(world: World) -> None:
    spark = FakeSpark()
    read_blocks(spark, OPTIONS, ids(7), unexpected_in=(5, 9), unexpected_on="b")  # type: ignore[arg-type]
    assert outline(task for _, task, _ in world.read) == [("a", [7], None), ("b", [7], None), ("b", [], (5, 9))]


def test_a_plan_without_tasks_has_one_empty_partition(world: World) -> None:
    spark = FakeSpark()
    rows: Any = read_blocks(spark, OPTIONS, [], unexpected_in=None)  # type: ignore[arg-type]
    assert (rows, spark.slices) == ([], [1])


@pytest.mark.parametrize(("entries", "ends_only"), [("all", False), ("listed", False), ("ends", True)])
def test_ends_are_blocks_of_one_entry(world: World, entries: str, ends_only: bool) -> None:
    options = LedgersOptions(zookeeper="h:1", entries=entries)
    rows = read_rows(options, Task(A, unexpected_in=(3, 4)))
    assert world.read == [], "nothing is read before the first row is wanted"
    assert next(rows) == ("a", 3)
    assert list(rows) == [("a", 4), ("a", 100)]
    assert [blocks for _, _, blocks in world.read] == [("a", ends_only)]


def test_the_copies_of_blocks_are_rows_of_replicas() -> None:
    spark = FakeSpark()
    block = {"ledger_id": 7, "segment": 0, "bookie": "a", "first_entry": 4, "last_entry": 8, "step": 2, "reason": None}
    rows = [
        {**block, "states": bytes([MISSING, UNREPORTED, MISSING]), "facts": None},
        {**block, "bookie": "b", "last_entry": 4, "states": bytes([READ]), "facts": bytes(15) + b"\x09"},
    ]

    def flat_map(expand: Callable[[Any], Iterable[Any]]) -> list[Any]:
        return [copy for row in rows for copy in expand(row)]

    def select(*names: str) -> SimpleNamespace:
        assert list(names) == BLOCKS.names
        return SimpleNamespace(rdd=SimpleNamespace(flatMap=flat_map))

    copies: Any = entries_of(SimpleNamespace(select=select, sparkSession=spark))  # type: ignore[arg-type]
    assert copies == [
        (7, 0, 4, "a", True, False, None, None, None, None, None, None),
        (7, 0, 8, "a", True, False, None, None, None, None, None, None),
        (7, 0, 4, "b", True, True, True, 9, 0, 0, None, None),
    ]
    assert spark.created == [(REPLICAS, False)]
