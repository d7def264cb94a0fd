"""A throwaway cluster whose Python processes are forked, for tests that start a cluster many times.

`ForkedCluster` behaves like `ThrowawayCluster`: each bookie, broker and auditor is an operating-system process with
its own pid, session, log and exit code, and dies with the supervisor. Only its start differs: instead of executing
Python, which costs half a second to a second and a half of CPU time per process for imports, a server that has
imported the modules forks. ZooKeeper is executed as usual. `test_standalone.py` covers executed processes.

    test process -> fork server -> supervisor -> its own fork server -> bookies, broker, auditor

The supervisor has its own fork server, so that its processes receive SIGTERM when the supervisor is killed.
"""

import asyncio
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NoReturn

from bindery.standalone.throwaway import ThrowawayCluster
from bindery_kit.process.runtime import DIE_WITH_PARENT

PRELOADED: Final = (
    "bindery_kit.lean_imports",
    "bindery_auditor.main",
    "bindery_bookie.main",
    "bindery_broker.main",
    "bindery_broker.http.app",
    "bindery.main",
    "bindery.cluster.commands",
    "bindery.standalone.supervisor",
    "bindery_metadata.stores.zookeeper",
)
REQUEST_SIZE_MAX: Final = 200_000
"""Maximum size of a request in bytes. A request contains the environment of a process."""
STREAMS: Final = (0, 1, 2)
_execute: Final = asyncio.create_subprocess_exec


class ForkedProcess:
    """A process that a fork server started, with the methods of subprocess.Popen and asyncio's Process that are used.

    The pid stays valid until the exit code is read: the fork server, its parent, has not waited for it before.
    """

    def __init__(self, pid: int, server: "ForkServer") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self._reap()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_blocking(self, timeout: float) -> int:
        if self.returncode is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked process", timeout)
        return self._reap()

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._pidfd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._pidfd)
        return self._reap()

    def _reap(self) -> int:
        if self.returncode is None:
            self.returncode = int(self._server.request({"wait": self.pid}))
            os.close(self._pidfd)
        return self.returncode


class Supervisor(ForkedProcess):
    """The supervisor as ThrowawayCluster uses it."""

    def wait(self, timeout: float) -> int:  # type: ignore[override]
        return self.wait_blocking(timeout)


class ForkServer:
    """The client of a fork server."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def start(self, module: str, arguments: Sequence[str], *, log: int, environment: dict[str, str]) -> int:
        """Start `python -m module arguments` with its output in the file `log`, and return its pid."""
        return self.request({"module": module, "arguments": list(arguments), "environment": environment}, log)

    def request(self, body: dict[str, Any], *descriptors: int) -> int:
        socket.send_fds(self._socket, [json.dumps(body).encode()], descriptors)
        return int(self._socket.recv(32))


def serve(sock: socket.socket) -> NoReturn:
    """Serve requests until the client closes the connection. The children then receive SIGTERM."""
    while True:
        body, descriptors, _, _ = socket.recv_fds(sock, REQUEST_SIZE_MAX, 1)
        if not body:
            os._exit(0)
        request = json.loads(body)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            sock.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            sock.close()
            request["environment"][DIE_WITH_PARENT] = str(server)
            _run(request, descriptors[0])
        os.close(descriptors[0])
        sock.send(str(pid).encode())


def _run(request: dict[str, Any], log: int) -> NoReturn:
    """Run `python -m module` in the forked process."""
    os.setsid()
    for stream, source in zip(STREAMS, (os.open(os.devnull, os.O_RDONLY), log, log), strict=True):
        os.dup2(source, stream)
    os.close(log)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)
    if request["module"] == "bindery":
        _fork_instead_of_executing(start_server())
    sys.argv = ["", *request["arguments"]]
    code: Any = 1
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def start_server() -> ForkServer:
    """Fork a server from this process, which must have no other threads."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        serve(there)
    there.close()
    return ForkServer(here)


def fork_instead_of_executing() -> None:
    """Let asyncio of this process fork services instead of executing them. The caller restores
    `asyncio.create_subprocess_exec`."""
    if hasattr(os, "pidfd_open"):
        _fork_instead_of_executing(_first_server())


def _fork_instead_of_executing(server: ForkServer) -> None:
    async def start(*command: str, **options: Any) -> Any:
        if command[:2] != (sys.executable, "-m"):
            return await _execute(*command, **options)
        _, _, module, *arguments = command
        pid = server.start(module, arguments, log=options["stdout"], environment=options["env"])
        return ForkedProcess(pid, server)

    asyncio.create_subprocess_exec = start  # type: ignore[assignment]


class ForkedCluster(ThrowawayCluster):
    def _start_supervisor(self, command: Sequence[str], log: int, environment: dict[str, str]) -> Any:
        if not hasattr(os, "pidfd_open"):  # not Linux
            return super()._start_supervisor(command, log, environment)
        server = _first_server()
        _, _, module, *arguments = command
        pid = server.start(module, arguments, log=log, environment=environment)
        return Supervisor(pid, server)


@cache
def _first_server() -> ForkServer:
    """Execute a server, because the test process has threads and modules that a service must not inherit."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        subprocess.Popen([sys.executable, __file__, str(there.fileno())], pass_fds=[there.fileno()])
    return ForkServer(here)


def _import_services() -> None:
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.freeze()
    gc.enable()


if __name__ == "__main__":
    _import_services()
    serve(socket.socket(fileno=int(sys.argv[1])))
