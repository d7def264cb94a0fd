"""Room: which connection makes room for a new one."""

from dataclasses import dataclass

import pytest
from bindery_bookie.server.room import (
    BUSY,
    CANDIDATES_MAX,
    IDLE,
    NEW_WEIGHT,
    POLLING,
    SCAN_PAUSE_S,
    UNKNOWN_GRACE_S,
    WAITING,
    Room,
)


@dataclass(eq=False)
class Connection:
    group: str = "10.0.0.1"
    rank: int | None = IDLE
    last_request_s: float = 0.0
    is_ended: bool = False

    def give_way(self, reason: str) -> None:
        assert reason == "for_others"
        self.is_ended = True


class World:
    def __init__(self, connections_max: int = 3, per_address_max: int = 3) -> None:
        self.now_s = 100.0
        self.room = Room(connections_max=connections_max, per_address_max=per_address_max, clock=lambda: self.now_s)

    def known(self, rank: int | None = IDLE, group: str = "10.0.0.1") -> Connection:
        one = self.new(group)
        one.rank = rank
        self.room.know(one)
        return one

    def new(self, group: str = "10.0.0.1") -> Connection:
        self.now_s += 0.001
        one = Connection(group, last_request_s=self.now_s)
        assert self.room.open(one)
        return one


def test_below_the_limit_no_connection_ends() -> None:
    world = World()
    assert not any(one.is_ended for one in [world.new(), world.known(), world.known()])
    assert len(world.room) == 3


def test_one_that_never_sent_a_request_makes_room_first() -> None:
    world = World()
    idle, silent, later = world.known(), world.new(), world.new()
    world.now_s += UNKNOWN_GRACE_S
    world.new()
    assert (idle.is_ended, silent.is_ended, later.is_ended) == (False, True, False)
    assert len(world.room) == 3


def test_a_connection_that_just_arrived_may_send_its_first_request() -> None:
    """Otherwise clients that connect over and over would keep a new client out."""
    world = World()
    idle = world.known()
    world.now_s += 1
    new = world.new()
    busy = world.known(rank=None)
    world.new()
    assert (idle.is_ended, new.is_ended, busy.is_ended) == (True, False, False)


def test_if_the_bookie_works_for_all_others_the_oldest_new_one_makes_room() -> None:
    world = World()
    world.known(rank=None)
    world.known(rank=None)
    new = world.new()
    world.new()
    assert new.is_ended


def test_the_one_whose_last_request_is_oldest_makes_room() -> None:
    world = World()
    first, second, third = world.known(), world.known(), world.known()
    first.last_request_s = world.now_s + 0.0005
    world.known()
    assert (first.is_ended, second.is_ended, third.is_ended) == (False, True, False)
    world.known()
    assert (first.is_ended, third.is_ended) == (False, True)


def test_idle_ones_come_before_slow_ones_and_long_polls_of_the_same_age() -> None:
    world = World()
    polling, waiting, idle = world.known(POLLING), world.known(WAITING), world.known(IDLE)
    world.now_s += 1
    for expected in (idle, waiting, polling):
        assert not expected.is_ended
        world.known(rank=None)
        assert expected.is_ended


@pytest.mark.parametrize("rank", [IDLE, WAITING, POLLING])
def test_a_connection_in_use_is_kept_when_others_did_nothing_for_longer(rank: int) -> None:
    world = World()
    first, second = world.known(rank), world.known(rank)
    world.now_s += 1
    in_use = world.known()
    world.known(rank=None)
    world.known(rank=None)
    assert (first.is_ended, second.is_ended, in_use.is_ended) == (True, True, False)


@pytest.mark.parametrize("idle_s", [0.05, 1.0])
def test_a_flood_of_new_connections_does_not_end_the_ones_in_use(idle_s: float) -> None:
    world = World(connections_max=10, per_address_max=10)
    in_use = world.known()
    in_use.last_request_s -= idle_s - 0.02
    news = [world.new() for _ in range(9)]
    world.now_s += 0.011
    for new in news[:3]:
        world.new()
        assert new.is_ended
    assert not in_use.is_ended


def test_one_that_is_idle_much_longer_than_the_oldest_new_one_makes_room() -> None:
    world = World()
    idle = world.known()
    world.now_s += 10 * NEW_WEIGHT * UNKNOWN_GRACE_S
    new = [world.new(), world.new()]
    world.new()
    assert idle.is_ended
    assert not new[0].is_ended


