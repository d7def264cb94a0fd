"""The supervisor: start order, restarts, processes stopped by name, leftovers of a killed supervisor.

The child processes are small programs that serve /readyz, so that a test takes a second; `test_standalone.py` uses the
real services.
"""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from bindery.standalone import process as process_module
from bindery.standalone import supervisor as supervisor_module
from bindery.standalone.commands import _print_status
from bindery.standalone.control import ask
from bindery.standalone.directory import DataDirectory, ProcessIdentity, StandaloneError, State
from bindery.standalone.options import Options
from bindery.standalone.plan import ClusterPlan, Kind, ProcessPlan, plan_cluster
from bindery.standalone.process import ChildState
from bindery.standalone.supervisor import Supervisor, first_steps, welcome
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.stores.embedded import ServerSpec

STAND_IN = """
import http.server, os, signal, sys
name, port, record = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if os.path.exists(record + "." + name + ".broken"):
    print(name, "has a broken disk", flush=True)
    sys.exit(7)
def note(what):
    with open(record, "a") as file:
        file.write(f"{what} {name}\\n")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *args): pass
def stop(*_):
    note("stop")
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in sys.argv else stop)
note("start")
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
server.serve_forever()
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports: list[int] = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


class Cluster:
    """A supervisor over three stand-in bookies and a broker."""

    def __init__(self, root: Path, *, stubborn: str = "") -> None:
        self.directory = DataDirectory(root)
        self.directory.create()
        self.record = root / "record"
        self.lines: list[str] = []
        self.ready = asyncio.Event()
        self.shutdown = Shutdown()
        self.before_bookies: Callable[[], Awaitable[None]] | None = None
        ports = free_ports(4)
        names = ["bookie-0", "bookie-1", "bookie-2", "broker-0"]
        plans = [
            ProcessPlan(
                name,
                Kind.BROKER if name.startswith("broker") else Kind.BOOKIE,
                (("HTTP", port),),
                (
                    *(sys.executable, "-c", STAND_IN, name, str(port), str(self.record)),
                    *(("stubborn",) if name == stubborn else ()),
                ),
            )
            for name, port in zip(names, ports, strict=True)
        ]
        self.plan = ClusterPlan(Options(data=root), "127.0.0.1:1", (), tuple(plans[:3]), tuple(plans[3:]))
        self.supervisor = Supervisor(self.plan, self.directory, init_cluster=self._init, say=self.lines.append)

    async def _init(self, zookeeper: str) -> None:
        self.lines.append(f"init {zookeeper}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Cluster"]:
        task = asyncio.create_task(self.supervisor.run(self.shutdown, on_ready=self.ready.set))
        try:
            waiting = asyncio.create_task(self.ready.wait())
            async with asyncio.timeout(30):
                await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if task.done():
                await task
            yield self
        finally:
            self.shutdown.request("the test ends")
            async with asyncio.timeout(30):
                await asyncio.gather(task, return_exceptions=True)

    def pid(self, name: str) -> int:
        return int(self.directory.pid_file(name).read_text())

    def recorded(self) -> list[str]:
        return self.record.read_text().splitlines() if self.record.exists() else []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def ask(self, **request: str) -> dict[str, object]:
        answer = await asyncio.to_thread(ask, self.directory.control_socket, request, timeout_s=20)
        assert answer is not None
        return answer


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_PAUSE_S", 0.05)
    monkeypatch.setattr(supervisor_module, "STOP_TIMEOUT_S", 1.0)
    monkeypatch.setattr(process_module, "PROBE_INTERVAL_S", 0.02)


async def test_all_start_after_the_metadata_and_brokers_stop_before_bookies(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.running():
        assert cluster.lines[0] == "init 127.0.0.1:1"
        assert sorted(cluster.recorded()) == ["start bookie-0", "start bookie-1", "start bookie-2", "start broker-0"]
    assert cluster.recorded()[4] == "stop broker-0"
    assert sorted(cluster.recorded()[5:]) == ["stop bookie-0", "stop bookie-1", "stop bookie-2"]
    assert list(cluster.directory.run.glob("*.pid")) == []


async def test_a_child_that_dies_is_restarted_and_the_end_of_its_log_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.running():
        before = cluster.pid("bookie-1")
        broken = Path(f"{cluster.record}.bookie-1.broken")
        broken.touch()
        os.kill(before, signal.SIGKILL)
        await cluster.until(lambda: any("bookie-1 exited: exit code 7" in line for line in cluster.lines))
        assert any("bookie-1 exited: killed by SIGKILL" in line for line in cluster.lines)
        assert any("has a broken disk" in line for line in cluster.lines)
        status = cluster.supervisor.status()
        assert status["state"] == "starting"
        facts = {facts["name"]: facts for facts in status["processes"]}
        assert facts["bookie-1"]["last_death"] == ["exit code 7", "bookie-1 has a broken disk"]
        assert facts["bookie-0"]["last_death"] == []
        _print_status(status)
        shown = capsys.readouterr().out
        assert "      last exit: exit code 7; end of its log:\n        bookie-1 has a broken disk\n" in shown
        assert "bookie-1.log)" in shown
        broken.unlink()
        await cluster.until(lambda: cluster.supervisor.status()["state"] == "ready")
        assert cluster.pid("bookie-1") != before
        assert not any(facts["last_death"] for facts in cluster.supervisor.status()["processes"])
        assert any(line.startswith("bookie-1 is again ready") for line in cluster.lines)


async def test_a_child_that_could_not_be_started_is_started_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.running():
        directory = cluster.directory.of_process("bookie-1")
        directory.rmdir()
        directory.touch()
        os.kill(cluster.pid("bookie-1"), signal.SIGKILL)
        await cluster.until(lambda: any(line.startswith("bookie-1 could not be started: ") for line in cluster.lines))
        directory.unlink()
        await cluster.until(lambda: cluster.supervisor.status()["state"] == "ready")


async def test_on_a_full_disk_children_restart_and_the_cluster_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_directory: DataDirectory, _state: State) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cluster = Cluster(tmp_path)
    async with cluster.running():
        before = cluster.pid("bookie-1")
        with monkeypatch.context() as patch:
            patch.setattr(DataDirectory, "save_state", full)
            patch.setattr(DataDirectory, "pid_file", lambda self, name: self.root / "no" / "room" / name)
            os.kill(before, signal.SIGKILL)
            await cluster.until(lambda: any("No space left on device" in line for line in cluster.lines))
            await cluster.until(lambda: cluster.supervisor.status()["state"] == "ready")
        after = next(row["pid"] for row in cluster.supervisor.status()["processes"] if row["name"] == "bookie-1")
        os.kill(after, signal.SIGKILL)
        await cluster.until(lambda: cluster.directory.pid_file("bookie-1").exists())
    assert cluster.lines[-1] == "all stopped"


async def test_a_process_stopped_by_name_stays_down_over_restarts_until_it_is_started(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.running():
        assert await cluster.ask(verb="stop", name="bookie-2") == {"ok": True}
        assert not cluster.directory.pid_file("bookie-2").exists()
        facts = {facts["name"]: facts for facts in cluster.supervisor.status()["processes"]}
        assert (facts["bookie-2"]["state"], facts["bookie-2"]["held"]) == (ChildState.DOWN, True)
    second = Cluster(tmp_path)
    async with second.running():
        assert any("bookie-2 stays down" in line for line in second.lines)
        assert not second.directory.pid_file("bookie-2").exists()
        assert await second.ask(verb="start", name="bookie-2") == {"ok": True}
        assert ProcessIdentity.of(second.pid("bookie-2")) is not None


async def test_a_process_that_cannot_start_may_be_stopped_by_name_and_the_rest_is_ready(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    Path(f"{cluster.record}.bookie-1.broken").touch()

    async def hold_after_exit() -> None:
        await cluster.until(lambda: any("bookie-1 exited" in line for line in cluster.lines))
        await cluster.ask(verb="stop", name="bookie-1")

    holding = asyncio.create_task(hold_after_exit())
    async with cluster.running():
        assert cluster.ready.is_set()
        assert cluster.supervisor.status()["state"] == "ready"
    await holding


async def test_starting_a_process_that_cannot_start_reports_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "RESTART_PAUSE_S", 0.1)
    monkeypatch.setattr(supervisor_module, "HELD_CHECK_INTERVAL_S", 0.01)
    cluster = Cluster(tmp_path)
    async with cluster.running():
        await cluster.ask(verb="stop", name="bookie-1")
        Path(f"{cluster.record}.bookie-1.broken").touch()
        error = str((await cluster.ask(verb="start", name="bookie-1"))["error"])
        assert "bookie-1 cannot start" in error
        assert "has a broken disk" in error
        assert "bookie-1.log" in error
        assert len([line for line in cluster.lines if line.startswith("bookie-1 exited: exit code 7")]) >= 2


async def test_data_of_a_bookie_that_is_not_started_is_reported(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    (tmp_path / "bookie-7").mkdir()
    async with cluster.running():
        assert any("bookie-7 has data here and is not started" in line for line in cluster.lines)
        assert not any("bookie-0 has data here" in line for line in cluster.lines)


async def test_an_unknown_name_is_refused_with_the_known_names(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.running():
        answer = await cluster.ask(verb="stop", name="bookie-9")
        assert "bookie-9" in str(answer["error"])
        assert "bookie-0, bookie-1, bookie-2, broker-0" in str(answer["error"])
        assert "error" in await cluster.ask(verb="dance")


async def test_a_child_that_ignores_sigterm_is_killed_at_the_limit(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, stubborn="bookie-0")
    async with cluster.running():
        stubborn = ProcessIdentity.of(cluster.pid("bookie-0"))
    assert stubborn is not None
    assert not stubborn.is_alive
    assert any("bookie-0 did not stop within 1 s of SIGTERM: killing it" in line for line in cluster.lines)


async def test_processes_left_by_a_killed_supervisor_are_stopped_first(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    orphan = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=-1)
    try:
        assert orphan.stdout is not None
        orphan.stdout.readline()
        identity = ProcessIdentity.of(orphan.pid)
        assert identity is not None
        cluster.directory.save_state(State(children={"bookie-0": identity}))
        cluster.directory.pid_file("bookie-9").write_text("1\n")
        async with cluster.running():
            assert not identity.is_alive
            assert any("left bookie-0 running" in line for line in cluster.lines)
            assert not cluster.directory.pid_file("bookie-9").exists()
    finally:
        orphan.kill()
        orphan.communicate()


async def test_processes_of_an_earlier_run_that_cannot_be_stopped_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = ProcessIdentity.of(process.pid)
        assert identity is not None
        cluster.directory.save_state(State(children={"bookie-0": identity}))
        monkeypatch.setattr(supervisor_module, "LEFTOVER_TIMEOUT_S", 0.1)
        monkeypatch.setattr(ProcessIdentity, "kill", lambda self, number: None)
        with pytest.raises(StandaloneError, match=rf"earlier run: bookie-0 \(pid {process.pid}\) did not end"):
            async with cluster.running():
                pass
        process.kill()


async def test_another_process_with_the_same_pid_is_not_stopped(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.directory.save_state(State(children={"bookie-0": ProcessIdentity(os.getpid(), "another time")}))
    async with cluster.running():
        assert not any("left" in line for line in cluster.lines)


async def test_a_port_in_use_is_named_with_a_fix(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    port = cluster.plan.bookies[1].probe_port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(StandaloneError, match=rf"port {port} \(for bookie-1, HTTP\).*--port-offset \d+"):
            async with cluster.running():
                pass
    assert cluster.recorded() == []


def test_the_first_steps_send_receive_and_acknowledge() -> None:
    produce, receive, ack = first_steps("http://127.0.0.1:8180")
    assert "8180/v1/topics/public/default/hello/messages" in produce
    assert "/subscriptions/me/receive" in receive
    assert "/subscriptions/me/ack" in ack


def fake_zookeeper(server: ServerSpec, ensemble: object) -> list[str]:
    return ["zookeeper", str(server.client_port)]


def test_with_too_few_bookies_a_note_replaces_the_example_commands() -> None:
    def printed(**options: object) -> str:
        plan = plan_cluster(Options(**options), root=Path("/d"), zookeeper_command=fake_zookeeper)
        return "\n".join(welcome(plan, DataDirectory(Path("/d"))))

    assert "fewer than 3 bookies" in printed(bookies=2)
    assert "curl" not in printed(bookies=2)
    assert "curl" in printed(bookies=3)
    assert "curl" in printed(bookies=0, zookeeper="127.0.0.1:2181")
