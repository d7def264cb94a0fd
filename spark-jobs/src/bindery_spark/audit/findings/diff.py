"""Compare the findings of two runs: new, gone and changed. Reads Parquet without Spark."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet

Finding = Mapping[str, Any]
SAME = ("kind", "ledger_id", "segment", "bookie", "first_entry")
"""Columns that identify a finding."""
COMPARED = ("last_entry", "severity", "expected", "found", "evidence_hash")
"""Columns by which a finding counts as changed."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between the findings of two runs."""

    new: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    changed: tuple[tuple[Finding, Finding], ...]
    """Before and after."""

    @property
    def is_empty(self) -> bool:
        return not (self.new or self.gone or self.changed)

    def to_json(self) -> dict[str, Any]:
        return {
            "new": list(map(dict, self.new)),
            "gone": list(map(dict, self.gone)),
            "changed": [{"was": dict(was), "is": dict(now)} for was, now in self.changed],
        }


def read_findings(directory: Path) -> list[dict[str, Any]]:
    """Read the directory `findings` of a run, in a fixed order."""
    rows: list[dict[str, Any]] = []
    for path in sorted(directory.glob("*.parquet")):
        rows += parquet.read_table(path).to_pylist()
    return sorted(rows, key=_order)


def compare(before: Iterable[Finding], after: Iterable[Finding]) -> Difference:
    """Compare two lists of findings. Pure."""
    was, now = _by_key(before), _by_key(after)
    changed = [
        (was[key], now[key])
        for key in was.keys() & now.keys()
        if any(was[key][name] != now[key][name] for name in COMPARED)
    ]
    return Difference(
        tuple(sorted((now[key] for key in now.keys() - was.keys()), key=_order)),
        tuple(sorted((was[key] for key in was.keys() - now.keys()), key=_order)),
        tuple(sorted(changed, key=lambda pair: _order(pair[1]))),
    )


def _by_key(findings: Iterable[Finding]) -> dict[tuple[Any, ...], Finding]:
    """Findings by key. Findings of topics and subscriptions differ only in `expected`, so it is part of the key."""
    return {tuple(f[name] for name in SAME) + ((f["expected"],) if f["bookie"] is None else ()): f for f in findings}


def _order(finding: Finding) -> tuple[Any, ...]:
    def sortable(value: Any) -> tuple[bool, Any]:
        return value is not None, value if value is not None else 0

    return (
        *(sortable(finding[name]) for name in ("ledger_id", "segment", "first_entry")),
        finding["kind"],
        finding["bookie"] or "",
        finding["expected"] or "",
    )


def place_text(finding: Finding) -> str:
    """The place of a finding, as in `ledger 7, entries 3..5, on b:3181`."""
    parts = [] if finding["ledger_id"] is None else [f"ledger {finding['ledger_id']}"]
    first, last = finding["first_entry"], finding["last_entry"]
    if first is not None:
        parts.append(f"entry {first}" if first == last else f"entries {first}..{'' if last is None else last}")
    if finding["bookie"] is not None:
        parts.append(f"on {finding['bookie']}")
    return ", ".join(parts)


def finding_text(finding: Finding) -> str:
    """The finding as one line."""
    place = place_text(finding)
    text = f"{finding['kind']} ({finding['severity']})" + (f" {place}" if place else "")
    details = [finding["found"]] if finding["found"] else []
    details += [f"expected {finding['expected']}"] if finding["expected"] else []
    return text + (f": {'; '.join(details)}" if details else "")
