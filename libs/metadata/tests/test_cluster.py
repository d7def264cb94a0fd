"""Initializing a cluster: once, again, concurrently, and over an incomplete cluster."""

import asyncio
import json
import random
import uuid

import pytest
from bindery_core.errors import BadRequest, BadVersion
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import ClusterStatus, cluster_status, initialize_cluster, record_cluster
from bindery_metadata.layout.layout import LAYOUT_TEXT, LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment

LAYOUT = LedgersLayout()
ALL = (
    "/ledgers",
    "/ledgers/available",
    "/ledgers/available/readonly",
    "/ledgers/INSTANCEID",
    "/ledgers/LAYOUT",
    "/managed-ledgers",
    "/namespace",
    "/admin/clusters/bindery",
    "/admin/policies/public",
    "/admin/policies/public/default",
)


async def test_a_new_cluster_has_bookkeepers_nodes_and_no_others_below_its_root(store: MetadataStore) -> None:
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert (made.created, made.found) == (ALL, ())
    assert await store.children("/ledgers") == ["INSTANCEID", "LAYOUT", "available"]
    assert await store.children("/ledgers/available") == ["readonly"]
    assert (await store.get("/ledgers/LAYOUT")).data == LAYOUT_TEXT
    instance_id = (await store.get("/ledgers/INSTANCEID")).data
    assert (len(instance_id), instance_id.decode()) == (36, made.instance_id)
    assert uuid.UUID(made.instance_id).version == 4


async def test_the_default_namespace_has_four_bundles(store: MetadataStore) -> None:
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1), cluster_name="c1")
    policies = json.loads((await store.get("/admin/policies/public/default")).data)
    assert policies["replication_clusters"] == ["c1"]
    assert policies["bundles"] == {
        "boundaries": ["0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"],
        "numBundles": 4,
    }
    assert json.loads((await store.get("/admin/policies/public")).data)["allowedClusters"] == ["c1"]


async def test_the_record_of_a_cluster_is_added_where_it_is_missing_and_kept_where_it_is(store: MetadataStore) -> None:
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1), cluster_name="c1")
    path = "/admin/clusters/c1"
    empty = {"serviceUrl": "", "brokerServiceUrl": ""}
    assert json.loads((await store.get(path)).data) == empty
    assert not await record_cluster(store, "c1")
    await store.delete(path, version=None)
    assert await record_cluster(store, "c1")
    assert json.loads((await store.get(path)).data) == empty
    await store.set(path, b'{"serviceUrl": "http://broker:8080"}', version=None)
    assert not await record_cluster(store, "c1")
    assert (await store.get(path)).data == b'{"serviceUrl": "http://broker:8080"}'
    with pytest.raises(BadRequest):
        await record_cluster(store, "a/b")


async def test_initializing_again_finds_all_nodes_and_changes_nothing(store: MetadataStore) -> None:
    first = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    second = await initialize_cluster(store, LAYOUT, randomness=random.Random(2))
    assert (second.created, second.found) == ((), ALL)
    assert second.instance_id == first.instance_id


async def test_concurrent_initializations_agree(store: MetadataStore, other: MetadataStore) -> None:
    one, two = await asyncio.gather(
        initialize_cluster(store, LAYOUT, randomness=random.Random(1)),
        initialize_cluster(other, LAYOUT, randomness=random.Random(2)),
    )
    assert one.instance_id == two.instance_id
    assert sorted([*one.created, *two.created]) == sorted(ALL)


async def test_missing_nodes_of_a_cluster_are_created(store: MetadataStore) -> None:
    await store.create("/ledgers/available", make_parents=True)
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert made.found == ("/ledgers", "/ledgers/available")


async def test_the_root_may_have_parents(store: MetadataStore) -> None:
    layout = LedgersLayout("/clusters/one/ledgers")
    made = await initialize_cluster(store, layout, randomness=random.Random(1))
    assert "/clusters/one/ledgers/LAYOUT" in made.created


async def test_ledgers_of_another_layout_are_refused(store: MetadataStore) -> None:
    other = b"2\norg.apache.bookkeeper.meta.FlatLedgerManagerFactory:1"
    await store.create("/ledgers/LAYOUT", other, make_parents=True)
    with pytest.raises(BadVersion) as raised:
        await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert raised.value.facts["layout"] == other
    assert (await store.get("/ledgers/LAYOUT")).data == other


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_initialization_continues_after_lost_responses(
    environment: StoreEnvironment, store: MetadataStore, applied: bool
) -> None:
    environment.lose_next_write(store, applied=applied)
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert {*made.created, *made.found} == set(ALL)
    assert (await store.get("/ledgers/INSTANCEID")).data.decode() == made.instance_id


async def test_the_status_reports_the_current_state(store: MetadataStore) -> None:
    assert await cluster_status(store, LAYOUT) == ClusterStatus(False, None, (), (), ())
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    assert await cluster_status(store, LAYOUT) == ClusterStatus(True, made.instance_id, (), (), ())
    await store.create(LAYOUT.bookie(BookieId("b0"), read_only=False), ephemeral=True)
    await store.create(LAYOUT.bookie(BookieId("b1"), read_only=True), ephemeral=True)
    await CookieStore(store, LAYOUT).write(BookieId("b2"), b"5\n", version=None)
    assert await cluster_status(store, LAYOUT) == ClusterStatus(True, made.instance_id, ("b0",), ("b1",), ("b2",))
