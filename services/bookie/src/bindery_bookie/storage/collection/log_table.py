"""LogTable: the usage of all entry logs, kept from one look to the next: a log that is closed never changes."""

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bindery_bookie.storage.collection.garbage import LogInfo, LogState
from bindery_bookie.storage.collection.log_usage import (
    Liveness,
    LogUsage,
    UsageCount,
    is_in,
    live_ledger_ids,
    livenesses,
    read_usage,
)
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogManifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.stats import StorageStats

_ROW_SIZE: Final = 16


@dataclass(slots=True)
class _Look:
    """What one look found."""

    open_ledgers: Mapping[int, int]
    usages: dict[int, LogUsage] = field(default_factory=dict)
    alive: dict[int, Liveness] = field(default_factory=dict)
    infos: dict[int, LogInfo] = field(default_factory=dict)
    live: Sequence[int] = ()
    open_info: LogInfo | None = None


class LogTable:
    """`look` runs in a worker, one at a time, and changes nothing that others see; the rest runs in the event loop."""

    def __init__(self, disk: Disk, directory: str, index: Index) -> None:
        self._disk = disk
        self._directory = directory
        self._index = index
        self.usages: dict[int, LogUsage] = {}
        """Of closed logs."""
        self.alive: dict[int, Liveness] = {}
        """As `usages`. Ledgers only die: what this calls dead stays dead."""
        self.infos: dict[int, LogInfo] = {}
        """Of all."""
        self.live: Sequence[int] = ()
        """Ledgers alive at the last look, ascending."""
        self.open_ledgers: Mapping[int, int] = {}
        """Bytes by ledger id in the log being written."""
        self.open_info: LogInfo | None = None
        self._looked = _Look({})

    def look(
        self,
        manifest: LogManifest,
        closed_below: int,
        *,
        end: Callable[[int], LogEnd],
        open_ledgers: Mapping[int, int],
        damaged: Container[int],
        now_ms: int,
    ) -> Generator[int, None, None]:
        """Bytes worked, step by step; `accept` makes it count. Raises OSError, DamagedStorage (the index).

        `closed_below`, `end`: see Flusher. `open_ledgers`: of the log being written. `damaged`: logs to be called so.
        """
        looked = self._looked = _Look(open_ledgers=open_ledgers)
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
            looked.usages[log_id] = usage
        looked.live = live_ledger_ids(self._index)
        for log_id, alive in livenesses(looked.usages, looked.live):
            looked.alive[log_id] = alive
            state = LogState.DAMAGED if log_id in damaged else None
            looked.infos[log_id] = _info(looked.usages[log_id], alive, now_ms, state)
            yield 0
        for log_id, size in sizes.items():
            ledgers = open_ledgers if log_id == min(sizes) else {}
            info = looked.infos[log_id] = _open_info(log_id, size, ledgers, looked.live, now_ms)
            looked.open_info = looked.open_info or info

    def accept(self, stats: StorageStats) -> None:
        """Go by what `look` found, and put the gauges."""
        looked = self._looked
        self.usages, self.alive, self.infos = looked.usages, looked.alive, looked.infos
        self.live, self.open_ledgers, self.open_info = looked.live, looked.open_ledgers, looked.open_info
        stats.entry_logs = len(self.infos)
        stats.entry_log_bytes = sum(info.size for info in self.infos.values())
        stats.live_bytes = sum(info.live_bytes for info in self.infos.values())
        stats.active_ledgers = len(self.live)

    def dead(self) -> list[int]:
        """Logs in which nothing is needed, by order."""
        found = [log_id for log_id, alive in self.alive.items() if alive.is_dead]
        return sorted(found, key=lambda log_id: self.usages[log_id].order)

    def below(self, threshold: float) -> list[int]:
        """Closed logs with a smaller live ratio, the sparsest first."""
        ratios = {
            log_id: alive.live_bytes / self.usages[log_id].size
            for log_id, alive in self.alive.items()
            if not alive.is_dead
        }
        found = [log_id for log_id, ratio in ratios.items() if ratio < threshold]
        return sorted(found, key=lambda log_id: (ratios[log_id], log_id))

    def drop(self, log_id: int) -> None:
        """It was removed."""
        for by_log in (self.usages, self.alive, self.infos):
            by_log.pop(log_id, None)

    def replace(self, log_id: int, target: LogUsage, now_ms: int) -> None:
        """It was rewritten."""
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
            return 0  # a flush that failed took it back
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
