"""The end of a run: which checks are made on which tables, by level and by what the run read."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from bindery_spark.audit import conclusion as module
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.conclusion import (
    conclude,
    copy_findings,
    coverage_findings,
    earlier_findings,
    healed_ledgers,
    ledgers_to_read,
    mark_findings,
    metadata_findings,
)
from bindery_spark.audit.ledger_history import KnownLedger, LedgerHistory
from bindery_spark.audit.options import Options
from bindery_spark.audit.plan import Group, Plan
from bindery_spark.audit.planning import BegunRun, Skipped
from bindery_spark.audit.second_pass.rules import MergeRule, Selection
from bindery_spark.audit.second_pass.second_pass import SecondPass
from finished_runs import deep
from frames import NOW_MS, RUN
from plain_frames import Cell, PlainFrame, create_frame, functions, joined_frames

PLAN = Plan((Group(0, 1, 3, 3, 30, 300), Group(1, 7, 9, 3, 30, 300)))


def begun(**facts: Any) -> BegunRun:
    return BegunRun("r5", NOW_MS, Facts("c-1", **facts), PLAN, Skipped())


def second_pass(ids: Sequence[int] = (), last: Sequence[int] = ()) -> SecondPass:
    known = {i: KnownLedger(i, "closed", 1, 2, 9, 100, None) for i in last}
    return SecondPass(Selection(tuple(ids), {}), LedgerHistory({}, {}, known), ())


class Context:
    """A run whose tables are in memory. `tables` by (when, name)."""

    def __init__(self, path: Path = Path("none"), **options: Any) -> None:
        self.options = Options(**options)
        self.directory = RunDirectory(path)
        self.tables: dict[tuple[str, str], PlainFrame] = {}
        self.spark = SimpleNamespace(read=self)
        self.progress = SimpleNamespace(phase=self.note)
        self.events: list[str] = []
        self.wanted: set[int] | None = None

    def note(self, text: str) -> None:
        self.events.append(text)

    def frame(self, rows: Sequence[Any], schema: Any) -> PlainFrame:
        return create_frame(rows, schema)

    def table(self, when: str, name: str) -> PlainFrame:
        return self.tables.get((when, name), PlainFrame([], ["ledger_id", "metadata_version"]))

    def row_count(self, when: str, name: str) -> int:
        return len(self.table(when, name).rows)

    def selected(self, ledgers: PlainFrame) -> PlainFrame:
        rows = [row for row in ledgers.rows if self.wanted is None or row["ledger_id"] in self.wanted]
        return PlainFrame(rows, ledgers.columns)

    def keep_metadata(self, when: str) -> None:
        self.note(f"metadata {when}")

    def groups(self) -> list[Path]:
        return [Path("g1"), Path("g2")]

    def found_kinds(self) -> set[tuple[int, str]]:
        return {(7, "MISSING_REPLICA")}

    def schema(self, schema: Any) -> "Context":
        self._schema = schema
        return self

    def parquet(self, *paths: str) -> tuple[str, ...]:
        return paths


def ids(*ledger_ids: int, version: int = 1) -> PlainFrame:
    rows = [{"ledger_id": i, "metadata_version": version} for i in ledger_ids]
    return PlainFrame(rows, ["ledger_id", "metadata_version"])


class Checks:
    """Checks that return one row with their name, and note the frames that they were given."""

    def __init__(self) -> None:
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.options: dict[str, dict[str, Any]] = {}

    def of(self, *names: str) -> SimpleNamespace:
        return SimpleNamespace(**{name: self.check(name) for name in names})

    def check(self, name: str) -> Any:
        def check(*arguments: Any, **options: Any) -> PlainFrame:
            self.arguments[name] = arguments
            self.options[name] = options
            return PlainFrame([{"check": name}])

        return check


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    checks = Checks()
    monkeypatch.setattr(module, "F", functions)
    monkeypatch.setattr(module, "Column", Cell)
    monkeypatch.setattr(module, "together", joined_frames)
    monkeypatch.setattr(module, "kept", lambda frame: frame)
    ledgers = ("unreadable_metadata", "stale_ensembles", "open_too_long", "bad_placements")
    monkeypatch.setattr(module, "ledger_checks", checks.of(*ledgers))
    monkeypatch.setattr(module, "topic_checks", checks.of("topic_findings", "unnamed_ledgers"))
    for name in ("unreadable_bookies", "unchecked_ledgers", "unread_ledgers"):
        monkeypatch.setattr(module, name, checks.check(name))
    return checks


def made(found: Any) -> list[str]:
    """The names of the checks that made these findings."""
    return [row["check"] for row in found.rows]


# --- metadata ---------------------------------------------------------------------------------------------------------

ALWAYS = ["unreadable_metadata", "stale_ensembles", "open_too_long"]


@pytest.mark.parametrize(
    ("options", "more"),
    [
        pytest.param({"level": "quick"}, [], id="quick"),
        pytest.param({"level": "standard"}, [], id="standard"),
        pytest.param({"level": "deep"}, ["bad_placements", "unnamed_ledgers"], id="deep"),
        pytest.param({"level": "deep", "first": 1}, ["bad_placements"], id="deep, some ledgers"),
        pytest.param({"level": "deep", "bookie": "a"}, ["bad_placements"], id="deep, one bookie"),
    ],
)
def test_the_level_decides_which_metadata_is_checked(checks: Checks, options: dict[str, Any], more: list[str]) -> None:
    assert made(metadata_findings(Context(**options), "after", RUN)) == [*ALWAYS, *more]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["topics", "cursors"])
def test_topics_are_checked_if_there_are_any_at_that_time(checks: Checks, name: str) -> None:
    context: Any = Context(orphan_after_ms=55)
    context.tables["after", name] = ids(1)
    assert made(metadata_findings(context, "after", RUN))[-1] == "topic_findings"
    assert checks.options["topic_findings"] == {"orphan_after_ms": 55}
    assert made(metadata_findings(context, "before", RUN))[-1] == "unnamed_ledgers"


def test_only_selected_ledgers_in_the_range_are_checked(checks: Checks) -> None:
    context: Any = Context(first=2, last=4, open_max_ms=66)
    context.tables["after", "ledgers"] = ids(1, 2, 3, 4, 5)
    context.wanted = {1, 2, 4}
    metadata_findings(context, "after", RUN)
    for name in ALWAYS:
        assert checks.arguments[name][0].ids() == [2, 4]
    assert checks.options["open_too_long"] == {"open_max_ms": 66}


# --- coverage ---------------------------------------------------------------------------------------------------------


def covered(monkeypatch: pytest.MonkeyPatch, context: Any, *, unlisted: dict[str, str], unchecked: list[Any]) -> Any:
    monkeypatch.setattr(module, "unlisted_bookies", lambda _: unlisted)
    monkeypatch.setattr(module, "unchecked", lambda *_: unchecked)
    return coverage_findings(context, begun(), second_pass(), PlainFrame([]))  # type: ignore[arg-type]


def test_what_was_not_checked_is_reported(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(7, "METADATA_UNREADABLE", "metadata", "garbage")]
    found = covered(monkeypatch, Context(), unlisted={"b": "busy", "a": "gone"}, unchecked=rows)
    assert made(found) == ["unreadable_bookies", "unchecked_ledgers", "unread_ledgers"]
    assert checks.options["unreadable_bookies"]["unlisted"].rows == [
        {"bookie": "a", "why": "gone"},
        {"bookie": "b", "why": "busy"},
    ]
    assert checks.arguments["unchecked_ledgers"][0].ids() == [7]


def test_a_quick_audit_does_not_miss_unread_ledgers(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(covered(monkeypatch, Context(level="quick"), unlisted={}, unchecked=[])) == ["unreadable_bookies"]
    assert checks.options["unreadable_bookies"] == {"unlisted": None}
    found = covered(monkeypatch, Context(level="standard"), unlisted={}, unchecked=[])
    assert made(found) == ["unreadable_bookies", "unread_ledgers"]


def test_ledgers_of_the_plan_that_did_not_change_should_be_read(checks: Checks) -> None:
    context: Any = Context()
    context.tables["before", "ledgers"] = ids(*range(11))
    context.tables["after", "ledgers"] = PlainFrame([*ids(0, 1, 3, 5, 7, 8, 9, 10).rows, *ids(2, version=2).rows])
    found: Any = ledgers_to_read(context, begun(), second_pass())
    assert found.ids() == [1, 3, 7, 8, 9], "2 changed, and no group reads 0, 5 and 10"
    context.wanted = {3, 5}
    found = ledgers_to_read(context, begun(), second_pass())
    assert found.ids() == [3]


def test_ledgers_that_were_read_again_have_their_newer_metadata(checks: Checks) -> None:
    context: Any = Context()
    context.tables["before", "ledgers"] = ids(1, 2, 3)
    context.tables["after", "ledgers"] = PlainFrame([*ids(1, 3).rows, *ids(2, 8, version=2).rows])
    found: Any = ledgers_to_read(context, begun(), second_pass(ids=[2, 3, 8], last=[1, 2, 8]))
    assert [(row["ledger_id"], row["metadata_version"]) for row in found.rows] == [(1, 1), (2, 2), (8, 2)]


# --- copies -----------------------------------------------------------------------------------------------------------


def test_the_first_pass_is_read_only_if_a_rule_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: dict[tuple[int, bool], MergeRule] = {}
    given: list[Any] = []
    monkeypatch.setattr(module, "merge_rules", lambda *_: rules)
    monkeypatch.setattr(module, "second_results", lambda *_: "second")
    monkeypatch.setattr(module, "merged_findings", lambda *arguments: given.append(arguments) or "merged")
    context: Any = Context()
    assert copy_findings(context, second_pass()) == "merged"  # type: ignore[comparison-overlap]
    rules[7, False] = MergeRule.KEEP
    copy_findings(context, second_pass())
    assert [arguments[1:] for arguments in given] == [
        (None, rules, "second"),
        (("g1/findings", "g2/findings"), rules, "second"),
    ]


# --- marks ------------------------------------------------------------------------------------------------------------


class Marks:
    """Checks of marks over frames of ledger ids."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, context: Any, *, lacking: PlainFrame) -> None:
        self.context = context
        self.given: dict[str, Any] = {}
        self._lacking = lacking
        monkeypatch.setattr(module, "mark_checks", self)
        monkeypatch.setattr(module, "FINDINGS", "ledger_id long, check string")

    def lacking(self, _: Any) -> PlainFrame:
        return self._lacking

    def away(self, _ledgers: Any, _bookies: Any, absences: PlainFrame) -> PlainFrame:
        self.given["absences"] = absences.rows
        return PlainFrame([{"ledger_id": 90}])

    def not_healed(self, lacking: PlainFrame, marked: PlainFrame, healed: PlainFrame, _: Any) -> PlainFrame:
        self.given |= {"lacking": lacking.ids(), "marked": marked.ids(), "healed": healed.ids()}
        return PlainFrame([{"ledger_id": 1, "check": "not healed"}])

    def missing_marks(self, _: Any, _marked: Any, not_healed: PlainFrame, *_rest: Any, delay_ms: int) -> PlainFrame:
        self.given |= {"besides": not_healed.ids(), "delay_ms": delay_ms}
        return PlainFrame([{"ledger_id": 1, "check": "missing"}])

    def judged_by_lists(self, marks: PlainFrame) -> PlainFrame:
        self.given["by lists"] = marks.ids()
        return marks

    def false_marks(self, steady: PlainFrame, _l: Any, _b: Any, covered: PlainFrame, *_rest: Any) -> PlainFrame:
        self.given |= {"steady": steady.ids(), "covered": covered.ids()}
        return PlainFrame([{"ledger_id": 1, "check": "false"}])

    def found(self, *, seen: PlainFrame, **facts: Any) -> list[str]:
        coverage = [
            {"ledger_id": i, "unknown": unknown} for i, unknown in ((3, 0), (4, 0), (4, 1), (5, 0), (5, 0), (6, 2))
        ]
        return made(mark_findings(self.context, begun(**facts), seen, PlainFrame(coverage), None))  # type: ignore[arg-type]


