"""A child process from start to end, with a fake process and fake responses to its probes."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bindery.standalone.directory import DataDirectory
from bindery.standalone.plan import Kind, ProcessPlan
from bindery.standalone.process import Child, ChildState
from bindery_simulation.instant import InstantLoop


class FakeProcess:
    """A process with the pid of the test, which ends when the test says so."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self.signals: list[int] = []
        self._ended = asyncio.Event()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)


class FakeWriter:
    def __init__(self) -> None:
        self.sent = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True


class Stage:
    """One child, its fake process, and the responses to its probes: a port that refuses without any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, kind: Kind = Kind.BOOKIE) -> None:
        self.now = 100.0
        self.directory = DataDirectory(folder)
        self.directory.create()
        plan = ProcessPlan("child-1", kind, (("http", 8000),), ("program", "--option"))
        self.child = Child(plan, self.directory, clock=lambda: self.now)
        self.process = FakeProcess()
        self.commands: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.start_error: OSError | None = None
        self.responses: dict[str, bytes] = {}
        self.writers: list[FakeWriter] = []
        monkeypatch.setattr(asyncio, "create_subprocess_exec", self._spawn)
        monkeypatch.setattr(asyncio, "open_connection", self._connect)

    async def _spawn(self, *command: str, **options: Any) -> FakeProcess:
        self.commands.append((command, options))
        if self.start_error is not None:
            raise self.start_error
        return self.process

    async def _connect(self, host: str, port: int, *, ssl: object = None) -> tuple[Any, FakeWriter]:
        assert (host, port, ssl) == ("127.0.0.1", 8000, None)
        if not self.responses:
            raise ConnectionRefusedError
        writer = FakeWriter()
        self.writers.append(writer)
        stage = self

        class Reader:
            rest: bytes | None = None

            async def read(self, size: int) -> bytes:
                if self.rest is None:
                    self.rest = stage.answer_to(writer.sent)
                if self.rest == b"silence":
                    await asyncio.sleep(3600)
                chunk, self.rest = self.rest[:7], self.rest[7:]
                return chunk

        return Reader(), writer

    def answer_to(self, request: bytes) -> bytes:
        for path, response in self.responses.items():
            if path.encode() in request:
                return response
        return b""


def http(status: int, document: object) -> bytes:
    return f"HTTP/1.1 {status} X\r\nA: b\r\n\r\n{json.dumps(document)}".encode()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Run a coroutine on a stage, with a simulated clock."""

    def run(work: Any, kind: Kind = Kind.BOOKIE) -> None:
        async def main() -> None:
            await work(Stage(monkeypatch, tmp_path, kind))

        with asyncio.Runner(loop_factory=InstantLoop) as runner:
            runner.run(main())

    return run


