"""A real ZooKeeper is rolled back to a copy of its data directory, under real bookies, and garbage collection runs.

The bookies are whole, with disks, ports and sessions, in this process, so that a test can take their guard away. Their
intervals are long: a test starts each run of garbage collection itself.
"""

import asyncio
import json
import random
import shutil
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_client.client import LedgerClient
from bindery_client.settings import ClientSettings
from bindery_core.errors import NoSuchLedger
from bindery_core.ids import LedgerId
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import SUSPECTED, KnownLedgersStore, MetadataRollbackSuspected
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from command import bindery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
LAYOUT = LedgersLayout()
NAMES = ("b0", "b1", "b2")
ENTRIES = 5
WAIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Three bookies, in which every ledger is stored."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        spec = ServerSpec(directory / "zookeeper", free_port(), tick_ms=200, session_timeout_ms_min=400)
        self.zookeeper = EmbeddedZooKeeper(spec)
        self.data = spec.data_dir / "data"
        self.hosts = spec.hosts
        self.bookies: dict[str, BookieProcess] = {}
        self.clients: list[tuple[LedgerClient, MetadataStore]] = []

    async def connect(self) -> MetadataStore:
        return await ZooKeeperStore.connect(self.hosts, session_timeout_s=2.0)

    async def start(self) -> None:
        await self.zookeeper.start()
        store = await self.connect()
        self.instance_id = (await initialize_cluster(store, LAYOUT, randomness=random.Random(1))).instance_id
        await store.close()
        await self.start_bookies()

    async def start_bookies(self) -> None:
        for name in NAMES:
            home = self.directory / name
            settings = BookieSettings(
                bookie_id=name,
                port=0,
                http_port=0,
                journal_dir=str(home / "journal"),
                ledger_dir=str(home / "ledgers"),
                zookeeper=self.hosts,
                zookeeper_session_timeout_s=2.0,
            )
            self.bookies[name] = BookieProcess(
                settings,
                Shutdown(),
                connect=self.connect,
                clock=time.monotonic,
                wall_clock_ms=lambda: time.time_ns() // 1_000_000,
            )
            await self.bookies[name].start()

    async def stop_bookies(self) -> None:
        for bookie in self.bookies.values():
            await bookie.stop()
        self.bookies.clear()

    async def stop_clients(self) -> None:
        for client, store in self.clients:
            await client.close()
            await store.close()
        self.clients.clear()

    async def stop(self) -> None:
        await self.stop_clients()
        await self.stop_bookies()
        await self.zookeeper.stop()

    async def client(self) -> LedgerClient:
        store = await self.connect()
        client = await LedgerClient.connect(store, randomness=random.Random(), settings=ClientSettings())
        self.clients.append((client, store))
        return client

    async def write(self, client: LedgerClient, count: int) -> list[LedgerId]:
        """Write closed ledgers of ENTRIES entries on all bookies."""
        ledger_ids = []
        for _ in range(count):
            handle = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=3)
            for number in range(ENTRIES):
                await handle.add(b"entry %d" % number)
            await handle.close()
            ledger_ids.append(handle.ledger_id)
        return ledger_ids

    def copy_data(self) -> Path:
        """Copy the data directory of the running server, as a backup of its volume does."""
        copy = self.directory / "snapshot"
        shutil.copytree(self.data, copy)
        return copy

    async def roll_back(self, copy: Path) -> Path:
        """Replace the data of the server by the copy, and return the data that it had."""
        newest = self.directory / "newest"
        await self.zookeeper.stop()
        shutil.copytree(self.data, newest)
        await self.replace(copy)
        return newest

    async def replace(self, copy: Path) -> None:
        await self.zookeeper.stop()
        shutil.rmtree(self.data)
        shutil.copytree(copy, self.data)
        await self.zookeeper.start()

    async def stored(self) -> dict[str, list[int]]:
        return {name: list(await bookie._store.list_ledger_ids()) for name, bookie in self.bookies.items()}

    async def collect(self) -> list[int]:
        """Run garbage collection on each bookie. Return the numbers of deleted ledgers."""
        return [await self.collector(name).collect() for name in NAMES]

    def collector(self, name: str) -> Any:
        assert self.bookies[name].garbage is not None
        return self.bookies[name].garbage

    async def http(self, name: str, method: str, path: str, **options: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.bookies[name].http_port}") as http:
            return await http.request(method, path, **options)

    async def state(self, name: str) -> dict[str, Any]:
        return dict((await self.http(name, "GET", "/api/v1/bookie/gc/rollback")).json())

    async def command(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        done = await asyncio.to_thread(
            bindery, "cluster", "accept-metadata", "--zookeeper", self.hosts, "--json", *arguments
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else {"error": done.stderr}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    await cluster.start()
    yield cluster
    await cluster.stop()


def on_all(ledger_ids: list[int]) -> dict[str, list[int]]:
    """Return what each bookie stores if every bookie stores these ledgers."""
    return {name: list(ledger_ids) for name in NAMES}


async def no_check(*arguments: Any) -> None:
    """Take the guard away."""


async def rolled_back(cluster: Cluster) -> tuple[list[int], list[int], Path]:
    """Write ledgers, copy ZooKeeper's data, write more, and roll it back while nothing else runs.

    Return the old ledgers, the new ones, and the newest data.
    """
    client = await cluster.client()
    old = await cluster.write(client, 3)
    copy = cluster.copy_data()
    new = await cluster.write(client, 4)
    await client.delete(old[1])
    await cluster.stop_clients()
    await cluster.stop_bookies()
    newest = await cluster.roll_back(copy)
    await cluster.start_bookies()
    return list(map(int, old)), list(map(int, new)), newest


async def test_without_the_guard_newer_ledgers_are_deleted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The six other checks pass: it is the same cluster, its layout is readable, and its listing complete."""
    for name in ("check", "check_all", "confirm"):
        monkeypatch.setattr(RollbackGuard, name, no_check)
    old, new, _ = await rolled_back(cluster)
    assert await cluster.stored() == on_all([*old, *new])
    assert await cluster.collect() == [len(new)] * 3
    assert await cluster.stored() == on_all(old)


async def test_newer_ledgers_are_kept_until_an_operator_accepts_the_metadata(cluster: Cluster) -> None:
    old, new, _ = await rolled_back(cluster)
    for name in NAMES:
        state = await cluster.state(name)
        assert state["state"] == SUSPECTED, "it is noticed before the bookie registers"
        with pytest.raises(MetadataRollbackSuspected):
            await cluster.collector(name).collect()
        with pytest.raises(MetadataRollbackSuspected):
            await cluster.collector(name).is_gone(new[0])
    assert await cluster.stored() == on_all([*old, *new])

    # The state is visible.
    ready = (await cluster.http("b0", "GET", "/readyz")).json()
    assert "never knew" in ready["notes"][SUSPECTED]
    metrics = (await cluster.http("b0", "GET", "/metrics")).text
    assert "\nbindery_bookie_metadata_rollback_suspected 1\n" in metrics
    assert "\nbindery_bookie_unknown_ledgers 4\n" in metrics
    url = f"http://127.0.0.1:{cluster.bookies['b1'].http_port}"
    shown = await asyncio.to_thread(bindery, "bookie", "state", "--url", url)
    assert shown.returncode == 1
    assert "METADATA ROLLBACK SUSPECTED: 12 replicas on b0, b1, b2" in shown.stdout

    # New ledgers get other ids, although ZooKeeper's counter was rolled back too.
    client = await cluster.client()
    [newer] = await cluster.write(client, 1)
    assert newer > max(new)

    # The command shows what would be deleted, and deletes nothing by itself.
    code, planned = await cluster.command("--dry-run")
    assert (code, planned["accepted"]) == (0, False)
    assert [(one["bookie_id"], one["unknown"], one["missing"]) for one in planned["bookies"]] == [
        (name, 4, 4) for name in NAMES
    ]
    assert {(one["first_ledger_id"], one["last_ledger_id"]) for one in planned["bookies"]} == {(min(new), max(new))}
    assert all(one["ids_protected"] for one in planned["bookies"])
    assert (await cluster.command())[0] == 1
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.collect()
    assert await cluster.stored() == on_all([*old, *new, newer])

    code, accepted = await cluster.command("--yes")
    assert (code, accepted["accepted"]) == (0, True)
    assert await cluster.collect() == [len(new)] * 3
    assert await cluster.stored() == on_all([*old, newer])
    assert (await cluster.state("b0"))["state"] == "ok"


async def test_the_http_api_of_a_bookie_accepts_the_metadata_too(cluster: Cluster) -> None:
    old, new, _ = await rolled_back(cluster)
    version = (await cluster.state("b2"))["version"]
    answer = await cluster.http("b2", "PUT", "/api/v1/bookie/gc/rollback", json={"accept": True, "version": version})
    assert answer.status_code == 200, answer.text
    assert answer.json()["accepted"]["b0"]["unknown"] == len(new)
    assert await cluster.collect() == [len(new)] * 3
    assert await cluster.stored() == on_all(old)


async def test_the_newer_metadata_restores_the_ledgers(cluster: Cluster) -> None:
    old, new, newest = await rolled_back(cluster)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.collect()
    await cluster.stop_bookies()
    await cluster.replace(newest)
    await cluster.start_bookies()
    assert (await cluster.state("b0"))["state"] == "ok"
    assert await cluster.collect() == [1, 1, 1], "the deleted ledger is garbage"
    left = [ledger_id for ledger_id in (*old, *new) if ledger_id != old[1]]
    assert await cluster.stored() == on_all(left)
    client = await cluster.client()
    for ledger_id in left:
        handle = await client.open(LedgerId(ledger_id))
        assert handle.last_add_confirmed == ENTRIES - 1
        await handle.release()
    with pytest.raises(NoSuchLedger):
        await client.open(LedgerId(old[1]))


async def test_bookies_that_run_during_the_rollback_notice_it_before_they_register_again(cluster: Cluster) -> None:
    """ZooKeeper refuses clients that have seen newer transactions, until it has caught up with them."""
    client = await cluster.client()
    await cluster.write(client, 2)
    copy = cluster.copy_data()
    new = await cluster.write(client, 3)
    await cluster.stop_clients()
    await cluster.roll_back(copy)
    store = await cluster.connect()
    for number in range(400):  # transactions of other clients
        await store.create(f"/other{number}")
    known = KnownLedgersStore(store, instance_id=cluster.instance_id)
    async with asyncio.timeout(WAIT_S):
        for name in NAMES:
            while not cluster.bookies[name].state.registered or (await cluster.state(name))["state"] != SUSPECTED:
                await asyncio.sleep(0.1)
        while set(reports := (await known.read())[0].reports) < set(NAMES):  # one suffices for the state of all
            await asyncio.sleep(0.1)
    assert {name: report.unknown for name, report in reports.items()} == dict.fromkeys(NAMES, len(new))
    await store.close()
    [newer] = await cluster.write(await cluster.client(), 1)
    assert newer > max(new)
