"""The statistics of a topic in the format of Pulsar."""

from types import SimpleNamespace
from typing import Any

from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.stats import internal_stats
from bindery_pulsar.message_id import Position
from managed_ledger_cluster import Cluster, at, topic_of


async def test_the_ledgers_and_totals_of_a_topic(cluster: Cluster) -> None:
    topic = await cluster.open()
    await topic.add_many([b"abc", b"de"])
    cluster.now_ms += 5
    await topic.roll()
    await topic.add_many([b"f"])
    assert topic.internal_stats() == {
        "entriesAddedCounter": 3,
        "numberOfEntries": 3,
        "totalSize": 6,
        "currentLedgerEntries": 1,
        "currentLedgerSize": 1,
        "pendingAddEntriesCount": 0,
        "lastConfirmedEntry": "1:0",
        "state": "LedgerOpened",
        "ledgers": [
            {"ledgerId": 0, "entries": 2, "size": 5, "offloaded": False, "timestamp": 1_700_000_000_005},
            {"ledgerId": 1, "entries": 1, "size": 1, "offloaded": False, "timestamp": 0},
        ],
        "cursors": {},
        "properties": {},
    }


async def test_adds_in_flight_are_counted(cluster: Cluster) -> None:
    topic = await cluster.open()
    cluster.ledgers.hold_adds()
    adding = topic.submit_many([b"a"])
    assert topic.internal_stats()["pendingAddEntriesCount"] == 1
    cluster.ledgers.release_adds()
    await adding
    assert topic.internal_stats()["pendingAddEntriesCount"] == 0


async def test_the_state_of_a_cursor(cluster: Cluster) -> None:
    topic, cursor = await topic_of(cluster)
    assert topic.internal_stats()["cursors"]["s"] == {
        "markDeletePosition": "0:-1",
        "individuallyDeletedMessages": "[]",
        "totalNonContiguousDeletedMessagesRange": 0,
        "numberOfEntriesSinceFirstNotAckedMessage": 10,
        "cursorLedger": -1,
        "cursorLedgerLastEntry": -1,
        "state": "NoLedger",
        "properties": {},
    }
    await cursor.ack_many(at(0, 1))
    await cursor.ack_many(at(4))
    assert topic.internal_stats()["cursors"]["s"] == {
        "markDeletePosition": "0:1",
        "individuallyDeletedMessages": "[(0:3..0:4]]",
        "totalNonContiguousDeletedMessagesRange": 1,
        "numberOfEntriesSinceFirstNotAckedMessage": 7,
        "cursorLedger": 1,
        "cursorLedgerLastEntry": 1,
        "state": "Open",
        "properties": {},
    }


def test_a_cursor_ledger_with_the_id_zero_is_open() -> None:
    cursor: Any = SimpleNamespace(
        mark_delete=Position(7, 0),
        individually_acked=lambda: "[]",
        ranges_count=0,
        backlog_entries=1,
        store=SimpleNamespace(ledger_id=0, last_record=4),
        position_properties={"x": 1},
    )
    ledgers = LedgerList([LedgerRecord(ledger_id=7, entries=2)])
    stats = internal_stats(writer=None, ledgers=ledgers, cursors={"s": cursor}, properties={})["cursors"]["s"]
    assert (stats["state"], stats["cursorLedger"], stats["cursorLedgerLastEntry"]) == ("Open", 0, 4)
    assert stats["properties"] == {"x": 1}


def test_a_terminated_topic_has_no_writer() -> None:
    ledgers = LedgerList([LedgerRecord(ledger_id=7, entries=2, size=9, closed_ms=3)])
    stats = internal_stats(writer=None, ledgers=ledgers, cursors={}, properties={"a": "b"})
    assert (stats["entriesAddedCounter"], stats["pendingAddEntriesCount"]) == (0, 0)
    assert (stats["state"], stats["properties"]) == ("Terminated", {"a": "b"})
    assert stats["lastConfirmedEntry"] == str(Position(7, 1)) == "7:1"
