"""FuzzedProcess: a service that a fuzzer attacks, and what both fuzzers need to watch it."""

import asyncio
import contextlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec, die_with_parent
from bindery_metadata.stores.zookeeper import ZooKeeperStore

RSS_MAX_MIB = 600
OWN_FAULTS = re.compile(r"Traceback|operation_broken|AssertionError|Fatal error|never retrieved|exception was never")
ERROR = re.compile(r"""level["']?[=:] ?["']?(error|critical)|\[(error|critical) *\]""")
"""A line of a log, as JSON or as text, that is an error."""
ERRORS_SHOWN = 3
ERROR_SIZE_MAX = 3000
"""Maximum characters shown of such a line."""


class Failed(Exception):
    pass


class FuzzedProcess:
    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        self.rss_mib_max = 0.0
        self._seen = 0
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=file, stderr=file, env=environment, preexec_fn=die_with_parent
            )

    async def until_logged(self, event: str) -> None:
        async with asyncio.timeout(60):
            while event not in self.log.read_text(errors="replace"):
                self.check()
                await asyncio.sleep(0.05)

    def check(self) -> None:
        """Raises Failed if the process died, logged an internal error, or uses too much memory."""
        with self.log.open("rb") as log:
            log.seek(self._seen)
            news = log.read()
            self._seen += len(news)
        fault = OWN_FAULTS.search(news.decode(errors="replace"))
        if fault is not None:
            at = max(0, fault.start() - 500)
            raise Failed(f"{self.name} logged a fault:\n{news.decode(errors='replace')[at : at + 3000]}")
        if self.process.poll() is not None:
            raise Failed(f"{self.name} died with exit code {self.process.returncode}:\n{self.log.read_text()[-3000:]}")
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        rss = next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))
        self.rss_mib_max = max(self.rss_mib_max, rss)
        if rss > RSS_MAX_MIB:
            raise Failed(f"{self.name} takes {rss:.0f} MiB, more than {RSS_MAX_MIB}")

    def last_errors(self) -> str:
        """Return the last lines of the log that are errors, shortened."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [line[:ERROR_SIZE_MAX] for line in lines if ERROR.search(line)]
        return "\n".join(found[-ERRORS_SHOWN:])

    async def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(self.process.wait, 60)
        if code != 0:
            raise Failed(f"{self.name} ended with exit code {code}:\n{self.log.read_text()[-3000:]}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def empty_cluster(directory: Path) -> AsyncIterator[str]:
    """Run a ZooKeeper with the metadata of a cluster without bookies, and yield its address."""
    spec = ServerSpec(directory / "zookeeper", free_port())
    zookeeper = EmbeddedZooKeeper(spec)
    await zookeeper.start()
    try:
        store = await ZooKeeperStore.connect(spec.hosts)
        await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())
        await store.close()
        yield spec.hosts
    finally:
        await zookeeper.stop()


async def attack(watching: Coroutine[Any, Any, None], attackers: Sequence[Coroutine[Any, Any, None]]) -> float:
    """Run all attackers while `watching` checks the services. Return the seconds. Raises Failed as they do."""
    started = time.monotonic()
    watch = asyncio.create_task(watching)
    work = [asyncio.create_task(one) for one in attackers]
    everything = asyncio.gather(*work)
    try:
        await asyncio.wait([watch, everything], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()
        await everything
        await asyncio.sleep(0.6)
        if watch.done():
            watch.result()
    finally:
        for task in (watch, *work):
            task.cancel()
        await asyncio.gather(watch, everything, *work, return_exceptions=True)
    return time.monotonic() - started
