"""Metrics of the last scheduled backup of the metadata. The record is read periodically, because a metrics page must
not wait.

| `bindery_last_backup_...` | meaning                                                                             |
|---------------------------|-------------------------------------------------------------------------------------|
| recorded                  | 1: a scheduled backup has succeeded; 0: none, then age, size and nodes are missing  |
| failed                    | 1: the last attempt failed; 0: it succeeded, or there was none                      |
| age_seconds               | seconds since the last backup that succeeded                                        |
| size_bytes                | size of its file                                                                    |
| nodes                     | number of nodes in it                                                               |

All are gauges. The age is computed by this process's clock: it keeps growing if the record can no longer be read.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.observability.metrics_page import Page
from bindery_metadata.recovery.last_backup import LastBackup, LastBackupStore

READ_INTERVAL_S: Final = 30.0
"""Interval in seconds between two reads of the record."""
PREFIX: Final = "bindery_last_backup"

log = get_logger(__name__)


class LastBackupWatch:
    """The watch of one process. `clock_ms`: wall clock."""

    def __init__(self, backups: LastBackupStore, *, clock_ms: Callable[[], int]) -> None:
        self._backups = backups
        self._clock_ms = clock_ms
        self._latest: LastBackup | None = None
        """The record as last read; None: not read yet."""

    async def run(self) -> None:
        """Read the record periodically, until cancelled."""
        while True:
            try:
                self._latest = await self._backups.get() or LastBackup()
            except BinderyError as error:
                log.info("last_backup_not_read", **error_fields(error))
            await asyncio.sleep(READ_INTERVAL_S)

    def add_to(self, page: Page) -> None:
        """Add the metrics; none before the first read."""
        last = self._latest
        if last is None:
            return
        is_there = bool(last.ended_ms)
        gauges: list[tuple[str, str, float]] = [
            ("recorded", "1: a scheduled backup of the metadata has succeeded; 0: none.", int(is_there)),
            ("failed", "1: the last attempt of a scheduled backup failed.", int(last.has_failed)),
        ]
        if is_there:
            gauges += [
                ("age_seconds", "Seconds since the last backup that succeeded.", last.age_s(self._clock_ms())),
                ("size_bytes", "Size of the last backup that succeeded.", last.size),
                ("nodes", "Number of nodes in the last backup that succeeded.", last.nodes),
            ]
        for name, text, value in gauges:
            page.add(f"{PREFIX}_{name}", "gauge", text, [("", value)])
