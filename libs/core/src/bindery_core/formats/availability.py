"""Availability: the entries of a ledger that a bookie holds, in the response to GET_LIST_OF_ENTRIES_OF_LEDGER.

Integers are big-endian.

| offset       | size | type | field       | meaning                                                      |
|-------------:|-----:|------|-------------|--------------------------------------------------------------|
|            0 |    4 | i32  | version     | 0                                                            |
|            4 |    4 | i32  | group_count |                                                              |
|            8 |   56 | raw  | reserved    | zeroes                                                       |
| 64 + 24 * i  |    8 | i64  | first_start | first entry id of the group's first run                      |
|        +  8  |    8 | i64  | last_start  | first entry id of its last run                               |
|        + 16  |    4 | i32  | run_size    | entries in each run                                          |
|        + 20  |    4 | i32  | period      | distance from one run's start to the next; 0: only one run   |

BookKeeper's encoder and ours write every run as a separate group; readers accept groups of many runs as well.
Source: BookKeeper AvailabilityOfEntriesOfLedger.
"""

import struct
from collections.abc import Sequence
from typing import Final

from bindery_core.errors import BadVersion, Corrupt, TooLarge

_HEADER = struct.Struct(">ii56x")
_GROUP = struct.Struct(">qqii")
HEADER_SIZE: Final = 64
"""Bytes of the header."""
GROUP_SIZE: Final = 24
"""Bytes of a group."""
VERSION: Final = 0
"""Version of the format, the only one that is supported."""
RUN_SIZE_MAX: Final = 2**31 - 1
"""Maximum number of entries in a run: the range of the field."""
RUN_COUNT_MAX: Final = 10_000_000
"""Maximum number of runs that `decode` returns: one group can describe more runs than memory can hold."""

assert _HEADER.size == HEADER_SIZE
assert _GROUP.size == GROUP_SIZE


def encode(runs: Sequence[tuple[int, int]]) -> bytes:
    """Encode `runs`: (first entry id, count), ascending, not adjacent. A run over 2^31 - 1 entries is split."""
    groups = []
    end = -1
    for first, count in runs:
        assert first > end
        assert count > 0
        end = first + count
        while count > 0:
            size = min(count, RUN_SIZE_MAX)
            groups.append(_GROUP.pack(first, first, size, 0))
            first += size
            count -= size
    return b"".join((_HEADER.pack(VERSION, len(groups)), *groups))


def decode(data: bytes) -> list[tuple[int, int]]:
    """Return the runs (first entry id, count). Raises BadVersion, Corrupt, or TooLarge above RUN_COUNT_MAX runs."""
    if len(data) < HEADER_SIZE:
        raise Corrupt("availability is cut off", size=len(data))
    version, group_count = _HEADER.unpack_from(data)
    if version != VERSION:
        raise BadVersion("unsupported version of the availability format", version=version)
    if group_count < 0 or len(data) != HEADER_SIZE + group_count * GROUP_SIZE:
        raise Corrupt("the size of the availability does not match its groups", size=len(data), group_count=group_count)
    runs: list[tuple[int, int]] = []
    for first_start, last_start, run_size, period in _GROUP.iter_unpack(data[HEADER_SIZE:]):
        single = first_start == last_start
        if (
            first_start < 0
            or last_start < first_start
            or run_size < 1
            or (not single and (period < run_size or (last_start - first_start) % period))
        ):
            raise Corrupt(
                "availability contains an invalid group",
                first_start=first_start,
                last_start=last_start,
                run_size=run_size,
                period=period,
            )
        run_count = 1 if single else (last_start - first_start) // period + 1
        if len(runs) + run_count > RUN_COUNT_MAX:
            raise TooLarge("availability contains too many runs", run_count_max=RUN_COUNT_MAX)
        runs += ((first_start + index * period, run_size) for index in range(run_count))
    return runs
