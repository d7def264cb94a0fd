"""Findings of the offline check: their severities, their text and JSON forms, and the totals of a shard."""

from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.errors import BinderyError

DAMAGE: Final = "damage"
"""Severity of damaged or missing data."""
DEAD: Final = "dead"
"""Severity of damaged bytes without a live entry."""
NOTE: Final = "note"
"""Severity of an observation that needs no repair."""

_PREFIXES: Final = {DAMAGE: "DAMAGE", DEAD: "dead  ", NOTE: "note  "}


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of the check."""

    severity: str
    """DAMAGE, DEAD or NOTE. Only DAMAGE makes a shard damaged."""
    path: str
    text: str
    offset: int | None = None
    fix: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        place = {"offset": self.offset} if self.offset is not None else {}
        return {"severity": self.severity, "path": self.path, **place, "text": self.text, **self.facts, "fix": self.fix}

    def line(self, *, last_fix: str = "") -> str:
        """Return the finding as text. `last_fix`: the fix of the previous finding, which is not repeated."""
        at = "" if self.offset is None else f" at {self.offset}"
        facts = "".join(f" {name}={value}" for name, value in self.facts.items())
        fix = f"\n    fix: {self.fix}" if self.fix not in ("", last_fix) else ""
        return f"{_PREFIXES[self.severity]}  {self.path}{at}: {self.text}{facts}{fix}"


@dataclass(slots=True)
class Totals:
    """Numbers of the parts that were checked."""

    journal_groups: int = 0
    journal_records: int = 0
    logs: int = 0
    log_bytes: int = 0
    records: int = 0
    ledgers: int = 0
    entries: int = 0
    """Entries in the index."""
    dead_records: int = 0
    """Records of deleted ledgers."""


def damage_of(error: BinderyError, path: str, *, fix: str) -> Finding:
    """Return the finding for an error of the store. `path`: used if the error has none."""
    facts = dict(error.facts)
    where = str(facts.pop("path", path))
    offset = facts.pop("offset", None)
    return Finding(DAMAGE, where, error.message, offset if isinstance(offset, int) else None, fix, facts)
