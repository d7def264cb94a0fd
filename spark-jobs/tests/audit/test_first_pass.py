"""The first pass: which groups are read, with which ledgers, and what is written for each, with fakes of DataFrames."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_spark.audit import first_pass as module
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.first_pass import read_and_check, read_groups
from bindery_spark.audit.options import Options
from bindery_spark.audit.plan import Group, Plan
from bindery_spark.audit.planning import BegunRun, Skipped
from frames import NOW_MS, RUN
from pyspark.sql.types import Row

BEGUN = BegunRun(
    "r1",
    NOW_MS,
    Facts("c-1"),
    Plan((Group(0, 0, 4, 2, 20, 200), Group(1, 5, 9, 3, 30, 300), Group(2, 12, 20, 4, 40, 400))),
    Skipped(),
)


class Frame:
    """The name of what a DataFrame would contain. Writing it stores the name at the path."""

    def __init__(self, name: str, *, is_empty: bool = False) -> None:
        self.name = name
        self.events: list[str] = []
        self._is_empty = is_empty
        self.write = self
        self.written: dict[str, str] = {}

    def persist(self, _: Any) -> "Frame":
        self.events.append("persist")
        return self

    def unpersist(self) -> None:
        self.events.append("unpersist")

    def unionByName(self, other: "Frame") -> "Frame":
        return Frame(f"{self.name}+{other.name}")

    def coalesce(self, files: int) -> "Frame":
        assert files == 1
        return self

    def parquet(self, path: str) -> None:
        Path(path).mkdir(parents=True)
        (Path(path) / "content").write_text(self.name)

    def isEmpty(self) -> bool:
        return self._is_empty


class World:
    """Checks that return their names, and a source of blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_suspects: bool = True) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.blocks = Frame("blocks")
        self.arguments: dict[str, tuple[Any, ...]] = {}
        suspects = Frame("suspects", is_empty=not has_suspects)
        checks = {
            "with_gone": Frame("expected"),
            "coverage": Frame("coverage"),
            "unlisted": Frame("unlisted"),
            "closed_lengths": Frame("lengths"),
            "suspects": suspects,
            "entry_faults": Frame("faults"),
            "orphan_data": Frame("orphans"),
        }
        noted = {name: self._noting(name, result) for name, result in checks.items()}
        monkeypatch.setattr(module, "copy_checks", SimpleNamespace(**noted))
        monkeypatch.setattr(module, "copy_states", lambda blocks: Frame(f"states of {blocks.name}"))
        monkeypatch.setattr(module, "kept", lambda frame: frame)
        monkeypatch.setattr(module, "together", lambda frames: Frame("+".join(each.name for each in frames)))

    def _noting(self, name: str, result: Frame) -> Any:
        def check(*arguments: Any) -> Frame:
            self.arguments[name] = arguments
            return result

        return check

    def read_blocks(self, ids: list[int], *, entries: str, unexpected_in: Any, unexpected_on: Any) -> Frame:
        self.asked.append((ids, entries, unexpected_in, unexpected_on))
        return self.blocks

    def context(self, **options: Any) -> Any:
        return SimpleNamespace(
            options=Options(**options),
            source=SimpleNamespace(blocks=self.read_blocks),
            gone_bookies=lambda when: f"gone {when}",
        )

    def check(self, output: Path, *, keeps_states: bool = False, **options: Any) -> dict[str, str]:
        """Run the checks and return what was written."""
        ledgers: Any = Frame("ledgers")
        more = {"keeps_states": True} if keeps_states else {}
        read_and_check(self.context(**options), [3, 5], ledgers, "after", (2, 6), RUN, output, **more)
        return {path.parent.name: path.read_text() for path in output.glob("*/content")}


def test_a_deep_audit_checks_copies_and_orphaned_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch)
    assert world.check(tmp_path, level="deep", bookie="a") == {
        "coverage": "coverage+unlisted",
        "findings": "lengths+faults+orphans",
    }
    assert world.asked == [([3, 5], "all", (2, 6), "a")]
    assert world.blocks.events == ["persist", "unpersist"]
    assert world.arguments["with_gone"] == (world.blocks, "gone after")
    assert world.arguments["entry_faults"][2] == "gone after"
    assert world.arguments["closed_lengths"][2] == RUN


