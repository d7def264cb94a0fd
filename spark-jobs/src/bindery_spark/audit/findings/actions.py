"""Proposals to mark ledgers as under-replicated, one for each repairable ledger. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bindery_metadata.recovery.recovery_records import Reason

from bindery_spark.audit.findings.findings import Action, Kind


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposal to mark a ledger, because copies are missing on these bookies."""

    ledger_id: int
    bookies: tuple[str, ...]
    """Empty: the mark names no bookie."""
    reason: str
    missing_entries: int | None
    """Number of missing copies; None: unknown."""
    kinds: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"action": str(Action.MARK), **asdict(self)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Proposal":
        return cls(
            fields["ledger_id"],
            tuple(fields["bookies"]),
            fields["reason"],
            fields["missing_entries"],
            tuple(fields["kinds"]),
        )


def proposals(findings: Iterable[Mapping[str, Any]]) -> list[Proposal]:
    """Return the proposals, by ledger. `findings`: rows of FINDINGS."""
    of_ledger: dict[int, list[Mapping[str, Any]]] = {}
    for finding in findings:
        if finding["action"] == Action.MARK and finding["ledger_id"] is not None:
            of_ledger.setdefault(finding["ledger_id"], []).append(finding)
    return [_proposal(ledger_id, found) for ledger_id, found in sorted(of_ledger.items())]


def _proposal(ledger_id: int, found: list[Mapping[str, Any]]) -> Proposal:
    kinds = sorted({finding["kind"] for finding in found})
    runs = [f for f in found if f["kind"] in (Kind.MISSING_REPLICA, Kind.DIGEST_MISMATCH)]
    # For ENTRY_MISSING, workers read all entries; for other reasons only the first and last ones.
    reason = Reason.ENTRY_MISSING if runs else Reason.BOOKIE_LOST
    entries = sum(f["last_entry"] - f["first_entry"] + 1 for f in runs)
    known = runs and len(runs) == len([f for f in found if f["kind"] not in (Kind.MISSING_MARK, Kind.NOT_HEALED)])
    bookies = sorted({f["bookie"] for f in found if f["bookie"] is not None})
    return Proposal(ledger_id, tuple(bookies), str(reason), entries if known else None, tuple(kinds))


def proposal_text(proposal: Proposal) -> str:
    """The proposal as one line."""
    on_bookies = f" for {', '.join(proposal.bookies)}" if proposal.bookies else ""
    entries = "" if proposal.missing_entries is None else f", {proposal.missing_entries} copies"
    return f"mark ledger {proposal.ledger_id}{on_bookies}: {', '.join(proposal.kinds)}{entries}"
