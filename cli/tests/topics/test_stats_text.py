"""Statistics of topics, subscriptions and consumers as text."""

from typing import Any

import pytest
from bindery.topics.stats_text import age, ago, retention_lines, subscription_lines, topic_lines

NOW_MS = 1_700_000_000_000
DELIVERY: dict[str, Any] = {
    "type": "shared",
    "backlog_entries": 12,
    "backlog_bytes": 2048,
    "backlog_messages": 120,
    "backlog_messages_exact": False,
    "oldest_unacked_at": NOW_MS - 90_000,
    "oldest_unacked_age_ms": 90_000,
    "delayed": 0,
    "unacked": 3,
    "blocked_on_unacked": False,
    "messages_out_per_s": 1.5,
    "acked_per_s": 0.25,
    "redelivered": 1,
    "last_acked_at": NOW_MS - 2_500,
}
STATS: dict[str, Any] = {
    "topic": "public/default/t",
    "owner": "http://one",
    "entries": 20,
    "size": 4096,
    "ledgers": 2,
    "first": "0:0",
    "last": "1:9",
    "messages_in": 200,
    "bytes_in": 4096,
    "messages_in_per_s": 20.0,
    "bytes_in_per_s": 410.0,
    "messages_out": 80,
    "bytes_out": 1000,
    "messages_out_per_s": 1.5,
    "bytes_out_per_s": 0.0,
    "last_published_at": None,
    "backlog_bytes": 2048,
    "oldest_unacked_age_ms": None,
    "subscriptions": {},
}


def test_a_topic_without_subscriptions() -> None:
    assert list(topic_lines(STATS, now_ms=NOW_MS)) == [
        "topic        public/default/t",
        "owner        http://one",
        "stored       20 entries, 4.0 KiB, 2 ledgers",
        "first, last  0:0, 1:9",
        "in           200 messages, 4.0 KiB; 20 messages/s, 410 B/s, last never",
        "out          80 messages, 1000 B; 1.5 messages/s, 0 B/s",
        "backlog      2.0 KiB, oldest -",
    ]


def test_subscriptions_are_a_table() -> None:
    full = DELIVERY | {"type": None, "backlog_messages": None, "blocked_on_unacked": True, "last_acked_at": None}
    subscriptions = {"a": DELIVERY | {"consumers": 2}, "long-name": full | {"consumers": 0}}
    lines = list(topic_lines(STATS | {"subscriptions": subscriptions}, now_ms=NOW_MS))[7:]
    assert lines == [
        "",
        "subscription  type    consumers  backlog     messages  bytes     oldest   unacked      delayed  out/s  acked/s"
        "  redelivered  last acked",
        "a             shared  2          12 entries  ~120      ~2.0 KiB  1.5 min  3            0        1.5    0.25   "
        "  1            2.5 s ago",
        "long-name     -       0          12 entries  -         ~2.0 KiB  1.5 min  3 (blocked)  0        1.5    0.25   "
        "  1            never",
    ]


def test_consumers_follow_their_subscriptions() -> None:
    consumer = {
        "consumer": "c1",
        "address": "10.0.0.",
        "connected_since": NOW_MS - 7_200_000,
        "calls_open": 1,
        "unacked": 3,
        "messages": 80,
        "messages_per_s": 1.5,
        "acked": 77,
        "redelivered": 1,
        "last_acked_at": None,
    }
    found = [DELIVERY | {"subscription": "s", "consumers": [consumer, consumer | {"address": "", "consumer": "c2"}]}]
    lines = list(subscription_lines(found, now_ms=NOW_MS))
    assert lines[1].split()[:3] == ["s", "shared", "2"]
    assert lines[2:] == [
        "",
        "consumer  subscription  address  connected  waiting  unacked  messages  out/s  acked  redelivered  last acked",
        "c1        s             10.0.0.  2 h ago    1        3        80        1.5    77     1            never",
        "c2        s             -        2 h ago    1        3        80        1.5    77     1            never",
    ]


def test_no_subscriptions() -> None:
    assert list(subscription_lines([], now_ms=NOW_MS)) == ["no subscriptions; the first consumer creates one"]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"), (1_500, "1.5 s"), (59_900, "59.9 s"), (60_000, "1 min"), (5_400_000, "1.5 h"), (86_400_000, "1 d"),
        (None, "-"),
    ],
)  # fmt: skip
def test_ages_have_the_largest_unit_that_fits(ms: int | None, text: str) -> None:
    assert age(ms) == text


def test_a_time_in_the_future_is_now() -> None:
    assert ago(NOW_MS + 5, now_ms=NOW_MS) == "0 s ago"


def test_names_of_others_are_escaped() -> None:
    found = {**DELIVERY, "backlog_entries": 1, "subscription": "a\x1b[2J", "consumers": []}
    heading, line = subscription_lines([found], now_ms=NOW_MS)
    assert line.startswith("a\\u001b[2J    shared  0          1 entry  ")
    assert len(heading.partition("type")[0]) == len(line.partition("shared")[0])
    assert next(iter(topic_lines(STATS | {"topic": "p/d/\n"}, now_ms=NOW_MS))) == "topic        p/d/\\n"


LEDGER: dict[str, Any] = {
    "ledger_id": 4,
    "entries": 10,
    "size": 2048,
    "closed_at": NOW_MS - 120_000,
    "code": "subscription",
    "reason": "subscription s has not acknowledged all of the ledger",
    "until": None,
    "subscription": "s",
}


def test_each_ledger_has_a_line_with_its_reason() -> None:
    last = {**LEDGER, "ledger_id": 5, "closed_at": None, "reason": "the ledger is open: messages are added to it"}
    answer = {"topic": "t", "time_s": 3600, "size_max": None, "is_policy": True, "ledgers": [LEDGER, last]}
    first, _, _, *rows = retention_lines(answer, now_ms=NOW_MS)
    assert first == "acknowledged ledgers are deleted 1 h after their close (policy)"
    assert rows[0].split()[:7] == ["4", "10", "2.0", "KiB", "2", "min", "ago"]
    assert rows[0].endswith("subscription s has not acknowledged all of the ledger")
    assert "open" in rows[1].split()


def test_the_ledgers_of_a_partitioned_topic_name_their_partitions() -> None:
    some = [{**LEDGER, "partition": number} for number in range(2)]
    answer = {"topic": "t", "time_s": 0, "size_max": 0, "is_policy": True, "ledgers": some}
    _, _, head, *rows = retention_lines(answer, now_ms=NOW_MS)
    assert head.split()[0].lower() == "partition"
    assert [row.split()[:2] for row in rows] == [["0", "4"], ["1", "4"]]


@pytest.mark.parametrize(
    ("time_s", "size_max", "how"),
    [
        (None, None, "kept without limit"),
        (60, 1024, "deleted 1 min after their close or above 1.0 KiB"),
        (None, 1024, "deleted above 1.0 KiB"),
    ],
)
def test_the_limits_of_a_retention(time_s: float | None, size_max: int | None, how: str) -> None:
    answer = {"topic": "t", "time_s": time_s, "size_max": size_max, "is_policy": False, "ledgers": []}
    first, *_ = retention_lines(answer, now_ms=NOW_MS)
    assert first == f"acknowledged ledgers are {how} (settings of the broker)"
