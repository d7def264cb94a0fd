"""An audit log in a temporary file, with a clock that the test advances."""

import json
from pathlib import Path
from typing import Any

from bindery_kit.access.audit_file import AuditFile
from bindery_kit.access.audit_log import AuditLog


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wall_ms(self) -> int:
        return 1_700_000_000_123


def make_log(path: Path, clock: Clock | None = None, *, refuses: bool = True) -> AuditLog:
    clock = clock or Clock()
    return AuditLog(
        AuditFile(str(path), is_synced=False),
        service="broker",
        refuses=refuses,
        clock=clock,
        wall_clock_ms=clock.wall_ms,
    )


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()]
