"""Marks, locks, records and reports of workers, also of workers that are killed."""

import asyncio
import random

import pytest
from bindery_client.ledger.replica import Verdict
from bindery_core.ids import BookieId, EntryId
from bindery_metadata.recovery.recovery_records import Obstacle, Reason, RecoveryRecord, RecoveryState
from bindery_recovery.budget import MIB
from bindery_recovery.repair.worker import SEARCH_S
from healing_world import LAYOUT, NAMES, World, clock_ms, payloads, play


def test_two_workers_heal_many_ledgers_and_copy_none_twice() -> None:
    async def scene(here: World) -> None:
        writers = [await here.write(40) for _ in range(30)]
        lost = NAMES[1]
        here.lose(lost)
        concerned = [w.ledger_id for w in writers if lost in w.metadata.last_segment.ensemble]
        healers = [here.healer(workers=2), here.healer(workers=2)]
        for healer in healers:

            async def take_a_while() -> None:
                await asyncio.sleep(0.5)

            healer.client.before_store = take_a_while
            healer.start()
        for ledger_id in concerned:
            await here.mark(ledger_id, lost)
        await here.until_healed(*concerned)
        stored = [one for healer in healers for one in healer.client.stored]
        per_ledger = {
            ledger_id: sum(count for stored_id, _, count in stored if stored_id == ledger_id) for ledger_id in concerned
        }
        assert per_ledger == dict.fromkeys(concerned, 40)
        assert all(healer.worker.stats.ledgers_healed for healer in healers), "both took part"
        assert await here.marks.locks() == {}

    play(scene, bookies=5)


def test_a_ledger_that_is_marked_again_during_its_repair_stays_marked() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        ledger = here.ledgers.find(writer.ledger_id)
        first, second, _ = ledger.metadata.last_segment.ensemble
        here.lose(first)
        await here.mark(writer.ledger_id, first)
        healer = here.healer()
        marked_again = False

        async def once_more() -> None:
            nonlocal marked_again
            if not marked_again:
                marked_again = True
                ledger.copies.lose(second, 25)  # the check that follows reads first and last entries only
                await here.mark(writer.ledger_id, second, reason=Reason.ENTRY_MISSING)
            else:
                await asyncio.sleep(1)

        healer.client.before_store = once_more
        healer.start()
        while not healer.worker.stats.locks_lost:
            await asyncio.sleep(0.01)
        assert await here.is_marked(writer.ledger_id)
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(50))
        assert (writer.ledger_id, second, 1) in healer.client.stored

    play(scene)


def test_another_worker_completes_the_repair_of_a_killed_one() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        before = await here.client.metadata(writer.ledger_id)
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        slow = {"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}
        first = here.healer("first", budget=slow).start()
        record = await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.COPYING)
        assert record.worker == "first"
        while first.client.entries_stored < 500:
            await asyncio.sleep(0.1)
        record = await here.until_record(writer.ledger_id, lambda r: (r.missing_entries or 0) < 2_000)
        assert record.missing_bytes is not None
        assert record.missing_bytes < 2_000 * 10_000
        await first.kill()
        assert await here.client.metadata(writer.ledger_id) == before, "the metadata does not name an incomplete copy"
        assert await here.is_marked(writer.ledger_id)
        here.healer("second").start()
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(2_000, 10_000))

    play(scene)


