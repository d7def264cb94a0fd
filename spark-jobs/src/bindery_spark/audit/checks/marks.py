"""Check under-replication marks: false marks, missing marks, and ledgers that lost their mark without being healed."""

from bindery_recovery.records.reasons import CHECKED_ALL
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import Run, as_findings
from bindery_spark.audit.findings.findings import LACKS_COPIES, Action, Kind, Severity

MOVING_REASONS = ("placement", "bookie_draining")
"""Reasons of marks that do not mean that a copy is missing."""


def lacking(findings: DataFrame) -> DataFrame:
    """Under-replicated ledgers: ledger_id, since_ms (first seen), found. Warnings do not count: their damage is
    repaired."""
    return (
        findings.where(F.col("kind").isin(*map(str, LACKS_COPIES)) & (F.col("severity") != str(Severity.WARNING)))
        .groupBy("ledger_id")
        .agg(
            F.min("first_seen_ms").alias("since_ms"),
            F.concat_ws(", ", F.sort_array(F.collect_set("kind"))).alias("found"),
        )
    )


def away(ledgers: DataFrame, bookies: DataFrame, absences: DataFrame) -> DataFrame:
    """Ledgers that name an absent bookie which is not in maintenance: columns as of `lacking`.

    `absences`: bookie, since_ms. Bookies that are not in it are ignored, because the time of their absence is unknown.
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
    """Marked ledgers of which every copy is stored.

    `marks`: those that existed when the run began and when it ended, so that no worker is about to remove them.
    `covered`: ledger_id of ledgers whose copies were all checked. A mark is true while a bookie of the ledger is absent
    or leaving. Marks with one of MOVING_REASONS are not checked: they request that copies are moved, and no copy is
    missing.
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
    rows = false.select(
        "ledger_id",
        F.lit("a copy that is missing").alias("expected"),
        F.when(F.col("exists").isNull(), "the ledger was deleted").otherwise("every copy is stored").alias("found"),
    )
    return as_findings(rows, run, Kind.FALSE_MARK, Severity.WARNING)


def judged_by_lists(marks: DataFrame) -> DataFrame:
    """The `marks` that a list of entries can disprove. A mark without a reason, or with one for which a repair
    reads every entry, may be about a damaged copy, and lists contain damaged copies."""
    return marks.where(F.col("reason").isNotNull() & ~F.col("reason").isin(*sorted(map(str, CHECKED_ALL))))


def missing_marks(lacking: DataFrame, marks: DataFrame, reported: DataFrame, run: Run, *, delay_ms: int) -> DataFrame:
    """Ledgers that are under-replicated for longer than the lost-bookie delay, and not marked. `marks`: ledger_id of
    those that were marked when the run began or when it ended. `reported`: ledger_id of those in NOT_HEALED."""
    late = (
        lacking.where(F.lit(run.now_ms) - F.col("since_ms") > delay_ms)
        .groupBy("ledger_id")
        .agg(F.concat_ws(", ", F.sort_array(F.collect_set("found"))).alias("found"))
        .join(marks.select("ledger_id"), "ledger_id", "left_anti")
        .join(reported.select("ledger_id"), "ledger_id", "left_anti")
        .withColumn("expected", F.lit(f"a mark after {delay_ms // 1000} s"))
    )
    return as_findings(late, run, Kind.MISSING_MARK, Severity.UNDER_REPLICATED, repairable=True, action=Action.MARK)


def not_healed(lacking: DataFrame, marks: DataFrame, healed: DataFrame, run: Run) -> DataFrame:
    """Under-replicated ledgers whose mark was removed since the last run. `marks`: as of `missing_marks`; a mark that
    was removed during this run may belong to copies that arrived during it. `healed`: ledger_id of those that were
    marked in the last run, or reported as healed since."""
    still = (
        lacking.join(healed.select("ledger_id").distinct(), "ledger_id", "left_semi")
        .join(marks.select("ledger_id"), "ledger_id", "left_anti")
        .groupBy("ledger_id")
        .agg(F.concat_ws(", ", F.sort_array(F.collect_set("found"))).alias("found"))
        .withColumn("expected", F.lit("all copies, because its mark was removed"))
    )
    return as_findings(still, run, Kind.NOT_HEALED, Severity.UNDER_REPLICATED, repairable=True, action=Action.MARK)
