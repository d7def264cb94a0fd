"""A full run over a scripted cluster: interrupted and resumed while the cluster changes; then an incremental run."""

from pathlib import Path

import pytest
from bindery_core.errors import MetadataUnavailable
from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.options import Options
from bindery_spark.audit.outcome import Outcome
from bindery_spark.audit.plan import GROUP_BYTES_MIN
from bindery_spark.audit.run import run_audit
from bindery_spark.progress import QuietProgress
from frames import DAY_MS, NOW_MS, Tables, bookie, copy, ledger
from pyspark.sql import SparkSession
from scripted_source import ABC, Scripted, whole

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine
LARGE = GROUP_BYTES_MIN
"""Bytes of a ledger that fills a group by itself."""


class InterruptedAt(QuietProgress):
    """Interrupts the run when this group begins."""

    def __init__(self, number: int) -> None:
        self._number = number

    def group(self, number: int, ledgers: int, size: int) -> None:
        if number == self._number:
            raise KeyboardInterrupt


class World:
    """A cluster of seven ledgers, some of which change during the first run.

    1: complete. 2: two entries are missing on a bookie. 3: open; a missing copy arrives before the second pass.
    4: open; a copy stays missing. 5: deleted. 6: healed, which changes its metadata. 7: created after the run began.
    """

    def __init__(self, spark: SparkSession, out: Path) -> None:
        def made(ledger_id: int, last: int | None = 3, **more: object) -> dict:
            length = {} if last is None else {"length": 40}
            return ledger(ledger_id, [(0, ABC)], last=last, **{**length, **more})

        large = {"length": LARGE}
        before = [made(1, **large), made(2, **large), made(3, None), made(4, None), made(5), made(6)]
        after = [*before[:4], made(6, metadata_version=2), made(7)]
        self.spark = spark
        self.out = out
        self.source = Scripted(Tables(spark), [before, after], self.copies)

    def copies(self, reading: int) -> list[dict]:
        """Rows of the nth reading: the groups first, then the ledgers with findings."""
        is_again = reading > 3
        first = [
            *whole(1),
            *whole(2, missing=[1, 2]),
            *whole(4, missing=[2]),
            *(row for row in whole(5, missing=[0]) if not is_again),
            *whole(3, missing=[] if is_again else [3]),
            *whole(6, missing=[] if is_again else [0]),
        ]
        for row in first:  # the lengths in the metadata of the large ledgers
            if row["ledger_id"] in (1, 2) and row["entry_id"] == 3 and row["ledger_length"] is not None:
                row["ledger_length"] = LARGE
        return first

    def run(
        self, run_id: str, *, now_ms: int, is_new: bool = True, progress: object = None, **options: object
    ) -> Outcome:
        return run_audit(
            self.spark,
            self.source,
            RunDirectory(self.out / run_id),
            Options(**{"level": "deep", **options}),
            out=self.out,
            clock_ms=lambda: now_ms,
            progress=progress or QuietProgress(),
            is_new=is_new,
        )


