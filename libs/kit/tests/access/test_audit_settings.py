"""The settings group of an audit log."""

from pathlib import Path

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.access.audit_log import AuditLog
from bindery_kit.access.audit_settings import AuditLogSettings, OnFailure


def open_log(settings: AuditLogSettings) -> AuditLog | None:
    return settings.open(service="broker", clock=lambda: 0.0, wall_clock_ms=lambda: 0)


def test_there_is_no_log_by_default():
    assert open_log(AuditLogSettings()) is None


async def test_a_file_is_opened_at_once(tmp_path: Path):
    path = tmp_path / "audit.log"
    log = open_log(AuditLogSettings(file=str(path), on_failure=OnFailure.CONTINUE))
    assert log is not None
    assert path.exists()
    assert not log.refuses
    await log.close()


def test_a_file_that_cannot_be_opened_fails_the_start(tmp_path: Path):
    with pytest.raises(BadRequest, match="cannot open the audit log"):
        open_log(AuditLogSettings(file=str(tmp_path / "none" / "audit.log")))
