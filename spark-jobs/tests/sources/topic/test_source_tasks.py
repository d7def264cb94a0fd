"""Tasks of a topic and what they read, over ledgers in memory, without a cluster and without Spark."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_core.errors import BadRequest, BookieUnavailable, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.zookeeper_access import AccessFiles
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import TopicInfo, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position
from bindery_pulsar.message_codec import OutgoingMessage, encode_message
from bindery_pulsar.message_id import EARLIEST
from bindery_pulsar.topic_name import TopicName
from bindery_spark.schemas import MESSAGES
from bindery_spark.sources.topic import source as module
from bindery_spark.sources.topic.ledgers import extents_of
from bindery_spark.sources.topic.options import TopicOptions
from bindery_spark.sources.topic.positions import Bounds, Slice
from bindery_spark.sources.topic.source import TopicPart, TopicReader, TopicSource, TopicStreamReader
from pyspark.sql.datasource import EqualTo, GreaterThan
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

T = "public/default/t"


class Handle:
    def __init__(self, cluster: "Cluster", ledger_id: int) -> None:
        self._cluster, self._ledger_id = cluster, ledger_id
        self.last_add_confirmed = len(cluster.ledgers[ledger_id]) - 1

    async def wait_for_entry(self, entry_id: int, *, timeout_s: float) -> bool:
        self._cluster.waited.append((entry_id, timeout_s))
        return self._cluster.is_confirmed

    async def read(self, first: int, last: int) -> list[Any]:
        self._cluster.reads.append((self._ledger_id, first, last))
        payloads = self._cluster.ledgers[self._ledger_id]
        return [SimpleNamespace(entry_id=n, payload=payloads[n]) for n in range(first, last + 1)]

    async def release(self) -> None:
        self._cluster.held -= 1


class Cluster:
    """ZooKeeper in memory, and a ledger client that returns scripted payloads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = MemoryTree()
        self.ledgers: dict[int, list[bytes]] = {}
        self.closed: set[int] = set()
        self.passwords: dict[int, bytes] = {}
        self.reads: list[tuple[int, int, int]] = []
        self.waited: list[tuple[int, float]] = []
        self.opened: list[tuple[int, bytes, bool]] = []
        self.settings: list[Any] = []
        self.is_confirmed = True
        self.held = 0
        """Open handles, clients and stores."""
        monkeypatch.setattr(module, "zookeeper_connection", SimpleNamespace(connect=self._store))
        monkeypatch.setattr(module, "LedgerClient", SimpleNamespace(connect=self._client))

    async def _store(self, zookeeper: str, access: AccessFiles) -> Any:
        assert zookeeper == "h:1"
        self.access = access
        store = self.tree.connect()
        close = store.close

        async def closing() -> None:
            self.held -= 1
            await close()

        store.close = closing  # type: ignore[method-assign]
        self.held += 1
        return store

    async def _client(self, store: Any, *, settings: Any, **_: Any) -> "Cluster":
        self.settings.append(settings)
        self.held += 1
        return self

    async def close(self) -> None:
        self.held -= 1

    async def metadata(self, ledger_id: int) -> Any:
        if ledger_id not in self.ledgers:
            raise NoSuchLedger(ledger_id=ledger_id)
        payloads, is_closed = self.ledgers[ledger_id], ledger_id in self.closed
        return SimpleNamespace(
            state=LedgerState.CLOSED if is_closed else LedgerState.OPEN,
            last_entry_id=len(payloads) - 1 if is_closed else -1,
            length=sum(map(len, payloads)),
            ctime_ms=None,
            password=self.passwords.get(ledger_id),
        )

    async def metadata_versioned(self, ledger_id: int) -> Any:
        return SimpleNamespace(value=await self.metadata(ledger_id), created_ms=7)

    async def open(self, ledger_id: int, *, password: bytes, recover: bool) -> Handle:
        self.opened.append((ledger_id, password, recover))
        self.held += 1
        return Handle(self, ledger_id)

    def write(self, topic: str, *ledgers: int, closed_ms: int = 0) -> None:
        """Let the topic name these ledgers."""

        async def made() -> None:
            path = znode_layout.managed_ledger(tenant="public", namespace="default", topic=topic)
            records = tuple(LedgerRecord(ledger_id=n, entries=0, size=0, closed_ms=closed_ms) for n in ledgers)
            store = self.tree.connect()
            await store.create(path, encode_topic(TopicInfo(ledgers=records)), make_parents=True)

        asyncio.run(made())

    def divide(self, topic: str, count: int) -> None:
        """Let the topic have partitions."""

        async def made() -> None:
            path = znode_layout.partitioned_topic(tenant="public", namespace="default", topic=topic)
            await self.tree.connect().create(path, b'{"partitions":%d}' % count, make_parents=True)

        asyncio.run(made())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch)
    yield cluster
    assert cluster.held == 0, "everything is closed"