NOTHING = PlainFrame([], ["ledger_id"])


def test_without_findings_absences_and_marks_there_is_nothing_to_check(
    checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Marks(monkeypatch, Context(), lacking=ids(7))
    assert (marks.found(seen=NOTHING), marks.given) == ([], {})


def test_ledgers_that_lack_copies_should_be_marked(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context()
    context.tables["after", "marks"] = NOTHING
    context.tables["before", "marks"] = ids(8)
    marks = Marks(monkeypatch, context, lacking=PlainFrame([{"ledger_id": 7}]))
    assert marks.found(seen=ids(7), lost_bookie_delay_ms=55) == ["not healed", "missing"]
    assert marks.given == {"lacking": [7], "marked": [8], "healed": [], "besides": [1], "delay_ms": 55}
    empty = Marks(monkeypatch, context, lacking=NOTHING)
    assert empty.found(seen=ids(7)) == []


def test_ledgers_of_absent_bookies_should_be_marked(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = Marks(monkeypatch, Context(), lacking=NOTHING)
    assert marks.found(seen=NOTHING, absent_since_ms={"b": 5, "a": 6}) == ["not healed", "missing"]
    assert marks.given["lacking"] == [90]
    assert marks.given["absences"] == [{"bookie": "a", "since_ms": 6}, {"bookie": "b", "since_ms": 5}]


@pytest.mark.parametrize(("level", "by_lists"), [("deep", None), ("standard", [3, 5])])
def test_marks_of_completely_checked_ledgers_may_be_false(
    checks: Checks, monkeypatch: pytest.MonkeyPatch, level: str, by_lists: list[int] | None
) -> None:
    context = Context(level=level)
    context.tables["after", "marks"] = ids(3, 5, 6)
    context.tables["before", "marks"] = ids(2, 3, 5)
    marks = Marks(monkeypatch, context, lacking=NOTHING)
    assert marks.found(seen=NOTHING) == ["false"]
    assert (marks.given["steady"], marks.given["covered"]) == ([3, 5], [3, 5])
    assert marks.given.get("by lists") == by_lists


def test_a_quick_audit_calls_no_mark_false(checks: Checks, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(level="quick")
    context.tables["after", "marks"] = context.tables["before", "marks"] = ids(3)
    assert Marks(monkeypatch, context, lacking=NOTHING).found(seen=NOTHING) == []


# --- earlier runs -----------------------------------------------------------------------------------------------------


def previous_run(path: Path, *marked: int) -> RunDirectory:
    directory = deep(path, "r1", [])
    directory.write_json("marks.json", list(marked))
    return directory


def test_ledgers_are_healed_if_they_were_marked_or_reported_since(tmp_path: Path) -> None:
    facts = Facts("c-1", healed={4: NOW_MS - 1, 5: NOW_MS, 6: NOW_MS + 9})
    assert healed_ledgers(facts, previous_run(tmp_path, 3)) == {3, 5, 6}
    assert healed_ledgers(facts, None) == set()


def test_earlier_findings_are_those_of_the_last_run_that_checked_as_much(tmp_path: Path) -> None:
    context: Any = Context()
    assert earlier_findings(context, begun(), tmp_path) is None
    for run_id in ("r1", "r3", "r7"):
        deep(tmp_path, run_id, [])
    assert earlier_findings(context, begun(), tmp_path) == (str(tmp_path / "r3" / "findings"),)
    deep(tmp_path, "r4", []).write_run({"options": {"level": "quick"}, "began_ms": 1})
    assert earlier_findings(context, begun(), tmp_path) == (str(tmp_path / "r3" / "findings"),)


# --- all of it --------------------------------------------------------------------------------------------------------


class Written(PlainFrame):
    """A frame that notes where it was written."""

    where_to: list[str]

    def coalesce(self, files: int) -> "Written":
        assert files == 1
        self.write = self
        return self

    def mode(self, mode: str) -> "Written":
        assert mode == "overwrite"
        return self

    def parquet(self, path: str) -> None:
        self.where_to.append(path)


@pytest.mark.parametrize("has_metadata_findings", [True, False])
def test_all_findings_are_written_with_the_marks_for_the_next_run(
    checks: Checks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_metadata_findings: bool
) -> None:
    context: Any = Context(tmp_path / "r5")
    previous_run(tmp_path)
    second = second_pass()
    written: list[Written] = []
    places: list[str] = []
    of_metadata = {"before": ["metadata before"], "after": ["metadata after"] if has_metadata_findings else []}
    asked: list[str] = []
    previous: list[RunDirectory | None] = []

    def frame(*names: str) -> PlainFrame:
        return PlainFrame([{"check": name} for name in names], ["check"])

    def together(frames: Sequence[PlainFrame]) -> PlainFrame:
        result = Written(joined_frames(frames).rows, ["check"])
        result.where_to = places
        written.append(result)
        return result

    def metadata(_context: Any, when: str, _run: Any) -> PlainFrame:
        asked.append(when)
        return frame(*of_metadata[when])

    def marks(_context: Any, _begun: Any, seen: PlainFrame, _coverage: Any, run: RunDirectory | None) -> PlainFrame:
        previous.append(run)
        assert len(seen.rows) == 2 + has_metadata_findings
        return frame("marks")

    monkeypatch.setattr(module, "run_second_pass", lambda *_: second)
    monkeypatch.setattr(module, "copy_findings", lambda *_: frame("copies"))
    monkeypatch.setattr(module, "write_coverage", lambda *_: context.note("coverage"))
    monkeypatch.setattr(module, "metadata_findings", metadata)
    monkeypatch.setattr(module, "reported_twice", lambda first, then: frame(f"{made(first)[0]} and {made(then)[0]}"))
    monkeypatch.setattr(module, "coverage_frame", lambda _: None)
    monkeypatch.setattr(module, "coverage_findings", lambda *_: frame("coverage"))
    monkeypatch.setattr(module, "with_first_seen", lambda found, earlier: found if earlier else frame())
    monkeypatch.setattr(module, "mark_findings", marks)
    monkeypatch.setattr(module, "together", together)
    after = context.directory.table("after", "marks")
    after.mkdir(parents=True)
    parquet.write_table(pa.table({"ledger_id": [9, 7], "locked": [True, False]}), after / "part-0.parquet")

    assert conclude(context, begun(), tmp_path) is second
    confirmed = ["metadata before and metadata after"] if has_metadata_findings else []
    assert made(written[-1]) == ["copies", *confirmed, "coverage", "marks"]
    assert asked == (["after", "before"] if has_metadata_findings else ["after"])
    assert places == [str(tmp_path / "r5" / "findings")]
    assert context.directory.read_json("marks.json") == [7, 9]
    assert [run and run.run_id for run in previous] == ["r1"]
    assert context.events == ["reading metadata again", "metadata after", "confirming", "coverage", "checking marks"]
