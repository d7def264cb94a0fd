"""Many entries asked of one bookie: each is judged, none is lost, and a bookie that cannot answer is a verdict too."""

import asyncio
from collections.abc import Sequence

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger import replica as replica_module
from bindery_client.ledger.replica import ReplicaRead, Verdict, status_name
from bindery_client.ledger.writer import WriteHandle
from bindery_core.ids import EntryId
from bindery_core.wire.messages import ReadRequest, Status
from fake_bookie import FakeBookie
from fake_cluster import FakeCluster


async def ask(client: LedgerClient, writer: WriteHandle, bookie: FakeBookie, ids: Sequence[int]) -> list[ReplicaRead]:
    entry_ids = [EntryId(entry_id) for entry_id in ids]
    return await client.read_replicas(writer.ledger_id, writer.metadata, bookie.bookie_id, entry_ids, lambda r: r)


async def written(client: LedgerClient, count: int) -> WriteHandle:
    writer = await client.create()
    await writer.add_many([b"payload %d" % i for i in range(count)])
    await writer.close()
    return writer


async def test_each_entry_of_a_batch_is_judged_by_itself_in_the_order_asked() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await written(client, 5)
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        bookie.corrupt(writer.ledger_id, 1)
        del bookie.ledgers[writer.ledger_id].entries[3]
        replicas = await ask(client, writer, bookie, [4, 3, 2, 1, 0])
        assert [r.entry_id for r in replicas] == [4, 3, 2, 1, 0]
        good, absent, corrupt = Verdict.GOOD, Verdict.ABSENT, Verdict.CORRUPT
        assert [r.verdict for r in replicas] == [good, absent, good, corrupt, good]
        assert replicas[0].payload == b"payload 4"
        assert replicas[3].reason == "entry digest mismatch"
        assert not bookie.ledgers[writer.ledger_id].fenced


async def test_what_take_drops_is_not_held() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await written(client, 3)
        bookie = writer.metadata.last_segment.ensemble[1]
        sizes = await client.read_replicas(
            writer.ledger_id, writer.metadata, bookie, [EntryId(0), EntryId(2)], lambda r: len(r.frame or b"")
        )
        assert sizes == [36 + len("payload 0")] * 2


async def test_a_bookie_that_is_down_or_silent_is_an_error_of_every_entry() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(read_timeout_s=0.2)
        writer = await written(client, 2)
        down, silent, _ = cluster.of(writer.metadata.last_segment.ensemble)
        await down.stop()
        silent.freeze()
        for bookie, reason in ((down, "reached"), (silent, "no answer in time")):
            replicas = await ask(client, writer, bookie, [0, 1])
            assert [r.verdict for r in replicas] == [Verdict.ERROR] * 2
            assert all(reason in r.reason or "lost" in r.reason for r in replicas)


async def test_a_status_without_an_entry_is_named() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await written(client, 1)
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        bookie.refuse(ReadRequest, Status.UNKNOWN_LEDGER_STATE)
        (replica,) = await ask(client, writer, bookie, [0])
        assert (replica.verdict, replica.reason) == (Verdict.ERROR, "bookie answers UNKNOWN_LEDGER_STATE")
        assert status_name(9999) == "9999"


async def test_a_busy_bookie_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BUSY_PAUSE_S", 0.01)
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await written(client, 3)
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        bookie.refuse(ReadRequest, Status.TOO_MANY_REQUESTS)
        asking = asyncio.create_task(ask(client, writer, bookie, [0, 1, 2]))
        while bookie.requests["ReadRequest"] < 6:
            await asyncio.sleep(0.005)
        bookie.refuse(ReadRequest, None)
        assert [r.verdict for r in await asking] == [Verdict.GOOD] * 3


async def test_a_bookie_that_stays_busy_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "BUSY_PAUSE_S", 0.001)
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client()
        writer = await written(client, 1)
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        bookie.refuse(ReadRequest, Status.TOO_MANY_REQUESTS)
        (replica,) = await ask(client, writer, bookie, [0])
        assert (replica.verdict, replica.reason) == (Verdict.ERROR, "bookie is too busy")
        assert bookie.requests["ReadRequest"] == replica_module.BUSY_ATTEMPTS_MAX + 1


async def test_what_came_before_the_deadline_counts_and_the_rest_is_asked_again() -> None:
    async with FakeCluster(bookies=3) as cluster:
        client = await cluster.client(read_timeout_s=0.2)
        writer = await written(client, 4)
        bookie = cluster.of(writer.metadata.last_segment.ensemble)[0]
        answer = bookie.answer
        silent = {2, 3}

        def first_time_silent(connection: object, request: ReadRequest) -> object:
            if request.entry_id in silent:
                silent.discard(request.entry_id)
                return None
            return answer(connection, request)  # type: ignore[arg-type]

        bookie.answer = first_time_silent  # type: ignore[method-assign, assignment]
        assert [r.verdict for r in await ask(client, writer, bookie, [0, 1, 2, 3])] == [Verdict.GOOD] * 4
        assert bookie.requests["ReadRequest"] == 6
