"""Log usage: which part of a log is live, and which `deleted` records are needed."""

import pytest
from bindery_bookie.storage.collection.log_usage import Liveness, LogUsage, is_in, livenesses, read_usage, usage_of
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_simulation.disk import CrashableDisk


def alive(*usages: LogUsage, live: tuple[int, ...]) -> dict[int, Liveness]:
    return dict(livenesses({usage.log_id: usage for usage in usages}, live))


def test_usage_is_sorted_by_ledger() -> None:
    usage = usage_of(3, 2, 1000, {9: 100, 4: 200}, [4])
    assert (usage.log_id, usage.order, usage.size, usage.is_exact) == (3, 2, 1000, True)
    assert (list(usage.ledger_ids), list(usage.sizes), usage.deletions) == ([4, 9], [200, 100], {4})


@pytest.mark.parametrize(("wanted", "found"), [(1, False), (2, True), (3, False), (6, True), (7, False)])
def test_members_of_an_ascending_sequence_are_found(wanted: int, found: bool) -> None:
    assert is_in([2, 4, 6], wanted) is found
    assert not is_in([], wanted)


def test_records_of_dead_ledgers_are_not_live() -> None:
    found = alive(usage_of(1, 1, 1000, {4: 200, 5: 300, 6: 400}, []), live=(5, 7))
    assert found == {1: Liveness(400, 1, frozenset())}
    assert not found[1].is_dead


def test_a_log_without_live_ledgers_is_dead() -> None:
    found = alive(usage_of(1, 1, 1000, {4: 200}, []), live=())
    assert found == {1: Liveness(0, 0, frozenset())}
    assert found[1].is_dead


def test_live_bytes_are_never_negative() -> None:
    assert alive(usage_of(1, 1, 100, {4: 500, 5: 10}, []), live=(5,))[1].live_bytes == 0


def test_a_deletion_is_needed_while_an_older_log_has_records_of_the_ledger() -> None:
    old, new = usage_of(1, 1, 1000, {4: 200, 5: 300}, []), usage_of(2, 2, 500, {4: 24}, [4])
    found = alive(old, new, live=(5,))
    assert found[1] == Liveness(800, 1, frozenset())
    assert found[2] == Liveness(500, 0, frozenset({4}))
    assert not found[2].is_dead
    assert alive(new, live=(5,))[2].is_dead


def test_a_deletion_in_the_log_with_the_oldest_records_is_not_needed() -> None:
    first, later = usage_of(7, 1, 500, {4: 224}, [4]), usage_of(2, 2, 500, {4: 24}, [])
    assert alive(first, later, live=())[7] == Liveness(0, 0, frozenset())


def test_unreadable_parts_may_contain_control_records_of_live_ledgers_only() -> None:
    damaged = usage_of(1, 1, 1000, {4: 200}, [], is_exact=False)
    found = alive(damaged, live=(5,))[1]
    assert found == Liveness(1, 0, frozenset(), True)
    assert not found.is_dead
    assert alive(damaged, live=())[1].is_dead


def test_usage_is_read_from_the_ledgers_map_and_none_without_one() -> None:
    ledgers_map = fmt.pack_record(fmt.pack_ledgers_map({4: 200, 9: 100}, [9]))
    header = fmt.pack_file_header(6)
    data = header + ledgers_map + fmt.pack_trailer(len(header) + fmt.RECORD_HEADER_SIZE)
    disk = CrashableDisk()
    disk.create("/d/6.log").write_at(data, 0)
    disk.create("/d/7.log").write_at(data, 0)  # the header has another id
    disk.create("/d/8.log").write_at(fmt.pack_file_header(8), 0)
    assert read_usage(disk, "/d", 6, 5) == usage_of(6, 5, len(data), {4: 200, 9: 100}, [9])
    assert read_usage(disk, "/d", 7, 7) is None
    assert read_usage(disk, "/d", 8, 8) is None
