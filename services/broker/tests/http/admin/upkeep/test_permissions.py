"""Permissions are stored and shown in Pulsar's form. Nothing checks them."""

import json

import pytest
from bindery_broker.namespaces.permissions import ENTRIES_MAX

NS = "/admin/v2/namespaces/public/default"
P = "/admin/v2/persistent/public/default/t"
FULL = "persistent://public/default/t"
JSON = {"content-type": "application/json"}


async def post(broker, path, given):
    return await broker.client.post(path, content=json.dumps(given), headers=JSON)


async def get(broker, path):
    answer = await broker.client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_those_of_a_namespace(broker):
    assert await get(broker, f"{NS}/permissions") == {}
    assert (await post(broker, f"{NS}/permissions/clerk", ["consume", "produce"])).status_code == 204
    assert (await post(broker, f"{NS}/permissions/guest", ["consume"])).status_code == 204
    expected = {"clerk": ["produce", "consume"], "guest": ["consume"]}
    assert await get(broker, f"{NS}/permissions") == expected
    assert (await get(broker, NS))["auth_policies"]["namespace_auth"] == expected
    assert (await broker.client.delete(f"{NS}/permissions/clerk")).status_code == 204
    assert await get(broker, f"{NS}/permissions") == {"guest": ["consume"]}


async def test_those_of_subscriptions(broker):
    path = f"{NS}/permissions/subscription"
    assert (await post(broker, f"{path}/s", ["clerk", "guest"])).status_code == 204
    assert await get(broker, path) == {"s": ["clerk", "guest"]}
    assert (await broker.client.delete(f"{NS}/permissions/s/clerk")).status_code == 204
    assert (await broker.client.delete(f"{NS}/permissions/other/clerk")).status_code == 204
    assert await get(broker, path) == {"s": ["guest"]}


async def test_those_of_a_topic_with_those_of_its_namespace(broker):
    await post(broker, f"{NS}/permissions/clerk", ["consume"])
    assert (await post(broker, f"{P}/permissions/clerk", ["produce"])).status_code == 204
    assert await get(broker, f"{P}/permissions") == {"clerk": ["consume", "produce"]}
    assert (await get(broker, NS))["auth_policies"]["destination_auth"] == {FULL: {"clerk": ["produce"]}}
    assert (await broker.client.delete(f"{P}/permissions/clerk")).status_code == 204
    assert (await get(broker, NS))["auth_policies"]["destination_auth"] == {}
    assert (await broker.client.delete(f"{P}/permissions/clerk")).status_code == 204


async def test_those_of_a_partitioned_topic_are_those_of_its_partitions(broker):
    await broker.client.put(f"{P}/partitions", content="2", headers=JSON)
    await post(broker, f"{P}/permissions/clerk", ["produce"])
    stored = (await get(broker, NS))["auth_policies"]["destination_auth"]
    assert set(stored) == {FULL, f"{FULL}-partition-0", f"{FULL}-partition-1"}
    assert (await broker.client.delete(f"{P}/permissions/clerk")).status_code == 204
    assert (await get(broker, NS))["auth_policies"]["destination_auth"] == {}


async def test_other_members_are_kept(broker):
    await post(broker, f"{P}/permissions/clerk", ["produce"])
    await post(broker, f"{NS}/permissions/clerk", ["produce"])
    await broker.client.post(f"{NS}/messageTTL", content="7", headers=JSON)
    found = await get(broker, NS)
    assert found["message_ttl_in_seconds"] == 7
    assert set(found["auth_policies"]) == {"namespace_auth", "destination_auth"}


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        (f"{NS}/permissions/clerk", ["rule"], 400),
        (f"{NS}/permissions/clerk", "produce", 400),
        (f"{NS}/permissions/clerk", [1], 400),
        (f"{NS}/permissions/{'r' * 257}", ["produce"], 412),
        (f"{NS}/permissions/a%0Ab", ["produce"], 412),
        (f"{NS}/permissions/subscription/s", ["a\u2028b"], 412),
        (f"{NS}/permissions/subscription/s", [f"r{number}" for number in range(ENTRIES_MAX + 1)], 412),
        (f"{NS}-none/permissions/clerk", ["produce"], 404),
        (f"{P}/permissions/clerk", ["rule"], 400),
    ],
)
async def test_others_are_refused(broker, path, given, status):
    answer = await post(broker, path, given)
    assert (answer.status_code, set(answer.json())) == (status, {"reason"})
    assert "auth_policies" not in await get(broker, NS)


async def test_their_number_is_limited(broker):
    roles = {f"r{number}": ["produce"] for number in range(ENTRIES_MAX)}
    await broker.broker.policies.update_namespace(
        "public", "default", lambda found: {**found, "auth_policies": {"namespace_auth": roles}}
    )
    assert (await post(broker, f"{NS}/permissions/r0", ["consume"])).status_code == 204
    assert (await post(broker, f"{NS}/permissions/one-more", ["consume"])).status_code == 412
