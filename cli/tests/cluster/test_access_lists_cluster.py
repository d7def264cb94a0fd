"""`bindery cluster acls` on running clusters: real processes that use ZooKeeper with credentials, and by TLS."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery.standalone.throwaway import ThrowawayCluster
from bindery_core.errors import Unauthorized
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, SecurePort, ServerSpec
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_simulation.certificates.authority import Authority, in_one_file
from command import bindery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(500)]
TRAFFIC_S = 2.0
"""Seconds of traffic before and after a change."""


def acls(*arguments: str, zookeeper: str, code: int = 0) -> dict[str, Any]:
    done = bindery("cluster", "acls", *arguments, "--zookeeper", zookeeper, "--json", timeout_s=200)
    assert done.returncode == code, done.stderr + done.stdout
    return dict(json.loads(done.stdout or done.stderr))


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of credentials, which commands and clusters of this test use."""
    path = tmp_path / "credentials"
    path.write_text("bindery:a long password\n")
    monkeypatch.setenv("BINDERY_ZOOKEEPER_CREDENTIALS_FILE", str(path))
    return path


async def assert_a_stranger_gets_nothing(zookeeper: str, paths: list[str]) -> None:
    """A client without credentials may neither read nor change the nodes."""
    stranger = await ZooKeeperStore.connect(zookeeper)
    for path in paths:
        for attempt in (stranger.get(path), stranger.children(path), stranger.set(path, b"", version=None)):
            with pytest.raises(Unauthorized):
                await attempt
    await stranger.close()


@dataclass
class Traffic:
    """Sends a message to a new topic now and then, otherwise to the same one; receives and acknowledges all of them."""

    url: str
    failures: list[str] = field(default_factory=list)
    sent: int = 0
    received: int = 0

    def run(self, stopped: threading.Event) -> None:
        with httpx.Client(base_url=f"{self.url}/v1/topics/public/default", timeout=60) as client:
            while not stopped.is_set() or self.received < self.sent:
                topic = f"/traffic-{self.sent // 20}"
                body = {"consumer": "c", "initial": "earliest"}
                sent = self._ask(client, f"{topic}/messages", content=b"x")
                self.sent += sent is not None
                got = self._ask(client, f"{topic}/subscriptions/s/receive", json=body)
                if got is not None and got["messages"]:
                    ids = [message["message_id"] for message in got["messages"]]
                    self._ask(client, f"{topic}/subscriptions/s/ack", json={"message_ids": ids})
                    self.received += len(ids)
                elif sent is not None:
                    self.failures.append("a message was not received")
                    return

    def _ask(self, client: httpx.Client, path: str, **body: Any) -> dict[str, Any] | None:
        try:
            answer = client.post(path, **body)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
            return None
        if answer.status_code != 200:
            self.failures.append(f"{path}: {answer.status_code} {answer.text[:200]}")
            return None
        return dict(answer.json())


@contextmanager
def traffic(url: str) -> Iterator[Traffic]:
    """Run traffic during the block and for TRAFFIC_S before and after it. No call may fail."""
    running, stopped = Traffic(url), threading.Event()
    thread = threading.Thread(target=running.run, args=(stopped,))
    thread.start()
    try:
        time.sleep(TRAFFIC_S)
        yield running
        time.sleep(TRAFFIC_S)
    finally:
        stopped.set()
        thread.join()
    assert running.failures == []
    assert running.sent == running.received > 0


async def test_a_running_cluster_is_protected_and_opened_again_without_a_failed_call(credentials: Path) -> None:
    """The steps of docs/zookeeper-access.md. During the first change, bookies already create restricted nodes, while
    brokers and auditors still create open ones."""
    environment = {"BOOKIE_ZOOKEEPER_ACCESS_NEW_NODES": "creator"}
    with ThrowawayCluster(bookies=3, environment=environment) as cluster:
        zookeeper = cluster.zookeeper
        found = acls("show", zookeeper=zookeeper)
        assert found["totals"]["creator"] > 0
        assert found["totals"]["open"] > 0
        assert found["open_session_nodes"] > 0
        with traffic(cluster.url):
            assert "--allow-open-sessions" in json.dumps(acls("apply", "--yes", zookeeper=zookeeper, code=1))
            dry = acls("apply", "--dry-run", zookeeper=zookeeper)
            assert dry["pending"] > 0
            assert acls("show", zookeeper=zookeeper)["totals"]["creator"] >= found["totals"]["creator"]
            done = bindery(
                *("cluster", "acls", "apply", "--yes", "--allow-open-sessions", "--json", "--zookeeper", zookeeper)
            )
            changed = json.loads(done.stdout)
            assert changed["replaced"] >= dry["pending"]
        # Brokers created open nodes in the meantime. Now all services create restricted ones.
        cluster.stop()
        cluster._environment |= {
            "BROKER_ZOOKEEPER_ACCESS_NEW_NODES": "creator",
            "AUDITOR_ZOOKEEPER_ACCESS_NEW_NODES": "creator",
        }
        cluster.start()
        with traffic(cluster.url):
            done = acls("apply", "--yes", zookeeper=zookeeper)
            assert done["totals"]["creator"] == done["nodes"] > found["nodes"]
        assert (after := acls("show", zookeeper=zookeeper))["totals"]["creator"] == after["nodes"]
        roots = ["/ledgers", "/ledgers/available", "/managed-ledgers", "/admin", "/namespace", "/loadbalance"]
        await assert_a_stranger_gets_nothing(zookeeper, roots)
        with traffic(cluster.url):
            opened = acls("open", "--yes", zookeeper=zookeeper)
            assert opened["replaced"] >= done["nodes"]
        stranger = await ZooKeeperStore.connect(zookeeper)
        assert "available" in await stranger.children("/ledgers")
        await stranger.close()


async def test_a_cluster_works_by_tls_with_credentials_from_its_beginning(
    credentials: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    both = in_one_file(*authority.issue("server", hosts=["localhost"]))
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    secure = SecurePort(ports[1], both, authority.ca_file)
    server = EmbeddedZooKeeper(ServerSpec(tmp_path / "zookeeper", ports[0], secure=secure))
    hosts = f"localhost:{ports[1]}"
    monkeypatch.setenv("BINDERY_ZOOKEEPER_CA_FILE", str(authority.ca_file))
    monkeypatch.setenv("BINDERY_ZOOKEEPER_NEW_NODES", "creator")
    async with server:
        cluster = await asyncio.to_thread(ThrowawayCluster, bookies=3, options=("--zookeeper", hosts))
        with cluster:
            with traffic(cluster.url):
                pass
            found = acls("show", zookeeper=hosts)
            assert found["totals"]["creator"] == found["nodes"] > 0
            await assert_a_stranger_gets_nothing(server.hosts, ["/ledgers", "/managed-ledgers", "/loadbalance"])
            monkeypatch.delenv("BINDERY_ZOOKEEPER_CREDENTIALS_FILE")
            monkeypatch.delenv("BINDERY_ZOOKEEPER_NEW_NODES")
            refused = bindery("ledger", "list", "--zookeeper", hosts)
            assert refused.returncode != 0
            assert "BINDERY_ZOOKEEPER_CREDENTIALS_FILE" in refused.stderr
