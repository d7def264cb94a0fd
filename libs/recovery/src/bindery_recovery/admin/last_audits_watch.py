"""What the last audits came to, as auditors show it: read now and then, since a page of metrics does not wait.

| `bindery_last_audit_...`     | labels          | is                                                                  |
|------------------------------|-----------------|---------------------------------------------------------------------|
| recorded                     | level           | 1: one of that level has ended; 0: none has, and the others lack it |
| age_seconds                  | level           | since it ended                                                      |
| verdict                      | level, verdict  | 1 for its verdict, 0 for the others                                 |
| findings                     | level, severity | how many it has                                                     |
| coverage_ratio               | level           | part of the copies that it looked at                                |
| oldest_verification_seconds  | level           | since the oldest look at any ledger that it rests on                |

All are gauges. Ages are told by this process's clock: they grow when the records can no longer be read.
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
PREFIX: Final = "bindery_last_audit"

log = get_logger(__name__)


class LastAuditsWatch:
    """Of one process. `clock_ms`: wall clock."""

    def __init__(self, audits: LastAudits, *, clock_ms: Callable[[], int]) -> None:
        self._audits = audits
        self._clock_ms = clock_ms
        self._latest: Sequence[LastAudit] | None = None
        """As last read; None: not yet."""

    async def run(self) -> None:
        """Read them again and again, until cancelled."""
        while True:
            try:
                await self.get()
            except BinderyError as error:
                log.info("last_audits_not_read", **error_fields(error))
            await asyncio.sleep(READ_INTERVAL_S)

    async def get(self) -> Sequence[LastAudit]:
        """Read now, the deepest level first. Raises MetadataUnavailable."""
        self._latest = await self._audits.all()
        return self._latest

    def add_to(self, page: Page) -> None:
        """Nothing before they were read once."""
        if self._latest is None:
            return
        known = {audit.level: audit for audit in self._latest}
        page.add(
            f"{PREFIX}_recorded", "gauge", "1: an audit of the whole cluster has ended; 0: none of that level.",
            [(labels({"level": level}), int(level in known)) for level in LEVELS],
        )  # fmt: skip
        now_ms = self._clock_ms()
        gauges: tuple[tuple[str, str, Callable[[LastAudit], float]], ...] = (
            ("age_seconds", "Since the last audit of the whole cluster ended.", lambda one: one.age_s(now_ms)),
            ("coverage_ratio", "Part of the copies that it looked at.", lambda one: one.coverage),
            ("oldest_verification_seconds", "Since the oldest look at a ledger that its verdict rests on.",
             lambda one: max(0, now_ms - one.oldest_verified_ms) / 1000),
        )  # fmt: skip
        for name, text, value in gauges:
            samples = [(labels({"level": level}), value(audit)) for level, audit in known.items()]
            page.add(f"{PREFIX}_{name}", "gauge", text, samples)
        page.add(
            f"{PREFIX}_verdict", "gauge", "1: its verdict.",
            [
                (labels({"level": level, "verdict": verdict}), int(audit.verdict == verdict))
                for level, audit in known.items() for verdict in VERDICTS
            ],
        )  # fmt: skip
        page.add(
            f"{PREFIX}_findings", "gauge", "Findings by severity.",
            [
                (labels({"level": level, "severity": severity}), audit.severities.get(severity, 0))
                for level, audit in known.items() for severity in SEVERITIES
            ],
        )  # fmt: skip