def test_a_child_is_down_before_its_start(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        child = stage.child
        assert (child.name, child.state, child.since, child.starts) == ("child-1", ChildState.DOWN, 100.0, 0)
        assert child.gone.is_set()
        assert not child.ready.is_set()
        child.terminate()
        child.kill()
        assert child.state is ChildState.DOWN

    play(work)


def test_a_start_leaves_a_pid_file_until_the_end(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        child, pid_file = stage.child, stage.directory.pid_file("child-1")
        stage.now = 101.0
        await child.start()
        assert (child.state, child.since, child.starts) == (ChildState.STARTING, 101.0, 1)
        assert child.waiting_for == "the process to answer"
        assert pid_file.read_text() == f"{os.getpid()}\n"
        assert child.identity is not None
        assert child.identity.pid == os.getpid()
        assert not child.gone.is_set()
        stage.process.end(7)
        assert await child.wait_end() == 7
        assert not pid_file.exists()
        assert child.identity is None
        assert child.gone.is_set()
        await child.start()
        assert child.starts == 2

    play(work)


@pytest.mark.parametrize("kind", [Kind.BOOKIE, Kind.ZOOKEEPER])
def test_a_child_ends_with_its_parent(play: Callable[..., None], kind: Kind) -> None:
    async def work(stage: Stage) -> None:
        await stage.child.start()
        ((command, options),) = stage.commands
        assert command == ("program", "--option")
        assert options["start_new_session"] is True
        assert options["env"]["PYTHONUNBUFFERED"] == "1"
        foreign = kind is Kind.ZOOKEEPER
        assert options["env"].get("BINDERY_DIE_WITH_PARENT") == (None if foreign else str(os.getpid()))
        assert (options["preexec_fn"] is not None) is foreign

    play(work, kind)


def test_a_program_that_cannot_start_leaves_nothing(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        stage.start_error = FileNotFoundError("program")
        with pytest.raises(FileNotFoundError):
            await stage.child.start()
        assert stage.child.gone.is_set()
        assert (stage.child.state, stage.child.starts) == (ChildState.DOWN, 0)
        assert not stage.directory.pid_file("child-1").exists()

    play(work)


def test_a_child_is_probed_until_it_is_ready(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        child = stage.child
        await child.start()
        waiting = asyncio.create_task(child.wait_ready())
        await asyncio.sleep(1)
        assert child.waiting_for == "the process to answer"
        progress = {"progress": {"step": "replaying the journal", "done": 3, "total": 10, "unit": "MB"}}
        stage.responses = {"/readyz": http(503, {}), "/startupz": http(503, progress)}
        await asyncio.sleep(1)
        assert child.waiting_for == "replaying the journal (3 of 10 MB)"
        assert child.state is ChildState.STARTING
        child.last_death = ["it broke"]
        stage.now = 110.0
        stage.responses = {"/readyz": http(200, {})}
        await waiting
        assert (child.state, child.since, child.last_death) == (ChildState.READY, 110.0, [])
        assert child.ready.is_set()
        assert all(writer.is_closed for writer in stage.writers)
        assert stage.writers[-1].sent == b"GET /readyz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"

    play(work)


@pytest.mark.parametrize(
    ("ready", "startup", "text"),
    [
        ({}, http(503, {"progress": {"step": "opening"}}), "opening"),
        ({}, http(503, {"progress": {"step": "opening", "total": 4}}), "opening (0 of 4)"),
        ({}, http(503, {"progress": {}}), "its start-up"),
        ({}, http(503, {"progress": "junk"}), "its start-up"),
        ({}, http(200, {}), "it to become ready"),
        ({"reasons": {"disk": "full", "journal": "slow"}}, http(200, {}), "disk: full; journal: slow"),
        ({"reasons": {}}, http(200, {}), "it to become ready"),
        ({"reasons": "junk"}, b"junk", "it to become ready"),
        ([], b"HTTP/1.1 x\r\n\r\n{}", "it to become ready"),
    ],
)
def test_a_child_tells_what_it_waits_for(play: Callable[..., None], ready: object, startup: bytes, text: str) -> None:
    async def work(stage: Stage) -> None:
        stage.responses = {"/readyz": http(503, ready), "/startupz": startup}
        await stage.child.start()
        waiting = asyncio.create_task(stage.child.wait_ready())
        await asyncio.sleep(0.5)
        assert stage.child.waiting_for == text
        waiting.cancel()

    play(work)


def test_a_silent_port_is_asked_again(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        stage.responses = {"/readyz": b"silence"}
        await stage.child.start()
        waiting = asyncio.create_task(stage.child.wait_ready())
        await asyncio.sleep(2.05)
        assert len(stage.writers) == 1
        await asyncio.sleep(0.1)
        assert len(stage.writers) == 2
        assert stage.writers[0].is_closed
        waiting.cancel()

    play(work)


def test_zookeeper_is_asked_in_its_own_words(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        stage.responses = {"srvr": b"not serving"}
        await stage.child.start()
        waiting = asyncio.create_task(stage.child.wait_ready())
        await asyncio.sleep(1)
        assert stage.child.state is ChildState.STARTING
        stage.responses = {"srvr": b"Zookeeper version: 3\nMode: standalone\n"}
        await waiting
        assert stage.child.state is ChildState.READY
        assert stage.writers[-1].sent == b"srvr"

    play(work, Kind.ZOOKEEPER)


def test_probing_ends_with_the_process(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        await stage.child.start()
        waiting = asyncio.create_task(stage.child.wait_ready())
        await asyncio.sleep(1)
        stage.process.end(1)
        await asyncio.wait_for(waiting, 1)
        assert not stage.child.ready.is_set()

    play(work)


def test_a_child_is_stopped_by_signals(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        child = stage.child
        await child.start()
        child.enter(ChildState.READY)
        child.terminate()
        assert (child.state, child.ready.is_set()) == (ChildState.STOPPING, False)
        child.kill()
        assert stage.process.signals == [signal.SIGTERM, signal.SIGKILL]
        stage.process.end(-9)
        child.terminate()
        child.kill()
        assert len(stage.process.signals) == 2
        assert await child.wait_end() == -9

    play(work)


def test_the_reason_of_the_last_end_is_kept_until_the_child_is_ready_or_down(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        child = stage.child
        for state, kept in (
            (ChildState.PAUSING, True),
            (ChildState.STARTING, True),
            (ChildState.STOPPING, True),
            (ChildState.READY, False),
            (ChildState.DOWN, False),
        ):
            child.last_death = ["exit code 7"]
            child.enter(state)
            assert bool(child.last_death) is kept

    play(work)


def test_only_the_log_of_this_run_is_shown(play: Callable[..., None]) -> None:
    async def work(stage: Stage) -> None:
        log = stage.directory.log_file("child-1")
        log.write_text("earlier\n")
        await stage.child.start()
        with log.open("a") as file:
            file.write("one\ntwo\nthree\n")
        assert stage.child.log_tail(2) == ["two", "three"]
        assert stage.child.log_tail(9) == ["one", "two", "three"]

    play(work)
