"""A bookie deletes a ledger that moved away from it, and stores it again when the ledger moves back."""

import asyncio
from pathlib import Path

import pytest
from bindery_core.errors import NoSuchLedger
from bindery_core.ids import BookieId
from bookie_cluster import assert_whole, bookie_cluster, write

from .test_worker_bookies import healed, mark, working

GRACE_S = 0.5


async def test_a_copy_is_deleted_when_its_ledger_moves_away_and_stored_again_when_it_moves_back(tmp_path: Path) -> None:
    async with bookie_cluster(tmp_path, 4) as cluster:
        client = await cluster.client()
        writer = await write(client, 300)
        kept = await write(client, 50, is_closed=False)
        away, other, _ = writer.metadata.last_segment.ensemble
        await cluster.stop(away)
        await mark(cluster, writer.ledger_id, away)
        async with working(cluster):
            await healed(cluster, writer.ledger_id)
        assert away not in (await assert_whole(client, writer.ledger_id, 300)).last_segment.ensemble

        await cluster.start(away)
        garbage = cluster.bookies[away].garbage
        assert garbage is not None
        collector = garbage.over_replicated
        collector._grace_s = GRACE_S
        assert await client.entries_on(writer.ledger_id, BookieId(away)) == [(0, 300)]
        assert await collector.step() == 0
        assert collector.state.candidates == 1, "an open ledger is no candidate, whether it names the bookie or not"
        await asyncio.sleep(GRACE_S)
        assert await collector.step() == 1
        with pytest.raises(NoSuchLedger):
            await client.entries_on(writer.ledger_id, BookieId(away))

        await cluster.stop(other)
        await mark(cluster, writer.ledger_id, other)
        async with working(cluster):
            await healed(cluster, writer.ledger_id)
        metadata = await assert_whole(client, writer.ledger_id, 300)
        assert away in metadata.last_segment.ensemble, "the only spare stores copies of the ledger that it deleted"
        await kept.abandon()
