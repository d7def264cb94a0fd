"""A ledger client for the command line: connected to ZooKeeper, closed at the end, whatever happens."""

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bindery_client.client import LedgerClient
from bindery_client.connection.security import SecurityFiles
from bindery_kit.observability import logs
from bindery_metadata.stores.zookeeper import ZooKeeperStore


@asynccontextmanager
async def connected(zookeeper: str) -> AsyncIterator[LedgerClient]:
    """A client on the cluster whose metadata are in `zookeeper`. Raises MetadataUnavailable when no server answers.

    BINDERY_CLIENT_... variables name the credentials for bookies
    (`bindery_client.connection.security`). Raises BadRequest if they are invalid.

    Sets up this process's logs: stdout belongs to results, and what is no warning is nobody's business here.
    """
    logs.configure(service="cli", level="warning")
    security = SecurityFiles.of({}, os.environ).load()
    store = await ZooKeeperStore.connect(zookeeper)
    try:
        client = await LedgerClient.connect(store, randomness=random.SystemRandom(), security=security)
        try:
            yield client
        finally:
            await client.close()
    finally:
        await store.close()
