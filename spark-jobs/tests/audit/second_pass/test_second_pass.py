"""Runs over a scripted cluster that heals, breaks and moves while it is read: the second reading decides, and what it
cannot say was not seen."""

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

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for what is seconds otherwise
HOUR_MS = 3_600_000
BROKEN = {
    "state": "open", "ensemble_size": 0, "write_quorum": 0, "ack_quorum": 0, "metadata_version": 0, "segments": [],
    "problem": "broken", "last_entry_id": None, "length": None, "digest_type": "",
}  # fmt: skip


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
        spark, source, RunDirectory(out / f"2026010{day}T000000Z-a"), Options(**{"level": "deep", **options}), out=out,
        clock_ms=lambda: NOW_MS + day * DAY_MS, progress=QuietProgress(), is_new=True,
    )  # fmt: skip


def told(outcome: Outcome) -> set[tuple]:
    return {(f["kind"], f["ledger_id"], f["segment"], f["first_entry"], f["bookie"]) for f in outcome.findings}


def two_readings(first: list[list[dict]], second: list[list[dict]]) -> Callable[[int], list[dict]]:
    return lambda reading: list(chain.from_iterable(first if reading == 1 else second))


def test_each_ledger_of_which_something_was_found_is_judged_by_its_second_reading(
    spark: SparkSession, tmp_path: Path
) -> None:
    """
    1: a hole that was healed in place; 2: damage that stays; 3: moved from a to d, whose copy is damaged; 4: all copies
    damaged, then unreadable metadata; 5: open, a hole in a segment that the plan did not know; 6: moved to d, and
    whole; 7: damage on a, and another hole since; 8: damage that its bookie repaired.
    """
    before = [made(1), made(2), made(3), made(4), made(5, None), made(6), made(7), made(8)]
    after = [
        *before[:2], made(3, names="dbc", metadata_version=2), {**made(4), **BROKEN}, before[4],
        made(6, names="dbc", metadata_version=2), *before[6:],
    ]  # fmt: skip
    of_five = [row if row["entry_id"] < 2 else {**row, "segment": 1} for row in rows(5, {(3, "a"): "missing"})]
    first = [
        rows(1, {(1, "a"): "missing"}), rows(2, {(2, "b"): "corrupt"}), rows(3, names="bc"),
        rows(4, {(0, name): "corrupt" for name in ABC}), of_five, rows(6, names="bc"), rows(7, {(0, "a"): "corrupt"}),
        rows(8, {(3, "c"): "corrupt"}),
    ]  # fmt: skip
    second = [
        rows(1), rows(2, {(2, "b"): "corrupt"}), rows(3, {(0, "d"): "corrupt"}, "dbc"), of_five, rows(6, names="dbc"),
        rows(7, {(0, "a"): "corrupt", (3, "c"): "missing"}), rows(8),
    ]  # fmt: skip
    source = Scripted(Tables(spark), [before, after], two_readings(first, second))
    source.bookies = [[bookie(name) for name in "abcd"]]
    outcome = run(spark, source, tmp_path)
    assert told(outcome) == {
        ("DIGEST_MISMATCH", 2, 0, 2, "b"), ("DIGEST_MISMATCH", 3, 0, 0, "d"), ("MISSING_REPLICA", 5, 1, 3, "a"),
        ("DIGEST_MISMATCH", 7, 0, 0, "a"), ("MISSING_REPLICA", 7, 0, 3, "c"),
        *(("DIGEST_MISMATCH", 4, 0, 0, name) for name in ABC), ("ENTRY_LOST", 4, 0, 0, None),
        ("METADATA_UNREADABLE", 4, None, None, None), ("DIGEST_MISMATCH", 8, 0, 3, "c"),
    }  # fmt: skip
    (unseen,) = [f for f in outcome.findings if f["kind"] == "METADATA_UNREADABLE"]
    assert (unseen["severity"], unseen["found"]) == ("incomplete", "broken")
    assert [f["ledger_id"] for f in outcome.findings if f["severity"] == "warning"] == [8], "its disk did that"
    assert 8 not in {proposal.ledger_id for proposal in outcome.proposals}
    assert len(source.read) == 2
    assert (outcome.summary.copies, outcome.summary.unknown) == (8 * 12, 0), "copies on d count, too"
    assert sorted(source.verified) == [1, 8], "what moved is verified by the next run"


