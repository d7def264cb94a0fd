"""Policies are in memory before a topic opens, follow their znodes, and are changed by compare-and-set."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_broker.errors import NoSuchNamespace
from bindery_broker.namespaces import policy_store, records
from bindery_broker.namespaces.policies import EffectivePolicies, Rate
from bindery_broker.namespaces.policy_codec import change_namespace, change_topic
from bindery_broker.namespaces.policy_store import NAMESPACES_IDLE_MAX, PolicyStore
from bindery_broker.namespaces.resolution import Source
from bindery_core.errors import Corrupt, MetadataUnavailable, NoSuchTopic
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import Set
from bindery_pulsar.topic_name import TopicName

NAME = TopicName.parse("t/n/x")
PARTITION = TopicName.parse("t/n/x-partition-3")
OTHER = TopicName.parse("t/n/y")
PATH = "/admin/policies/t/n"
TOPIC_PATH = "/bindery/topic-policies/t/n/x"
DEFAULTS = EffectivePolicies(consumers_max=9)


@pytest.fixture
async def store(tree: MemoryTree) -> AsyncIterator[MemoryStore]:
    store = tree.connect()
    yield store
    await store.close()


@pytest.fixture
async def policies(store: MemoryStore) -> AsyncIterator[PolicyStore]:
    policies = PolicyStore(store, cluster="c", defaults=DEFAULTS)
    yield policies
    await policies.close()


def ttl(seconds: int) -> bytes:
    return records.encode({"message_ttl_in_seconds": seconds})


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_a_deleted_topic_loses_a_permission_that_this_broker_has_not_read_yet(
    tree: MemoryTree, store: MemoryStore, policies: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.create(PATH, records.encode({"message_ttl_in_seconds": 1}), make_parents=True)
    await policies.follow(NAME)
    monkeypatch.setattr(policies, "_apply", lambda *_: None)  # the watch is late
    permissions = {"auth_policies": {"destination_auth": {NAME.full: {"role": ["consume"]}}}}
    other = tree.connect()
    await other.set(PATH, records.encode(permissions), version=None)
    await policies.remove_topic(NAME)
    stored = records.decode((await other.get(PATH)).data, path=PATH)
    assert stored["auth_policies"]["destination_auth"] == {}
    version = (await other.get(PATH)).stat.version
    await policies.remove_topic(NAME)
    assert (await other.get(PATH)).stat.version == version, "nothing is written without permissions"
    await other.close()


async def test_without_znodes_the_brokers_level_applies(policies: PolicyStore) -> None:
    assert policies.effective(NAME) is DEFAULTS
    await policies.follow(NAME)
    assert policies.effective(NAME) is DEFAULTS
    assert await policies.namespace("t", "n") is None


async def test_policies_are_known_before_the_topic_opens_and_follow_their_znode(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(5), make_parents=True)
    await policies.follow(NAME)
    assert policies.effective(NAME).message_ttl_s == 5
    changed: list[TopicName] = []
    policies.on_change(changed.append)
    await store.set(PATH, ttl(6), version=None)
    await until(lambda: policies.effective(NAME).message_ttl_s == 6)
    assert changed == [NAME]
    await store.delete(PATH, version=None)
    await until(lambda: policies.effective(NAME) is DEFAULTS)
    await store.create(PATH, ttl(7))
    await until(lambda: policies.effective(NAME).message_ttl_s == 7)


async def test_the_policies_of_a_topic_come_first_and_apply_to_its_partitions(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(5), make_parents=True)
    await store.create(TOPIC_PATH, records.encode({"messageTTLInSeconds": 1}), make_parents=True)
    for name in (NAME, PARTITION, OTHER):
        await policies.follow(name)
    assert [policies.effective(name).message_ttl_s for name in (NAME, PARTITION, OTHER)] == [1, 1, 5]
    assert policies.explain(PARTITION)["message_ttl_s"].source is Source.TOPIC
    assert policies.explain(OTHER)["message_ttl_s"].source is Source.NAMESPACE
    assert policies.explain(OTHER)["consumers_max"].source is Source.BROKER
    await store.delete(TOPIC_PATH, version=None)
    await until(lambda: policies.effective(PARTITION).message_ttl_s == 5)


async def test_policies_of_a_topic_that_another_broker_sets_first_apply_to_the_open_topic(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await policies.follow(PARTITION)
    await store.create(TOPIC_PATH, records.encode({"messageTTLInSeconds": 1}), make_parents=True)
    await until(lambda: policies.effective(PARTITION).message_ttl_s == 1)
    await store.set(TOPIC_PATH, records.encode({"messageTTLInSeconds": 2}), version=None)
    await until(lambda: policies.effective(PARTITION).message_ttl_s == 2)


async def test_policies_that_other_code_asks_for_are_those_of_the_namespace(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(5), make_parents=True)
    await policies.namespace("t", "n")
    assert policies.effective(NAME).message_ttl_s == 5
    assert policies.explain(NAME)["message_ttl_s"].value == 5


async def test_what_cannot_be_read_leaves_the_last_values_in_force(store: MemoryStore, policies: PolicyStore) -> None:
    await store.create(PATH, ttl(5), make_parents=True)
    await store.create(TOPIC_PATH, records.encode({"maxProducerPerTopic": 2}), make_parents=True)
    await policies.follow(NAME)
    for broken in (b"{", b'{"message_ttl_in_seconds": "5"}'):
        await store.set(PATH, broken, version=None)
        await until(lambda: PATH in policies.unreadable)
        assert policies.effective(NAME).message_ttl_s == 5
        await store.set(PATH, ttl(5), version=None)
        await until(lambda: not policies.unreadable)
    await store.set(TOPIC_PATH, b"[]", version=None)
    await until(lambda: TOPIC_PATH in policies.unreadable)
    assert policies.effective(NAME).producers_max == 2
    policies.forget(NAME)
    assert not policies.unreadable


async def test_a_topic_opens_although_its_policies_cannot_be_read(store: MemoryStore, policies: PolicyStore) -> None:
    await store.create(PATH, b"{", make_parents=True)
    await store.create(TOPIC_PATH, b"{", make_parents=True)
    await policies.follow(NAME)
    assert policies.effective(NAME) is DEFAULTS
    assert policies.unreadable == {PATH, TOPIC_PATH}
    assert await policies.namespace("t", "n") == {}


async def test_a_topic_without_policies_costs_no_request(store: MemoryStore, policies: PolicyStore) -> None:
    await policies.follow(NAME)
    store.fail_next(MetadataUnavailable("must not be asked"))
    for number in range(100):
        await policies.follow(TopicName.parse(f"t/n/topic-{number}"))
    with pytest.raises(MetadataUnavailable, match="must not be asked"):
        await store.exists("/")


async def test_an_outage_delays_the_first_read_and_changes_nothing_later(
    tree: MemoryTree, store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(5), make_parents=True)
    await policies.follow(NAME)
    other = tree.connect()
    tree.expire(store)
    assert policies.effective(NAME).message_ttl_s == 5
    await other.set(PATH, ttl(6), version=None)
    await until(lambda: policies.effective(NAME).message_ttl_s == 6)
    await other.close()


async def test_a_namespace_that_cannot_be_read_for_long_is_an_error(
    tree: MemoryTree, store: MemoryStore, policies: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_store, "READ_WAIT_S", 0.05)
    tree.suspend(store)
    with pytest.raises(MetadataUnavailable, match="policies of the namespace"):
        await policies.follow(NAME)
    policies.forget(NAME)
    tree.resume(store)


async def test_namespaces_that_are_not_in_use_are_forgotten(policies: PolicyStore) -> None:
    await policies.follow(NAME)
    for number in range(NAMESPACES_IDLE_MAX + 20):
        await policies.namespace("t", f"typo-{number}")
    watched = list(policies._namespaces)
    assert len(watched) == NAMESPACES_IDLE_MAX + 1
    assert ("t", "n") in watched
    assert ("t", "typo-19") not in watched
    await until(lambda: len(policies._followers) == 2 * (NAMESPACES_IDLE_MAX + 1))
    policies.forget(NAME)
    assert len(policies._namespaces) == NAMESPACES_IDLE_MAX


async def test_a_change_is_in_force_when_the_call_returns(store: MemoryStore, policies: PolicyStore) -> None:
    await store.create(PATH, records.encode({"future": 1}), make_parents=True)
    await policies.follow(NAME)
    rate = Rate(5, None)
    stored = await policies.update_namespace(
        "t", "n", lambda record: change_namespace(record, {"publish_rate": rate}, cluster="c")
    )
    assert policies.effective(NAME).publish_rate == rate
    assert stored["future"] == 1
    assert records.decode((await store.get(PATH)).data, path=PATH) == stored == await policies.read_namespace("t", "n")


async def test_a_change_is_repeated_after_a_conflict(
    tree: MemoryTree, store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(1), make_parents=True)
    seen = []

    def mutate(record: dict[str, Any]) -> dict[str, Any]:
        seen.append(record["message_ttl_in_seconds"])
        if len(seen) < 3:
            tree.znodes.apply([Set(PATH, ttl(len(seen) + 1), None)], owner=0, now_ms=0)
        return {**record, "max_producers_per_topic": 3}

    stored = await policies.update_namespace("t", "n", mutate)
    assert seen == [1, 2, 3]
    assert stored == {"message_ttl_in_seconds": 3, "max_producers_per_topic": 3}
    assert await policies.read_namespace("t", "n") == stored


async def test_a_change_that_conflicts_forever_is_given_up(
    tree: MemoryTree, store: MemoryStore, policies: PolicyStore
) -> None:
    await store.create(PATH, ttl(1), make_parents=True)

    def mutate(record: dict[str, Any]) -> dict[str, Any]:
        tree.znodes.apply([Set(PATH, ttl(1), None)], owner=0, now_ms=0)
        return {**record, "max_producers_per_topic": 3}

    with pytest.raises(MetadataUnavailable, match="keep changing"):
        await policies.update_namespace("t", "n", mutate)


@pytest.mark.parametrize("applied", [True, False])
async def test_a_change_whose_answer_was_lost_is_made_once(
    store: MemoryStore, policies: PolicyStore, applied: bool
) -> None:
    await store.create(PATH, ttl(1), make_parents=True)
    store.lose_next_write(applied=applied)
    await policies.update_namespace("t", "n", lambda record: {**record, "max_producers_per_topic": 3})
    assert (await policies.read_namespace("t", "n"))["max_producers_per_topic"] == 3
    assert (await store.get(PATH)).stat.version == 1


async def test_changes_that_cannot_be_made(store: MemoryStore, policies: PolicyStore) -> None:
    with pytest.raises(NoSuchNamespace, match="bindery namespaces create t/n"):
        await policies.update_namespace("t", "n", lambda record: record)
    with pytest.raises(NoSuchNamespace):
        await policies.read_namespace("t", "n")
    await store.create(PATH, ttl(1), make_parents=True)
    with pytest.raises(Corrupt):
        await policies.update_namespace("t", "n", lambda _record: {"message_ttl_in_seconds": "5"})
    assert (await store.get(PATH)).data == ttl(1)


async def test_the_policies_of_a_topic_are_one_znode_while_there_are_any(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await policies.follow(NAME)
    assert await policies.read_topic(PARTITION) == {}
    stored = await policies.update_topic(PARTITION, lambda record: change_topic(record, {"producers_max": 4}))
    assert stored == {"maxProducerPerTopic": 4} == await policies.read_topic(NAME)
    assert policies.effective(NAME).producers_max == 4
    assert await policies.update_topic(NAME, lambda _record: {}) == {}
    assert policies.effective(NAME).producers_max == 0
    assert await store.exists(TOPIC_PATH) is None
    assert await policies.update_topic(NAME, lambda record: record) == {}


async def test_policies_that_are_stored_while_their_topic_is_deleted_are_removed(
    store: MemoryStore, policies: PolicyStore
) -> None:
    async def check(name: TopicName) -> None:
        assert name == NAME
        assert await store.exists(TOPIC_PATH) is not None
        raise NoSuchTopic("no such topic")

    policies.check_topic = check
    with pytest.raises(NoSuchTopic):
        await policies.update_topic(PARTITION, lambda _record: {"maxProducerPerTopic": 4})
    assert await store.exists(TOPIC_PATH) is None


async def test_the_policies_of_a_topic_are_deleted_with_it_but_not_with_a_partition(
    store: MemoryStore, policies: PolicyStore
) -> None:
    await policies.update_topic(NAME, lambda _record: {"maxProducerPerTopic": 4})
    await policies.remove_topic(PARTITION)
    assert await store.exists(TOPIC_PATH) is not None
    await policies.remove_topic(NAME)
    await policies.remove_topic(NAME)
    assert await store.children("/bindery/topic-policies") == []
