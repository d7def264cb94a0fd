"""Turns: groups of waiters take turns."""

import random

import pytest
from bindery_kit.limits.turns import Turns


def turns_of(*waiters: str) -> Turns[str]:
    """Return a queue of waiters, each of the group that its first character names."""
    turns: Turns[str] = Turns()
    for waiter in waiters:
        turns.add(waiter, group=waiter[0])
    return turns


def test_groups_take_turns_and_their_waiters_have_the_order_of_their_arrival() -> None:
    turns = turns_of("a1", "a2", "a3", "b1", "c1", "b2")
    assert len(turns) == 6
    assert [turns.next() for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert len(turns) == 0


def test_a_waiter_may_be_taken_out_of_turn() -> None:
    turns = turns_of("a1", "a2", "b1", "b2")
    assert turns.next_of("b") == "b1"
    assert [turns.next() for _ in range(3)] == ["a1", "b2", "a2"]


def test_a_removed_waiter_has_no_turn_and_a_group_without_waiters_does_not_wait() -> None:
    turns = turns_of("a1", "b1")
    assert turns.waits("a")
    assert turns.discard("a1", group="a")
    assert not turns.waits("a")
    assert not turns.discard("a1", group="a")
    assert not turns.discard("a1", group="b")
    assert len(turns) == 1
    assert turns.next() == "b1"


def test_a_waiter_waits_once() -> None:
    turns = turns_of("a1")
    with pytest.raises(AssertionError):
        turns.add("a1", group="a")


def test_every_waiter_has_one_turn_and_no_group_waits_for_two_of_another() -> None:
    randomness = random.Random(5)
    turns: Turns[tuple[str, int]] = Turns()
    waiting: list[tuple[str, int]] = []
    served: list[str] = []
    number = 0
    for _ in range(5000):
        action = randomness.random()
        group = randomness.choice("abc")
        if action < 0.5 or not waiting:
            number += 1
            waiting.append((group, number))
            turns.add((group, number), group=group)
        elif action < 0.9:
            taken = turns.next()
            mine = [one for one in waiting if one[0] == taken[0]]
            assert taken == mine[0], "not in the order of arrival"
            waiting.remove(taken)
            served.append(taken[0])
        else:
            gone = randomness.choice(waiting)
            assert turns.discard(gone, group=gone[0])
            waiting.remove(gone)
        assert len(turns) == len(waiting)
        assert {name for name in "abc" if turns.waits(name)} == {one[0] for one in waiting}
    assert len(set(served)) == 3
