"""What the phases of a run share: stored metadata, selected ledgers, and results of the groups."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from bindery_spark.audit import context as module
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.context import AFTER, AGAIN, BEFORE, RunContext, rows_of
from bindery_spark.audit.ledger_history import KnownLedger
from bindery_spark.audit.options import Options
from bindery_spark.progress import QuietProgress
from bindery_spark.schemas import LEDGERS, MARKS
from frames import ledger
from plain_frames import PlainFrame, functions
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import Row


class FakeSpark:
    """Records what is read and created, and returns it instead of a DataFrame."""

    def __init__(self) -> None:
        self.read = self
        self._schema: Any = None

    def schema(self, schema: Any) -> "FakeSpark":
        self._schema = schema
        return self

    def parquet(self, *paths: str) -> tuple[Any, ...]:
        return self._schema, paths

    def createDataFrame(self, rows: Any, schema: Any) -> tuple[Any, Any]:
        return rows, schema


class Tables:
    """A source that only stores the names of tables."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Path]] = []

    def keep_table(self, name: str, directory: Path) -> None:
        self.kept.append((name, directory))


def context_in(path: Path, **options: Any) -> RunContext:
    spark, source = FakeSpark(), Tables()
    return RunContext(  # type: ignore[arg-type]
        spark,  # type: ignore[arg-type]
        source,  # type: ignore[arg-type]
        RunDirectory(path),
        Options(**options),
        clock_ms=lambda: 5,
        progress=QuietProgress(),
    )


def write_ledgers(context: RunContext, when: str, *files: list[dict[str, Any]]) -> None:
    directory = context.directory.table(when, "ledgers")
    directory.mkdir(parents=True)
    names = ("first_entry", "last_entry", "ensemble")
    for number, rows in enumerate(files):
        named = [{**r, "segments": [dict(zip(names, s, strict=True)) for s in r["segments"]]} for r in rows]
        table = pa.Table.from_pylist(named, to_arrow_schema(LEDGERS, timezone="UTC"))
        parquet.write_table(table, directory / f"part-{number}.parquet")


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return context_in(tmp_path / "r1")


def test_metadata_is_read_in_an_order_in_which_every_ledger_of_a_topic_is_known(
    context: RunContext, tmp_path: Path
) -> None:
    context.keep_metadata(AFTER)
    assert context.source.kept == [  # type: ignore[attr-defined]
        (name, tmp_path / "r1" / "checkpoint" / "after" / name)
        for name in ("ledgers", "bookies", "marks", "topics", "cursors")
    ]
    assert (BEFORE, AFTER, AGAIN) == ("before", "after", "again")


def test_a_table_is_read_with_its_schema(context: RunContext, tmp_path: Path) -> None:
    assert context.table(BEFORE, "marks") == (MARKS, (str(tmp_path / "r1/checkpoint/before/marks"),))
    assert context.frame([(1,)], "ledger_id long") == ([(1,)], "ledger_id long")


def test_all_phases_share_one_clock_and_one_progress(context: RunContext) -> None:
    assert context.clock_ms() == 5
    assert isinstance(context.progress, QuietProgress)


def test_rows_are_counted_over_all_files(context: RunContext) -> None:
    write_ledgers(context, BEFORE, [ledger(i, [(0, ["a"])], last=9) for i in (1, 2)], [ledger(3, [(0, ["a"])], last=9)])
    (context.directory.table(BEFORE, "ledgers") / "part-9.making").write_text("unfinished")
    assert context.row_count(BEFORE, "ledgers") == 3
    assert context.row_count(AFTER, "ledgers") == 0


def test_rows_of_a_range_of_ledgers_are_ascending(context: RunContext) -> None:
    made = {i: ledger(i, [(0, ["a", "b"])], last=9) for i in (1, 2, 3, 4, 5)}
    write_ledgers(context, BEFORE, [made[4], made[5], made[1]], [made[3], made[2]])
    rows = context.ledger_rows(BEFORE, 2, 4)
    assert [row.ledger_id for row in rows] == [2, 3, 4]
    assert (rows[0].state, rows[0].last_entry_id, rows[0].length, rows[0].metadata_version) == ("closed", 9, 100, 1)
    assert not {"segments", "custom"} & {*rows[0].__fields__}, "only the driver's columns are read"
    assert context.ledger_rows(BEFORE, 6, 9) == []