def test_without_orphaned_data_only_copies_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch)
    written = {"coverage": "coverage", "findings": "lengths+faults"}
    assert world.check(tmp_path / "standard", level="standard") == written
    assert world.check(tmp_path / "without", level="deep", orphans=False) == written
    assert world.asked == [([3, 5], "listed", None, None), ([3, 5], "all", None, None)]


def test_entries_are_compared_only_if_some_are_suspected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(monkeypatch, has_suspects=False)
    assert world.check(tmp_path, level="quick") == {"coverage": "coverage", "findings": "lengths"}
    assert "entry_faults" not in world.arguments


def test_the_second_pass_also_keeps_the_states_of_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = World(monkeypatch).check(tmp_path, keeps_states=True, level="standard")
    assert written == {"coverage": "coverage", "said": "states of blocks", "findings": "lengths+faults"}


# --- groups -----------------------------------------------------------------------------------------------------------


class Groups:
    """A context whose tables are names. Notes progress, and what is read for each group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path, *, dies_at: int | None = None) -> None:
        self.directory = RunDirectory(path)
        self.progress = self
        self.shown: list[tuple[Any, ...]] = []
        self.read: list[tuple[Any, ...]] = []
        self._dies_at = dies_at
        between = SimpleNamespace(col=lambda name: SimpleNamespace(between=lambda low, high: (name, low, high)))
        monkeypatch.setattr(module, "F", between)
        monkeypatch.setattr(module, "read_and_check", self._read_and_check)

    def plan(self, size: int, done: int, groups: int) -> None:
        self.shown.append(("plan", size, done, groups))

    def group(self, number: int, ledgers: int, size: int) -> None:
        self.shown.append(("group", number, ledgers, size))

    def done(self, size: int) -> None:
        self.shown.append(("done", size))

    def ledger_rows(self, when: str, first: int, last: int) -> list[Row]:
        assert when == "before"
        return [Row(ledger_id=each) for each in range(first, last + 1)]

    def is_selected(self, row: Row) -> bool:
        return row.ledger_id % 2 == 0

    def table(self, when: str, name: str) -> Any:
        return SimpleNamespace(where=lambda condition: (when, name, condition))

    def _read_and_check(
        self, _: Any, ids: list[int], ledgers: Any, when: str, id_range: tuple[int, int], run: Any, output: Path
    ) -> None:
        if ids[0] == self._dies_at:
            raise KeyboardInterrupt
        assert (output.is_dir(), run) == (True, RUN)
        self.read.append((ids, ledgers, when, id_range))


def test_groups_are_read_in_order_with_their_selected_ledgers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    groups = Groups(monkeypatch, tmp_path)
    read_groups(groups, BEGUN)  # type: ignore[arg-type]
    assert groups.read == [
        ([0, 2, 4], ("before", "ledgers", ("ledger_id", 0, 4)), "before", (0, 4)),
        ([6, 8], ("before", "ledgers", ("ledger_id", 5, 9)), "before", (5, 9)),
        ([12, 14, 16, 18, 20], ("before", "ledgers", ("ledger_id", 12, 20)), "before", (12, 20)),
    ]
    assert groups.shown == [
        ("plan", 900, 0, 3),
        ("group", 0, 2, 200),
        ("done", 200),
        ("group", 1, 3, 300),
        ("done", 300),
        ("group", 2, 4, 400),
        ("done", 400),
    ]
    assert groups.directory.done() == {0, 1, 2}


def test_an_interrupted_run_continues_with_the_group_that_it_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        read_groups(Groups(monkeypatch, tmp_path, dies_at=6), BEGUN)  # type: ignore[arg-type]
    assert RunDirectory(tmp_path).done() == {0}
    RunDirectory(tmp_path).begin_group(2)
    RunDirectory(tmp_path).finish_group(2)
    resumed = Groups(monkeypatch, tmp_path)
    read_groups(resumed, BEGUN)  # type: ignore[arg-type]
    assert [id_range for _, _, _, id_range in resumed.read] == [(5, 9)]
    assert resumed.shown == [("plan", 900, 600, 3), ("group", 1, 3, 300), ("done", 300)]
    assert resumed.directory.done() == {0, 1, 2}
