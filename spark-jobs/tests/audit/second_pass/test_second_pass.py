"""Runs over a scripted cluster that changes during the audit: the second pass decides which findings are reported, and
drops those that it could not check."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.options import Options
from bindery_spark.audit.outcome import Outcome
from bindery_spark.audit.run import run_audit
from bindery_spark.audit.second_pass import second_pass as second_pass_module
from bindery_spark.progress import QuietProgress
from frames import DAY_MS, NOW_MS, Tables, bookie, copy, ledger, mark
from pyspark.sql import DataFrame, SparkSession
from scripted_source import ABC, Scripted

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(600)]  # seconds, but minutes on a busy machine
HOUR_MS = 3_600_000
BROKEN = {
    "state": "open",
    "ensemble_size": 0,
    "write_quorum": 0,
    "ack_quorum": 0,
    "metadata_version": 0,
    "segments": [],
    "problem": "broken",
    "last_entry_id": None,
    "length": None,
    "digest_type": "",
}


def made(ledger_id: int, last: int | None = 3, names: Iterable[str] = ABC, **more: object) -> dict:
    length = {} if last is None else {"length": 40}
    return ledger(ledger_id, [(0, list(names))], last=last, **{**length, **more})


def rows(ledger_id: int, changes: dict[tuple[int, str], str] | None = None, names: Iterable[str] = ABC) -> list[dict]:
    """Four entries; `changes`: status by entry and bookie."""
    known = changes or {}
    return [copy(ledger_id, e, name, known.get((e, name), "good")) for e in range(4) for name in names]


def silent(name: str) -> dict[tuple[int, str], str]:
    return {(entry_id, name): "unknown" for entry_id in range(4)}


def run(spark: SparkSession, source: Scripted, out: Path, day: int = 1, **options: object) -> Outcome:
    source.read.clear()
    source.kept = 0
    return run_audit(
        spark,
        source,
        RunDirectory(out / f"2026010{day}T000000Z-a"),
        Options(**{"level": "deep", **options}),
        out=out,
        clock_ms=lambda: NOW_MS + day * DAY_MS,
        progress=QuietProgress(),
        is_new=True,
    )


def reported(outcome: Outcome) -> set[tuple]:
    return {(f["kind"], f["ledger_id"], f["segment"], f["first_entry"], f["bookie"]) for f in outcome.findings}


def two_readings(first: list[list[dict]], second: list[list[dict]]) -> Callable[[int], list[dict]]:
    return lambda reading: list(chain.from_iterable(first if reading == 1 else second))


Scenario = tuple[list[dict], list[dict], list[list[dict]], list[list[dict]]]
"""Ledgers before and after the first pass; rows of REPLICAS by ledger in the first and in the second pass."""


def changing_ledgers() -> Scenario:
    """Ledgers 1 to 8, some of which change during the run.

    1: a missing copy that was healed in place. 2: damage that stays. 3: moved from a to d, whose copy is damaged.
    4: all copies are damaged, then its metadata is unreadable. 5: open, a missing copy in a segment that the plan does
    not have. 6: moved from a to d, and complete. 7: damage on a, and a copy on c that is missing in
    the second pass. 8: damage that the bookie repaired.
    """
    before = [made(1), made(2), made(3), made(4), made(5, None), made(6), made(7), made(8)]
    after = [
        *before[:2],
        made(3, names="dbc", metadata_version=2),
        {**made(4), **BROKEN},
        before[4],
        made(6, names="dbc", metadata_version=2),
        *before[6:],
    ]
    of_five = [row if row["entry_id"] < 2 else {**row, "segment": 1} for row in rows(5, {(3, "a"): "missing"})]
    first = [
        rows(1, {(1, "a"): "missing"}),
        rows(2, {(2, "b"): "corrupt"}),
        rows(3, names="bc"),
        rows(4, {(0, name): "corrupt" for name in ABC}),
        of_five,
        rows(6, names="bc"),
        rows(7, {(0, "a"): "corrupt"}),
        rows(8, {(3, "c"): "corrupt"}),
    ]
    second = [
        rows(1),
        rows(2, {(2, "b"): "corrupt"}),
        rows(3, {(0, "d"): "corrupt"}, "dbc"),
        of_five,
        rows(6, names="dbc"),
        rows(7, {(0, "a"): "corrupt", (3, "c"): "missing"}),
        rows(8),
    ]
    return before, after, first, second


def steady_ledgers() -> Scenario:
    """Ledgers 11 to 18, which do not change. Bookie b answers for some or no entries in the second pass.

    11: b's copy was damaged. 12: entries were missing on b, which reports one of them again. 13: b repaired a damaged
    copy and does not answer for the others. 14: all copies of two entries were damaged; one on a is good now. 15: b's
    payload differed. 16: a missing copy on a is healed. 17: b never answered. 18: b answered for fewer entries in the
    first pass.
    """
    ledgers = [made(i) for i in range(11, 19)]
    both = {(e, name): "corrupt" for e in (1, 2) for name in ABC}
    holes = {(e, "b"): "missing" for e in range(3)}
    other = {"payload_crc32c": 7}
    different = [{**row, **(other if (row["entry_id"], row["bookie"]) == (3, "b") else {})} for row in rows(15)]
    first = [
        rows(11, {(2, "b"): "corrupt"}),
        rows(12, holes),
        rows(13, {(2, "b"): "corrupt"}),
        rows(14, both),
        different,
        rows(16, {(1, "a"): "missing"}),
        rows(17, {(1, "a"): "missing", **silent("b")}),
        rows(18, {(0, "a"): "missing", (0, "b"): "unknown", (1, "b"): "unknown"}),
    ]
    no_answer = silent("b")
    second = [
        rows(11, no_answer),
        rows(12, {(0, "b"): "unknown", (2, "b"): "missing"}),
        rows(13, {place: status for place, status in no_answer.items() if place != (2, "b")}),
        rows(14, {**both, **no_answer, (2, "a"): "good"}),
        rows(15, no_answer),
        rows(16, no_answer),
        rows(17, {(1, "a"): "missing", **no_answer}),
        rows(18, {(0, "a"): "missing", (3, "b"): "unknown"}),
    ]
    return ledgers, ledgers, first, second


@pytest.fixture(scope="module")
def both_passes(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Scripted, Outcome]:
    """One run over `changing_ledgers` and `steady_ledgers`."""
    before, after, first, second = map(list.__add__, changing_ledgers(), steady_ledgers())
    source = Scripted(Tables(spark), [before, after], two_readings(first, second))
    source.bookies = [[bookie(name) for name in "abcd"]]
    return source, run(spark, source, tmp_path_factory.mktemp("runs"))


def test_the_second_pass_decides_about_each_ledger_that_changes(both_passes: tuple[Scripted, Outcome]) -> None:
    source, outcome = both_passes
    findings = [f for f in outcome.findings if (f["ledger_id"] or 99) < 10]
    assert {(f["kind"], f["ledger_id"], f["segment"], f["first_entry"], f["bookie"]) for f in findings} == {
        ("DIGEST_MISMATCH", 2, 0, 2, "b"),
        ("DIGEST_MISMATCH", 3, 0, 0, "d"),
        ("MISSING_REPLICA", 5, 1, 3, "a"),
        ("DIGEST_MISMATCH", 7, 0, 0, "a"),
        ("MISSING_REPLICA", 7, 0, 3, "c"),
        *(("DIGEST_MISMATCH", 4, 0, 0, name) for name in ABC),
        ("ENTRY_LOST", 4, 0, 0, None),
        ("METADATA_UNREADABLE", 4, None, None, None),
        ("DIGEST_MISMATCH", 8, 0, 3, "c"),
    }
    (unseen,) = [f for f in findings if f["kind"] == "METADATA_UNREADABLE"]
    assert (unseen["severity"], unseen["found"]) == ("incomplete", "broken")
    assert [f["ledger_id"] for f in findings if f["severity"] == "warning"] == [8], "the disk needs attention"
    assert 8 not in {proposal.ledger_id for proposal in outcome.proposals}
    assert len(source.read) == 2
    assert outcome.summary.copies == 16 * 12, "copies on d also count"
    assert sorted(i for i in source.verified if i < 10) == [1, 8], "the next run verifies ledgers that moved"


def test_findings_about_a_steady_ledger_stay_until_the_bookie_answers_again(
    both_passes: tuple[Scripted, Outcome],
) -> None:
    _, outcome = both_passes
    seen = {
        (f["ledger_id"], f["kind"], f["bookie"], f["first_entry"], f["last_entry"]): f
        for f in outcome.findings
        if f["ledger_id"] is None or f["ledger_id"] > 10
    }
    assert seen.keys() == {
        (11, "DIGEST_MISMATCH", "b", 2, 2),
        (12, "MISSING_REPLICA", "b", 0, 0),
        (12, "MISSING_REPLICA", "b", 2, 2),
        (13, "DIGEST_MISMATCH", "b", 2, 2),
        (14, "DIGEST_MISMATCH", "a", 1, 1),
        (14, "DIGEST_MISMATCH", "a", 2, 2),
        (14, "DIGEST_MISMATCH", "b", 1, 2),
        (14, "DIGEST_MISMATCH", "c", 1, 1),
        (14, "DIGEST_MISMATCH", "c", 2, 2),
        (14, "ENTRY_LOST", None, 1, 1),
        (15, "REPLICA_DIVERGENCE", "b", 3, 3),
        (17, "MISSING_REPLICA", "a", 1, 1),
        (18, "MISSING_REPLICA", "a", 0, 0),
        (None, "UNREADABLE_BOOKIE", "b", None, None),
    }
    damage = seen[11, "DIGEST_MISMATCH", "b", 2, 2]
    assert (damage["severity"], damage["action"], damage["found"]) == (
        "corrupt",
        "mark",
        "the copy does not match its digest",
    )
    assert {key[:4] for key, f in seen.items() if f["severity"] == "warning"} == {
        (13, "DIGEST_MISMATCH", "b", 2),
        (14, "DIGEST_MISMATCH", "a", 2),
    }
    assert (outcome.summary.verdict, outcome.summary.exit_code) == ("CORRUPT", 2)
    assert {proposal.ledger_id for proposal in outcome.proposals} >= {11, 12, 17, 18}
    assert outcome.summary.unknown == 4 + 1, "ledgers 17 and 18: the better of both passes"


def test_findings_that_the_second_pass_cannot_check_are_not_reported(spark: SparkSession, tmp_path: Path) -> None:
    """Ledger 1 is open, an entry is lost, then no bookie answers. Ledger 2 is closed and changed; a has damage and then
    does not answer. Ledger 3 is open, and in the second pass its bookies report fewer entries."""
    before = [made(1, None), made(2), made(3, None)]
    after = [before[0], made(2, metadata_version=2), before[2]]
    lost = {(1, "a"): "missing", (1, "b"): "missing", (1, "c"): "corrupt"}
    no_answers = {place: word for name in ABC for place, word in silent(name).items()}
    first = [rows(1, lost), rows(2, {(1, "a"): "corrupt"}), rows(3, {(3, "b"): "missing"})]
    second = [rows(1, no_answers), rows(2, silent("a")), [row for row in rows(3) if row["entry_id"] < 2]]
    outcome = run(spark, Scripted(Tables(spark), [before, after], two_readings(first, second)), tmp_path)
    assert (outcome.summary.verdict, outcome.summary.exit_code) == ("INCOMPLETE", 3)
    assert reported(outcome) == {
        *(("UNREADABLE_BOOKIE", None, None, None, name) for name in ABC),
        ("UNREADABLE_BOOKIE", 3, None, None, None),
    }
    assert {f["severity"] for f in outcome.findings} == {"incomplete"}
    assert outcome.summary.unknown == 12 + 4
    assert {f["found"] for f in outcome.findings if f["ledger_id"] == 3} == {"6 were checked in the second pass"}


def test_stale_records_are_deleted_and_a_mark_at_either_end_of_the_run_counts(
    spark: SparkSession, tmp_path: Path
) -> None:
    """In the first run ledgers 1 and 2 are complete, and a copy of ledger 3, which is marked, is missing. In the second
    run ledger 1 is damaged, the mark of ledger 3 is removed, and bookie a, which stores copies of ledger 2 only, counts
    as gone at the beginning and is registered again at the end. Ledger 4 does not change."""
    ledgers = [made(1, names="bcd"), made(2), made(3, names="bcd"), made(4, names="bcd")]

    def whole(ledger_id: int, changes: dict[tuple[int, str], str] | None = None) -> list[dict]:
        return rows(ledger_id, changes, ABC if ledger_id == 2 else "bcd")

    hole = {(1, "b"): "missing"}
    source = Scripted(Tables(spark), [ledgers], lambda _: [*whole(1), *whole(2), *whole(3, hole), *whole(4)])
    all_bookies = [bookie(name) for name in "abcd"]
    source.bookies, source.marks = [all_bookies], [[mark(3)]]
    first = run(spark, source, tmp_path)
    assert reported(first) == {("MISSING_REPLICA", 3, 0, 1, "b")}
    assert sorted(source.verified) == [1, 2, 4]

    source.bookies = [[bookie("a", registration="absent", cookie=False), *all_bookies[1:]], all_bookies]
    source.marks = [[mark(3)], []]
    damaged = {(0, "b"): "corrupt", (0, "c"): "corrupt", (0, "d"): "corrupt"}
    source.copies = lambda _: [*whole(1, damaged), *whole(2, silent("a")), *whole(3, hole), *whole(4)]
    second = run(spark, source, tmp_path, day=2, since_verified_ms=2 * DAY_MS)
    assert second.summary.ledgers_skipped == 0, "a gap of small ledgers saves too little: they are read"
    assert second.summary.oldest_verified_ms == NOW_MS + 2 * DAY_MS
    assert reported(second) == {
        *(("DIGEST_MISMATCH", 1, 0, 0, name) for name in "bcd"),
        ("ENTRY_LOST", 1, 0, 0, None),
        ("UNREADABLE_BOOKIE", None, None, None, "a"),
        ("MISSING_REPLICA", 3, 0, 1, "b"),
    }
    assert {one.bookie: (one.unknown, one.copies) for one in second.summary.bookies}["a"] == (4, 4)
    assert sorted(source.verified) == [4]

    source.bookies, source.marks = [all_bookies], []
    source.copies = lambda _: [*whole(1), *whole(2, silent("c")), *whole(3), *whole(4, silent("c"))]
    third = run(spark, source, tmp_path, day=3, level="quick")
    assert third.summary.verdict == "INCOMPLETE"
    assert source.verified[4].level == "deep", "a quick run that got no answer does not change the record"


def test_a_list_of_entries_cannot_disprove_a_mark_for_a_damaged_copy(spark: SparkSession, tmp_path: Path) -> None:
    reasons = {1: "entry_missing", 2: "reported_by_writer", 3: None, 4: "bookie_lost"}
    listed = {"digest_ok": None, "payload_crc32c": None, "payload_length": None, "ledger_length": None}
    copies = [{**row, **(listed if row["entry_id"] in (1, 2) else {})} for i in reasons for row in rows(i)]
    source = Scripted(Tables(spark), [[made(i) for i in reasons]], lambda _: copies)
    source.marks = [[mark(i, reason=reason) for i, reason in reasons.items()]]
    assert reported(run(spark, source, tmp_path, level="standard")) == {("FALSE_MARK", 4, None, None, None)}


def test_an_interrupted_second_pass_is_resumed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ledgers with a missing copy each, read again one by one. The run is interrupted at the third. Then the
    first changes; the resumed run is interrupted at the third again. The last resume is two hours later."""
    monkeypatch.setattr(second_pass_module, "BATCH_LEDGERS_MAX", 1)
    ledgers = [made(i) for i in range(1, 4)]
    hole = [row for i in range(1, 4) for row in rows(i, {(1, "a"): "missing"})]
    asked: list[tuple[int, ...]] = []

    class Mortal(Scripted):
        dies_at: tuple[int, ...] = (3,)

        def blocks(self, ids: Sequence[int], **how: Any) -> DataFrame:
            asked.append(tuple(ids))
            if self.dies_at == tuple(ids):
                raise KeyboardInterrupt
            return super().blocks(ids, **how)

    source = Mortal(Tables(spark), [ledgers], lambda _: hole)

    def begin(*, is_new: bool = False, hours: int = 0) -> Outcome:
        directory, now_ms = RunDirectory(tmp_path / "20260101T000000Z-a"), NOW_MS + hours * HOUR_MS
        return run_audit(
            spark,
            source,
            directory,
            Options(level="deep"),
            out=tmp_path,
            clock_ms=lambda: now_ms,
            progress=QuietProgress(),
            is_new=is_new,
        )

    with pytest.raises(KeyboardInterrupt):
        begin(is_new=True)
    assert asked == [(1, 2, 3), (1,), (2,), (3,)]
    asked.clear()
    source.ledgers = [[made(1, metadata_version=2), *ledgers[1:]]]
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert asked == [(1,), (3,)]
    asked.clear()
    source.dies_at = ()
    outcome = begin(hours=2)
    assert asked == [(1,), (2,), (3,)]
    assert reported(outcome) == {("MISSING_REPLICA", i, 0, 1, "a") for i in range(1, 4)}
    assert (outcome.summary.copies, outcome.summary.unknown) == (3 * 12, 0)
