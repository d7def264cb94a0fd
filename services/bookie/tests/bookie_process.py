"""A bookie as a real process, for tests that start and kill one. The fixtures are in conftest."""

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from bindery_core.ids import BookieId
from bindery_metadata.layout.layout import LedgersLayout

ID = BookieId("bookie-0")
WAIT_S = 30.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Bookie:
    """One `python -m bindery_bookie`, killed at the end of the test."""

    def __init__(self, directory: Path, zookeeper: str, root: str) -> None:
        self.directory = directory
        self.layout = LedgersLayout(root)
        self.port, self.http_port = free_port(), free_port()
        self.log = directory / "bookie.log"
        self.arguments = {
            "--zookeeper": zookeeper,
            "--ledgers-root": root,
            "--bookie-id": str(ID),
            "--port": str(self.port),
            "--http-port": str(self.http_port),
            "--journal-dir": str(directory / "journal"),
            "--ledger-dir": str(directory / "ledgers"),
            "--zookeeper-session-timeout-s": "4",
        }
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, **changes: str) -> None:
        assert self.process is None
        arguments = {**self.arguments, **{f"--{name.replace('_', '-')}": value for name, value in changes.items()}}
        flat = [word for pair in arguments.items() for word in pair]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "bindery_bookie", *flat], stdout=log, stderr=log)

    async def start(self, **changes: str) -> None:
        self.launch(**changes)
        await self.until_ready()

    async def until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.http("/readyz"))[0] != 200:
                assert self.process is not None
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.02)

    async def http(self, path: str) -> tuple[int, str]:
        """Return status and body; 0 if the port is closed."""

        def get() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", timeout=WAIT_S) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
            except OSError:
                return 0, ""

        return await asyncio.to_thread(get)

    async def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        process.send_signal(number)
        return await asyncio.to_thread(process.wait, WAIT_S)

    async def exit_code(self) -> int:
        assert self.process is not None
        process, self.process = self.process, None
        return await asyncio.to_thread(process.wait, WAIT_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
