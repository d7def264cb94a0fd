"""AuditLogSettings: where a service records administrative changes and refusals.

A service subclasses it with its own `env_prefix` and uses the subclass as its settings group `audit_log`.
"""

from collections.abc import Callable
from enum import StrEnum

from bindery_kit.access.audit_file import AuditFile
from bindery_kit.access.audit_log import AuditLog
from bindery_kit.configuration.settings import Settings


class OnFailure(StrEnum):
    REFUSE = "refuse"
    CONTINUE = "continue"


class AuditLogSettings(Settings):
    """The audit log: one JSON line before each administrative change, one before its answer, and one for each refused
    request (401, 403)."""

    file: str = ""
    """File to which lines are appended; `-` is standard error. It may be renamed at any time: the next line creates it
    again. Empty: no audit log."""

    on_failure: OnFailure = OnFailure.REFUSE
    """If the line before a change cannot be written: `refuse` answers 503 and does not make the change; `continue`
    makes it, and counts the failure in the metrics."""

    fsync: bool = False
    """Wait until lines are on the disk. Otherwise they survive the end of the process, but not of the machine."""

    def open(self, *, service: str, clock: Callable[[], float], wall_clock_ms: Callable[[], int]) -> AuditLog | None:
        """Return the log; None without a file. `clock`: monotonic seconds. Raises BadRequest if the file cannot be
        opened."""
        if not self.file:
            return None
        file = AuditFile(self.file, is_synced=self.fsync)
        file.open()
        return AuditLog(
            file,
            service=service,
            refuses=self.on_failure is OnFailure.REFUSE,
            clock=clock,
            wall_clock_ms=wall_clock_ms,
        )