def test_what_the_second_reading_cannot_say_was_not_seen(spark: SparkSession, tmp_path: Path) -> None:
    """1: open, an entry lost, then nobody answers; 2: closed and changed, damage on a, which then is down; 3: open, and
    the second time its bookies tell of fewer entries."""
    before = [made(1, None), made(2), made(3, None)]
    after = [before[0], made(2, metadata_version=2), before[2]]
    lost = {(1, "a"): "missing", (1, "b"): "missing", (1, "c"): "corrupt"}
    nobody = {place: word for name in ABC for place, word in silent(name).items()}
    first = [rows(1, lost), rows(2, {(1, "a"): "corrupt"}), rows(3, {(3, "b"): "missing"})]
    second = [rows(1, nobody), rows(2, silent("a")), [row for row in rows(3) if row["entry_id"] < 2]]
    outcome = run(spark, Scripted(Tables(spark), [before, after], two_readings(first, second)), tmp_path)
    assert (outcome.summary.verdict, outcome.summary.exit_code) == ("INCOMPLETE", 3)
    assert told(outcome) == {
        *(("UNREADABLE_BOOKIE", None, None, None, name) for name in ABC), ("UNREADABLE_BOOKIE", 3, None, None, None),
    }  # fmt: skip
    assert {f["severity"] for f in outcome.findings} == {"incomplete"}
    assert outcome.summary.unknown == 12 + 4
    assert {f["found"] for f in outcome.findings if f["ledger_id"] == 3} == {"6 were checked in the second pass"}


def test_what_a_bookie_said_of_a_ledger_that_did_not_change_stands_until_it_says_otherwise(
    spark: SparkSession, tmp_path: Path
) -> None:
    """b is silent the second time. 1: its copy was damaged; 2: it lacked entries, and says that it has one of them; 3:
    its damaged copy is well, and of the others it says nothing; 4: all copies of two entries were damaged, one of a is
    well; 5: its payload was another; 6: a hole of a is healed. 7: it never said anything; 8: it said less at first."""
    ledgers = [made(i) for i in range(1, 9)]
    both = {(e, name): "corrupt" for e in (1, 2) for name in ABC}
    holes = {(e, "b"): "missing" for e in range(3)}
    other = {"payload_crc32c": 7}

    def unlike(found: list[dict]) -> list[dict]:
        return [{**row, **(other if (row["entry_id"], row["bookie"]) == (3, "b") else {})} for row in found]

    first = [
        rows(1, {(2, "b"): "corrupt"}), rows(2, holes), rows(3, {(2, "b"): "corrupt"}), rows(4, both), unlike(rows(5)),
        rows(6, {(1, "a"): "missing"}), rows(7, {(1, "a"): "missing", **silent("b")}),
        rows(8, {(0, "a"): "missing", (0, "b"): "unknown", (1, "b"): "unknown"}),
    ]  # fmt: skip
    no_answer = silent("b")
    second = [
        rows(1, no_answer), rows(2, {(0, "b"): "unknown", (2, "b"): "missing"}),
        rows(3, {place: word for place, word in no_answer.items() if place != (2, "b")}),
        rows(4, {**both, **no_answer, (2, "a"): "good"}), rows(5, no_answer), rows(6, no_answer),
        rows(7, {(1, "a"): "missing", **no_answer}), rows(8, {(0, "a"): "missing", (3, "b"): "unknown"}),
    ]  # fmt: skip
    outcome = run(spark, Scripted(Tables(spark), [ledgers], two_readings(first, second)), tmp_path)
    seen = {(f["ledger_id"], f["kind"], f["bookie"], f["first_entry"], f["last_entry"]): f for f in outcome.findings}
    assert seen.keys() == {
        (1, "DIGEST_MISMATCH", "b", 2, 2),
        (2, "MISSING_REPLICA", "b", 0, 0), (2, "MISSING_REPLICA", "b", 2, 2),
        (3, "DIGEST_MISMATCH", "b", 2, 2),
        (4, "DIGEST_MISMATCH", "a", 1, 1), (4, "DIGEST_MISMATCH", "a", 2, 2), (4, "DIGEST_MISMATCH", "b", 1, 2),
        (4, "DIGEST_MISMATCH", "c", 1, 1), (4, "DIGEST_MISMATCH", "c", 2, 2), (4, "ENTRY_LOST", None, 1, 1),
        (5, "REPLICA_DIVERGENCE", "b", 3, 3),
        (7, "MISSING_REPLICA", "a", 1, 1), (8, "MISSING_REPLICA", "a", 0, 0),
        (None, "UNREADABLE_BOOKIE", "b", None, None),
    }  # fmt: skip
    damage = seen[1, "DIGEST_MISMATCH", "b", 2, 2]
    assert (damage["severity"], damage["action"], damage["found"]) == ("corrupt", "mark", "it contradicts its digest")
    assert {key[:4] for key, f in seen.items() if f["severity"] == "warning"} == {
        (3, "DIGEST_MISMATCH", "b", 2), (4, "DIGEST_MISMATCH", "a", 2),
    }  # fmt: skip
    assert (outcome.summary.verdict, outcome.summary.exit_code) == ("CORRUPT", 2)
    assert {proposal.ledger_id for proposal in outcome.proposals} >= {1, 2, 7, 8}
    assert outcome.summary.unknown == 4 + 1, "ledgers 7 and 8: the better of both readings"