@pytest.fixture(scope="module")
def world(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(spark, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def first(world: World) -> Outcome:
    """The first run, which is interrupted in the second group and then resumed."""
    with pytest.raises(KeyboardInterrupt):
        world.run("20260101T000000Z-a", now_ms=NOW_MS, progress=InterruptedAt(1))
    assert [last for _, last in world.source.read] == [1], "one group was read"
    return world.run("20260101T000000Z-a", now_ms=NOW_MS, is_new=False)


def reported(outcome: Outcome) -> set[tuple]:
    return {(f["kind"], f["ledger_id"], f["first_entry"], f["last_entry"], f["bookie"]) for f in outcome.findings}


def test_an_interrupted_run_is_resumed_and_reports_only_confirmed_findings(world: World, first: Outcome) -> None:
    assert reported(first) == {("MISSING_REPLICA", 2, 1, 2, "a"), ("MISSING_REPLICA", 4, 2, 2, "a")}
    assert (first.summary.verdict, first.summary.exit_code) == ("UNDER-REPLICATED", 1)
    assert [group[0] for group in world.source.read[:3]] == [0, 2, 3], "each group was read once"
    assert world.source.read[3:] == [(2, 6)], "and ledgers with findings are read again"
    assert sorted(world.source.verified) == [1], "closed, complete, and unchanged during the run"
    assert [one.ledger_id for one in first.proposals] == [2, 4]
    text = (first.directory.path / "summary.txt").read_text()
    assert text.splitlines()[-1] == "bindery c-1 is UNDER-REPLICATED"
    assert {path.name for path in first.directory.path.iterdir()} >= {"report.html", "metrics.prom", "actions.json"}
    [recorded] = world.source.last
    assert (recorded.level, recorded.run_id, recorded.verdict, recorded.exit_code) == (
        "deep",
        "20260101T000000Z-a",
        "UNDER-REPLICATED",
        1,
    )
    assert recorded.kinds == {"MISSING_REPLICA": 2}
    assert recorded.copies_verified == recorded.copies_expected == first.summary.copies
    assert first.unrecorded == ""


def test_the_next_run_skips_verified_ledgers_and_keeps_first_seen_times(world: World, first: Outcome) -> None:
    later_ms = NOW_MS + DAY_MS
    world.source.read.clear()
    world.source.ledgers = world.source.ledgers[-1:]
    world.source.copies = lambda _: [*whole(4), *whole(6), *whole(7), *world.copies(9)[12:24]]
    second = world.run("20260102T000000Z-a", now_ms=later_ms, since_verified_ms=2 * DAY_MS)
    assert second.summary.ledgers_skipped == 1
    assert second.summary.oldest_verified_ms == NOW_MS
    assert all(group[0] > 1 for group in world.source.read), "ledger 1 is not read"
    assert reported(second) == {("MISSING_REPLICA", 2, 1, 2, "a"), ("MISSING_MARK", 2, None, None, None)}
    seen = {f["kind"]: f["first_seen_ms"] for f in second.findings}
    assert seen == {"MISSING_REPLICA": NOW_MS, "MISSING_MARK": later_ms}


def test_a_run_that_cannot_list_orphaned_data_is_incomplete(spark: SparkSession, tmp_path: Path) -> None:
    """a does not list its ledgers, c does not list the entries of one ledger, d is absent and in no metadata, e
    and f left for good."""
    world = World(spark, tmp_path)
    world.source.ledgers = [world.source.ledgers[0][:1]]
    world.source.copies = lambda _: world.copies(9)[:12]
    world.source.beside = [
        bookie("d", registration="absent"),
        bookie("e", registration="absent", intent="removed"),
        bookie("f", registration="absent", cookie=False),
    ]
    unlisted = {"segment": -1, "expected": False, "status": "unknown"}
    world.source.unlisted = [
        copy(-1, -1, "a", **unlisted, error="unlisted: no HTTP"),
        copy(9, -1, "c", **unlisted, error="unlisted: busy"),
        copy(-1, -1, "e", **unlisted, error="unreachable: gone"),
    ]
    outcome = world.run("20260101T000000Z-a", now_ms=NOW_MS)
    assert reported(outcome) == {("UNREADABLE_BOOKIE", None, None, None, name) for name in "acd"}
    assert {f["found"] for f in outcome.findings} == {
        f"orphaned data was not checked: {why}"
        for why in ("unlisted: no HTTP", "unlisted: busy", "unreachable: bookie is not registered")
    }
    summary = outcome.summary
    assert (summary.verdict, summary.exit_code, summary.coverage, summary.copies) == ("INCOMPLETE", 3, 1.0, 12)
    assert {one.bookie for one in summary.bookies if one.unlisted} == {"a", "c", "d"}
    assert sorted(world.source.verified) == [1], "the ledger itself is complete"


def test_only_full_runs_record_a_verdict_and_an_unrecorded_run_still_has_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    world = World(spark, tmp_path)
    world.source.ledgers = [world.source.ledgers[0][:1]]
    world.source.copies = lambda _: world.copies(9)[:12]
    in_part = world.run("20260101T000000Z-a", now_ms=NOW_MS, last=1)
    assert (sorted(world.source.verified), world.source.last, in_part.unrecorded) == ([1], [], "")

    world.source.verified.clear()
    unasked = world.run("20260102T000000Z-a", now_ms=NOW_MS, record=False, level="quick")
    assert (world.source.verified, world.source.last) == ({}, [])
    assert unasked.unrecorded == "--no-record was given"

    world.source.refusal = MetadataUnavailable("zookeeper did not respond")
    refused = world.run("20260103T000000Z-a", now_ms=NOW_MS, level="quick")
    assert refused.unrecorded == "zookeeper did not respond"
    assert refused.directory.is_finished
    for outcome in (in_part, unasked, refused):
        assert (outcome.summary.verdict, outcome.summary.ledgers_verified) == ("HEALTHY", 1)
