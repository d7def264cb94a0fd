"""The start of a broker while ZooKeeper does not answer."""

import asyncio
import gc
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from bindery_broker import main
from bindery_broker.settings import AuthSettings, BrokerSettings
from bindery_core.errors import MetadataUnavailable
from bindery_identity.tokens import sign
from bindery_kit.process import cluster_wait, followed_files
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_simulation.certificates.authority import Authority
from openid_provider import Provider, openid_token

LAYOUT = LedgersLayout()


@pytest.fixture
def collector() -> Iterator[None]:
    """Restore the settings of the garbage collector, which the start of a broker changes."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture
async def store(monkeypatch: pytest.MonkeyPatch, collector: None) -> MemoryStore:
    """The store that a broker joins here instead of ZooKeeper."""
    store = MemoryTree().connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))

    async def join(*_: Any, **__: Any) -> MemoryStore:
        return store

    monkeypatch.setattr(main, "join_cluster", join)
    return store


async def until(event: str, logs: list[Any]) -> None:
    async with asyncio.timeout(30):
        while event not in [line["event"] for line in logs]:
            await asyncio.sleep(0.01)


async def test_a_failed_read_of_the_bookies_is_retried(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.01)
    for _ in range(2):
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)
    shutdown = Shutdown()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(BrokerSettings(port=0), shutdown))
        await until("broker_serving", logs)
        shutdown.request("SIGTERM")
        assert await serving == 0
    assert [line["event"] for line in logs].count("bookies_not_read") == 2


async def test_the_port_answers_to_the_names_of_its_listeners(store: MemoryStore) -> None:
    shutdown = Shutdown()
    settings = BrokerSettings(port=0, advertised_listeners="external:https://broker.example.com:8443")
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(settings, shutdown))
        await until("broker_serving", logs)
        url = next(line["url"] for line in logs if line["event"] == "broker_serving")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            answers = [
                (await http.get("/v1/brokers", headers={"host": host})).status_code
                for host in ("broker.example.com:8443", "BROKER.example.com", "other.example.com")
            ]
        shutdown.request("SIGTERM")
        assert await serving == 0
    assert answers == [200, 200, 403]


async def test_a_stop_during_the_start_ends_the_process(store: MemoryStore) -> None:
    for _ in range(100):
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)
    shutdown = Shutdown()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(BrokerSettings(port=0), shutdown))
        await until("bookies_not_read", logs)
        shutdown.request("SIGTERM")
        async with asyncio.timeout(30):
            assert await serving == 0
    assert "broker_serving" not in [line["event"] for line in logs]


async def test_files_are_followed_while_the_start_waits(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.01)
    monkeypatch.setattr(followed_files, "POLL_INTERVAL_S", 0.01)

    def fail_again() -> None:
        store.fail_next(MetadataUnavailable("gone"), matching=lambda _, path: path == LAYOUT.available)

    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    fail_again()
    shutdown = Shutdown()
    settings = BrokerSettings(port=0, auth=AuthSettings(tokens_keys_file=str(keys)))
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(settings, shutdown))
        await until("bookies_not_read", logs)
        keys.write_text("n" * 33)
        async with asyncio.timeout(30):
            while "followed_file_read" not in (events := [line["event"] for line in logs]):
                fail_again()
                await asyncio.sleep(0.001)
        shutdown.request("SIGTERM")
        assert await serving == 0
    assert "broker_serving" not in events


async def test_tokens_of_an_openid_issuer_are_accepted_as_soon_as_the_broker_is_ready(
    store: MemoryStore, tmp_path: Path
) -> None:
    """The keys come from the issuer's https port; a token of another issuer, for another service, or expired is
    refused. Keys of tokens are accepted beside them."""
    provider = Provider(Authority(tmp_path))
    await provider.start()
    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    auth = AuthSettings(
        openid_issuers=provider.url,
        openid_audiences="bindery",
        openid_ca_file=str(provider.authority.ca_file),
        openid_role_claim="role",
        tokens_keys_file=str(keys),
    )
    now_s = time.time()
    claims = {"iss": provider.url, "aud": "bindery", "role": "alice", "exp": now_s + 600}
    own = sign(b"k" * 32, subject="bob").decode()
    shutdown = Shutdown()
    with structlog.testing.capture_logs() as logs:
        serving = asyncio.create_task(main.serve(BrokerSettings(port=0, auth=auth), shutdown))
        await until("broker_serving", logs)
        url = next(line["url"] for line in logs if line["event"] == "broker_serving")
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            for token, status in (
                (openid_token(**claims), 200),
                (own, 200),
                (openid_token(**claims | {"iss": "https://other.example"}), 401),
                (openid_token(**claims | {"aud": "other"}), 401),
                (openid_token(**claims | {"exp": now_s - 600}), 401),
                ("not-a-token", 401),
            ):
                answer = await client.get("/v1/tenants", headers={"authorization": f"Bearer {token}"})
                assert answer.status_code == status, answer.text
            page = (await client.get("/metrics")).text
        shutdown.request("SIGTERM")
        assert await serving == 0
    provider.stop()
    assert 'bindery_authentications_total{outcome="admitted",method="oidc"} 1' in page
    assert f'bindery_openid_keys{{issuer="{provider.url}"}} 1' in page
