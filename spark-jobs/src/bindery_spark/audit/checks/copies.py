"""Check the copies of entries: missing, damaged, different, lost.

A copy of a confirmed entry that the metadata requires has one of these states:

| status  | meaning                                                        | counts as checked   |
|---------|----------------------------------------------------------------|---------------------|
| good    | stored, and its digest is valid as far as it was checked       | yes                 |
| missing | the bookie reports that it does not have it                    | yes                 |
| corrupt | stored, and does not match its digest                          | yes                 |
| damaged | its bookie reports that it cannot read it                      | yes                 |
| gone    | its bookie left for good: reported once, as STALE_ENSEMBLE     | yes                 |
| unknown | the bookie did not answer                                      | no                  |

The checks are independent: if all copies of an entry are damaged, they report a lost entry and each damaged copy. An
entry is lost only if every bookie answered. Rows that are not `expected` are not copies of confirmed entries. They are
legal: they lie beyond the last confirmed entry, or an ensemble change left them behind. Payloads are compared before
lengths. If copies differ, those without the most common value are reported. If no value is more common than the others,
all are reported.

Replicas are read in blocks (`bindery_spark.reading.blocks`), hundreds of copies per row. If all copies of a block are
intact and have the same fingerprint, its entries are good. Only the other blocks are expanded into entries.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, fields
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, BooleanType, LongType, StringType, StructField, StructType

from bindery_spark.audit.checks.faults import Copy, Fault, faults_of
from bindery_spark.audit.checks.finding_rows import Run, as_findings, joined, kept
from bindery_spark.audit.findings.findings import Action, Kind, Severity
from bindery_spark.reading.blocks import DAMAGE
from bindery_spark.schemas import NO_LEDGER
from bindery_spark.sources.block_reader import entries_of

ENTRY: Final = ("ledger_id", "entry_id")
"""Columns that identify an entry."""
BLOCK: Final = ("ledger_id", "segment", "block", "stripe")
"""Columns that identify a block."""
COUNTS: Final = ("copies", "unknown", "bytes")
"""Columns of coverage with numbers."""
SEVERITIES: Final[Mapping[Kind, Severity]] = {
    Kind.MISSING_REPLICA: Severity.UNDER_REPLICATED,
    Kind.DIGEST_MISMATCH: Severity.CORRUPT,
    Kind.REPLICA_DIVERGENCE: Severity.CORRUPT,
    Kind.LENGTH_MISMATCH: Severity.CORRUPT,
    Kind.ENTRY_LOST: Severity.UNREADABLE,
}
"""Severity by kind of fault."""
FAULT: Final = StructType(
    [
        StructField("kind", StringType(), False),
        StructField("bookie", StringType()),
        StructField("expected", StringType(), False),
        StructField("found", StringType(), False),
        StructField("evidence", LongType(), False),
        StructField("repairable", BooleanType(), False),
    ]
)
"""Fields of a `Fault`."""
assert FAULT.names == [field.name for field in fields(Fault)]


def gone_bookies(bookies: DataFrame, ledgers: DataFrame) -> DataFrame:
    """Column `bookie`: absent bookies that left for good. They are marked as removed, or have no cookie although other
    bookies have one. A bookie that is in `ledgers` but not in `bookies` has no cookie."""
    members = F.array_distinct(F.flatten(F.transform("segments", lambda segment: segment["ensemble"])))
    named = ledgers.select(F.explode(members).alias("bookie")).distinct()
    known = bookies.select("bookie", "registration", "intent", "cookie")
    strangers = named.join(F.broadcast(known), "bookie", "left_anti").select(
        "bookie", F.lit("absent").alias("registration"), F.lit("active").alias("intent"), F.lit(False).alias("cookie")
    )
    cookies = bookies.agg(F.coalesce(F.bool_or("cookie"), F.lit(False)).alias("any_cookie"))
    without = F.col("any_cookie") & ~F.col("cookie") & (F.col("intent") != "joining")
    left = (F.col("registration") == "absent") & ((F.col("intent") == "removed") | without)
    return known.unionByName(strangers).crossJoin(F.broadcast(cookies)).where(left).select("bookie")


def is_gone(gone: Collection[str]) -> Column:
    """Whether `bookie` is in `gone`, the result of `gone_bookies`: few names, the same for all groups of a run."""
    return F.col("bookie").isin(*sorted(gone)) if gone else F.lit(False)


def judged(replicas: DataFrame, gone: Collection[str]) -> DataFrame:
    """The expected rows with their `status`."""
    status = (
        F.when(is_gone(gone), "gone")
        .when(F.col("error").startswith(DAMAGE), "damaged")
        .when(F.col("present").isNull(), "unknown")
        .when(~F.col("present"), "missing")
        .when(F.col("digest_ok").eqNullSafe(False), "corrupt")
        .otherwise("good")
    )
    return replicas.where("expected").withColumn("status", status).drop("expected", "present", "digest_ok")


def with_gone(blocks: DataFrame, gone: Collection[str]) -> DataFrame:
    """The expected blocks with `is_gone`: their bookie left for good."""
    return blocks.where("expected").withColumn("is_gone", is_gone(gone))


def coverage(known: DataFrame) -> DataFrame:
    """What was checked of each ledger on each bookie: ledger_id, bookie, copies, unknown, bytes (of verified payloads),
    reason (one of the reasons why the bookie did not answer). `known`: `with_gone`."""
    could_not_say = F.when(~F.col("is_gone"), F.col("unknown")).otherwise(0)
    return known.groupBy("ledger_id", "bookie").agg(
        F.sum("copies").alias("copies"),
        F.sum(could_not_say).alias("unknown"),
        F.sum("bytes").alias("bytes"),
        F.min(F.when(could_not_say > 0, F.col("reason"))).alias("reason"),
    )


def unlisted(blocks: DataFrame) -> DataFrame:
    """Bookies that could not list their orphaned data: a row of `coverage` for each, with NO_LEDGER and the reason."""
    return (
        blocks.where("not expected and reason is not null")
        .groupBy("bookie")
        .agg(
            F.lit(NO_LEDGER).cast("long").alias("ledger_id"),
            *(F.lit(0).cast("long").alias(n) for n in COUNTS),
            F.min("reason").alias("reason"),
        )
    )


def suspects(known: DataFrame) -> DataFrame:
    """BLOCK of every block with a bad copy, with copies that differ, or without a copy that is known to be stored.
    `known`: `with_gone`."""
    is_whole = (F.col("bad") == 0) & (F.col("unknown") == 0) & ~F.col("is_gone")
    is_silent = F.col("is_gone") | (F.col("unknown") == F.col("copies"))
    fingerprint = F.when(is_whole, F.col("fingerprint"))
    kinds = known.groupBy(*BLOCK).agg(
        F.min(fingerprint).alias("low"),
        F.max(fingerprint).alias("high"),
        F.count_if(~is_whole & ~is_silent).alias("mixed"),
        F.count_if(is_whole).alias("whole"),
        F.count_if(is_silent & ~F.col("is_gone")).alias("silent"),
    )
    differs = F.coalesce(F.col("low") != F.col("high"), F.lit(False))
    lost = (F.col("whole") == 0) & (F.col("silent") == 0)
    return kinds.where((F.col("mixed") > 0) | differs | lost).select(*BLOCK)


def taken_apart(blocks: DataFrame, which: DataFrame) -> DataFrame:
    """REPLICAS of the expected blocks in `which` (BLOCK)."""
    return entries_of(blocks.where("expected").join(F.broadcast(which), [*BLOCK], "left_semi"))


def suspicious(copies: DataFrame) -> DataFrame:
    """ledger_id, entry_id of every entry with a bad copy, with copies that differ, or that is lost. One pass over
    `copies` without grouping them in memory."""
    good = F.col("status") == "good"
    compared = ("payload_crc32c", "payload_length", "ledger_length")
    extremes = [
        getattr(F, aggregate)(F.when(good, F.col(name))).alias(f"{aggregate}_{name}")
        for aggregate in ("min", "max")
        for name in compared
    ]
    differs = [F.coalesce(F.col(f"min_{name}") != F.col(f"max_{name}"), F.lit(False)) for name in compared]
    entries = copies.groupBy(*ENTRY).agg(
        F.count_if(good).alias("good"),
        F.count_if(F.col("status") == "unknown").alias("unknown"),
        F.count_if(F.col("status").isin("missing", "corrupt", "damaged")).alias("bad"),
        *extremes,
    )
    lost = (F.col("good") == 0) & (F.col("unknown") == 0)
    return entries.where(reduce(Column.__or__, differs, (F.col("bad") > 0) | lost)).select(*ENTRY)


def entry_findings(copies: DataFrame, entries: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """All faults of these `entries` (ledger_id, entry_id), from all their copies."""
    sides = F.struct(*(field.name for field in fields(Copy)))
    by_entry = (
        copies.join(entries, [*ENTRY])
        .groupBy(*ENTRY)
        .agg(F.min("segment").alias("segment"), F.collect_set(sides).alias("copies"))
    )
    faults = F.udf(_faults, ArrayType(FAULT, containsNull=False), useArrow=False)
    found = by_entry.select(*ENTRY, "segment", F.explode(faults("copies")).alias("fault"))
    found = found.select(*ENTRY, "segment", "fault.*")
    runs = joined(_with_next(found, ledgers), "kind", "repairable")
    action = F.when(F.col("repairable"), str(Action.MARK)).otherwise(str(Action.INSPECT))
    severity = F.create_map(*(F.lit(str(each)) for pair in SEVERITIES.items() for each in pair))[F.col("kind")]
    return as_findings(runs, run, F.col("kind"), severity, repairable=F.col("repairable"), action=action)


def _faults(copies: Iterable[Row]) -> list[tuple[object, ...]]:
    """Faults of one entry. Runs in Spark's Python workers."""
    return [(str(fault.kind), *astuple(fault)[1:]) for fault in faults_of([Copy(**copy.asDict()) for copy in copies])]


