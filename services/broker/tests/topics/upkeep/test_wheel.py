"""Items are due in the round after their time, and a round takes only those."""

import random

import pytest
from bindery_broker.topics.upkeep.wheel import SLOT_S, Wheel


def test_an_item_is_due_at_its_time_and_only_once() -> None:
    wheel: Wheel[str] = Wheel()
    wheel.put("a", 10.0)
    assert wheel.take_due(9.999) == []
    assert "a" in wheel
    assert wheel.take_due(10.0) == ["a"]
    assert wheel.take_due(11.0) == []
    assert "a" not in wheel


def test_an_item_for_the_next_round_is_due_at_any_time() -> None:
    wheel: Wheel[str] = Wheel()
    wheel.put("b", 5.0)
    wheel.soon("a")
    assert wheel.take_due(0.0) == ["a"]


@pytest.mark.parametrize("at", [3.0, 7.0])
def test_the_last_time_counts(at: float) -> None:
    wheel: Wheel[str] = Wheel()
    wheel.put("a", 5.0)
    wheel.put("a", at)
    assert wheel.take_due(at - 0.5) == []
    assert wheel.take_due(at) == ["a"]
    assert wheel.take_due(100.0) == []


def test_an_item_that_was_discarded_is_not_due() -> None:
    wheel: Wheel[str] = Wheel()
    wheel.put("a", 5.0)
    wheel.soon("b")
    for item in ("a", "b", "c"):
        wheel.discard(item)
    assert len(wheel) == 0
    assert wheel.take_due(100.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_item_is_early_or_more_than_a_slot_late(seed: int) -> None:
    randomness = random.Random(seed)
    wheel: Wheel[int] = Wheel()
    times: dict[int, float] = {}
    now = 0.0
    for _ in range(300):
        item = randomness.randrange(20)
        choice = randomness.random()
        if choice < 0.6:
            times[item] = now + randomness.random() * 20
            wheel.put(item, times[item])
        elif choice < 0.7:
            times.pop(item, None)
            wheel.discard(item)
        else:
            now += randomness.random() * 3
            due = wheel.take_due(now)
            assert len(set(due)) == len(due)
            for one in due:
                assert times.pop(one) <= now
            assert all(at > now - SLOT_S for at in times.values())
    assert len(wheel) == len(times)
