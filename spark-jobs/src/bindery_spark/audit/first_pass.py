"""Read and check ledgers, group by group. An interrupted run loses only the group that it was reading."""

from collections.abc import Sequence
from pathlib import Path

from pyspark import StorageLevel
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from bindery_spark.audit.checks import copies as copy_checks
from bindery_spark.audit.checks.copy_states import copy_states
from bindery_spark.audit.checks.finding_rows import Run, kept, together
from bindery_spark.audit.context import BEFORE, RunContext
from bindery_spark.audit.planning import BegunRun


def read_groups(context: RunContext, begun: BegunRun) -> None:
    """Read and check the groups that are not done yet."""
    directory, plan = context.directory, begun.plan
    done = directory.done()
    context.progress.plan(plan.size, sum(g.size for g in plan.groups if g.number in done), len(plan.groups))
    for group in plan.groups:
        if group.number in done:
            continue
        context.progress.group(group.number, group.ledgers, group.size)
        output = directory.begin_group(group.number)
        rows = context.ledger_rows(BEFORE, group.first, group.last)
        ids = [row.ledger_id for row in rows if context.is_selected(row)]
        ledgers = context.table(BEFORE, "ledgers").where(F.col("ledger_id").between(group.first, group.last))
        read_and_check(context, ids, ledgers, BEFORE, (group.first, group.last), begun.run, output)
        directory.finish_group(group.number)
        context.progress.done(group.size)


def read_and_check(
    context: RunContext,
    ids: Sequence[int],
    ledgers: DataFrame,
    when: str,
    id_range: tuple[int, int],
    run: Run,
    output: Path,
    *,
    keeps_states: bool = False,
) -> None:
    """Read the ledgers `ids` once and write coverage and findings below `output`; with `keeps_states` also COPY_STATES.

    `ledgers`: LEDGERS with these ids, from the tables `when`. Orphaned data is checked in `id_range` (inclusive).
    """
    options = context.options
    blocks = context.source.blocks(
        ids,
        entries=options.entries,
        unexpected_in=id_range if options.reads_orphans else None,
        unexpected_on=options.bookie,
    )
    blocks = blocks.persist(StorageLevel.MEMORY_AND_DISK)
    gone = context.gone_bookies(when)
    expected = copy_checks.with_gone(blocks, gone)
    coverage = copy_checks.coverage(expected)
    if options.reads_orphans:
        coverage = coverage.unionByName(copy_checks.unlisted(blocks))
    coverage.coalesce(1).write.parquet(str(output / "coverage"))
    if keeps_states:
        copy_states(blocks).coalesce(1).write.parquet(str(output / "said"))
    found = [copy_checks.closed_lengths(blocks, ledgers, run)]
    suspects = kept(copy_checks.suspects(expected))
    if not suspects.isEmpty():
        found.append(copy_checks.entry_faults(blocks, suspects, gone, ledgers, run))
    if options.reads_orphans:
        found.append(copy_checks.orphan_data(blocks, ledgers, run))
    together(found).coalesce(1).write.parquet(str(output / "findings"))
    blocks.unpersist()
