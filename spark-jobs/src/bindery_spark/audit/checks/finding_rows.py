"""Helpers of all checks: the run, rows of FINDINGS, and joining adjacent entries into one finding."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from bindery_spark.audit.findings.findings import Action, Kind, Severity
from bindery_spark.schemas import FINDINGS

if TYPE_CHECKING:
    from pyspark.sql import Column

PLACE = ("ledger_id", "segment", "first_entry", "last_entry", "bookie")
"""Columns of a finding that locate it. Each is null if the frame does not have it."""
TEXTS = ("expected", "found")
"""Columns of a finding that describe it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that reports the findings."""

    run_id: str
    now_ms: int
    """Time in ms since 1970 at which the run began; the checks compute ages at this time."""


def as_findings(
    frame: DataFrame,
    run: Run,
    kind: "Kind | Column",
    severity: "Severity | Column",
    *,
    repairable: "bool | Column" = False,
    action: "Action | Column | None" = None,
) -> DataFrame:
    """Rows of FINDINGS, from the columns PLACE, TEXTS and `evidence` (a long: hash of what was found) of `frame`."""

    def column(value: object) -> "Column":
        return F.lit(str(value)) if isinstance(value, (Kind, Severity, Action)) else value  # type: ignore[return-value]

    known = set(frame.columns)
    evidence = F.col("evidence") if "evidence" in known else F.lit(0)
    values = {
        **{name: F.col(name) if name in known else F.lit(None) for name in (*PLACE, *TEXTS)},
        "run_id": F.lit(run.run_id),
        "kind": column(kind),
        "severity": column(severity),
        "first_seen_ms": F.lit(run.now_ms),
        "repairable": F.lit(repairable) if isinstance(repairable, bool) else repairable,
        "action": F.lit(None) if action is None else column(action),
    }
    cells = {name: value.cast(FINDINGS[name].dataType) for name, value in values.items()}
    texts = F.concat_ws("|", cells["kind"], *(F.coalesce(cells[n].cast("string"), F.lit("-")) for n in PLACE + TEXTS))
    cells["evidence_hash"] = F.lower(F.hex(F.xxhash64(texts, evidence)))
    return frame.select(*(cells[name].alias(name) for name in FINDINGS.names))


def kept(frame: DataFrame) -> DataFrame:
    """`frame`, evaluated once. Executors that are separate processes keep the result in files (`session.share`): a
    result in the memory of an executor is lost with it, and the run would fail."""
    shared = frame.sparkSession.sparkContext.getCheckpointDir()
    return frame.localCheckpoint() if shared is None else frame.checkpoint()


def together(frames: Iterable[DataFrame]) -> DataFrame:
    """The rows of all `frames`, of which there is at least one."""
    return reduce(DataFrame.unionByName, frames)


def joined(entries: DataFrame, *keys: str) -> DataFrame:
    """One row for each run of adjacent entries. `entries`: ledger_id, segment, bookie, entry_id, next_entry (the next
    one that the same bookie should store), expected, found, evidence, and `keys`, which are equal within a run.

    The texts are those of the first entry, followed by the number of entries.
    """
    place = ("ledger_id", "segment", "bookie", *keys)
    along = Window.partitionBy(*place).orderBy("entry_id")
    follows = F.lag("next_entry").over(along) == F.col("entry_id")
    numbered = entries.withColumn("run", F.sum(F.when(follows, 0).otherwise(1)).over(along))
    more = F.when(F.count("*") > 1, F.concat(F.lit("; "), F.count("*"), F.lit(" entries"))).otherwise("")
    return numbered.groupBy(*place, "run").agg(
        F.min("entry_id").alias("first_entry"),
        F.max("entry_id").alias("last_entry"),
        F.min_by("expected", "entry_id").alias("expected"),
        F.concat(F.min_by("found", "entry_id"), more).alias("found"),
        F.bit_xor(F.xxhash64("entry_id", "evidence")).alias("evidence"),
    )