def options(**given: str) -> TopicOptions:
    return TopicOptions.parse({"zookeeper": "h:1", "topic": "t", **given})


def message(number: int, *, time_ms: int = 5) -> bytes:
    outgoing = OutgoingMessage(payload=b"%d" % number)
    return encode_message(outgoing, producer_name="me", publish_time_ms=time_ms, sequence_id=number)


def rows_of(reader: TopicReader | TopicStreamReader, part: TopicPart) -> list[dict]:
    return [row for batch in reader.read(part) for row in batch.to_pylist()]


def test_the_tasks_of_a_table_have_the_confirmed_entries_of_all_partitions(cluster: Cluster) -> None:
    cluster.divide("t", 2)
    cluster.write("t-partition-0", 3, 4)
    cluster.write("t-partition-1", 5)
    cluster.ledgers = {3: [message(n) for n in range(4)], 4: [message(9)], 5: [message(7), message(8)]}
    cluster.closed = {3}
    reader = TopicReader(options(partition_entries="5"))
    parts = reader.partitions()
    assert [[(s.topic, s.ledger_id, s.first, s.last) for s in part.slices] for part in parts] == [
        [(f"{T}-partition-0", 3, 0, 3), (f"{T}-partition-0", 4, 0, 0)],
        [(f"{T}-partition-1", 5, 0, 1)],
    ]
    found = [row for part in parts for row in rows_of(reader, part)]
    assert [row["message_id"] for row in found] == [
        *(f"3:{n}:0:-1" for n in range(4)),
        "4:0:0:-1",
        "5:0:1:-1",
        "5:1:1:-1",
    ]
    assert [row["payload"] for row in found] == [b"0", b"1", b"2", b"3", b"9", b"7", b"8"]
    assert {settings.wire_version for settings in cluster.settings} == {2}
    assert {recover for _, _, recover in cluster.opened} == {False}, "no ledger is fenced"


def test_timeouts_and_passwords_are_those_of_the_options_and_the_ledger(cluster: Cluster) -> None:
    cluster.ledgers, cluster.passwords = {3: [message(0)]}, {3: b"secret"}
    for given, connect_s in (("2", 2.0), ("60", 5.0)):
        reader = TopicReader(options(timeout_s=given))
        rows_of(reader, TopicPart((Slice(T, 3, 0, 0),), Bounds()))
        assert (cluster.settings[-1].read_timeout_s, cluster.settings[-1].connect_timeout_s) == (
            float(given),
            connect_s,
        )
        assert cluster.waited[-1] == (0, float(given))
    cluster.passwords.clear()
    rows_of(reader, TopicPart((Slice(T, 3, 0, 0),), Bounds()))
    assert cluster.opened == [(3, b"secret", False), (3, b"secret", False), (3, b"", False)]


def test_pushed_filters_narrow_the_ledgers_and_an_empty_table_has_one_empty_task(cluster: Cluster) -> None:
    cluster.write("t", 3, 4)
    cluster.ledgers = {3: [message(0)], 4: [message(1)]}
    reader = TopicReader(options())
    assert list(reader.pushFilters([EqualTo(("ledger_id",), 4), GreaterThan(("entry_id",), 7)])) == [
        GreaterThan(("entry_id",), 7)
    ]
    (part,) = reader.partitions()
    assert [each.ledger_id for each in part.slices] == [4]
    reader = TopicReader(options())
    assert list(reader.pushFilters([EqualTo(("ledger_id",), 4), EqualTo(("ledger_id",), 3)])) == []
    cluster.settings.clear()
    assert reader.planned() == []
    assert cluster.settings == [], "nothing is requested"
    (part,) = reader.partitions()
    assert part.slices == ()
    assert rows_of(reader, part) == []


def test_messages_outside_of_the_times_of_a_task_are_not_rows(cluster: Cluster) -> None:
    cluster.ledgers = {3: [message(n, time_ms=n) for n in range(5)]}
    part = TopicPart((Slice(T, 3, 0, 4),), Bounds(from_ms=2, to_ms=4))
    assert [row["entry_id"] for row in rows_of(TopicReader(options()), part)] == [2, 3]
    assert rows_of(TopicReader(options()), TopicPart((Slice(T, 3, 0, 1),), Bounds(from_ms=2, to_ms=4))) == []


