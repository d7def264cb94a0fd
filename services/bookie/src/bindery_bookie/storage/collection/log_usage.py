"""Log usage: which ledgers each entry log holds, and how much of it is alive.

A ledger is alive while the index has a row for it: a deleted one dies when a flush has removed its rows, not before,
so that a crash cannot leave rows that point into a removed log. Which ledgers a log holds is told by its ledgers map; a
log without one (its bookie crashed) is scanned, and one that is damaged is looked up in the index as well.

A `deleted` record keeps an index rebuild from bringing back what older logs hold of that ledger. It is needed, and
counts as alive, as long as such a log exists.

All but `LogUsage` itself blocks: for a worker. Memory: 16 bytes per ledger and log.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BinderyError

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner
from bindery_bookie.storage.entry_log.log_manifest import LogEnd
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk

DELETION_SIZE: Final = fmt.RECORD_HEADER_SIZE + control.CONTROL_SIZE_MIN
_INDEX_STEP_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class LogUsage:
    """What one log that is closed holds."""

    log_id: int
    order: int
    """See `log_manifest`."""
    size: int
    """Bytes of the file."""
    ledger_ids: Sequence[int]
    """Ascending."""
    sizes: Sequence[int]
    """Bytes of records, as `ledger_ids`."""
    deletions: frozenset[int]
    """Ledgers with a `deleted` record."""
    is_exact: bool
    """False: parts of the log cannot be read; control records of any ledger may have been there."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """What of a log is alive."""

    live_bytes: int
    """Of the file: all but the records of dead ledgers; 0 when nothing in it is needed."""
    live_ledgers: int
    deletions: frozenset[int]
    """`deleted` records that are needed."""
    may_hold_control: bool = False
    """Parts cannot be read that may have held keys or fences of living ledgers: to be rewritten, with those of all."""

    @property
    def is_dead(self) -> bool:
        return not self.live_ledgers and not self.deletions and not self.may_hold_control


def usage_of(
    log_id: int, order: int, size: int, sizes: Mapping[int, int], deletions: Iterable[int], *, is_exact: bool = True
) -> LogUsage:
    ids = array("q", sorted(sizes))
    return LogUsage(
        log_id, order, size, ids, array("Q", (sizes[one] for one in ids)), frozenset(deletions), is_exact=is_exact
    )


def read_usage(disk: Disk, directory: str, log_id: int, order: int) -> LogUsage | None:
    """By its ledgers map; None when it has none that can be read: then `count_usage`. Raises OSError."""
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
    """Counts a log without a ledgers map, in steps."""

    def __init__(self, disk: Disk, directory: str, log_id: int, order: int, index: Index, end: LogEnd) -> None:
        """`end`: a log that was cut may have held anything behind the cut."""
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
        """Bytes worked, step by step; `usage` is there at the end. Raises OSError, DamagedStorage (the index)."""
        for step in self._scanner.steps(self._log_id, stop=self._end.stop, is_sealed=self._end.is_sealed):
            self._is_exact = self._is_exact and not step.damage
            for record in step.records:
                size = fmt.RECORD_HEADER_SIZE + len(record.body)
                self._sizes[record.ledger_id] = self._sizes.get(record.ledger_id, 0) + size
                # Behind damage a record may be part of a payload, which must not delete anything.
                if record.entry_id == control.DELETED and record.is_anchored:
                    self._deletions.add(record.ledger_id)
            yield step.work_size
        if not self._is_exact:
            yield from self._ask_index()
        size = self._scanner.size(self._log_id)
        self.usage = usage_of(self._log_id, self._order, size, self._sizes, self._deletions, is_exact=self._is_exact)

    def _ask_index(self) -> Iterator[int]:
        """The index says which entries lie where the scan saw nothing."""
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
    """Ledgers with a row in the index, ascending."""
    return array("q", index.ledger_ids())


def is_in(ascending: Sequence[int], wanted: int) -> bool:
    at = bisect_left(ascending, wanted)
    return at < len(ascending) and ascending[at] == wanted


def livenesses(usages: Mapping[int, LogUsage], live: Sequence[int]) -> Iterator[tuple[int, Liveness]]:
    """By log id. `usages`: all logs that are closed; `live`: ledgers alive, ascending."""
    deleted = frozenset[int]().union(*(usage.deletions for usage in usages.values()))
    oldest: dict[int, int] = {}
    """Ledgers with a `deleted` record somewhere -> the order of the first log that holds them."""
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
        needed = frozenset(one for one in usage.deletions if oldest.get(one, usage.order) < usage.order)
        dead -= DELETION_SIZE * sum(not is_in(live, one) for one in needed)
        has_nothing = not live_count and not needed
        may_hold_control = not usage.is_exact and len(live) > 0
        live_bytes = int(may_hold_control) if has_nothing else max(usage.size - dead, 0)
        yield log_id, Liveness(live_bytes, live_count, needed, may_hold_control)
