"""PortLimits: the limits that the settings describe, what they ended, and the release of memory."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.memory import SECURED_SIZE
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server import port_limits
from bindery_bookie.server.port_limits import CONNECTION_SIZE, PortLimits
from bindery_bookie.settings import ServerSettings


class Connection:
    group = "10.0.0.1"
    last_request_s = 0.0
    rank = 1

    def give_way(self, reason: str) -> None: ...

    def __init__(self, reads: int = 0) -> None:
        self.reads = reads
        """How often it has read when it is asked."""
        self.evictions: list[str] = []
        self.stalled = False

    def is_stalled(self) -> bool:
        return self.stalled

    def evict(self, kind: str, held_size: int) -> None:
        self.evictions.append(kind)

    def has_read(self) -> bool:
        self.reads -= 1
        return self.reads >= 0


def limits(**settings: Any) -> tuple[PortLimits, BookieMetrics]:
    metrics = BookieMetrics(clock=lambda: 0.0)
    return PortLimits(ServerSettings(**settings), metrics, clock=lambda: 0.0), metrics


@pytest.mark.parametrize(
    ("connections_max", "per_address", "expected"), [(2000, 0, 1000), (2000, 1500, 1500), (1, 0, 1)]
)
def test_an_address_may_have_half_of_the_connections_unless_it_is_set(
    connections_max: int, per_address: int, expected: int
) -> None:
    found, _ = limits(connections_max=connections_max, connections_per_address_max=per_address)
    assert (found.room.connections_max, found.room.per_address_max) == (connections_max, expected)


@pytest.mark.parametrize(
    ("connections_max", "per_address", "secured_max", "expected"),
    [(2000, 0, 100, (100, 50)), (2000, 2000, 100, (100, 100)), (10, 0, 100, (10, 5)), (2000, 1, 100, (100, 1))],
)
def test_an_address_may_have_the_same_part_of_the_connections_with_tls(
    connections_max: int, per_address: int, secured_max: int, expected: tuple[int, int]
) -> None:
    found, _ = limits(
        connections_max=connections_max, connections_per_address_max=per_address, secured_connections_max=secured_max
    )
    assert (found.secured.connections_max, found.secured.per_address_max) == expected


def test_a_connection_that_closes_holds_nothing() -> None:
    found, _ = limits()
    one = Connection()
    for room in (found.room, found.secured):
        assert room.open(one)
    found.handshakes.begin(one)
    for held in (found.unfinished, found.paused, found.unread):
        held.hold(one, 10)
    assert found.needed_size == CONNECTION_SIZE + 2 * SECURED_SIZE + 30
    found.close(one)
    found.close(one)
    assert (found.needed_size, found.handshakes.count) == (0, 0)


def test_only_a_frame_that_does_not_go_on_is_ended_for_others() -> None:
    found, _ = limits()
    found.end_stalled_frame()
    one, other = Connection(), Connection()
    found.unfinished.hold(one, 10)
    found.unfinished.hold(other, 20)
    found.end_stalled_frame()
    assert (one.evictions, found.unfinished.used) == ([], 30)
    one.stalled = True
    found.end_stalled_frame()
    assert (one.evictions, other.evictions, found.unfinished.used) == (["unfinished"], [], 20)


def test_one_frame_always_fits_into_the_limit_of_incomplete_frames() -> None:
    assert limits(unfinished_size_max=2**20)[0].unfinished.limit == ServerSettings().frame_size_max
    assert limits(unfinished_size_max=2**23)[0].unfinished.limit == 2**23


def test_ended_connections_are_counted_by_reason_and_logged_once_per_second(capsys: Any) -> None:
    found, metrics = limits()
    for _ in range(3):
        found.ended("unread", peer="10.0.0.1:5")
    found.ended("connections")
    page = metrics.render().decode()
    assert 'bindery_bookie_connections_ended_total{reason="unread"} 3' in page
    assert 'bindery_bookie_connections_ended_total{reason="connections"} 1' in page
    assert capsys.readouterr().out.count("connection_ended_unread") == 1


def test_the_metrics_show_what_clients_hold() -> None:
    found, metrics = limits(unread_size_max=2**20)
    found.unfinished.hold(Connection(), 700)
    found.unread.hold(Connection(), 90)
    page = metrics.render().decode()
    assert 'bindery_bookie_held_bytes{kind="unfinished"} 700' in page
    assert 'bindery_bookie_held_bytes{kind="unread"} 90' in page
    assert 'bindery_bookie_held_bytes_max{kind="unread"} 1048576' in page


def test_the_needed_size_is_that_of_connections_and_their_bytes() -> None:
    found, _ = limits()
    assert found.needed_size == 0
    found.room.open(Connection())
    found.unfinished.hold(Connection(), 700)
    assert found.needed_size == CONNECTION_SIZE + 700


def test_of_unread_responses_those_that_are_being_read_are_ended_last() -> None:
    found, _ = limits(unread_size_max=2**20)
    slow, stuck, new = Connection(reads=1), Connection(), Connection()
    for one in (slow, stuck, new):
        found.hold_unread(one, 400_000)
    assert (slow.evictions, stuck.evictions, new.evictions) == ([], ["unread"], [])
    found.hold_unread(new, 700_000)
    assert (slow.evictions, new.evictions) == (["unread"], [])
    assert found.unread.used == 700_000


def test_if_all_are_being_read_the_oldest_is_ended() -> None:
    found, _ = limits(unread_size_max=2**20)
    first, second, third = (Connection(reads=1) for _ in range(3))
    for one in (first, second, third):
        found.hold_unread(one, 400_000)
    assert (first.evictions, second.evictions, third.evictions) == (["unread"], [], [])


async def test_memory_is_released_once_clients_need_less(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []

    class Memory:
        def __init__(self, *, repeats: int) -> None: ...

        def check(self, size: int, *, now_s: float) -> bool:
            seen.append((size, now_s))
            return False

    monkeypatch.setattr(port_limits, "MemoryRelease", Memory)
    monkeypatch.setattr(port_limits, "MEMORY_CHECK_S", 0.001)
    found, _ = limits()
    holder = Connection()
    found.unfinished.hold(holder, 700)
    running = asyncio.create_task(found.release_memory())
    await asyncio.sleep(0.02)
    found.unfinished.release(holder)
    await asyncio.sleep(0.02)
    running.cancel()
    assert seen[0] == (700, 0.0)
    assert seen[-1] == (0, 0.0)
