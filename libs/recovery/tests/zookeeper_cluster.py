"""A real ZooKeeper and real bookie processes, with sessions and clients that end with the test."""

import dataclasses
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from bindery_client.client import LedgerClient
from bindery_core.ids import LedgerId
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bookie_cluster import QUICK, write

sys.path.insert(0, str(Path(__file__).parents[2] / "client" / "tests"))
from real_cluster import RealCluster

CLIENT_SETTINGS = dataclasses.replace(QUICK, add_timeout_s=20.0, read_timeout_s=20.0, recovery_timeout_s=40.0)
"""Settings of ledger clients. A killed bookie refuses connections at once, so timeouts only matter for live bookies,
which a busy machine delays. A timeout would count as a failed bookie and cause holes or errors that the tests do not
expect."""
BOOKIE_SESSION_TIMEOUT_S = 3.0
"""ZooKeeper session timeout of bookies in seconds. It is longer than a busy machine delays a heartbeat, because a live
bookie whose session expires would count as absent."""


class ZooKeeperCluster(RealCluster):
    """Created by `zookeeper_cluster`."""

    def __init__(self, directory: Path, *, zookeeper_port: int, bookie_arguments: Sequence[str]) -> None:
        super().__init__(directory, zookeeper_port=zookeeper_port, bookie_arguments=bookie_arguments)
        self.stores: list[ZooKeeperStore] = []
        self.clients: list[LedgerClient] = []

    async def connect(self) -> tuple[ZooKeeperStore, LedgerClient]:
        """Open another session, and a client that uses it."""
        self.stores.append(await ZooKeeperStore.connect(self.spec.hosts))
        client = await LedgerClient.connect(self.stores[-1], randomness=random.SystemRandom(), settings=CLIENT_SETTINGS)
        self.clients.append(client)
        return self.stores[-1], client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for store in self.stores:
            await store.close()
        await self.stop()


@asynccontextmanager
async def zookeeper_cluster(directory: Path, *bookie_arguments: str) -> AsyncIterator[ZooKeeperCluster]:
    """Start four bookies. They inherit the environment of the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ("--zookeeper-session-timeout-s", str(BOOKIE_SESSION_TIMEOUT_S), *bookie_arguments)
    cluster = ZooKeeperCluster(directory, zookeeper_port=port, bookie_arguments=arguments)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


async def write_all(client: LedgerClient, *counts: int) -> dict[LedgerId, int]:
    """Write closed ledgers with these numbers of entries. Return ledger id -> number of entries."""
    return {(await write(client, count)).ledger_id: count for count in counts}
