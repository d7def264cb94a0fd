"""Limits of tenants and namespaces count only requests that a permission allows, at the broker that runs them."""

from collections.abc import AsyncIterator

import pytest
from access_parts import ROOT, brokers, headers
from bindery_broker.errors import NotOwner
from bindery_broker.limits.accounts import Owner
from bindery_broker.settings import LimitSettings
from bindery_pulsar.topic_name import TopicName
from broker_harness import Harness

T = f"{ROOT}/t"
LIMITS = LimitSettings(tenant_requests_rate=5, namespace_requests_rate=5, namespace_bytes_in_rate=1_000, wait_ms_max=0)


@pytest.fixture
async def broker() -> AsyncIterator[Harness]:
    async with brokers(limits=LIMITS) as (one,):
        yield one


def used(broker: Harness) -> dict[str, dict[str, float]]:
    """Return what the tenant and the namespace of ROOT have used."""
    now = broker.clock.now()
    found = {}
    for owner, name in ((Owner.TENANT, "acme"), (Owner.NAMESPACE, "acme/shop")):
        account = broker.broker.accounts.account(owner, name, now)
        assert account is not None
        found[owner.value] = {use.limit.value: use.burst - use.available for use in account.usage(now)}
    return found


NOTHING = {"tenant": {"requests": 0}, "namespace": {"requests": 0, "bytes_in": 0}}


async def test_refused_requests_do_not_count_for_the_tenant_and_the_namespace(broker: Harness) -> None:
    for _ in range(20):
        refused = await broker.client.post(f"{T}/messages", content=b"x" * 900, headers=headers("nobody"))
        assert refused.status_code == 403
        assert (await broker.client.get(f"{ROOT}/t/policies", headers=headers("producer"))).status_code == 403
    assert used(broker) == NOTHING
    allowed = await broker.client.post(f"{T}/messages", content=b"x" * 900, headers=headers("producer"))
    assert allowed.status_code == 200, allowed.text
    assert used(broker) == {"tenant": {"requests": 1}, "namespace": {"requests": 1, "bytes_in": 900}}


async def test_operations_that_need_no_permission_count_for_the_client_only(broker: Harness) -> None:
    for _ in range(20):
        listed = await broker.client.get("/v1/namespaces/acme", headers=headers("nobody"))
        assert (listed.status_code, listed.json()["namespaces"]) == (200, [])
    assert used(broker) == NOTHING


async def test_refused_requests_count_for_their_client() -> None:
    async with brokers(limits=LimitSettings(principal_requests_rate=3, wait_ms_max=0)) as (broker,):
        statuses = [(await broker.client.get(T, headers=headers("nobody"))).status_code for _ in range(5)]
        assert statuses == [403, 403, 403, 429, 429]
        assert (await broker.client.get(T, headers=headers("super"))).status_code == 404


async def test_names_that_a_client_invents_displace_no_accounts(broker: Harness) -> None:
    for index in range(20):
        await broker.client.get(f"/v1/topics/x{index}/y/t", headers=headers("nobody"))
    assert len(broker.broker.accounts) == 0


async def test_a_tenant_above_its_limit_is_refused_after_permissions(broker: Harness) -> None:
    for _ in range(5):
        assert (await broker.client.get(T, headers=headers("producer"))).status_code == 404
    above = await broker.client.get(T, headers=headers("producer"))
    assert (above.status_code, above.json()["facts"]["kind"]) == (429, "tenant")
    stranger = await broker.client.get(T, headers=headers("nobody"))
    assert stranger.status_code == 403, "a stranger does not learn how much the tenant uses"


async def test_a_waiting_receive_counts_after_permissions() -> None:
    async with brokers(limits=LimitSettings(namespace_connections_max=1)) as (broker,):
        receive = f"{T}/subscriptions/s/receive"
        body = {"consumer": "c", "wait_ms": 0}
        for role, status in (("nobody", 403), ("consumer", 200)):
            answer = await broker.client.post(receive, json=body, headers=headers(role))
            assert answer.status_code == status
        account = broker.broker.accounts.account(Owner.NAMESPACE, "acme/shop", broker.clock.now())
        assert account is not None
        assert account.connections == 0


async def test_a_client_with_a_debt_of_bytes_sees_its_limits() -> None:
    async with brokers(limits=LimitSettings(principal_bytes_out_rate=10, wait_ms_max=0)) as (broker,):
        assert (await broker.client.get("/v1/topics", headers=headers("producer"))).status_code == 200
        assert (await broker.client.get("/v1/topics", headers=headers("producer"))).status_code == 429
        shown = await broker.client.get("/v1/limits", headers=headers("producer"))
        assert shown.status_code == 200
        assert shown.json()["owners"][0]["limits"][0]["available"] < 0


async def test_a_topic_counts_at_its_owner_only() -> None:
    async with brokers() as (broker,):
        admitted = []

        async def admit(name: TopicName, count: int) -> None:
            admitted.append((name.short, count))

        topics = broker.broker.topics
        topics.admit_new = admit
        name = TopicName.parse("acme/shop/new")
        with pytest.raises(NotOwner):
            await topics.get(name, create=True)
        assert admitted == []
        await broker.broker.locate(name, create=True)
        await topics.get(name, create=True)
        assert admitted == [("acme/shop/new", 1)]