def test_a_record_goes_with_what_it_told_and_a_mark_counts_while_it_stands_at_either_end(
    spark: SparkSession, tmp_path: Path
) -> None:
    """First 1 and 2 are whole, and 3, which is marked, has a hole. Then 1 is damaged; a, which holds copies of 2 alone,
    counted as gone and is back at the end; and the mark of 3 goes while it is read. 4 is read all along."""
    ledgers = [made(1, names="bcd"), made(2), made(3, names="bcd"), made(4, names="bcd")]

    def whole(ledger_id: int, changes: dict[tuple[int, str], str] | None = None) -> list[dict]:
        return rows(ledger_id, changes, ABC if ledger_id == 2 else "bcd")

    hole = {(1, "b"): "missing"}
    source = Scripted(Tables(spark), [ledgers], lambda _: [*whole(1), *whole(2), *whole(3, hole), *whole(4)])
    everybody = [bookie(name) for name in "abcd"]
    source.bookies, source.marks = [everybody], [[mark(3)]]
    first = run(spark, source, tmp_path)
    assert told(first) == {("MISSING_REPLICA", 3, 0, 1, "b")}
    assert sorted(source.verified) == [1, 2, 4]

    source.bookies = [[bookie("a", registration="absent", cookie=False), *everybody[1:]], everybody]
    source.marks = [[mark(3)], []]
    damaged = {(0, "b"): "corrupt", (0, "c"): "corrupt", (0, "d"): "corrupt"}
    source.copies = lambda _: [*whole(1, damaged), *whole(2, silent("a")), *whole(3, hole), *whole(4)]
    second = run(spark, source, tmp_path, day=2, since_verified_ms=2 * DAY_MS)
    assert second.summary.ledgers_skipped == 0, "a gap of small ledgers does not pay: they are read"
    assert second.summary.oldest_verified_ms == NOW_MS + 2 * DAY_MS
    assert told(second) == {
        *(("DIGEST_MISMATCH", 1, 0, 0, name) for name in "bcd"), ("ENTRY_LOST", 1, 0, 0, None),
        ("UNREADABLE_BOOKIE", None, None, None, "a"), ("MISSING_REPLICA", 3, 0, 1, "b"),
    }  # fmt: skip
    assert {one.bookie: (one.unknown, one.copies) for one in second.summary.bookies}["a"] == (4, 4)
    assert sorted(source.verified) == [4]

    source.bookies, source.marks = [everybody], []
    source.copies = lambda _: [*whole(1), *whole(2, silent("c")), *whole(3), *whole(4, silent("c"))]
    third = run(spark, source, tmp_path, day=3, level="quick")
    assert third.summary.verdict == "INCOMPLETE"
    assert source.verified[4].level == "deep", "a quick look that could not see proves nothing of it"


def test_a_list_does_not_say_that_a_mark_for_a_damaged_copy_is_false(spark: SparkSession, tmp_path: Path) -> None:
    reasons = {1: "entry_missing", 2: "reported_by_writer", 3: None, 4: "bookie_lost"}
    listed = {"digest_ok": None, "payload_crc32c": None, "payload_length": None, "ledger_length": None}
    copies = [{**row, **(listed if row["entry_id"] in (1, 2) else {})} for i in reasons for row in rows(i)]
    source = Scripted(Tables(spark), [[made(i) for i in reasons]], lambda _: copies)
    source.marks = [[mark(i, reason=reason) for i, reason in reasons.items()]]
    assert told(run(spark, source, tmp_path, level="standard")) == {("FALSE_MARK", 4, None, None, None)}


def test_a_second_reading_that_was_interrupted_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ledgers with a hole each, read again one by one. The run dies at the fourth, then 2 changes; it goes on and
    dies there; and the last time it was at rest for two hours."""
    monkeypatch.setattr(second_pass_module, "BATCH_LEDGERS_MAX", 1)
    ledgers = [made(i) for i in range(1, 5)]
    hole = [row for i in range(1, 5) for row in rows(i, {(1, "a"): "missing"})]
    asked: list[tuple[int, ...]] = []

    class Mortal(Scripted):
        dies_at: tuple[int, ...] = (4,)

        def blocks(self, ids: Sequence[int], **how: Any) -> DataFrame:
            asked.append(tuple(ids))
            if self.dies_at == tuple(ids):
                raise KeyboardInterrupt
            return super().blocks(ids, **how)

    source = Mortal(Tables(spark), [ledgers], lambda _: hole)

    def begin(*, is_new: bool = False, hours: int = 0) -> Outcome:
        directory, now_ms = RunDirectory(tmp_path / "20260101T000000Z-a"), NOW_MS + hours * HOUR_MS
        return run_audit(
            spark, source, directory, Options(level="deep"), out=tmp_path, clock_ms=lambda: now_ms,
            progress=QuietProgress(), is_new=is_new,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        begin(is_new=True)
    assert asked == [(1, 2, 3, 4), (1,), (2,), (3,), (4,)]
    asked.clear()
    source.ledgers = [[ledgers[0], made(2, metadata_version=2), *ledgers[2:]]]
    with pytest.raises(KeyboardInterrupt):
        begin()
    assert asked == [(2,), (4,)]
    asked.clear()
    source.dies_at = ()
    outcome = begin(hours=2)
    assert asked == [(1,), (2,), (3,), (4,)]
    assert told(outcome) == {("MISSING_REPLICA", i, 0, 1, "a") for i in range(1, 5)}
    assert (outcome.summary.copies, outcome.summary.unknown) == (4 * 12, 0)
