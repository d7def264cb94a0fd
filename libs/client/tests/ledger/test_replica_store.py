"""Copies stored at a bookie: each entry's own answer, a busy bookie waited for, and an end to every wait."""

import asyncio

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger import replica_store
from bindery_core.entry import peek_ids
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import EntryId, LedgerId
from bindery_core.wire.messages import AddRequest, Status
from fake_bookie import FakeBookie
from fake_cluster import FakeCluster


async def frames_and_spare(
    cluster: FakeCluster, client: LedgerClient, count: int
) -> tuple[LedgerId, LedgerMetadata, list[bytes], FakeBookie]:
    writer = await client.create()
    await writer.add_many([b"payload %d" % i for i in range(count)])
    metadata = await writer.close()
    ids = [EntryId(i) for i in range(count)]
    holder = metadata.last_segment.ensemble[0]
    frames = await client.read_replicas(writer.ledger_id, metadata, holder, ids, lambda r: r.frame or b"")
    return writer.ledger_id, metadata, frames, cluster.spare(metadata.last_segment.ensemble)


async def test_each_entry_has_its_own_answer_and_only_the_refused_are_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_store, "BUSY_PAUSE_S", 0.01)
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 4)
        add = spare._add
        seen: list[int] = []

        def picky(request: AddRequest) -> int:
            entry_id = peek_ids(request.body)[1]
            seen.append(entry_id)
            if entry_id == 1 and seen.count(1) < 3:
                return Status.TOO_MANY_REQUESTS
            return Status.READ_ONLY if entry_id == 2 else add(request)

        monkeypatch.setattr(spare, "_add", picky)
        statuses = await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames)
        assert statuses == [Status.OK, Status.OK, Status.READ_ONLY, Status.OK]
        assert seen == [0, 1, 2, 3, 1, 1]
        assert sorted(spare.ledgers[ledger_id].entries) == [0, 1, 3]


async def test_a_bookie_that_stays_busy_says_so_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "BUSY_PAUSE_S", 0.01)
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        spare.refuse(AddRequest, Status.TOO_MANY_REQUESTS)
        async with asyncio.timeout(30):
            statuses = await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames, timeout_s=0.1)
        assert statuses == [Status.TOO_MANY_REQUESTS] * 2


@pytest.mark.parametrize("how", ["down", "silent"])
async def test_a_bookie_without_an_answer_is_unavailable(how: str) -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(add_timeout_s=0.2)
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        if how == "down":
            await spare.stop()
        else:
            spare.freeze()
        with pytest.raises(BookieUnavailable):
            await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames)
