"""Start one child process, probe it until it is ready, wait for its end, and stop it.

Invariants: at most one operating-system process exists at a time; from start to end it has a pid file, unless the disk
is full; `state` is the current state, and `since` the time at which it began.
"""

import asyncio
import contextlib
import json
import os
import signal
import ssl
from collections.abc import Callable
from enum import StrEnum
from typing import Any, Final

from bindery_kit.process.runtime import DIE_WITH_PARENT, die_with_parent

from bindery.standalone.directory import DataDirectory, ProcessIdentity
from bindery.standalone.plan import HOST, Kind, ProcessPlan

PROBE_INTERVAL_S: Final = 0.1
"""Interval in seconds between two probes of a process that starts."""
PROBE_TIMEOUT_S: Final = 2.0
"""Timeout in seconds of one probe."""
PROBE_SIZE_MAX: Final = 65536
"""Size in bytes from which no more of a response is read."""
STOP_TIMEOUT_S: Final = 40.0
"""Seconds from SIGTERM to SIGKILL, in which a bookie flushes its caches."""


class ChildState(StrEnum):
    """State of a child process, as `status` shows it."""

    DOWN = "down"
    STARTING = "starting"
    READY = "ready"
    PAUSING = "restarting soon"
    STOPPING = "stopping"


class Child:
    """One child process of the supervisor. It can be started again after it has ended."""

    def __init__(self, plan: ProcessPlan, directory: DataDirectory, *, clock: Callable[[], float]) -> None:
        self.plan = plan
        self._directory = directory
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0
        self._tls: ssl.SSLContext | None = None
        self.identity: ProcessIdentity | None = None
        self.state = ChildState.DOWN
        self.since = clock()
        self.starts = 0
        self.waiting_for = ""
        """Step of the start, or reasons for not being ready, that the process reports during its start."""
        self.last_death: list[str] = []
        """Reason of the last unexpected end, then the last log lines; empty when the process is ready or stopped."""
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()
        """Set while there is no operating-system process."""
        self.gone.set()

    @property
    def name(self) -> str:
        return self.plan.name

    def enter(self, state: ChildState) -> None:
        self.state = state
        self.since = self._clock()
        if state in (ChildState.READY, ChildState.DOWN):
            self.last_death = []
        if state is ChildState.READY:
            self.ready.set()
        else:
            self.ready.clear()

    async def start(self) -> None:
        assert self._process is None, f"{self.name} runs already"
        log_path = self._directory.log_file(self.name)
        self._directory.of_process(self.name).mkdir(parents=True, exist_ok=True)
        self._directory.trim_log(self.name)
        self._log_start = log_path.stat().st_size if log_path.exists() else 0
        log = self._directory.open_log(self.name)
        foreign = self.plan.kind is Kind.ZOOKEEPER
        self.gone.clear()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.plan.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own: Ctrl-C in the terminal reaches only the supervisor, which stops all in order.
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **({} if foreign else {DIE_WITH_PARENT: str(os.getpid())})},
                preexec_fn=die_with_parent if foreign else None,
            )
        except OSError:
            self.gone.set()
            raise
        finally:
            os.close(log)
        self.starts += 1
        self.waiting_for = "the process to answer"
        self.identity = ProcessIdentity.of(self._process.pid)
        with contextlib.suppress(OSError):  # a full disk: the process runs, and `identity` has its pid
            self._directory.pid_file(self.name).write_text(f"{self._process.pid}\n")
        self.enter(ChildState.STARTING)

    async def wait_ready(self) -> None:
        """Probe the process until it is ready or has ended. A probe that fails is repeated."""
        while self._process is not None and self._process.returncode is None:
            if await self._probe():
                self.enter(ChildState.READY)
                return
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def wait_end(self) -> int:
        """Wait for the process to end and return its exit code (negative: the signal)."""
        assert self._process is not None
        code = await self._process.wait()
        self._process = None
        self.identity = None
        with contextlib.suppress(OSError):
            self._directory.pid_file(self.name).unlink()
        self.gone.set()
        return code

    def terminate(self) -> None:
        """Send SIGTERM. `wait_end` returns when the process has ended."""
        if self._process is not None and self._process.returncode is None:
            self.enter(ChildState.STOPPING)
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def log_tail(self, lines: int) -> list[str]:
        """Return the last `lines` lines that this run wrote to its log."""
        return self._directory.log_tail(self.name, lines=lines, since=self._log_start)

    async def _probe(self) -> bool:
        if self._tls is None and self.plan.ca_file:
            self._tls = ssl.create_default_context(cafile=self.plan.ca_file)
        if self.plan.kind is Kind.ZOOKEEPER:
            answer = await _exchange(self.plan.probe_port, b"srvr", tls=self._tls)
            return b"Mode:" in answer
        status, body = await _get(self.plan.probe_port, "/readyz", tls=self._tls)
        if status == 200:
            return True
        if status:
            starting, progress = await _get(self.plan.probe_port, "/startupz", tls=self._tls)
            self.waiting_for = _describe(progress.get("progress")) if starting == 503 else _reasons(body)
        return False


def _describe(progress: Any) -> str:
    """Return the progress in a /startupz body as text, such as `replaying the journal (3 of 10 MB)`."""
    if not isinstance(progress, dict) or not progress.get("step"):
        return "its start-up"
    total = progress.get("total") or 0
    amount = f" ({progress.get('done', 0)} of {total} {progress.get('unit', '')})".replace(" )", ")") if total else ""
    return f"{progress['step']}{amount}"


def _reasons(body: dict[str, Any]) -> str:
    reasons = body.get("reasons")
    if isinstance(reasons, dict) and reasons:
        return "; ".join(f"{part}: {why}" for part, why in reasons.items())
    return "it to become ready"


async def _exchange(port: int, request: bytes, *, tls: ssl.SSLContext | None) -> bytes:
    """Send `request` and return the complete response, or nothing if none arrives within PROBE_TIMEOUT_S."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(HOST, port, ssl=tls)
            writer.write(request)
            received = b""
            while len(received) < PROBE_SIZE_MAX and (chunk := await reader.read(PROBE_SIZE_MAX)):
                received += chunk
            return received
    except (OSError, TimeoutError):
        return b""
    finally:
        if writer is not None:
            writer.close()


async def _get(port: int, path: str, *, tls: ssl.SSLContext | None) -> tuple[int, dict[str, Any]]:
    """Send a GET request for a small JSON document. Return status and document, (0, {}) without a response.

    The import of an HTTP client would delay the start.
    """
    request = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    head, _, body = (await _exchange(port, request, tls=tls)).partition(b"\r\n\r\n")
    try:
        status = int(head.split(b" ", 2)[1])
        document = json.loads(body)
    except (ValueError, IndexError):
        return 0, {}
    return status, document if isinstance(document, dict) else {}
