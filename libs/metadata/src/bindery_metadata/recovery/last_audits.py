"""Store the result of the last finished audit of the whole cluster for each audit level.

| node below /bindery/audit | value                                               | kept                          |
|---------------------------|-----------------------------------------------------|-------------------------------|
| last/<level>              | JSON: LastAudit without `level`, which the path has | until the next one is written |

Operators see the findings and the age of each result. Only runs over all ledgers are recorded, because a run over some
ledgers proves nothing about the others. Each level has its own node, because a quick audit does not prove what a deep
audit does. The record of an earlier run never replaces that of a later run: otherwise a run that was interrupted and
continued days later would clear the alert of a run in between.
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
"""Verdicts of an audit, from the best to the worst."""
SEVERITIES: Final = ("info", "warning", "incomplete", "under_replicated", "corrupt", "unreadable")
"""Severities of findings, from the mildest to the worst."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
AHEAD_MS_MAX: Final = 86_400_000
"""Maximum time in ms by which a recorded run may begin after the end of the run to be recorded.

A recorded run that began even later is assumed to have had a wrong clock, and its record is replaced.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAudit:
    """One finished run over all ledgers. Times are in ms since 1970. A copy is a replica of one entry."""

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
    """Number of payload bytes read."""
    oldest_verified_ms: int
    """Time of the oldest check that the verdict depends on; `began_ms` unless ledgers were skipped."""
    kinds: Mapping[str, int] = field(default_factory=dict)
    """Number of findings by kind. Kinds without findings may be missing."""
    severities: Mapping[str, int] = field(default_factory=dict)
    """Number of the same findings by severity."""

    @property
    def coverage(self) -> float:
        """Verified share of the expected copies, 0..1; 1 if no copies were expected."""
        return self.copies_verified / self.copies_expected if self.copies_expected else 1.0

    def age_s(self, now_ms: int) -> float:
        """Return the time in seconds since the run ended; 0 if `ended_ms` is later than `now_ms`."""
        return max(0, now_ms - self.ended_ms) / 1000

    def to_json(self, now_ms: int) -> dict[str, Any]:
        """Return the fields with `coverage` and `age_s`."""
        return {**asdict(self), "coverage": self.coverage, "age_s": self.age_s(now_ms)}


def findings_text(severities: Mapping[str, int]) -> str:
    """Return the numbers of findings as text, the worst first: `2 unreadable, 1 under-replicated`, or `none`."""
    found = [f"{severities[name]} {name.replace('_', '-')}" for name in reversed(SEVERITIES) if severities.get(name)]
    return ", ".join(found) or "none"


class LastAudits:
    """Reads and writes the records. Every method may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, root: str = BINDERY_ROOT) -> None:
        self._store = store
        self._root = f"{root}/audit/last"

    async def all(self) -> list[LastAudit]:
        """Return the records, the most thorough level first. A level without a record is left out."""
        found = [(await self._read(level))[0] for level in reversed(LEVELS)]
        return [audit for audit in found if audit is not None]

    async def put(self, audit: LastAudit) -> None:
        """Replace the record of the audit's level.

        Raises Conflict if the recorded run began later, MetadataOutcomeUnknown if a response was lost; writing again is
        harmless.
        """
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
        """Return the record (None: missing or unreadable) and the version of its node (None: there is no node)."""
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
