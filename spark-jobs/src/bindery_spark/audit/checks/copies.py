"""What the copies of entries say: missing, damaged, different, lost.

A copy of a confirmed entry that metadata ask for is one of

| status  | means                                                          | counts as looked at |
|---------|----------------------------------------------------------------|---------------------|
| good    | there, and its digest holds as far as it was checked           | yes                 |
| missing | the bookie denies it                                           | yes                 |
| corrupt | there, and contradicts its digest                              | yes                 |
| damaged | its bookie says itself that it cannot read it                  | yes                 |
| gone    | its bookie left for good: told once, as STALE_ENSEMBLE         | yes                 |
| unknown | the bookie could not say                                       | no                  |

Each check looks at its own kind alone: an entry whose copies are all damaged is lost, and each copy is damaged. An
entry is lost only when every bookie answered. Rows that are not `expected` are no copies of confirmed entries: what
lies beyond the last confirmed entry, or where an ensemble change left it, is nobody's fault.
Payloads are compared before lengths: of copies that differ those in the minority are found, or all when there is none.

Replicas are read in blocks (`bindery_spark.reading.blocks`), hundreds of copies per row. Copies of a block that are
all intact and have one fingerprint are intact; only blocks of which that cannot be said are taken apart into entries.
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
BLOCK: Final = ("ledger_id", "segment", "block", "stripe")
COUNTS: Final = ("copies", "unknown", "bytes")
"""Of coverage."""
SEVERITIES: Final[Mapping[Kind, Severity]] = {
    Kind.MISSING_REPLICA: Severity.UNDER_REPLICATED,
    Kind.DIGEST_MISMATCH: Severity.CORRUPT,
    Kind.REPLICA_DIVERGENCE: Severity.CORRUPT,
    Kind.LENGTH_MISMATCH: Severity.CORRUPT,
    Kind.ENTRY_LOST: Severity.UNREADABLE,
}
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
"""A `Fault`."""
assert FAULT.names == [field.name for field in fields(Fault)]


def gone_bookies(bookies: DataFrame, ledgers: DataFrame) -> DataFrame:
    """`bookie`: those that left for good, that is, removed, or without a cookie where others have one. A bookie that
    `ledgers` name and `bookies` do not know has none."""
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
    """Whether `bookie` is one of `gone`, as `gone_bookies` has them: few, and the same for all groups of a run."""
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
    """What was looked at of each ledger on each bookie: ledger_id, bookie, copies, unknown, bytes (of payloads that
    were verified), reason (why the bookie could not say, one of them). `known`: `with_gone`."""
    could_not_say = F.when(~F.col("is_gone"), F.col("unknown")).otherwise(0)
    return known.groupBy("ledger_id", "bookie").agg(
        F.sum("copies").alias("copies"),
        F.sum(could_not_say).alias("unknown"),
        F.sum("bytes").alias("bytes"),
        F.min(F.when(could_not_say > 0, F.col("reason"))).alias("reason"),
    )


def unlisted(blocks: DataFrame) -> DataFrame:
    """Bookies that could not tell what they hold beside: a row as of `coverage` each, of NO_LEDGER, with why."""
    return (
        blocks.where("not expected and reason is not null")
        .groupBy("bookie")
        .agg(
            F.lit(NO_LEDGER).cast("long").alias("ledger_id"), *(F.lit(0).cast("long").alias(n) for n in COUNTS),
            F.min("reason").alias("reason"),
        )
    )  # fmt: skip


def suspects(known: DataFrame) -> DataFrame:
    """BLOCK of every block that is not simply well: some copy is bad or unlike others, or none is known to be there.
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
    """REPLICAS of the expected blocks that are in `which` (BLOCK)."""
    return entries_of(blocks.where("expected").join(F.broadcast(which), [*BLOCK], "left_semi"))


def suspicious(copies: DataFrame) -> DataFrame:
    """ledger_id, entry_id of every entry that is not simply well. One pass, without any copy being kept."""
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
    """Everything that is wrong with these `entries` (ledger_id, entry_id), all their copies side by side."""
    sides = F.struct(*(field.name for field in fields(Copy)))
    by_entry = (
        copies.join(entries, [*ENTRY])
        .groupBy(*ENTRY)
        .agg(F.min("segment").alias("segment"), F.collect_set(sides).alias("copies"))
    )
    faults = F.udf(_faults, ArrayType(FAULT, containsNull=False), useArrow=False)
    told = by_entry.select(*ENTRY, "segment", F.explode(faults("copies")).alias("fault"))
    told = told.select(*ENTRY, "segment", "fault.*")
    runs = joined(_with_next(told, ledgers), "kind", "repairable")
    action = F.when(F.col("repairable"), str(Action.MARK)).otherwise(str(Action.INSPECT))
    severity = F.create_map(*(F.lit(str(each)) for pair in SEVERITIES.items() for each in pair))[F.col("kind")]
    return as_findings(runs, run, F.col("kind"), severity, repairable=F.col("repairable"), action=action)


def _faults(copies: Iterable[Row]) -> list[tuple[object, ...]]:
    """One entry's. Runs in Spark's Python workers."""
    return [(str(fault.kind), *astuple(fault)[1:]) for fault in faults_of([Copy(**copy.asDict()) for copy in copies])]


def _with_next(told: DataFrame, ledgers: DataFrame) -> DataFrame:
    """Adds `next_entry`: the next one of the segment that the same bookie should hold; without a bookie the next."""
    of_ledger = ledgers.select("ledger_id", "ensemble_size", "write_quorum", "segments")
    # What is read follows newer metadata than `ledgers` may: of a segment that they do not know nothing is left out.
    ensemble = F.get(F.col("segments"), F.col("segment"))["ensemble"]
    index = F.array_position(ensemble, F.col("bookie")) - 1
    distance = F.pmod(index - F.col("entry_id") - 1, F.col("ensemble_size"))
    holds_next = F.coalesce(F.col("bookie").isNull() | (distance < F.col("write_quorum")), F.lit(True))
    skipped = F.when(holds_next, 0).otherwise(F.col("ensemble_size") - F.col("write_quorum"))
    return (
        told.join(F.broadcast(of_ledger), "ledger_id")
        .withColumn("next_entry", F.col("entry_id") + 1 + skipped)
        .drop("segments", "ensemble_size", "write_quorum")
    )


def closed_lengths(blocks: DataFrame, ledgers: DataFrame, run: Run) -> DataFrame:
    """Closed ledgers of whose last entry no good copy says the length that metadata say."""
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
    """What bookies hold of ledgers that are not there (warning), or that do not name the bookie (info).

    A ledger that is not closed may name the bookie in a moment, and what an ensemble change left is nobody's fault.
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
        F.min("first_entry").alias("first_entry"), F.max("last_entry").alias("last_entry"),
        F.concat(F.sum("copies"), F.lit(" entries")).alias("found"),
    )  # fmt: skip
    no_ledger = F.col("is_closed").isNull()
    told = orphans.withColumn(
        "expected", F.when(no_ledger, "no such ledger in metadata").otherwise("metadata name other bookies")
    )
    severity = F.when(no_ledger, str(Severity.WARNING)).otherwise(str(Severity.INFO))
    return as_findings(told, run, Kind.ORPHAN_DATA, severity)


def entry_faults(
    blocks: DataFrame, which: DataFrame, gone: Collection[str], ledgers: DataFrame, run: Run
) -> DataFrame:  # fmt: skip
    """`entry_findings` of the blocks in `which`, which are read more than once."""
    copies = kept(judged(taken_apart(blocks, which), gone))
    return entry_findings(copies, suspicious(copies), ledgers, run)
