"""The HTTP port of a bookie, without a socket: what it serves, and in which order it is closed."""

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from bindery_bookie.access.roles import NO_ROLES
from bindery_bookie.access.security import AuthProvider, AuthSettings, admin_access
from bindery_bookie.admin import server as server_module
from bindery_bookie.admin.server import AdminServer
from bindery_bookie.admin.shared_recovery import SharedRecovery
from bindery_bookie.maintenance.repair import RepairState
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.io.fault_injection import DrillControl
from bindery_core.ids import BookieId
from bindery_identity.tokens import sign
from bindery_kit.observability.health import Health
from bindery_kit.observability.tls_metrics import TlsMetrics
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

API = "/api/v1/bookie"
SOCKET: Any = object()


class HttpServerInMemory:
    """An HTTP server without a port, which records what happens to it."""

    def __init__(self, app: Any, *, host: str, sock: Any, events: list[str], **options: Any) -> None:
        self.app, self.host, self.sock, self.options = app, host, sock, options
        self._events = events

    async def start(self) -> None:
        self._events.append("started")

    async def wait(self) -> None:
        self._events.append("waited")

    async def stop(self) -> None:
        self._events.append("stopped")


class Client:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    async def disk_spaces(self) -> dict[str, tuple[int, int]]:
        return {"b0": (100, 40)}

    async def close(self) -> None:
        self._events.append("client closed")


