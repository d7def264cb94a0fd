"""Verdicts, summaries, the report, proposals and differences: from findings alone, without Spark."""

import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from bindery_core.errors import BadRequest
from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit
from bindery_spark.audit.audit import Options
from bindery_spark.audit.checkpoint import RunDirectory, last_finished, run_directory, runs_in
from bindery_spark.audit.findings.actions import Proposal, proposals, words
from bindery_spark.audit.findings.diff import compare, finding_text, read_findings
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Exit, Kind, Severity, Verdict, verdict_of
from bindery_spark.audit.findings.report import report_html
from bindery_spark.audit.findings.summary import (
    BookieCoverage,
    Summary,
    last_audit,
    metrics_text,
    summarise,
    summary_text,
)
from bindery_spark.audit.run import Outcome, read_outcome, write_outputs
from bindery_spark.main import _print_outcome, main
from frames import NOW_MS, finding

NASTY = '<script>alert("x")</script>&'
WHOLE = [BookieCoverage("a:3181", 100, 0, 1_000), BookieCoverage("b:3181", 50, 0, 500)]


def summary(findings: list[dict], bookies: list[BookieCoverage] = WHOLE, **changes: object) -> Summary:
    known = {
        "run_id": "r1", "cluster_id": "c-1", "level": "deep", "began_ms": NOW_MS, "ended_ms": NOW_MS + 2_000,
        "ledgers": 3, "ledgers_skipped": 0, "ledgers_verified": 2, "oldest_verified_ms": NOW_MS - 8_000,
    }  # fmt: skip
    return summarise(findings, bookies, **{**known, **changes})


def missing(ledger_id: int = 7, bookie: str | None = "a:3181", first: int = 3, last: int = 5, **more: object) -> dict:
    facts = {
        "bookie": bookie, "segment": 0, "first_entry": first, "last_entry": last, "severity": "under_replicated",
        "found": "the bookie denies it", "expected": "a copy", "repairable": True, "action": "mark",
    }  # fmt: skip
    return finding("MISSING_REPLICA", ledger_id, **{**facts, **more})


@pytest.mark.parametrize(
    ("severities", "complete", "verdict", "code"),
    [
        ([], True, "HEALTHY", 0),
        (["info", "warning"], True, "HEALTHY", 0),
        ([], False, "INCOMPLETE", 3),
        (["warning", "incomplete"], True, "INCOMPLETE", 3),
        (["incomplete", "under_replicated"], False, "UNDER-REPLICATED", 1),
        (["under_replicated", "corrupt"], False, "CORRUPT", 2),
        (["unreadable"], True, "CORRUPT", 2),
    ],
)
def test_the_worst_decides(severities: list[str], complete: bool, verdict: str, code: int) -> None:
    found = verdict_of(severities, is_complete=complete)
    assert (found, found.exit_code) == (verdict, code)


def test_the_cluster_keeps_verdicts_and_severities_by_the_same_names_in_the_same_order() -> None:
    worst_last = [verdict_of([severity], is_complete=True) for severity in SEVERITIES]
    assert tuple(Severity) == SEVERITIES
    assert tuple(dict.fromkeys(worst_last)) == VERDICTS
    assert set(VERDICTS) == set(Verdict)


def test_what_the_cluster_keeps_of_a_run_is_what_its_summary_says() -> None:
    bookies = [*WHOLE, BookieCoverage("c:3181", 50, 20, 0, "unreachable")]
    found = summary([missing(), missing(8), finding("ORPHAN_DATA", 9, severity="warning")], bookies)
    assert last_audit(found) == LastAudit(
        level="deep", run_id="r1", verdict="UNDER-REPLICATED", exit_code=1, began_ms=NOW_MS, ended_ms=NOW_MS + 2_000,
        copies_expected=200, copies_verified=180, bytes_read=1_500, oldest_verified_ms=NOW_MS - 8_000,
        kinds={"MISSING_REPLICA": 2, "ORPHAN_DATA": 1}, severities={"under_replicated": 2, "warning": 1},
    )  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True])
