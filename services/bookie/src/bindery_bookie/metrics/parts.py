"""Metrics of disks, limbo, damage, repair, scrub and compaction, for which BookKeeper has no names.

| metric                                          | shape   | meaning                                                |
|-------------------------------------------------|---------|--------------------------------------------------------|
| bindery_bookie_directory_free_bytes{path}       | gauge   | of its file system                                     |
| bindery_bookie_directory_total_bytes{path}      | gauge   | of its file system                                     |
| bindery_bookie_directory_writable{path}         | gauge   | 1: writable; 0: full or failed                         |
| bindery_bookie_reserve_held_bytes{path}         | gauge   | bytes kept free for a full disk                        |
| bindery_bookie_limbo{shard}                     | gauge   | 1: storage was lost here and is not repaired yet       |
| bindery_bookie_limbo_ledgers{shard}             | gauge   | ledgers not repaired yet                               |
| bindery_bookie_damage                           | gauge   | known damaged places                                   |
| bindery_bookie_damage_found, _healed            | counter | since the start                                        |
| bindery_bookie_repair_ledgers, _entries, _bytes | counter | ledgers that left limbo, entries and bytes copied      |
| bindery_bookie_repair_failures                  | counter | fetches that failed and are retried                    |
| bindery_bookie_scrub_progress{shard}            | gauge   | of the current round, 0 .. 1                           |
| bindery_bookie_scrub_rounds{shard}              | counter | complete rounds, including earlier processes           |
| bindery_bookie_scrub_verified_seconds{shard}    | gauge   | wall clock: all older data was verified; 0: never      |
| bindery_bookie_scrub_quarantined{shard}         | gauge   | regions known to be bad                                |
| bindery_bookie_gc_live_ratio{shard}             | gauge   | live part of the entry logs; absent without any        |
| bindery_bookie_gc_running{shard,kind}           | gauge   | 1 while removal, minor or major compaction runs        |
| bindery_bookie_metadata_rollback_suspected      | gauge   | 1: no ledgers are deleted; see `rollback_guard`        |
| bindery_bookie_unknown_ledgers                  | gauge   | stored ledgers that the metadata never knew            |

A part has no samples until it exists, for example before the storage is open.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from bindery_bookie.metrics.bookie import BookieMetrics, DirectoryUsage
from bindery_bookie.state import BookieState
from bindery_bookie.storage.collection.collection_interface import CollectionKind
from bindery_bookie.storage.corruption.damage import DamageRegister

if TYPE_CHECKING:
    from bindery_bookie.maintenance.repair import RepairState
    from bindery_bookie.maintenance.rollback_guard import RollbackGuard
    from bindery_bookie.maintenance.storage_watch import DirectoryState
    from bindery_bookie.storage.engine.engine import StorageEngine

Sample = tuple[Mapping[str, str], float]

_KINDS: Final = {"journal": "journal", "ledgers": "ledger"}
"""What a directory holds -> the kind in the name of BookKeeper's metric."""


def add_parts(
    metrics: BookieMetrics,
    shards: "Sequence[StorageEngine]",
    *,
    state: BookieState,
    is_open: Callable[[], bool],
    directories: "Callable[[], Sequence[DirectoryState]]",
    damage: DamageRegister,
    repair: "Callable[[], RepairState | None]",
    guard: "Callable[[], RollbackGuard | None]",
) -> None:
    """Add all metrics of the table above, and BookKeeper's metrics of these parts.

    `repair` and `guard` return None before these parts run.
    """
    _add_bookkeepers(metrics, shards, state, directories)
    _add_directories(metrics, directories)
    _add_damage(metrics, damage, repair)
    _add_rollback(metrics, guard)

    def by_shard(
        name: str, kind: str, help: str, read: "Callable[[StorageEngine], float | None]", *, always: bool = False
    ) -> None:
        def samples() -> list[Sample]:
            if not (always or is_open()):
                return []
            values = [(str(at), read(shard)) for at, shard in enumerate(shards)]
            return [({"shard": at}, value) for at, value in values if value is not None]

        metrics.figure(name, kind, help, samples)

    by_shard("bindery_bookie_limbo", "gauge", "1: storage was lost.", lambda s: s.limbo is not None, always=True)
    by_shard(
        "bindery_bookie_limbo_ledgers",
        "gauge",
        "Ledgers not repaired yet.",
        lambda s: 0 if s.limbo is None else s.limbo.left,
        always=True,
    )
    by_shard(
        "bindery_bookie_scrub_progress",
        "gauge",
        "Fraction of the current round.",
        lambda s: s.scrubber.state().percent / 100,
    )
    by_shard("bindery_bookie_scrub_rounds", "counter", "Complete rounds.", lambda s: s.scrubber.state().rounds)
    by_shard(
        "bindery_bookie_scrub_verified_seconds",
        "gauge",
        "All data older than this was verified.",
        lambda s: s.scrubber.state().oldest_verified_ms / 1000,
    )
    by_shard("bindery_bookie_scrub_quarantined", "gauge", "Quarantined regions.", lambda s: s.scrubber.state().regions)
    by_shard(
        "bindery_bookie_gc_live_ratio",
        "gauge",
        "Live part of the entry logs.",
        lambda s: s.stats.live_bytes / s.stats.entry_log_bytes if s.stats.entry_log_bytes else None,
    )

    def running() -> list[Sample]:
        if not is_open():
            return []
        states = [(str(at), shard.compactor.state().running) for at, shard in enumerate(shards)]
        return [({"shard": at, "kind": kind.value}, kind is now) for at, now in states for kind in CollectionKind]

    metrics.figure("bindery_bookie_gc_running", "gauge", "1 while this kind of garbage collection runs.", running)


