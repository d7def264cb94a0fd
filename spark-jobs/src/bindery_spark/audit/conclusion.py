"""End a run: merge both passes, check metadata and marks, and write all findings."""

from collections.abc import Iterable
from functools import reduce
from pathlib import Path

import pyarrow.parquet as parquet
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checkpoint import RunDirectory, last_finished
from bindery_spark.audit.checks import ledgers as ledger_checks
from bindery_spark.audit.checks import marks as mark_checks
from bindery_spark.audit.checks import topics as topic_checks
from bindery_spark.audit.checks.coverage import unchecked_ledgers, unread_ledgers, unreadable_bookies
from bindery_spark.audit.checks.finding_rows import Run, kept, together
from bindery_spark.audit.checks.matching import reported_twice, with_first_seen
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.context import AFTER, BEFORE, METADATA_TABLES, RunContext
from bindery_spark.audit.coverage import coverage_frame, unchecked, unlisted_bookies, write_coverage
from bindery_spark.audit.planning import BegunRun
from bindery_spark.audit.second_pass.merge import merged_findings
from bindery_spark.audit.second_pass.rules import merge_rules
from bindery_spark.audit.second_pass.second_pass import SecondPass, run_second_pass, second_results
from bindery_spark.schemas import FINDINGS


def conclude(context: RunContext, begun: BegunRun, out: Path) -> SecondPass:
    """Read the metadata again, run the second pass, and write findings and coverage. `out`: directory of all runs."""
    directory = context.directory
    context.progress.phase("reading metadata again")
    context.keep_metadata(AFTER)
    context.progress.phase("confirming")
    second = run_second_pass(context, begun)
    of_copies = copy_findings(context, second)
    write_coverage(context, second)
    of_metadata = kept(metadata_findings(context, AFTER, begun.run))
    if not of_metadata.isEmpty():
        of_metadata = reported_twice(metadata_findings(context, BEFORE, begun.run), of_metadata)
    coverage = coverage_frame(context)
    earlier = earlier_findings(context, begun, out)
    of_coverage = coverage_findings(context, begun, second, coverage)
    seen = kept(with_first_seen(together([of_copies, of_metadata, of_coverage]), earlier))
    context.progress.phase("checking marks")
    previous = last_finished(out, before=directory.run_id, cluster_id=begun.facts.cluster_id)
    of_marks = with_first_seen(mark_findings(context, begun, seen, coverage, previous), earlier)
    together([seen, of_marks]).coalesce(1).write.mode("overwrite").parquet(str(directory.findings))
    marked = parquet.read_table(directory.table(AFTER, "marks"), columns=["ledger_id"])
    directory.write_json("marks.json", sorted(marked["ledger_id"].to_pylist()))
    return second


def copy_findings(context: RunContext, second: SecondPass) -> DataFrame:
    """Findings of the checks of copies, both passes merged."""
    rules = merge_rules(second.ledgers, context.found_kinds(), second.selection)
    paths = [str(directory / "findings") for directory in context.groups()]
    first = context.spark.read.schema(FINDINGS).parquet(*paths) if rules else None
    return merged_findings(context.spark, first, rules, second_results(context, second))


def metadata_findings(context: RunContext, when: str, run: Run) -> DataFrame:
    """Findings of the metadata checks that the level of the run includes, on the tables `when`."""
    options = context.options
    tables = {name: context.table(when, name) for name in METADATA_TABLES}
    ledgers = context.selected(tables["ledgers"].where(F.col("ledger_id").between(options.first, options.last)))
    bookies, topics, cursors = tables["bookies"], tables["topics"], tables["cursors"]
    found = [
        ledger_checks.unreadable_metadata(ledgers, topics, cursors, run),
        ledger_checks.stale_ensembles(ledgers, bookies, run),
        ledger_checks.open_too_long(ledgers, run, open_max_ms=options.open_max_ms),
    ]
    if options.is_deep:
        found.append(ledger_checks.bad_placements(ledgers, bookies, run))
    if options.is_deep and options.covers_all_ledgers:
        has_topics = any(context.row_count(when, name) for name in ("topics", "cursors"))
        check = topic_checks.topic_findings if has_topics else topic_checks.unnamed_ledgers
        found.append(check(topics, cursors, ledgers, run, orphan_after_ms=options.orphan_after_ms))
    return together(found)