@pytest.mark.parametrize(
    ("size", "count", "steps"),
    [
        (0, 3_000, [16, 32, 64, 128, 256, 512, 1_024, 968]),
        (100, 12_000, [16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 3_824]),
        (2**20, 40, [16, 8, 8, 8]),
        (2**20 - 1, 25, [16, 8, 1]),
        (2**23 + 1, 18, [16, 1, 1]),
    ],
)
def test_the_size_of_reads_doubles_up_to_4096_entries_or_8_mib(
    cluster: Cluster, size: int, count: int, steps: list[int]
) -> None:
    cluster.ledgers = {3: [bytes([255]) * size] * (count + 5)}
    found = rows_of(TopicReader(options()), TopicPart((Slice(T, 3, 5, count + 4),), Bounds()))
    firsts = [5 + sum(steps[:n]) for n in range(len(steps))]
    assert cluster.reads == [(3, first, first + step - 1) for first, step in zip(firsts, steps, strict=True)]
    assert [row["entry_id"] for row in found] == list(range(5, count + 5))


def test_a_full_batch_is_returned_before_the_next_read(cluster: Cluster) -> None:
    cluster.ledgers = {3: [b"\xff" * 2**22] * 5}
    batches = [b.num_rows for b in TopicReader(options()).read(TopicPart((Slice(T, 3, 0, 4),), Bounds()))]
    assert batches == [2, 2, 1], "8 MiB at most"


