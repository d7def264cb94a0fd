"""Findings seen twice: within a run, so that nothing is told that was only on its way; and from run to run."""

from collections.abc import Iterable

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import Run, as_findings
from bindery_spark.audit.findings.findings import Action, Kind, Severity
from bindery_spark.schemas import FINDINGS

SAME = ("kind", "ledger_id", "segment", "bookie")


def seen_twice(first: DataFrame, second: DataFrame) -> DataFrame:
    """Those of `second` that say what one of `first` says."""
    keys = (*SAME, "first_entry", "expected")
    return second.join(
        first.select(*(F.col(key).alias(f"first_{key}") for key in keys)).distinct(),
        _all_equal((key, f"first_{key}") for key in keys),
        "left_semi",
    )


def confirmed(first: DataFrame, second: DataFrame) -> DataFrame:
    """The parts of runs of entries in `first` that `second` has, too."""
    others = second.select(
        *(F.col(key).alias(f"again_{key}") for key in SAME),
        F.col("first_entry").alias("again_first"),
        F.col("last_entry").alias("again_last"),
    ).distinct()
    overlaps = (F.col("first_entry") <= F.col("again_last")) & (F.col("again_first") <= F.col("last_entry"))
    both = first.join(others, _all_equal((key, f"again_{key}") for key in SAME) & overlaps)
    cut = both.withColumn("first_entry", F.greatest("first_entry", "again_first"))
    return cut.withColumn("last_entry", F.least("last_entry", "again_last")).select(*FINDINGS.names)


def mended(damage: DataFrame) -> DataFrame:
    """`damage` whose copies were read well later on, as warnings. Bookies repair what a reader finds damaged, and the
    disk that damaged it is the same."""
    said = {
        "severity": F.lit(str(Severity.WARNING)),
        "found": F.concat("found", F.lit("; not when it was read again")),
        "repairable": F.lit(False),
        "action": F.lit(str(Action.INSPECT)),
    }
    return damage.withColumns(said).select(*FINDINGS.names)


def carried(findings: DataFrame, earlier: DataFrame | None) -> DataFrame:
    """With the time when an earlier run saw it first. `earlier`: findings of the run before; None: there is none."""
    if earlier is None:
        return findings
    keys = (*SAME, "first_entry")
    before = (
        earlier.groupBy(*keys)
        .agg(F.min("first_seen_ms").alias("seen_ms"))
        .select("seen_ms", *(F.col(key).alias(f"was_{key}") for key in keys))
    )
    return (
        findings.join(before, _all_equal((key, f"was_{key}") for key in keys), "left")
        .withColumn("first_seen_ms", F.least("first_seen_ms", "seen_ms"))
        .select(*FINDINGS.names)
    )


def unreadable_bookies(coverage: DataFrame, run: Run, *, unlisted: DataFrame | None = None) -> DataFrame:
    """One for each bookie that could not say of some copies what it holds, or what it holds beside. `unlisted`: bookie,
    why, of those that could not say that; None: all could."""
    unknown = coverage.where("unknown > 0").groupBy("bookie").agg(
        F.sum("unknown").alias("copies"), F.countDistinct("ledger_id").alias("ledgers"), F.min("reason").alias("reason")
    )  # fmt: skip
    not_seen = F.concat(
        "reason", F.lit("; "), "copies", F.lit(" copies of "), "ledgers", F.lit(" ledgers were not seen")
    )
    told = unknown.select("bookie", F.lit("an answer for every copy").alias("expected"), not_seen.alias("found"))
    if unlisted is not None:
        # What is missing is one text, which says all of it.
        not_listed = F.concat(F.lit("orphans were not looked for: "), "why")
        wanted = F.coalesce("expected", F.lit("a list of what it holds"))
        said = F.concat_ws("; ", "found", not_listed)
        told = told.join(unlisted, "bookie", "full").select("bookie", wanted.alias("expected"), said.alias("found"))
    return as_findings(told, run, Kind.UNREADABLE_BOOKIE, Severity.INCOMPLETE)


def unread_ledgers(ledgers: DataFrame, coverage: DataFrame, run: Run) -> DataFrame:
    """Closed ledgers of which fewer copies were looked at than their metadata ask for, and nobody said why not.

    `ledgers`: those that were to be read, as their metadata were at that time. One that names a bookie twice has fewer
    copies than it asks for, and BAD_PLACEMENT says so.
    """
    twice = F.exists("segments", lambda s: F.size(F.array_distinct(s["ensemble"])) < F.size(s["ensemble"]))
    asked = ledgers.where("state = 'closed' and problem is null").where(~twice)
    seen = coverage.groupBy("ledger_id").agg(F.sum("copies").alias("seen"))
    wanted = (F.col("last_entry_id") + 1) * F.col("write_quorum")
    told = (
        asked.join(seen, "ledger_id", "left")
        .withColumn("seen", F.coalesce("seen", F.lit(0)))
        .where(F.col("seen") < wanted)
        .select(
            "ledger_id",
            F.concat(wanted, F.lit(" copies")).alias("expected"),
            F.concat("seen", F.lit(" were looked at")).alias("found"),
        )
    )
    return as_findings(told, run, Kind.UNREADABLE_BOOKIE, Severity.INCOMPLETE)


def unseen_ledgers(told: DataFrame, run: Run) -> DataFrame:
    """Ledgers that changed so that the run cannot speak for them. `told`: ledger_id, kind, expected, found."""
    return as_findings(told, run, F.col("kind"), Severity.INCOMPLETE)


def _all_equal(pairs: Iterable[tuple[str, str]]) -> Column:
    """Null equals null."""
    condition = F.lit(True)
    for one, other in pairs:
        condition = condition & F.col(one).eqNullSafe(F.col(other))
    return condition
