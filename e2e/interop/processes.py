"""Start processes that end with the thread that started them, so that none survives the run."""

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bindery_metadata.stores.embedded import die_with_parent

HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.05


def free_port() -> int:
    """A free port below the range of ephemeral ports, so that it is free again at a restart."""
    lots = random.SystemRandom()
    while True:
        port = lots.randrange(10_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port


class Process:
    """A child process that serves a port."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, port: int, env: dict[str, str] | None = None):
        self.name = name
        self.port = port
        self.log = log
        self._command = list(command)
        self._env = env
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        assert not self.is_running, self.name
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env or dict(os.environ),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    async def serving(self) -> None:
        """Wait until it accepts connections. Raises RuntimeError with the end of its log if it ends or at the
        timeout."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, self.port)
                writer.close()
                return
            if not self.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not accept connections; end of its log:\n{self.words()}")
            await asyncio.sleep(POLL_S)

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(timeout=STOP_TIMEOUT_S)

    def pause(self) -> None:
        """Send SIGSTOP: the process keeps its connections, but does not respond."""
        assert self._child is not None
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._child is not None
        self._child.send_signal(signal.SIGCONT)