def _with_next(found: DataFrame, ledgers: DataFrame) -> DataFrame:
    """Add `next_entry`: the next entry of the segment that `bookie` should store; if it is null, the next entry."""
    of_ledger = ledgers.select("ledger_id", "ensemble_size", "write_quorum", "segments")
    # Copies may have been read with newer metadata than `ledgers`. In a segment that `ledgers` does not have, no entry
    # is skipped.
    ensemble = F.get(F.col("segments"), F.col("segment"))["ensemble"]
    index = F.array_position(ensemble, F.col("bookie")) - 1
    distance = F.pmod(index - F.col("entry_id") - 1, F.col("ensemble_size"))
    holds_next = F.coalesce(F.col("bookie").isNull() | (distance < F.col("write_quorum")), F.lit(True))
    skipped = F.when(holds_next, 0).otherwise(F.col("ensemble_size") - F.col("write_quorum"))
    return (
        found.join(F.broadcast(of_ledger), "ledger_id")
        .withColumn("next_entry", F.col("entry_id") + 1 + skipped)
        .drop("segments", "ensemble_size", "write_quorum")
    )


def closed_lengths(blocks: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Closed ledgers whose length in the metadata differs from that in every good copy of the last entry."""
    closed = ledgers.where("state = 'closed' and last_entry_id >= 0 and length is not null").select(
        "ledger_id", F.col("last_entry_id").alias("entry_id"), "length"
    )
    ends = blocks.where("expected and end_length is not null").select(
        "ledger_id", F.col("last_entry").alias("entry_id"), "segment", F.col("end_length").alias("ledger_length")
    )
    last = ends.join(F.broadcast(closed), [*ENTRY])
    wrong = (
        last.groupBy(*ENTRY, "segment", "length")
        .agg(F.bool_or(F.col("ledger_length") == F.col("length")).alias("agrees"), F.max("ledger_length").alias("said"))
        .where("not agrees")
        .select(
            "ledger_id",
            "segment",
            F.col("entry_id").alias("first_entry"),
            F.col("entry_id").alias("last_entry"),
            F.concat(F.lit("metadata: ledger length "), "length").alias("expected"),
            F.concat(F.lit("last entry: ledger length "), "said").alias("found"),
        )
    )
    return as_findings(wrong, run, Kind.LENGTH_MISMATCH, Severity.CORRUPT, action=Action.INSPECT)


def orphan_data(blocks: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Entries that bookies store of missing ledgers (warning), or of ledgers that do not name the bookie (info).

    A ledger that is not closed is skipped, because its ensemble may change to name the bookie at any time.
    """
    named = ledgers.select(
        "ledger_id",
        (F.col("state") == "closed").alias("is_closed"),
        F.flatten(F.transform("segments", lambda segment: segment["ensemble"])).alias("members"),
    )
    held = blocks.where("not expected and copies > 0").join(named, "ledger_id", "left")
    stray = held.where(
        F.col("is_closed").isNull() | (F.col("is_closed") & ~F.array_contains("members", F.col("bookie")))
    )
    orphans = stray.groupBy("ledger_id", "bookie", "is_closed").agg(
        F.min("first_entry").alias("first_entry"),
        F.max("last_entry").alias("last_entry"),
        F.concat(F.sum("copies"), F.lit(" entries")).alias("found"),
    )
    no_ledger = F.col("is_closed").isNull()
    rows = orphans.withColumn(
        "expected", F.when(no_ledger, "no such ledger in metadata").otherwise("the metadata names other bookies")
    )
    severity = F.when(no_ledger, str(Severity.WARNING)).otherwise(str(Severity.INFO))
    return as_findings(rows, run, Kind.ORPHAN_DATA, severity)


def entry_faults(blocks: DataFrame, which: DataFrame, gone: Collection[str], ledgers: DataFrame, run: Run) -> DataFrame:
    """`entry_findings` of the blocks in `which`. Their copies are kept, because they are read more than once."""
    copies = kept(judged(taken_apart(blocks, which), gone))
    return entry_findings(copies, suspicious(copies), ledgers, run)
