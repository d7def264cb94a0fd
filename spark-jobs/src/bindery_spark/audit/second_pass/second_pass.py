"""Read the selected ledgers again, in batches that survive an interruption."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from bindery_core.ids import ID_MAX
from pyspark.sql import functions as F

from bindery_spark.audit.checks.copy_states import COPY_STATES
from bindery_spark.audit.context import AFTER, AGAIN, BEFORE, RunContext, rows_of
from bindery_spark.audit.first_pass import read_and_check
from bindery_spark.audit.ledger_history import KnownLedger, LedgerHistory, LedgerRows
from bindery_spark.audit.plan import batches, planned
from bindery_spark.audit.planning import BegunRun
from bindery_spark.audit.second_pass.merge import SecondResults
from bindery_spark.audit.second_pass.rules import Selection, broken_ledgers, select
from bindery_spark.schemas import FINDINGS

BATCH_LEDGERS_MAX: Final = 200
"""Maximum number of ledgers in a batch."""
PAUSE_MS_MAX: Final = 3_600_000
"""Age in ms of the newest batch above which a resumed run discards all batches, because many ledgers may have been
healed since."""


@dataclass(frozen=True, slots=True)
class SecondPass:
    """The ledgers that were read again, and the directories of the results."""

    selection: Selection
    ledgers: LedgerHistory
    directories: tuple[Path, ...]
    """Batches; empty: nothing was read again."""

    @property
    def broken(self) -> dict[int, str]:
        return broken_ledgers(self.ledgers, self.selection)


def run_second_pass(context: RunContext, begun: BegunRun) -> SecondPass:
    """Read the selected ledgers again. Requires the metadata tables AFTER."""
    before, after = context.known_ledgers(BEFORE), context.known_ledgers(AFTER)
    planned_ids = {ledger_id for ledger_id in before if begun.plan.covers(ledger_id)}
    if context.options.bookie is not None:
        rows = context.ledger_rows(BEFORE, 0, ID_MAX)
        planned_ids &= {row.ledger_id for row in rows if context.is_selected(row)}
    selection = select(
        before,
        after,
        context.found_kinds(),
        copies_of(context.groups()),
        planned=planned_ids,
        ends_only=context.options.ends_only,
    )
    if not selection.ids:
        return SecondPass(selection, LedgerHistory(before, after, after), ())
    directories = _read_batches(context, begun, selection, after)
    context.source.keep_table("ledgers", context.directory.table(AGAIN, "ledgers"))
    last = context.known_ledgers(AGAIN)
    return SecondPass(selection, LedgerHistory(before, after, last), tuple(directories))


def second_results(context: RunContext, second: SecondPass) -> SecondResults | None:
    """The results as DataFrames; None if nothing was read again."""
    if not second.directories:
        return None
    findings, states = ([str(each / name) for each in second.directories] for name in ("findings", "said"))
    return SecondResults(
        context.spark.read.schema(FINDINGS).parquet(*findings),
        context.spark.read.schema(COPY_STATES).parquet(*states),
        [ledger_id for ledger_id in second.selection.ids if second.ledgers.is_steady_after(ledger_id)],
    )


def copies_of(directories: Iterable[Path]) -> Counter[int]:
    """Number of copies of each ledger that were read, from the coverage in these directories."""
    copies: Counter[int] = Counter()
    for row in rows_of((directory / "coverage" for directory in directories), columns=("ledger_id", "copies")):
        copies[row["ledger_id"]] += row["copies"]
    return copies


def _read_batches(context: RunContext, begun: BegunRun, selection: Selection, after: LedgerRows) -> list[Path]:
    """Directories of all batches: those of an interrupted run that are still valid, then the new ones."""
    context.progress.phase(f"reading {len(selection.ids)} ledgers again")
    directory = context.directory
    done, directories = _valid_batches(context, selection, after)
    todo = [planned(after[ledger_id]) for ledger_id in selection.ids if ledger_id not in done]
    begin = max(directory.batches(), default=-1) + 1
    for number, ids in enumerate(batches(todo, ledgers_max=BATCH_LEDGERS_MAX), begin):
        output = directory.begin_batch(number)
        ledgers = context.table(AFTER, "ledgers").where(F.col("ledger_id").isin(ids))
        read_and_check(context, ids, ledgers, AFTER, (ids[0], ids[-1]), begun.run, output, keeps_states=True)
        facts = {
            "ended_ms": context.clock_ms(),
            "gone": sorted(context.gone_bookies(AFTER)),
            "ledgers": [asdict(after[ledger_id]) for ledger_id in ids],
        }
        directory.finish_batch(number, facts)
        directories.append(directory.batch(number))
    return directories


def _valid_batches(context: RunContext, selection: Selection, after: LedgerRows) -> tuple[set[int], list[Path]]:
    """Ledgers and directories of batches that were read before the run was interrupted. Removes those that are too old,
    or in which a ledger or the set of gone bookies changed since."""
    directory = context.directory
    stored = directory.batches()
    last_ms = max((facts["ended_ms"] for facts in stored.values()), default=0)
    is_recent = context.clock_ms() - last_ms <= PAUSE_MS_MAX
    gone, selected = sorted(context.gone_bookies(AFTER)), frozenset(selection.ids)
    done: set[int] = set()
    directories = []
    for number, facts in stored.items():
        rows = [KnownLedger(**row) for row in facts["ledgers"]]
        is_same = all(row.ledger_id in selected and after[row.ledger_id] == row for row in rows)
        if is_recent and is_same and facts["gone"] == gone:
            done |= {row.ledger_id for row in rows}
            directories.append(directory.batch(number))
        else:
            directory.drop_batch(number)
    return done, directories
