"""Merge the findings of both passes by the rules of `rules`. Pure functions of DataFrames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bindery_spark.audit.checks.finding_rows import together
from bindery_spark.audit.checks.matching import overlapping
from bindery_spark.audit.findings.findings import Action, Kind, Severity
from bindery_spark.audit.second_pass.open_parts import read_well, still_open
from bindery_spark.audit.second_pass.rules import MergeRule
from bindery_spark.schemas import FINDINGS


@dataclass(frozen=True, slots=True)
class SecondResults:
    """Results of the second pass."""

    findings: DataFrame
    states: DataFrame
    """COPY_STATES."""
    steady: Sequence[int]
    """Ledgers that did not change while they were read again: the findings of the second pass then need no
    confirmation."""


def merged_findings(
    spark: SparkSession,
    first: DataFrame | None,
    rules: Mapping[tuple[int, bool], MergeRule],
    second: SecondResults | None,
) -> DataFrame:
    """Merge FINDINGS of both passes. `first`: of the first pass; None if there are no `rules`. `rules`: the result of
    `merge_rules`. `second`: None if nothing was read again."""
    parts = [spark.createDataFrame([], FINDINGS)]
    present = set(rules.values())

    def with_rule(*wanted: MergeRule) -> DataFrame:
        assert first is not None
        rows = [key for key, rule in sorted(rules.items()) if rule in wanted]
        keys = spark.createDataFrame(rows, "ledger_id long, is_orphan boolean")
        found = first.withColumn("is_orphan", F.col("kind") == str(Kind.ORPHAN_DATA))
        return found.join(F.broadcast(keys), ["ledger_id", "is_orphan"], "left_semi").select(*FINDINGS.names)

    if MergeRule.KEEP in present:
        parts.append(with_rule(MergeRule.KEEP))
    if second is None:
        return together(parts)
    if MergeRule.CONFIRM in present:
        parts.append(overlapping(with_rule(MergeRule.CONFIRM), second.findings))
    if MergeRule.UPDATE in present:
        parts.append(still_open(with_rule(MergeRule.UPDATE), second.findings, second.states))
    if reread := present - {MergeRule.KEEP}:
        damage = with_rule(*reread).where(F.col("kind") == str(Kind.DIGEST_MISMATCH))
        parts.append(repaired(read_well(damage, second.states)))
    if second.steady:
        ids = F.broadcast(spark.createDataFrame([(i,) for i in second.steady], "ledger_id long"))
        of_copies = second.findings.where(F.col("kind") != str(Kind.ORPHAN_DATA))
        parts.append(of_copies.join(ids, "ledger_id", "left_semi").select(*FINDINGS.names))
    return together(parts)


def repaired(damage: DataFrame) -> DataFrame:
    """The findings `damage` as warnings: the second pass read these copies with valid digests."""
    return damage.withColumns(
        {
            "severity": F.lit(str(Severity.WARNING)),
            "found": F.concat("found", F.lit("; intact when it was read again")),
            "repairable": F.lit(False),
            "action": F.lit(str(Action.INSPECT)),
        }
    ).select(*FINDINGS.names)
