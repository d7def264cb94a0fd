"""Who may do what over HTTP, with brokers in memory."""

import asyncio
import json

import pytest
from access_parts import ROOT, SETTINGS, brokers, headers
from bindery_broker.settings import BrokerSettings
from bindery_metadata.stores.store import Node, Watch
from broker_harness import Harness

ROLES = ("super", "admin", "other-admin", "producer", "consumer", "topic-consumer", "nobody", "")
T = f"{ROOT}/t"
S = f"{T}/subscriptions/s"
ADMIN = "/admin/v2/persistent/acme/shop/t"
SPACE = "/admin/v2/namespaces/acme/shop"
EVERY_ADMIN = {"super", "admin"}
MATRIX = [
    ("POST", f"{T}/messages", b"x", EVERY_ADMIN | {"producer"}),
    ("GET", f"{T}/messages", None, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("POST", f"{S}/receive", {"consumer": "c", "wait_ms": 0}, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("POST", f"{S}/ack", {"message_ids": []}, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("POST", f"{S}/nack", {"message_ids": []}, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("PUT", S, {}, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("GET", f"{T}/subscriptions", None, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("GET", T, None, EVERY_ADMIN | {"producer", "consumer", "topic-consumer"}),
    ("GET", f"{T}/schema", None, EVERY_ADMIN | {"producer", "consumer", "topic-consumer"}),
    ("GET", f"{T}/policies", None, EVERY_ADMIN),
    ("PUT", f"{ROOT}/new", None, EVERY_ADMIN),
    ("GET", "/v1/namespaces/acme/shop", None, EVERY_ADMIN),
    ("PUT", "/v1/namespaces/acme/made", {}, EVERY_ADMIN),
    ("PUT", "/v1/tenants/made", {}, {"super"}),
    ("GET", "/v1/tenants/acme", None, EVERY_ADMIN),
    ("POST", f"{T}/moves", {"source": "x", "subscription": "s"}, {"super"}),
    ("GET", "/v1/tenants", None, set(ROLES)),
    ("GET", "/v1/topics", None, set(ROLES)),
    ("GET", f"{ADMIN}/stats", None, EVERY_ADMIN | {"producer", "consumer", "topic-consumer"}),
    ("GET", f"{ADMIN}/subscriptions", None, EVERY_ADMIN | {"consumer", "topic-consumer"}),
    ("PUT", f"{ADMIN}/unload", None, EVERY_ADMIN),
    ("GET", f"{ADMIN}/permissions", None, EVERY_ADMIN),
    ("GET", SPACE, None, EVERY_ADMIN),
    ("GET", f"{SPACE}/messageTTL", None, EVERY_ADMIN),
    ("GET", "/admin/v2/persistent/acme/shop", None, EVERY_ADMIN | {"producer", "consumer"}),
    ("GET", "/admin/v2/namespaces/acme", None, EVERY_ADMIN),
    ("GET", "/admin/v2/tenants", None, {"super"}),
    ("GET", "/admin/v2/brokers/bindery", None, {"super"}),
    ("GET", "/admin/v2/brokers/version", None, set(ROLES)),
    ("GET", "/lookup/v2/topic/persistent/acme/shop/t", None, EVERY_ADMIN | {"producer", "consumer", "topic-consumer"}),
    ("GET", "/docs", None, set(ROLES)),
]
"""Method, path, body, and the roles that may do it."""
IDS = [f"{method} {path}" for method, path, _, _ in MATRIX]


@pytest.fixture
async def broker():
    async with brokers() as (one,):
        answer = await one.client.post(f"{T}/messages", content=b"first", headers=headers("super"))
        assert answer.status_code == 200, answer.text
        yield one


async def ask(broker: Harness, method: str, path: str, body=None, *, role="", original=""):
    content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = headers(role, original=original)
    if not isinstance(body, bytes) and method != "GET":
        sent["content-type"] = "application/json"
        content = content or b"{}"
    return await broker.client.request(method, path, content=content, headers=sent)


@pytest.mark.parametrize(("method", "path", "body", "allowed"), MATRIX, ids=IDS)
async def test_each_role_may_do_what_its_permissions_say(broker, method, path, body, allowed):
    for role in ROLES:
        answer = await ask(broker, method, path, body, role=role)
        if role in allowed:
            assert answer.status_code not in (401, 403, 500), (role, answer.text)
        else:
            assert answer.status_code == 403, (role, answer.status_code, answer.text)


@pytest.mark.parametrize(("method", "path", "body", "allowed"), MATRIX, ids=IDS)
async def test_both_roles_of_a_request_that_was_passed_on_must_be_allowed(broker, method, path, body, allowed):
    everyone = allowed == set(ROLES)
    for role in filter(None, ROLES):
        answer = await ask(broker, method, path, body, role="proxy", original=role)
        assert (answer.status_code != 403) == (role in allowed), (role, answer.text)
        weak = await ask(broker, method, path, body, role="nobody", original=role)
        assert (weak.status_code != 403) == everyone, (role, weak.text)


async def test_lists_contain_what_the_role_may_use(broker):
    for name in ("other/space/x", "acme/shop/u", "acme/empty/v"):
        made = await ask(broker, "PUT", f"/v1/topics/{name}", role="super")
        assert made.status_code == 201, made.text

    async def seen(path: str, role: str) -> list[str]:
        answer = await ask(broker, "GET", path, role=role)
        assert answer.status_code == 200, answer.text
        (names,) = [value for value in answer.json().values() if isinstance(value, list)]
        return names

    topics = {
        "super": ["acme/empty/v", "acme/shop/t", "acme/shop/u", "other/space/x"],
        "admin": ["acme/empty/v", "acme/shop/t", "acme/shop/u"],
        "producer": ["acme/shop/t", "acme/shop/u"],
        "topic-consumer": ["acme/shop/t"],
        "nobody": [],
        "": [],
    }
    for role, names in topics.items():
        assert await seen("/v1/topics", role) == names
    assert await seen("/v1/namespaces", "topic-consumer") == ["acme/shop"]
    assert await seen("/v1/namespaces", "admin") == ["acme/empty", "acme/shop"]
    assert await seen("/v1/namespaces/acme", "producer") == ["acme/shop"]
    assert await seen("/v1/namespaces/none", "producer") == []
    assert await seen("/v1/tenants", "other-admin") == ["other"]
    assert await seen("/v1/tenants", "topic-consumer") == ["acme"]
    page = (await ask(broker, "GET", "/v1/topics?max=1", role="admin")).json()
    assert page == {"topics": ["acme/empty/v"], "next": "acme/empty/v"}
    page = (await ask(broker, "GET", "/v1/topics?max=1&after=acme/shop/t", role="admin")).json()
    assert page == {"topics": ["acme/shop/u"]}  # `next` does not show that there are others


async def test_subscriptions_of_other_roles_are_not_listed_and_cannot_be_used(broker):
    for name in ("s", "private"):
        assert (await ask(broker, "PUT", f"{T}/subscriptions/{name}", {}, role="super")).status_code < 300
    listed = await ask(broker, "GET", f"{T}/subscriptions", role="consumer")
    assert [one["subscription"] for one in listed.json()["subscriptions"]] == ["s"]
    assert (await ask(broker, "GET", f"{ADMIN}/subscriptions", role="consumer")).json() == ["s"]
    body = {"consumer": "c", "wait_ms": 0}
    assert (await ask(broker, "POST", f"{T}/subscriptions/private/receive", body, role="consumer")).status_code == 403


@pytest.mark.parametrize(
    ("path", "member"),
    [
        (T, "subscriptions"),
        (f"{T}/internal", "cursors"),
        (f"{ADMIN}/stats", "subscriptions"),
        (f"{ADMIN}/internalStats", "cursors"),
        (f"{ADMIN}/internal-info", "cursors"),
    ],
)
async def test_statistics_name_the_subscriptions_that_the_role_may_use(broker, path, member):
    for name in ("s", "private"):
        made = await ask(broker, "PUT", f"{T}/subscriptions/{name}", {"initial": "earliest"}, role="super")
        assert made.status_code == 201, made.text
    shown = {}
    for role in ("super", "consumer", "producer"):
        answer = await ask(broker, "GET", path, role=role)
        assert answer.status_code == 200, answer.text
        shown[role] = sorted(answer.json()[member])
        assert role == "super" or "private" not in answer.text
    assert shown == {"super": ["private", "s"], "consumer": ["s"], "producer": []}
    kept = (await ask(broker, "GET", f"{T}/retention", role="producer")).text
    assert "private" not in kept


async def test_messages_of_all_subscriptions_expire_only_for_roles_that_may_use_each(broker):
    for name in ("s", "private"):
        await ask(broker, "PUT", f"{T}/subscriptions/{name}", {"initial": "earliest"}, role="super")
    path = f"{ADMIN}/all_subscription/expireMessages/1"
    broker.clock.advance(60)
    assert (await ask(broker, "POST", path, role="consumer")).status_code == 403
    topic = next(iter(broker.broker.topics))
    assert [one.cursor.backlog_entries for one in topic.subscriptions.values()] == [1, 1]
    assert (await ask(broker, "POST", path, role="admin")).status_code == 204
    assert [one.cursor.backlog_entries for one in topic.subscriptions.values()] == [0, 0]


async def test_a_grant_is_in_force_when_the_call_returns(broker):
    assert (await ask(broker, "POST", f"{T}/messages", b"x", role="nobody")).status_code == 403
    granted = await ask(broker, "POST", f"{SPACE}/permissions/nobody", ["produce"], role="admin")
    assert granted.status_code == 204, granted.text
    assert (await ask(broker, "POST", f"{T}/messages", b"x", role="nobody")).status_code == 200
    assert (await ask(broker, "DELETE", f"{SPACE}/permissions/nobody", role="admin")).status_code == 204
    assert (await ask(broker, "POST", f"{T}/messages", b"x", role="nobody")).status_code == 403


async def test_a_new_administrator_of_a_tenant_is_one_when_the_call_returns(broker):
    assert (await ask(broker, "GET", SPACE, role="nobody")).status_code == 403
    body = {"admin_roles": ["nobody"]}
    assert (await ask(broker, "PUT", "/v1/tenants/acme", body, role="super")).status_code == 200
    assert (await ask(broker, "GET", SPACE, role="nobody")).status_code == 200


@pytest.mark.parametrize("path", ["/v1/tenants/brief", "/admin/v2/tenants/brief"])
async def test_a_new_tenant_of_a_deleted_name_has_no_administrators(broker, path):
    await ask(broker, "PUT", "/v1/tenants/brief", {"admin_roles": ["nobody"]}, role="super")
    assert (await ask(broker, "GET", "/v1/tenants/brief", role="nobody")).status_code == 200
    deleted = await ask(broker, "DELETE", path, role="super")
    assert deleted.status_code in (200, 204), deleted.text
    assert (await ask(broker, "GET", "/v1/tenants/brief", role="nobody")).status_code == 403


async def test_an_idempotency_key_belongs_to_its_role(broker):
    await ask(broker, "POST", f"{SPACE}/permissions/other", ["produce"], role="admin")
    sent = {}
    for role, original in (("producer", ""), ("other", ""), ("proxy", "producer"), ("producer", "")):
        body = b"of other" if role == "other" else b"of producer"
        named = {**headers(role, original=original), "idempotency-key": "k"}
        answer = await broker.client.post(f"{T}/messages", content=body, headers=named)
        assert answer.status_code == 200, answer.text
        sent.setdefault(original or role, set()).update(answer.json()["message_ids"])
    assert len(sent["producer"]) == 1, "also through a proxy"
    assert len(sent["other"]) == 1
    assert sent["producer"].isdisjoint(sent["other"])


async def test_a_waiting_receive_ends_when_its_permission_is_revoked(broker):
    body = {"consumer": "c", "wait_ms": 30_000, "initial": "latest"}
    waiting = asyncio.create_task(ask(broker, "POST", f"{S}/receive", body, role="consumer"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await ask(broker, "DELETE", f"{SPACE}/permissions/consumer", role="admin")).status_code == 204
    answer = await asyncio.wait_for(waiting, 30)
    assert answer.status_code == 403


async def test_a_stream_ends_when_its_permission_is_revoked(broker):
    await ask(broker, "PUT", S, {"initial": "latest"}, role="super")
    waiting = asyncio.create_task(ask(broker, "GET", f"{S}/stream?consumer=c", role="consumer"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await ask(broker, "DELETE", f"{SPACE}/permissions/consumer", role="admin")
    answer = await asyncio.wait_for(waiting, 30)
    assert answer.status_code == 200
    assert answer.text.startswith(": connected")


async def test_a_deleted_topic_takes_its_permissions_with_it(broker):
    assert (await ask(broker, "PUT", f"{ADMIN.removesuffix('t')}p/partitions", 2, role="super")).status_code == 204
    granted = await ask(broker, "POST", "/admin/v2/persistent/acme/shop/p/permissions/r", ["consume"], role="admin")
    assert granted.status_code == 204
    record = await broker.broker.policies.read_namespace("acme", "shop")
    assert len(record["auth_policies"]["destination_auth"]) == 4
    assert (await ask(broker, "DELETE", T, role="admin")).status_code == 200
    assert (await ask(broker, "DELETE", f"{ROOT}/p/partitions", role="admin")).status_code == 200
    record = await broker.broker.policies.read_namespace("acme", "shop")
    assert record["auth_policies"]["destination_auth"] == {}
    assert record["auth_policies"]["namespace_auth"] == {"producer": ["produce"], "consumer": ["consume"]}


async def test_messages_are_not_moved_to_a_topic_that_the_role_may_not_produce_to(broker):
    await ask(broker, "PUT", "/v1/topics/other/space/x", role="super")
    body = {"consumer": "c", "wait_ms": 0, "dead_letter": {"max_redeliver": 1, "topic": "other/space/x"}}
    assert (await ask(broker, "POST", f"{S}/receive", body, role="consumer")).status_code == 403
    retry = {"message_ids": ["1:1"], "dead_letter_topic": "other/space/x"}
    assert (await ask(broker, "POST", f"{S}/retry", retry, role="consumer")).status_code == 403
    assert (await ask(broker, "PUT", S, {}, role="consumer")).status_code < 300
    listed = await ask(broker, "GET", f"{S}/dead-letters?topic=other/space/x", role="consumer")
    assert listed.status_code == 403
    del body["dead_letter"]["topic"]  # the default topic belongs to the subscription
    assert (await ask(broker, "POST", f"{S}/receive", body, role="consumer")).status_code == 200


async def test_a_producer_creates_a_partitioned_topic_with_its_first_message():
    async with brokers(2) as made:
        auto = {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 4}
        policies = {"autoTopicCreationOverride": auto}
        await made[0].broker.policies.update_namespace("acme", "shop", lambda found: {**found, **policies})
        for index, broker in enumerate(made):
            answer = await ask(broker, "POST", f"{ROOT}/auto{index}/messages", b"x", role="producer")
            assert answer.status_code == 200, answer.text
            refused = await ask(broker, "PUT", f"{ROOT}/auto{index}-partition-9", role="producer")
            assert refused.status_code == 403
        body = {"consumer": "c", "wait_ms": 0}
        got = await ask(made[1], "POST", f"{ROOT}/auto0/subscriptions/s/receive", body, role="consumer")
        assert [one["payload"] for one in got.json()["messages"]] == ["x"]


async def test_all_brokers_check_and_pass_the_role_on():
    async with brokers(2) as made:
        for broker in made:
            for local in range(8):
                answer = await ask(broker, "POST", f"{ROOT}/m{local}/messages", b"x", role="producer")
                assert answer.status_code == 200, answer.text
                answer = await ask(broker, "POST", f"{ROOT}/m{local}/messages", b"x", role="consumer")
                assert answer.status_code == 403
                answer = await ask(broker, "DELETE", f"{ROOT}/m{local}", role="producer")
                assert answer.status_code == 403


async def test_nothing_is_checked_by_default():
    async with brokers(authorization={"enabled": False}) as (broker,):
        assert (await ask(broker, "POST", f"{T}/messages", b"x")).status_code == 200
        assert broker.broker.access is None


async def test_permissions_are_granted_listed_and_revoked(broker):
    granted = await ask(
        broker, "PUT", f"{ROOT}/t/permissions/nobody", {"actions": ["consume", "produce"]}, role="admin"
    )
    assert (granted.status_code, granted.json()) == (200, {"role": "nobody", "actions": ["produce", "consume"]})
    assert (await ask(broker, "POST", f"{T}/messages", b"x", role="nobody")).status_code == 200
    assert (await ask(broker, "POST", f"{ROOT}/u/messages", b"x", role="nobody")).status_code == 403
    listed = (await ask(broker, "GET", f"{T}/permissions", role="admin")).json()
    assert listed["permissions"] == {"nobody": ["produce", "consume"], "topic-consumer": ["consume"]}
    assert listed["namespace"] == {"consumer": ["consume"], "producer": ["produce"]}
    seen = (await ask(broker, "GET", f"{ADMIN}/permissions", role="admin")).json()
    assert seen["nobody"] == ["consume", "produce"]
    space = (await ask(broker, "GET", "/v1/namespaces/acme/shop/permissions", role="admin")).json()
    assert space["topics"] == {"acme/shop/t": listed["permissions"]}
    assert space["subscriptions"] == {"private": ["consumer-2"]}
    revoked = await ask(broker, "DELETE", f"{T}/permissions/nobody", role="admin")
    assert revoked.json() == {"role": "nobody", "actions": []}
    assert (await ask(broker, "POST", f"{T}/messages", b"x", role="nobody")).status_code == 403
    path = "/v1/namespaces/acme/shop/permissions/nobody"
    assert (await ask(broker, "PUT", path, {"actions": ["consume"]}, role="admin")).status_code == 200
    assert (await ask(broker, "GET", f"{T}/messages", role="nobody")).status_code == 200
    assert (await ask(broker, "PUT", path, {"actions": ["fly"]}, role="admin")).status_code == 400
    assert (
        await ask(broker, "PUT", path.replace("shop", "none"), {"actions": ["consume"]}, role="admin")
    ).status_code == 404


async def explained(broker: Harness, query: str, *, role: str):
    return await ask(broker, "GET", f"/v1/permissions/explain?{query}", role=role)


async def test_an_administrator_is_told_why_and_how_to_grant(broker):
    of_t = "topic=acme/shop/t&action=consume"
    found = (await explained(broker, f"{of_t}&role=topic-consumer", role="admin")).json()
    assert (found["allowed"], found["rule"], found["path"]) == (True, "topic", "/admin/policies/acme/shop")
    assert found["policy"] == "auth_policies.destination_auth"
    found = (await explained(broker, f"{of_t}&role=nobody", role="admin")).json()
    assert (found["allowed"], found["rule"]) == (False, "no_permission")
    assert found["fix"] == "bindery permissions grant acme/shop/t --role nobody --action consume"
    found = (await explained(broker, f"{of_t}&role=consumer&subscription=private", role="super")).json()
    assert (found["allowed"], found["rule"]) == (False, "subscription_roles")
    found = (await explained(broker, f"{of_t}&role=admin", role="admin")).json()
    assert (found["rule"], found["path"]) == ("tenant_admin", "/admin/policies/acme")
    found = (await explained(broker, f"{of_t}&role=super", role="admin")).json()
    assert (found["allowed"], found["rule"]) == (True, "super_user")


async def test_a_role_is_told_only_about_itself(broker):
    found = (await explained(broker, "topic=acme/shop/t&action=consume", role="consumer")).json()
    assert (found["role"], found["allowed"], found["rule"]) == ("consumer", True, "namespace")
    refused = await explained(broker, "topic=acme/shop/t&action=consume&role=producer", role="consumer")
    assert refused.status_code == 403
    assert (await explained(broker, "topic=acme/shop/t&action=consume", role="")).status_code == 403
    here = (await explained(broker, "topic=acme/shop/t&action=consume&subscription=private", role="nobody")).json()
    nowhere = (await explained(broker, "topic=none/none/t&action=consume&subscription=private", role="nobody")).json()
    assert here["reason"] == nowhere["reason"]
    assert here["rule"] == nowhere["rule"] == "no_permission"


async def test_without_authorization_it_is_explained_what_permissions_would_allow():
    """So that permissions can be checked before authorization is enabled."""
    off = {"enabled": False, "super_user_roles": "super"}
    async with brokers(authorization=off) as (broker,):
        of_t = "topic=acme/shop/t&action=consume&role=nobody"
        found = (await explained(broker, of_t, role="")).json()
        assert (found["enabled"], found["allowed"], found["allowed_if_enabled"]) == (False, True, False)
        assert (found["rule"], found["fix"]) == (
            "no_permission",
            "bindery permissions grant acme/shop/t --role nobody --action consume",
        )
        assert "authorization.enabled is off" in found["reason"]
        assert "if it were on, the role could not" in found["reason"]
        path = "/v1/namespaces/acme/shop/permissions/nobody"
        assert (await ask(broker, "PUT", path, {"actions": ["consume"]}, role="")).status_code == 200
        found = (await explained(broker, of_t, role="")).json()
        assert (found["enabled"], found["allowed"], found["allowed_if_enabled"]) == (False, True, True)
        assert found["rule"] == "namespace"
        found = (await explained(broker, of_t.replace("nobody", "super"), role="")).json()
        assert found["rule"] == "super_user"
        assert len(broker.broker.permissions.records) == 0, "nothing is followed"
        own = (await explained(broker, of_t.replace("&role=nobody", ""), role="")).json()
        assert (own["role"], own["allowed"]) == (None, True)
        assert "rule" not in own


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auth": {}}, "authorization.enabled needs authentication"),
        ({"authorization": {"enabled": True}}, "at least one role in authorization.super_user_roles"),
        ({"authorization": {"enabled": True, "super_user_roles": " , "}}, "at least one role"),
        ({"auth": {"passwords_file": "/not/read"}}, "needs a token of the broker itself"),
        (
            {"auth": {**SETTINGS["auth"], "anonymous_role": "super"}},
            r"anonymous_role \(super\) must not be",
        ),
    ],
    ids=[
        "without authentication",
        "without a super-user",
        "with an empty name only",
        "without a token of the broker",
        "with everybody as super-user",
    ],
)
def test_authorization_needs_authentication_a_super_user_and_a_token_of_the_broker(changes, message):
    with pytest.raises(ValueError, match=message):
        BrokerSettings(**{**SETTINGS, **changes})


async def test_a_filtered_list_reads_each_permission_once(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(10):
        assert (await broker.client.put(f"{ROOT}/n{index}", headers=headers("super"))).status_code == 201
    reads, get = [], broker.store.get

    async def counted(path: str, *, watch: Watch | None = None) -> Node:
        reads.append(path)
        return await get(path, watch=watch)

    monkeypatch.setattr(broker.store, "get", counted)
    for _ in range(2):
        reads.clear()
        listed = await broker.client.get("/v1/topics", headers=headers("topic-consumer"))
        assert listed.json()["topics"] == ["acme/shop/t"]
        assert len(reads) == len(set(reads))