def test_who_reads_the_verdict_is_told_when_the_cluster_was_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, as_json: bool
) -> None:
    outcome = Outcome(summary([]), [], [], RunDirectory(tmp_path / "r1"), "zookeeper did not answer")
    _print_outcome(outcome, as_json=as_json)
    said = capsys.readouterr()
    assert "bindery: the cluster was not told of this run: zookeeper did not answer" in said.err.splitlines()
    assert "not told" not in said.out


def test_every_kind_is_named_in_the_text_of_its_module_and_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    assert WHAT_TO_DO.keys() == set(Kind)
    for kind in Kind:
        assert f"### {kind}\n" in manual
    for verdict in Verdict:
        assert verdict in manual
    for code in Exit:
        assert f"| {code:d} " in manual


def test_the_last_line_is_for_scripts() -> None:
    text = summary_text(summary([]), [])
    assert text.splitlines()[-1] == "bindery c-1 is HEALTHY"
    assert "150 of 150 copies of entries (100 %)" in text
    found = [missing()]
    text = summary_text(summary(found), found)
    assert text.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert (
        "  MISSING_REPLICA (under_replicated) ledger 7, entries 3..5, on a:3181: the bookie denies it; expected a copy"
        in text.splitlines()
    )


def test_what_was_not_seen_is_told_with_the_reason_and_is_never_a_hundred_per_cent() -> None:
    bookies = [*WHOLE, BookieCoverage("c:3181", 100_000, 1, 5, "unreachable: refused")]
    told = summary([], bookies)
    assert (told.verdict, told.exit_code, told.unknown) == ("INCOMPLETE", 3, 1)
    text = summary_text(told, [])
    assert "(99.99 %)" in text
    assert "c:3181: 1 of 100000 copies were not seen: unreachable: refused" in text


def test_where_orphans_were_not_looked_for_is_told_and_the_run_is_incomplete() -> None:
    bookies = [WHOLE[0], BookieCoverage("b:3181", 50, 0, 500, unlisted="unlisted: no admin HTTP")]
    told = summary([], bookies)
    assert (told.verdict, told.exit_code, told.coverage) == ("INCOMPLETE", 3, 1.0)
    assert "  b:3181: orphans were not looked for: unlisted: no admin HTTP" in summary_text(told, []).splitlines()
    lines = metrics_text(told).splitlines()
    assert {line for line in lines if line.startswith("bindery_audit_bookie_unlisted{")} == {
        'bindery_audit_bookie_unlisted{bookie="a:3181"} 0', 'bindery_audit_bookie_unlisted{bookie="b:3181"} 1',
    }  # fmt: skip
    assert Summary.from_json(told.to_json()) == told


def test_orphans_are_looked_for_by_deep_audits_that_are_not_told_otherwise() -> None:
    asked = {
        Options(level=level, orphans=orphans) for level in ("quick", "standard", "deep") for orphans in (True, False)
    }
    assert {options for options in asked if options.looks_beside} == {Options()}
    narrow, wide = Options(orphans=False), Options()
    assert narrow.sees_no_more_than(asdict(wide))
    assert not wide.sees_no_more_than(asdict(narrow)), "what was not looked for may have been there"


def test_metrics_are_text_that_prometheus_reads() -> None:
    text = metrics_text(summary([missing()], [BookieCoverage('a"\\', 10, 4, 1, "x")]))
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'bindery_audit_\w+(\{\w+="(?:[^"\\]|\\.)*"\})? [0-9.e+-]+', line) for line in lines), lines
    assert 'bindery_audit_findings{kind="MISSING_REPLICA"} 1' in lines
    assert 'bindery_audit_findings{kind="ENTRY_LOST"} 0' in lines
    assert "bindery_audit_coverage_ratio 0.6" in lines
    assert "bindery_audit_oldest_verification_seconds 10.0" in lines
    assert "bindery_audit_copies_per_second 5.0" in lines


