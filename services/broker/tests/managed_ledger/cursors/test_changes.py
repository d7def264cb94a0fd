"""Changes: those of two periods are joined, and a later one wins."""

from bindery_broker.managed_ledger.cursors.changes import Changes
from bindery_pulsar.message_id import Position


def test_changes_of_two_periods_are_joined() -> None:
    first, second = Changes(), Changes()
    first.acked.add(0, 1)
    first.batches[Position(0, 4)] = None
    first.add_blobs({"a", "b"}, {"c", "d"})
    second.acked.add(0, 2)
    second.batches[Position(0, 5)] = None
    second.counted[Position(0, 6)] = None
    second.add_blobs({"c"}, {"a"})
    both = first.add(second)
    assert list(both.acked) == [(0, 1, 2)]
    assert set(both.batches) == {Position(0, 4), Position(0, 5)}
    assert set(both.counted) == {Position(0, 6)}
    assert (both.put_blobs, both.removed_blobs) == ({"b", "c"}, {"a", "d"})
    assert not both.is_move


def test_a_move_replaces_the_changes_before_it_and_keeps_those_after_it() -> None:
    before, move, after = Changes(), Changes(is_move=True), Changes()
    before.acked.add(0, 1)
    after.acked.add(0, 7)
    both = before.add(move).add(after)
    assert both.is_move
    assert list(both.acked) == [(0, 7, 7)]
