"""The copier's batches, its order of entries, its targets, and when copies are no longer needed."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from bindery_client.memory.memory import MemoryWriteHandle
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments
from bindery_core.wire.messages import Status
from bindery_metadata.recovery.recovery_records import Obstacle
from bindery_recovery.budget import MIB, RepairBudget
from bindery_recovery.repair.copier import Copier, CopyResult, Sources, Target
from healing_world import CountingClient, World, play


class Client(CountingClient):
    """Records which entries are read from which bookie."""

    def __init__(self, here: World, *, read_s: float = 0.0) -> None:
        super().__init__(here.ledgers)
        self.read: list[tuple[BookieId, list[int]]] = []
        self._read_s = read_s

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Any,
    ) -> Any:
        self.read.append((bookie_id, [int(entry_id) for entry_id in entry_ids]))
        await asyncio.sleep(self._read_s)
        return await super().read_replicas(ledger_id, metadata, bookie_id, entry_ids, take)

    def batches(self) -> list[list[int]]:
        return [entry_ids for _, entry_ids in self.read]


class Copying:
    """One call of `copy`, with what it reported."""

    def __init__(self, here: World, writer: MemoryWriteHandle, client: Client, *, budget: RepairBudget | None) -> None:
        self.here = here
        self.metadata = here.ledgers.find(writer.ledger_id).metadata
        self.fragments = closed_fragments(self.metadata)
        self.spares = sorted(set(here.ledgers.bookies) - set(self.metadata.last_segment.ensemble))
        self.budget = budget or RepairBudget()
        self.reported: list[tuple[int, int]] = []
        self.asked_at: list[float] = []
        """Times of the questions whether the copies are still needed."""
        self.wanted_until_s = float("inf")
        self.ledger_id = writer.ledger_id
        self._client = client

    def replace(self, fragment: Fragment, spare: int = 0, only: Collection[int] | None = None) -> Target:
        return Target(fragment, self.spares[spare], None if only is None else frozenset(only))

    def restore(self, fragment: Fragment, only: Collection[int] | None = None) -> Target:
        return Target(fragment, fragment.bookie_id, None if only is None else frozenset(only))

    async def run(self, *targets: Target, first: Collection[int] = (), sources: Sources | None = None) -> CopyResult:
        async def is_wanted() -> bool:
            self.asked_at.append(asyncio.get_running_loop().time())
            return self.asked_at[-1] < self.wanted_until_s

        return await Copier(
            self._client, self.budget, on_copied=lambda entries, size: self.reported.append((entries, size))
        ).copy(
            self.ledger_id,
            self.metadata,
            targets,
            sources=sources or Sources(frozenset(self.here.ledgers.bookies)),
            is_wanted=is_wanted,
            first=first,
        )


async def copying(
    here: World, count: int, *, size: int = 10, read_s: float = 0.0, budget: RepairBudget | None = None, **quorums: int
) -> tuple[Copying, Client]:
    writer = await here.write(count, size=size, **quorums)
    client = Client(here, read_s=read_s)
    return Copying(here, writer, client, budget=budget), client


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_of_small_entries_double_from_eight_to_a_hundred_entries() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 300, budget=RepairBudget(entries_in_flight_max=1000))
        result = await job.run(job.replace(job.fragments[0]))
        assert [len(ids) for ids in client.batches()] == [8, 16, 32, 64, 100, 80]
        assert [entry_id for ids in client.batches() for entry_id in ids] == list(range(300))
        assert (len(result.done), result.entries, result.failed, result.unreadable) == (1, 300, {}, [])
        assert result.bytes == sum(size for _, size in job.reported)
        assert [entries for entries, _ in job.reported] == [8, 16, 32, 64, 100, 80]

    play(scene)


def test_batches_have_at_most_the_entries_in_flight_of_the_budget() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 30, budget=RepairBudget(entries_in_flight_max=11))
        await job.run(job.replace(job.fragments[0]))
        assert [len(ids) for ids in client.batches()] == [8, 11, 11]

    play(scene)


@pytest.mark.parametrize(
    ("rate", "entries"),
    [
        pytest.param(64 * MIB, [8, 16, 32, 52, 52, 40], id="at a high rate, half a MiB"),
        pytest.param(2_000_000, [8, 16, 20, 20, 20, 20], id="a tenth of a second"),
        pytest.param(100_000, [8, 6, 6, 6, 6, 6], id="at a low rate, 64 KiB"),
    ],
)
def test_the_size_of_a_batch_follows_from_the_rate(rate: int, entries: list[int]) -> None:
    async def scene(here: World) -> None:
        budget = RepairBudget(bytes_per_s_max=rate, bytes_per_s_min=rate)
        job, client = await copying(here, 200, size=9_950, budget=budget)
        await job.run(job.replace(job.fragments[0]))
        assert [len(ids) for ids in client.batches()][:6] == entries

    play(scene)


def test_large_entries_are_copied_one_by_one() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 12, size=600_000)
        await job.run(job.replace(job.fragments[0]))
        assert [len(ids) for ids in client.batches()] == [8, 1, 1, 1, 1]

    play(scene)


def test_batches_are_small_while_entries_that_exceeded_the_memory_limit_are_read_again() -> None:
    async def scene(here: World) -> None:
        writer = await here.client.create(password=b"pw")
        await writer.add_many([*[b"small"] * 120, *[bytes(1_500_000)] * 12])
        await writer.close()
        client = Client(here)
        job = Copying(here, writer, client, budget=None)
        result = await job.run(job.replace(job.fragments[0]))
        assert [len(ids) for ids in client.batches()] == [8, 16, 32, 64, 12, 2, 1, 1, 1, 1, 1]
        assert [entry_id for ids in client.batches()[5:] for entry_id in ids] == list(range(125, 132))
        assert result.entries == 132

    play(scene)


def test_every_byte_that_was_copied_is_paid_for() -> None:
    async def scene(here: World) -> None:
        budget = RepairBudget(bytes_per_s_max=100_000, bytes_per_s_min=100_000)
        job, _ = await copying(here, 100, size=9_950, budget=budget)
        began = asyncio.get_running_loop().time()
        result = await job.run(job.replace(job.fragments[0]))
        assert budget.bytes_paid >= result.bytes > 990_000
        assert asyncio.get_running_loop().time() - began > 9, "a MB at 100 KB per second"
        assert budget.entries_in_flight == 0

    play(scene)


# --- which entries, from which bookie ---------------------------------------------------------------------------------


def test_only_the_missing_entries_of_a_target_are_read() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 20)
        result = await job.run(job.restore(job.fragments[1], only={3, 17, 5}))
        assert client.batches() == [[3, 5, 17]]
        assert result.entries == 3
        assert [target.new for target in result.done] == [job.fragments[1].bookie_id]

    play(scene)


def test_entries_that_failed_before_are_read_first() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 20)
        result = await job.run(job.replace(job.fragments[0]), first=[17, 4, 999])
        assert client.batches()[0] == [4, 17, 0, 1, 2, 3, 5, 6], "an entry of another segment is ignored"
        assert sorted(entry_id for ids in client.batches() for entry_id in ids) == list(range(20))
        assert result.entries == 20

    play(scene)


def test_with_striping_only_the_entries_of_the_fragment_are_copied() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 9, ensemble_size=3, write_quorum=2, ack_quorum=2)
        result = await job.run(job.replace(job.fragments[1]))
        read = sorted(entry_id for ids in client.batches() for entry_id in ids)
        assert read == [0, 1, 3, 4, 6, 7]
        assert result.entries == 6

    play(scene)


def test_a_fragment_is_read_from_the_member_after_the_target() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 20)
        ensemble = job.metadata.last_segment.ensemble
        await job.run(job.replace(job.fragments[1]))
        assert {bookie_id for bookie_id, _ in client.read} == {ensemble[2]}

    play(scene)


def test_an_entry_that_a_source_lacks_is_read_from_the_next_one() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 5)
        ensemble = job.metadata.last_segment.ensemble
        sources = Sources(frozenset(here.ledgers.bookies), bad={ensemble[1]: {2}})
        result = await job.run(job.replace(job.fragments[0]), sources=sources)
        assert client.read == [(ensemble[1], [0, 1, 3, 4]), (ensemble[2], [2])]
        assert (result.entries, result.unreadable) == (5, [])

    play(scene)


# --- targets ----------------------------------------------------------------------------------------------------------


def test_two_targets_of_a_segment_share_the_reads() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 5)
        targets = [job.replace(job.fragments[0], 0), job.replace(job.fragments[1], 1)]
        result = await job.run(*targets)
        assert sorted(entry_id for ids in client.batches() for entry_id in ids) == [0, 1, 2, 3, 4], "each is read once"
        assert sorted(client.stored) == sorted((client.stored[0][0], target.new, 5) for target in targets)
        assert (result.done, result.entries) == (targets, 10)
        assert job.reported == [(10, result.bytes)]

    play(scene, bookies=5)


def test_a_target_that_refuses_does_not_stop_the_other_one() -> None:
    async def scene(here: World) -> None:
        job, _ = await copying(here, 20)
        refusing, other = job.replace(job.fragments[0], 0), job.replace(job.fragments[1], 1)
        here.ledgers.store_answers[refusing.new] = Status.READ_ONLY
        result = await job.run(refusing, other)
        assert result.done == [other]
        assert list(result.failed) == [0]
        assert result.failed[0].refusing == refusing.new
        assert result.entries == 20

    play(scene, bookies=5)


def test_copying_ends_when_every_target_has_failed() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 100)
        here.ledgers.store_answers[job.spares[0]] = Status.READ_ONLY
        result = await job.run(job.replace(job.fragments[0]))
        assert (result.done, result.entries) == ([], 0)
        assert len(client.read) == 1

    play(scene)


def test_a_replacement_gets_nothing_after_an_entry_that_is_lost_and_a_restored_bookie_gets_the_rest() -> None:
    async def scene(here: World) -> None:
        job, _ = await copying(here, 30)
        copies = here.ledgers.find(job.ledger_id).copies
        for bookie_id in job.metadata.last_segment.ensemble:
            copies.lose(bookie_id, 2)
        replaced = await job.run(job.replace(job.fragments[0]))
        assert (replaced.done, replaced.entries, replaced.unreadable) == ([], 0, [2])
        assert (replaced.failed[0].obstacle, replaced.failed[0].is_final) == (Obstacle.NO_COPY_LEFT, True)
        restored = await job.run(job.restore(job.fragments[0]))
        assert (restored.done, restored.entries, restored.unreadable) == ([], 29, [2])
        assert (restored.failed[0].obstacle, restored.failed[0].is_final) == (Obstacle.NO_COPY_LEFT, True)

    play(scene)


@pytest.mark.parametrize("first", [(), (20,)])
def test_of_several_failures_the_one_that_is_not_final_is_reported(first: Collection[int]) -> None:
    """Entry 2 is lost; the only copy of entry 20 cannot be verified, because the type of its digest is unknown."""

    async def scene(here: World) -> None:
        writer = await here.write(30)
        ledger = here.ledgers.find(writer.ledger_id)
        ledger.metadata = ledger.metadata.with_changes(digest_type=None)
        members = ledger.metadata.last_segment.ensemble
        for bookie_id in members:
            ledger.copies.lose(bookie_id, 2)
        for bookie_id in members[:2]:
            ledger.copies.lose(bookie_id, 20)
        ledger.copies.damage(ledger.metadata, ledger.entries, members[2], 20)
        job = Copying(here, writer, Client(here), budget=None)
        result = await job.run(job.restore(job.fragments[0]), first=first)
        assert sorted(result.unreadable) == [2, 20]
        assert (result.failed[0].obstacle, result.failed[0].is_final) == (Obstacle.SOURCE_UNAVAILABLE, False)
        assert result.failed[0].detail.startswith("entry 20 ")

    play(scene)


def test_a_bookie_that_answers_that_it_lost_its_storage_is_asked_only_once() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 30)
        ensemble = job.metadata.last_segment.ensemble
        here.ledgers.read_answers[ensemble[1]] = Status.UNKNOWN_LEDGER_STATE
        result = await job.run(job.replace(job.fragments[0]))
        assert result.entries == 30
        assert [bookie_id for bookie_id, _ in client.read].count(ensemble[1]) == 1

    play(scene)


def test_a_bookie_that_refills_its_storage_is_not_asked() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 30)
        ensemble = job.metadata.last_segment.ensemble
        sources = Sources(frozenset(here.ledgers.bookies), refilling=[ensemble[1]])
        result = await job.run(job.replace(job.fragments[0]), sources=sources)
        assert result.entries == 30
        assert {bookie_id for bookie_id, _ in client.read} == {ensemble[2]}

    play(scene)


def test_an_entry_that_every_bookie_has_only_corrupt_or_does_not_have_is_lost() -> None:
    async def scene(here: World) -> None:
        job, _ = await copying(here, 5)
        ledger = here.ledgers.find(job.ledger_id)
        first, second, third = job.metadata.last_segment.ensemble
        ledger.copies.lose(first, 2)
        ledger.copies.lose(second, 2)
        ledger.copies.damage(ledger.metadata, ledger.entries, third, 2)
        result = await job.run(job.restore(job.fragments[0], only={2}))
        assert (result.failed[0].obstacle, result.failed[0].is_final) == (Obstacle.NO_COPY_LEFT, True)
        assert f"{second} does not have it" in result.failed[0].detail
        assert f"{third} has a corrupt copy" in result.failed[0].detail

    play(scene)


def test_a_restored_bookie_gets_nothing_more_after_a_source_did_not_answer() -> None:
    """Each further read may take a full timeout."""

    async def scene(here: World) -> None:
        job, client = await copying(here, 30)
        first, second, third = job.metadata.last_segment.ensemble
        here.ledgers.find(job.ledger_id).copies.lose(first)
        here.ledgers.read_answers = {second: Status.IO_ERROR, third: Status.IO_ERROR}
        result = await job.run(job.restore(job.fragments[0]))
        assert (result.done, result.entries) == ([], 0)
        assert result.failed[0].obstacle is Obstacle.SOURCE_UNAVAILABLE
        assert [len(ids) for ids in client.batches() if len(ids) > 8] == []

    play(scene)


# --- copies that are no longer needed ---------------------------------------------------------------------------------


def test_the_need_for_copies_is_checked_at_most_once_a_second() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 1_000, read_s=0.3)
        began = asyncio.get_running_loop().time()
        result = await job.run(job.replace(job.fragments[0]))
        assert len(client.read) == 13
        assert [at - began for at in job.asked_at] == pytest.approx([1.2, 2.4, 3.6], abs=0.1)
        assert not result.is_abandoned

    play(scene)


def test_copying_is_abandoned_once_the_copies_are_not_needed() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 1_000, read_s=0.3)
        job.wanted_until_s = 0.0
        result = await job.run(job.replace(job.fragments[0]))
        assert (result.is_abandoned, result.done) == (True, [])
        assert len(client.read) == 4
        assert result.entries == 8 + 16 + 32 + 64

    play(scene)


def test_a_target_with_nothing_to_copy_is_done() -> None:
    async def scene(here: World) -> None:
        job, client = await copying(here, 5)
        target = job.restore(job.fragments[0], only=())
        result = await job.run(target)
        assert (result.done, result.entries, client.read) == ([target], 0, [])

    play(scene)


def test_the_response_times_of_targets_are_observed() -> None:
    async def scene(here: World) -> None:
        budget = RepairBudget()
        observed: list[float] = []
        observe = budget.observe
        budget.observe = lambda seconds: (observed.append(seconds), observe(seconds))[1]  # type: ignore[method-assign]
        job, client = await copying(here, 5, budget=budget)
        client.before_store = lambda: asyncio.sleep(0.75)
        await job.run(job.replace(job.fragments[0]))
        assert max(observed) == pytest.approx(0.75)
        assert min(observed) == pytest.approx(0.0, abs=0.01), "of the read"

    play(scene)
