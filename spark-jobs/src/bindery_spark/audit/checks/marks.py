"""Whether re-replication is true: marks that lie, ledgers that nobody marked, and healing that did not heal."""

from bindery_recovery.records.reasons import CHECKED_ALL
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import Run, as_findings
from bindery_spark.audit.findings.findings import LACKS_COPIES, Action, Kind, Severity

MOVING_REASONS = ("placement", "bookie_draining")
"""Reasons of marks that do not say that a copy is missing."""


def lacking(findings: DataFrame) -> DataFrame:
    """Ledgers of which copies are missing: ledger_id, since_ms (first seen), found. A warning is of one that was."""
    return (
        findings.where(F.col("kind").isin(*map(str, LACKS_COPIES)) & (F.col("severity") != str(Severity.WARNING)))
        .groupBy("ledger_id")
        .agg(
            F.min("first_seen_ms").alias("since_ms"),
            F.concat_ws(", ", F.sort_array(F.collect_set("kind"))).alias("found"),
        )
    )


def away(ledgers: DataFrame, bookies: DataFrame, absences: DataFrame) -> DataFrame:
    """Ledgers that name a bookie which is away and not excused, or is to hold nothing any more: as `lacking`.

    `absences`: bookie, since_ms; of a bookie that is not in it nothing is known, and nothing follows.
    """
    absent = bookies.where("registration = 'absent' and intent != 'maintenance'").join(absences, "bookie")
    named = ledgers.where("problem is null").select(
        "ledger_id",
        F.explode(F.array_distinct(F.flatten(F.transform("segments", lambda s: s["ensemble"])))).alias("bookie"),
    )
    return (
        named.join(F.broadcast(absent.select("bookie", "since_ms")), "bookie")
        .groupBy("ledger_id")
        .agg(
            F.min("since_ms").alias("since_ms"),
            F.concat(F.concat_ws(", ", F.sort_array(F.collect_set("bookie"))), F.lit(" away")).alias("found"),
        )
    )


def false_marks(
    marks: DataFrame, ledgers: DataFrame, bookies: DataFrame, covered: DataFrame, findings: DataFrame, run: Run
) -> DataFrame:
    """Marked, and every copy is there.

    `marks`: those that stood when the run began and when it ended, so that no worker is about to remove them.
    `covered`: ledger_id of those of which every copy was looked at. A mark is true while a bookie of the ledger is
    absent or leaving, and one that is to move copies says nothing of missing ones.
    """
    leaving = bookies.where("registration = 'absent' or intent in ('draining', 'removed')").select("bookie")
    named = ledgers.where("problem is null").select(
        "ledger_id", F.explode(F.flatten(F.transform("segments", lambda s: s["ensemble"]))).alias("bookie")
    )
    true_ids = (
        findings.where(F.col("kind").isin(*map(str, (*LACKS_COPIES, Kind.ENTRY_LOST, Kind.METADATA_UNREADABLE))))
        .select("ledger_id")
        .union(named.join(F.broadcast(leaving), "bookie").select("ledger_id"))
    )
    still = marks.where(
        "not locked and not coalesce(reason in ({}), false)".format(", ".join(f"'{r}'" for r in MOVING_REASONS))
    )
    there = ledgers.select("ledger_id").withColumn("exists", F.lit(True))
    known = still.join(there, "ledger_id", "left").join(covered.withColumn("seen", F.lit(True)), "ledger_id", "left")
    false = known.where("exists is null or seen").join(true_ids, "ledger_id", "left_anti")
    told = false.select(
        "ledger_id",
        F.lit("a copy that is missing").alias("expected"),
        F.when(F.col("exists").isNull(), "the ledger was deleted").otherwise("every copy is there").alias("found"),
    )
    return as_findings(told, run, Kind.FALSE_MARK, Severity.WARNING)


def judged_by_lists(marks: DataFrame) -> DataFrame:
    """Those of `marks` whose truth shows where entries were listed and not read. A reason that was found by reading,
    and one that nobody knows, may be a damaged copy, which every list has."""
    return marks.where(F.col("reason").isNotNull() & ~F.col("reason").isin(*sorted(map(str, CHECKED_ALL))))


def missing_marks(lacking: DataFrame, marks: DataFrame, told: DataFrame, run: Run, *, delay_ms: int) -> DataFrame:
    """Ledgers that lack copies for longer than the lost-bookie delay, and are not marked. `marks`: ledger_id of those
    that were marked when the run began or when it ended. `told`: ledger_id of those of which NOT_HEALED says so
    already."""
    late = (
        lacking.where(F.lit(run.now_ms) - F.col("since_ms") > delay_ms)
        .groupBy("ledger_id")
        .agg(F.concat_ws(", ", F.sort_array(F.collect_set("found"))).alias("found"))
        .join(marks.select("ledger_id"), "ledger_id", "left_anti")
        .join(told.select("ledger_id"), "ledger_id", "left_anti")
        .withColumn("expected", F.lit(f"a mark after {delay_ms // 1000} s"))
    )
    return as_findings(
        late, run, Kind.MISSING_MARK, Severity.UNDER_REPLICATED, repairable=True, action=Action.MARK
    )  # fmt: skip


def not_healed(lacking: DataFrame, marks: DataFrame, healed: DataFrame, run: Run) -> DataFrame:
    """Ledgers that lack copies though their mark went since the last run. `marks`: as of `missing_marks`; one that went
    during this run may be of copies that arrived during it. `healed`: ledger_id of those that were marked in the last
    run, or told as healed since."""
    still = (
        lacking.join(healed.select("ledger_id").distinct(), "ledger_id", "left_semi")
        .join(marks.select("ledger_id"), "ledger_id", "left_anti")
        .groupBy("ledger_id")
        .agg(F.concat_ws(", ", F.sort_array(F.collect_set("found"))).alias("found"))
        .withColumn("expected", F.lit("all copies, since its mark went"))
    )
    return as_findings(
        still, run, Kind.NOT_HEALED, Severity.UNDER_REPLICATED, repairable=True, action=Action.MARK
    )  # fmt: skip