def coverage_findings(context: RunContext, begun: BegunRun, second: SecondPass, coverage: DataFrame) -> DataFrame:
    """Findings about copies and ledgers that the run could not check."""
    unlisted = sorted(unlisted_bookies(context).items())
    without_list = context.frame(unlisted, "bookie string, why string") if unlisted else None
    found = [unreadable_bookies(coverage, begun.run, unlisted=without_list)]
    if rows := unchecked(context, second):
        frame = context.frame(rows, "ledger_id long, kind string, expected string, found string")
        found.append(unchecked_ledgers(frame, begun.run))
    if not context.options.ends_only:
        found.append(unread_ledgers(ledgers_to_read(context, begun, second), coverage, begun.run))
    return together(found)


def ledgers_to_read(context: RunContext, begun: BegunRun, second: SecondPass) -> DataFrame:
    """LEDGERS of the plan whose metadata did not change during the first pass, and still existing ledgers that were
    read again, with the metadata (AFTER) that the second pass used."""
    after = context.table(AFTER, "ledgers")
    same = after.select("ledger_id", "metadata_version")
    ledgers = context.table(BEFORE, "ledgers").join(same, ["ledger_id", "metadata_version"], "left_semi")
    ranges = [F.col("ledger_id").between(group.first, group.last) for group in begun.plan.groups]
    ledgers = context.selected(ledgers).where(reduce(Column.__or__, ranges, F.lit(False)))
    if not second.selection.ids:
        return ledgers
    reread = _ids(context, second.selection.ids)
    there = _ids(context, (i for i in second.selection.ids if i in second.ledgers.last))
    now = after.join(there, "ledger_id", "left_semi").select(*ledgers.columns)
    return ledgers.join(reread, "ledger_id", "left_anti").unionByName(now)


def mark_findings(
    context: RunContext, begun: BegunRun, seen: DataFrame, coverage: DataFrame, previous: RunDirectory | None
) -> DataFrame:
    """Missing and false under-replication marks. `seen`: all other findings; `previous`: the run before this one."""
    facts, run = begun.facts, begun.run
    ledgers, bookies, marks = (context.table(AFTER, name) for name in ("ledgers", "bookies", "marks"))
    marked_before = context.table(BEFORE, "marks").select("ledger_id")
    found = [context.frame([], FINDINGS)]
    lacking = mark_checks.lacking(seen)
    if facts.absent_since_ms:
        absences = context.frame(sorted(facts.absent_since_ms.items()), "bookie string, since_ms long")
        lacking = lacking.unionByName(mark_checks.away(ledgers, bookies, absences))
    if (facts.absent_since_ms or not seen.isEmpty()) and not (lacking := kept(lacking)).isEmpty():
        healed = _ids(context, sorted(healed_ledgers(facts, previous)))
        either = marks.select("ledger_id").union(marked_before)
        not_healed = mark_checks.not_healed(lacking, either, healed, run)
        missing = mark_checks.missing_marks(lacking, either, not_healed, run, delay_ms=facts.lost_bookie_delay_ms)
        found += [not_healed, missing]
    if not context.options.ends_only and context.row_count(AFTER, "marks"):
        steady = marks.join(marked_before, "ledger_id", "left_semi")
        if not context.options.is_deep:
            steady = mark_checks.judged_by_lists(steady)
        covered = coverage.groupBy("ledger_id").agg(F.sum("unknown").alias("unknown")).where("unknown = 0")
        found.append(mark_checks.false_marks(steady, ledgers, bookies, covered.select("ledger_id"), seen, run))
    return together(found)


def healed_ledgers(facts: Facts, previous: RunDirectory | None) -> set[int]:
    """Ledgers that were marked when the previous run ended, or that workers reported as healed since it began."""
    if previous is None:
        return set()
    since_ms = previous.read_json("summary.json")["began_ms"]
    return set(previous.read_json("marks.json")) | {i for i, at_ms in facts.healed.items() if at_ms >= since_ms}


def earlier_findings(context: RunContext, begun: BegunRun, out: Path) -> DataFrame | None:
    """Findings of the last finished run that checked at least as much as this one; None: there is no such run."""
    run = last_finished(out, before=begun.run_id, cluster_id=begun.facts.cluster_id, fits=context.options.is_covered_by)
    return None if run is None else context.spark.read.schema(FINDINGS).parquet(str(run.findings))


def _ids(context: RunContext, ids: Iterable[int]) -> DataFrame:
    return context.frame([(ledger_id,) for ledger_id in ids], "ledger_id long")
