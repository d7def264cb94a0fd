"""Workers move replicas of ledgers that are marked for their placement to bookies of other racks."""

import asyncio

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.recovery.recovery_records import Reason
from healing_world import NAMES, World, payloads, play


def put(here: World, *racks: str) -> None:
    here.ledgers.racks = {BookieId(f"bookie-{n}:3181"): rack for n, rack in enumerate(racks)}


async def racks_of(here: World, ledger_id: int) -> list[set[str]]:
    metadata = await here.client.metadata(ledger_id)
    return [{here.ledgers.racks[bookie_id] for bookie_id in segment.ensemble} for segment in metadata.segments]


@pytest.mark.parametrize("quorums", [(3, 3, 2), (3, 2, 2), (2, 2, 1), (4, 2, 2)])
def test_a_ledger_in_one_rack_gets_copies_in_the_others(quorums: tuple[int, int, int]) -> None:
    async def scene(here: World) -> None:
        size, write_quorum, ack_quorum = quorums
        writer = await here.write(300, ensemble_size=size, write_quorum=write_quorum, ack_quorum=ack_quorum)
        put(here, *["/a"] * size, *["/b", "/c"] * 3)
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        metadata = await here.assert_whole(writer.ledger_id, payloads(300))
        racks = [here.ledgers.racks[bookie_id] for bookie_id in metadata.last_segment.ensemble]
        for first in range(size):
            held = {racks[(first + i) % size] for i in range(write_quorum)}
            assert len(held) == min(3, write_quorum), "as many racks as its bookies can be in"
        stats = healer.worker.stats
        assert stats.replicas_moved > 0
        assert healer.client.entries_stored == stats.replicas_moved * 300 * write_quorum / size
        (event,) = await here.records.history()
        assert f"ledger {writer.ledger_id} is on more racks" in event.text

    play(scene, bookies=10)


def test_the_metadata_names_the_new_bookie_only_after_all_copies() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(500, size=2_000)
        before = writer.metadata.last_segment.ensemble
        put(here, "/a", "/a", "/a", "/b")
        healer = here.healer()
        seen = []

        async def look() -> None:
            seen.append((await here.client.metadata(writer.ledger_id)).last_segment.ensemble)

        healer.client.before_store = look
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert len(seen) > 1
        assert set(seen) == {before}
        assert await racks_of(here, writer.ledger_id) == [{"/a", "/b"}]

    play(scene)


def test_without_racks_the_mark_is_removed_and_nothing_is_copied() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10)
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert (healer.client.stored, healer.worker.stats.replicas_moved) == ([], 0)

    play(scene)


def test_a_worker_with_the_switch_off_moves_nothing() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10)
        put(here, "/a", "/a", "/a", "/b")
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer = here.healer(placement_repair=False).start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []
        assert await racks_of(here, writer.ledger_id) == [{"/a"}]

    play(scene)


def test_a_ledger_marked_for_a_lost_bookie_is_not_moved_besides() -> None:
    """The repair replaces the lost bookie by one of another rack anyway; a move can wait."""

    async def scene(here: World) -> None:
        writer = await here.write(20)
        put(here, "/a", "/a", "/a", "/a", "/b")
        lost = NAMES[0]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.entries_stored == 20
        assert await racks_of(here, writer.ledger_id) == [{"/a", "/b"}]

    play(scene, bookies=5)


def test_draining_bookies_receive_no_moves() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(20)
        put(here, "/a", "/a", "/a", "/b")
        await here.memberships.set(NAMES[3], Intent.DRAINING)
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer = here.healer().start()
        await here.until_healed(writer.ledger_id)
        assert healer.client.stored == []

    play(scene)


def test_a_pause_of_recovery_keeps_the_mark() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(20)
        put(here, "/a", "/a", "/a", "/b")
        await here.marks.disable()
        await here.mark(writer.ledger_id, reason=Reason.PLACEMENT)
        healer = here.healer().start()
        await asyncio.sleep(30)
        assert healer.client.stored == []
        await here.marks.enable()
        await here.until_healed(writer.ledger_id)
        assert await racks_of(here, writer.ledger_id) == [{"/a", "/b"}]

    play(scene)
