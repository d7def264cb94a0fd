"""Brokers as processes whose clients must authenticate."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from bindery.standalone.plan import BROKER_HTTP_PORT, HOST
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster
from bindery_identity.tokens import sign

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine takes minutes for seconds

KEYS = [bytes([65 + at]) * 40 for at in range(3)]
TIMEOUT_S = 40.0
LATE_S = 13.0
"""Seconds by which an answer may be late on a busy machine."""


class Cluster:
    """Two brokers that accept tokens, and their file of keys."""

    def __init__(self, running: ThrowawayCluster, keys: Path) -> None:
        self.keys = keys
        self.urls = [f"http://{HOST}:{BROKER_HTTP_PORT + running.port_offset + i}" for i in range(2)]

    def write_keys(self, *keys: bytes) -> None:
        new = self.keys.with_suffix(".new")
        new.write_bytes(b"\n".join(keys) + b"\n")
        new.rename(self.keys)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("auth")
    keys, token = folder / "keys", folder / "token"
    # The token of the brokers has the key that no test replaces.
    keys.write_bytes(KEYS[0] + b"\n" + KEYS[2] + b"\n")
    token.write_bytes(sign(KEYS[2], subject="broker"))
    environment = {
        "BROKER_AUTH_TOKENS_KEYS_FILE": str(keys),
        "BROKER_AUTH_PROXY_ROLES": "broker",
        "BROKER_AUTH_BROKER_TOKEN_FILE": str(token),
    }
    with ThrowawayCluster(bookies=3, brokers=2, environment={**BUNDLES_STAY, **environment}) as running:
        yield Cluster(running, keys)


def bearer(role: str, key: bytes = KEYS[0], *, for_s: int = 600) -> dict[str, str]:
    token = sign(key, subject=role, expires_at_s=int(time.time()) + for_s)
    return {"authorization": f"Bearer {token.decode()}"}


async def ask(client: httpx.AsyncClient, method: str, url: str, **kwargs: object) -> httpx.Response:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer = await client.request(method, url, **kwargs)  # type: ignore[arg-type]
        if answer.status_code not in (503, 504, 429) or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(0.1)


async def test_a_broker_answers_only_clients_that_it_knows(cluster: Cluster) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        url = cluster.urls[0]
        for path in ("/v1/topics/public/default/none", "/admin/v2/tenants", "/docs", "/unknown"):
            answer = await client.get(url + path)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"].startswith("Bearer")
            assert (await client.get(url + path, headers=bearer("x", b"w" * 40))).status_code == 401
        assert (await client.get(url + "/admin/v2/tenants")).json().keys() == {"reason"}
        assert (await client.get(url + "/readyz")).status_code == 200
        assert "bindery_authentications_total" in (await client.get(url + "/metrics")).text
        assert (await client.get(url + "/admin/v2/tenants", headers=bearer("alice"))).status_code == 200
        assert (
            await client.get(url + "/admin/v2/tenants", headers=bearer("alice") | {"bindery-role": "broker"})
        ).status_code == 403


async def test_each_broker_passes_requests_on_to_the_owner(cluster: Cluster) -> None:
    topic = "/v1/topics/public/default/passed-on"
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=bearer("alice")) as client:
        for number, url in enumerate(cluster.urls):
            sent = await ask(client, "POST", f"{url}{topic}/messages", content=f"m{number}")
            assert sent.status_code == 200, sent.text
        for url in cluster.urls:
            stats = await ask(client, "GET", url + topic)
            assert (stats.status_code, stats.json()["entries"]) == (200, 2)
        # Partitions are asked by one broker on behalf of the client, wherever they are.
        whole = "/admin/v2/persistent/public/default/whole/partitions"
        body = {"content": "4", "headers": bearer("alice") | {"content-type": "application/json"}}
        made = await ask(client, "PUT", cluster.urls[0] + whole, **body)
        assert made.status_code == 204, made.text
        for url in cluster.urls:
            sent = await ask(client, "POST", f"{url}/v1/topics/public/default/whole/messages", content="x")
            assert sent.status_code == 200, sent.text


async def test_only_brokers_may_send_many_requests_over_one_connection(cluster: Cluster) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "bindery-requests/1"}
    forged = {"bindery-passed-on": "0" * 64 + " 0 -"}
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        url = cluster.urls[0] + "/v1/peer-requests"
        for credentials, status in (
            ({}, 401),
            (bearer("broker", b"w" * 40), 401),
            (bearer("alice"), 403),
            (bearer("alice") | forged, 403),
            (bearer("broker", KEYS[2]), 403),  # the role of a proxy must name a client
        ):
            assert (await client.get(url, headers=upgrade | credentials)).status_code == status
        # The brokers themselves do: one of them has passed requests on in the test before.
        assert any([await _peer_connections(client, url) for url in cluster.urls])


async def _peer_connections(client: httpx.AsyncClient, url: str) -> float:
    lines = (await client.get(url + "/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("bindery_broker_peer_connections"))


async def test_keys_are_rotated_without_a_failed_request(cluster: Cluster) -> None:
    failures: list[str] = []
    key = [KEYS[0]]
    calls: Counter[tuple[str, bytes]] = Counter()
    stopped = asyncio.Event()

    async def produce(url: str) -> int:
        count = 0
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while not stopped.is_set():
                path = f"{url}/v1/topics/public/default/rotated/messages"
                used = key[0]
                answer = await client.post(path, content="x", headers=bearer("alice", used))
                if answer.status_code in (503, 504, 429):  # a bundle that moves
                    await asyncio.sleep(0.1)
                    continue
                count += 1
                calls[url, used] += 1
                if answer.status_code != 200:
                    failures.append(answer.text)
        return count

    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:

        async def until(status: int, of_key: bytes) -> None:
            async with asyncio.timeout(20):
                for url in cluster.urls:
                    path = url + "/admin/v2/tenants"
                    while (await client.get(path, headers=bearer("alice", of_key))).status_code != status:
                        await asyncio.sleep(0.1)

        work = [asyncio.create_task(produce(url)) for url in cluster.urls]
        cluster.write_keys(KEYS[0], KEYS[1], KEYS[2])
        await until(200, KEYS[1])
        key[0] = KEYS[1]
        async with asyncio.timeout(TIMEOUT_S):  # until no request with the old key is in progress
            while any(calls[url, KEYS[1]] < 1 for url in cluster.urls):
                await asyncio.sleep(0.05)
        subscription = "/v1/topics/public/default/rotated/subscriptions/s"
        made = await ask(client, "PUT", cluster.urls[0] + subscription, headers=bearer("alice", KEYS[1]), json={})
        assert made.status_code in (200, 201), made.text
        opened = {url: asyncio.Event() for url in cluster.urls}

        async def stream(url: str) -> None:
            path = f"{url}{subscription}/stream?consumer=c{url[-1]}"
            with contextlib.suppress(httpx.RemoteProtocolError):  # of the broker that passes the stream on
                async with client.stream("GET", path, headers=bearer("alice", KEYS[0])) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_text():
                        opened[url].set()

        streams = [asyncio.create_task(stream(url)) for url in cluster.urls]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(one.wait() for one in opened.values()))
        cluster.write_keys(KEYS[1], KEYS[2])
        await until(401, KEYS[0])
        async with asyncio.timeout(TIMEOUT_S):  # the key was removed, so its streams end, before their tokens expire
            await asyncio.gather(*streams)
        cluster.write_keys(b"too short")  # a mistake of the operator changes nothing
        failed = f'bindery_followed_file_failures{{file="{cluster.keys}"}} 1'
        async with asyncio.timeout(TIMEOUT_S):
            while failed not in (await client.get(cluster.urls[0] + "/metrics")).text:
                await asyncio.sleep(0.1)
        before = calls.copy()
        async with asyncio.timeout(TIMEOUT_S):
            while any(calls[url, KEYS[1]] < before[url, KEYS[1]] + 2 for url in cluster.urls):
                await asyncio.sleep(0.05)
        stopped.set()
        counts = await asyncio.gather(*work)
        assert failures == []
        assert min(counts) > 3
        cluster.write_keys(KEYS[0], KEYS[2])
        await until(200, KEYS[0])


async def test_a_stream_and_a_long_receive_end_when_the_token_expires(cluster: Cluster) -> None:
    """A token is accepted until 30 s after its `exp`; these have 18 s of them behind them."""
    topic = "/v1/topics/public/default/streamed"
    subscription = f"{topic}/subscriptions/s"
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        known = bearer("alice")
        for path in (topic, subscription):
            made = await ask(client, "PUT", cluster.urls[0] + path, headers=known, json={})
            assert made.status_code in (200, 201, 204), made.text

        async def stream(url: str) -> str:
            text = ""
            with contextlib.suppress(httpx.RemoteProtocolError):  # of the broker that passes the stream on
                async with client.stream(
                    "GET", f"{url}{subscription}/stream?consumer=c{url[-1]}", headers=bearer("alice", for_s=-18)
                ) as answer:
                    assert answer.status_code == 200
                    async for piece in answer.aiter_text():
                        text += piece
            return text

        async def receive(url: str) -> int:
            body = {"consumer": f"r{url[-1]}", "max": 1, "wait_ms": 30_000}
            answer = await client.post(f"{url}{subscription}/receive", headers=bearer("alice", for_s=-18), json=body)
            return answer.status_code

        began = time.monotonic()
        async with asyncio.timeout(120):
            texts = await asyncio.gather(*map(stream, cluster.urls))
            assert time.monotonic() - began < 12 + LATE_S
            began = time.monotonic()
            statuses = await asyncio.gather(*map(receive, cluster.urls))
        assert time.monotonic() - began < 12 + LATE_S < 30, "a receive that waits for 30 s ends with its token"
        assert all(": connected" in text for text in texts)
        assert any("have expired" in text for text in texts)
        assert set(statuses) <= {200, 401}
        refused = await client.get(cluster.urls[0] + topic, headers=bearer("alice", for_s=-31))
        assert refused.status_code == 401
        assert "expired" in json.loads(refused.text)["detail"]


def test_commands_send_the_token_of_a_file(cluster: Cluster, tmp_path: Path) -> None:
    """With --token-file, or BINDERY_TOKEN_FILE; without either, the error names them."""
    token = tmp_path / "token"
    token.write_bytes(sign(KEYS[0], subject="alice") + b"\n")

    def run(*options: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "bindery", "topics", "list", "--url", cluster.urls[0], *options],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    refused = run()
    assert refused.returncode == 1
    assert "pass --token-file, or set BINDERY_TOKEN_FILE" in refused.stderr
    assert run("--token-file", str(token)).returncode == 0
    assert run(BINDERY_TOKEN_FILE=str(token)).returncode == 0