def test_the_report_stands_alone_and_escapes_everything() -> None:
    found = [missing(bookie=NASTY, found=NASTY, expected=NASTY)]
    page = report_html(
        summary(found, [*WHOLE, BookieCoverage(NASTY, 10, 5, 0, NASTY)], cluster_id=NASTY, run_id=NASTY), found
    )
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page), "nothing is loaded from elsewhere"
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL).group())
    texts = [each.text for each in picture.iter("text")]
    assert {"a:3181", "b:3181", NASTY, "5 of 10 copies seen", "1 under_replicated"} <= set(texts)
    assert len(list(picture.iter("rect"))) == 5, "three seen, one unseen, one of findings"


def test_a_report_without_bookies_and_findings_is_a_page_too() -> None:
    page = report_html(summary([], []), [])
    ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL).group())
    assert "HEALTHY" in page


def test_a_ledger_is_proposed_once_with_all_its_bookies() -> None:
    found = [
        missing(), missing(bookie="b:3181", first=0, last=0),
        finding("MISSING_MARK", 7, action="mark"),
        finding("STALE_ENSEMBLE", 8, bookie="c:3181", action="mark"),
        finding("REPLICA_DIVERGENCE", 9, bookie="c:3181", action="inspect"),
        finding("UNREADABLE_BOOKIE", None, bookie="c:3181"),
    ]  # fmt: skip
    first, second = proposals(found)
    assert first == Proposal(7, ("a:3181", "b:3181"), "entry_missing", 4, ("MISSING_MARK", "MISSING_REPLICA"))
    assert second == Proposal(8, ("c:3181",), "bookie_lost", None, ("STALE_ENSEMBLE",))
    assert words(first) == "mark ledger 7 for a:3181, b:3181: MISSING_MARK, MISSING_REPLICA, 4 copies"
    assert [Proposal.from_json(one.to_json()) for one in (first, second)] == [first, second]


def test_a_difference_is_what_is_new_gone_or_says_something_else() -> None:
    topics = [
        finding("TOPIC_INCONSISTENT", 5, expected="topic t1"),
        finding("TOPIC_INCONSISTENT", 5, expected="topic t2"),
    ]
    before = [missing(), missing(8), missing(9), *topics]
    after = [missing(run_id="r2", first_seen_ms=1), missing(9, last=6), missing(10), topics[1]]
    found = compare(before, after)
    assert [f["ledger_id"] for f in found.new] == [10]
    assert [(f["ledger_id"], f["expected"]) for f in found.gone] == [(5, "topic t1"), (8, "a copy")]
    assert [(was["last_entry"], now["last_entry"]) for was, now in found.changed] == [(5, 6)]
    assert compare(before, before).is_empty
    assert finding_text(finding("UNREADABLE_BOOKIE", None, bookie="b")) == "UNREADABLE_BOOKIE (warning) on b"


def finished(out: Path, run_id: str, findings: list[dict]) -> RunDirectory:
    directory = RunDirectory(out / run_id)
    directory.findings.mkdir(parents=True)
    if findings:
        parquet.write_table(pa.Table.from_pylist(findings), directory.findings / "part-0.parquet")
    directory.write_run({"options": {}, "began_ms": NOW_MS})
    told = summary(findings, run_id=run_id)
    write_outputs(directory, told, findings, proposals(findings))
    return directory


def test_a_run_that_is_finished_is_read_back_as_it_was(tmp_path: Path) -> None:
    found = [missing(8), missing(7)]
    directory = finished(tmp_path, "20260101T000000Z-a", found)
    outcome = read_outcome(run_directory(tmp_path, directory.run_id))
    assert outcome.summary == summary(found, run_id=directory.run_id)
    assert [f["ledger_id"] for f in outcome.findings] == [7, 8]
    assert [one.ledger_id for one in outcome.proposals] == [7, 8]
    assert read_findings(directory.findings) == outcome.findings


def test_the_run_before_is_the_latest_finished_one_of_the_same_cluster(tmp_path: Path) -> None:
    first, second = (finished(tmp_path, f"2026010{n}T000000Z-a", []) for n in (1, 2))
    unfinished = RunDirectory(tmp_path / "20260103T000000Z-a")
    unfinished.write_run({})
    assert last_finished(tmp_path, before="20260104", cluster_id="c-1") == second
    assert last_finished(tmp_path, before=second.run_id, cluster_id="c-1") == first
    assert last_finished(tmp_path, before="20260104", cluster_id="another") is None
    assert runs_in(tmp_path) == [first, second, unfinished]
    assert last_finished(tmp_path, before="20260104", cluster_id="c-1", fits=lambda options: False) is None


