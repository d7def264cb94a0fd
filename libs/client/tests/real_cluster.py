"""RealCluster: a real ZooKeeper and real bookie processes on free loopback ports. They end with this process."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bindery_client.client import LedgerClient
from bindery_client.connection.security import NO_SECURITY, ClientSecurity
from bindery_client.settings import ClientSettings
from bindery_core.errors import TryAgain
from bindery_metadata.bookies.directory import BookieDirectory
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, ServerSpec, die_with_parent
from bindery_metadata.stores.zookeeper import ZooKeeperStore

START_LIMIT_S = 90.0
BOOKIES = 4


class RealCluster:
    def __init__(self, directory: Path, *, zookeeper_port: int, bookie_arguments: Sequence[str] = ()) -> None:
        self.directory = directory
        self.bookie_arguments = bookie_arguments
        self.spec = ServerSpec(directory / "zookeeper", zookeeper_port, tick_ms=200, session_timeout_ms_min=400)
        self.zookeeper = EmbeddedZooKeeper(self.spec)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self) -> None:
        await self.zookeeper.start()
        store = await ZooKeeperStore.connect(self.spec.hosts)
        await initialize_cluster(store, LedgersLayout(), randomness=random.SystemRandom())
        await store.close()
        for number in range(BOOKIES):
            self.start_bookie(f"bookie-{number}")
        await self.wait_for_bookies(BOOKIES)

    async def stop(self) -> None:
        for name in list(self.processes):
            self.kill(name)
        await self.zookeeper.stop()

    def start_bookie(self, name: str) -> None:
        root = self.directory / name
        root.mkdir(exist_ok=True)
        with (root / "log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    sys.executable, "-m", "bindery_bookie", "--bookie-id", name, "--port", "0", "--http-port", "0",
                    "--zookeeper", self.spec.hosts, "--zookeeper-session-timeout-s", "1",
                    "--journal-dir", str(root / "journal"), "--ledger-dir", str(root / "ledgers"),
                    *self.bookie_arguments,
                ],
                stdout=log, stderr=log, preexec_fn=die_with_parent,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    async def wait_for_bookies(self, count: int) -> None:
        """Return once `count` bookies are registered and listen. The registration of a killed bookie does not count."""
        try:
            async with asyncio.timeout(START_LIMIT_S):
                while not await self._all_are_listed(count):
                    await asyncio.sleep(0.5)
        except Exception as error:
            logs = [path.read_text(errors="replace")[-1500:] for path in sorted(self.directory.glob("bookie-*/log"))]
            raise AssertionError(f"bookies did not start, {error!r}:\n" + "\n---\n".join(logs)) from error

    async def _all_are_listed(self, count: int) -> bool:
        """Wait until `count` bookies are registered and listen. Returns False if ZooKeeper, on a busy disk, answers too
        late for its clients."""
        try:
            store = await ZooKeeperStore.connect(self.spec.hosts)
        except TryAgain:
            return False
        directory = BookieDirectory(store, LedgersLayout())
        try:
            await directory.start()
            while not await _all_listen(directory, count):
                await asyncio.sleep(0.05)
        except TryAgain:
            return False
        finally:
            await directory.close()
            await store.close()
        return True


async def _all_listen(directory: BookieDirectory, count: int) -> bool:
    records = [record for record in (await directory.refresh()).values() if not record.read_only]
    for record in records:
        try:
            _reader, writer = await asyncio.open_connection(record.host, record.port)
        except OSError:
            return False
        writer.close()
    return len(records) == count


class Clients:
    """`async with Clients(cluster) as make:`. `await make()` returns a new client with a session of its own."""

    def __init__(
        self, cluster: RealCluster, settings: ClientSettings | None = None, security: ClientSecurity = NO_SECURITY
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._security = security
        self._made: list[tuple[LedgerClient, ZooKeeperStore]] = []

    async def __aenter__(self) -> "Clients":
        return self

    async def __call__(self) -> LedgerClient:
        store = await ZooKeeperStore.connect(self._cluster.spec.hosts)
        client = await LedgerClient.connect(
            store, randomness=random.SystemRandom(), settings=self._settings, security=self._security
        )
        self._made.append((client, store))
        return client

    async def __aexit__(self, *exc: object) -> None:
        for client, store in self._made:
            await client.close()
            await store.close()
        await asyncio.sleep(0)
