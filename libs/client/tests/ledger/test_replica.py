"""Reads of many entries from one bookie: each has a verdict, also if the bookie cannot respond."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from bindery_client.client import LedgerClient
from bindery_client.ledger import replica as replica_module
from bindery_client.ledger.replica import ReplicaBatch, ReplicaRead, Verdict, judge, status_name
from bindery_client.ledger.writer import WriteHandle
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire.messages import ReadRequest, ReadResponse, Status
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


async def test_each_entry_of_a_batch_has_its_own_verdict_in_the_requested_order() -> None:
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


async def test_only_the_results_of_take_are_kept() -> None:
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


def test_a_response_ok_without_an_entry_is_an_error() -> None:
    ledger_id, entry_id = LedgerId(7), EntryId(3)
    replica = judge(
        Digester(DigestType.CRC32C),
        ReadResponse(0, Status.OK, ledger_id, entry_id, None),
        bookie_id=BookieId("b0"),
        ledger_id=ledger_id,
        entry_id=entry_id,
    )
    assert (replica.verdict, replica.reason) == (Verdict.ERROR, "response without an entry")


async def test_a_busy_bookie_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_responses_before_the_timeout_count_and_the_rest_is_requested_again() -> None:
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


async def test_a_request_that_fails_after_progress_is_repeated_once() -> None:
    """A timeout may replace the connection, which fails the next request. Its entries are then requested once more."""

    class Requests:
        """Answers for entry 0, then fails, then answers for the rest."""

        ledger_id = LedgerId(7)
        digester = Digester(DigestType.CRC32C)
        attempts = 0

        def send_reads(self, action: SendReads, sink: Any, *, timeout_s: float) -> None:
            self.attempts += 1
            ids = {1: [0], 2: [], 3: list(action.entry_ids)}[self.attempts]
            responses = [
                ReadResponse(
                    0,
                    Status.OK,
                    self.ledger_id,
                    entry_id,
                    pack(self.digester, ledger_id=self.ledger_id, entry_id=entry_id, lac=-1, length=1, payload=b"x"),
                )
                for entry_id in ids
            ]
            if responses:
                sink.answered(action.bookie_id, responses)
            if self.attempts < 3:
                sink.failed(action.bookie_id, BookieUnavailable("lost"))

    requests = Requests()
    batch = ReplicaBatch(requests, BookieId("b"), [EntryId(0), EntryId(1), EntryId(2)], lambda read: read.verdict)  # type: ignore[arg-type]
    assert await batch.run(timeout_s=1.0) == [Verdict.GOOD] * 3
    assert requests.attempts == 3
