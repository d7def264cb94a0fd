"""HeldBytes: a limit on the bytes of all holders, which those pay for that have held theirs longest."""

import random

from bindery_kit.limits.held_bytes import HeldBytes


class Client:
    """A holder that records its evictions."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.evictions: list[tuple[str, int]] = []

    def evict(self, kind: str, held_size: int) -> None:
        self.evictions.append((kind, held_size))


def test_sizes_are_absolute_and_add_up() -> None:
    held = HeldBytes("heads", 100)
    first, second = Client(), Client()
    assert held.hold(first, 10)
    assert held.hold(second, 30)
    assert held.hold(first, 25)
    assert (held.used, len(held), held.held_by(first), held.held_by(second)) == (55, 2, 25, 30)
    held.release(first)
    held.release(first)
    assert (held.used, len(held), held.held_by(first)) == (30, 1, 0)
    assert held.hold(second, 0)
    assert (held.used, len(held), held.evicted) == (0, 0, 0)


def test_the_limit_itself_is_allowed_and_one_byte_more_evicts_the_oldest() -> None:
    held = HeldBytes("heads", 100)
    old, young = Client(), Client()
    held.hold(old, 60)
    assert held.hold(young, 40)
    assert held.evicted == 0
    assert held.hold(young, 41)
    assert old.evictions == [("heads", 60)]
    assert young.evictions == []
    assert (held.used, len(held), held.evicted) == (41, 1, 1)


def test_the_peak_is_what_was_held_at_most_since_it_was_taken() -> None:
    held = HeldBytes("heads", 100)
    old, young = Client(), Client()
    held.hold(old, 60)
    held.hold(young, 70)  # evicts the old one: never more than the limit
    held.hold(young, 20)
    assert held.take_peak() == 70
    held.hold(young, 30)
    held.release(young)
    assert held.take_peak() == 30
    assert held.take_peak() == 0


def test_growing_does_not_make_a_holder_younger_and_releasing_does() -> None:
    held = HeldBytes("bodies", 100)
    first, second, third = Client(), Client(), Client()
    held.hold(first, 10)
    held.hold(second, 10)
    held.hold(first, 50)
    held.hold(third, 45)
    assert [len(client.evictions) for client in (first, second, third)] == [1, 0, 0]

    held.release(second)
    held.hold(second, 10)
    held.hold(first, 50)
    assert [len(client.evictions) for client in (first, second, third)] == [1, 0, 1]


def test_as_many_are_evicted_as_are_needed() -> None:
    held = HeldBytes("bodies", 100)
    clients = [Client() for _ in range(10)]
    for client in clients:
        held.hold(client, 10)
    last = Client()
    assert held.hold(last, 35)
    assert [len(client.evictions) for client in clients] == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    assert (held.used, held.evicted) == (95, 4)


def test_a_holder_that_began_first_is_evicted_itself() -> None:
    held = HeldBytes("bodies", 100)
    first, second = Client(), Client()
    held.hold(first, 50)
    held.hold(second, 40)
    assert not held.hold(first, 61)
    assert first.evictions == [("bodies", 61)]
    assert (held.used, held.held_by(second)) == (40, 40)


def test_more_than_the_limit_evicts_everybody() -> None:
    held = HeldBytes("bodies", 100)
    first, second = Client(), Client()
    held.hold(first, 1)
    assert not held.hold(second, 101)
    assert (held.used, len(held), held.evicted) == (0, 0, 2)
    assert second.evictions == [("bodies", 101)]


def test_a_holder_may_release_itself_while_it_is_evicted() -> None:
    held = HeldBytes("heads", 10)

    class Closing(Client):
        def evict(self, kind: str, held_size: int) -> None:
            super().evict(kind, held_size)
            held.release(self)

    closing, other = Closing(), Client()
    held.hold(closing, 10)
    assert held.hold(other, 5)
    assert (held.used, len(held)) == (5, 1)


def test_random_calls_keep_the_sum_and_the_limit() -> None:
    rng = random.Random(7)
    held = HeldBytes("heads", 1000)
    clients = [Client(str(number)) for number in range(20)]
    for _ in range(5000):
        client = rng.choice(clients)
        if rng.random() < 0.3:
            held.release(client)
        else:
            size = rng.randrange(300)
            assert held.hold(client, size) == (held.held_by(client) == size)
        assert held.used == sum(held.held_by(client) for client in clients)
        assert held.used <= 1000
    assert held.evicted == sum(len(client.evictions) for client in clients) > 100


def test_a_holder_that_is_deferred_is_evicted_last() -> None:
    held = HeldBytes("unread", 100)
    assert held.oldest is None
    first, second = Client(), Client()
    held.hold(first, 40)
    held.hold(second, 40)
    assert held.oldest is first
    held.defer(first)
    assert (held.oldest, held.used) == (second, 80)
    held.hold(Client(), 60)
    assert (first.evictions, second.evictions) == ([], [("unread", 40)])


def test_room_that_others_need_is_made_at_once_and_given_back() -> None:
    held = HeldBytes("bodies", 100)
    first, second = Client(), Client()
    held.hold(first, 40)
    held.hold(second, 40)
    held.restrict(80)
    assert (held.used, held.room, held.limit, held.evicted) == (80, 80, 100, 0)
    held.restrict(79)
    assert (first.evictions, second.evictions, held.used) == ([("bodies", 40)], [], 40)
    assert not held.hold(first, 80)
    assert (first.evictions[1:], held.used) == ([("bodies", 80)], 0)
    held.restrict(1000)
    assert (held.room, held.hold(first, 100)) == (100, True)
    held.restrict(0)
    assert (held.used, held.hold(second, 1)) == (0, False)
