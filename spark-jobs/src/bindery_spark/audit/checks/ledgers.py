"""Check the metadata of ledgers: unreadable metadata, stale ensembles, bad placements, ledgers open too long."""

from bindery_core.placement.placement import DEFAULT_RACK
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks.copies import gone_bookies
from bindery_spark.audit.checks.finding_rows import Run, as_findings, together
from bindery_spark.audit.findings.findings import Action, Kind, Severity


def unreadable_metadata(ledgers: DataFrame, topics: DataFrame, cursors: DataFrame, run: Run) -> DataFrame:
    """Znodes that cannot be decoded."""
    of_ledgers = ledgers.where("problem is not null").select(
        "ledger_id", F.lit("readable ledger metadata").alias("expected"), F.col("problem").alias("found")
    )
    no_ledger = F.lit(None).cast("long").alias("ledger_id")
    of_topics = topics.where("problem is not null").select(
        no_ledger, F.concat(F.lit("readable metadata of topic "), "topic").alias("expected"), F.col("problem")
    )
    name = F.concat(F.lit("readable metadata of subscription "), "subscription", F.lit(" of "), "topic")
    of_cursors = cursors.where("problem is not null").select(no_ledger, name, "problem")
    found = of_ledgers.union(of_topics).union(of_cursors)
    return as_findings(found, run, Kind.METADATA_UNREADABLE, Severity.UNREADABLE, action=Action.INSPECT)


def segments_of(ledgers: DataFrame) -> DataFrame:
    """ledger_id, state, write_quorum, segment (index), first_entry, last_entry, ensemble of segments with entries.

    The last segment of a ledger that is not closed has no end and is included; that of a closed ledger may be empty.
    """
    exploded = ledgers.where("problem is null").select(
        "ledger_id", "state", "write_quorum", F.posexplode("segments").alias("segment", "it")
    )
    flat = exploded.select(
        "ledger_id", "state", "write_quorum", "segment", "it.first_entry", "it.last_entry", "it.ensemble"
    )
    return flat.where("last_entry is null or last_entry >= first_entry")


def stale_ensembles(ledgers: DataFrame, bookies: DataFrame, run: Run) -> DataFrame:
    """Segments that name a bookie that left for good: its copies are lost."""
    members = segments_of(ledgers).withColumn("bookie", F.explode(F.array_distinct("ensemble")))
    stale = members.join(F.broadcast(gone_bookies(bookies, ledgers)), "bookie").select(
        "ledger_id",
        "segment",
        "first_entry",
        "last_entry",
        "bookie",
        F.lit("a bookie of this cluster").alias("expected"),
        F.lit("it left for good").alias("found"),
    )
    return as_findings(stale, run, Kind.STALE_ENSEMBLE, Severity.UNDER_REPLICATED, repairable=True, action=Action.MARK)


def bad_placements(ledgers: DataFrame, bookies: DataFrame, run: Run) -> DataFrame:
    """Segments that name a bookie twice, and segments of closed ledgers with a write set on fewer racks than possible.

    The possible number is the smaller of the write quorum and the number of racks of the cluster.
    """
    segments = segments_of(ledgers)
    twice = segments.where(F.size(F.array_distinct("ensemble")) < F.size("ensemble")).select(
        "ledger_id",
        "segment",
        "first_entry",
        "last_entry",
        F.element_at(
            F.filter("ensemble", lambda b: F.size(F.filter(F.col("ensemble"), lambda other: other == b)) > 1), 1
        ).alias("bookie"),
        F.lit("each copy on a bookie of its own").alias("expected"),
        F.lit("two copies on one bookie").alias("found"),
    )
    racks = bookies.select("bookie", F.coalesce("rack", F.lit(DEFAULT_RACK)).alias("rack"))
    rack_count = racks.agg(F.greatest(F.countDistinct("rack"), F.lit(1)).alias("rack_count"))
    placed = (
        segments.where((F.col("state") == "closed") & (F.size(F.array_distinct("ensemble")) == F.size("ensemble")))
        .select("*", F.posexplode("ensemble").alias("at", "bookie"))
        .join(F.broadcast(racks), "bookie", "left")
        .groupBy("ledger_id", "segment", "first_entry", "last_entry", "write_quorum")
        .agg(
            F.sort_array(F.collect_list(F.struct("at", F.coalesce("rack", F.lit(DEFAULT_RACK)).alias("rack")))).alias(
                "of"
            )
        )
        .crossJoin(F.broadcast(rack_count))
    )
    size = F.size("of")
    fewest = F.array_min(
        F.transform(
            F.sequence(F.lit(0), size - 1),
            lambda start: F.size(
                F.array_distinct(
                    F.transform(
                        F.sequence(F.lit(0), F.col("write_quorum") - 1),
                        lambda step: F.col("of")[F.pmod(start + step, size)]["rack"],
                    )
                )
            ),
        )
    )
    possible = F.least("write_quorum", "rack_count")
    crowded = (
        placed.withColumn("fewest", fewest)
        .where(F.col("fewest") < possible)
        .select(
            "ledger_id",
            "segment",
            "first_entry",
            "last_entry",
            F.concat(F.lit("copies on "), possible, F.lit(" racks")).alias("expected"),
            F.concat(F.lit("on "), "fewest").alias("found"),
        )
    )
    return together(
        [
            as_findings(twice, run, Kind.BAD_PLACEMENT, Severity.UNDER_REPLICATED, action=Action.INSPECT),
            as_findings(crowded, run, Kind.BAD_PLACEMENT, Severity.WARNING, action=Action.INSPECT),
        ]
    )


def open_too_long(ledgers: DataFrame, run: Run, *, open_max_ms: int) -> DataFrame:
    """Ledgers that are still open `open_max_ms` after their creation."""
    age_ms = F.lit(run.now_ms) - F.col("created_ms")
    late = ledgers.where((F.col("problem").isNull()) & (F.col("state") != "closed") & (age_ms > open_max_ms)).select(
        "ledger_id",
        F.lit(f"closed within {open_max_ms // 1000} s").alias("expected"),
        F.concat("state", F.lit(" for "), F.floor(age_ms / 1000), F.lit(" s")).alias("found"),
    )
    # The age differs in each run and is not part of the hash, so that the finding counts as the same.
    found = as_findings(late, run, Kind.OPEN_TOO_LONG, Severity.WARNING, action=Action.INSPECT)
    return found.withColumn("evidence_hash", F.lower(F.hex(F.xxhash64("kind", "ledger_id"))))


def ledger_findings(
    ledgers: DataFrame, bookies: DataFrame, topics: DataFrame, cursors: DataFrame, run: Run, *, open_max_ms: int
) -> DataFrame:
    """All checks of this module."""
    return together(
        [
            unreadable_metadata(ledgers, topics, cursors, run),
            stale_ensembles(ledgers, bookies, run),
            bad_placements(ledgers, bookies, run),
            open_too_long(ledgers, run, open_max_ms=open_max_ms),
        ]
    )
