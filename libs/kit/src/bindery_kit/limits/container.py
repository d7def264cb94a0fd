"""Read the memory limit of the container in which this process runs."""

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
"""Directory in which the kernel shows the control groups of this container."""
_FILES: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Files of cgroup version 2 and of version 1, in which the largest number means no limit."""
_NO_LIMIT: Final = 2**60


def memory_limit(cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes above which the kernel kills this process; None if there is no readable limit."""
    for name in _FILES:
        try:
            text = (cgroups / name).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT:
            return int(text)
    return None