class World:
    def __init__(
        self, store: Any, engines: list[Any], monkeypatch: pytest.MonkeyPatch, settings: BookieSettings
    ) -> None:
        self.events: list[str] = []
        self.made: list[HttpServerInMemory] = []
        self.metadata: MemoryStore | None = None
        self.client: Client | None = None
        self.repair: RepairState | None = None
        self.health, self.state, self.damage = Health(), BookieState(), DamageRegister()
        self.metrics = BookieMetrics(clock=lambda: 0.0)
        self.is_open = True
        self.engines = engines

        def make(app: Any, **options: Any) -> HttpServerInMemory:
            self.made.append(HttpServerInMemory(app, events=self.events, **options))
            return self.made[-1]

        monkeypatch.setattr(server_module, "HttpServer", make)
        self.server = AdminServer(
            settings,
            sock=SOCKET,
            access=admin_access(settings.auth, settings.admin, host=settings.host, now_s=lambda: 5_000.0),
            tls=None,
            tls_metrics=TlsMetrics(),
            roles=NO_ROLES,
            audit_log=None,
            bookie_id=BookieId("b0"),
            health=self.health,
            state=self.state,
            store=store,
            shards=engines,
            metrics=self.metrics,
            damage=self.damage,
            drills=DrillControl(sleep=lambda seconds: None),
            is_open=lambda: self.is_open,
            directories=tuple,
            metadata=lambda: self.metadata,
            repair=lambda: self.repair,
            guard=lambda: None,
            recovery_page=lambda: b"recovery_is_here 1\n",
            connect_client=lambda: None if self.client is None else self._connected(),
            randomness=random.Random(1),
            wall_clock_ms=lambda: 5_000_000,
        )
        transport = httpx.ASGITransport(app=self.made[0].app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://bookie")

    async def _connected(self) -> Any:
        return self.client

    async def connect(self) -> None:
        self.metadata = MemoryTree().connect()
        await initialize_cluster(self.metadata, LedgersLayout(), randomness=random.Random(1))
        self.client = Client(self.events)


@pytest.fixture
def make_world(memory_store: Any, engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    for engine in engines:
        engine.is_open = True
    return lambda **settings: World(memory_store, engines, monkeypatch, BookieSettings(host="127.0.0.9", **settings))


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


async def test_it_listens_on_the_given_socket_and_is_started_and_awaited(world: World) -> None:
    ((made),) = world.made
    assert (made.sock, made.host) == (SOCKET, "127.0.0.9")
    await world.server.start()
    await world.server.wait()
    assert world.events == ["started", "waited"]


async def test_the_settings_of_the_port_reach_the_server_and_its_counters_the_metrics(
    make_world: Callable[..., World],
) -> None:
    world = make_world(http={"connections_max": 7}, advertised_host="b0.example.com")
    options = world.made[0].options
    assert options["settings"].connections_max == 7
    assert options["own_names"] == ["b0.example.com"]
    options["stats"].count("head_size")
    assert 'bindery_http_refused_total{reason="head_size"} 1\n' in (await world.http.get("/metrics")).text


async def test_probes_metrics_and_the_api_are_served(world: World) -> None:
    assert (await world.http.get("/livez")).status_code == 200
    assert (await world.http.get("/readyz")).status_code == 503
    world.health.started()
    assert (await world.http.get("/readyz")).status_code == 200
    page = (await world.http.get("/metrics")).text
    assert "bookie_WRITE_BYTES 0" in page
    assert "recovery_is_here 1" in page
    assert (await world.http.get("/heartbeat")).text == "OK\n"
    assert (await world.http.get(f"{API}/info")).json() == {"freeSpace": 400, "totalSpace": 1000}
    settings = (await world.http.get("/api/v1/config/server_config")).json()
    assert (settings["host"], settings["port"]) == ("127.0.0.9", "3181")


async def test_a_request_for_the_settings_does_not_parse_source_code(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may request them, and parsing took about 100 ms of the event loop."""
    monkeypatch.setattr(ast, "parse", lambda *_: pytest.fail("source code was parsed"))
    assert (await world.http.get("/api/v1/config/server_config")).json()["port"] == "3181"


async def test_the_parts_of_the_bookie_are_shown(world: World) -> None:
    world.damage.report(Damage("/l/1.log", 64, "digest differs", 7, 1))
    world.repair = RepairState(entries_copied=5)
    assert (await world.http.get(f"{API}/damage")).json()["count"] == 1
    assert (await world.http.get(f"{API}/limbo")).json()["repair"]["entriesCopied"] == 5
    assert (await world.http.get(f"{API}/drill")).json() == {"drills": []}
    assert (await world.http.get(f"{API}/disks")).json()["directories"] == []
    world.is_open = False
    assert (await world.http.get(f"{API}/info")).json()["code"] == "starting"


async def test_a_shard_has_its_work_only_while_it_is_open(world: World, gc: list[Any], scrubs: list[Any]) -> None:
    for engine, collector, scrubber in zip(world.engines, gc, scrubs, strict=True):
        engine.compactor, engine.scrubber = collector, scrubber
    assert [one["shard"] for one in (await world.http.get(f"{API}/gc/state")).json()["shards"]] == [0, 1]
    assert [one["rounds"] for one in (await world.http.get(f"{API}/scrub")).json()["shards"]] == [3, 3]
    for engine in world.engines:
        engine.is_open = False
    assert (await world.http.get(f"{API}/gc/state")).json()["code"] == "no_garbage_collection"
    assert (await world.http.get(f"{API}/scrub")).json()["code"] == "no_scrub"


async def test_metadata_and_the_client_are_used_once_the_bookie_is_connected(world: World) -> None:
    assert (await world.http.get(f"{API}/cluster_info")).status_code == 503
    assert (await world.http.get(f"{API}/list_bookie_info")).status_code == 503
    await world.connect()
    assert (await world.http.get(f"{API}/cluster_info")).json()["totalBookiesCount"] == 0
    assert list((await world.http.get(f"{API}/list_bookie_info")).json()) == ["b0", "ClusterInfo: "]
    assert (await world.http.put("/api/v1/autorecovery/status?enabled=false")).json() == {"enabled": False}


async def test_http_is_stopped_before_the_clients_that_its_requests_use(world: World) -> None:
    await world.connect()
    await world.http.get(f"{API}/list_bookie_info")
    await world.http.get("/api/v1/autorecovery/status")
    await world.server.stop()
    assert world.events == ["stopped", "client closed"]
    await world.server.stop()
    assert world.events == ["stopped", "client closed", "stopped"]
    assert (await world.http.get(f"{API}/list_bookie_info")).status_code == 503


async def test_the_recovery_is_closed_before_the_client_that_it_uses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close(recovery: SharedRecovery) -> None:
        world.events.append("recovery closed")

    monkeypatch.setattr(SharedRecovery, "close", close)
    await world.connect()
    await world.http.get(f"{API}/list_bookie_info")
    await world.server.stop()
    assert world.events == ["stopped", "recovery closed", "client closed"]


async def test_the_ledgers_root_of_the_settings_is_used(make_world: Callable[..., World]) -> None:
    world = make_world(ledgers_root="/other/ledgers")
    await world.connect()
    assert world.metadata is not None
    await world.metadata.create("/other/ledgers/available/b9", b"", make_parents=True)
    await world.metadata.create("/other/ledgers/available/readonly", b"", make_parents=True)
    await world.metadata.create("/other/ledgers/INSTANCEID", b"id", make_parents=True)
    assert (await world.http.get(f"{API}/list_bookies")).json() == {"b9": None}


async def test_a_bookie_that_requires_tokens_guards_its_api(make_world: Callable[..., World], tmp_path: Path) -> None:
    secret = "a-secret-of-the-cluster"
    (tmp_path / "secrets").write_text(secret)
    auth = AuthSettings(provider=AuthProvider.TOKEN, secrets_file=str(tmp_path / "secrets"))
    world = make_world(auth=auth)
    path = f"{API}/state/readonly"
    assert (await world.http.put(path, json={"readOnly": True})).status_code == 401
    headers = {"Authorization": f"Bearer {secret}"}
    assert (await world.http.put(path, json={"readOnly": True}, headers=headers)).status_code == 200
    assert world.state.read_only


async def test_a_token_expires(make_world: Callable[..., World], tmp_path: Path) -> None:
    """The clock is at 5,000 s. A token is accepted for another 30 s, because clocks differ."""
    key = b"a-key-of-at-least-thirty-two-bytes-1"
    (tmp_path / "keys").write_bytes(key)
    world = make_world(auth=AuthSettings(provider=AuthProvider.TOKEN, keys_file=str(tmp_path / "keys")))
    for expires_at_s, status in ((4_970, 401), (4_971, 200)):
        token = sign(key, subject="operator", expires_at_s=expires_at_s).decode()
        headers = {"Authorization": f"Bearer {token}"}
        answer = await world.http.put(f"{API}/state/readonly", json={"readOnly": True}, headers=headers)
        assert answer.status_code == status
