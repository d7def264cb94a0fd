"""Tables of metadata over a store in memory, without a cluster and without Spark."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.versioned import Versioned
from bindery_pulsar import znode_layout
from bindery_pulsar.managed_ledger_codec import CursorInfo, CursorState, TopicInfo, encode_cursor, encode_topic
from bindery_pulsar.managed_ledger_records import LedgerRecord, Position
from bindery_spark.schemas import TABLES
from bindery_spark.sources import metadata as module
from bindery_spark.sources.cluster import Cluster
from bindery_spark.sources.listing import ReadLedger
from bindery_spark.sources.metadata import MetadataReader, MetadataSource, ledger_row
from bindery_spark.sources.options import MetadataOptions
from pyspark.sql.datasource import EqualTo, LessThan

LAYOUT = LedgersLayout()
A, B, C = (BookieId(name) for name in "abc")


def metadata(**changes: object) -> LedgerMetadata:
    segments = (Segment(EntryId(0), (A, B)), Segment(EntryId(5), (A, C)))
    return LedgerMetadata(ensemble_size=2, write_quorum=2, ack_quorum=1, segments=segments).with_changes(**changes)


CLOSED = {"state": LedgerState.CLOSED, "last_entry_id": EntryId(9), "length": 100}


def row_of(found: LedgerMetadata, *, created_ms: int = 0) -> dict[str, Any]:
    return ledger_row(ReadLedger(LedgerId(7), Versioned(found, 4, created_ms)))


def test_a_closed_ledger_has_its_end_and_the_ends_of_its_segments() -> None:
    assert row_of(metadata(**CLOSED, custom={"k": b"v"}, digest_type=DigestType.MAC), created_ms=8) == {
        "ledger_id": 7,
        "state": "closed",
        "ensemble_size": 2,
        "write_quorum": 2,
        "ack_quorum": 1,
        "digest_type": "mac",
        "last_entry_id": 9,
        "length": 100,
        "created_ms": 8,
        "custom": {"k": b"v"},
        "segments": [
            {"first_entry": 0, "last_entry": 4, "ensemble": ["a", "b"]},
            {"first_entry": 5, "last_entry": 9, "ensemble": ["a", "c"]},
        ],
        "metadata_version": 4,
        "problem": None,
    }


def test_a_ledger_that_is_not_closed_has_no_end() -> None:
    row = row_of(metadata(state=LedgerState.IN_RECOVERY, ctime_ms=3), created_ms=8)
    assert (row["state"], row["last_entry_id"], row["length"]) == ("in_recovery", None, None)
    assert [segment["last_entry"] for segment in row["segments"]] == [4, None]
    assert row["created_ms"] == 3, "the metadata's time precedes that of the znode"
    assert row_of(metadata())["created_ms"] is None


def test_a_ledger_with_unreadable_metadata_has_no_segments() -> None:
    assert ledger_row(ReadLedger(LedgerId(7), None, "garbage")) == {
        "ledger_id": 7,
        "state": "open",
        "ensemble_size": 0,
        "write_quorum": 0,
        "ack_quorum": 0,
        "digest_type": "",
        "last_entry_id": None,
        "length": None,
        "created_ms": None,
        "custom": {},
        "segments": [],
        "metadata_version": 0,
        "problem": "garbage",
    }


class World:
    """A store in memory, to which the readers connect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = MemoryTree(now_ms=lambda: 77)
        self.registered: dict[BookieId, Any] = {}
        monkeypatch.setattr(module, "connected", self._connected)

    @asynccontextmanager
    async def _connected(self, zookeeper: str, ledgers_root: str, **_: object) -> AsyncIterator[Cluster]:
        assert (zookeeper, ledgers_root) == ("h:1", "/ledgers")
        store = self.tree.connect()
        manager = LedgerManager(store, LAYOUT, randomness=random.Random(2))
        yield Cluster(store, LAYOUT, SimpleNamespace(refresh=self._refresh), manager, None)  # type: ignore[arg-type]

    async def _refresh(self) -> dict[BookieId, Any]:
        return self.registered

    def create_ledgers(self, *ledgers: LedgerMetadata) -> list[LedgerId]:
        async def create() -> list[LedgerId]:
            manager = LedgerManager(self.tree.connect(), LAYOUT, randomness=random.Random(2))
            return [(await manager.create(each))[0] for each in ledgers]

        return asyncio.run(create())

    def put(self, path: str, data: bytes = b"") -> None:
        async def create() -> None:
            await self.tree.connect().create(path, data, make_parents=True)

        asyncio.run(create())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def reader(table: str, **options: str) -> MetadataReader:
    return MetadataReader(MetadataOptions.parse({"zookeeper": "h:1", "table": table, **options}), TABLES[table])


