"""Bookies and metadata that fail and recover at random times during writes, by seed.

Afterwards every acknowledged entry can be read once and in order, although one bookie is gone. Other entries may or may
not exist.
"""

import asyncio
import random

import pytest
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError, TryAgain
from bindery_core.ids import EntryId, LedgerId
from bindery_metadata.stores.memory import MemoryStore
from fake_cluster import FakeCluster

LIMIT_S = 30.0


async def disturb(cluster: FakeCluster, store: MemoryStore, rng: random.Random, *, bearable: int) -> None:
    """Make `bearable` bookies fail at a time; occasionally disconnect `store`, or end its session."""
    bookies = list(cluster.bookies.values())
    while True:
        cut = rng.random() < 0.3
        if cut:
            cluster.tree.suspend(store)
            if rng.random() < 0.3:
                cluster.tree.expire(store)
        unwell = rng.sample(bookies, bearable)
        kinds = [rng.choice(["stop", "freeze"]) for _ in unwell]
        for bookie, kind in zip(unwell, kinds, strict=True):
            if kind == "stop":
                await bookie.stop()
            else:
                bookie.freeze()
        await asyncio.sleep(rng.uniform(0.005, 0.15))
        if cut:
            cluster.tree.resume(store)
        for bookie, kind in zip(unwell, kinds, strict=True):
            if kind == "stop":
                await bookie.start()
            elif rng.random() < 0.5:
                bookie.thaw()
            else:
                bookie.drop_held()
        await asyncio.sleep(rng.uniform(0.0, 0.1))


async def open_patiently(client: LedgerClient, ledger_id: LedgerId) -> list[bytes]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                reader = await client.open(ledger_id)
                if reader.last_add_confirmed < 0:
                    return []
                entries = await reader.read(EntryId(0), EntryId(reader.last_add_confirmed))
                return [entry.payload for entry in entries]
            except TryAgain:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(4))
async def test_every_acknowledged_entry_survives(seed: int) -> None:
    rng = random.Random(seed)
    ensemble_size, write_quorum, ack_quorum = rng.choice([(3, 3, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (3, 2, 2)])
    async with FakeCluster(bookies=6) as cluster:
        writing = await cluster.client(add_timeout_s=0.1, add_quorum_timeout_s=2.0)
        written: dict[LedgerId, tuple[list[bytes], list[bytes]]] = {}
        disturbing = asyncio.ensure_future(disturb(cluster, cluster.stores[writing], rng, bearable=1))
        end = asyncio.get_running_loop().time() + 0.6
        try:
            while asyncio.get_running_loop().time() < end:
                try:
                    writer = await writing.create(
                        ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum
                    )
                except TryAgain:
                    continue
                acknowledged, attempted = written.setdefault(writer.ledger_id, ([], []))
                try:
                    while asyncio.get_running_loop().time() < end and len(attempted) < 400:
                        batch = [b"%d.%d" % (writer.ledger_id, len(attempted) + i) for i in range(rng.randint(1, 20))]
                        attempted += batch
                        await writer.add_many(batch)
                        acknowledged += batch
                except BinderyError:
                    pass
                if rng.random() < 0.5:
                    await writer.abandon()
                else:
                    await asyncio.gather(writer.close(), return_exceptions=True)
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        cluster.tree.resume(cluster.stores[writing])
        for bookie in cluster.bookies.values():
            bookie.thaw()
            await bookie.stop()
            await bookie.start()
        await rng.choice(
            list(cluster.bookies.values())
        ).stop()  # one bookie is lost; every acknowledged entry has another copy
        reading = await cluster.client()
        assert written
        assert any(acknowledged for acknowledged, _ in written.values())
        for ledger_id, (acknowledged, attempted) in written.items():
            found = await open_patiently(reading, ledger_id)
            assert found[: len(acknowledged)] == acknowledged, f"seed={seed} ledger_id={ledger_id}: lost"
            assert found == attempted[: len(found)], f"seed={seed} ledger_id={ledger_id}: invented"
