"""Log usage: determine the ledgers of each entry log, and how much of the log is live.

`UsageTable` keeps the usage of all entry logs between runs of garbage collection, because a closed log never changes.

A ledger is live while the index has a row for it. A deleted ledger counts as live until a flush has removed its rows,
so that no crash can leave rows that refer to a removed log. The ledgers of a log are read from its ledgers map. A log
without a map (its bookie crashed) is scanned; for a damaged log the index is read too.

A `deleted` record prevents an index rebuild from restoring entries of that ledger from older logs. It is needed, and
counts as live, as long as an older log has records of the ledger.

Everything here blocks and must run in a worker, except LogUsage and the methods of UsageTable for the event loop.
Memory: 16 bytes per ledger and log.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bindery_core.errors import BinderyError

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection.collection_interface import LogInfo, LogState
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.stats import StorageStats

DELETION_SIZE: Final = fmt.RECORD_HEADER_SIZE + control.CONTROL_SIZE_MIN
"""Size in bytes of a `deleted` record in an entry log, including its header."""
_INDEX_STEP_ROWS: Final = 4096
_ROW_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class LogUsage:
    """The content of one closed log."""

    log_id: int
    order: int
    """See `log_manifest`."""
    size: int
    """Size of the file in bytes."""
    ledger_ids: Sequence[int]
    """Ledgers with records in the log, ascending."""
    sizes: Sequence[int]
    """Bytes of records per ledger, in the order of `ledger_ids`."""
    deletions: frozenset[int]
    """Ledgers with a `deleted` record."""
    is_exact: bool
    """False: parts of the log cannot be read, and may have contained control records of any ledger."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """The live part of a log."""

    live_bytes: int
    """Bytes of the file without the records of dead ledgers; 0 if nothing in it is needed."""
    live_ledgers: int
    deletions: frozenset[int]
    """Ledgers whose `deleted` record is needed."""
    may_hold_control: bool = False
    """Whether unreadable parts may have contained master keys or fences of live ledgers. A rewrite then writes the
    control records of all live ledgers."""

    @property
    def is_dead(self) -> bool:
        return not self.live_ledgers and not self.deletions and not self.may_hold_control


def usage_of(
    log_id: int, order: int, size: int, sizes: Mapping[int, int], deletions: Iterable[int], *, is_exact: bool = True
) -> LogUsage:
    """Return the LogUsage of a log. `sizes`: ledger id -> bytes of its records in the log."""
    ids = array("q", sorted(sizes))
    return LogUsage(
        log_id,
        order,
        size,
        ids,
        array("Q", (sizes[ledger_id] for ledger_id in ids)),
        frozenset(deletions),
        is_exact=is_exact,
    )


def read_usage(disk: Disk, directory: str, log_id: int, order: int) -> LogUsage | None:
    """Return the usage from the ledgers map; None if there is no readable map (see UsageCount). Raises OSError."""
    path = f"{directory}/{fmt.file_name(log_id)}"
    file = disk.open_read(path)
    try:
        fmt.check_file_header(file, path=path, log_id=log_id)
        found = fmt.read_ledgers_and_deletions(file, path=path)
        return None if found is None else usage_of(log_id, order, file.size(), *found)
    except BinderyError:
        return None
    finally:
        file.close()


class UsageCount:
    """Counts the usage of a log without a ledgers map, in steps."""

    def __init__(self, disk: Disk, directory: str, log_id: int, order: int, index: Index, end: LogEnd) -> None:
        """`end`: the expected end of the log. The usage of a truncated log is not exact."""
        self._end = end
        self._scanner = EntryLogScanner(disk, directory)
        self._log_id = log_id
        self._order = order
        self._index = index
        self._sizes: dict[int, int] = {}
        self._deletions: set[int] = set()
        self._is_exact = True
        self.usage: LogUsage | None = None

    def steps(self) -> Iterator[int]:
        """Count; yield the bytes read per step. `usage` is set at the end. Raises OSError, DamagedStorage (index)."""
        for step in self._scanner.steps(self._log_id, stop=self._end.stop, is_sealed=self._end.is_sealed):
            self._is_exact = self._is_exact and not step.damage
            for record in step.records:
                size = fmt.RECORD_HEADER_SIZE + len(record.body)
                self._sizes[record.ledger_id] = self._sizes.get(record.ledger_id, 0) + size
                # After damage a record may be part of a payload, which must not delete anything.
                if record.entry_id == control.DELETED and record.is_anchored:
                    self._deletions.add(record.ledger_id)
            yield step.work_size
        if not self._is_exact:
            yield from self._count_rows()
        size = self._scanner.size(self._log_id)
        self.usage = usage_of(self._log_id, self._order, size, self._sizes, self._deletions, is_exact=self._is_exact)

    def _count_rows(self) -> Iterator[int]:
        """Count entries that the index places in parts of the log that could not be scanned."""
        counted: dict[int, int] = {}
        work = 0
        rows = self._index.rows(start=index_format.RUN_KEY_START, stop=index_format.RUN_KEY_STOP)
        for number, (key, value) in enumerate(rows):
            work += len(key) + len(value)
            if index_format.location_of(value) >> fmt.OFFSET_BITS == self._log_id:
                run = index_format.unpack_run(key, value)
                counted[run.ledger_id] = counted.get(run.ledger_id, 0) + run.size + fmt.RECORD_HEADER_SIZE
            if number % _INDEX_STEP_ROWS == 0:
                yield work
                work = 0
        for ledger_id, size in counted.items():
            self._sizes[ledger_id] = max(self._sizes.get(ledger_id, 0), size)


def live_ledger_ids(index: Index) -> Sequence[int]:
    """Return the ledgers with a row in the index, ascending."""
    return array("q", index.ledger_ids())


def is_in(ascending: Sequence[int], wanted: int) -> bool:
    """Return True if the ascending sequence contains `wanted`, by binary search."""
    at = bisect_left(ascending, wanted)
    return at < len(ascending) and ascending[at] == wanted


def livenesses(usages: Mapping[int, LogUsage], live: Sequence[int]) -> Iterator[tuple[int, Liveness]]:
    """Yield (log id, liveness). `usages`: all closed logs; `live`: live ledgers, ascending."""
    deleted = frozenset[int]().union(*(usage.deletions for usage in usages.values()))
    oldest: dict[int, int] = {}
    """Ledgers with a `deleted` record in any log -> the order of the first log with records of the ledger."""
    for usage in usages.values():
        for ledger_id in deleted.intersection(usage.ledger_ids) if deleted else ():
            oldest[ledger_id] = min(usage.order, oldest.get(ledger_id, usage.order))
    for log_id, usage in usages.items():
        dead = live_count = 0
        for ledger_id, size in zip(usage.ledger_ids, usage.sizes, strict=True):
            if is_in(live, ledger_id):
                live_count += 1
            else:
                dead += size
        deletions = usage.deletions
        needed = frozenset(deleted_id for deleted_id in deletions if oldest.get(deleted_id, usage.order) < usage.order)
        dead -= DELETION_SIZE * sum(not is_in(live, ledger_id) for ledger_id in needed)
        has_nothing = not live_count and not needed
        may_hold_control = not usage.is_exact and len(live) > 0
        live_bytes = int(may_hold_control) if has_nothing else max(usage.size - dead, 0)
        yield log_id, Liveness(live_bytes, live_count, needed, may_hold_control)


@dataclass(slots=True)
class _Refresh:
    """The result of one refresh."""

    open_ledgers: Mapping[int, int]
    usages: dict[int, LogUsage] = field(default_factory=dict)
    alive: dict[int, Liveness] = field(default_factory=dict)
    infos: dict[int, LogInfo] = field(default_factory=dict)
    live: Sequence[int] = ()
    open_info: LogInfo | None = None


class UsageTable:
    """Usage of all entry logs. `refresh` runs in a worker, one at a time, and changes only its own result.

    The other methods are for the event loop; `accept` replaces the table by the result of the last `refresh`.
    """

    def __init__(self, disk: Disk, directory: str, index: Index) -> None:
        self._disk = disk
        self._directory = directory
        self._index = index
        self.usages: dict[int, LogUsage] = {}
        """Usage of closed logs."""
        self.alive: dict[int, Liveness] = {}
        """Liveness of closed logs. A dead ledger never becomes live again, so a log that is dead here stays dead."""
        self.infos: dict[int, LogInfo] = {}
        """All logs."""
        self.live: Sequence[int] = ()
        """Live ledgers at the last refresh, ascending."""
        self.open_ledgers: Mapping[int, int] = {}
        """Bytes by ledger id in the open log."""
        self.open_info: LogInfo | None = None
        self._refreshed = _Refresh({})

    def refresh(
        self,
        manifest: LogManifest,
        closed_below: int,
        *,
        end: Callable[[int], LogEnd],
        open_ledgers: Mapping[int, int],
        damaged: Container[int],
        now_ms: int,
    ) -> Generator[int, None, None]:
        """Determine the usage of all logs; yield the bytes read per step. Raises OSError, DamagedStorage (index).

        `closed_below`, `end`: see Flusher. `open_ledgers`: bytes by ledger id in the open log. `damaged`: logs known to
        be damaged.
        """
        result = self._refreshed = _Refresh(open_ledgers=open_ledgers)
        sizes: dict[int, int] = {}
        for log_id in list_logs(self._disk, self._directory):
            if manifest.is_absent(log_id):
                continue
            if log_id not in manifest.compacted and log_id >= closed_below:
                sizes[log_id] = self._size(log_id)
                continue
            usage, order = self.usages.get(log_id), manifest.order(log_id)
            if usage is None:
                usage = read_usage(self._disk, self._directory, log_id, order)
                yield _ROW_SIZE * len(usage.ledger_ids) if usage is not None else 0
            if usage is None:
                count = UsageCount(self._disk, self._directory, log_id, order, self._index, end(log_id))
                yield from count.steps()
                usage = count.usage
                assert usage is not None
            result.usages[log_id] = usage
        result.live = live_ledger_ids(self._index)
        for log_id, alive in livenesses(result.usages, result.live):
            result.alive[log_id] = alive
            state = LogState.DAMAGED if log_id in damaged else None
            result.infos[log_id] = _info(result.usages[log_id], alive, now_ms, state)
            yield 0
        for log_id, size in sizes.items():
            ledgers = open_ledgers if log_id == min(sizes) else {}
            info = result.infos[log_id] = _open_info(log_id, size, ledgers, result.live, now_ms)
            result.open_info = result.open_info or info

    def accept(self, stats: StorageStats) -> None:
        """Use the result of the last `refresh`, and set the gauges."""
        result = self._refreshed
        self.usages, self.alive, self.infos = result.usages, result.alive, result.infos
        self.live, self.open_ledgers, self.open_info = result.live, result.open_ledgers, result.open_info
        stats.entry_logs = len(self.infos)
        stats.entry_log_bytes = sum(info.size for info in self.infos.values())
        stats.live_bytes = sum(info.live_bytes for info in self.infos.values())
        stats.dead_bytes = stats.entry_log_bytes - stats.live_bytes
        stats.active_ledgers = len(self.live)

    def dead(self) -> list[int]:
        """Return the logs without live entries or needed records, by order."""
        found = [log_id for log_id, alive in self.alive.items() if alive.is_dead]
        return sorted(found, key=lambda log_id: self.usages[log_id].order)

    def below(self, threshold: float) -> list[int]:
        """Return the closed logs with a live ratio below `threshold`, the sparsest first."""
        ratios = {
            log_id: alive.live_bytes / self.usages[log_id].size
            for log_id, alive in self.alive.items()
            if not alive.is_dead
        }
        found = [log_id for log_id, ratio in ratios.items() if ratio < threshold]
        return sorted(found, key=lambda log_id: (ratios[log_id], log_id))

    def drop(self, log_id: int) -> None:
        """Record that a log was removed."""
        for by_log in (self.usages, self.alive, self.infos):
            by_log.pop(log_id, None)

    def replace(self, log_id: int, target: LogUsage, now_ms: int) -> None:
        """Record that a log was replaced by `target`."""
        alive = Liveness(target.size, len(target.ledger_ids), target.deletions)
        self.drop(log_id)
        self.usages[target.log_id], self.alive[target.log_id] = target, alive
        self.infos[target.log_id] = _info(target, alive, now_ms)

    def mark_damaged(self, log_id: int) -> None:
        if log_id in self.infos:
            self.infos[log_id] = replace(self.infos[log_id], state=LogState.DAMAGED)

    def _size(self, log_id: int) -> int:
        try:
            file = self._disk.open_read(f"{self._directory}/{fmt.file_name(log_id)}")
        except FileNotFoundError:
            return 0  # a failed flush removed it
        try:
            return file.size()
        finally:
            file.close()


def _info(usage: LogUsage, alive: Liveness, now_ms: int, state: LogState | None = None) -> LogInfo:
    if state is None:
        state = LogState.COMPACTED if usage.order != usage.log_id else LogState.SEALED
    return LogInfo(
        usage.log_id,
        fmt.file_name(usage.log_id),
        state,
        usage.size,
        alive.live_bytes,
        alive.live_bytes / usage.size,
        alive.live_ledgers,
        len(usage.ledger_ids) - alive.live_ledgers,
        usage.order,
        now_ms,
    )


def _open_info(log_id: int, size: int, ledgers: Mapping[int, int], live: Sequence[int], now_ms: int) -> LogInfo:
    dead = [held for ledger_id, held in ledgers.items() if not is_in(live, ledger_id)]
    live_bytes = max(size - sum(dead), 0)
    return LogInfo(
        log_id,
        fmt.file_name(log_id),
        LogState.OPEN,
        size,
        live_bytes,
        live_bytes / size if size else 1.0,
        len(ledgers) - len(dead),
        len(dead),
        log_id,
        now_ms,
    )