def read(reader: MetadataReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_the_source_has_a_name_and_the_schema_of_its_table() -> None:
    source = MetadataSource({"zookeeper": "h:1", "table": "marks"})
    assert (MetadataSource.name(), source.schema()) == ("bindery-metadata", TABLES["marks"])
    assert isinstance(source.reader(TABLES["marks"]), MetadataReader)


def test_ledgers_are_divided_into_tasks_and_filtered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.put(LAYOUT.root)
    assert read(reader("ledgers")) == []
    assert len(reader("ledgers").partitions()) == 1, "one empty task"
    ids = world.create_ledgers(*([metadata(**CLOSED)] * 4), metadata())
    parts = reader("ledgers", ledgers_per_part="2").partitions()
    assert [part.ledger_ids for part in parts] == [tuple(ids[:2]), tuple(ids[2:4]), tuple(ids[4:])]  # type: ignore[attr-defined]
    assert [row["ledger_id"] for row in read(reader("ledgers", ledgers_per_part="2"))] == ids
    narrow = reader("ledgers")
    assert list(narrow.pushFilters([EqualTo(("state",), "closed"), LessThan(("ledger_id",), ids[2])])) == []
    assert [row["ledger_id"] for row in read(narrow)] == ids[:2]
    opened = reader("ledgers")
    assert list(opened.pushFilters([EqualTo(("state",), "open")])) == []
    assert [row["ledger_id"] for row in read(opened)] == ids[4:]
    monkeypatch.setattr(module, "BATCH_ROWS", 2)
    whole = reader("ledgers")
    (part,) = whole.partitions()
    assert [batch.num_rows for batch in whole.read(part)] == [2, 2, 1]


def test_filters_are_applied_only_to_tables_with_ledgers() -> None:
    filters = [EqualTo(("ledger_id",), 7), EqualTo(("state",), "closed")]
    assert list(reader("topics").pushFilters(filters)) == filters
    for table in ("marks", "verified"):
        assert list(reader(table).pushFilters(filters)) == filters[1:]


def test_marks_have_the_reason_of_their_record_and_the_lock(world: World) -> None:
    first, second = world.create_ledgers(metadata(**CLOSED), metadata(**CLOSED))

    async def mark() -> None:
        store = world.tree.connect()
        marks = UnderreplicationManager(store, LAYOUT, randomness=random.Random(2), clock_ms=lambda: 5)
        await marks.prepare()
        await marks.mark(first, [A])
        await marks.mark(second, [B])

    asyncio.run(mark())
    rows = {row["ledger_id"]: row for row in read(reader("marks"))}
    nothing = {"reason": None, "marked_at_ms": 5, "attempts": 0, "locked": False}
    assert rows == {
        first: {"ledger_id": first, "bookies": ["a"], **nothing},
        second: {"ledger_id": second, "bookies": ["b"], **nothing},
    }
    only = reader("marks")
    assert list(only.pushFilters([EqualTo(("ledger_id",), second)])) == []
    assert [row["ledger_id"] for row in read(only)] == [second]


def test_topics_and_cursors_that_cannot_be_decoded_have_a_problem(world: World) -> None:
    def path(topic: str) -> str:
        return znode_layout.managed_ledger(tenant="public", namespace="default", topic=topic)

    assert read(reader("topics")) == []
    records = (
        LedgerRecord(ledger_id=3, entries=5, size=50, closed_ms=9),
        LedgerRecord(ledger_id=4, entries=0, size=0, closed_ms=0),
    )
    world.put(path("a"), b"\xff\xff")
    world.put(path("t"), encode_topic(TopicInfo(ledgers=records)))
    bad, good = read(reader("topics"))
    assert (bad["topic"], bad["ledgers"], bool(bad["problem"])) == ("public/default/a", [], True)
    assert good == {
        "topic": "public/default/t",
        "ledgers": [
            {"ledger_id": 3, "entries": 5, "bytes": 50, "closed_ms": 9},
            {"ledger_id": 4, "entries": 0, "bytes": 0, "closed_ms": None},
        ],
        "problem": None,
    }
    world.put(f"{path('t')}/bad", b"\xff\xff")
    for name, ledger_id in (("in-znode", -1), ("in-ledger-0", 0), ("in-ledger-6", 6)):
        state = CursorState(mark_delete=Position(3, 2)) if ledger_id < 6 else None
        world.put(f"{path('t')}/{name}", encode_cursor(CursorInfo(ledger_id=ledger_id, state=state)))
    rows = {row["subscription"]: row for row in read(reader("cursors"))}
    names = ("mark_delete_ledger", "mark_delete_entry", "cursor_ledger_id")
    places = {name: tuple(row[each] for each in names) for name, row in rows.items()}
    assert places["bad"] == (None, None, None)
    assert (places["in-znode"], places["in-ledger-0"]) == ((3, 2, None), (3, 2, 0))
    assert places["in-ledger-6"][2] == 6
    assert {name for name, row in rows.items() if row["problem"]} == {"bad"}


def test_verified_records_are_filtered_by_ledger(world: World) -> None:
    async def put() -> None:
        records = [Verified(LedgerId(n), "deep", 5, "r1", 3) for n in (7, 8)]
        await VerifiedRecords(world.tree.connect()).put_all(records)

    asyncio.run(put())
    assert len(read(reader("verified"))) == 2
    only = reader("verified")
    assert list(only.pushFilters([EqualTo(("ledger_id",), 8)])) == []
    assert read(only) == [{"ledger_id": 8, "level": "deep", "verified_at_ms": 5, "run_id": "r1"}]


def test_bookies_are_registered_or_have_a_cookie(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def spaces(bookies: list[BookieId], *, timeout_s: float) -> dict[BookieId, tuple[int, int]]:
        assert (sorted(bookies), timeout_s) == ([A, B], 5.0)
        return {A: (10, 4)}

    monkeypatch.setattr(module, "DiskSpaces", lambda _: SimpleNamespace(run=spaces))
    world.registered = {A: SimpleNamespace(read_only=False), B: SimpleNamespace(read_only=True)}
    world.put(f"{LAYOUT.cookies}/a")
    world.put(f"{LAYOUT.cookies}/c")
    names = ("bookie", "registration", "intent", "cookie", "free_bytes", "total_bytes")
    assert [tuple(row[name] for name in names) for row in read(reader("bookies"))] == [
        ("a", "writable", "active", True, 4, 10),
        ("b", "read_only", "active", False, None, None),
        ("c", "absent", "active", True, None, None),
    ]
