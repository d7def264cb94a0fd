"""The results of the last finished audit of the whole cluster, by level: its findings, and whether one is overdue.

| node below /bindery/audit | value                                               | kept                          |
|---------------------------|-----------------------------------------------------|-------------------------------|
| last/<level>              | JSON: LastAudit without `level`, which the path has | until the next one is written |

Only runs over all ledgers are recorded; a run over some of them proves nothing about the others. Each level has its own
node, because a quick audit does not prove what a deep one does. The record of an older run never replaces that of a
later one: otherwise a run that was interrupted and continued days later would clear the alert of a run in between.
No decision about data depends on a record, so an unreadable node counts as missing and is logged.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from bindery_core.errors import AlreadyExists, Conflict, Corrupt, MetadataUnavailable, NoSuchNode, VersionConflict

from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.ledgers.verified_records import LEVELS
from bindery_metadata.stores import json_node
from bindery_metadata.stores.store import MetadataStore

VERDICTS: Final = ("HEALTHY", "INCOMPLETE", "UNDER-REPLICATED", "CORRUPT")
SEVERITIES: Final = ("info", "warning", "incomplete", "under_replicated", "corrupt", "unreadable")
"""Ascending, as are the verdicts."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
AHEAD_MS_MAX: Final = 86_400_000
"""A run that began this many milliseconds after another one ended had a wrong clock: its record may be replaced."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAudit:
    """One finished run over all ledgers. Times in ms since 1970; a copy is an entry on one bookie."""

    level: str
    run_id: str
    verdict: str
    exit_code: int
    began_ms: int
    ended_ms: int
    copies_expected: int
    """Number of copies to check, without those skipped because they were verified recently."""
    copies_verified: int
    bytes_read: int
    """Payload."""
    oldest_verified_ms: int
    """Time of the oldest check that the verdict depends on; `began_ms` unless ledgers were skipped."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Findings by kind; kinds without findings may be missing."""
    severities: Mapping[str, int] = field(default_factory=dict)
    """The same findings by severity."""

    @property
    def coverage(self) -> float:
        """Share of the copies that was checked, 0..1; 1 if there are none."""
        return self.copies_verified / self.copies_expected if self.copies_expected else 1.0

    def age_s(self, now_ms: int) -> float:
        """Return the seconds since it ended; 0 if its clock is ahead of ours."""
        return max(0, now_ms - self.ended_ms) / 1000

    def to_json(self, now_ms: int) -> dict[str, Any]:
        return {**asdict(self), "coverage": self.coverage, "age_s": self.age_s(now_ms)}


def findings_text(severities: Mapping[str, int]) -> str:
    """Return a text for operators, the worst first: `2 unreadable, 1 under-replicated`, or `none`."""
    found = [f"{severities[name]} {name.replace('_', '-')}" for name in reversed(SEVERITIES) if severities.get(name)]
    return ", ".join(found) or "none"


class LastAudits:
    """Reads and writes the records. Every method may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, root: str = BINDERY_ROOT) -> None:
        self._store = store
        self._root = f"{root}/audit/last"

    async def all(self) -> list[LastAudit]:
        """Return the records, the deepest level first; a level that was never audited is left out."""
        found = [(await self._read(level))[0] for level in reversed(LEVELS)]
        return [audit for audit in found if audit is not None]

    async def put(self, audit: LastAudit) -> None:
        """Replace the record of its level. Raises Conflict if that one began later, MetadataOutcomeUnknown if a
        response was
        lost; writing again is harmless."""
        assert audit.level in LEVELS
        assert audit.verdict in VERDICTS
        path = self._path(audit.level)
        data = json_node.encode(audit, leave_out=("level",))
        for _ in range(ATTEMPTS_MAX):
            standing, version = await self._read(audit.level)
            if standing and audit.began_ms < standing.began_ms <= audit.ended_ms + AHEAD_MS_MAX:
                raise Conflict("an audit of this level that began later is already recorded", run_id=standing.run_id)
            try:
                if version is None:
                    await self._store.create(path, data, make_parents=True)
                else:
                    await self._store.set(path, data, version=version)
                return
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
        raise MetadataUnavailable("the record of the last audit keeps changing", path=path, attempts=ATTEMPTS_MAX)

    def _path(self, level: str) -> str:
        return f"{self._root}/{level}"

    async def _read(self, level: str) -> tuple[LastAudit | None, int | None]:
        """Return the record and the version of its node; None: there is none."""
        path = self._path(level)
        try:
            node = await self._store.get(path)
        except NoSuchNode:
            return None, None
        try:
            audit = json_node.decode(node.data, LastAudit, path=path, level=level)
            if audit.verdict not in VERDICTS:
                raise Corrupt("unknown verdict", path=path, verdict=audit.verdict[:100])
            return audit, node.stat.version
        except Corrupt as error:
            _log.warning("last_audit_unreadable", extra={"path": path, "error": str(error)})
            return None, node.stat.version
