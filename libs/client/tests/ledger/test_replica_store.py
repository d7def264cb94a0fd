"""Copies stored at a bookie: a status per entry, retries while the bookie is busy, and timeouts."""

import asyncio
from typing import Any

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger import replica_store
from bindery_core.entry import peek_ids
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import EntryId, LedgerId
from bindery_core.wire.messages import AddRequest, AddResponse, Request, Response, Status
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


async def test_each_entry_has_its_own_status_and_only_refused_ones_are_sent_again(
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


async def test_a_bookie_that_stays_busy_is_reported_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_store, "BUSY_PAUSE_S", 0.01)
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        spare.refuse(AddRequest, Status.TOO_MANY_REQUESTS)
        async with asyncio.timeout(30):
            statuses = await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames, timeout_s=0.1)
        assert statuses == [Status.TOO_MANY_REQUESTS] * 2


async def test_a_busy_bookie_is_not_asked_again_if_the_pause_would_exceed_the_timeout() -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        spare.refuse(AddRequest, Status.TOO_MANY_REQUESTS)
        before = spare.requests["AddRequest"]
        statuses = await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames, timeout_s=0.0)
        assert statuses == [Status.TOO_MANY_REQUESTS] * 2
        assert spare.requests["AddRequest"] - before == 2, "one request per entry"


@pytest.mark.parametrize("how", ["down", "silent"])
async def test_a_bookie_that_does_not_respond_is_unavailable(how: str) -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client(add_timeout_s=0.2)
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        if how == "down":
            await spare.stop()
        else:
            spare.freeze()
        with pytest.raises(BookieUnavailable):
            await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames)


async def test_a_response_about_another_entry_makes_the_bookie_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeCluster(bookies=4) as cluster:
        client = await cluster.client()
        ledger_id, metadata, frames, spare = await frames_and_spare(cluster, client, 2)
        answer = spare.answer

        def wrong(connection: Any, request: Request) -> Response | None:
            if isinstance(request, AddRequest):
                return AddResponse(request.txn_id, Status.OK, request.ledger_id, request.entry_id + 7)
            return answer(connection, request)

        monkeypatch.setattr(spare, "answer", wrong)
        with pytest.raises(BookieUnavailable, match="does not match the request"):
            await client.store_replicas(ledger_id, metadata, spare.bookie_id, frames)
