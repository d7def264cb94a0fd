"""Two brokers as processes, with a real ZooKeeper, whose clients authenticate and have permissions."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest
from bindery.standalone.plan import BROKER_HTTP_PORT, HOST
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster
from bindery_identity.tokens import sign

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KEY = b"k" * 40
TIMEOUT_S = 60.0
IN_FORCE_S = 1.0
"""Seconds after which a change at one broker is in force at the other, if the machine is not busy."""
BUSY_S = 15.0
"""The same on a busy machine."""
"""Maximum seconds until a permission is in force at the other broker."""
TOPIC = "/v1/topics/shop/orders/t"
SPACE = "/v1/namespaces/shop/orders"


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("auth")
    keys, token = folder / "keys", folder / "token"
    keys.write_bytes(KEY + b"\n")
    token.write_bytes(sign(KEY, subject="broker"))
    environment = {
        "BROKER_AUTH_TOKENS_KEYS_FILE": str(keys),
        "BROKER_AUTH_PROXY_ROLES": "broker",
        "BROKER_AUTH_BROKER_TOKEN_FILE": str(token),
        "BROKER_AUTHORIZATION_ENABLED": "true",
        "BROKER_AUTHORIZATION_SUPER_USER_ROLES": "root,broker",
    }
    with ThrowawayCluster(bookies=3, brokers=2, environment={**BUNDLES_STAY, **environment}) as running:
        urls = [f"http://{HOST}:{BROKER_HTTP_PORT + running.port_offset + i}" for i in range(2)]
        asyncio.run(prepare(urls))
        yield urls


async def prepare(urls: list[str]) -> None:
    """Create the tenant, its namespace and its topic, as their administrators."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        made = await ask(client, "PUT", urls[0] + "/v1/tenants/shop", "root", json={"admin_roles": ["owner"]})
        assert made.status_code == 201, made.text
        made = await ask(client, "PUT", urls[1] + SPACE, "owner", json={})
        assert made.status_code == 201, made.text
        assert (await ask(client, "PUT", urls[0] + TOPIC, "owner")).status_code == 201


def bearer(role: str) -> dict[str, str]:
    token = sign(KEY, subject=role, expires_at_s=int(time.time()) + 600)
    return {"authorization": f"Bearer {token.decode()}"}


async def ask(client: httpx.AsyncClient, method: str, url: str, role: str, **options: object) -> httpx.Response:
    """Repeat a request that a broker that starts, or a bundle that moves, cannot answer yet."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer = await client.request(method, url, headers=bearer(role), **options)  # type: ignore[arg-type]
        if answer.status_code not in (429, 503, 504) or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(0.1)


async def until(client: httpx.AsyncClient, url: str, role: str, status: int) -> float:
    """Return the seconds until a message of the role is answered with the status."""
    began = time.monotonic()
    while (await ask(client, "POST", url + TOPIC + "/messages", role, content=b"x")).status_code != status:
        assert time.monotonic() - began < TIMEOUT_S
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_a_grant_at_one_broker_is_in_force_at_the_other(urls: list[str]) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for url in urls:
            for path in (TOPIC, "/v1/topics/shop/none/t", "/v1/topics/none/none/t"):
                answer = await ask(client, "GET", url + path, "clerk")
                assert answer.status_code == 403, answer.text
            refused = await ask(client, "POST", url + TOPIC + "/messages", "clerk", content=b"x")
            assert refused.status_code == 403
        took = []
        for here, there in (urls, reversed(urls)):
            path = f"{here}{SPACE}/permissions/clerk"
            granted = await ask(client, "PUT", path, "owner", json={"actions": ["produce"]})
            assert granted.status_code == 200, granted.text
            took.append(await until(client, there, "clerk", 200))
            assert (await ask(client, "DELETE", path, "owner")).status_code == 200
            took.append(await until(client, there, "clerk", 403))
        assert min(took) < IN_FORCE_S, took
        assert max(took) < BUSY_S, took


async def test_a_stream_at_the_other_broker_ends_when_its_permission_is_revoked(urls: list[str]) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        path = f"{urls[0]}{SPACE}/permissions/reader"
        assert (await ask(client, "PUT", path, "owner", json={"actions": ["consume"]})).status_code == 200
        subscription = TOPIC + "/subscriptions/s"
        made = await ask(client, "PUT", urls[0] + subscription, "owner", json={"initial": "latest"})
        assert made.status_code < 300, made.text
        started = [asyncio.Event() for _ in urls]

        async def stream(index: int) -> None:
            url = f"{urls[index]}{subscription}/stream?consumer=c{index}"
            try:
                async with client.stream("GET", url, headers=bearer("reader")) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_bytes():
                        started[index].set()
            except httpx.RemoteProtocolError:  # the broker that passes the stream on closes the connection
                assert started[index].is_set()

        streams = [asyncio.create_task(stream(index)) for index in range(2)]
        async with asyncio.timeout(TIMEOUT_S):
            for event in started:
                await event.wait()
        assert (await ask(client, "DELETE", path, "owner")).status_code == 200
        async with asyncio.timeout(BUSY_S):
            await asyncio.gather(*streams)


async def test_lists_and_partitions_work_for_roles_with_few_permissions(urls: list[str]) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        whole = "/admin/v2/persistent/shop/orders/whole"
        made = await ask(client, "PUT", f"{urls[0]}{whole}/partitions", "owner", json=4)
        assert made.status_code == 204, made.text
        path = f"{urls[0]}/v1/topics/shop/orders/whole/permissions/writer"
        assert (await ask(client, "PUT", path, "owner", json={"actions": ["produce"]})).status_code == 200
        for url in urls:
            for _ in range(4):
                sent = await ask(client, "POST", f"{url}/v1/topics/shop/orders/whole/messages", "writer", content=b"x")
                assert sent.status_code == 200, sent.text
            listed = (await ask(client, "GET", f"{url}/v1/topics", "writer")).json()["topics"]
            assert listed == [f"shop/orders/whole-partition-{index}" for index in range(4)]
            assert (await ask(client, "GET", f"{url}/v1/tenants", "writer")).json()["tenants"] == ["shop"]
