"""What a run could not check: bookies that did not answer, unread copies, and ledgers that changed too much."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import Run, as_findings
from bindery_spark.audit.findings.findings import Kind, Severity


def unreadable_bookies(coverage: DataFrame, run: Run, *, unlisted: DataFrame | None = None) -> DataFrame:
    """One finding for each bookie that did not answer for some copies, or could not list what it holds.

    `unlisted`: bookie and reason (`why`) of those that could not list; None: all could.
    """
    unknown = (
        coverage.where("unknown > 0")
        .groupBy("bookie")
        .agg(
            F.sum("unknown").alias("copies"),
            F.countDistinct("ledger_id").alias("ledgers"),
            F.min("reason").alias("reason"),
        )
    )
    unread = F.concat(
        "reason", F.lit("; "), "copies", F.lit(" copies of "), "ledgers", F.lit(" ledgers were not checked")
    )
    found = unknown.select("bookie", F.lit("an answer for every copy").alias("expected"), unread.alias("found"))
    if unlisted is not None:
        not_listed = F.concat(F.lit("orphaned data was not checked: "), "why")
        expected = F.coalesce("expected", F.lit("a list of its ledgers"))
        both = F.concat_ws("; ", "found", not_listed)
        found = found.join(unlisted, "bookie", "full").select("bookie", expected.alias("expected"), both.alias("found"))
    return as_findings(found, run, Kind.UNREADABLE_BOOKIE, Severity.INCOMPLETE)


def unread_ledgers(ledgers: DataFrame, coverage: DataFrame, run: Run) -> DataFrame:
    """Closed ledgers of which fewer copies were checked than their metadata requires, without a bookie's error.

    `ledgers`: those that were to be read, with their metadata at that time. A ledger that names a bookie twice in one
    ensemble has fewer copies than it requires; it is omitted, because BAD_PLACEMENT reports it.
    """
    names_twice = F.exists("segments", lambda s: F.size(F.array_distinct(s["ensemble"])) < F.size(s["ensemble"]))
    closed = ledgers.where("state = 'closed' and problem is null").where(~names_twice)
    seen = coverage.groupBy("ledger_id").agg(F.sum("copies").alias("seen"))
    required = (F.col("last_entry_id") + 1) * F.col("write_quorum")
    found = (
        closed.join(seen, "ledger_id", "left")
        .withColumn("seen", F.coalesce("seen", F.lit(0)))
        .where(F.col("seen") < required)
        .select(
            "ledger_id",
            F.concat(required, F.lit(" copies")).alias("expected"),
            F.concat("seen", F.lit(" were checked")).alias("found"),
        )
    )
    return as_findings(found, run, Kind.UNREADABLE_BOOKIE, Severity.INCOMPLETE)


def unchecked_ledgers(found: DataFrame, run: Run) -> DataFrame:
    """Ledgers that changed so much that the run has no result for them. `found`: ledger_id, kind, expected, found."""
    return as_findings(found, run, F.col("kind"), Severity.INCOMPLETE)
