"""ClusterWait: what a start reports while it waits, and when the wait ends or times out."""

import asyncio
import contextlib
import random
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import structlog
from bindery_core.errors import BadRequest, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_kit.observability.health import Health
from bindery_kit.process import cluster_wait
from bindery_kit.process.cluster_wait import ClusterNotInitialized, ClusterWait, retry_while_unavailable
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.zookeeper_access import AccessFiles, ConnectionRefused
from bindery_simulation.certificates.authority import Authority

LAYOUT = LedgersLayout()
SERVERS = "127.0.0.1:1,no-such-host.invalid:2181,no-namespace..svc:2181"


def wait_for(zookeeper: str = SERVERS, *, timeout_s: float = 0.0) -> tuple[ClusterWait, Health]:
    health = Health()
    wait = ClusterWait(
        zookeeper, LAYOUT, setting="TEST_ZOOKEEPER", health=health, timeout_s=timeout_s, wall_clock_ms=lambda: 61_000
    )
    return wait, health


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """A server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def never() -> None:
    await asyncio.Event().wait()


async def test_the_cause_is_reported_for_each_server(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    monkeypatch.setattr(cluster_wait, "FIRST_REPORT_S", 0.0)
    wait, health = wait_for(f"{SERVERS},{silent}")
    with structlog.testing.capture_logs() as logs:
        waiting = asyncio.create_task(wait.for_zookeeper(never()))
        async with asyncio.timeout(30):
            while not logs:
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    reason = (
        "127.0.0.1:1: connection refused, the name no-such-host.invalid does not resolve, "
        "the name no-namespace..svc does not resolve, "
        f"{silent} accepts connections but opens no session (does it have a quorum?); "
        "start ZooKeeper, or set TEST_ZOOKEEPER to its servers"
    )
    assert (logs[0]["event"], logs[0]["since"], logs[0]["reason"]) == ("zookeeper_not_reached", "00:01:01 UTC", reason)
    assert "gives_up_in_s" not in logs[0]
    assert health.reasons == {"startup": f"waiting for ZooKeeper since 00:01:01 UTC: {reason}"}


async def test_a_missing_session_times_out_with_the_cause() -> None:
    async def give_up() -> None:
        raise MetadataUnavailable("no zookeeper server responds")

    wait, _ = wait_for(timeout_s=7)
    assert wait.limit_s == 7
    with pytest.raises(MetadataUnavailable, match=r"gave up waiting for ZooKeeper after 7 s: 127.0.0.1:1: connection"):
        await wait.for_zookeeper(give_up())


async def test_a_refusal_by_tls_is_the_cause() -> None:
    async def give_up() -> None:
        raise ConnectionRefused("cannot connect to zookeeper: the server's certificate is refused")

    wait, _ = wait_for(timeout_s=7)
    with pytest.raises(MetadataUnavailable, match=r"after 7 s: cannot connect to zookeeper: the server's certificate"):
        await wait.for_zookeeper(give_up())


class SecureServer:
    """A server with TLS that answers nothing. `requires`: clients must present a certificate of its authority."""

    def __init__(self, folder: Path, *, requires: bool = False, hosts: Sequence[str] = ("127.0.0.1",)) -> None:
        self.authority = Authority(folder, "own")
        certificate, key = self.authority.issue("server", hosts=hosts)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(certificate, key)
        if requires:
            self._tls.load_verify_locations(self.authority.ca_file)
            self._tls.verify_mode = ssl.CERT_REQUIRED
        self.address = ""

    async def __aenter__(self) -> "SecureServer":
        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()

        self._server = await asyncio.start_server(hold, "127.0.0.1", 0, ssl=self._tls)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


async def reason_with_tls(server: str, ca_file: Path) -> str:
    """Return the reason with which a start gives up."""

    async def give_up() -> None:
        raise MetadataUnavailable("no zookeeper server responds")

    wait = ClusterWait(
        server,
        LAYOUT,
        setting="TEST_ZOOKEEPER",
        health=Health(),
        timeout_s=7,
        wall_clock_ms=lambda: 61_000,
        access=AccessFiles(ca_file=str(ca_file)).load,
    )
    with pytest.raises(MetadataUnavailable) as failed:
        await wait.for_zookeeper(give_up())
    prefix = f"gave up waiting for ZooKeeper after 7 s: {server}"
    reason = str(failed.value)
    assert reason.startswith(prefix)
    return reason.removeprefix(prefix)


TLS_FIX = "; correct zookeeper_access, or set TEST_ZOOKEEPER to the servers' ports for TLS"


async def test_the_failure_of_tls_is_the_cause_during_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_wait, "PROBE_TIMEOUT_S", 30.0)
    monkeypatch.setattr(cluster_wait, "PROBE_SILENCE_S", 30.0)
    stranger = Authority(tmp_path, "stranger").ca_file
    async with SecureServer(tmp_path) as server:
        reason = await reason_with_tls(server.address, stranger)
        assert reason.startswith(": the server's certificate is refused: ")
        assert reason.endswith(f"; check the server list and ca_file{TLS_FIX}")
    async with SecureServer(tmp_path, requires=True) as server:
        reason = await reason_with_tls(server.address, server.authority.ca_file)
        assert "does it require a client certificate?" in reason
        assert reason.endswith(TLS_FIX)
    async with SecureServer(tmp_path, hosts=("zookeeper.example.com",)) as server:
        assert "certificate is not valid for '127.0.0.1'" in await reason_with_tls(
            server.address, server.authority.ca_file
        )


async def test_a_server_that_is_silent_or_has_no_session_is_told_apart(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SecureServer(tmp_path) as server:
        monkeypatch.setattr(cluster_wait, "PROBE_SILENCE_S", 0.1)
        assert await reason_with_tls(server.address, server.authority.ca_file) == (
            " accepts connections but opens no session (does it have a quorum?); "
            "start ZooKeeper, or set TEST_ZOOKEEPER to its servers"
        )
    monkeypatch.setattr(cluster_wait, "PROBE_TIMEOUT_S", 1.0)
    reason = await reason_with_tls(silent, server.authority.ca_file)
    assert reason == f": the server does not answer the TLS handshake; is it a secureClientPort?{TLS_FIX}"


async def test_a_client_that_does_not_close_does_not_delay_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread may wait for a name server that does not answer."""
    monkeypatch.setattr(cluster_wait, "CLOSE_TIMEOUT_S", 0.01)

    async def give_up() -> None:
        try:
            raise MetadataUnavailable("no zookeeper server responds")
        finally:
            await never()

    wait, _ = wait_for("127.0.0.1:1", timeout_s=0.01)
    async with asyncio.timeout(30):
        with pytest.raises(MetadataUnavailable, match=r"gave up waiting for ZooKeeper after 0.01 s"):
            await wait.for_zookeeper(give_up())


