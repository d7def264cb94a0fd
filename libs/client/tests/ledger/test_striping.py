"""Entries are striped over the bookies of an ensemble, and each replica has a verdict of its own."""

from bindery_client.ledger.replica import Verdict
from bindery_core.ids import EntryId
from bindery_core.wire.messages import Status
from fake_cluster import FakeCluster


async def test_with_four_bookies_and_write_quorum_three_each_entry_is_on_three_bookies_in_rotation() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        writer = await client.create(ensemble_size=4, write_quorum=3, ack_quorum=2)
        await writer.add_many([b"payload %d" % i for i in range(12)])
        await writer.close()
        b1, b2, b3, b4 = writer.metadata.last_segment.ensemble
        holders = []
        for entry_id in range(12):
            replicas = [await client.read_from_bookie(writer.ledger_id, EntryId(entry_id), b) for b in (b1, b2, b3, b4)]
            assert all(r.payload == b"payload %d" % entry_id for r in replicas if r.verdict is Verdict.GOOD)
            holders.append({r.bookie_id for r in replicas if r.verdict is Verdict.GOOD})
            assert sum(r.verdict is Verdict.ABSENT for r in replicas) == 1
        assert holders == [{b1, b2, b3}, {b2, b3, b4}, {b3, b4, b1}, {b4, b1, b2}] * 3


async def test_the_verdict_on_a_replica_depends_on_its_own_bytes() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await client.create()
        await writer.add_many([b"a", b"bc"])
        first, second, third = cluster.of(writer.metadata.last_segment.ensemble)
        first.corrupt(writer.ledger_id, 1)
        del second.ledgers[writer.ledger_id].entries[1]
        corrupt = await client.read_from_bookie(writer.ledger_id, EntryId(1), first.bookie_id)
        absent = await client.read_from_bookie(writer.ledger_id, EntryId(1), second.bookie_id)
        good = await client.read_from_bookie(writer.ledger_id, EntryId(1), third.bookie_id)
        assert (corrupt.verdict, corrupt.payload, corrupt.frame) == (
            Verdict.CORRUPT,
            None,
            first.ledgers[writer.ledger_id].entries[1],
        )
        assert (absent.verdict, absent.status, absent.frame) == (Verdict.ABSENT, Status.NO_ENTRY, None)
        assert (good.verdict, good.payload, good.length, good.status) == (Verdict.GOOD, b"bc", 3, Status.OK)
