"""ProcessUsage: how much of CPU and memory this process uses, as load reports say it."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bindery_core.sources import MonotonicClock

from bindery_kit.limits.container import memory_limit

SPAN_S_MIN: Final = 1.0
"""Minimum seconds over which the use of the CPU is measured; within them, the last result is returned again."""
_STATM: Final = Path("/proc/self/statm")


def resident_bytes(statm: Path = _STATM) -> int:
    """Return the bytes of memory that this process occupies; 0 if the system does not say."""
    try:
        return int(statm.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def machine_bytes() -> int:
    """Return the bytes of memory of the machine; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


class ProcessUsage:
    def __init__(
        self,
        now: MonotonicClock,
        *,
        cpu_s: Callable[[], float] = time.process_time,
        memory: Callable[[], int] = resident_bytes,
    ) -> None:
        """`cpu_s`: seconds of CPU that the process has used. `memory`: bytes that it occupies."""
        self._now = now
        self._cpu_s = cpu_s
        self.memory = memory
        self._limit = memory_limit() or machine_bytes()
        self._last = (now(), cpu_s())
        self._percent = 0.0

    def cpu_percent(self) -> float:
        """Return the use since the last call, in percent of one core; it exceeds 100 if threads use others."""
        now, used = self._now(), self._cpu_s()
        if now - self._last[0] >= SPAN_S_MIN:
            self._percent = max(0.0, (used - self._last[1]) / (now - self._last[0]) * 100)
            self._last = (now, used)
        return self._percent

    def memory_limit(self) -> int:
        """Return the bytes that the process may occupy: the limit of its container, or the memory of the machine."""
        return self._limit
