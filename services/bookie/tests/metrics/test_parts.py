"""Metrics of disks, limbo, damage, repair, scrub and garbage collection, over fakes of these parts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_bookie.maintenance.repair import RepairState
from bindery_bookie.maintenance.rollback_guard import RollbackState
from bindery_bookie.maintenance.storage_watch import DirectoryState, DirectoryStatus
from bindery_bookie.metrics.bookie import BookieMetrics
from bindery_bookie.metrics.parts import add_parts
from bindery_bookie.state import BookieState
from bindery_bookie.storage.collection.collection_interface import CollectionKind
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState
from bindery_bookie.storage.scrub.scrub import ScrubState
from bindery_bookie.storage.stats import StorageStats
from bindery_metadata.ledgers.known_ledgers import RollbackReport

STATE = ScrubState(True, "entries", (7, 8), 12.5, 3, 11, 9, 10, 9_500, 0, 100, 2000, 1e6, 4, "")


class Shard:
    """What the metrics read of an engine."""

    def __init__(self) -> None:
        self.limbo: LimboState | None = None
        self.stats = StorageStats()
        self.ledgers_count: int | None = 0
        self.scrub = STATE
        self.running: CollectionKind | None = None
        self.is_open = True

    @property
    def scrubber(self) -> "Part":
        assert self.is_open
        return Part(self.scrub)

    @property
    def compactor(self) -> "Part":
        assert self.is_open
        return Part(self)


class Part:
    def __init__(self, found: Any) -> None:
        self._found = found

    def state(self) -> Any:
        return self._found


class World:
    def __init__(self, shards: int = 2) -> None:
        self.shards = [Shard() for _ in range(shards)]
        self.state = BookieState()
        self.directories: list[DirectoryState] = []
        self.damage = DamageRegister()
        self.repair: RepairState | None = None
        self.guard: Any = None
        self.metrics = BookieMetrics(clock=lambda: 0.0)
        made: Any = self.shards
        add_parts(
            self.metrics,
            made,
            state=self.state,
            is_open=lambda: all(shard.is_open for shard in self.shards),
            directories=lambda: self.directories,
            damage=self.damage,
            repair=lambda: self.repair,
            guard=lambda: self.guard,
        )

    def close(self) -> None:
        for shard in self.shards:
            shard.is_open = False

    def page(self, prefix: str = "bindery_bookie_") -> dict[str, float]:
        """Return the samples of the page by name and labels. Assert that every figure can be read."""
        lines = self.metrics.render().decode().splitlines()
        found = {}
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        assert found["bindery_bookie_metrics_broken"] == 0
        return {name: value for name, value in found.items() if name.startswith(prefix)}

    def kind(self, name: str) -> str:
        (kind,) = [
            line.split()[-1]
            for line in self.metrics.render().decode().splitlines()
            if line.startswith(f"# TYPE {name} ")
        ]
        return kind


def directory(path: str, **changes: Any) -> DirectoryState:
    made = DirectoryState(
        path=path,
        holds=("ledgers",),
        status=DirectoryStatus.OK,
        reason="",
        total=1000,
        free=400,
        usage=0.6,
        reserve_size=50,
        reserve_held=20,
        since_ms=0,
        last_check_ms=0,
    )
    return replace(made, **changes)


# --- shards


def test_limbo_is_shown_by_shard_even_during_the_start() -> None:
    world = World()
    world.shards[1].limbo = LimboState("lost", 5, LimboPhase.LISTING, 3)
    world.close()
    assert world.page("bindery_bookie_limbo") == {
        'bindery_bookie_limbo{shard="0"}': 0,
        'bindery_bookie_limbo{shard="1"}': 1,
        'bindery_bookie_limbo_ledgers{shard="0"}': 0,
        'bindery_bookie_limbo_ledgers{shard="1"}': 3,
    }


def test_the_scrub_is_shown_by_shard() -> None:
    world = World()
    world.shards[1].scrub = replace(STATE, percent=100.0, rounds=0, oldest_verified_ms=0, regions=0)
    assert world.page("bindery_bookie_scrub") == {
        'bindery_bookie_scrub_progress{shard="0"}': 0.125,
        'bindery_bookie_scrub_progress{shard="1"}': 1,
        'bindery_bookie_scrub_rounds{shard="0"}': 3,
        'bindery_bookie_scrub_rounds{shard="1"}': 0,
        'bindery_bookie_scrub_verified_seconds{shard="0"}': 9.5,
        'bindery_bookie_scrub_verified_seconds{shard="1"}': 0,
        'bindery_bookie_scrub_quarantined{shard="0"}': 4,
        'bindery_bookie_scrub_quarantined{shard="1"}': 0,
    }
    assert world.kind("bindery_bookie_scrub_rounds") == "counter"
    assert world.kind("bindery_bookie_scrub_progress") == "gauge"


def test_the_live_part_is_absent_without_entry_logs() -> None:
    world = World()
    world.shards[1].stats.entry_log_bytes = 200
    world.shards[1].stats.live_bytes = 50
    assert world.page("bindery_bookie_gc_live_ratio") == {'bindery_bookie_gc_live_ratio{shard="1"}': 0.25}


def test_one_kind_of_garbage_collection_runs_at_a_time() -> None:
    world = World()
    world.shards[1].running = CollectionKind.MAJOR
    found = world.page("bindery_bookie_gc_running")
    assert len(found) == 2 * len(CollectionKind)
    assert [name for name, value in found.items() if value] == [
        f'bindery_bookie_gc_running{{shard="1",kind="{CollectionKind.MAJOR.value}"}}'
    ]


def test_before_the_storage_is_open_there_are_no_samples_of_its_parts() -> None:
    world = World()
    world.close()
    assert world.page("bindery_bookie_scrub") == {}
    assert world.page("bindery_bookie_gc") == {}


# --- BookKeeper's


@pytest.mark.parametrize(
    ("registered", "read_only", "status"), [(False, False, -1), (False, True, -1), (True, True, 0), (True, False, 1)]
)
def test_the_status_of_the_server(registered: bool, read_only: bool, status: int) -> None:
    world = World()
    world.state.registered = registered
    world.state.set_read_only("disk", "full" if read_only else None)
    assert world.page("bookie_SERVER_STATUS") == {"bookie_SERVER_STATUS": status}


def test_ledgers_are_counted_once_every_shard_has_counted() -> None:
    world = World()
    world.shards[0].ledgers_count, world.shards[1].ledgers_count = 3, 4
    assert world.page("bookie_ledgers_count") == {"bookie_ledgers_count": 7}
    world.shards[1].ledgers_count = None
    assert world.page("bookie_ledgers_count") == {}


def test_directories_are_shown_by_what_they_hold() -> None:
    world = World()
    world.directories = [
        directory("/a", holds=("journal", "ledgers"), usage=0.5),
        directory("/b", usage=0.99, status=DirectoryStatus.FULL),
    ]
    assert world.page("bookie_ledger_") == {
        "bookie_ledger_num_dirs": 2,
        "bookie_ledger_writable_dirs": 1,
        "bookie_ledger_dir__a_usage": 50,
        "bookie_ledger_dir__b_usage": 99,
    }
    assert world.page("bookie_journal_dir") == {"bookie_journal_dir__a_usage": 50}
    assert world.page("bookie_JOURNAL_DIRS") == {"bookie_JOURNAL_DIRS": 1}


# --- disks, damage, repair


def test_each_directory_has_its_space() -> None:
    world = World()
    world.directories = [directory("/a"), directory("/b", status=DirectoryStatus.FULL, free=1)]
    found = {**world.page("bindery_bookie_directory"), **world.page("bindery_bookie_reserve")}
    assert found == {
        'bindery_bookie_directory_free_bytes{path="/a"}': 400,
        'bindery_bookie_directory_free_bytes{path="/b"}': 1,
        'bindery_bookie_directory_total_bytes{path="/a"}': 1000,
        'bindery_bookie_directory_total_bytes{path="/b"}': 1000,
        'bindery_bookie_directory_writable{path="/a"}': 1,
        'bindery_bookie_directory_writable{path="/b"}': 0,
        'bindery_bookie_reserve_held_bytes{path="/a"}': 20,
        'bindery_bookie_reserve_held_bytes{path="/b"}': 20,
    }


def test_damage_is_counted_when_found_and_healed() -> None:
    world = World()
    for at in range(3):
        world.damage.report(Damage("/l/1.log", 64 * at, "digest differs", 7, at))
    world.damage.healed(7, 0)
    found = {name.removesuffix("_total"): value for name, value in world.page("bindery_bookie_damage").items()}
    assert found == {
        "bindery_bookie_damage": 2,
        "bindery_bookie_damage_found": 3,
        "bindery_bookie_damage_healed": 1,
    }


def test_the_repair_has_samples_once_it_runs() -> None:
    world = World()
    assert world.page("bindery_bookie_repair") == {}
    world.repair = RepairState(ledgers_done=1, entries_copied=2, bytes_copied=3, entries_failed=4)
    found = {name.removesuffix("_total"): value for name, value in world.page("bindery_bookie_repair").items()}
    assert found == {
        "bindery_bookie_repair_ledgers": 1,
        "bindery_bookie_repair_entries": 2,
        "bindery_bookie_repair_bytes": 3,
        "bindery_bookie_repair_failures": 4,
    }
    assert world.kind("bindery_bookie_repair_ledgers") == "counter"


def test_a_suspected_rollback_of_the_metadata_is_a_metric_once_it_was_checked() -> None:
    world = World()
    names = ("bindery_bookie_metadata_rollback_suspected", "bindery_bookie_unknown_ledgers")

    def found() -> list[float | None]:
        page = world.page()
        return [page.get(name) for name in names]

    assert found() == [None, None]
    own = RollbackReport(found_ms=1, unknown=3, first=7, last=9)
    for state, report, expected in (
        (RollbackState(), None, [None, None]),
        (RollbackState(checked_ms=5), None, [0.0, 0.0]),
        (RollbackState(5, 0, {"b2": own}), None, [1.0, 0.0]),
        (RollbackState(5, 0, {"b1": own}), own, [1.0, 3.0]),
    ):
        world.guard = SimpleNamespace(state=state, own_report=report)
        assert found() == expected
