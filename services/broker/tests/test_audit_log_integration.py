"""Real processes: the audit logs of broker, bookie and auditor, roles on the ledger port, and rotation."""

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import BUNDLES_STAY, ThrowawayCluster
from bindery_client.client import LedgerClient
from bindery_client.connection.security import ClientSecurity
from bindery_core.errors import BinderyError
from bindery_identity.tokens import sign
from bindery_metadata.stores.zookeeper import ZooKeeperStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # a busy machine takes minutes for seconds

TOPIC = "/v1/topics/public/default/t"
KEY = b"integration-tests-sign-with-this"
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[ThrowawayCluster]:
    """Bookies know the roles broker, auditor, bookie and operator."""
    (folder / "keys").write_bytes(KEY)
    for name in ("broker", "auditor", "bookie", "stranger"):
        (folder / name).write_bytes(sign(KEY, subject=name))
    environment = {
        "BROKER_AUDIT_LOG_FILE": str(folder / "broker.log"),
        "BOOKIE_AUDIT_LOG_FILE": str(folder / "bookie.log"),
        "BOOKIE_AUDIT_LOG_FSYNC": "true",
        "AUDITOR_AUDIT_LOG_FILE": str(folder / "auditor.log"),
        "BOOKIE_AUTH_PROVIDER": "token",
        "BOOKIE_AUTH_KEYS_FILE": str(folder / "keys"),
        "BOOKIE_AUTH_CLIENT_ROLES": "broker, auditor, bookie",
        "BOOKIE_AUTH_RECOVERY_ROLES": "auditor, bookie",
        "BOOKIE_AUTH_ADMIN_ROLES": "operator",
        "BOOKIE_REPAIR_TOKEN_FILE": str(folder / "bookie"),
        "BROKER_CLIENT_TOKEN_FILE": str(folder / "broker"),
        "AUDITOR_CLIENT_TOKEN_FILE": str(folder / "auditor"),
        "AUDITOR_ADMIN_KEYS_FILE": str(folder / "keys"),
        "AUDITOR_ADMIN_READER_ROLES": "viewer",
        "AUDITOR_ADMIN_OPERATOR_ROLES": "operator",
    }
    with ThrowawayCluster(bookies=3, brokers=2, environment={**BUNDLES_STAY, **environment}) as running:
        yield running


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("ascii").splitlines()] if path.exists() else []


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {sign(KEY, subject=name).decode()}"}


async def ask(client: httpx.AsyncClient, method: str, url: str, **options: Any) -> httpx.Response:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            answer = await client.request(method, url, **options)
            if answer.status_code not in (503, 504, 429):
                return answer
            last = answer.text
        except httpx.TransportError as error:
            last = repr(error)
        assert time.monotonic() < deadline, last
        await asyncio.sleep(0.1)


@pytest.fixture
async def http() -> Any:
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        yield client


async def test_a_change_is_recorded_where_it_arrives_and_where_it_is_made(cluster, folder: Path, http):
    path = folder / "broker.log"
    answer = await ask(http, "PUT", f"{cluster.broker_url(0)}{TOPIC}", headers={"x-request-id": "create-t"})
    assert answer.status_code == 201, answer.text
    owner = (await ask(http, "GET", f"{cluster.broker_url(0)}{TOPIC}")).json()["owner"]
    other = next(url for url in (cluster.broker_url(0), cluster.broker_url(1)) if url != owner)
    answer = await ask(http, "PUT", f"{other}{TOPIC}/subscriptions/s", headers={"x-request-id": "subscribe-s"})
    assert answer.status_code == 201, answer.text
    lines = [line for line in lines_of(path) if line["request_id"] == "subscribe-s"]
    outcomes = sorted((line["is_proxied"], line["event"], line.get("status")) for line in lines)
    assert outcomes == [
        (False, "change_finished", 201),
        (False, "change_started", None),
        (True, "change_finished", 201),
        (True, "change_started", None),
    ]
    assert {line["operation"] for line in lines} == {"subscribe"}
    assert len({line["change"] for line in lines}) == 2


async def test_the_file_may_be_renamed_at_any_time(cluster, folder: Path, http):
    path = folder / "broker.log"
    url = cluster.broker_url(0)
    for number in range(6):
        answer = await ask(http, "PUT", f"{url}{TOPIC}-{number}", headers={"x-request-id": f"rotated-{number}"})
        assert answer.status_code == 201
        path.rename(folder / f"broker.log.{number}")
    await ask(http, "PUT", f"{url}{TOPIC}-6", headers={"x-request-id": "rotated-6"})
    seen = {
        line["request_id"]
        for file in (path, *folder.glob("broker.log.*"))
        for line in lines_of(file)
        if line["event"] == "change_finished"
    }
    assert {f"rotated-{number}" for number in range(7)} <= seen


