"""A writer that a test kills: `python hole_writer.py ZOOKEEPER`.

It adds BEFORE entries to a ledger, prints the ledger id, waits for a line on stdin, adds entries up to END and prints
`done`. It reports missing copies to no other process.
"""

import asyncio
import random
import sys

from bindery_client.client import LedgerClient
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bookie_cluster import add
from zookeeper_cluster import CLIENT_SETTINGS

BEFORE = 100
END = 250


async def main(zookeeper: str) -> None:
    store = await ZooKeeperStore.connect(zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom(), settings=CLIENT_SETTINGS)
    writer = await client.create(password=b"pw", ensemble_size=4, write_quorum=4, ack_quorum=2)
    await add(writer, 0, BEFORE)
    print(f"ledger {writer.ledger_id}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await add(writer, BEFORE, END)
    print("done", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