def test_if_the_bookie_works_for_all_the_new_one_is_refused() -> None:
    world = World()
    busy = [world.known(rank=None) for _ in range(3)]
    assert not world.room.open(Connection())
    assert not any(one.is_ended for one in busy)
    busy[1].rank = IDLE
    assert not world.room.open(Connection()), "the connections are not scanned again at once"
    world.now_s += SCAN_PAUSE_S
    assert world.room.open(Connection())
    assert busy[1].is_ended


def test_a_candidate_that_was_used_since_the_scan_is_kept() -> None:
    world = World()
    ones = [world.known() for _ in range(3)]
    world.known(rank=None)
    assert ones[0].is_ended
    ones[1].last_request_s = world.now_s
    world.known(rank=None)
    assert (ones[1].is_ended, ones[2].is_ended) == (False, True)


def test_an_address_makes_room_for_itself_only() -> None:
    world = World(connections_max=10, per_address_max=2)
    other = world.known(group="10.0.0.9")
    first, second = world.known(), world.known()
    world.known()
    assert (other.is_ended, first.is_ended, second.is_ended) == (False, True, False)
    silent_other = world.new("10.0.0.9")
    world.now_s += UNKNOWN_GRACE_S
    world.known()
    assert (silent_other.is_ended, second.is_ended) == (False, True)


def test_the_address_with_the_most_makes_room_before_others_that_are_idle_longer() -> None:
    """Clients that use their connections every second do not end an idle one of another address."""
    world = World(connections_max=5, per_address_max=4)
    idle = world.known(group="10.0.0.9")
    world.now_s += 100
    flood = [world.known() for _ in range(4)]
    others = []
    for _ in range(3):
        others.append(world.known(group="10.0.0.8"))
        world.now_s += 1
    assert (idle.is_ended, [one.is_ended for one in flood]) == (False, [True, True, False, False])
    assert others[0].is_ended, "it has as many then"


def test_if_none_of_the_largest_address_can_make_room_another_does() -> None:
    world = World(connections_max=3, per_address_max=3)
    idle = world.known(group="10.0.0.9")
    busy = [world.known(rank=None) for _ in range(2)]
    world.known(group="10.0.0.8")
    assert (idle.is_ended, busy[0].is_ended, busy[1].is_ended) == (True, False, False)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_new_connection_does_not_end_one_of_an_address_that_has_as_few(is_known: bool) -> None:
    """Attackers that add all the time cannot take the connections of others, who have one each."""
    world = World(connections_max=3, per_address_max=3)
    other = world.known(group="10.0.0.9") if is_known else world.new("10.0.0.9")
    world.now_s += 100
    for _ in range(2):
        world.known(rank=None)
    assert not world.room.open(Connection())
    assert not other.is_ended


def test_an_old_read_in_progress_makes_room_if_nothing_is_idle() -> None:
    """Otherwise clients that always read would keep others out."""
    for idle_s, expected in ((0, (True, False)), (1, (False, True))):
        world = World()
        busy, other = world.known(BUSY), world.known(BUSY)
        world.now_s += 30
        idle = world.known(IDLE)
        world.now_s += idle_s
        world.known(rank=None, group="10.0.0.2")
        assert ((busy.is_ended, idle.is_ended), other.is_ended) == (expected, False)


def test_closed_connections_are_forgotten() -> None:
    world = World(connections_max=2, per_address_max=1)
    one = world.new()
    world.room.close(one)
    world.room.close(one)
    assert len(world.room) == 0
    assert not world.room._unknown_of
    assert not world.new().is_ended


def test_nothing_is_kept_of_connections_that_have_gone() -> None:
    world = World(connections_max=10, per_address_max=20)
    ones = [world.known() for _ in range(11)]
    assert len(world.room._candidates["10.0.0.1"]) > 5
    for one in ones:
        world.room.close(one)
    assert not world.room._candidates


def test_many_scans_of_many_addresses_keep_little() -> None:
    world = World(connections_max=10 * CANDIDATES_MAX, per_address_max=1)
    for number in range(3 * CANDIDATES_MAX):
        world.known(rank=None, group=f"10.0.1.{number}")
        assert not world.room.open(Connection(f"10.0.1.{number}"))
    assert len(world.room._next_scan_s) <= CANDIDATES_MAX


def test_addresses_that_were_full_are_forgotten() -> None:
    world = World(connections_max=400, per_address_max=2)
    for number in range(3 * CANDIDATES_MAX):
        for _ in range(3):
            world.known(group=f"10.0.1.{number}")
            world.now_s += 1
    assert 0 < len(world.room._candidates) <= CANDIDATES_MAX
