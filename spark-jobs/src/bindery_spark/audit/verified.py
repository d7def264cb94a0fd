"""Verified records: which ledgers the run found complete, and which records in the cluster it invalidates."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import LEVELS, Verified

from bindery_spark.audit.findings.findings import Severity
from bindery_spark.audit.ledger_history import LedgerHistory

HEALTHY_SEVERITIES: Final = (str(Severity.INFO), str(Severity.WARNING))
"""Severities of findings with which a ledger still counts as verified."""


def bad_ledgers(findings: Iterable[Mapping[str, Any]]) -> set[int]:
    """Ids of ledgers with a finding that is not in HEALTHY_SEVERITIES."""
    return {row["ledger_id"] for row in findings if row["severity"] not in HEALTHY_SEVERITIES}


def verified_ledgers(
    ledgers: LedgerHistory,
    coverage: Iterable[Mapping[str, Any]],
    bad: Collection[int],
    *,
    level: str,
    run_id: str,
    began_ms: int,
) -> list[Verified]:
    """Records of the closed ledgers that did not change during the run, of which every copy was checked, and that are
    not `bad`. `coverage`: rows of COVERAGE."""
    unknown: dict[int, int] = {}
    for row in coverage:
        unknown[row["ledger_id"]] = unknown.get(row["ledger_id"], 0) + row["unknown"]
    versions = {row.ledger_id: row.metadata_version for row in ledgers.before.values()}
    return [
        Verified(LedgerId(row.ledger_id), level, began_ms, run_id, row.metadata_version)
        for row in ledgers.after.values()
        if row.state == "closed"
        and row.problem is None
        and row.ledger_id not in bad
        and versions.get(row.ledger_id) == row.metadata_version
        and unknown.get(row.ledger_id) == 0
    ]


def stale_records(
    known: Sequence[Verified],
    *,
    existing: Collection[int],
    checked: Collection[int],
    verified: Collection[int],
    bad: Collection[int],
    level: str,
) -> list[int]:
    """Ledgers whose records in the cluster (`known`) are no longer true.

    A record is stale if its ledger is deleted or bad, or if this run checked it at least as deeply and did not verify
    it. A less deep run that could not verify a ledger proves nothing against its record.
    """
    depth = LEVELS.index(level)

    def is_stale(record: Verified) -> bool:
        if record.ledger_id not in existing or record.ledger_id in bad:
            return True
        is_as_deep = record.level not in LEVELS or LEVELS.index(record.level) <= depth
        return record.ledger_id in checked and record.ledger_id not in verified and is_as_deep

    return [record.ledger_id for record in known if is_stale(record)]
