"""HttpStats: the metrics of an HTTP port."""

from bindery_kit.http.http_stats import HttpStats
from bindery_kit.limits.held_bytes import HeldBytes


class Client:
    def evict(self, kind: str, held_size: int) -> None:
        raise AssertionError


def test_a_page_of_a_port_without_clients() -> None:
    assert HttpStats().render() == (
        b"# HELP bindery_http_connections Open HTTP connections.\n"
        b"# TYPE bindery_http_connections gauge\n"
        b"bindery_http_connections 0\n"
    )


def test_held_bytes_and_refusals_have_labels() -> None:
    stats = HttpStats()
    heads, unread = HeldBytes("heads", 1000), HeldBytes("unread", 2000)
    stats.watch(heads, unread)
    heads.hold(Client(), 70)
    stats.connections = 3
    for reason in ("head_size", "body_timeout", "head_size"):
        stats.count(reason)
    lines = stats.render().decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "bindery_http_connections 3",
        'bindery_http_held_bytes{kind="heads"} 70',
        'bindery_http_held_bytes{kind="unread"} 0',
        'bindery_http_held_bytes_max{kind="heads"} 1000',
        'bindery_http_held_bytes_max{kind="unread"} 2000',
        'bindery_http_refused_total{reason="body_timeout"} 1',
        'bindery_http_refused_total{reason="head_size"} 2',
    ]


def test_the_peak_counts_what_has_gone_since() -> None:
    stats = HttpStats()
    held = HeldBytes("bodies", 1000)
    stats.watch(held)
    client = Client()
    for _ in range(3):
        stats.connected()
    held.hold(client, 500)
    stats.connections = 1
    held.release(client)
    assert stats.take_peak_size() == 3 * 8192 + 500
    assert stats.take_peak_size() == stats.needed_size == 8192


def test_the_needed_memory_counts_connections_and_held_bytes() -> None:
    stats = HttpStats()
    assert stats.needed_size == 0
    held = HeldBytes("bodies", 1000)
    stats.watch(held)
    held.hold(Client(), 500)
    stats.connections = 2
    assert stats.needed_size == 2 * 8192 + 500
