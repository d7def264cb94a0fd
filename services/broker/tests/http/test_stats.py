"""Memory is returned to the system when messages of consumers that have gone are put down."""

from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.http.stats import BrokerHttpStats
from bindery_kit.limits.memory_release import DROP_SIZE, INTERVAL_S, MemoryRelease


def test_only_messages_of_idle_subscriptions_change_the_need() -> None:
    stats, ahead = BrokerHttpStats(), ReadAhead(64 * DROP_SIZE)
    stats.watch_read_ahead(ahead)
    memory = MemoryRelease(lambda: None)
    ahead.change(9 * DROP_SIZE)
    assert not memory.check(stats.needed_size, now_s=0.0)
    ahead.change(-8 * DROP_SIZE)
    assert not memory.check(stats.needed_size, now_s=1.0), "they were delivered"
    ahead.change(-DROP_SIZE)
    ahead.idle_size += DROP_SIZE
    assert memory.check(stats.needed_size, now_s=2.0)
    assert memory.check(stats.needed_size, now_s=2.0 + INTERVAL_S), "once more"
    assert not memory.check(stats.needed_size, now_s=2.0 + 2 * INTERVAL_S)


def test_messages_that_were_put_down_cause_one_release_and_its_repetition() -> None:
    stats, ahead = BrokerHttpStats(), ReadAhead(64 * DROP_SIZE)
    stats.watch_read_ahead(ahead)
    memory = MemoryRelease(lambda: None)

    def check(now_s: float) -> bool:  # as the server does
        return memory.check(stats.needed_size, peak_size=stats.take_peak_size(), now_s=now_s)

    assert not check(0.0)
    ahead.idle_size += 3 * DROP_SIZE
    assert [check(number * INTERVAL_S) for number in range(1, 6)] == [True, True, False, False, False]


def test_connections_count_as_on_other_ports() -> None:
    stats = BrokerHttpStats()
    stats.connections = 3
    assert stats.needed_size == 3 * 8192