def test_an_idle_worker_takes_over_as_soon_as_the_session_of_a_killed_one_ends() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        first = here.healer("first", budget={"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}).start()
        await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.COPYING)
        here.healer("second").start()
        await asyncio.sleep(SEARCH_S / 10)  # the second worker has searched, and found the mark locked
        await first.kill()
        record = await here.until_record(writer.ledger_id, lambda r: r.worker == "second", limit_s=SEARCH_S / 3)
        assert record.state is RecoveryState.COPYING
        await here.until_healed(writer.ledger_id)

    play(scene)


def test_a_worker_that_is_stopped_releases_its_locks_at_once() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer(budget={"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}).start()
        while not healer.client.stored:
            await asyncio.sleep(0.1)
        assert await here.marks.locks() == {writer.ledger_id: "worker-0"}
        await healer._end()
        assert await here.marks.locks() == {}

    play(scene)


def test_a_lost_session_keeps_the_mark_and_another_attempt_removes_it() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        expired = False

        async def expire() -> None:
            nonlocal expired
            if not expired:
                expired = True
                here.tree.expire(healer.store)

        healer.client.before_store = expire
        healer.start()
        await here.until_healed(writer.ledger_id)
        assert expired
        assert healer.worker.stats.locks_lost == 1
        await here.assert_whole(writer.ledger_id, payloads(50))
        assert healer.client.entries_stored == 50, "copies made before the session ended are not repeated"

    play(scene)


def test_a_worker_survives_an_outage_of_the_metadata_store() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(50)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healer = here.healer()
        here.tree.suspend(healer.store)
        healer.start()
        await asyncio.sleep(30)
        assert await here.is_marked(writer.ledger_id)
        here.tree.resume(healer.store)
        await here.until_healed(writer.ledger_id)
        await here.assert_whole(writer.ledger_id, payloads(50))

    play(scene)


def test_a_requested_retry_is_made_and_a_new_worker_tries_an_unrecoverable_ledger_once() -> None:
    async def scene(here: World) -> None:
        await here.add_cookies(*NAMES[1:])
        writer = await here.write(30, ensemble_size=1, write_quorum=1, ack_quorum=1)
        (gone,) = writer.metadata.last_segment.ensemble
        assert gone == NAMES[0]
        here.lose(gone)
        await here.mark(writer.ledger_id, gone)
        healer = here.healer().start()
        await here.until_record(writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE)
        assert healer.worker.stats.attempts_failed == 1
        await here.records.update(
            writer.ledger_id,
            lambda r: r.with_changes(state=RecoveryState.WAITING, next_retry_ms=None) if r else None,
        )
        record = await here.until_record(
            writer.ledger_id, lambda r: r.state is RecoveryState.UNRECOVERABLE and r.attempts == 2, 30
        )
        assert record.obstacle is Obstacle.NO_COPY_LEFT
        another = here.healer().start()
        await asyncio.sleep(1_000)
        assert (healer.worker.stats.attempts_failed, another.worker.stats.attempts_failed) == (2, 1)
        kinds = [event.kind for event in await here.records.history()]
        assert kinds.count("unrecoverable") == 2, "the state changed to unrecoverable twice; the third attempt kept it"

    play(scene)


def test_records_without_a_mark_are_removed_and_others_are_kept() -> None:
    async def scene(here: World) -> None:
        left, marked = await here.write(5), await here.write(5)
        for writer in (left, marked):
            await here.records.put(RecoveryRecord(writer.ledger_id, first_marked_ms=clock_ms()))
        here.lose(marked.metadata.last_segment.ensemble[0])
        await here.mark(marked.ledger_id, marked.metadata.last_segment.ensemble[0])
        here.healer().start()
        async with asyncio.timeout(60):
            while await here.records.get(left.ledger_id) is not None:
                await asyncio.sleep(0.5)
        await asyncio.sleep(700)
        assert await here.is_marked(marked.ledger_id)
        assert await here.records.get(marked.ledger_id) is not None

    play(scene, bookies=3)


@pytest.mark.parametrize("why", ["paused", "locked"])
def test_a_due_ledger_that_cannot_be_locked_is_searched_for_at_intervals(why: str) -> None:
    async def scene(here: World) -> None:
        writer = await here.write(10, ensemble_size=3)
        here.lose(writer.metadata.last_segment.ensemble[0])
        await here.mark(writer.ledger_id, writer.metadata.last_segment.ensemble[0])
        healer = here.healer().start()
        await here.until_tried(writer.ledger_id)  # without a spare, it is parked until its retry time
        if why == "paused":
            await here.marks.disable()
        else:
            while (await here.marks.lock(writer.ledger_id)) is None:
                await asyncio.sleep(0.01)
        searches = 0
        take = healer.marks.take

        async def counted(**others: object) -> object:
            nonlocal searches
            searches += 1
            return await take(**others)  # type: ignore[arg-type]

        healer.marks.take = counted  # type: ignore[assignment, method-assign]
        await asyncio.sleep(600)
        assert searches < 60
        here.ledgers.bookies[BookieId("spare:3181")] = True
        if why == "paused":
            await here.marks.enable()
        else:
            await here.store.delete(LAYOUT.mark_lock(writer.ledger_id), version=None)
        await here.until_healed(writer.ledger_id, limit_s=40)

    play(scene, bookies=3)


def test_a_back_off_applies_to_all_workers() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(30)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        healers = [here.healer().start() for _ in range(3)]
        await asyncio.sleep(1_000)
        record = await here.records.get(writer.ledger_id)
        assert record is not None
        assert record.attempts == sum(healer.worker.stats.attempts_failed for healer in healers)
        assert 6 <= record.attempts <= 10, "one back-off of 5, 10, 20 ... 300 s for all workers together"
        assert [event.kind for event in await here.records.history()] == [], "a blocked ledger is not unrecoverable"

    play(scene, bookies=3)


def test_the_record_names_the_worker_and_the_report_its_rate() -> None:
    async def scene(here: World) -> None:
        writer = await here.write(2_000, size=10_000)
        lost = writer.metadata.last_segment.ensemble[1]
        here.lose(lost)
        await here.mark(writer.ledger_id, lost)
        here.healer("copier-1", budget={"bytes_per_s_max": MIB, "bytes_per_s_min": MIB}).start()
        await asyncio.sleep(12)
        (report,) = await here.records.reports()
        assert (report.name, report.state, report.ledger_id) == ("copier-1", "copying", writer.ledger_id)
        assert report.bytes_per_s == pytest.approx(MIB, rel=0.3)
        assert report.bytes_done_total == pytest.approx(12 * MIB, rel=0.3)
        assert report.budget_bytes_per_s == MIB
        record = await here.records.get(writer.ledger_id)
        assert record is not None
        assert (record.state, record.worker) == (RecoveryState.COPYING, "copier-1")
        await here.until_healed(writer.ledger_id)
        await asyncio.sleep(12)
        (report,) = await here.records.reports()
        assert (report.state, report.ledger_id) == ("idle", None)

    play(scene)


def test_copying_keeps_to_the_rate_within_a_fifth() -> None:
    async def scene(here: World) -> None:
        writers = [await here.write(300, size=20_000) for _ in range(6)]
        lost = NAMES[1]
        here.lose(lost)
        concerned = [w.ledger_id for w in writers if lost in w.metadata.last_segment.ensemble]
        for ledger_id in concerned:
            await here.mark(ledger_id, lost)
        began = asyncio.get_running_loop().time()
        rate = 2 * MIB
        healer = here.healer(workers=3, budget={"bytes_per_s_max": rate, "bytes_per_s_min": rate}).start()
        await here.until_healed(*concerned)
        seconds = asyncio.get_running_loop().time() - began
        assert len(concerned) >= 3
        assert healer.worker.stats.bytes_copied / seconds == pytest.approx(rate, rel=0.2)

    play(scene, bookies=5)


@pytest.mark.parametrize("seed", range(12))
def test_ledgers_are_whole_in_the_end_after_random_faults(seed: int) -> None:
    """Bookies leave and return, copies are lost or damaged, workers are killed; ledgers are marked as by an auditor."""

    async def scene(here: World) -> None:
        chance = random.Random(seed)
        sizes = [(3, 3, 2), (3, 2, 2), (4, 3, 2), (2, 2, 2)]
        written = []
        for _ in range(12):
            ensemble_size, write_quorum, ack_quorum = chance.choice(sizes)
            count = chance.randrange(1, 60)
            writer = await here.write(
                count,
                is_closed=chance.random() < 0.8,
                ensemble_size=ensemble_size,
                write_quorum=write_quorum,
                ack_quorum=ack_quorum,
            )
            written.append((writer.ledger_id, count))
        healers = [here.healer(workers=2).start() for _ in range(2)]
        all_bookies = list(here.ledgers.bookies)
        for _ in range(25):
            match chance.choice(["leave", "return", "rot", "kill", "wait", "wait"]):
                case "leave" if len(here.ledgers.bookies) > len(all_bookies) - 1:
                    lost = chance.choice(sorted(here.ledgers.bookies))
                    here.lose(lost)
                    for ledger_id, _ in written:
                        metadata = await here.client.metadata(ledger_id)
                        if any(lost in segment.ensemble for segment in metadata.segments):
                            await here.mark(ledger_id, lost)
                case "return":
                    for bookie_id in all_bookies:
                        here.ledgers.bookies[bookie_id] = True
                case "rot" if len(here.ledgers.bookies) == len(all_bookies):
                    ledger_id, count = chance.choice(written)
                    if not await here.is_marked(ledger_id):
                        ledger = here.ledgers.find(ledger_id)
                        entry_id = chance.randrange(count)
                        ensemble = ledger.metadata.segment_of(EntryId(entry_id)).ensemble
                        holder = ensemble[entry_id % len(ensemble)]
                        (verdict,) = await here.client.read_replicas(
                            ledger_id, ledger.metadata, holder, [EntryId(entry_id)], lambda r: r.verdict
                        )
                        if verdict is Verdict.GOOD:
                            if chance.random() < 0.5:
                                ledger.copies.lose(holder, entry_id)
                            else:
                                ledger.copies.damage(ledger.metadata, ledger.entries, holder, entry_id)
                            await here.mark(ledger_id, holder, reason=Reason.ENTRY_MISSING)
                case "kill":
                    place = chance.randrange(2)
                    await healers[place].kill()
                    healers[place] = here.healer(workers=2).start()
                case _:
                    await asyncio.sleep(chance.choice([0.1, 3, 40]))
        for bookie_id in all_bookies:
            here.ledgers.bookies[bookie_id] = True
        for ledger_id, _ in written:
            if not here.ledgers.find(ledger_id).is_closed:
                writer = here.ledgers.find(ledger_id).writer
                assert writer is not None
                await writer.close()
        await here.until_healed(*(ledger_id for ledger_id, _ in written), limit_s=5_000)
        for ledger_id, count in written:
            await here.assert_whole(ledger_id, payloads(count))

    play(scene, bookies=6)
