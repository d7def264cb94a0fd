"""/metrics of an auditor: process metrics, then recovery metrics (`bindery_recovery.admin.recovery_metrics`)."""

from typing import Final

from bindery_kit.observability.metrics import Metrics
from bindery_kit.observability.metrics_page import Page
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class AuditorPage:
    """A `bindery_kit.observability.health.MetricsPage`."""

    def __init__(self) -> None:
        self._process = Metrics("auditor")
        self.recovery: RecoveryMetrics | None = None
        self.last_audits: LastAuditsWatch | None = None
        """Both from when there is a session on."""

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE

    def render(self) -> bytes:
        page = Page()
        if self.recovery is not None:
            self.recovery.add_to(page)
        if self.last_audits is not None:
            self.last_audits.add_to(page)
        return self._process.render() + page.render()
