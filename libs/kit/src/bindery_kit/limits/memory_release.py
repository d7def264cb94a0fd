"""MemoryRelease: return memory to the system when the clients that needed it have gone.

Python and the C library keep the memory of freed objects for later use. After thousands of clients have gone, a process
would keep their memory for ever, although others on the machine need it, and its next peak would begin higher.
"""

import ctypes
import gc
from collections.abc import Callable
from functools import cache
from typing import Final

DROP_SIZE: Final = 1024 * 1024
"""Bytes by which the need must have fallen since its peak."""
INTERVAL_S: Final = 5.0
"""Minimum seconds between two releases. Each takes tens of milliseconds of the event loop, by the number of objects."""


def release_memory() -> None:
    """Collect cyclic garbage, and return free memory of the C library to the system if it is glibc."""
    gc.collect()
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim


class MemoryRelease:
    """`release` is called once the need has fallen by DROP_SIZE since its peak, and `repeats` times more, INTERVAL_S
    apart, when the requests of the last clients have ended, too."""

    def __init__(self, release: Callable[[], None] = release_memory, *, repeats: int = 1) -> None:
        self._release = release
        self._repeats = repeats
        self._peak_size = 0
        self._next_s = 0.0
        self._due = 0
        """Number of releases that are due."""

    def check(self, size: int, *, peak_size: int | None = None, now_s: float) -> bool:
        """Return whether memory was released. `size`: the bytes that clients need now; `peak_size`: the most that they
        needed since the last check, because a flood of short connections needs none at most checks; `now_s`: monotonic.
        """
        self._peak_size = max(self._peak_size, size, size if peak_size is None else peak_size)
        has_fallen = self._peak_size - size >= DROP_SIZE
        if not (has_fallen or self._due) or now_s < self._next_s:
            return False
        self._peak_size = size
        self._due = self._repeats if has_fallen else self._due - 1
        self._next_s = now_s + INTERVAL_S
        self._release()
        return True