@pytest.mark.parametrize(
    ("mine", "other", "is_enough"),
    [
        ({}, {}, True),
        ({}, {"level": "quick"}, False),
        ({"level": "quick"}, {}, True),
        ({"first": 3, "last": 9}, {"first": 2, "last": 9}, True),
        ({}, {"first": 1}, False),
        ({}, {"bookie": "a"}, False),
        ({"bookie": "a"}, {"bookie": "a"}, True),
        ({"bookie": "a"}, {}, True),
    ],
)
def test_since_when_is_known_from_a_run_that_looked_at_all_of_it_as_deeply(
    mine: dict, other: dict, is_enough: bool
) -> None:
    assert Options(**mine).sees_no_more_than(asdict(Options(**other))) == is_enough
    assert not Options().sees_no_more_than({}), "a run of which nothing is known"


def test_a_group_is_done_when_it_is_whole(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    making = directory.begin_group(3)
    (making / "half").touch()
    assert directory.done() == set()
    assert list(directory.begin_group(3).iterdir()) == [], "begun anew"
    directory.finish_group(3)
    assert directory.done() == {3}


def test_a_run_of_another_version_is_not_resumed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "r")
    directory.write_json("checkpoint/run.json", {"format": 99})
    with pytest.raises(BadRequest, match="another version"):
        directory.read_run()
    directory.write_run({"options": {"level": "deep", "an_option_of_tomorrow": 1}})
    with pytest.raises(BadRequest, match="another version"):
        Options.from_json(directory.read_run()["options"])
    directory.write_run({"options": asdict(Options(level="quick", orphans=False))})
    assert Options.from_json(directory.read_run()["options"]) == Options(level="quick", orphans=False)
    directory.write_json("checkpoint/run.json", {"format": 1})
    with pytest.raises(BadRequest, match="another version"):
        directory.read_run()
    with pytest.raises(BadRequest, match="no audit run x"):
        run_directory(tmp_path, "x")


# --- the command ------------------------------------------------------------------------------------------------------


def test_show_lists_runs_and_shows_one_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = finished(tmp_path, "20260101T000000Z-a", [missing()])
    assert main(["show", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{directory.run_id}  UNDER-REPLICATED\n"
    assert main(["audit", "show", directory.run_id, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert main(["show", directory.run_id, "--out", str(tmp_path), "--findings", "--json"]) == 1
    assert '"kind": "MISSING_REPLICA"' in capsys.readouterr().out


def test_diff_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = finished(tmp_path, "1", [missing()]), finished(tmp_path, "2", [missing(), missing(8)])
    assert main(["diff", "1", "1", "--out", str(tmp_path)]) == 0
    assert main(["diff", str(one.path), str(two.path)]) == 1
    told = capsys.readouterr()
    assert told.out.startswith("+ MISSING_REPLICA (under_replicated) ledger 8, entries 3..5")
    assert told.err.splitlines()[-1] == "1 new, 0 gone, 0 changed"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--level", "full"], "quick, standard, deep"),
        (["run", "--ledgers", "9-7"], "the range is empty"),
        (["run", "--nonsense"], "No such option"),
        (["run", "--resume", "nothing", "--out", "/nonexistent"], "no audit run nothing"),
        (["show", "nothing", "--out", "/nonexistent"], "no audit run nothing"),
        (["nonsense"], "No such command"),
    ],
)
def test_wrong_usage_is_a_job_error_and_names_the_fix(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == Exit.JOB_ERROR
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["show", "--help"], ["diff", "--help"]])
def test_every_verb_has_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: bindery audit" in capsys.readouterr().out


def test_severities_have_an_order_that_the_text_follows() -> None:
    assert [str(each) for each in Severity][-3:] == ["under_replicated", "corrupt", "unreadable"]
