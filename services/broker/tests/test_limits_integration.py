"""Limits of clients in two broker processes that authenticate their clients, with real bookies and ZooKeeper."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import jwt
import pytest
from bindery.standalone.plan import BROKER_HTTP_PORT, HOST
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine takes minutes for seconds

KEY = "k" * 40
RATE = 5
"""Requests per second of one role."""
TOPIC = "/v1/topics/public/default/t"
TIMEOUT_S = 40.0


def token(role: str) -> str:
    return jwt.encode({"sub": role}, KEY, algorithm="HS256")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("limits")
    (made / "keys").write_text(KEY + "\n")
    (made / "broker").write_text(token("broker") + "\n")
    limits = {"free": {"requests_rate": 0}, **{f"once-{broker}": {"bytes_in_rate": 10} for broker in range(2)}}
    (made / "overrides.json").write_text(json.dumps({"roles": limits}))
    return made


@pytest.fixture(scope="module")
def cluster(files: Path) -> Iterator[ThrowawayCluster]:
    settings = {
        "BROKER_AUTH_TOKENS_KEYS_FILE": str(files / "keys"),
        "BROKER_AUTH_BROKER_TOKEN_FILE": str(files / "broker"),
        "BROKER_AUTH_PROXY_ROLES": "broker",
        "BROKER_LIMITS_PRINCIPAL_REQUESTS_RATE": str(RATE),
        "BROKER_LIMITS_OVERRIDES_FILE": str(files / "overrides.json"),
    }
    with ThrowawayCluster(bookies=3, brokers=2, environment={**BUNDLES_STAY, **settings}) as running:
        yield running


def client(cluster: ThrowawayCluster, role: str, *, broker: int = 0) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{HOST}:{BROKER_HTTP_PORT + cluster.port_offset + broker}",
        headers={"authorization": f"Bearer {token(role)}"},
        timeout=TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=100),
    )


async def produce(http: httpx.AsyncClient, payload: bytes = b"m") -> httpx.Response:
    """Produce; repeat while the topic has no owner yet, and after no other error."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        answer = await http.post(f"{TOPIC}/messages", content=payload)
        if answer.status_code != 503 or time.monotonic() > deadline:
            return answer
        await asyncio.sleep(0.2)


async def paced(http: httpx.AsyncClient, *, per_s: float, seconds: float) -> list[httpx.Response]:
    calls = []
    began = time.monotonic()
    for number in range(int(per_s * seconds)):
        calls.append(asyncio.create_task(produce(http)))
        await asyncio.sleep(max(0.0, began + (number + 1) / per_s - time.monotonic()))
    return await asyncio.gather(*calls)


async def test_a_role_above_its_rate_is_throttled_and_its_neighbor_has_no_error(cluster: ThrowawayCluster) -> None:
    seconds = 4
    async with client(cluster, "flood") as flood, client(cluster, "quiet") as quiet:
        assert (await produce(quiet)).status_code == 200
        began = time.monotonic()
        flooding = asyncio.create_task(paced(flood, per_s=10 * RATE, seconds=seconds))
        calm = await paced(quiet, per_s=RATE / 2, seconds=seconds)
        flooded = await flooding
        took_s = time.monotonic() - began
        shown = (await quiet.get("/v1/limits")).json()
        page = (await quiet.get("/metrics")).text
    assert [answer.status_code for answer in calm] == [200] * len(calm)
    statuses = [answer.status_code for answer in flooded]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= RATE * (took_s + 1) + 1
    assert statuses.count(200) >= RATE * seconds / 4, "less than the rate only on a machine that stalls"
    refused = next(answer for answer in flooded if answer.status_code == 429)
    assert refused.json()["code"] == "limit_exceeded"
    assert {name: refused.json()["facts"][name] for name in ("limit", "kind", "name", "rate")} == {
        "limit": "requests",
        "kind": "role",
        "name": "flood",
        "rate": RATE,
    }
    assert int(refused.headers["retry-after"]) >= 2
    (own,) = shown["owners"]
    assert (own["kind"], own["name"], own["limits"][0]["rate"]) == ("role", "quiet", RATE)
    assert 'bindery_broker_limit_refused_total{kind="role",limit="requests"}' in page


async def test_overrides_are_followed_and_a_wrong_file_changes_nothing(cluster: ThrowawayCluster, files: Path) -> None:
    async def rate(http: httpx.AsyncClient) -> float | None:
        (own,) = (await http.get("/v1/limits")).json()["owners"]
        return next((use["rate"] for use in own["limits"] if use["limit"] == "requests"), None)

    async def until(http: httpx.AsyncClient, expected: float | None) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while await rate(http) != expected:
                await asyncio.sleep(0.3)

    path = files / "overrides.json"
    before = json.loads(path.read_text())
    async with client(cluster, "etl") as etl, client(cluster, "free") as free:
        assert (await rate(etl), await rate(free)) == (RATE, None)
        path.write_text(json.dumps({**before, "roles": {**before["roles"], "etl": {"requests_rate": 33}}}))
        await until(etl, 33)
        path.write_text('{"roles": {"etl": {"request_rate": 1}}}')
        failed = f'bindery_followed_file_failures{{file="{path}"}} 1'
        async with asyncio.timeout(TIMEOUT_S):
            while failed not in (await etl.get("/metrics")).text:
                await asyncio.sleep(0.3)
        assert await rate(etl) == 33
        path.write_text(json.dumps(before))
        await until(etl, RATE)


async def test_a_request_that_is_passed_on_counts_once(cluster: ThrowawayCluster) -> None:
    """Each broker is asked in turn; one of them owns the topic. The body leaves a debt of 99 s where it counts."""

    async def available(role: str) -> list[float]:
        found = []
        for broker in range(2):
            async with client(cluster, role, broker=broker) as http:
                (own,) = (await http.get("/v1/limits")).json()["owners"]
                found.append(next(use["available"] for use in own["limits"] if use["limit"] == "bytes_in"))
        return found

    for broker in range(2):  # until both know the owner: a request that is repeated would meet its own debt
        async with client(cluster, "free", broker=broker) as free:
            assert (await produce(free)).status_code == 200
    for broker in range(2):
        role = f"once-{broker}"
        async with client(cluster, role, broker=broker) as http:
            answer = await produce(http, b"x" * 1_000)
        assert answer.status_code == 200, answer.text
        left = await available(role)
        assert left[broker] < 0
        assert left[1 - broker] == 10
