"""Start the clusters of a run, each with its own ZooKeeper.

| cluster  | bookies                          | ledger tree created by          |
|----------|----------------------------------|---------------------------------|
| bindery  | four of Bindery                  | `bindery cluster init`          |
| apache   | four of Apache BookKeeper's      | `bookkeeper shell initnewcluster` |
| mixed    | two of each                      | `bookkeeper shell initnewcluster` |

With four bookies and ensembles of three, every ensemble of the mixed cluster has both kinds, and there is one spare.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from bindery_client.client import LedgerClient
from bindery_client.connection.security import NO_SECURITY, ClientSecurity
from bindery_client.settings import ClientSettings
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.embedded import EmbeddedZooKeeper, SecurePort, ServerSpec
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bindery_metadata.stores.zookeeper_access import NO_ACCESS, AccessFiles

from e2e.interop.java import DB_STORAGE, SORTED_STORAGE, Driver, apache_bookie, metadata_uri, write_conf
from e2e.interop.processes import HOST, POLL_S, START_TIMEOUT_S, Process, free_port

ROOT: Final = "/ledgers"
SESSION_TIMEOUT_S: Final = 4
"""Seconds after which a process that was killed counts as absent."""
KINDS: Final = {
    "bindery": ("bindery",) * 4,
    "apache": ("apache",) * 4,
    "mixed": ("bindery", "apache", "bindery", "apache"),
}


@dataclass
class Bookie:
    kind: str
    process: Process
    storage: str = ""

    @property
    def id(self) -> str:
        return f"{HOST}:{self.process.port}"


@dataclass
class Cluster:
    name: str
    server: EmbeddedZooKeeper
    directory: Path
    root: str = ROOT
    bookies: list[Bookie] = field(default_factory=list)
    access: AccessFiles = NO_ACCESS
    """Files with which Bindery's processes connect to ZooKeeper."""

    @property
    def zookeeper(self) -> str:
        """ZooKeeper address for all processes: the port with TLS, if there is one."""
        spec = self.server.server
        return f"{spec.host}:{spec.secure.port}" if spec.secure else spec.hosts

    @property
    def uri(self) -> str:
        """Metadata URI for Apache's processes."""
        return metadata_uri(self.zookeeper, self.root)

    @property
    def shell_conf(self) -> Path:
        return self.directory / "shell.conf"

    @property
    def shell_settings(self) -> dict[str, str]:
        return {
            "metadataServiceUri": self.uri,
            "allowLoopback": "true",
            "advertisedAddress": HOST,
            "journalDirectory": str(self.directory / "none"),
            "ledgerDirectories": str(self.directory / "none"),
        }

    def bookie(self, bookie_id: str) -> Bookie:
        return next(bookie for bookie in self.bookies if bookie.id == bookie_id)


def our_bookie(
    name: str,
    *,
    directory: Path,
    zookeeper: str,
    root: str,
    port: int,
    options: tuple[str, ...] = (),
    session_timeout_s: int = SESSION_TIMEOUT_S,
) -> Process:
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "bindery_bookie", "--zookeeper", zookeeper, "--ledgers-root", root),
        *("--port", str(port), "--http-port", "0", "--zookeeper-session-timeout-s", str(session_timeout_s)),
        *("--journal-dir", str(directory / "journal"), "--ledger-dir", str(directory / "ledgers")),
        *options,
    ]
    return Process(name, command, log=directory / "log", port=port)