async def test_messages_flow_although_bookies_limit_roles(cluster, http):
    url = cluster.broker_url(0)
    topic = f"{TOPIC}-flowing"
    assert (await ask(http, "POST", f"{url}{topic}/messages", content=b"hello")).status_code == 200
    body = {"consumer": "c", "wait_ms": 10_000, "initial": "earliest"}
    answer = await ask(http, "POST", f"{url}{topic}/subscriptions/s/receive", json=body)
    assert [message["payload"] for message in answer.json()["messages"]] == ["hello"]


async def connect(cluster: ThrowawayCluster, folder: Path, name: str) -> tuple[ZooKeeperStore, LedgerClient]:
    store = await ZooKeeperStore.connect(cluster.zookeeper)
    security = ClientSecurity(token=(folder / name).read_bytes())
    return store, await LedgerClient.connect(store, randomness=random.Random(7), security=security)


async def forbidden(cluster: ThrowawayCluster, http: httpx.AsyncClient) -> int:
    """Return the number of requests that the ledger ports have refused for lack of a role."""
    pages = [(await http.get(f"{cluster.bookie_url(number)}/metrics")).text for number in range(3)]
    return sum(
        int(found) for page in pages for found in re.findall(r"^bindery_bookie_forbidden_requests (\d+)", page, re.M)
    )


async def test_a_client_of_the_ledger_port_needs_the_role(cluster, folder: Path, http):
    assert await forbidden(cluster, http) == 0, "brokers, bookies and auditors have their roles"
    store, broker = await connect(cluster, folder, "broker")
    try:
        ledger = await broker.create(ensemble_size=3, write_quorum=2, ack_quorum=2, password=b"")
        assert await ledger.add(b"x") == 0
        await ledger.close()
    finally:
        await broker.close()
        await store.close()
    assert await forbidden(cluster, http) == 0
    store, stranger = await connect(cluster, folder, "stranger")
    try:
        refused = await stranger.create(ensemble_size=3, write_quorum=2, ack_quorum=2, password=b"")
        with pytest.raises(BinderyError):
            await asyncio.wait_for(refused.add(b"x"), TIMEOUT_S)
    finally:
        await stranger.close()
        await store.close()
    assert await forbidden(cluster, http) > 0


async def test_changes_and_refusals_of_a_bookie_are_recorded(cluster, folder: Path, http):
    path, url = folder / "bookie.log", f"{cluster.bookie_url(0)}/api/v1/bookie/state/readonly"
    before = len(lines_of(path))
    for name, status in (("operator", 200), ("broker", 403), (None, 401)):
        headers = {} if name is None else bearer(name)
        answer = await ask(http, "PUT", url, json={"readOnly": False}, headers=headers)
        assert answer.status_code == status, answer.text
    lines = [line for line in lines_of(path)[before:] if line["client"] == "127.0.0.1"]
    shown = [(line["event"], line["role"], line.get("status")) for line in lines if "readonly" in line["path"]]
    assert shown[-4:] == [
        ("change_started", "operator", None),
        ("change_finished", "operator", 200),
        ("denied", "broker", 403),
        ("denied", None, 401),
    ]
    assert (await http.get(f"{cluster.bookie_url(0)}/metrics")).text.count("bindery_audit_log_lines_total{") == 4


async def test_an_auditor_has_readers_and_operators(cluster, folder: Path, http):
    url = cluster.auditor_url()
    statuses: dict[tuple[str, str], int] = {}
    send: Callable[..., Any] = http.request
    for name in ("viewer", "operator"):
        for method, at in (("GET", "/v1/recovery/status"), ("POST", "/v1/recovery/resume")):
            statuses[name, method] = (await send(method, url + at, headers=bearer(name))).status_code
    assert statuses == {
        ("viewer", "GET"): 200,
        ("viewer", "POST"): 403,
        ("operator", "GET"): 403,
        ("operator", "POST"): 200,
    }
    assert (await http.get(url + "/v1/recovery/status")).status_code == 401
    assert (await http.get(url + "/readyz")).status_code == 200
    events = [(line["event"], line["role"], line["operation"]) for line in lines_of(folder / "auditor.log")]
    assert ("change_finished", "operator", "POST /v1/recovery/resume") in events
    assert ("denied", "viewer", "POST /v1/recovery/resume") in events
