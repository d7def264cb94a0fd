"""Check that the metadata of topics, cursors and ledgers is consistent.

Young ledgers are not reported as orphaned, because a broker creates a ledger before a topic or cursor names it. The
checks ignore ledgers of other applications, and ledgers that only data elsewhere refers to (schemas, compaction).
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import Run, as_findings, together
from bindery_spark.audit.findings.findings import Action, Kind, Severity

APPLICATIONS = ("pulsar", "bindery")
"""Values of `application` in the custom metadata of the ledgers of brokers."""
COMPONENTS = ("", "managed-ledger")
"""Values of `component` in the custom metadata of the ledgers of topics and cursors."""


def _named(topics: DataFrame) -> DataFrame:
    """One row per ledger of each topic, with its index in the topic."""
    return (
        topics.where("problem is null")
        .select("topic", F.size("ledgers").alias("of"), F.posexplode("ledgers").alias("at", "it"))
        .select("topic", "of", "at", "it.ledger_id", "it.entries", "it.bytes", "it.closed_ms")
    )


def dangling_references(topics: DataFrame, cursors: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Topics that name a missing ledger, whose messages cannot be read, and cursors that name one."""
    there = ledgers.select("ledger_id")
    of_topics = (
        _named(topics)
        .join(there, "ledger_id", "left_anti")
        .select(
            "ledger_id",
            F.concat(F.lit("a ledger of topic "), "topic").alias("expected"),
            F.lit("no such ledger").alias("found"),
        )
    )
    owner = F.concat(F.lit("the cursor ledger of subscription "), "subscription", F.lit(" of "), "topic")
    of_cursors = (
        cursors.where("problem is null and cursor_ledger_id is not null")
        .withColumn("ledger_id", F.col("cursor_ledger_id"))
        .join(there, "ledger_id", "left_anti")
        .select("ledger_id", owner.alias("expected"), F.lit("no such ledger").alias("found"))
    )
    return together(
        [
            as_findings(of_topics, run, Kind.ORPHAN_METADATA, Severity.UNREADABLE, action=Action.INSPECT),
            as_findings(of_cursors, run, Kind.ORPHAN_METADATA, Severity.WARNING, action=Action.INSPECT),
        ]
    )


def unnamed_ledgers(
    topics: DataFrame, cursors: DataFrame, ledgers: DataFrame, run: Run, *, orphan_after_ms: int
) -> DataFrame:
    """Ledgers of a broker that no topic and no cursor names. Empty if the metadata of a topic or cursor is
    unreadable."""
    unreadable = (
        topics.where("problem is not null")
        .select(F.lit(1))
        .union(cursors.where("problem is not null").select(F.lit(1)))
    )
    whole = unreadable.agg((F.count("*") == 0).alias("whole"))
    positions = cursors.select(F.explode(F.array("cursor_ledger_id", "mark_delete_ledger")).alias("ledger_id"))
    named = _named(topics).select("ledger_id").union(positions.where("ledger_id is not null"))
    custom = {
        name: F.coalesce(F.decode(F.col("custom")[name], "UTF-8"), F.lit("")) for name in ("application", "component")
    }
    ours = ledgers.where("problem is null").where(
        custom["application"].isin(*APPLICATIONS) & custom["component"].isin(*COMPONENTS)
    )
    old = ours.where(F.lit(run.now_ms) - F.col("created_ms") > orphan_after_ms)
    orphans = old.join(named, "ledger_id", "left_anti").crossJoin(F.broadcast(whole)).where("whole")
    rows = orphans.select(
        "ledger_id",
        F.lit("a topic or cursor that names it").alias("expected"),
        F.lit("no topic or cursor names it").alias("found"),
    )
    return as_findings(rows, run, Kind.ORPHAN_METADATA, Severity.WARNING, action=Action.INSPECT)


def topic_inconsistencies(topics: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Ledgers that a topic no longer writes, but that are not closed or differ from the counts in the topic.

    If the topic counts more entries than the ledger has, acknowledged messages cannot be read.
    """
    done = (
        _named(topics)
        .where("closed_ms is not null")
        .join(ledgers.where("problem is null").select("ledger_id", "state", "last_entry_id", "length"), "ledger_id")
    )
    is_open = F.col("state") != "closed"
    has = F.col("last_entry_id") + 1
    wrong = done.where(is_open | (has != F.col("entries")) | (F.col("length") != F.col("bytes")))
    rows = wrong.select(
        "ledger_id",
        F.when(is_open, F.concat(F.lit("closed, because topic "), "topic", F.lit(" no longer writes it")))
        .otherwise(
            F.concat(F.lit("topic "), "topic", F.lit(": "), "entries", F.lit(" entries, "), "bytes", F.lit(" bytes"))
        )
        .alias("expected"),
        F.when(is_open, F.col("state"))
        .otherwise(F.concat(has, F.lit(" entries, "), "length", F.lit(" bytes")))
        .alias("found"),
        (~is_open & (has < F.col("entries"))).alias("is_short"),
    )
    severity = F.when(F.col("is_short"), str(Severity.CORRUPT)).otherwise(str(Severity.WARNING))
    return as_findings(rows, run, Kind.TOPIC_INCONSISTENT, severity, action=Action.INSPECT)


def cursor_inconsistencies(topics: DataFrame, cursors: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Positions beyond the end of the topic, or of one of its closed ledgers. A position before the beginning of the
    topic is valid, because consumed ledgers are trimmed."""
    ends = topics.where("problem is null").select(
        "topic",
        F.array_max(F.transform("ledgers", lambda it: it["ledger_id"])).alias("last_ledger"),
        F.transform("ledgers", lambda it: it["ledger_id"]).alias("named"),
    )
    closed = ledgers.where("state = 'closed'").select(F.col("ledger_id").alias("mark_delete_ledger"), "last_entry_id")
    positions = (
        cursors.where("problem is null and mark_delete_ledger is not null and mark_delete_ledger >= 0")
        .join(ends, "topic")
        .join(closed, "mark_delete_ledger", "left")
    )
    beyond_topic = F.col("last_ledger").isNotNull() & (F.col("mark_delete_ledger") > F.col("last_ledger"))
    beyond_ledger = (
        F.array_contains("named", F.col("mark_delete_ledger"))
        & F.col("last_entry_id").isNotNull()
        & (F.col("mark_delete_entry") > F.col("last_entry_id"))
    )
    wrong = positions.where(beyond_topic | beyond_ledger)
    rows = wrong.select(
        F.col("mark_delete_ledger").alias("ledger_id"),
        F.concat(
            F.lit("a position of topic "),
            "topic",
            F.lit(" for subscription "),
            "subscription",
        ).alias("expected"),
        F.concat("mark_delete_ledger", F.lit(":"), "mark_delete_entry", F.lit(", beyond the end")).alias("found"),
    )
    return as_findings(rows, run, Kind.CURSOR_INCONSISTENT, Severity.WARNING, action=Action.INSPECT)


def topic_findings(
    topics: DataFrame, cursors: DataFrame, ledgers: DataFrame, run: Run, *, orphan_after_ms: int
) -> DataFrame:
    """The findings of all checks of this module."""
    return together(
        [
            dangling_references(topics, cursors, ledgers, run),
            unnamed_ledgers(topics, cursors, ledgers, run, orphan_after_ms=orphan_after_ms),
            topic_inconsistencies(topics, ledgers, run),
            cursor_inconsistencies(topics, cursors, ledgers, run),
        ]
    )
