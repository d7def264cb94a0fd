"""A whole bookie on an address that other machines can reach: what its two ports refuse and accept."""

import asyncio
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from bindery_bookie.access.security import AuthProvider, AuthSettings
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import AdminSettings, BookieSettings, RepairSettings
from bindery_client.client import LedgerClient
from bindery_client.connection.security import ClientSecurity
from bindery_core.errors import BadRequest, BinderyError, NoSuchLedger
from bindery_identity.tokens import sign
from bindery_kit.http.listening import BindRefused
from bindery_kit.process import followed_files
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.certificates import CA, certificate, key

CLIENT = "a-secret-of-the-clients"
OPERATOR = "a-secret-of-the-operators"
LAYOUT = LedgersLayout()


def reachable_address() -> str:
    """An address of this machine other than loopback, or the wildcard if it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError:
            return "0.0.0.0"
        found: str = sock.getsockname()[0]
    return "0.0.0.0" if found.startswith("127.") else found


class World:
    """A bookie, and what its clients do. `host`: the address it listens on."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.tree = MemoryTree()
        self.host = settings.setdefault("host", reachable_address())
        self.process = BookieProcess(
            BookieSettings(
                port=0,
                http_port=0,
                bookie_id="b0",
                advertised_host="127.0.0.1" if self.host == "0.0.0.0" else self.host,
                journal_dir=f"{directory}/j",
                ledger_dir=f"{directory}/l",
                **settings,
            ),
            Shutdown(),
            connect=self.connect,
            clock=time.monotonic,
            wall_clock_ms=lambda: int(time.time() * 1000),
        )

    async def connect(self) -> Any:
        return self.tree.connect()

    async def start(self) -> None:
        await initialize_cluster(self.tree.connect(), LAYOUT, randomness=random.Random(1))
        await self.process.start()

    async def http(self, method: str, path: str, token: str | None = None, **options: Any) -> int:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=f"http://{host}:{self.process.http_port}", headers=headers) as client:
            return (await client.request(method, path, **options)).status_code

    async def pause_healing(self, token: str | None = None) -> int:
        return await self.http("PUT", "/api/v1/autorecovery/status?enabled=false", token)

    async def set_read_only(self, token: str | None = None) -> int:
        return await self.http("PUT", "/api/v1/bookie/state/readonly", token, json={"readOnly": False})

    async def is_healing_paused(self) -> bool:
        return await self.tree.connect().exists(LAYOUT.replication_disabled) is not None

    async def write(self, token: str | None = None) -> int:
        """Return the id of a new ledger with one entry."""
        security = ClientSecurity(token=token.encode() if token else None)
        client = await LedgerClient.connect(self.tree.connect(), randomness=random.Random(2), security=security)
        try:
            writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1, password=b"pw")
            await writer.add_many([b"one"])
            await writer.close()
            return writer.ledger_id
        finally:
            await client.close()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[World] = []

    async def start_world(**settings: Any) -> World:
        made.append(World(tmp_path, **settings))
        await made[-1].start()
        return made[-1]

    yield start_world
    for world in made:
        await world.process.stop()


@pytest.fixture
def by_token(tmp_path: Path) -> AuthSettings:
    (tmp_path / "clients").write_text(CLIENT)
    return AuthSettings(provider=AuthProvider.TOKEN, secrets_file=str(tmp_path / "clients"))


@pytest.fixture
def by_operators(tmp_path: Path) -> AdminSettings:
    (tmp_path / "operators").write_text(OPERATOR)
    return AdminSettings(token_file=str(tmp_path / "operators"))


@pytest.mark.parametrize("host", [reachable_address(), "0.0.0.0", "::", ""])
async def test_without_authentication_the_bookie_does_not_start_there(start: Any, host: str, by_operators: Any) -> None:
    for admin in (AdminSettings(), by_operators):
        with pytest.raises(BindRefused, match=r"authenticate clients \(--auth-provider\), or pass --insecure"):
            await start(host=host, admin=admin)


async def test_with_insecure_and_without_tokens_changes_of_the_cluster_are_refused(start: Any) -> None:
    world = await start(insecure=True)
    ledger_id = await world.write()
    assert await world.set_read_only() == 200
    for token in (None, OPERATOR, CLIENT):
        assert await world.pause_healing(token) == 401
        assert await world.http("DELETE", f"/api/v1/ledger/delete?ledger_id={ledger_id}", token) == 401
    assert not await world.is_healing_paused()
    assert await world.http("GET", f"/api/v1/ledger/metadata?ledger_id={ledger_id}") == 200
    assert await world.http("GET", "/api/v1/autorecovery/status") == 200


