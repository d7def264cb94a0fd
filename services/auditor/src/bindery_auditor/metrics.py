"""Metrics of an auditor: recovery (`bindery_recovery.admin.recovery_metrics`) and the last audits and backups."""

from bindery_kit.observability.metrics_page import Page
from bindery_recovery.admin.last_audits_watch import LastAuditsWatch
from bindery_recovery.admin.last_backup_watch import LastBackupWatch
from bindery_recovery.admin.recovery_metrics import RecoveryMetrics


class AuditorMetrics:
    """The metrics of one process. All parts are None until there is a ZooKeeper session."""

    def __init__(self) -> None:
        self.recovery: RecoveryMetrics | None = None
        self.last_audits: LastAuditsWatch | None = None
        self.last_backup: LastBackupWatch | None = None

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        page = Page()
        if self.recovery is not None:
            self.recovery.add_to(page)
        if self.last_audits is not None:
            self.last_audits.add_to(page)
        if self.last_backup is not None:
            self.last_backup.add_to(page)
        return page.render()
