"""Orphaned ledgers: each fate of a ledger, cases of doubt, and references that cannot be read."""

import json
from collections.abc import AsyncIterator

import pytest
from bindery_core.errors import Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.versioned import Versioned
from bindery_recovery.orphans import Fate, Finding, References, judge, read_references, still_orphan, survey

HOUR_MS = 3_600_000
NOW_MS = 100 * HOUR_MS
TOPIC = "public/default/persistent/t"
MANAGED = {"application": b"pulsar", "component": b"managed-ledger", "pulsar/managed-ledger": TOPIC.encode()}


class JsonCodec:
    """A codec for lists of ledger ids in JSON, instead of the format of brokers."""

    def topic_ledgers(self, data: bytes) -> list[int]:
        try:
            return list(json.loads(data))
        except ValueError as error:
            raise Corrupt("topic metadata cannot be read") from error

    cursor_ledgers = topic_ledgers


class Ledgers:
    def __init__(self) -> None:
        self.found: dict[int, Versioned[LedgerMetadata] | Exception] = {}

    def put(
        self,
        ledger_id: int,
        custom: dict[str, bytes],
        *,
        made_ms: int | None = 0,
        node_ms: int = 0,
        closed: bool = True,
    ) -> None:
        metadata = LedgerMetadata(
            ensemble_size=3,
            write_quorum=2,
            ack_quorum=2,
            ctime_ms=made_ms,
            custom=custom,
            segments=(Segment(EntryId(0), (BookieId("a"), BookieId("b"), BookieId("c"))),),
        )
        if closed:
            metadata = metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=1000)
        self.found[ledger_id] = Versioned(metadata, 0, node_ms or (made_ms or 1))

    async def list_ledgers(self) -> AsyncIterator[LedgerId]:
        for ledger_id in sorted(self.found):
            yield LedgerId(ledger_id)

    async def metadata_versioned(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        found = self.found[ledger_id]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
async def store() -> MemoryStore:
    """One topic with ledgers 1 and 2 and a subscription with the cursor ledger 3; a topic `a/b`; one schema."""
    store = MemoryTree().connect()
    await store.create("/managed-ledgers/public/default/persistent/a%2Fb", b"[]", make_parents=True)
    await store.create(f"/managed-ledgers/{TOPIC}", b"[1,2]", make_parents=True)
    await store.create(f"/managed-ledgers/{TOPIC}/s", b"[3]")
    await store.create(f"/managed-ledgers/{TOPIC}/idle", b"[]")
    await store.create("/schemas/public/default/t", b"\x08", make_parents=True)
    return store


async def fates(store: MemoryStore, ledgers: Ledgers) -> dict[int, Finding]:
    findings = survey(store, ledgers, JsonCodec(), now_ms=NOW_MS, older_than_ms=HOUR_MS)
    return {int(finding.ledger_id): finding async for finding in findings}


async def test_a_ledger_is_an_orphan_only_if_no_topic_and_no_cursor_references_it(store: MemoryStore) -> None:
    ledgers = Ledgers()
    for ledger_id in (1, 2, 3, 4):
        ledgers.put(ledger_id, MANAGED)
    ledgers.put(5, MANAGED | {"pulsar/managed-ledger": b"public/default/persistent/gone"}, closed=False)
    found = await fates(store, ledgers)
    assert [finding.fate for finding in found.values()] == [Fate.REFERENCED] * 3 + [Fate.ORPHAN] * 2
    assert "subscription s" in found[3].why
    assert (found[4].topic, found[4].why) == (TOPIC, f"created for {TOPIC}, which exists but does not reference it")
    assert "which no longer exists" in found[5].why
    assert (found[4].size, found[5].size) == (2000, None)


@pytest.mark.parametrize(
    ("made_ms", "node_ms", "fate"),
    [
        (NOW_MS - HOUR_MS + 1, 1, Fate.YOUNG),
        (NOW_MS - HOUR_MS, 1, Fate.ORPHAN),
        (1, NOW_MS - 1, Fate.YOUNG),  # its creator's clock was wrong, or the cluster was restored just now
        (None, NOW_MS - 1, Fate.YOUNG),
    ],
)
async def test_the_grace_period_counts_from_the_later_creation_time(
    store: MemoryStore, made_ms: int | None, node_ms: int, fate: Fate
) -> None:
    ledgers = Ledgers()
    ledgers.put(9, MANAGED, made_ms=made_ms, node_ms=node_ms)
    assert (await fates(store, ledgers))[9].fate is fate


@pytest.mark.parametrize(
    ("custom", "fate"),
    [
        ({}, Fate.FOREIGN),
        ({"application": b"kafka"}, Fate.FOREIGN),
        ({"application": b"bindery"}, Fate.ORPHAN),
        ({"application": b"pulsar"}, Fate.ORPHAN),
        ({"application": b"pulsar", "component": b"new-thing"}, Fate.UNCERTAIN),
        ({"application": b"pulsar", "component": b"schema", "pulsar/schemaId": b"public/default/t"}, Fate.UNCERTAIN),
        ({"application": b"pulsar", "component": b"schema", "pulsar/schemaId": b"public/default/u"}, Fate.ORPHAN),
        ({"application": b"pulsar", "component": b"schema"}, Fate.UNCERTAIN),
        (
            {
                "application": b"pulsar",
                "component": b"compacted-ledger",
                "pulsar/compactedTopic": b"persistent://public/default/t",
            },
            Fate.UNCERTAIN,
        ),
        (
            {
                "application": b"pulsar",
                "component": b"compacted-ledger",
                "pulsar/compactedTopic": b"persistent://public/default/no more",
            },
            Fate.ORPHAN,
        ),
        (
            {
                "application": b"pulsar",
                "component": b"compacted-ledger",
                "pulsar/compactedTopic": b"persistent://public/default/a/b",
            },
            Fate.UNCERTAIN,
        ),
    ],
)
async def test_the_custom_metadata_decides_the_fate_of_an_unreferenced_ledger(
    store: MemoryStore, custom: dict[str, bytes], fate: Fate
) -> None:
    ledgers = Ledgers()
    ledgers.put(9, custom)
    assert (await fates(store, ledgers))[9].fate is fate


@pytest.mark.parametrize(
    ("custom", "made_ms", "why"),
    [
        (MANAGED, NOW_MS, "younger than the grace period"),
        (MANAGED, None, "its creation time is unknown"),
        ({"application": b"kafka"}, 1, "created by kafka"),
        ({}, 1, "has no creator in its metadata"),
        ({"application": b"pulsar"}, 1, "no topic and no subscription references it"),
        ({"application": b"pulsar", "component": b"schema"}, 1, "schema of an unknown topic"),
        (MANAGED | {"pulsar/managed-ledger": b"a://b"}, 1, "created for a://b, which no longer exists"),
    ],
)
def test_the_reason_of_a_fate_names_what_decided_it(custom: dict[str, bytes], made_ms: int | None, why: str) -> None:
    ledgers = Ledgers()
    ledgers.put(9, custom, made_ms=made_ms)
    found = ledgers.found[9]
    assert isinstance(found, Versioned)
    if made_ms is None:
        found = Versioned(found.value, 0, 0)
    finding = judge(LedgerId(9), found, References({}, frozenset(), frozenset()), now_ms=NOW_MS, older_than_ms=HOUR_MS)
    assert finding.why == why


async def test_a_ledger_with_unreadable_metadata_is_kept_and_a_deleted_one_is_not_reported(store: MemoryStore) -> None:
    ledgers = Ledgers()
    ledgers.put(4, MANAGED)
    ledgers.found[5] = Corrupt("ledger metadata cannot be read")
    ledgers.found[6] = NoSuchLedger(ledger_id=6)
    found = await fates(store, ledgers)
    assert {ledger_id: finding.fate for ledger_id, finding in found.items()} == {4: Fate.ORPHAN, 5: Fate.UNREADABLE}


@pytest.mark.parametrize("path", ["public/default/persistent/t", "public/default/persistent/t/s"])
async def test_one_reference_that_cannot_be_read_ends_the_search(store: MemoryStore, path: str) -> None:
    ledgers = Ledgers()
    ledgers.put(4, MANAGED)
    await store.set(f"/managed-ledgers/{path}", b"\xff", version=None)
    with pytest.raises(Corrupt, match="therefore no ledger is reported as an orphan"):
        await fates(store, ledgers)


async def test_references_added_after_the_ledgers_were_listed_count(store: MemoryStore) -> None:
    """Ledger 4 is listed, and a topic references it before the references are read."""
    ledgers = Ledgers()
    ledgers.put(4, MANAGED)
    listed = ledgers.list_ledgers

    async def slow() -> AsyncIterator[LedgerId]:
        async for ledger_id in listed():
            yield ledger_id
        await store.set(f"/managed-ledgers/{TOPIC}", b"[1,2,4]", version=None)

    ledgers.list_ledgers = slow  # type: ignore[method-assign]
    assert (await fates(store, ledgers))[4].fate is Fate.REFERENCED


async def test_the_topic_is_read_again_before_a_ledger_is_deleted(store: MemoryStore) -> None:
    ledgers = Ledgers()
    ledgers.put(4, MANAGED)
    finding = (await fates(store, ledgers))[4]
    assert await still_orphan(store, JsonCodec(), finding)
    await store.set(f"/managed-ledgers/{TOPIC}/idle", b"[4]", version=None)
    assert not await still_orphan(store, JsonCodec(), finding)


async def test_a_subscription_that_is_deleted_during_the_search_hides_no_other(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the references of the other subscriptions were not read, their ledgers would be deleted."""
    children = store.children

    async def with_a_deleted_one(path: str) -> list[str]:
        return ["deleted", *await children(path)] if path.endswith(TOPIC) else await children(path)

    monkeypatch.setattr(store, "children", with_a_deleted_one)
    references = await read_references(store, JsonCodec())
    assert references.named[3] == f"{TOPIC}, subscription s"


async def test_an_empty_cluster_has_no_references() -> None:
    references = await read_references(MemoryTree().connect(), JsonCodec())
    assert (references.named, references.topics, references.schemas) == ({}, frozenset(), frozenset())
