"""Memory is returned to the system when messages that clients needed have gone."""

from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.http.stats import BrokerHttpStats
from bindery_broker.subscriptions.response_budget import ResponseBudget


def test_messages_count_as_memory_that_clients_need() -> None:
    stats = BrokerHttpStats()
    assert stats.needed_size == 0
    ahead, responses = ReadAhead(1_000), ResponseBudget(1_000, now=lambda: 0.0)
    stats.watch_messages(ahead, responses)
    ahead.change(30)
    charge = responses.charge("a")
    charge.keep(5)
    assert stats.needed_size == 35
    stats.connections = 1
    assert stats.needed_size > 8_000
    ahead.change(-30)
    charge.release()
    stats.connections = 0
    assert stats.needed_size == 0