def test_reads_wait_for_the_rate(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    loop = SimpleNamespace(time=lambda: 5.0)
    monkeypatch.setattr(module, "asyncio", SimpleNamespace(get_running_loop=lambda: loop, sleep=sleep))
    cluster.ledgers = {3: [b"\xff" * 100] * 20}
    rows_of(TopicReader(options(rate="1000")), TopicPart((Slice(T, 3, 0, 19),), Bounds()))
    assert waits == [pytest.approx(1.35), pytest.approx(1.75)], "1600 and 400 bytes, 250 at once"


def test_an_entry_that_no_bookie_confirms_fails_the_task(cluster: Cluster) -> None:
    cluster.ledgers, cluster.is_confirmed = {3: [message(0)]}, False
    with pytest.raises(BookieUnavailable, match="too few bookies reported"):
        rows_of(TopicReader(options()), TopicPart((Slice(T, 3, 0, 0),), Bounds()))


# --- the data source --------------------------------------------------------------------------------------------------


def source(**given: str) -> TopicSource:
    return TopicSource({"zookeeper": "h:1", "topic": "t", **given})


def test_the_source_has_a_name_a_schema_and_readers() -> None:
    assert TopicSource.name() == "bindery-topic"
    assert source().schema() == MESSAGES
    assert isinstance(source(end="7:0").reader(MESSAGES), TopicReader)
    assert isinstance(source(start="latest").streamReader(MESSAGES), TopicStreamReader)
    with pytest.raises(BadRequest, match="unknown option"):
        source(ends="7:0").schema()


def test_options_of_streams_are_rejected_for_tables_and_vice_versa() -> None:
    with pytest.raises(BadRequest, match="start=latest is for streams"):
        source(start="latest").reader(MESSAGES)
    for end in ("7:0", "2026-01-01"):
        with pytest.raises(BadRequest, match="end is for tables"):
            source(end=end).streamReader(MESSAGES)


# --- the stream -------------------------------------------------------------------------------------------------------


def test_a_micro_batch_is_limited_in_entries_only_if_asked() -> None:
    assert isinstance(TopicStreamReader(options()).getDefaultReadLimit(), ReadAllAvailable)
    limit = TopicStreamReader(options(max_entries_per_trigger="9")).getDefaultReadLimit()
    assert isinstance(limit, ReadMaxRows)
    assert limit.max_rows == 9


@pytest.mark.parametrize("count", [1, 2])
def test_a_position_is_only_valid_for_one_partition(cluster: Cluster, count: int) -> None:
    cluster.divide("t", count)
    reader = TopicStreamReader(options(start="7:0"))
    if count == 1:
        assert reader.initialOffset() == {f"{T}-partition-0": {"ledger": 7, "entry": -1}}
        return
    with pytest.raises(BadRequest, match="a position belongs to one partition"):
        reader.initialOffset()
    assert len(TopicStreamReader(options()).initialOffset()) == 2


def test_a_stream_until_now_ends_at_the_entries_that_were_there_at_its_start(cluster: Cluster) -> None:
    cluster.write("t", 3)
    cluster.ledgers = {3: [message(n) for n in range(4)]}
    reader = TopicStreamReader(options())
    reader.prepareForTriggerAvailableNow()
    begin = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    cluster.ledgers[3] += [message(9)] * 5
    assert reader.latestOffset(begin, ReadMaxRows(3)) == {T: {"ledger": 3, "entry": 2}}
    end = reader.latestOffset(begin, ReadAllAvailable())
    assert end == {T: {"ledger": 3, "entry": 3}}
    assert reader.latestOffset(end, ReadMaxRows(100)) == end
    (part,) = reader.partitions(begin, end)
    assert [row["entry_id"] for row in rows_of(reader, part)] == [0, 1, 2, 3]
    assert reader.partitions(end, end) == []


def test_a_limit_is_divided_by_the_entries_that_each_partition_still_has(cluster: Cluster) -> None:
    cluster.divide("t", 2)
    cluster.write("t-partition-0", 3)
    cluster.write("t-partition-1", 4)
    cluster.ledgers = {3: [message(n) for n in range(2)], 4: [message(n) for n in range(9)]}
    for is_until_now in (False, True):
        reader = TopicStreamReader(options())
        if is_until_now:
            reader.prepareForTriggerAvailableNow()
        begin = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        end = reader.latestOffset(begin, ReadMaxRows(6))
        assert {name: at["entry"] for name, at in end.items()} == {f"{T}-partition-0": 1, f"{T}-partition-1": 3}


def test_partitions_without_new_entries_do_not_hide_those_of_others(cluster: Cluster) -> None:
    cluster.divide("t", 2)
    cluster.write("t-partition-0", 3)
    cluster.write("t-partition-1", 4)
    cluster.ledgers = {3: [message(0)], 4: [message(1)]}
    reader = TopicStreamReader(options())
    begin = {f"{T}-partition-0": {"ledger": 3, "entry": 0}, f"{T}-partition-1": {"ledger": 4, "entry": -1}}
    end = {f"{T}-partition-0": {"ledger": 3, "entry": 0}, f"{T}-partition-1": {"ledger": 4, "entry": 0}}
    (part,) = reader.partitions(begin, end)
    assert [(each.ledger_id, each.first, each.last) for each in part.slices] == [(4, 0, 0)]


@pytest.mark.parametrize(("lost", "is_error"), [("true", True), ("false", False)])
def test_a_missing_ledger_is_skipped_only_if_losses_are_allowed(cluster: Cluster, lost: str, is_error: bool) -> None:
    cluster.write("t", 3, 4)
    cluster.ledgers = {4: [message(0)]}
    reader = TopicReader(options(fail_on_data_loss=lost))
    if is_error:
        with pytest.raises(NoSuchLedger):
            reader.planned()
    else:
        (part,) = reader.planned()
        assert [each.ledger_id for each in part.slices] == [4]


def test_the_sizes_of_closed_ledgers_and_their_times_are_known(cluster: Cluster) -> None:
    cluster.write("t", 3, 4, closed_ms=77)
    cluster.ledgers, cluster.closed = {3: [bytes(10)] * 4, 4: [bytes(10)] * 4}, {3}

    async def found() -> Any:
        return await extents_of(cluster.tree.connect(), cluster, TopicName.parse("t"))  # type: ignore[arg-type]

    closed, still_open = asyncio.run(found())
    assert (closed.is_closed, closed.last_entry, closed.size) == (True, 3, 40)
    assert (closed.created_ms, closed.closed_ms) == (7, 77)
    assert (still_open.is_closed, still_open.last_entry, still_open.size) == (False, 3, 0)


def test_a_single_partition_is_not_divided_and_an_unused_one_has_no_ledgers(cluster: Cluster) -> None:
    assert TopicStreamReader(options(topic="t-partition-1")).initialOffset() == {
        f"{T}-partition-1": {"ledger": EARLIEST.ledger_id, "entry": EARLIEST.entry_id}
    }
    assert Position(-1, -1) == EARLIEST
    assert TopicReader(options(topic="t-partition-0")).planned() == []


def test_the_metadata_of_a_topic_is_read_again_if_one_of_its_ledgers_is_missing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention may have deleted the ledger since; after five readings the ledger counts as lost."""
    cluster.write("t", 3)
    asked: list[int] = []

    async def missing(ledger_id: int) -> Any:
        asked.append(ledger_id)
        if len(asked) == arrives_at:
            cluster.ledgers = {3: [message(0)]}
        return SimpleNamespace(value=await cluster.metadata(ledger_id), created_ms=7)

    monkeypatch.setattr(cluster, "metadata_versioned", missing)
    arrives_at = 0
    with pytest.raises(NoSuchLedger):
        TopicReader(options()).planned()
    assert len(asked) == 5
    asked.clear()
    arrives_at = 5
    assert len(TopicReader(options()).planned()) == 1
