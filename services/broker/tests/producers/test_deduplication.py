"""What is known of the producers of a topic survives its owner, is read again in pieces, and holds nothing back."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.producers import deduplication as module
from bindery_broker.producers.deduplication import CURSOR, Deduplication, DeduplicationLimits
from bindery_broker.producers.keys import KeyBudget, RequestKey
from bindery_broker.producers.sequences import IDLE_MS_MAX, Place
from bindery_core.errors import BookieUnavailable, TryAgain
from bindery_pulsar.managed_ledger_codec import decode_position
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.message_id import EARLIEST, Position
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata, RequestMark
from managed_ledger_cluster import Cluster

WINDOW_S = 300
ENTRIES_AFTER_SNAPSHOT = int(os.environ.get("ENTRIES_AFTER_SNAPSHOT", "10000"))
"""Entries after the snapshot of the test of many. docs/reliability.md has a run with a million."""


class Topic:
    """A topic at one of its owners."""

    def __init__(self, cluster: Cluster, ledger: ManagedLedger, *, is_on: bool = False) -> None:
        self.cluster = cluster
        self.ledger = ledger
        self.is_on = is_on
        self.budget = KeyBudget(1_000_000)
        self.state = Deduplication(
            ledger,
            topic="t",
            clock=lambda: cluster.now_ms,
            budget=self.budget,
            turns=asyncio.Semaphore(1),
            limits=DeduplicationLimits(window_s=WINDOW_S),
            is_on=lambda: self.is_on,
            snapshot_s=lambda: 120.0,
        )

    @property
    def persisted(self) -> dict[str, int]:
        return self.state.sequences.persisted()

    def entry(
        self, producer: str, first: int, last: int | None = None, *, key: RequestKey | None = None, marked: bool = True
    ) -> bytes:
        last = first if last is None else last
        mark = None
        if marked:
            key_digest, content = (None, None) if key is None else key
            mark = RequestMark(sequenced=key is None, key=key_digest, content=content, first=0, count=last - first + 1)
        messages = [OutgoingMessage(payload=b"x") for _ in range(first, last + 1)]
        if len(messages) == 1:
            return encode_message(
                messages[0], producer_name=producer, publish_time_ms=self.cluster.now_ms, sequence_id=first, mark=mark
            )
        return encode_batch(
            messages,
            producer_name=producer,
            publish_time_ms=self.cluster.now_ms,
            sequence_ids=range(first, last + 1),
            mark=mark,
        )

    async def store(self, producer: str, first: int, last: int | None = None, *, key: RequestKey | None = None) -> None:
        last = first if last is None else last
        with self.state.write():
            await self.state.ready()
            (position,) = await self.ledger.add_many([self.entry(producer, first, last, key=key)])
            self.state.stored(
                Place(first, last, position, last - first + 1),
                producer=producer if key is None else None,
                request=key,
                first=0,
                count=last - first + 1,
                now_ms=self.cluster.now_ms,
            )

    async def crash(self) -> None:
        self.state.end()
        await self.ledger.crash()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await cluster.end()


async def opened(cluster: Cluster, *, is_on: bool = False, client: object = None) -> Topic:
    return Topic(cluster, await cluster.open(client=client), is_on=is_on)


def request(number: int) -> RequestKey:
    return RequestKey(number.to_bytes(16, "big"), b"c" * 16)


async def test_sequence_ids_and_keys_survive_a_crash_without_a_snapshot(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0, 4)
    await topic.store("q", 7)
    await topic.store("http-1f", 0, 1, key=request(1))
    await topic.crash()
    again = await opened(cluster)
    await again.state.ready()
    assert again.persisted == {"p": 4, "q": 7}
    record = again.state.keys.find(request(1), now_ms=cluster.now_ms)
    assert record is not None
    assert [str(one) for one in record.ids(-1).values()] == ["0:2:-1:0", "0:2:-1:1"]
    again.state.end()


async def test_a_snapshot_is_what_pulsar_reads_and_only_later_entries_are_read_again(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0, 4)
    await topic.store("x", 0, key=request(1))
    await topic.state.snapshot()
    await topic.store("p", 5)
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    assert cursor.position_properties == {"p": 4}
    assert cursor.mark_delete == Position(0, 1)
    reader = await cluster.ledgers_client().open(cursor.store.ledger_id, recover=False)
    last = (await reader.read(reader.last_add_confirmed, reader.last_add_confirmed))[0]
    assert decode_position(last.payload).properties == {"p": 4}
    await topic.crash()
    again = await opened(cluster)
    await again.state.ready()
    assert again.state._replayed == 1
    assert again.persisted == {"p": 5}
    assert again.state.keys.find(request(1), now_ms=cluster.now_ms) is not None
    again.state.end()


async def test_after_a_clean_close_nothing_is_read_again(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    await topic.store("x", 0, key=request(1))
    await topic.state.close()
    await topic.ledger.close()
    again = await opened(cluster)
    await again.state.ready()
    assert again.state._replayed == 0
    assert again.persisted == {"p": 0}
    assert len(again.state.keys) == 1
    again.state.end()


async def test_a_snapshot_is_stored_after_a_thousand_entries(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    await topic.ledger.add_many([topic.entry("other", 0, marked=False)] * (module.ENTRIES_MAX - 2))
    await asyncio.sleep(3 * module.CHECK_S)
    assert cursor.backlog_entries == module.ENTRIES_MAX - 1
    await topic.ledger.add_many([topic.entry("other", 0, marked=False)])
    await asyncio.sleep(3 * module.CHECK_S)
    assert cursor.backlog_entries == 0
    await topic.crash()


async def test_a_snapshot_is_stored_after_two_minutes(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    await asyncio.sleep(118)
    assert cursor.backlog_entries == 1
    await asyncio.sleep(5)
    assert cursor.backlog_entries == 0
    commits = cursor.commits
    await asyncio.sleep(3_000)
    assert cursor.commits == commits, "an idle topic stores nothing"
    await topic.crash()


async def test_a_snapshot_does_not_pass_a_write_in_progress(cluster: Cluster) -> None:
    """The entry may be durable, and the table not have it yet."""
    topic = await opened(cluster)
    await topic.store("p", 0)
    with topic.state.write():
        await topic.state.ready()
        await topic.ledger.add_many([topic.entry("p", 1)])
        await topic.state.snapshot()
        await topic.crash()
    again = await opened(cluster)
    await again.state.ready()
    assert again.persisted == {"p": 1}
    again.state.end()


async def test_an_unknown_outcome_is_settled_by_the_next_request(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    with topic.state.write() as began:
        await topic.ledger.add_many([topic.entry("p", 1, 3)])
        topic.state.unknown_since(began)
    await topic.state.snapshot()
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    assert cursor.mark_delete == Position(0, 0)
    assert topic.persisted == {"p": 0}
    await topic.state.ready()
    assert topic.persisted == {"p": 3}
    await topic.crash()


async def test_many_entries_after_the_snapshot_are_read_in_pieces_and_the_progress_is_kept(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pulsar reads them all before it loads a topic; if that takes too long, it begins again, without end."""
    count = ENTRIES_AFTER_SNAPSHOT
    monkeypatch.setattr(module, "REPLAYED_PER_SNAPSHOT", count // 10)
    topic = await opened(cluster)
    await topic.store("p", 0)
    for first in range(1, count, 1_000):
        await topic.ledger.add_many([topic.entry("p", first + i) for i in range(1_000)])
    await topic.ledger.add_many([topic.entry("http-1", 0, key=request(1))])
    await topic.crash()
    progress: list[int] = []
    for _ in range(100):
        again = await opened(cluster)
        cursor = again.ledger.system_cursor(CURSOR)
        assert cursor is not None
        progress.append(cursor.backlog_entries)
        while not again.state.is_loaded and again.state._replayed < count * 3 // 20:  # this owner lives a short time
            await asyncio.sleep(0)
        if again.state.is_loaded:
            break
        monkeypatch.setattr(module, "LOADED_S_MAX", 0)
        with pytest.raises(TryAgain, match="still being loaded"):
            await again.state.ready()
        await again.crash()
    assert again.persisted == {"p": count}
    assert again.state.keys.find(request(1), now_ms=cluster.now_ms) is not None
    assert progress == sorted(progress, reverse=True)
    assert len(set(progress)) > 5
    await again.crash()


async def test_the_loading_is_tried_again_until_bookies_answer(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    await topic.crash()
    ledger = await cluster.open()
    read, failures = ledger.read, 0

    async def flaky(*args: object, **options: object) -> object:
        nonlocal failures
        failures += 1
        if failures <= 5:
            raise BookieUnavailable("made up")
        return await read(*args, **options)  # type: ignore[arg-type]

    ledger.read = flaky  # type: ignore[method-assign, assignment]
    again = Topic(cluster, ledger)
    with pytest.raises(TryAgain):
        await again.state.ready()
    await asyncio.sleep(60)
    await again.state.ready()
    assert again.persisted == {"p": 0}
    again.state.end()


async def test_a_damaged_cursor_is_replaced_and_everything_is_read_again(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    await topic.state.snapshot()
    await topic.store("p", 1)
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    ledger_id = cursor.store.ledger_id
    await topic.crash()
    await cluster.ledgers_client().delete(ledger_id)
    again = await opened(cluster)
    assert CURSOR in again.ledger.damaged_cursors
    await again.state.ready()
    assert again.persisted == {"p": 1}
    again.state.end()


async def test_named_producers_without_a_mark_count_if_the_policy_is_on(cluster: Cluster) -> None:
    """Such entries are those of Pulsar's clients. A chunk counts only if it is the last of its message."""
    topic = await opened(cluster, is_on=True)
    await topic.state.ready()
    chunks = []
    for chunk in range(2):
        metadata = MessageMetadata(
            producer_name="chunky", sequence_id=5 + chunk, publish_time=1, num_chunks_from_msg=2, chunk_id=chunk
        ).SerializeToString()
        chunks.append(len(metadata).to_bytes(4, "big") + metadata)
    marker = MessageMetadata(producer_name="m", sequence_id=1, publish_time=1, marker_type=10).SerializeToString()
    await topic.ledger.add_many(
        [
            topic.entry("p", 3, 9, marked=False),
            topic.entry("http-1f", 3, marked=False),
            *chunks[:1],
            len(marker).to_bytes(4, "big") + marker,
            b"no entry",
        ]
    )
    await topic.crash()
    on = await opened(cluster, is_on=True)
    await on.state.ready()
    assert on.persisted == {"p": 9}
    await on.crash()
    off = await opened(cluster)
    await off.state.ready()
    assert off.persisted == {}
    off.state.end()


async def test_the_cursor_is_deleted_once_nothing_is_remembered(cluster: Cluster) -> None:
    topic = await opened(cluster)
    await topic.store("p", 0)
    await topic.store("x", 0, key=request(1))
    assert topic.ledger.system_cursor(CURSOR) is not None
    cluster.now_ms += IDLE_MS_MAX
    await asyncio.sleep(600)
    assert topic.ledger.system_cursor(CURSOR) is None
    assert not topic.state.is_stored
    assert topic.budget.units == 0
    await topic.store("p", 0)
    assert topic.ledger.system_cursor(CURSOR) is not None
    await topic.crash()


async def test_keys_of_a_snapshot_end_with_the_window(cluster: Cluster) -> None:
    topic = await opened(cluster)
    for number in range(3):
        await topic.store("x", 0, key=request(number))
        await topic.state.snapshot()
        cluster.now_ms += 100_000
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    await topic.store("x", 0, key=request(9))
    await topic.state.snapshot()
    assert len([name for name in cursor.blobs if name.startswith("keys-")]) == 3
    assert topic.state.keys.find(request(0), now_ms=cluster.now_ms) is None
    await topic.crash()


async def test_many_snapshots_of_keys_are_merged(cluster: Cluster) -> None:
    topic = await opened(cluster)
    for number in range(2 * module.BLOBS_MAX):
        await topic.store("x", 0, key=request(number))
        await topic.state.snapshot()
    cursor = topic.ledger.system_cursor(CURSOR)
    assert cursor is not None
    assert len(cursor.blobs) <= module.BLOBS_MAX + 1
    await topic.crash()
    again = await opened(cluster)
    await again.state.ready()
    assert len(again.state.keys) == 2 * module.BLOBS_MAX
    again.state.end()


async def test_the_cursor_keeps_no_more_than_what_is_read_again(cluster: Cluster) -> None:
    """It is no subscription: a topic without one keeps its messages as long as the setting for it says."""
    topic = Topic(cluster, await cluster.open(retention_unsubscribed_s=3_600, retention_acked_s=0))
    await topic.store("p", 0)
    await topic.ledger.roll()
    await topic.state.snapshot()
    await topic.ledger.trim()
    assert topic.ledger.contains(Position(0, 0)), "nobody has subscribed yet"
    await topic.ledger.open_cursor("s", start=EARLIEST)
    await topic.ledger.cursors["s"].clear_backlog()
    assert list(topic.ledger.cursors) == ["s"]
    await topic.store("p", 1)
    await topic.ledger.roll()
    await topic.ledger.cursors["s"].clear_backlog()
    await topic.ledger.trim()
    assert not topic.ledger.contains(Position(0, 0))
    last = topic.ledger.last_confirmed
    assert topic.ledger.contains(last), "it must be read again"
    await topic.state.snapshot()
    await topic.ledger.trim()
    assert not topic.ledger.contains(last)
    await topic.crash()
