"""The real process with real disks and a real ZooKeeper: start, crash, stop, and refused starts."""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack_lac, pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire.messages import Status
from bindery_metadata.bookies.membership import ABSENT, Intent, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bookie_process import ID, WAIT_S, Bookie, free_port

pytestmark = pytest.mark.integration

DIGESTER = Digester(DigestType.CRC32C, b"pw")
KEY = DIGESTER.master_key
STOP_LIMIT_S = 20.0  # most of it is for a busy machine
PACKET = pack_lac(DIGESTER, ledger_id=9, lac=41)


@pytest.fixture
def bookie(real_bookie: Bookie) -> Bookie:
    return real_bookie


def adds(ledger_id: int, first: int, count: int, *, size: int = 100) -> list[m.AddRequest]:
    bodies = pack_many(
        DIGESTER, [bytes(size)] * count, ledger_id=ledger_id, first_entry_id=first, lac=first - 1, length=first * size
    )
    return [m.AddRequest(first + n, ledger_id, first + n, KEY, body) for n, body in enumerate(bodies)]


def fence(txn_id: int, ledger_id: int) -> m.ReadRequest:
    return m.ReadRequest(txn_id, ledger_id, -1, flag=m.ReadFlag.FENCE_LEDGER, master_key=KEY)


async def test_a_bookie_starts_serves_stops_and_starts_again(bookie, metadata, connect_raw) -> None:
    await bookie.start()
    client = await connect_raw(bookie.port)
    client.send(*adds(7, 0, 100))
    assert {a.status for a in (await client.receive_all(100)).values()} == {0}
    assert (await client.ask(m.ReadRequest(200, 7, -1))).max_lac == -1
    client.send(*adds(7, 100, 1))
    await client.receive()
    assert (await client.ask(m.ReadRequest(200, 7, 50))).max_lac == 99

    assert await metadata.children(bookie.layout.available) == [str(ID), "readonly"]
    status, page = await bookie.http("/metrics")
    assert status == 200
    assert 'bookkeeper_server_ADD_ENTRY_REQUEST_count{success="true"} 101' in page
    assert "\nbookie_SERVER_STATUS 1\n" in page
    state = json.loads((await bookie.http("/api/v1/bookie/state"))[1])
    assert state.pop("membership") == {"intent": "active", "sinceMs": 0, "untilMs": None, "reason": "", "by": ""}
    assert state == {"running": True, "readOnly": False, "shuttingDown": False, "availableForHighPriorityWrites": True}
    assert (await bookie.http("/startupz"))[0] == (await bookie.http("/livez"))[0] == 200

    async with asyncio.timeout(30):
        assert await bookie.end(signal.SIGTERM) == 0
    assert await metadata.children(bookie.layout.available) == ["readonly"]

    await bookie.start()
    client = await connect_raw(bookie.port)
    client.send(*[m.ReadRequest(n, 7, n) for n in range(101)])
    bodies = await client.receive_all(101)
    assert {n: bodies[n].body for n in range(101)} == {a.entry_id: a.body for a in [*adds(7, 0, 100), *adds(7, 100, 1)]}


async def test_acknowledged_adds_survive_kill_nine(bookie, connect_raw) -> None:
    """Adds are in flight when the process is killed; answered adds, the fence and the LAC survive."""
    await bookie.start()
    client = await connect_raw(bookie.port)
    fenced = await connect_raw(bookie.port)
    await fenced.ask(adds(8, 0, 1)[0])
    assert (await fenced.ask(fence(1, 8))).status == 0
    assert (await fenced.ask(m.WriteLacRequest(2, 9, 41, KEY, PACKET))).status == 0
    sent = adds(7, 0, 3000, size=1000)
    client.send(*sent)
    acknowledged = {(await client.receive()).entry_id for _ in range(500)}
    await bookie.end(signal.SIGKILL)
    try:
        while True:
            acknowledged.add((await client.receive()).entry_id)
    except (EOFError, ConnectionResetError):
        pass

    await bookie.start()
    client = await connect_raw(bookie.port)
    client.send(*[m.ReadRequest(n, 7, n) for n in sorted(acknowledged)])
    found = await client.receive_all(len(acknowledged))
    assert {n: found[n].body for n in found} == {a.entry_id: a.body for a in sent if a.entry_id in acknowledged}
    assert (await client.ask(adds(8, 1, 1)[0])).status == Status.FENCED
    assert (await client.ask(m.ReadLacRequest(3, 9))).lac_body == PACKET


