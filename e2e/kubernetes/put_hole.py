"""Write a ledger of ENTRIES entries with one missing replica, and print the finding that an audit must report.

Runs in the toolbox. It copies the entries of one bookie to a bookie outside the ensemble, leaves one entry out, and
replaces the former bookie by the latter in the metadata, as an incorrect re-replication would.
"""

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import replace

from bindery_client.client import LedgerClient
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import EntryId
from bindery_core.wire.messages import Status
from bindery_metadata.stores.zookeeper import ZooKeeperStore

ENTRIES = 40
LOST = 17


async def main() -> None:
    store = await ZooKeeperStore.connect(os.environ["BINDERY_ZOOKEEPER"])
    client = await LedgerClient.connect(store, randomness=random.SystemRandom())
    try:
        handle = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2)
        for number in range(ENTRIES):
            await handle.add(f"entry {number} of {time.time_ns()}".encode() * 20)
        await handle.close()
        ledger_id = handle.ledger_id
        metadata = await client.metadata(ledger_id)
        ensemble = metadata.segments[0].ensemble
        old, new = ensemble[0], min(set(await client.list_bookies()) - set(ensemble))
        ids = [EntryId(number) for number in range(ENTRIES)]
        copies = await client.read_replicas(ledger_id, metadata, old, ids, lambda replica: replica)
        frames = [copy.frame for number, copy in zip(ids, copies, strict=True) if number != LOST]
        assert set(await client.store_replicas(ledger_id, metadata, new, frames)) == {Status.OK}

        def moved(before: LedgerMetadata) -> LedgerMetadata:
            (segment,) = before.segments
            members = tuple(new if bookie == old else bookie for bookie in segment.ensemble)
            return before.with_changes(segments=(replace(segment, ensemble=members),))

        await client.update_metadata(ledger_id, moved)
    finally:
        await client.close()
        await store.close()
    sys.stdout.write(json.dumps({"ledger_id": ledger_id, "entry": LOST, "bookie": new}) + "\n")


asyncio.run(main())
