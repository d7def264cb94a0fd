"""Begin a run: read the metadata, choose the ledgers to read, and store the plan.

A run whose plan is stored can be resumed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import LEVELS, Verified

from bindery_spark.audit.checkpoint import RunDirectory
from bindery_spark.audit.checks.finding_rows import Run
from bindery_spark.audit.cluster_facts import Facts
from bindery_spark.audit.context import BEFORE, RunContext
from bindery_spark.audit.options import Options
from bindery_spark.audit.plan import Plan, make_plan, planned


@dataclass(frozen=True, slots=True)
class Skipped:
    """Ledgers that are not read because an earlier run verified them recently."""

    ledgers: int = 0
    oldest_ms: int | None = None
    """Time of the oldest of these verifications."""


@dataclass(frozen=True, slots=True)
class BegunRun:
    """What `begin` stored: all that a resumed run needs besides its options."""

    run_id: str
    began_ms: int
    facts: Facts
    plan: Plan
    skipped: Skipped

    @property
    def run(self) -> Run:
        return Run(self.run_id, self.began_ms)


def begin(context: RunContext) -> None:
    """Read the facts and the metadata, choose the ledgers to read, and store the plan."""
    options = context.options
    context.progress.phase("reading metadata")
    began_ms = context.clock_ms()
    facts, verified = context.source.facts()
    context.keep_metadata(BEFORE)
    rows = context.ledger_rows(BEFORE, options.first, options.last)
    recent = recently_verified(rows, {record.ledger_id: record for record in verified}, options, now_ms=began_ms)
    ledgers = [planned(row, is_wanted=row.ledger_id not in recent and context.is_selected(row)) for row in rows]
    plan = make_plan(ledgers, first=options.first, last=options.last, group_bytes=options.group_bytes)
    left_out = [record for ledger_id, record in recent.items() if not plan.covers(ledger_id)]
    skipped = Skipped(len(left_out), min((record.verified_at_ms for record in left_out), default=None))
    context.directory.write_run(
        {
            "options": asdict(options),
            "began_ms": began_ms,
            "facts": facts.to_json(),
            "plan": plan.to_json(),
            "skipped": asdict(skipped),
        }
    )


def begun(directory: RunDirectory) -> BegunRun:
    """Return what `begin` stored. Raise BadRequest if the run cannot be resumed."""
    stored = directory.read_run()
    return BegunRun(
        directory.run_id,
        stored["began_ms"],
        Facts.from_json(stored["facts"]),
        Plan.from_json(stored["plan"]),
        Skipped(**stored["skipped"]),
    )


def recently_verified(
    rows: Iterable[Any], verified: Mapping[LedgerId, Verified], options: Options, *, now_ms: int
) -> dict[int, Verified]:
    """Ledgers that need not be read: closed, and verified within the option `since_verified_ms`, at least as deeply and
    with the metadata version that they have now."""
    window_ms = options.since_verified_ms
    if window_ms is None:
        return {}
    deep_enough: Sequence[str] = LEVELS[LEVELS.index(options.level) :]
    return {
        row.ledger_id: record
        for row in rows
        if row.state == "closed"
        and (record := verified.get(row.ledger_id)) is not None
        and record.metadata_version == row.metadata_version
        and record.level in deep_enough
        and now_ms - record.verified_at_ms < window_ms
    }