async def test_random_bytes_at_the_port_cause_at_most_one_log_line_per_second(bookie, connect_raw) -> None:
    await bookie.start()
    noise = random.Random(5)
    for _ in range(50):
        client = await connect_raw(bookie.port)
        client.writer.write(noise.randbytes(200))
        client.writer.write_eof()
        assert await client.is_closed()
    survivor = await connect_raw(bookie.port)
    assert (await survivor.ask(adds(1, 0, 1)[0])).status == 0
    lines = [line for line in bookie.log.read_text().splitlines() if "connection_closed_for_bad_bytes" in line]
    assert 1 <= len(lines) <= 10, "one line a second, not one a connection"
    assert "Traceback" not in bookie.log.read_text()


async def test_another_directory_is_refused_with_expected_and_found(bookie) -> None:
    await bookie.start()
    await bookie.end(signal.SIGTERM)
    bookie.launch(ledger_dir=str(bookie.directory / "elsewhere"))
    assert await bookie.exit_code() == 1
    text = bookie.log.read_text()
    assert "expected" in text
    assert str(bookie.directory / "elsewhere") in text
    assert "Traceback" not in text


async def test_a_second_process_of_the_same_id_is_refused(bookie, tmp_path, zookeeper) -> None:
    """The second process has its own disks, so only the cookie and the registration show the conflict."""
    await bookie.start()
    second = Bookie(tmp_path / "second", zookeeper, bookie.layout.root)
    second.directory.mkdir()
    try:
        second.launch()
        assert await second.exit_code() == 1
        assert "does not match the settings and the cluster" in second.log.read_text()
    finally:
        second.kill()
    assert (await bookie.http("/readyz"))[0] == 200


async def test_a_start_that_waits_for_zookeeper_reports_it_and_times_out(bookie) -> None:
    bookie.launch(zookeeper=f"127.0.0.1:{free_port()}", zookeeper_connect_timeout_s="4")
    async with asyncio.timeout(WAIT_S):
        while (answer := await bookie.http("/startupz"))[0] == 0:
            await asyncio.sleep(0.02)
    assert answer[0] == 503
    waits = "waiting for ZooKeeper since"
    async with asyncio.timeout(WAIT_S):
        while waits not in json.loads((await bookie.http("/startupz"))[1])["progress"]["step"]:
            await asyncio.sleep(0.02)
    status, body = await bookie.http("/readyz")
    assert (status, json.loads(body)["reasons"]["startup"].startswith(waits)) == (503, True)
    assert (await bookie.http("/livez"))[0] == 200
    assert await bookie.exit_code() == 1
    *_, last = bookie.log.read_text().splitlines()
    assert last.startswith("bindery-bookie: gave up waiting for ZooKeeper after 4 s: 127.0.0.1:")
    assert last.endswith("connection refused; start ZooKeeper, or set BOOKIE_ZOOKEEPER to its servers")


async def test_a_start_waits_for_the_cluster_to_be_initialized(bookie, metadata) -> None:
    layout = LedgersLayout(f"{bookie.layout.root}-later")
    bookie.launch(ledgers_root=layout.root)
    async with asyncio.timeout(WAIT_S):
        while "bindery cluster init" not in (await bookie.http("/readyz"))[1]:
            await asyncio.sleep(0.02)
    assert "cluster_not_initialised" in bookie.log.read_text()
    await initialize_cluster(metadata, layout, randomness=random.Random(1))
    await bookie.until_ready()


async def test_a_cluster_that_is_never_initialized_ends_the_start(bookie) -> None:
    bookie.launch(ledgers_root="/never-made", zookeeper_connect_timeout_s="1")
    assert await bookie.exit_code() == 1
    *_, last = bookie.log.read_text().splitlines()
    assert "has no cluster at /never-made; `bindery cluster init --zookeeper " in last


