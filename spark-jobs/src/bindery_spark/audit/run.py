"""Run an audit: plan, read and check group by group, confirm, and write the findings.

    begin -> first pass: read and check each group -> metadata again -> second pass -> marks -> findings, summary

| level    | reads                                           | checks                                          |
|----------|-------------------------------------------------|-------------------------------------------------|
| quick    | metadata; first and last entry of each fragment | copies, ensembles, ledgers open too long, marks |
| standard | metadata; every bookie's list of entries        | the same for every entry; false marks           |
| deep     | metadata; every entry; orphaned data            | content of entries, placement, topics, orphans  |

The cluster changes while it is read, so a finding must be confirmed:

- a metadata finding, by the metadata at both ends of the run;
- a finding of copies, by the second pass (`second_pass.rules`);
- a missing or false mark, by the marks at both ends of the run.

Ledgers that are deleted during the run have no findings. The run writes nothing to the cluster except the records of
verified ledgers and its own verdict.
"""

from collections.abc import Callable
from pathlib import Path

from bindery_core.errors import BinderyError
from pyspark.sql import SparkSession

from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.conclusion import conclude
from bindery_spark.audit.context import RunContext
from bindery_spark.audit.coverage import coverage_rows, unlisted_bookies
from bindery_spark.audit.findings.actions import proposals
from bindery_spark.audit.findings.diff import read_findings
from bindery_spark.audit.findings.summary import last_audit, summarize
from bindery_spark.audit.first_pass import read_groups
from bindery_spark.audit.options import Options
from bindery_spark.audit.outcome import Outcome, bookie_coverage, write_outputs
from bindery_spark.audit.planning import begin, begun
from bindery_spark.audit.source import Source
from bindery_spark.audit.verified import bad_ledgers, stale_records, verified_ledgers
from bindery_spark.progress import AuditProgress


def run_audit(
    spark: SparkSession,
    source: Source,
    directory: RunDirectory,
    options: Options,
    *,
    out: Path,
    clock_ms: Callable[[], int],
    progress: AuditProgress,
    is_new: bool,
) -> Outcome:
    """Begin a run, or resume it, and finish it. All files are below `directory`; `out` holds earlier runs.

    Raises the errors of the metadata store; errors of Spark are not BinderyErrors.
    """
    context = RunContext(spark, source, directory, options, clock_ms=clock_ms, progress=progress)
    if is_new:
        begin(context)
    run = begun(directory)
    read_groups(context, run)
    second = conclude(context, run, out)
    progress.phase("writing")
    findings = read_findings(directory.findings)
    bad = bad_ledgers(findings)
    verified = verified_ledgers(
        second.ledgers, coverage_rows(context), bad, level=options.level, run_id=run.run_id, began_ms=run.began_ms
    )
    bookies, ledgers = bookie_coverage(coverage_rows(context), unlisted_bookies(context))
    wanted = proposals(findings)
    summary = summarize(
        findings,
        bookies,
        run_id=run.run_id,
        cluster_id=run.facts.cluster_id,
        level=options.level,
        began_ms=run.began_ms,
        ended_ms=clock_ms(),
        ledgers=ledgers,
        ledgers_skipped=run.skipped.ledgers,
        ledgers_verified=len(verified),
        oldest_verified_ms=min(filter(None, (run.skipped.oldest_ms, run.began_ms))),
        proposals=len(wanted),
    )

    def record() -> None:
        _, known = source.facts()
        checked = {row["ledger_id"] for row in coverage_rows(context)} if known else set()
        stale = stale_records(
            known,
            existing=second.ledgers.last.keys(),
            checked=checked,
            verified={each.ledger_id for each in verified},
            bad=bad,
            level=options.level,
        )
        source.write_verified(verified, stale)
        if options.covers_all_ledgers:
            source.write_last(last_audit(summary))

    unrecorded = _unrecorded(record) if options.record else "--no-record was given"
    write_outputs(directory, summary, findings, wanted)
    return Outcome(summary, findings, wanted, directory, unrecorded)


def _unrecorded(record: Callable[[], None]) -> str:
    """Record the run in the cluster. Return the error that prevented this, or an empty text; the verdict does not
    depend on it. The run is recorded before it counts as finished, so a resumed run records it again."""
    try:
        record()
    except BinderyError as error:
        return str(error)
    return ""
