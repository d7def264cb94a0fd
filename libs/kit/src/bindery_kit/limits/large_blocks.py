"""Return large blocks of memory to the system as soon as they are freed.

By default glibc keeps freed blocks of up to 32 MiB, in up to eight pools per core between which it distributes the
threads. A process that handles blocks of 16 MiB in threads then takes several times the memory of those that exist.
With fixed thresholds and one pool it takes what exists. Each large block costs page faults: some milliseconds for
16 MiB.
Source: mallopt(3).
"""

import ctypes
from typing import Final

LARGE_SIZE: Final = 2**20
"""Bytes from which on a block is mapped on its own, and unmapped when it is freed."""
TRIM_SIZE: Final = 8 * 2**20
"""Bytes of free memory at the end of the heap above which it is returned."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8


def return_large_blocks() -> bool:
    """Call it before the process has threads. Returns False if the C library is not glibc; then nothing changes."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, LARGE_SIZE), (_M_TRIM_THRESHOLD, TRIM_SIZE))
    return all(mallopt(option, value) for option, value in options)
