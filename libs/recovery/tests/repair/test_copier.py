"""The copier: its memory, its requests in flight, its choice of sources, and which responses prove a loss."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_client.memory.memory import MemoryWriteHandle
from bindery_core.errors import BookieUnavailable
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


async def copy(
    here: World, client: Client, writer: MemoryWriteHandle, *, sources: Sources | None = None, **budget: Any
) -> CopyResult:
    """Copy the entries of the first member of the ensemble to a spare. `sources`: all bookies by default."""

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
        sources=sources or Sources(frozenset(here.ledgers.bookies)),
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


@pytest.mark.parametrize(
    ("case", "obstacle", "is_final", "why"),
    [
        ("gone", Obstacle.NO_COPY_LEFT, True, "was removed permanently"),
        ("absent", Obstacle.SOURCE_UNAVAILABLE, False, "is not registered"),
        ("refilling", Obstacle.SOURCE_IN_LIMBO, False, "is refilling its lost storage"),
        ("bad", Obstacle.NO_COPY_LEFT, True, "has no good copy"),
        ("corrupt", Obstacle.NO_COPY_LEFT, True, "has a corrupt copy"),
        ("lacks", Obstacle.NO_COPY_LEFT, True, "does not have it"),
        ("hangs", Obstacle.SOURCE_UNAVAILABLE, False, "did not return it (no answer)"),
    ],
)
def test_the_failure_names_why_each_source_has_no_copy_and_is_final_only_if_none_can_return(
    case: str, obstacle: Obstacle, is_final: bool, why: str
) -> None:
    """The last source decides: of the first and the second member it is known that they will never return."""

    async def scene(here: World) -> None:
        writer = await here.write(3)
        first, second, last = writer.metadata.last_segment.ensemble
        everyone = frozenset(here.ledgers.bookies)
        gone, sources = frozenset({first, second}), {}
        ledger, client = here.ledgers.find(writer.ledger_id), Client(here)
        match case:
            case "gone":
                gone |= {last}
            case "absent":
                everyone -= {last}
            case "refilling":
                sources = {"refilling": [last]}
            case "bad":
                sources = {"bad": {last: [0, 1, 2]}}
            case "corrupt":
                ledger.copies.damage(ledger.metadata, ledger.entries, last, 0)
            case "lacks":
                ledger.copies.lose(last, 0)
            case "hangs":
                client.hanging.add(last)
        result = await copy(here, client, writer, sources=Sources(everyone, gone, **sources))
        (failure,) = result.failed.values()
        assert (failure.obstacle, failure.is_final, failure.refusing) == (obstacle, is_final, None)
        assert failure.detail.startswith("entry 0 cannot be read from any bookie: ")
        for bookie_id, reason in ((first, "was removed permanently"), (second, "was removed permanently"), (last, why)):
            assert f"{bookie_id} {reason}" in failure.detail
        assert result.unreadable[0] == 0
        assert result.done == []

    play(scene)


@pytest.mark.parametrize("how", ["unreachable", "refuses", "refuses one"])
def test_a_target_that_does_not_accept_entries_is_the_obstacle(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(3, size=100)
        client = Client(here)
        store = client.store_replicas

        async def refusing(ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, frames: Any) -> Any:
            if how == "unreachable":
                raise BookieUnavailable("connection refused", bookie_id=bookie_id)
            accepted = frames[:1] if how == "refuses one" else ()
            statuses = await store(ledger_id, metadata, bookie_id, accepted) if accepted else []
            return [*statuses, *[Status.READ_ONLY] * (len(frames) - len(accepted))]

        monkeypatch.setattr(client, "store_replicas", refusing)
        result = await copy(here, client, writer)
        (failure,) = result.failed.values()
        assert (failure.obstacle, failure.is_final, result.done) == (Obstacle.TARGET_REFUSES, False, [])
        assert failure.refusing is not None
        assert failure.detail.startswith(f"{failure.refusing}, chosen for copies of this ledger, ")
        expected = "cannot be reached (connection refused)" if how == "unreachable" else "answered READ_ONLY"
        assert failure.detail.endswith(expected)
        assert result.entries == (1 if how == "refuses one" else 0)
        assert result.bytes == sum(client.stored_sizes)
        assert result.unreadable == []

    play(scene)
