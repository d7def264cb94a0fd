"""A real ZooKeeper and real bookie processes, with sessions and clients that end with the test."""

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


class ZooKeeperCluster(RealCluster):
    """Use it by `zookeeper_cluster`."""

    def __init__(self, directory: Path, *, zookeeper_port: int, bookie_arguments: Sequence[str]) -> None:
        super().__init__(directory, zookeeper_port=zookeeper_port, bookie_arguments=bookie_arguments)
        self.stores: list[ZooKeeperStore] = []
        self.clients: list[LedgerClient] = []

    async def connect(self) -> tuple[ZooKeeperStore, LedgerClient]:
        """One more session, and a client on it."""
        self.stores.append(await ZooKeeperStore.connect(self.spec.hosts))
        client = await LedgerClient.connect(self.stores[-1], randomness=random.SystemRandom(), settings=QUICK)
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
    """Four bookies. For the environment they are given, set it before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = ZooKeeperCluster(directory, zookeeper_port=port, bookie_arguments=bookie_arguments)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.close()


async def write_all(client: LedgerClient, *counts: int) -> dict[LedgerId, int]:
    """Closed ledgers of so many entries: ledger id -> count."""
    return {(await write(client, count)).ledger_id: count for count in counts}