async def test_other_errors_are_raised_unchanged() -> None:
    async def refuse() -> None:
        raise BadRequest("not a list")

    wait, _ = wait_for()
    with pytest.raises(BadRequest, match="not a list"):
        await wait.for_zookeeper(refuse())


async def test_a_short_wait_is_not_logged() -> None:
    async def connect() -> int:
        return 5

    wait, _ = wait_for()
    with structlog.testing.capture_logs() as logs:
        assert await wait.for_zookeeper(connect()) == 5
    assert logs == []


async def test_the_start_continues_when_the_cluster_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_wait, "POLL_S", 0.001)
    tree = MemoryTree()
    store = tree.connect()
    wait, health = wait_for("zk:2181")
    with structlog.testing.capture_logs() as logs:
        waiting = asyncio.create_task(wait.for_cluster(store))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        assert [event["event"] for event in logs] == ["cluster_not_initialised"], "once, then every ten seconds"
    assert health.startup_answer()[1]["progress"]["step"] == (
        "waiting for the cluster since 00:01:01 UTC: ZooKeeper at zk:2181 has no cluster at /ledgers; "
        "`bindery cluster init --zookeeper zk:2181` creates one"
    )
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    async with asyncio.timeout(30):
        await waiting


async def test_a_cluster_that_is_not_initialized_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_wait, "POLL_S", 0.001)
    wait, _ = wait_for("zk:2181", timeout_s=0.02)
    with pytest.raises(ClusterNotInitialized, match=r"gave up waiting for the cluster after 0.02 s: .*cluster init"):
        await wait.for_cluster(MemoryTree().connect())


async def test_a_call_is_repeated_while_zookeeper_does_not_answer_and_not_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_wait, "RETRY_S", 0.0)
    errors = [
        MetadataUnavailable("away"),
        MetadataOutcomeUnknown("lost"),
        BadRequest("no"),
        MetadataUnavailable("away"),
    ]

    async def ask() -> str:
        if errors:
            raise errors.pop(0)
        return "answer"

    with structlog.testing.capture_logs() as logs:
        with pytest.raises(BadRequest):
            await retry_while_unavailable(ask, event="not_read")
        assert await retry_while_unavailable(ask, event="not_read") == "answer"
    assert [(event["event"], event["error"]) for event in logs] == [
        ("not_read", "away"),
        ("not_read", "lost"),
        ("not_read", "away"),
    ]
