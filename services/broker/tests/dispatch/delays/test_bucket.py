"""A bucket: order of delivery, search by position, and removal."""

from bindery_broker.dispatch.delays.bucket import Bucket, joined, ranges_of
from bindery_broker.dispatch.delays.bucket_codec import build, weight
from bindery_pulsar.message_id import LATEST, Position

ROWS = {
    2: ([10, 11, 14], [1_000, 250, 1_000]),
    3: ([0, 1], [901, 5_000]),
}
"""With a tick of 100 ms: slots 10, 3, 10 and 10, 50."""


def bucket(*, tick_ms: int = 100) -> Bucket:
    return Bucket(build(ROWS, covered_upto=Position(3, 1)), tick_ms=tick_ms)


def drain(found: Bucket, **limits: int) -> list[tuple[int, int]]:
    slot_max, count_max = limits.get("slot_max", 10**9), limits.get("count_max", 10**9)
    taken = found.take(slot_max=slot_max, before=None, count_max=count_max)
    found.check()
    return [tuple(position) for position in taken]


def test_messages_are_taken_by_slot_and_then_by_position():
    assert drain(bucket()) == [(2, 11), (2, 10), (2, 14), (3, 0), (3, 1)]
    assert drain(bucket(tick_ms=1)) == [(2, 11), (3, 0), (2, 10), (2, 14), (3, 1)]


def test_a_slot_begins_after_the_delivery_times_in_it():
    found = bucket()
    assert found.head() == (3, Position(2, 11)), "250 ms is due at 300 ms"
    assert drain(found, slot_max=2) == []
    assert drain(found, slot_max=3) == [(2, 11)]
    assert found.head() == (10, Position(2, 10))


def test_take_stops_at_its_limits():
    found = bucket()
    assert drain(found, count_max=2) == [(2, 11), (2, 10)]
    taken = found.take(slot_max=10, before=(10, Position(2, 20)), count_max=10)
    assert taken == [Position(2, 14)], "3:0 of the same slot comes after 2:20"
    assert (found.live, len(found)) == (2, 5)


def test_removed_messages_are_not_taken():
    found = bucket()
    row = found.find(Position(2, 11))
    assert row is not None
    assert found.deliver_at(row) == 250
    found.remove(row)
    assert not found.is_live(row)
    assert found.head() == (10, Position(2, 10))
    assert drain(found) == [(2, 10), (2, 14), (3, 0), (3, 1)]
    assert found.head() is None


def test_find_names_only_positions_of_the_bucket():
    found = bucket()
    present = [
        (ledger, entry) for ledger in range(5) for entry in range(20) if found.find(Position(ledger, entry)) is not None
    ]
    assert present == [(2, 10), (2, 11), (2, 14), (3, 0), (3, 1)]
    assert (found.first, found.last) == (Position(2, 10), Position(3, 1))


def test_remove_upto_counts_live_rows_once():
    found = bucket()
    assert found.remove_upto(Position(1, 99)) == 0
    assert found.remove_upto(Position(2, 9)) == 0
    row = found.find(Position(2, 10))
    assert row is not None
    found.remove(row)
    assert found.remove_upto(Position(2, 13)) == 1
    assert found.remove_upto(Position(2, 13)) == 0
    found.check()
    assert found.remove_upto(Position(2, 99)) == 1
    assert found.remove_upto(LATEST) == 2
    assert found.live == 0
    found.check()


def has_any(acked):
    return lambda ledger_id, first, last: any(a == ledger_id and first <= b <= last for a, b in acked)


def test_only_rows_that_may_be_acknowledged_are_looked_at(monkeypatch):
    monkeypatch.setattr("bindery_broker.dispatch.delays.bucket.ACKED_ROWS", 2)
    found, asked = bucket(), []

    def is_acked(position):
        asked.append(position)
        return position == (2, 14)

    assert found.remove_acked(is_acked, has_any({(2, 14)})) == 1
    assert (2, 14) in asked
    assert len(asked) <= 2
    assert found.remove_acked(is_acked, has_any(set())) == 0
    assert len(asked) <= 2
    found.check()


def test_acknowledged_messages_are_removed():
    found, acked = bucket(), {(2, 14), (3, 1), (9, 9)}
    assert found.remove_acked(acked.__contains__, has_any(acked)) == 2
    assert found.remove_acked(acked.__contains__, has_any(acked)) == 0
    found.check()
    assert drain(found) == [(2, 11), (2, 10), (3, 0)]


def test_live_entries_and_rows_leave_out_what_is_gone():
    found = bucket()
    assert found.live_ranges(2, 11, 14) == [(11, 11), (14, 14)]
    assert found.live_ranges(2, 12, 13) == []
    assert found.live_ranges(4, 0, 9) == []
    assert found.live_ranges(0, 0, 9) == []
    found.remove_upto(Position(2, 11))
    assert found.live_ranges(2, 0, 99) == [(14, 14)]
    assert list(found.live_rows()) == [(2, [14], [1_000]), (3, [0, 1], [901, 5_000])]
    found.remove_upto(Position(2, 14))
    assert list(found.live_rows()) == [(3, [0, 1], [901, 5_000])]


def test_live_ranges_of_adjacent_entries():
    found = Bucket(build({5: (list(range(20, 30)), list(range(1_000, 1_010)))}, covered_upto=LATEST), tick_ms=1)
    found.check()
    assert found.live_ranges(5, 0, 99) == [(20, 29)]
    assert found.live_ranges(5, 22, 24) == [(22, 24)]
    assert found.live_ranges(5, 29, 40) == [(29, 29)]
    assert found.live_ranges(5, 30, 40) == found.live_ranges(5, 0, 19) == []
    found.remove(4)
    assert found.live_ranges(5, 0, 99) == [(20, 23), (25, 29)]
    assert found.live_ranges(5, 20, 23) == [(20, 23)]
    assert found.live_ranges(5, 24, 24) == []
    assert drain(found) == [(5, n) for n in range(20, 30) if n != 24]


def test_single_entries_are_removed_together():
    found = Bucket(build({5: ([*range(20, 30)], [50] * 10), 7: ([1], [50])}, covered_upto=LATEST), tick_ms=1)
    for ledger_id, ids in [(4, [20]), (6, [1]), (8, [1]), (5, [3, 19]), (5, [30, 40]), (7, [0, 2])]:
        assert found.remove_some(ledger_id, ids) == 0
    assert found.remove_some(5, [3, 20, 23, 24, 40]) == 3
    found.check()
    assert found.live_ranges(5, 0, 99) == [(21, 22), (25, 29)]
    assert found.remove_some(5, [20, 23, 24]) == 0
    assert found.remove_some(5, [20, 21, 23, 29]) == 2
    assert found.remove_some(7, [1]) == 1
    found.check()
    assert found.live_ranges(5, 0, 99) == [(22, 22), (25, 28)]
    assert found.live == 5


def test_adjacent_ranges_are_joined():
    assert joined([(1, 2), (3, 3), (5, 6), (7, 9)]) == [(1, 3), (5, 9)]
    assert ranges_of([]) == []
    assert ranges_of([4, 5, 7]) == [(4, 5), (7, 7)]


def test_the_weight_counts_live_rows_and_no_more_ledgers_than_rows():
    found = bucket()
    assert found.weight == weight(5, 2)
    found.remove_upto(Position(3, 0))
    assert found.weight == weight(1, 1)