async def test_with_authentication_insecure_is_not_needed_and_each_port_asks_for_the_token(
    start: Any, by_token: AuthSettings
) -> None:
    world = await start(auth=by_token)
    with pytest.raises(BinderyError):
        await world.write()
    await world.write(CLIENT)
    for token in (None, OPERATOR):
        assert await world.set_read_only(token) == 401
        assert await world.pause_healing(token) == 401
    assert await world.set_read_only(CLIENT) == 200
    assert await world.pause_healing(CLIENT) == 401, "the token of a client is not one of an operator"
    assert not await world.is_healing_paused()


async def test_the_token_of_an_operator_changes_the_cluster(
    start: Any, by_token: AuthSettings, by_operators: AdminSettings
) -> None:
    world = await start(auth=by_token, admin=by_operators)
    ledger_id = await world.write(CLIENT)
    for token in (None, CLIENT):
        assert await world.set_read_only(token) == 401
        assert await world.pause_healing(token) == 401
    assert await world.set_read_only(OPERATOR) == 200
    assert await world.pause_healing(OPERATOR) == 200
    assert await world.is_healing_paused()
    with pytest.raises(BinderyError):
        await world.write(OPERATOR)
    assert await world.http("DELETE", f"/api/v1/ledger/delete?ledger_id={ledger_id}", OPERATOR) == 200
    with pytest.raises(NoSuchLedger):
        await read_metadata(world, ledger_id)


async def test_a_file_of_tokens_that_cannot_be_used_is_refused_before_anything_is_bound(start: Any) -> None:
    for admin in (AdminSettings(token_file="/none/such"), AdminSettings(audience="bookies")):
        with pytest.raises(BadRequest):
            await start(insecure=True, admin=admin)


async def read_metadata(world: World, ledger_id: int) -> None:
    from bindery_core.ids import LedgerId
    from bindery_metadata.ledgers.ledger_manager import LedgerManager

    await LedgerManager(world.tree.connect(), LAYOUT, randomness=random.Random(3)).read(LedgerId(ledger_id))


async def test_files_are_followed_while_the_start_waits(
    by_operators: AdminSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token of an operator is replaced while ZooKeeper does not answer."""
    monkeypatch.setattr(followed_files, "POLL_INTERVAL_S", 0.01)
    world = World(tmp_path, host="127.0.0.1", admin=by_operators)
    connected = asyncio.Event()

    async def connect() -> MemoryTree:
        await connected.wait()
        raise BadRequest("the test ends")

    world.process._connect = connect  # type: ignore[assignment]
    with structlog.testing.capture_logs() as logs:
        starting = asyncio.create_task(world.process.start())
        (tmp_path / "operators").write_text("another secret of operators")
        async with asyncio.timeout(30):
            while "followed_file_read" not in [line["event"] for line in logs]:
                await asyncio.sleep(0.001)
        assert not starting.done()
        connected.set()
        with pytest.raises(BadRequest, match="the test ends"):
            await starting
        await world.process.stop()


async def test_the_expiry_of_what_the_repair_presents_is_a_metric(start: Any, tmp_path: Path) -> None:
    token = tmp_path / "repair-token"
    token.write_bytes(sign(b"a key of more than thirty-two bytes", subject="b0", expires_at_s=4_000_000_000) + b"\n")
    repair = RepairSettings(
        token_file=str(token), ca_file=str(CA), certificate_file=str(certificate("client")), key_file=str(key("client"))
    )
    world = await start(host="127.0.0.1", repair=repair)
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{world.process.http_port}/metrics")).text
    assert 'bindery_tls_certificate_expiry_seconds{port="bookies"} ' in page
    assert 'bindery_token_expiry_seconds{port="bookies"} 4000000000\n' in page


async def test_connections_end_when_their_secret_is_removed(start: Any, by_token: AuthSettings) -> None:
    world = await start(host="127.0.0.1", auth=by_token)
    security = ClientSecurity(token=CLIENT.encode())
    client = await LedgerClient.connect(world.tree.connect(), randomness=random.Random(2), security=security)
    try:
        writer = await client.create(ensemble_size=1, write_quorum=1, ack_quorum=1)
        await writer.add_many([b"one"])
        assert world.process._server.connection_count == 1
        Path(by_token.secrets_file).write_text("another secret of the clients")
        async with asyncio.timeout(60):  # the bookie polls its files
            while world.process._server.connection_count:
                await asyncio.sleep(0.01)
    finally:
        await client.close()
