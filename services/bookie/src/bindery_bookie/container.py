"""What the container around this process allows, as far as it can be seen from inside."""

from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
_FILES: Final = ("memory.max", "memory/memory.limit_in_bytes")
"""Of version 2 and of version 1, whose largest number means none."""
_NO_LIMIT: Final = 2**60


def memory_limit(cgroups: Path = CGROUPS) -> int | None:
    """Bytes above which the kernel kills this process; None: no limit, or none that can be read."""
    for name in _FILES:
        try:
            text = (cgroups / name).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.isdecimal() and int(text) < _NO_LIMIT:
            return int(text)
    return None
