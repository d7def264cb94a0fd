"""Derive the memory budgets of a bookie's parts from the maximum of the whole process.

    memory_size_max = BASE_SIZE + rest, and shares of the rest:

| part                                           | setting                         |  share | times | of the rest |
|------------------------------------------------|---------------------------------|-------:|------:|------------:|
| write caches: active and flushing              | storage.write_cache_size_max    | 12.5 % |     2 |        25 % |
| adds in progress, refused beyond twice that    | server.adds_size_max            |  7.5 % |     2 |        15 % |
| incomplete frames; of paused clients twice it  | server.unfinished_size_max      |    4 % |     3 |        12 % |
| read responses, half as much for new addresses | server.reads_size_max           |    8 % |   1.5 |        12 % |
| connections with TLS, SECURED_SIZE each        | server.secured_connections_max  |   10 % |     1 |        10 % |
| entries read and read ahead                    | storage.read_cache_size_max     |   12 % |     1 |        12 % |
| LevelDB: blocks                                | storage.index_block_cache_size  |    3 % |     1 |         3 % |
| LevelDB: tables in memory, one being written   | storage.index_write_buffer_size |    2 % |     2 |         4 % |
| waiting reads, PENDING_READ_SIZE each          | server.pending_reads_max        |    3 % |     1 |         3 % |
| state of ledgers, LEDGER_SIZE each             | storage.ledgers_max             |    4 % |     1 |         4 % |

A setting that an operator sets keeps its value; the others are still derived from `memory_size_max`, within the bounds
of their settings. Budgets of the storage apply to all shards together. Adds that wait for a write cache are adds in
progress: `storage.waiting_size_max` is `server.adds_size_max`. Entries that are being read from disk become responses:
`storage.read_job_size_max` is `server.reads_size_max`.

BASE_SIZE covers the interpreter with all imports of a bookie, its threads, its HTTP server, the buffers that do not
depend on load (the group being written to the journal, the chunk being written to an entry log), and, each with its
default, connections without requests (8 MiB) and TLS handshakes (20 MiB). Three limits of `server` do not depend on
the maximum of the process: `unread_size_max` (32 MiB), and the numbers of operations (10 MiB) and of long polls
(10 MiB). Only hostile clients reach them together; the memory limit of a container is therefore higher.
"""

from collections.abc import Mapping
from typing import Final

from bindery_kit.configuration.bounds import Ge, Le
from bindery_kit.configuration.settings import Settings

KIB: Final = 1024
MIB: Final = 1024 * KIB

BASE_SIZE: Final = 100 * MIB
"""Bytes that a bookie uses without load."""
SIZE_MIN: Final = 160 * MIB
"""Minimum of `memory_size_max` in bytes."""
PENDING_READ_SIZE: Final = 256
"""Bytes that a waiting read takes."""
LEDGER_SIZE: Final = 1 * KIB
"""Bytes that the state of a ledger takes."""
SECURED_SIZE: Final = 300 * KIB
"""Bytes that a connection with TLS takes: uvloop keeps a buffer of as much as a client may send at once."""

_SHARES: Final[Mapping[str, float]] = {
    "storage.write_cache_size_max": 0.125,
    "storage.waiting_size_max": 0.075,
    "storage.read_cache_size_max": 0.12,
    "storage.read_job_size_max": 0.08,
    "storage.index_block_cache_size": 0.03,
    "storage.index_write_buffer_size": 0.02,
    "storage.ledgers_max": 0.04 / LEDGER_SIZE,
    "server.adds_size_max": 0.075,
    "server.unfinished_size_max": 0.04,
    "server.reads_size_max": 0.08,
    "server.pending_reads_max": 0.03 / PENDING_READ_SIZE,
    "server.secured_connections_max": 0.10 / SECURED_SIZE,
}


def derived(group: str, memory_size_max: int) -> dict[str, int]:
    """Return setting -> value for the group `storage` or `server` of a bookie with `memory_size_max` bytes."""
    rest = memory_size_max - BASE_SIZE
    assert rest > 0
    return {
        name.removeprefix(f"{group}."): int(share * rest)
        for name, share in _SHARES.items()
        if name.startswith(f"{group}.")
    }


def divided(settings: Settings, names: Mapping[str, int]) -> dict[str, int]:
    """Return the settings in `names`, each divided by its number in `names`, but not below the setting's minimum."""
    return {name: allowed(type(settings), name, getattr(settings, name) // parts) for name, parts in names.items()}


def allowed(cls: type[Settings], name: str, value: int) -> int:
    """Return the number nearest to `value` within the bounds of the setting."""
    for rule in cls.model_fields[name].bounds:
        if isinstance(rule, Ge):
            value = max(value, int(rule.limit))
        elif isinstance(rule, Le):
            value = min(value, int(rule.limit))
    return value
