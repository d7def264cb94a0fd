"""The admin API of a whole bookie that requires tokens, and the credentials of its own client."""

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from bindery_bookie.access.security import AuthProvider, AuthSettings
from bindery_bookie.admin.app import ROUTES
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_client.client import LedgerClient
from bindery_client.connection.security import ClientSecurity
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree

SECRET = "a-secret-of-the-cluster"
API = "/api/v1/bookie"


class World:
    def __init__(self, tree: MemoryTree, process: BookieProcess) -> None:
        self.tree, self.process = tree, process
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.http_port}")
        self.trusted = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{process.http_port}", headers={"Authorization": f"Bearer {SECRET}"}
        )


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "secrets").write_text(SECRET)
    tree = MemoryTree()
    await initialize_cluster(tree.connect(), LedgersLayout(), randomness=random.Random(1))

    async def connect():  # type: ignore[no-untyped-def]
        return tree.connect()

    settings = BookieSettings(
        port=0,
        http_port=0,
        bookie_id="b0",
        journal_dir=f"{tmp_path}/j0,{tmp_path}/j1",
        ledger_dir=f"{tmp_path}/l0,{tmp_path}/l1",
        auth=AuthSettings(provider=AuthProvider.TOKEN, secrets_file=str(tmp_path / "secrets")),
    )
    process = BookieProcess(
        settings, Shutdown(), connect=connect, clock=time.monotonic, wall_clock_ms=lambda: int(time.time() * 1000)
    )
    try:
        await process.start()
        made = World(tree, process)
        yield made
        await made.http.aclose()
        await made.trusted.aclose()
    finally:
        await process.stop()


async def test_every_route_is_served_and_guarded(world: World) -> None:
    for route in ROUTES:
        if route.needs_token:
            answer = await world.http.request(route.method, route.path)
            assert answer.status_code == 401, f"{route.method} {route.path}"
        elif route.path not in ("/api/v1/ledger/metadata", f"{API}/gc/explain", f"{API}/drill"):
            answer = await world.http.get(route.path)
            # These routes return 404 if there is no auditor or no mark.
            allowed = (200, 404) if route.path.startswith("/api/v1/autorecovery/") else (200,)
            assert answer.status_code in allowed, f"{route.path}: {answer.text}"
    disks = (await world.http.get(f"{API}/disks")).json()["directories"]
    assert sorted(Path(one["path"]).name for one in disks) == ["j0", "j1", "l0", "l1"]
    assert {one["status"] for one in disks} <= {"ok", "warn"}
    assert len((await world.http.get(f"{API}/gc_details")).json()) == 2
    files = (await world.http.get(f"{API}/list_disk_file")).json()
    assert files["journal files"].count(".txn\t") >= 2
    assert "CURRENT\t" in files["index files"]
    assert SECRET not in (await world.http.get("/api/v1/config/server_config")).text


async def test_a_ledger_is_written_read_over_http_and_deleted(world: World) -> None:
    assert (await world.trusted.get(f"{API}/sanity")).json()["passed"] is True
    store = world.tree.connect()
    client = await LedgerClient.connect(
        store, randomness=random.Random(2), security=ClientSecurity(token=SECRET.encode())
    )
    writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, password=b"pw")
    await writer.add_many([b"one", b"two"])
    await writer.close()
    await client.close()
    path = f"/api/v1/ledger/read?ledger_id={writer.ledger_id}"
    assert (await world.http.get(path)).status_code == 401
    assert (await world.trusted.get(path)).json() == {"0": "one", "1": "two"}
    assert list((await world.http.get(f"{API}/list_bookie_info")).json()) == ["b0", "ClusterInfo: "]
    assert (await world.http.get(f"{API}/cluster_info")).json()["writableBookiesCount"] == 1
    answer = await world.trusted.delete(f"/api/v1/ledger/delete?ledger_id={writer.ledger_id}")
    assert answer.json() == f"Deleted ledger: {writer.ledger_id}"
    assert (await world.trusted.get(path)).status_code == 404


async def test_requests_with_a_token_change_the_state_of_the_bookie(world: World) -> None:
    assert (await world.trusted.put(f"{API}/gc")).status_code == 200
    assert (await world.trusted.put(f"{API}/scrub")).status_code == 200
    assert (
        await world.trusted.put(f"{API}/entry_location_compact", json={"entryLocationRocksDBCompact": True})
    ).is_success
    assert (await world.trusted.put(f"{API}/gc/suspend_compaction", json={"suspendMinor": True})).is_success
    suspended = (await world.http.get(f"{API}/gc/suspend_compaction")).json()
    assert suspended == {"isMajorGcSuspended": "false", "isMinorGcSuspended": "true"}
    assert (await world.trusted.put(f"{API}/state/readonly", json={"readOnly": True})).json()["readOnly"] is True
    page = (await world.http.get("/metrics")).text
    assert "\nbookie_SERVER_STATUS 0\n" in page
    assert "\nbindery_bookie_metrics_broken 0\n" in page
    answer = await world.http.get(f"{API}/drill")
    assert (answer.status_code, answer.json()["code"]) == (404, "no_drills")