def our_auditor(
    name: str, *, directory: Path, zookeeper: str, root: str, port: int, options: tuple[str, ...] = ()
) -> Process:
    """Create the process without starting it."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "bindery_auditor", "--zookeeper", zookeeper, "--ledgers-root", root),
        *("--port", str(port), "--name", name, "--zookeeper-session-timeout-s", str(SESSION_TIMEOUT_S)),
        *options,
    ]
    return Process(name, command, log=directory / "log", port=port)


class Clusters:
    """All clusters of a run, within `async with`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.driver = Driver(log=directory / "driver.log")
        self._clusters: dict[str, Cluster] = {}

    def __getitem__(self, name: str) -> Cluster:
        return self._clusters[name]

    async def start(self) -> None:
        await asyncio.gather(self.driver.start(), *(self.new_cluster(name) for name in KINDS))
        for name, cluster in self._clusters.items():
            if name == "bindery":
                await run_cli("cluster", "init", "--zookeeper", cluster.zookeeper)
            else:
                status, said = await self.driver.shell(cluster.shell_conf, "initnewcluster")
                assert status == 0, said
        for name, kinds in KINDS.items():
            for number, kind in enumerate(kinds):
                storage = DB_STORAGE if name == "mixed" and number == 1 else SORTED_STORAGE
                self.add_bookie(self[name], kind, storage=storage)
        await start_bookies(*self._clusters.values())

    async def new_cluster(
        self, name: str, *, secure: SecurePort | None = None, access: AccessFiles = NO_ACCESS
    ) -> Cluster:
        """Start an empty ZooKeeper for another cluster. `secure`: all processes of the cluster connect to this port."""
        directory = self.directory / name
        server = EmbeddedZooKeeper(ServerSpec(directory / "zookeeper", free_port(), secure=secure))
        cluster = self._place(Cluster(name, server, directory, access=access))
        await server.start()
        return cluster

    async def neighbour(self, name: str) -> Cluster:
        """Initialize another cluster without bookies, in the ZooKeeper of the mixed cluster."""
        cluster = self._place(Cluster(name, self["mixed"].server, self.directory / name, root=f"/{name}"))
        status, said = await self.driver.shell(cluster.shell_conf, "initnewcluster")
        assert status == 0, said
        return cluster

    def _place(self, cluster: Cluster) -> Cluster:
        cluster.directory.mkdir(exist_ok=True)
        write_conf(cluster.shell_conf, cluster.shell_settings)
        self._clusters[cluster.name] = cluster
        return cluster

    def add_bookie(
        self,
        cluster: Cluster,
        kind: str,
        *,
        storage: str = SORTED_STORAGE,
        settings: dict[str, str] | None = None,
        options: tuple[str, ...] = (),
        session_timeout_s: int = SESSION_TIMEOUT_S,
    ) -> Bookie:
        """Create a bookie without starting it."""
        port = free_port()
        name = f"{kind}-{len(cluster.bookies)}"
        directory = cluster.directory / name
        if kind == "apache":
            process = apache_bookie(
                name,
                directory=directory,
                zookeeper=cluster.zookeeper,
                root=cluster.root,
                port=port,
                storage=storage,
                settings={"zkTimeout": str(1000 * session_timeout_s), **(settings or {})},
            )
        else:
            process = our_bookie(
                name,
                directory=directory,
                zookeeper=cluster.zookeeper,
                root=cluster.root,
                port=port,
                options=options,
                session_timeout_s=session_timeout_s,
            )
        bookie = Bookie(kind, process, storage if kind == "apache" else "")
        cluster.bookies.append(bookie)
        return bookie

    async def stop(self) -> None:
        for cluster in self._clusters.values():
            for bookie in cluster.bookies:
                bookie.process.kill()
        await self.driver.stop()
        await asyncio.gather(*(cluster.server.stop() for cluster in self._clusters.values()))


async def run_cli(*words: str, access: AccessFiles = NO_ACCESS) -> str:
    """Run the `bindery` command and return its output. Fails if the command fails."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bindery", *words),
        env={**os.environ, **access.variables()},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await child.communicate()
    assert child.returncode == 0, f"bindery {' '.join(words)}: {said.decode()}"
    return said.decode()


async def start_bookies(*clusters: Cluster) -> None:
    """Start the bookies concurrently, and wait until they accept connections and are registered."""
    everyone = [bookie.process for cluster in clusters for bookie in cluster.bookies]
    for process in everyone:
        process.start()
    await asyncio.gather(*(process.serving() for process in everyone))
    await registered(*clusters)


async def registered(*clusters: Cluster) -> None:
    """Wait until all bookies are registered. A port may be open before that."""
    async with our_client() as connect:
        for cluster in clusters:
            client = await connect(cluster.zookeeper, root=cluster.root, access=cluster.access)
            deadline = time.monotonic() + START_TIMEOUT_S
            while not {bookie.id for bookie in cluster.bookies} <= set(await client.list_bookies()):
                assert time.monotonic() < deadline, f"not every bookie of {cluster.name} registered"
                await asyncio.sleep(POLL_S)


class Connect(Protocol):
    def __call__(
        self,
        zookeeper: str,
        *,
        root: str = ROOT,
        settings: ClientSettings | None = None,
        security: ClientSecurity = NO_SECURITY,
        access: AccessFiles = NO_ACCESS,
    ) -> Awaitable[LedgerClient]: ...


@asynccontextmanager
async def our_client() -> AsyncIterator[Connect]:
    """A function that connects clients of Bindery; all are closed at the end."""
    async with AsyncExitStack() as stack:

        async def connect(
            zookeeper: str,
            *,
            root: str = ROOT,
            settings: ClientSettings | None = None,
            security: ClientSecurity = NO_SECURITY,
            access: AccessFiles = NO_ACCESS,
        ) -> LedgerClient:
            store = await ZooKeeperStore.connect(zookeeper, access=access.load())
            stack.push_async_callback(store.close)
            client = await LedgerClient.connect(
                store,
                randomness=random.SystemRandom(),
                layout=LedgersLayout(root),
                settings=settings,
                security=security,
            )
            stack.push_async_callback(client.close)
            return client

        yield connect
