"""The auditor process on a cluster in memory, without a port: its start, its parts, its stop and its exit codes."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from auditor_cluster import Cluster, running, until
from bindery_auditor import main
from bindery_auditor.settings import AdminSettings, AuditorSettings
from bindery_client.memory.memory import MemoryLedgerClient
from bindery_core.errors import BadRequest, MetadataUnavailable, Unauthorized
from bindery_identity.tokens import sign
from bindery_kit.http.http_stats import HttpStats
from bindery_kit.http.listening import BindRefused
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import SessionState

BOUND_PORT = 8099


class Surroundings:
    """What the process would reach over the network: its HTTP server, ZooKeeper and the bookies."""

    def __init__(self, cluster: Cluster) -> None:
        self.tree: MemoryTree = cluster.tree
        self.cluster = cluster
        self.server: ServerInMemory | None = None
        self.bind_error: BindRefused | None = None
        self.client_errors: list[Exception] = []
        """Errors of the next attempts to connect to bookies."""
        self.store: MemoryStore | None = None
        self.client_options: dict[str, Any] = {}
        self.connector_options: tuple[Any, ...] = ()
        self.events: list[str] = []

    def make_server(self, app: Any, **options: Any) -> "ServerInMemory":
        if self.bind_error is not None:
            raise self.bind_error
        self.server = ServerInMemory(app, options, self.events)
        return self.server

    def connector(self, zookeeper: str, **options: Any) -> Callable[[], Awaitable[MemoryStore]]:
        self.connector_options = (zookeeper, options)

        async def connect() -> MemoryStore:
            self.store = self.tree.connect()
            close = self.store.close

            async def recorded() -> None:
                self.events.append("session closed")
                await close()

            self.store.close = recorded  # type: ignore[method-assign]
            return self.store

        return connect

    async def connect(self, store: MemoryStore, **options: Any) -> MemoryLedgerClient:
        """Stands for `LedgerClient.connect`."""
        if self.client_errors:
            raise self.client_errors.pop(0)
        self.client_options = options
        client = MemoryLedgerClient(self.cluster.ledgers)
        close = client.close

        async def recorded() -> None:
            self.events.append("client closed")
            await close()

        client.close = recorded  # type: ignore[method-assign]
        return client

    @property
    def http(self) -> httpx.AsyncClient:
        assert self.server is not None
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.server.app), base_url="http://auditor")

    async def get(self, path: str) -> tuple[int, Any]:
        answer = await self.http.get(path)
        return answer.status_code, answer.json()

    async def is_ready(self) -> bool:
        return self.server is not None and (await self.get("/readyz"))[0] == 200


class ServerInMemory:
    """An HTTP server without a port; `end` makes it fail."""

    url = f"http://127.0.0.1:{BOUND_PORT}"
    port = BOUND_PORT

    def __init__(self, app: Any, options: dict[str, Any], events: list[str]) -> None:
        self.app = app
        self.options = options
        self.end = asyncio.Event()
        self._events = events

    async def start(self) -> None:
        self._events.append("server started")

    async def stop(self) -> None:
        self._events.append("server stopped")

    async def wait(self) -> None:
        await self.end.wait()


@pytest.fixture
async def around(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Surroundings]:
    async with running() as cluster:
        found = Surroundings(cluster)
        monkeypatch.setattr(main, "HttpServer", found.make_server)
        monkeypatch.setattr(main, "zookeeper_connector", found.connector)
        monkeypatch.setattr(main, "LedgerClient", found)
        yield found


class Serving:
    """`serve` as a task."""

    def __init__(self, **settings: Any) -> None:
        self.shutdown = Shutdown()
        self.task = asyncio.create_task(main.serve(AuditorSettings(**settings), self.shutdown))

    async def stop(self) -> int:
        self.shutdown.request("the test ends")
        return await self.task


# --- start ------------------------------------------------------------------------------------------------------------


async def test_the_process_becomes_ready_and_leads(around: Surroundings) -> None:
    serving = Serving(name="auditor-7")
    await until(around.is_ready)
    assert await around.get("/startupz") == (200, {"status": "started"})

    async def leads() -> bool:
        return bool((await around.get("/v1/recovery/status"))[1]["auditor"] == "auditor-7")

    await until(leads)
    status = (await around.get("/v1/recovery/status"))[1]
    assert (status["this"]["name"], status["this"]["is_leader"]) == ("auditor-7", True)
    assert await serving.stop() == 0


async def test_the_process_is_named_after_its_bound_port(around: Surroundings) -> None:
    serving = Serving(port=0)
    await until(around.is_ready)
    assert (await around.get("/v1/recovery/status"))[1]["this"]["name"] == "127.0.0.1:8099"
    await serving.stop()


async def test_settings_reach_the_server_zookeeper_and_the_ledger_client(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    serving = Serving(
        port=8091,
        zookeeper="zk-0:2181",
        zookeeper_session_timeout_s=20,
        zookeeper_connect_timeout_s=300,
        client={"token_file": str(tmp_path / "token")},
        zookeeper_access={"ca_file": "zookeeper.pem"},
        http={"connections_max": 7},
    )
    await until(around.is_ready)
    assert around.server is not None
    options = around.server.options
    assert options.pop("settings").connections_max == 7
    assert isinstance(options.pop("stats"), HttpStats)
    rest = {"host": "127.0.0.1", "port": 8091, "insecure": False, "pages": ("/",), "tls": None, "outermost": None}
    assert options == rest
    zookeeper, connecting = around.connector_options
    assert connecting.pop("access").ca_file == "zookeeper.pem"
    assert (zookeeper, connecting) == ("zk-0:2181", {"session_timeout_s": 20, "connect_timeout_s": 300})
    assert around.client_options["security"].token == b"secret"
    assert around.client_options["layout"].root == "/ledgers"
    await serving.stop()


async def test_metrics_include_recovery_and_the_last_audits(around: Surroundings) -> None:
    serving = Serving()
    await until(around.is_ready)

    async def has_both() -> bool:
        text = (await around.http.get("/metrics")).text
        return "\nbindery_recovery_this_leads " in text and "\nbindery_last_audit_recorded{" in text

    await until(has_both)
    await serving.stop()


async def test_the_copies_of_a_lost_bookie_are_restored(around: Surroundings) -> None:
    ledger_id = await around.cluster.write([b"x"] * 3)
    lost = sorted(await around.cluster.members(ledger_id))[0]
    serving = Serving(lost_bookie_delay_s=1)
    await until(around.is_ready)
    await around.cluster.lose(lost)

    async def is_replaced() -> bool:
        return lost not in await around.cluster.members(ledger_id)

    await until(is_replaced)
    assert await serving.stop() == 0


async def test_the_process_waits_for_its_cluster_and_says_what_it_waits_for(around: Surroundings) -> None:
    around.tree = MemoryTree()  # no cluster
    serving = Serving()
    await asyncio.sleep(5)
    code, answer = await around.get("/startupz")
    assert code == 503
    assert "ZooKeeper at 127.0.0.1:2181 has no cluster at /ledgers" in answer["progress"]["step"]
    assert (await around.get("/v1/recovery/status"))[0] == 503
    assert await serving.stop() == 0


async def test_without_a_cluster_the_start_fails_at_its_timeout(around: Surroundings) -> None:
    around.tree = MemoryTree()
    serving = Serving(zookeeper_connect_timeout_s=30)
    began_at = asyncio.get_running_loop().time()
    assert await serving.task == 1
    assert asyncio.get_running_loop().time() - began_at == pytest.approx(30, abs=1)
    assert "gave up waiting for the cluster after 30 s" in serving.shutdown.reason
    assert around.events == ["server started", "session closed", "server stopped"]


async def test_the_start_continues_after_zookeeper_was_away(around: Surroundings) -> None:
    around.client_errors = [MetadataUnavailable("away"), MetadataUnavailable("away")]
    serving = Serving()
    await asyncio.sleep(0.5)
    code, answer = await around.get("/startupz")
    assert (code, answer["progress"]["step"]) == (503, "reading the bookies")
    await until(around.is_ready)
    assert around.client_errors == []
    assert await serving.stop() == 0


# --- while it serves --------------------------------------------------------------------------------------------------


async def test_a_lost_session_blocks_readiness(around: Surroundings) -> None:
    serving = Serving()
    await until(around.is_ready)
    assert around.store is not None
    around.tree.suspend(around.store)
    await until(lambda: around.store is not None and around.store.session_state is not SessionState.CONNECTED)
    code, answer = await around.get("/readyz")
    assert code == 503
    assert list(answer["reasons"]) == ["metadata"]
    around.tree.resume(around.store)
    await until(around.is_ready)
    await serving.stop()


async def test_the_end_of_the_server_ends_the_process_with_an_error(around: Surroundings) -> None:
    serving = Serving()
    await until(around.is_ready)
    assert around.server is not None
    around.server.end.set()
    assert await serving.task == 1
    assert "http" in serving.shutdown.reason
    assert around.events[-1] == "server stopped"


# --- stop -------------------------------------------------------------------------------------------------------------


async def test_a_stop_releases_the_leadership_and_then_closes_connections_in_order(around: Surroundings) -> None:
    serving = Serving(name="auditor-7")
    await until(around.is_ready)
    election = LedgersLayout().auditor_election

    async def votes() -> int:
        return len([name for name in await around.cluster.store.children(election) if name.startswith("V_")])

    await until(votes)
    assert around.events == ["server started"]
    assert await serving.stop() == 0
    assert await votes() == 0
    assert around.events == ["server started", "client closed", "session closed", "server stopped"]
    code, answer = await around.get("/readyz")
    assert (code, answer["reasons"]["stopping"]) == (503, "the test ends")


# --- exit codes -------------------------------------------------------------------------------------------------------


async def test_a_port_in_use_is_a_usage_error(around: Surroundings) -> None:
    around.bind_error = BindRefused("port 8090 is in use")
    serving = Serving()
    assert await serving.task == 2
    assert "port 8090 is in use" in serving.shutdown.reason
    assert around.events == []


async def test_files_that_cannot_be_used_are_a_usage_error(around: Surroundings, tmp_path: Path) -> None:
    for changes in (
        {"client": {"token_file": str(tmp_path / "missing")}},
        {"admin": {"token_file": str(tmp_path / "missing")}},
        {"admin": {"keys_file": str(tmp_path / "missing")}},
        {"admin": {"audience": "auditors"}},
    ):
        assert await Serving(**changes).task == 2
    assert around.events == []


def test_the_console_script_runs_serve_with_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def run_program(*arguments: Any, **options: Any) -> int:
        calls.append((arguments, options))
        return 7

    monkeypatch.setattr(main, "run_program", run_program)
    assert main.main(["--port", "0"]) == 7
    ((arguments, options),) = calls
    assert arguments == ("bindery-auditor", AuditorSettings, main.serve, ["--port", "0"])
    assert options["service"] == "auditor"
    assert options["description"].startswith("The auditor: ")


def test_the_wall_clock_counts_whole_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_123_999_999)
    assert main.wall_clock_ms() == 1_700_000_000_123


# --- access -----------------------------------------------------------------------------------------------------------


def test_on_loopback_no_token_is_needed() -> None:
    assert main.admin_access(AuditorSettings()) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org"])
def test_on_other_addresses_without_a_token_file_every_token_is_refused(host: str) -> None:
    access = main.admin_access(AuditorSettings(host=host, insecure=True))
    assert access is not None
    for headers in ([], [(b"authorization", b"Bearer x")]):
        with pytest.raises(Unauthorized, match=r"no tokens are configured: set admin.token_file"):
            access.check(headers)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_with_a_token_file_its_lines_are_accepted_on_every_address(host: str, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("\nfirst-secret-0123456789\nsecond-secret-0123456789\n")
    settings = AuditorSettings(host=host, admin=AdminSettings(token_file=str(tokens)))
    access = main.admin_access(settings)
    assert access is not None
    for token in (b"first-secret-0123456789", b"second-secret-0123456789"):
        access.check([(b"authorization", b"Bearer " + token)])
    with pytest.raises(Unauthorized):
        access.check([(b"authorization", b"Bearer third-secret-0123456789")])


def test_signed_tokens_are_accepted_for_the_configured_audience_only(tmp_path: Path) -> None:
    key = bytes(range(32))
    (tmp_path / "key").write_bytes(key)
    admin = AdminSettings(keys_file=f"file://{tmp_path / 'key'}", audience="auditors")
    access = main.admin_access(AuditorSettings(host="0.0.0.0", admin=admin))
    assert access is not None
    token = sign(key, subject="operator", audience="auditors")
    assert access.check([(b"authorization", b"Bearer " + token)]) == "operator"
    for audience in (None, "bookies"):
        with pytest.raises(Unauthorized, match="audience"):
            access.check([(b"authorization", b"Bearer " + sign(key, subject="operator", audience=audience))])


def test_a_token_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="cannot read the file of secrets"):
        main.admin_access(AuditorSettings(admin=AdminSettings(token_file=str(tmp_path / "missing"))))


async def test_an_address_that_others_can_reach_needs_tokens_or_insecure(around: Surroundings, tmp_path: Path) -> None:
    serving = Serving(host="0.0.0.0")
    assert await serving.task == 2
    assert "configure tokens (--admin-token-file), or pass --insecure" in serving.shutdown.reason
    assert around.server is None


async def test_with_tokens_insecure_is_not_needed(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("first-secret-0123456789")
    serving = Serving(host="0.0.0.0", admin={"token_file": str(tmp_path / "tokens")})
    await until(lambda: around.server is not None)
    assert around.server is not None
    assert around.server.options["insecure"] is True
    serving.shutdown.request("test")
    await serving.task
