"""Handshakes: how many are in progress, and which of them ends."""

from dataclasses import dataclass, field

from bindery_bookie.server.handshakes import Handshakes


@dataclass(eq=False)
class Connection:
    group: str = "10.0.0.1"
    evictions: list[tuple[str, int]] = field(default_factory=list)

    def evict(self, kind: str, held_size: int) -> None:
        self.evictions.append((kind, held_size))


def test_above_the_limit_the_oldest_of_the_address_with_most_ends() -> None:
    handshakes = Handshakes(3)
    far, first, second, third = Connection("10.0.0.9"), Connection(), Connection(), Connection()
    for one in (far, first, second, third):
        handshakes.begin(one)
    assert (far.evictions, first.evictions, second.evictions) == ([], [("handshakes", 1)], [])
    assert handshakes.count == 3


def test_of_addresses_with_one_each_the_oldest_ends() -> None:
    handshakes = Handshakes(2)
    ones = [Connection(f"10.0.0.{number}") for number in range(3)]
    for one in ones:
        handshakes.begin(one)
    assert [len(one.evictions) for one in ones] == [1, 0, 0]


def test_one_that_ended_does_not_count() -> None:
    handshakes = Handshakes(1)
    one, other = Connection(), Connection("10.0.0.2")
    handshakes.begin(one)
    handshakes.end(one)
    handshakes.end(one)
    handshakes.end(other)
    assert (handshakes.count, handshakes._of) == (0, {})
    handshakes.begin(other)
    assert not one.evictions
