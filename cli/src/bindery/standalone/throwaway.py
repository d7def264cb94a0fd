"""Run a cluster for one test or demonstration, with data and ports of its own, and remove it at the end.

`with ThrowawayCluster() as cluster:` runs `bindery standalone` as a child process. The processes of the cluster end
when the block ends, and when the process that runs the block ends, even by SIGKILL.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bindery_kit.process.runtime import DIE_WITH_PARENT

from bindery.standalone.control import ask
from bindery.standalone.directory import DataDirectory, ProcessIdentity, StandaloneError, is_port_free
from bindery.standalone.plan import (
    AUDITOR_HTTP_PORT,
    BOOKIE_HTTP_PORT,
    BOOKIE_PORT,
    BROKER_HTTP_PORT,
    HOST,
    ZOOKEEPER_PORT,
)

START_TIMEOUT_S: Final = 90.0
"""Maximum time in seconds until the cluster is ready."""
STOP_TIMEOUT_S: Final = 60.0
"""Maximum time in seconds until all processes have ended."""
POLL_INTERVAL_S: Final = 0.05
OFFSET_ATTEMPTS_MAX: Final = 200
"""Maximum number of random port offsets that are tried."""
CLAIM_PORT: Final = 2199
"""Port, plus the offset, that a cluster binds for its lifetime without listening. It reserves the offset: the ports of
processes that restart are free for a moment, and a cluster of another test must not take them."""
OFFSETS: Final = range(10_000, 24_600, 220)
"""Port offsets of throwaway clusters. All ports are below the ephemeral ports. The default ports of the services differ
by at least 10 modulo 220, so that clusters of up to 10 processes of each kind share no port if their offsets differ."""


def free_port_offset(*, bookies: int, brokers: int = 1, auditors: int = 1) -> int:
    """Return a random offset of OFFSETS at which all ports of a cluster are free."""
    randomness = random.SystemRandom()
    for _ in range(OFFSET_ATTEMPTS_MAX):
        offset = randomness.choice(OFFSETS)
        ports = [ZOOKEEPER_PORT + offset, CLAIM_PORT + offset]
        for i in range(bookies):
            ports += [BOOKIE_PORT + offset + i, BOOKIE_HTTP_PORT + offset + i]
        ports += [BROKER_HTTP_PORT + offset + i for i in range(brokers)]
        ports += [AUDITOR_HTTP_PORT + offset + i for i in range(auditors)]
        if all(is_port_free(port) for port in ports):
            return offset
    raise StandaloneError("found no free ports for a cluster")


def _claim(offset: int) -> socket.socket | None:
    """Bind the claim port of `offset`. Return None if another cluster has bound it."""
    claim = socket.socket()
    try:
        claim.bind((HOST, CLAIM_PORT + offset))
    except OSError:
        claim.close()
        return None
    return claim


BUNDLES_STAY: Final = {"BROKER_BALANCING_INTERVAL_S": "86400"}
"""Environment of brokers whose leader moves no bundle: a move delivers again what is not acknowledged."""


class ThrowawayCluster:
    """A cluster in a temporary directory.

    `options`: further options of `bindery standalone`. `environment`: additional variables of all its processes, such
    as settings of bookies.
    """

    def __init__(
        self,
        *,
        bookies: int = 4,
        brokers: int = 1,
        auditors: int = 1,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.bookies = bookies
        self.brokers = brokers
        self.auditors = auditors
        claim = None
        while claim is None:
            self.port_offset = free_port_offset(bookies=bookies, brokers=brokers, auditors=auditors)
            claim = _claim(self.port_offset)
        self._claim = claim
        self._options = options
        self._scheme = "https" if "--secure" in options else "http"
        self._environment = dict(environment or {})
        self._folder = Path(tempfile.mkdtemp(prefix="bindery-"))
        self.directory = DataDirectory(self._folder / "data")
        self.directory.create()
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.broker_url()

    def broker_url(self, number: int = 0) -> str:
        return f"{self._scheme}://{HOST}:{BROKER_HTTP_PORT + self.port_offset + number}"

    def auditor_url(self, number: int = 0) -> str:
        return f"{self._scheme}://{HOST}:{AUDITOR_HTTP_PORT + self.port_offset + number}"

    def bookie_url(self, number: int = 0) -> str:
        """Of its HTTP port."""
        return f"{self._scheme}://{HOST}:{BOOKIE_HTTP_PORT + self.port_offset + number}"

    @property
    def zookeeper(self) -> str:
        return f"{HOST}:{ZOOKEEPER_PORT + self.port_offset}"

    def start(self) -> float:
        """Start the cluster on its data and wait until it is ready. Return the time taken in seconds."""
        began = time.monotonic()
        self.launch()
        self.wait_ready()
        return time.monotonic() - began

    def launch(self) -> None:
        """Start the supervisor without waiting."""
        assert self._supervisor is None, "started already"
        command = [
            *(sys.executable, "-m", "bindery", "standalone"),
            *("--bookies", str(self.bookies), "--brokers", str(self.brokers), "--auditors", str(self.auditors)),
            *("--data", str(self.directory.root), "--port-offset", str(self.port_offset)),
            *self._options,
        ]
        log = self.directory.open_log("standalone")
        try:
            environment = {**os.environ, **self._environment, DIE_WITH_PARENT: str(os.getpid())}
            self._supervisor = self._start_supervisor(command, log, environment)
        finally:
            os.close(log)

    def _start_supervisor(
        self, command: Sequence[str], log: int, environment: dict[str, str]
    ) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
        )

    def wait_ready(self) -> None:
        """Wait until all processes are ready.

        Raises StandaloneError, with the output of the supervisor, if it ends or START_TIMEOUT_S passes.
        """
        assert self._supervisor is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            status = self.status()
            if status is not None and status["announced"] and status["supervisor_pid"] == self._supervisor.pid:
                return
            if self._supervisor.poll() is not None or time.monotonic() > deadline:
                raise StandaloneError("the cluster did not become ready; its output:\n" + self.output())
            time.sleep(POLL_INTERVAL_S)

    def stop(self) -> float:
        """Stop the cluster in order, as Ctrl-C does. Return the time taken in seconds."""
        assert self._supervisor is not None
        began = time.monotonic()
        self._supervisor.send_signal(signal.SIGINT)
        self._supervisor.wait(timeout=STOP_TIMEOUT_S)
        self._supervisor = None
        return time.monotonic() - began

    def status(self) -> dict[str, Any] | None:
        with suppress(TimeoutError):
            return ask(self.directory.control_socket, {"verb": "status"}, timeout_s=5.0)
        return None

    def pid(self, name: str) -> int:
        """Return the pid of a process such as `bookie-1`. Raises FileNotFoundError if the process is down."""
        return int(self.directory.pid_file(name).read_text())

    def has_restarted(self, name: str, *, since: int) -> bool:
        """Return whether a process has another pid than `since`. Its pid file is away, or empty, for a moment."""
        try:
            return self.pid(name) != since
        except (FileNotFoundError, ValueError):
            return False

    def kill(self, name: str) -> int:
        """Send SIGKILL to one process, which the supervisor then restarts. Return its pid."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> None:
        """Send SIGKILL to all processes, to the supervisor first, so that it restarts none."""
        identities = self._identities()
        if self._supervisor is not None:
            self._supervisor.kill()
        for identity in identities:
            identity.kill(signal.SIGKILL)
        if self._supervisor is not None:
            self._supervisor.wait(timeout=STOP_TIMEOUT_S)
            self._supervisor = None
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(identity.is_alive for identity in identities):
            if time.monotonic() > deadline:
                raise StandaloneError(f"killed processes are alive after {STOP_TIMEOUT_S:.0f} s")
            time.sleep(POLL_INTERVAL_S / 5)

    def _identities(self) -> list[ProcessIdentity]:
        """Return all live processes. Pid files are read too, because the state file may be older."""
        found = dict(self.directory.load_state().children or {})
        for path in self.directory.run.glob("*.pid"):
            with suppress(OSError, ValueError):
                identity = ProcessIdentity.of(int(path.read_text()))
                if identity is not None:
                    found[path.stem] = identity
        return list(found.values())

    def output(self, lines: int = 40) -> str:
        """Return the last lines of the output of the supervisor."""
        return "\n".join(self.directory.log_tail("standalone", lines=lines))

    def close(self) -> None:
        """Kill all processes and remove the data."""
        self.kill_all()
        self._claim.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