def _add_bookkeepers(
    metrics: BookieMetrics,
    shards: "Sequence[StorageEngine]",
    state: BookieState,
    directories: "Callable[[], Sequence[DirectoryState]]",
) -> None:
    def server_status() -> float:
        if not state.registered:
            return -1
        return 0 if state.read_only else 1

    def ledger_counts() -> list[Sample]:
        counts = [shard.ledgers_count for shard in shards]
        return [({}, float(sum(count for count in counts if count is not None)))] if None not in counts else []

    def directory_usages() -> list[DirectoryUsage]:
        return [
            DirectoryUsage(one.path, _KINDS[what], one.usage, not one.is_writable)
            for one in directories()
            for what in one.holds
        ]

    metrics.gauge("bookie_SERVER_STATUS", "1 writable, 0 read-only, -1 not registered.", server_status)
    metrics.figure("bookie_ledgers_count", "gauge", "Ledgers stored here.", ledger_counts)
    metrics.directories = directory_usages


def _add_directories(metrics: BookieMetrics, directories: "Callable[[], Sequence[DirectoryState]]") -> None:
    def show(name: str, help: str, read: "Callable[[DirectoryState], float]") -> None:
        metrics.figure(name, "gauge", help, lambda: [({"path": one.path}, read(one)) for one in directories()])

    show("bindery_bookie_directory_free_bytes", "Bytes of the file system.", lambda one: one.free)
    show("bindery_bookie_directory_total_bytes", "Bytes of the file system.", lambda one: one.total)
    show(
        "bindery_bookie_directory_writable",
        "1 if the directory is writable, 0 if it is full or failed.",
        lambda one: one.is_writable,
    )
    show("bindery_bookie_reserve_held_bytes", "Bytes kept free for a full disk.", lambda one: one.reserve_held)


def _add_damage(metrics: BookieMetrics, damage: DamageRegister, repair: "Callable[[], RepairState | None]") -> None:
    metrics.gauge("bindery_bookie_damage", "Known damaged places.", lambda: len(damage))
    metrics.counter("bindery_bookie_damage_found", "Damaged places found since the start.", lambda: damage.found_count)
    metrics.counter(
        "bindery_bookie_damage_healed", "Damaged places repaired since the start.", lambda: damage.healed_count
    )

    def show(name: str, help: str, read: "Callable[[RepairState], float]") -> None:
        def samples() -> list[Sample]:
            state = repair()
            return [] if state is None else [({}, read(state))]

        metrics.figure(name, "counter", help, samples)

    show("bindery_bookie_repair_ledgers", "Ledgers that left limbo.", lambda state: state.ledgers_done)
    show("bindery_bookie_repair_entries", "Entries copied from other bookies.", lambda state: state.entries_copied)
    show("bindery_bookie_repair_bytes", "Bytes copied from other bookies.", lambda state: state.bytes_copied)
    show("bindery_bookie_repair_failures", "Fetches that failed.", lambda state: state.entries_failed)


def _add_rollback(metrics: BookieMetrics, guard: "Callable[[], RollbackGuard | None]") -> None:
    def show(name: str, help: str, read: "Callable[[RollbackGuard], float]") -> None:
        def samples() -> list[Sample]:
            found = guard()
            return [] if found is None or not found.state.checked_ms else [({}, read(found))]

        metrics.figure(name, "gauge", help, samples)

    show(
        "bindery_bookie_metadata_rollback_suspected",
        "1 if no ledgers are deleted because the metadata may have been rolled back.",
        lambda found: found.state.is_suspected,
    )
    show(
        "bindery_bookie_unknown_ledgers",
        "Stored ledgers that the metadata never knew.",
        lambda found: 0 if found.own_report is None else found.own_report.unknown,
    )