async def test_a_start_that_waits_for_zookeeper_can_be_stopped(bookie) -> None:
    """The ZooKeeper port is closed, or it accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (free_port(), silent.getsockname()[1]):
            bookie.launch(zookeeper=f"127.0.0.1:{port}", zookeeper_connect_timeout_s="60")
            async with asyncio.timeout(WAIT_S):
                while (await bookie.http("/livez"))[0] != 200:
                    await asyncio.sleep(0.02)
            async with asyncio.timeout(STOP_LIMIT_S):
                assert await bookie.end(signal.SIGTERM) == 0


async def test_a_stop_takes_seconds_while_clients_continue(bookie, metadata, connect_raw) -> None:
    """Acknowledged entries are flushed, the registration is removed, and clients do not delay the stop."""
    await bookie.start()
    client = await connect_raw(bookie.port)
    sent = adds(7, 0, 3000, size=1000)
    client.send(*sent)
    acknowledged = {(await client.receive()).entry_id for _ in range(1000)}
    async with asyncio.timeout(STOP_LIMIT_S):
        assert await bookie.end(signal.SIGTERM) == 0
    assert await metadata.children(bookie.layout.available) == ["readonly"]
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            acknowledged.add((await client.receive()).entry_id)
    await bookie.start()
    client = await connect_raw(bookie.port)
    client.send(*[m.ReadRequest(n, 7, n) for n in sorted(acknowledged)])
    found = await client.receive_all(len(acknowledged))
    assert {n: found[n].body for n in found} == {a.entry_id: a.body for a in sent if a.entry_id in acknowledged}


async def test_each_wrong_setting_has_its_own_error(bookie) -> None:
    for changes, code, text in (
        ({"port": "70000"}, 2, "--port"),
        ({"host": "0.0.0.0"}, 1, "--insecure"),
        ({"bookie_id": "a/b"}, 1, "not a bookie id"),
        ({"log_level": "loud"}, 2, "--log-level"),
    ):
        bookie.launch(**changes)
        assert await bookie.exit_code() == code, changes
        assert text in bookie.log.read_text(), changes
    assert "Traceback" not in bookie.log.read_text()


async def test_a_planned_stop_sets_maintenance_until_the_bookie_serves_again(bookie, metadata) -> None:
    """As in Kubernetes, the hook runs with the bookie's environment, SIGTERM follows, and the bookie starts again."""
    memberships = MembershipStore(metadata, clock_ms=lambda: 0)
    await bookie.start()
    names = ("zookeeper", "ledgers-root", "bookie-id")
    variables = {f"BOOKIE_{name.upper().replace('-', '_')}": bookie.arguments[f"--{name}"] for name in names}
    hook = await asyncio.to_thread(
        subprocess.run,
        [str(Path(sys.executable).parent / "bindery-bookie-prestop")],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (hook.returncode, "is in maintenance for 600 s" in hook.stderr) == (0, True), hook.stderr
    assert (await memberships.get(ID)).intent is Intent.MAINTENANCE
    assert await bookie.end(signal.SIGTERM) == 0
    assert (await memberships.get(ID)).intent is Intent.MAINTENANCE
    await bookie.start()
    async with asyncio.timeout(WAIT_S):
        while (await memberships.get(ID)).version != ABSENT:
            await asyncio.sleep(0.02)


async def test_a_lost_session_stops_adds_until_the_bookie_is_registered_again(bookie, metadata, connect_raw) -> None:
    """The process is paused for longer than its session timeout; its registration ends, and is created again."""
    await bookie.start()
    client = await connect_raw(bookie.port)
    assert (await client.ask(adds(1, 0, 1)[0])).status == 0
    assert bookie.process is not None
    bookie.process.send_signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(WAIT_S):
            while await metadata.exists(bookie.layout.bookie(ID, read_only=False)) is not None:
                await asyncio.sleep(0.05)
    finally:
        bookie.process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(WAIT_S):
        while await metadata.exists(bookie.layout.bookie(ID, read_only=False)) is None:
            await asyncio.sleep(0.02)
    await bookie.until_ready()
    assert (await client.ask(adds(1, 1, 1)[0])).status == 0
    assert "bookie_not_registered" in bookie.log.read_text()


async def test_invalid_security_settings_are_refused_before_any_directory_is_created(bookie) -> None:
    bookie.launch(auth_provider="certificate")
    assert await bookie.exit_code() == 1
    assert "TLS needs tls.certificate_file" in bookie.log.read_text()
    assert not (bookie.directory / "journal").exists()
