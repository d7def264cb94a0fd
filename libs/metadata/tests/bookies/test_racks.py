"""The record of racks in /bookies: Pulsar's form, compare-and-set, records that cannot be read, and following it."""

import asyncio
import json
from typing import Any

import pytest
from bindery_core.errors import BadRequest, Corrupt
from bindery_core.ids import BookieId
from bindery_metadata.bookies import racks
from bindery_metadata.bookies.racks import RackFollower, RackRecord, RackStore, parse_rack
from bindery_metadata.stores.store import MetadataStore
from store_environments import until

ONE, TWO = BookieId("bookie-1.bookies:3181"), BookieId("10.0.0.2:3181")
PULSARS = b'{"default":{"10.0.0.2:3181":{"rack":"/r2","hostname":"two"}},"gold":{"x:1":{"rack":"r1","weight":7}}}'
"""A record as Pulsar writes it, with a member that is unknown here."""


async def read(store: MetadataStore) -> Any:
    return json.loads((await store.get("/bookies")).data)


@pytest.mark.parametrize(
    ("text", "rack"), [("zone-a", "/zone-a"), (" /zone-a\n", "/zone-a"), ("/eu/eu-1", "/eu/eu-1"), ("a:1", "/a:1")]
)
def test_a_rack_has_one_or_two_levels(text: str, rack: str) -> None:
    assert parse_rack(text) == rack


@pytest.mark.parametrize("text", ["", "/", "/a/", "//a", "/a/b/c", "/a b", "/a\x00", "/\u00e4", "/" + "a" * 255])
def test_other_racks_are_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="not a rack"):
        parse_rack(text)


@pytest.mark.parametrize(
    ("info", "rack"),
    [
        ({"rack": "/zone-a"}, "/zone-a"),
        ({"rack": "zone-a"}, "/zone-a"),
        ({"rack": " /a "}, "/a"),
        ({"rack": "/"}, "/default-rack"),
        ({"rack": ""}, "/default-rack"),
        ({"rack": None}, "/default-rack"),
        ({"hostname": "h"}, "/default-rack"),
    ],
)
def test_racks_are_read_as_pulsar_reads_them(info: dict[str, Any], rack: str) -> None:
    record = RackRecord.decode(json.dumps({"group": {ONE: info}}).encode())
    assert record.rack_of(ONE) == rack
    assert record.rack_of(TWO) == "/default-rack"


def test_a_bookie_may_be_named_by_its_address() -> None:
    record = RackRecord.decode(PULSARS)
    assert record.rack_of("some-id", address="10.0.0.2:3181") == "/r2"
    assert record.rack_of("x:1", address="10.0.0.2:3181") == "/r1", "its id has precedence"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b"null",
        b'{"default":[]}',
        b'{"default":{"b":"/rack"}}',
        b'{"default":{"b":{"rack":7}}}',
        b'{"default":{"b":{"rack":["/a"]}}}',
        b"\xff",
        b"[" * 100_000,
        b'{"default":{"b":{"rack":"/' + b"a" * racks.SIZE_MAX + b'"}}}',
    ],
)
def test_a_record_that_cannot_be_read_is_refused_as_a_whole(data: bytes) -> None:
    with pytest.raises(Corrupt, match="record of racks"):
        RackRecord.decode(data)


async def test_a_rack_is_written_in_pulsars_form(store: MetadataStore) -> None:
    assert await RackStore(store).set_rack(ONE, "zone-a", hostname="host-1")
    assert await read(store) == {"default": {ONE: {"rack": "/zone-a", "hostname": "host-1"}}}
    assert not await RackStore(store).set_rack(ONE, "/zone-a", hostname="host-1"), "nothing has changed"
    assert (await store.get("/bookies")).stat.version == 0


async def test_a_change_keeps_everything_else(store: MetadataStore) -> None:
    await store.create("/bookies", PULSARS)
    rack_store = RackStore(store)
    await rack_store.set_rack(ONE, "/r3")
    await rack_store.set_rack(BookieId("x:1"), "/r9", hostname="x")
    assert await read(store) == {
        "default": {TWO: {"rack": "/r2", "hostname": "two"}, ONE: {"rack": "/r3"}},
        "gold": {"x:1": {"rack": "/r9", "weight": 7, "hostname": "x"}},
    }
    await rack_store.set_rack(ONE, "/r3", group="gold")
    assert (await read(store))["gold"].keys() == {"x:1", ONE}
    assert await rack_store.unset_rack(ONE)
    assert await rack_store.unset_rack(BookieId("x:1"))
    assert not await rack_store.unset_rack(ONE)
    assert await read(store) == {"default": {TWO: {"rack": "/r2", "hostname": "two"}}}, "an empty group is removed"


async def test_an_empty_node_is_an_empty_record(store: MetadataStore) -> None:
    await store.create("/bookies")
    assert (await RackStore(store).get()).groups == {}
    await RackStore(store).set_rack(ONE, "/a")
    assert await read(store) == {"default": {ONE: {"rack": "/a"}}}


async def test_bookies_that_start_at_the_same_time_all_get_their_entries(
    store: MetadataStore, other: MetadataStore
) -> None:
    names = [BookieId(f"b{number}") for number in range(12)]
    await asyncio.gather(
        *(RackStore((store, other)[number % 2]).set_rack(name, f"/r{number}") for number, name in enumerate(names))
    )
    assert {name: info["rack"] for name, info in (await read(store))["default"].items()} == {
        name: f"/r{number}" for number, name in enumerate(names)
    }


async def test_a_record_that_cannot_be_read_is_not_overwritten(store: MetadataStore) -> None:
    await store.create("/bookies", b"{broken")
    with pytest.raises(Corrupt):
        await RackStore(store).set_rack(ONE, "/a")
    assert (await store.get("/bookies")).data == b"{broken"


async def test_a_follower_keeps_the_last_good_record(
    store: MetadataStore, other: MetadataStore, caplog: pytest.LogCaptureFixture
) -> None:
    follower = RackFollower(store)
    await follower.start()
    assert follower.rack_of(ONE) == "/default-rack", "there is no record yet"
    await RackStore(other).set_rack(ONE, "/a")
    await until(lambda: follower.rack_of(ONE) == "/a")
    version = (await other.get("/bookies")).stat.version
    await other.set("/bookies", b"{broken", version=version)
    await until(lambda: any(record.message == "racks_unreadable" for record in caplog.records))
    (logged,) = [record for record in caplog.records if record.message == "racks_unreadable"]
    assert vars(logged)["path"] == "/bookies"
    assert "cannot be read" in vars(logged)["error"]
    assert follower.rack_of(ONE) == "/a"
    await other.set("/bookies", b'{"default":{"%s":{"rack":"/b"}}}' % ONE.encode(), version=version + 1)
    await until(lambda: follower.rack_of(ONE) == "/b")
    await other.delete("/bookies", version=None)
    await until(lambda: follower.rack_of(ONE) == "/default-rack")
    await follower.close()


async def test_a_broken_record_at_the_start_does_not_stop_a_client(store: MetadataStore) -> None:
    await store.create("/bookies", b"{broken")
    follower = RackFollower(store)
    await follower.start()
    assert follower.rack_of(ONE) == "/default-rack"
    await follower.close()
