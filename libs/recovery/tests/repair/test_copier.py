"""The copier: its memory, its requests in flight, its choice of sources, and which responses prove a loss."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_client.memory.memory import MemoryWriteHandle
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_core.wire.messages import Status
from bindery_metadata.recovery.recovery_records import Obstacle
from bindery_recovery.budget import RepairBudget
from bindery_recovery.checks.checker import FragmentState, check_ledger
from bindery_recovery.repair.copier import BATCH_SIZE_HELD_MAX, Copier, CopyResult, Sources, Target
from healing_world import CountingClient, World, payloads, world
from simulated import simulate

Scene = Callable[[World], Awaitable[None]]


def play(scene: Scene) -> None:
    async def run() -> None:
        async with world() as here:
            await scene(here)

    simulate(run())


class Client(CountingClient):
    """Records the entries and bytes of each request; some bookies hang."""

    def __init__(self, here: World) -> None:
        super().__init__(here.ledgers)
        self.hanging: set[BookieId] = set()
        self.read: list[tuple[BookieId, int]] = []
        self.stored_sizes: list[int] = []

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Any,
    ) -> Any:
        self.read.append((bookie_id, len(entry_ids)))
        if bookie_id not in self.hanging:
            return await super().read_replicas(ledger_id, metadata, bookie_id, entry_ids, take)
        await asyncio.sleep(5)
        status = int(Status.IO_ERROR)
        return [
            take(ReplicaRead(ledger_id, entry_id, bookie_id, status, None, Verdict.ERROR, reason="no answer"))
            for entry_id in entry_ids
        ]

    async def store_replicas(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, frames: Sequence[bytes], **others: Any
    ) -> list[int]:
        self.stored_sizes.append(sum(map(len, frames)))
        return await super().store_replicas(ledger_id, metadata, bookie_id, frames, **others)


async def copy(here: World, client: Client, writer: MemoryWriteHandle, **budget: Any) -> CopyResult:
    """Copy the entries of the first member of the ensemble to a spare."""

    async def is_wanted() -> bool:
        return True

    metadata = await here.client.metadata(writer.ledger_id)
    fragment = closed_fragments(metadata)[0]
    (spare,) = set(here.ledgers.bookies) - set(metadata.last_segment.ensemble)
    here.lose(fragment.bookie_id)
    return await Copier(client, RepairBudget(**budget)).copy(
        writer.ledger_id,
        metadata,
        [Target(fragment, spare)],
        sources=Sources(frozenset(here.ledgers.bookies)),
        is_wanted=is_wanted,
    )


def test_large_entries_after_small_ones_do_not_exceed_the_memory_limit() -> None:
    async def scene(here: World) -> None:
        size = 1_500_000
        writer = await here.client.create(password=b"pw")
        await writer.add_many([*payloads(300), *[bytes(size)] * 60, *payloads(50)])
        await writer.close()
        client = Client(here)
        result = await copy(here, client, writer)
        assert (len(result.done), result.entries) == (1, 410)
        assert max(client.stored_sizes) <= BATCH_SIZE_HELD_MAX
        assert max(count for _, count in client.read) > BATCH_SIZE_HELD_MAX // size, (
            "one batch exceeded the memory limit"
        )
        copies = here.ledgers.find(writer.ledger_id).copies
        assert copies.runs(result.done[0].new) == [(0, 410)]

    play(scene)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_budget_limits_the_entries_in_flight(limit: int) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(100)
        client = Client(here)
        result = await copy(here, client, writer, entries_in_flight_max=limit)
        assert result.entries == 100
        assert max(count for _, count in client.read) == limit
        client.read.clear()
        await check_ledger(
            client,
            writer.ledger_id,
            writer.metadata,
            bookies=here.ledgers.bookies,
            budget=RepairBudget(entries_in_flight_max=limit),
        )
        assert max(count for _, count in client.read) <= limit

    play(scene)


def test_a_source_that_hangs_is_skipped_while_there_is_another() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(3_000, size=1000)
        _, first, second = writer.metadata.last_segment.ensemble
        client = Client(here)
        client.hanging.add(first)
        here.ledgers.find(writer.ledger_id).copies.lose(second, 2_999)
        began = asyncio.get_running_loop().time()
        result = await copy(here, client, writer)
        assert asyncio.get_running_loop().time() - began < 20
        (failure,) = result.failed.values()
        assert failure.obstacle is Obstacle.SOURCE_UNAVAILABLE, (
            "the hanging source may have the entry that the other one lacks"
        )
        assert 2_800 < result.entries < 3_000

    play(scene)


def test_a_digest_mismatch_proves_nothing_if_the_metadata_records_no_digest_type() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(3)
        ledger = here.ledgers.find(writer.ledger_id)
        ledger.metadata = ledger.metadata.with_changes(digest_type=None)
        for bookie_id in ledger.metadata.last_segment.ensemble:
            ledger.copies.damage(ledger.metadata, ledger.entries, bookie_id, 0)
        check = await check_ledger(here.client, writer.ledger_id, ledger.metadata, bookies=here.ledgers.bookies)
        assert {one.state for one in check.bad} == {FragmentState.UNSURE}
        result = await copy(here, Client(here), writer)
        (failure,) = result.failed.values()
        assert (failure.obstacle, failure.is_final) == (Obstacle.SOURCE_UNAVAILABLE, False)

    play(scene)