def test_only_ledgers_of_the_wanted_bookie_are_selected(tmp_path: Path) -> None:
    context = context_in(tmp_path, bookie="b")
    segments = {1: [(0, ["a", "b"])], 2: [(0, ["a", "c"])], 3: [(0, ["a", "c"]), (5, ["b", "c"])]}
    write_ledgers(context, BEFORE, [ledger(i, each, last=9) for i, each in segments.items()])
    rows = context.ledger_rows(BEFORE, 0, 9)
    assert [row.ledger_id for row in rows if context.is_selected(row)] == [1, 3]
    assert "custom" not in rows[0].__fields__


def test_every_ledger_is_selected_without_a_wanted_bookie(context: RunContext) -> None:
    assert context.is_selected(Row(ledger_id=1))
    ledgers = object()
    assert context.selected(ledgers) is ledgers  # type: ignore[arg-type, comparison-overlap]


def test_a_frame_of_ledgers_is_selected_by_the_bookies_of_all_segments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "F", functions)
    ensembles = {1: [["a", "b"]], 2: [["a", "c"]], 3: [["a", "c"], ["b", "c"]], 4: []}
    ledgers = PlainFrame(
        [{"ledger_id": i, "segments": [{"ensemble": each} for each in found]} for i, found in ensembles.items()]
    )
    selected: Any = context_in(tmp_path, bookie="b").selected(ledgers)  # type: ignore[arg-type]
    assert selected.ids() == [1, 3]


def test_bookies_that_left_are_determined_once_per_reading(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    gone = {"before": ["x", "y"], "after": []}

    def gone_bookies(bookies: tuple[Any, tuple[str]], ledgers: tuple[Any, tuple[str]]) -> SimpleNamespace:
        when = Path(bookies[1][0]).parent.name
        asked.append((when, Path(ledgers[1][0]).name))
        return SimpleNamespace(collect=lambda: [Row(bookie=name) for name in gone[when]])

    monkeypatch.setattr(module.copy_checks, "gone_bookies", gone_bookies)
    for _ in range(2):
        assert context.gone_bookies(BEFORE) == {"x", "y"}
        assert context.gone_bookies(AFTER) == frozenset()
    assert asked == [("before", "ledgers"), ("after", "ledgers")]


def test_all_ledgers_are_known_by_their_id(context: RunContext) -> None:
    broken = ledger(8, [(0, ["a"])], last=None, problem="garbage", metadata_version=4)
    write_ledgers(context, AFTER, [broken], [ledger(7, [(0, ["a", "b"])], last=9)])
    assert context.known_ledgers(AFTER) == {
        7: KnownLedger(7, "closed", 1, 2, 9, 100, None),
        8: KnownLedger(8, "open", 4, 1, None, None, "garbage"),
    }


def write_findings(directory: Path, *rows: tuple[int | None, str]) -> None:
    (directory / "findings").mkdir(parents=True)
    found = [{"ledger_id": ledger_id, "kind": kind, "bookie": "a"} for ledger_id, kind in rows]
    parquet.write_table(pa.Table.from_pylist(found), directory / "findings" / "part-0.parquet")


def test_only_finished_groups_count(context: RunContext) -> None:
    for number, rows in {10: [(7, "ORPHAN_DATA")], 2: [(3, "MISSING_REPLICA"), (3, "MISSING_REPLICA")]}.items():
        write_findings(context.directory.begin_group(number), *rows)
        context.directory.finish_group(number)
    write_findings(context.directory.begin_group(4), (9, "MISSING_REPLICA"))
    assert [path.name for path in context.groups()] == ["00002", "00010"]
    assert context.found_kinds() == {(3, "MISSING_REPLICA"), (7, "ORPHAN_DATA")}


def test_rows_of_directories_have_the_wanted_columns(tmp_path: Path) -> None:
    for name, ledger_id in (("one", 3), ("two", 7)):
        write_findings(tmp_path / name, (ledger_id, "MISSING_REPLICA"))
    both = [tmp_path / name / "findings" for name in ("two", "one")]
    assert list(rows_of(both, columns=("ledger_id",))) == [{"ledger_id": 7}, {"ledger_id": 3}]
    assert list(rows_of(both[:1])) == [{"ledger_id": 7, "kind": "MISSING_REPLICA", "bookie": "a"}]
    assert list(rows_of([])) == []
