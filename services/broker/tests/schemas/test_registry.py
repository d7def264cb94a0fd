"""Schemas are registered once, in order, by any number of brokers, and never under a number that was used before."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from bindery_broker.errors import IncompatibleSchema, InvalidSchema, NoSuchSchema, NotSupported
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.namespaces.policies import SchemaCompatibility as Strategy
from bindery_broker.schemas import registry as registry_module
from bindery_broker.schemas.codec import Schema, SchemaType, decode_locator
from bindery_broker.schemas.registry import DEFINITION_SIZE_MAX, SchemaRegistry
from bindery_broker.schemas.store import SchemaStore
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import (
    BookieUnavailable,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NotEnoughBookies,
    OutcomeUnknown,
    TooLarge,
    TryAgain,
)
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_pulsar.topic_name import TopicName

TOPIC = TopicName.parse("orders")
PATH = "/schemas/public/default/orders"


def schema(count: int, *, kind: SchemaType = SchemaType.AVRO, **properties: str) -> Schema:
    """A record with `count` optional fields: any two of them are compatible."""
    fields = [{"name": f"f{i}", "type": ["null", "int"], "default": None} for i in range(count)]
    return Schema(kind, json.dumps({"type": "record", "name": "A", "fields": fields}).encode(), properties)


def other(kind: str) -> Schema:
    """A record that no `schema(...)` is compatible with."""
    return Schema(SchemaType.AVRO, json.dumps({"type": "fixed", "name": kind, "size": 2}).encode())


class Broker:
    """A registry of its own, with a connection and a cache of its own."""

    def __init__(self, tree: MemoryTree, ledgers: MemoryLedgers) -> None:
        self.znodes = tree.connect()
        self.client = MemoryLedgerClient(ledgers)
        self.store: MemoryStore = self.znodes
        self.registry = self.make(self.znodes)

    def make(self, znodes: Any) -> SchemaRegistry:
        settings = ManagedLedgerSettings(operation_timeout_s=5)
        return SchemaRegistry(SchemaStore(znodes, self.client, settings=settings, clock=lambda: 1_700_000_000_000))

    async def add(
        self, what: Schema, strategy: Strategy = Strategy.FULL, topic: TopicName = TOPIC, **options: Any
    ) -> int:
        return (await self.registry.register(topic, what, strategy=strategy, **options)).version


@pytest.fixture
def one(tree: MemoryTree, ledgers: MemoryLedgers) -> Broker:
    return Broker(tree, ledgers)


@pytest.fixture
def two(tree: MemoryTree, ledgers: MemoryLedgers) -> Broker:
    return Broker(tree, ledgers)


async def test_versions_are_counted_from_0_and_found_again_by_every_broker(one, two):
    assert [await one.add(schema(count)) for count in range(3)] == [0, 1, 2]
    assert await two.registry.versions(TOPIC) == [0, 1, 2]
    newest = await two.registry.newest(TOPIC)
    assert (newest.version, newest.schema, newest.created_ms) == (2, schema(2), 1_700_000_000_000)
    assert (await two.registry.get(TOPIC, 1)).schema == schema(1)
    with pytest.raises(NoSuchSchema):
        await two.registry.get(TOPIC, 3)
    assert await two.registry.register(TOPIC, schema(1), strategy=Strategy.FULL) == (1, False)


async def test_the_same_definition_with_other_white_space_is_the_same_version(one):
    await one.add(schema(2))
    spaced = json.dumps(json.loads(schema(2).definition), indent=4).encode()
    assert await one.registry.register(TOPIC, Schema(SchemaType.AVRO, spaced), strategy=Strategy.FULL) == (0, False)


async def test_partitions_share_the_schema_of_their_topic(one, two):
    assert await one.add(schema(1), topic=TOPIC.with_partition(0)) == 0
    assert await two.add(schema(2), topic=TOPIC.with_partition(7)) == 1
    assert await one.registry.versions(TOPIC) == [0, 1]
    assert (await one.znodes.exists(PATH)) is not None


async def test_ledgers_and_the_locator_are_those_of_pulsar(one, ledgers):
    await one.add(schema(1))
    await one.add(schema(2))
    locator = decode_locator((await one.znodes.get(PATH)).data)
    assert [entry.hash for entry in locator.index] == [schema(1).hash, schema(2).hash]
    for entry in locator.index:
        metadata = await one.client.metadata(entry.position.ledger_id)
        assert metadata.custom == {
            "application": b"pulsar",
            "component": b"schema",
            "pulsar/schemaId": b"public/default/orders",
        }
        assert (entry.position.entry_id, metadata.password, metadata.state) == (0, b"", LedgerState.CLOSED)


async def test_an_incompatible_schema_is_refused_and_leaves_nothing(one, ledgers):
    await one.add(schema(1))
    before = set(ledgers.ledgers)
    with pytest.raises(IncompatibleSchema, match="version 0") as caught:
        await one.add(other("B"))
    assert caught.value.facts["strategy"] == "FULL"
    assert (await one.registry.compare(TOPIC, other("B"), strategy=Strategy.FULL)).problem is not None
    assert await one.registry.compare(TOPIC, schema(2), strategy=Strategy.FULL) == (None, None)
    assert await one.registry.compare(TOPIC, schema(1), strategy=Strategy.FULL) == (0, None)
    assert set(ledgers.ledgers) == before
    assert await one.add(other("B"), Strategy.ALWAYS_COMPATIBLE) == 1


async def test_a_transitive_strategy_compares_with_every_version(one):
    number, text = (
        Schema(SchemaType.AVRO, json.dumps({"type": "record", "name": "A", "fields": fields}).encode())
        for fields in ([{"name": "n", "type": "int"}], [{"name": "n", "type": "string", "default": "x"}])
    )
    await one.add(number)
    await one.add(schema(0), Strategy.BACKWARD)  # without the field
    with pytest.raises(IncompatibleSchema, match="version 0"):
        await one.add(text, Strategy.BACKWARD_TRANSITIVE)
    assert await one.add(text, Strategy.BACKWARD) == 2


async def test_a_producer_may_be_refused_to_add_versions(one):
    assert await one.add(schema(1), may_add=False) == 0  # the first one
    assert await one.add(schema(1), may_add=False) == 0
    with pytest.raises(IncompatibleSchema, match="does not let producers"):
        await one.add(schema(2), may_add=False)


async def test_a_deletion_ends_the_comparison_and_keeps_the_numbers(one, two, ledgers):
    await one.add(schema(1))
    assert await one.registry.delete(TOPIC) == 1
    with pytest.raises(NoSuchSchema):
        await two.registry.newest(TOPIC)
    with pytest.raises(NoSuchSchema):
        await two.registry.get(TOPIC, 0)
    with pytest.raises(NoSuchSchema):
        await two.registry.delete(TOPIC)
    assert await two.registry.versions(TOPIC) == []
    assert await two.add(other("B")) == 2
    assert await two.add(other("B")) == 2
    assert await one.registry.versions(TOPIC) == [2]


async def test_a_forced_deletion_also_deletes_the_definitions_and_keeps_the_numbers(one, ledgers):
    for count in range(3):
        await one.add(schema(count))
    await one.registry.delete(TOPIC)
    assert await one.registry.delete(TOPIC, force=True) == 4
    locator = decode_locator((await one.znodes.get(PATH)).data)
    assert [entry.version for entry in locator.index] == [4]
    assert set(ledgers.ledgers) == {entry.position.ledger_id for entry in locator.index}
    with pytest.raises(NoSuchSchema):
        await one.registry.delete(TOPIC, force=True)
    assert await one.add(other("B")) == 5


async def test_two_brokers_that_add_at_the_same_time_get_different_versions(one, two, ledgers):
    results = await asyncio.gather(*(broker.add(schema(n)) for n, broker in enumerate([one, two] * 5)))
    assert sorted(results) == list(range(10))
    assert await one.registry.versions(TOPIC) == list(range(10))
    for n, version in enumerate(results):
        assert (await two.registry.get(TOPIC, version)).schema == schema(n)
    locator = decode_locator((await one.znodes.get(PATH)).data)
    assert set(ledgers.ledgers) == {entry.position.ledger_id for entry in locator.index}


async def test_two_brokers_that_add_the_same_schema_get_one_version(one, two, ledgers):
    results = await asyncio.gather(*(broker.add(schema(1)) for broker in [one, two] * 4))
    assert set(results) == {0}
    assert len(ledgers.ledgers) == 1


async def test_two_incompatible_first_schemas_leave_one(one, two):
    results = await asyncio.gather(one.add(schema(1)), two.add(other("B")), return_exceptions=True)
    assert sorted(str(type(result).__name__) for result in results) == ["IncompatibleSchema", "int"]


async def test_a_lost_schema_ledger_fails_checks_and_a_deletion_repairs(one, two, ledgers):
    await one.add(schema(1))
    await one.add(schema(2))
    position = decode_locator((await one.znodes.get(PATH)).data).index[0].position
    await one.client.delete(position.ledger_id)
    for action in (
        lambda: two.add(schema(3)),
        lambda: two.registry.get(TOPIC, 0),
        lambda: two.registry.compare(TOPIC, schema(3), strategy=Strategy.FULL_TRANSITIVE),
    ):
        with pytest.raises(Corrupt, match="delete the schema"):
            await action()
    assert (await two.registry.newest(TOPIC)).version == 1
    assert await two.registry.versions(TOPIC) == [0, 1]
    assert await two.registry.delete(TOPIC) == 2
    assert await two.add(schema(3)) == 3


async def test_a_schema_that_is_removed_while_it_is_read_is_not_damaged(one, two, monkeypatch):
    await one.add(schema(1))
    opened = two.client.open

    async def open_late(*args, **options):
        await one.registry.remove(TOPIC)
        return await opened(*args, **options)

    monkeypatch.setattr(two.client, "open", open_late)
    with pytest.raises(NoSuchSchema):
        await two.registry.newest(TOPIC)
    await one.add(schema(1))
    assert await two.add(schema(2)) == 0  # compared with nothing, because the first one is gone


async def test_a_schema_of_a_topic_that_is_deleted_meanwhile_is_removed(one, ledgers):
    checks = []

    async def check(topic):
        checks.append(topic)
        if len(checks) == 2:
            raise Conflict("the topic was deleted")

    one.registry.check_new = check
    with pytest.raises(Conflict, match="deleted"):
        await one.add(schema(1))
    assert checks == [TOPIC, TOPIC]
    assert await one.registry.versions(TOPIC) == []
    assert ledgers.ledgers == {}


async def test_an_unreachable_ledger_is_no_lost_one(one, two, ledgers):
    await one.add(schema(1))
    ledgers.fail_next("open", BookieUnavailable("away"))
    with pytest.raises(TryAgain):
        await two.add(schema(2))
    assert await two.add(schema(2)) == 1


async def test_a_failed_write_leaves_no_version(one, ledgers):
    for operation in ("create", "add", "close"):
        ledgers.fail_next(operation, NotEnoughBookies("too few"))
        with pytest.raises(TryAgain):
            await one.add(schema(1))
    assert await one.registry.versions(TOPIC) == []
    assert await one.add(schema(1)) == 0
    assert len(ledgers.ledgers) == 1


class Unsure:
    """A metadata store whose next write has an unknown outcome."""

    def __init__(self, inner: MemoryStore, *, done: bool, error: Callable[[], Exception]) -> None:
        self.inner, self.done, self.error, self.armed = inner, done, error, True

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in ("create", "set") or not self.armed:
            return found

        async def write(*args: Any, **options: Any) -> Any:
            self.armed = False
            if self.done:
                await found(*args, **options)
            raise self.error()

        return write


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("done", [True, False])
async def test_a_write_of_unknown_outcome_is_determined(one, two, ledgers, before, done):
    for count in range(before):
        await two.add(schema(count))
    registry = one.make(Unsure(one.znodes, done=done, error=lambda: MetadataOutcomeUnknown("lost")))
    assert await registry.register(TOPIC, schema(5), strategy=Strategy.FULL) == (before, True)
    assert await two.registry.versions(TOPIC) == list(range(before + 1))
    assert len(ledgers.ledgers) == before + 1


async def test_an_outcome_that_cannot_be_determined_keeps_the_ledger(one, two):
    unsure = Unsure(one.znodes, done=True, error=lambda: MetadataOutcomeUnknown("lost"))

    async def away(_path: str) -> None:
        raise MetadataUnavailable("away")

    unsure.sync = away  # type: ignore[attr-defined]
    with pytest.raises(OutcomeUnknown):
        await one.make(unsure).register(TOPIC, schema(5), strategy=Strategy.FULL)
    assert (await two.registry.get(TOPIC, 0)).schema == schema(5)


async def test_a_store_that_is_away_changes_nothing(one, ledgers):
    registry = one.make(Unsure(one.znodes, done=False, error=lambda: MetadataUnavailable("away")))
    with pytest.raises(MetadataUnavailable):
        await registry.register(TOPIC, schema(5), strategy=Strategy.FULL)
    assert ledgers.ledgers == {}


async def test_limits_are_refused(one, monkeypatch):
    with pytest.raises(TooLarge):
        await one.add(Schema(SchemaType.AVRO, b" " * (DEFINITION_SIZE_MAX + 1)))
    with pytest.raises(TooLarge):
        await one.add(schema(1, name="x" * registry_module.PROPERTIES_SIZE_MAX))
    with pytest.raises(NotSupported):
        await one.add(Schema(SchemaType.KEY_VALUE, b""))
    with pytest.raises(InvalidSchema):
        await one.add(Schema(SchemaType.AVRO, b"{}"))
    monkeypatch.setattr(registry_module, "VERSIONS_MAX", 3)
    for count in range(3):
        await one.add(schema(count))
    with pytest.raises(Conflict, match="force=true"):
        await one.add(schema(3))
    assert await one.registry.delete(TOPIC, force=True) == 3
    assert await one.add(schema(3)) == 4
