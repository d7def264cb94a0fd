"""Pulsar's calls on the racks of bookies."""

import json

import pytest
from bindery_metadata.bookies.racks import RackStore
from bindery_pulsar.znode_layout import RACKS
from broker_harness import Harness

ROOT = "/admin/v2/bookies/racks-info"
ONE, TWO = "10.0.0.1:3181", "bookie-2"


async def put(broker: Harness, bookie: str, body: object, *, group: str | None = "default") -> tuple[int, object]:
    answer = await broker.post(f"{ROOT}/{bookie}", body, params={} if group is None else {"group": group})
    return answer.status_code, answer.json() if answer.content else None


async def test_racks_are_set_listed_and_removed(broker: Harness) -> None:
    assert (await broker.client.get(ROOT)).json() == {}
    assert await put(broker, ONE, {"rack": "/zone-a", "hostname": "bookie-1"}) == (204, None)
    assert await put(broker, TWO, {"rack": "zone-b"}, group="other") == (204, None)
    one = {"rack": "/zone-a", "hostname": "bookie-1"}
    assert (await broker.client.get(ROOT)).json() == {
        "default": {ONE: one},
        "other": {TWO: {"rack": "/zone-b", "hostname": None}},
    }
    assert (await broker.client.get(f"{ROOT}/{ONE}")).json() == one
    assert (await RackStore(broker.store).get()).rack_of(TWO) == "/zone-b"
    assert await put(broker, ONE, {"rack": "/zone-b", "hostname": "bookie-1"}, group="other") == (204, None)
    assert list((await broker.client.get(ROOT)).json()) == ["other"]
    for bookie in (ONE, TWO):
        assert (await broker.client.delete(f"{ROOT}/{bookie}")).status_code == 204
    assert (await broker.client.get(ROOT)).json() == {}


async def test_members_that_this_broker_does_not_know_stay(broker: Harness) -> None:
    stored = {"default": {ONE: {"rack": "/zone-a", "hostname": "h", "power": "ups-1"}, TWO: {"rack": None}}}
    await broker.store.create(RACKS, json.dumps(stored).encode())
    assert await put(broker, ONE, {"rack": "/zone-c", "hostname": "h"}) == (204, None)
    stored["default"][ONE]["rack"] = "/zone-c"
    assert json.loads((await broker.store.get(RACKS)).data) == stored
    assert (await broker.client.get(f"{ROOT}/{TWO}")).json() == {"rack": None, "hostname": None}


@pytest.mark.parametrize("bookie", [ONE, "readonly", "a%2Fb", "a%20b"])
async def test_a_bookie_without_a_rack_is_not_found(broker: Harness, bookie: str) -> None:
    for method in ("GET", "DELETE"):
        answer = await broker.client.request(method, f"{ROOT}/{bookie}")
        assert answer.status_code == 404
        assert answer.json()["reason"].startswith("Bookie rack placement configuration not found: ")


@pytest.mark.parametrize(
    ("bookie", "body", "group", "status", "reason"),
    [
        (ONE, {"rack": "/a"}, None, 412, "Bookie 'group' parameters is missing"),
        (ONE, {"rack": "/a"}, "", 412, "Bookie 'group' parameters is missing"),
        (ONE, {"rack": "/a"}, "g" * 256, 400, "at most 255 characters"),
        (ONE, {"rack": "/a", "hostname": "h" * 256}, "g", 400, "at most 255 characters"),
        (ONE, {"rack": "/a", "hostname": 1}, "g", 400, "the texts `rack` and `hostname`"),
        (ONE, {}, "g", 400, "the texts `rack` and `hostname`"),
        (ONE, ["/a"], "g", 400, "body: "),
        (ONE, {"rack": "/a/b/c"}, "g", 412, "not a rack"),
        (ONE, {"rack": ""}, "g", 412, "not a rack"),
        ("readonly", {"rack": "/a"}, "g", 412, "not a bookie id"),
    ],
)
async def test_what_is_wrong_is_refused_and_changes_nothing(
    broker: Harness, bookie: str, body: object, group: str | None, status: int, reason: str
) -> None:
    found, answer = await put(broker, bookie, body, group=group)
    assert (found, isinstance(answer, dict) and reason in answer["reason"]) == (status, True), answer
    assert await broker.store.exists(RACKS) is None


async def test_a_record_that_cannot_be_read_is_not_overwritten(broker: Harness) -> None:
    await broker.store.create(RACKS, b"[]")
    status, answer = await put(broker, ONE, {"rack": "/a"})
    assert status == 500, answer
    assert (await broker.client.get(ROOT)).status_code == 500
    assert (await broker.store.get(RACKS)).data == b"[]"
