"""A writer to be killed: `python hole_writer.py ZOOKEEPER`. Adds BEFORE entries to a ledger, says its id, waits for a
line, adds up to END, says `done`, and writes no more. Nothing of what it knows leaves it."""

import asyncio
import random
import sys

from bindery_client.client import LedgerClient
from bindery_metadata.stores.zookeeper import ZooKeeperStore
from bookie_cluster import QUICK, add

BEFORE = 100
END = 250


async def main(zookeeper: str) -> None:
    store = await ZooKeeperStore.connect(zookeeper)
    client = await LedgerClient.connect(store, randomness=random.SystemRandom(), settings=QUICK)
    writer = await client.create(password=b"pw", ensemble_size=4, write_quorum=4, ack_quorum=2)
    await add(writer, 0, BEFORE)
    print(f"ledger {writer.ledger_id}", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await add(writer, BEFORE, END)
    print("done", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
