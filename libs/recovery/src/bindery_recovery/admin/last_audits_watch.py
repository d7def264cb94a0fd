"""Metrics of the last audits. The records are read periodically, because a metrics page must not wait.

| `bindery_last_audit_...`     | labels          | meaning                                                             |
|------------------------------|-----------------|---------------------------------------------------------------------|
| recorded                     | level           | 1: an audit of this level has ended; 0: none, no further samples    |
| age_seconds                  | level           | seconds since it ended                                              |
| verdict                      | level, verdict  | 1 for its verdict, 0 for the others                                 |
| findings                     | level, severity | number of findings                                                  |
| coverage_ratio               | level           | share of the replicas that it checked                               |
| oldest_verification_seconds  | level           | age of the oldest verification of a ledger that the verdict uses    |

All are gauges. Ages are computed by this process's clock: they keep growing if the records can no longer be read.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.metrics_page import Page, labels
from bindery_metadata.ledgers.verified_records import LEVELS
from bindery_metadata.recovery.last_audits import SEVERITIES, VERDICTS, LastAudit, LastAudits

READ_INTERVAL_S: Final = 30.0
"""Interval in seconds between two reads of the records."""
PREFIX: Final = "bindery_last_audit"

log = get_logger(__name__)


class LastAuditsWatch:
    """The watch of one process. `clock_ms`: wall clock."""

    def __init__(self, audits: LastAudits, *, clock_ms: Callable[[], int]) -> None:
        self._audits = audits
        self._clock_ms = clock_ms
        self._latest: Sequence[LastAudit] | None = None
        """The records as last read; None: not read yet."""

    async def run(self) -> None:
        """Read the records periodically, until cancelled."""
        while True:
            try:
                await self.get()
            except BinderyError as error:
                log.info("last_audits_not_read", **error_fields(error))
            await asyncio.sleep(READ_INTERVAL_S)

    async def get(self) -> Sequence[LastAudit]:
        """Read the records now, the deepest level first. Raises MetadataUnavailable."""
        self._latest = await self._audits.all()
        return self._latest

    def add_to(self, page: Page) -> None:
        """Add the metrics; none before the first read."""
        if self._latest is None:
            return
        known = {audit.level: audit for audit in self._latest}
        page.add(
            f"{PREFIX}_recorded",
            "gauge",
            "1: an audit of the whole cluster with this level has ended; 0: none.",
            [(labels({"level": level}), int(level in known)) for level in LEVELS],
        )
        now_ms = self._clock_ms()
        gauges: tuple[tuple[str, str, Callable[[LastAudit], float]], ...] = (
            ("age_seconds", "Seconds since the last audit of the whole cluster ended.", lambda one: one.age_s(now_ms)),
            ("coverage_ratio", "Share of the replicas that the last audit checked.", lambda one: one.coverage),
            (
                "oldest_verification_seconds",
                "Age of the oldest verification of a ledger that the verdict uses.",
                lambda one: max(0, now_ms - one.oldest_verified_ms) / 1000,
            ),
        )
        for name, text, value in gauges:
            samples = [(labels({"level": level}), value(audit)) for level, audit in known.items()]
            page.add(f"{PREFIX}_{name}", "gauge", text, samples)
        page.add(
            f"{PREFIX}_verdict",
            "gauge",
            "1: the verdict of the audit.",
            [
                (labels({"level": level, "verdict": verdict}), int(audit.verdict == verdict))
                for level, audit in known.items()
                for verdict in VERDICTS
            ],
        )
        page.add(
            f"{PREFIX}_findings",
            "gauge",
            "Findings by severity.",
            [
                (labels({"level": level, "severity": severity}), audit.severities.get(severity, 0))
                for level, audit in known.items()
                for severity in SEVERITIES
            ],
        )
