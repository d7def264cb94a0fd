"""A cluster that exists for one demonstration or test: its own data, ports and processes, all gone at the end.

`with ThrowawayCluster() as cluster:` runs `bindery standalone` as a child process; whatever ends the block or the
process that holds it, the cluster's processes end too.
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
from collections.abc import Sequence
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
STOP_TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.05
OFFSET_ATTEMPTS_MAX: Final = 200
CLAIM_PORT: Final = 2199
"""Plus the offset: held, and never listened on, for as long as a cluster has these ports. Its processes come and go,
and a cluster of another test that looks for free ports meanwhile must not take theirs."""


def free_port_offset(*, bookies: int, brokers: int = 1, auditors: int = 1) -> int:
    """An offset at which nobody listens on any port of a cluster. Below the ports that systems hand out themselves."""
    lots = random.SystemRandom()
    for _ in range(OFFSET_ATTEMPTS_MAX):
        offset = lots.randrange(10_000, 22_000, 100)
        ports = [ZOOKEEPER_PORT + offset, CLAIM_PORT + offset]
        for i in range(bookies):
            ports += [BOOKIE_PORT + offset + i, BOOKIE_HTTP_PORT + offset + i]
        ports += [BROKER_HTTP_PORT + offset + i for i in range(brokers)]
        ports += [AUDITOR_HTTP_PORT + offset + i for i in range(auditors)]
        if all(is_port_free(port) for port in ports):
            return offset
    raise StandaloneError("found no free ports for a cluster")


def _claim(offset: int) -> socket.socket | None:
    """None: another was quicker."""
    claim = socket.socket()
    try:
        claim.bind((HOST, CLAIM_PORT + offset))
    except OSError:
        claim.close()
        return None
    return claim


class ThrowawayCluster:
    def __init__(self, *, bookies: int = 4, brokers: int = 1, auditors: int = 1, options: Sequence[str] = ()) -> None:
        self.bookies = bookies
        self.brokers = brokers
        self.auditors = auditors
        claim = None
        while claim is None:
            self.port_offset = free_port_offset(bookies=bookies, brokers=brokers, auditors=auditors)
            claim = _claim(self.port_offset)
        self._claim = claim
        self._options = options
        self._folder = Path(tempfile.mkdtemp(prefix="bindery-"))
        self.directory = DataDirectory(self._folder / "data")
        self.directory.create()
        self._supervisor: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{BROKER_HTTP_PORT + self.port_offset}"

    def auditor_url(self, number: int = 0) -> str:
        return f"http://{HOST}:{AUDITOR_HTTP_PORT + self.port_offset + number}"

    @property
    def zookeeper(self) -> str:
        return f"{HOST}:{ZOOKEEPER_PORT + self.port_offset}"

    def start(self) -> float:
        """Start the cluster on its data and wait until it is ready. Returns the seconds it took."""
        began = time.monotonic()
        self.launch()
        self.wait_ready()
        return time.monotonic() - began

    def launch(self) -> None:
        """Start the supervisor and come back at once."""
        assert self._supervisor is None, "started already"
        command = [
            *(sys.executable, "-m", "bindery", "standalone"),
            *("--bookies", str(self.bookies), "--brokers", str(self.brokers), "--auditors", str(self.auditors)),
            *("--data", str(self.directory.root), "--port-offset", str(self.port_offset)),
            *self._options,
        ]
        log = self.directory.open_log("standalone")
        try:
            self._supervisor = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, DIE_WITH_PARENT: str(os.getpid())},
            )
        finally:
            os.close(log)

    def wait_ready(self) -> None:
        """Until everything is ready. Raises StandaloneError with the supervisor's words when it does not become so."""
        assert self._supervisor is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            status = self.status()
            if status is not None and status["announced"] and status["supervisor_pid"] == self._supervisor.pid:
                return
            if self._supervisor.poll() is not None or time.monotonic() > deadline:
                raise StandaloneError("the cluster did not become ready; it said:\n" + self.words())
            time.sleep(POLL_INTERVAL_S)

    def stop(self) -> float:
        """Stop it in order, as Ctrl-C does. Returns the seconds it took."""
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
        """Pid of a process by its name (`bookie-1`), as its pid file says. Raises FileNotFoundError while it is
        down."""
        return int(self.directory.pid_file(name).read_text())

    def kill(self, name: str) -> int:
        """kill -9 one process; the supervisor starts it again. Returns the pid that was."""
        pid = self.pid(name)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> None:
        """kill -9 of everything at once: the supervisor first, so that nothing is started again."""
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
                raise StandaloneError("killed processes do not go away")
            time.sleep(POLL_INTERVAL_S / 5)

    def _identities(self) -> list[ProcessIdentity]:
        """Every child there is now, by its pid file: the state file may be a moment behind."""
        found = dict(self.directory.load_state().children or {})
        for path in self.directory.run.glob("*.pid"):
            with suppress(OSError, ValueError):
                identity = ProcessIdentity.of(int(path.read_text()))
                if identity is not None:
                    found[path.stem] = identity
        return list(found.values())

    def words(self, lines: int = 40) -> str:
        """The last lines that the supervisor said."""
        return "\n".join(self.directory.log_tail("standalone", lines=lines))

    def close(self) -> None:
        """End everything and remove the data."""
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
