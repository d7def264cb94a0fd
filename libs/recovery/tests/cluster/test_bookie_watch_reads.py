"""What a BookieWatch knows after its reads: bookies, the delay, the switch, and what it stores for the next leader."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from auditor_world import EPOCH_MS, LAYOUT, World, clock_ms
from bindery_core.errors import MetadataUnavailable, NoSuchNode
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.recovery.recovery_records import HistoryEvent
from bindery_metadata.stores.memory import MemoryStore
from bindery_recovery.cluster.bookie_watch import AuditorLimits, BookieSnapshot, BookieWatch
from bindery_recovery.cluster.lost_bookies import Phase
from simulated import simulate

B1, B2, B3 = (BookieId(f"b{number}") for number in (1, 2, 3))


class Bench:
    """The watch of an elected leader; its coroutines run only if a test starts them."""

    def __init__(self, world: World, store: MemoryStore, vote: str, *, delay_s: int, limits: dict[str, Any]) -> None:
        self.world = world
        self.store = store
        self.vote = vote
        self.watch = BookieWatch(
            store,
            LAYOUT,
            world.marks,
            world.records,
            world.memberships,
            leadership=Leadership(store, name="leader", vote_path=vote, version=0, session_id=store.session_id),
            delay_s=delay_s,
            limits=AuditorLimits(**{"settle_s": 0.0, **limits}),
            clock_ms=clock_ms,
        )
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *names: str) -> list[asyncio.Task[None]]:
        self._tasks += [asyncio.create_task(getattr(self.watch, name)()) for name in names]
        return self._tasks

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def watching(
    *, delay_s: int = 120, bookies: int = 3, **limits: Any
) -> Callable[[Callable[[Bench], Awaitable[None]]], Callable[[], None]]:
    """Turn a scenario into a test that runs it with a watch that began its term."""

    def decorate(scenario: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            async def run() -> None:
                world = await World.make(bookies)
                store = world.tree.connect()
                vote = await store.create(
                    f"{LAYOUT.auditor_election}/V_", ephemeral=True, sequential=True, make_parents=True
                )
                bench = Bench(world, store, vote, delay_s=delay_s, limits=limits)
                end = await bench.watch.begin()
                try:
                    await scenario(bench)
                finally:
                    await bench.stop()
                    end()

            simulate(run())

        test.__name__ = scenario.__name__  # type: ignore[attr-defined]
        return test

    return decorate


# --- bookies ----------------------------------------------------------------------------------------------------------


@watching()
async def test_a_poll_finds_registrations_cookies_and_memberships(bench: Bench) -> None:
    world = bench.world
    await world.move_bookie("b2", read_only=True)
    await world.stop_bookie("b3")
    await world.memberships.set(B1, Intent.DRAINING, drain={"ledgers_total": 3})
    await world.memberships.set(B2, Intent.MAINTENANCE, until_ms=clock_ms() + 1000)
    await world.memberships.set(B3, Intent.REMOVED)
    snapshot = await bench.watch.poll()
    assert snapshot is bench.watch.snapshot
    assert snapshot.registered == {B1: True, B2: False}
    assert snapshot.known == {B1, B2, B3}
    assert (snapshot.draining, snapshot.maintained, snapshot.removed) == ({B1}, {B2}, {B3})
    assert snapshot.draining_since_ms == {B1: EPOCH_MS}
    assert snapshot.gone == {B3}
    assert bench.watch.changed.is_set()


def test_a_removed_bookie_that_is_registered_is_not_gone() -> None:
    snapshot = BookieSnapshot(registered={B1: True}, removed=frozenset({B1, B2}))
    assert snapshot.gone == {B2}


@watching()
async def test_a_bookie_in_both_lists_is_writable(bench: Bench) -> None:
    await bench.world.bookies["b1"].create(LAYOUT.bookie(B1, read_only=True), ephemeral=True)
    assert (await bench.watch.poll()).registered == {B1: True, B2: True, B3: True}


@watching(bookies=1)
async def test_names_that_are_no_bookie_ids_are_ignored(bench: Bench) -> None:
    await bench.world.store.create(f"{LAYOUT.available}/not a bookie", b"")
    assert (await bench.watch.poll()).registered == {B1: True}


@watching(bookies=1)
async def test_the_list_of_read_only_bookies_may_be_missing_but_not_that_of_writable_ones(bench: Bench) -> None:
    store = bench.world.store
    await store.delete(LAYOUT.available_readonly, version=None)
    assert (await bench.watch.poll()).registered == {B1: True}
    await bench.world.stop_bookie("b1")
    await store.delete(LAYOUT.available, version=None)
    with pytest.raises(NoSuchNode):
        await bench.watch.poll()


@watching()
async def test_bookies_without_a_cookie_count_as_known_until_they_have_one(bench: Bench) -> None:
    ghost = BookieId("ghost")
    bench.watch.without_cookie = {ghost, B1}
    await bench.watch.poll()
    assert bench.watch.without_cookie == {ghost}
    assert list(bench.watch.lost.absences) == [ghost]


@watching(delay_s=10)
async def test_a_bookie_is_due_after_the_delay_and_definitely_lost_from_then_on(bench: Bench) -> None:
    watch = bench.watch
    await watch.poll()
    await bench.world.stop_bookie("b1")
    await watch.poll()
    assert (watch.left_s(B1), watch.left_s(B2)) == (10.0, None)
    assert (watch.due(), watch.definitely_lost()) == (frozenset(), frozenset())
    await asyncio.sleep(10)
    watch.observe()
    assert watch.due() == watch.definitely_lost() == {B1}
    watch.lost.absences[B1].phase = Phase.HANDLED
    assert (watch.due(), watch.definitely_lost()) == (frozenset(), {B1})


@watching(delay_s=10)
async def test_a_removed_bookie_is_definitely_lost_at_once(bench: Bench) -> None:
    await bench.world.stop_bookie("b1")
    await bench.world.memberships.set(B1, Intent.REMOVED)
    await bench.watch.poll()
    assert (bench.watch.due(), bench.watch.definitely_lost()) == (frozenset(), {B1})


@watching(delay_s=0)
async def test_without_a_connection_no_bookie_is_lost(bench: Bench) -> None:
    watch = bench.watch
    await bench.world.stop_bookie("b1")
    await bench.world.memberships.set(B2, Intent.REMOVED)
    await bench.world.stop_bookie("b2")
    await watch.poll()
    assert not watch.is_blind
    assert (watch.due(), watch.definitely_lost()) == ({B1}, {B1, B2})
    bench.world.tree.suspend(bench.store)
    await asyncio.sleep(0)
    assert watch.is_blind
    assert (watch.due(), watch.definitely_lost()) == (frozenset(), frozenset())


@watching(settle_s=15.0)
async def test_a_term_begins_with_a_quiet_time(bench: Bench) -> None:
    await asyncio.sleep(14.9)
    assert bench.watch.is_blind
    await asyncio.sleep(0.2)
    assert not bench.watch.is_blind


# --- the coroutine that follows the bookies ---------------------------------------------------------------------------


async def seconds_until(condition: Callable[[], bool], *, limit_s: float = 100) -> float:
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < limit_s
        await asyncio.sleep(0.01)
    return loop.time() - began


@watching(debounce_s=0.5, poll_interval_s=5)
async def test_a_change_is_seen_after_the_debounce_time(bench: Bench) -> None:
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(2)
    await bench.world.stop_bookie("b1")
    assert await seconds_until(lambda: B1 not in bench.watch.snapshot.registered) == pytest.approx(0.5, abs=0.05)


@watching(poll_interval_s=5)
async def test_without_a_change_the_bookies_are_polled_at_an_interval(bench: Bench) -> None:
    """A lease expires without an event."""
    await bench.world.memberships.set(B1, Intent.MAINTENANCE, until_ms=clock_ms() + 7_000)
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(1)
    assert bench.watch.snapshot.maintained == {B1}
    waited_s = await seconds_until(lambda: not bench.watch.snapshot.maintained)
    assert 6 < waited_s <= 11


@watching(poll_interval_s=50, retry_s=3)
async def test_a_poll_that_fails_is_repeated_after_the_retry_pause(bench: Bench) -> None:
    bench.store.fail_next(MetadataUnavailable("away"), matching=lambda op, path: path == LAYOUT.available)
    bench.start("follow_delay", "follow_bookies")
    waited_s = await seconds_until(lambda: bool(bench.watch.snapshot.registered))
    assert waited_s == pytest.approx(3, abs=0.1)


@watching(delay_s=7, poll_interval_s=50)
async def test_a_bookie_that_becomes_due_is_polled_at_that_time(bench: Bench) -> None:
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(2)
    await bench.world.stop_bookie("b1")
    assert await seconds_until(lambda: bool(bench.watch.due())) == pytest.approx(7.5, abs=0.1)


@watching()
async def test_a_leader_whose_vote_is_gone_ends(bench: Bench) -> None:
    await bench.world.marks.set_lost_bookie_delay_s(120)
    await bench.world.store.delete(bench.vote, version=None)
    bench.watch.record(HistoryEvent(clock_ms(), "leader", "text", {}))
    tasks = bench.start("follow_delay", "follow_bookies")
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    _, bookies = tasks
    with pytest.raises(NotLeader):
        bookies.result()


@watching()
async def test_a_missing_delay_is_not_written_by_a_leader_whose_vote_is_gone(bench: Bench) -> None:
    await bench.world.store.delete(bench.vote, version=None)
    (task,) = bench.start("follow_delay")
    await asyncio.wait([task], timeout=60)
    with pytest.raises(NotLeader):
        task.result()
    assert await bench.world.marks.lost_bookie_delay_s() is None


def test_the_default_limits() -> None:
    limits = AuditorLimits()
    assert (limits.settle_s, limits.debounce_s, limits.poll_interval_s, limits.save_interval_s) == (15.0, 0.5, 5.0, 5.0)
    assert (limits.marks_in_flight, limits.reads_in_flight, limits.checks_in_flight) == (16, 64, 8)


# --- the delay --------------------------------------------------------------------------------------------------------


@watching(delay_s=77)
async def test_a_missing_delay_is_written(bench: Bench) -> None:
    bench.start("follow_delay")
    await asyncio.sleep(1)
    assert await bench.world.marks.lost_bookie_delay_s() == 77
    assert bench.watch.lost.delay_s == 77
    assert not bench.watch.audit_requested


@watching(delay_s=77)
async def test_a_delay_in_the_metadata_takes_precedence(bench: Bench) -> None:
    await bench.world.marks.set_lost_bookie_delay_s(5)
    bench.start("follow_delay")
    await asyncio.sleep(1)
    assert bench.watch.lost.delay_s == 5


@watching()
async def test_only_the_same_delay_written_again_requests_an_audit(bench: Bench) -> None:
    watch, marks = bench.watch, bench.world.marks
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(1)
    await bench.world.stop_bookie("b1")
    await asyncio.sleep(1)
    watch.changed.clear()
    await marks.set_lost_bookie_delay_s(500)
    await asyncio.sleep(0.1)
    assert watch.changed.is_set()
    assert (watch.lost.delay_s, watch.audit_requested, watch.due()) == (500, False, frozenset())
    await marks.set_lost_bookie_delay_s(500)
    await asyncio.sleep(0.1)
    assert (watch.audit_requested, watch.due()) == (True, {B1}), "the delay of absent bookies ends"


@watching(delay_s=0, retry_s=3)
async def test_an_unreadable_delay_does_not_stop_the_watch(bench: Bench) -> None:
    await bench.world.store.create(LAYOUT.lost_bookie_delay, b"?", make_parents=True)
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(1)
    assert set(bench.watch.snapshot.registered) == {B1, B2, B3}
    await bench.world.store.set(LAYOUT.lost_bookie_delay, b"9", version=None)
    assert await seconds_until(lambda: bench.watch.lost.delay_s == 9) < 1


@watching(retry_s=3)
async def test_the_bookies_are_not_polled_before_the_delay_was_read(bench: Bench) -> None:
    store = bench.store
    store.fail_next(MetadataUnavailable("away"), matching=lambda op, path: path == LAYOUT.lost_bookie_delay)
    bench.start("follow_delay", "follow_bookies")
    waited_s = await seconds_until(lambda: bool(bench.watch.snapshot.registered))
    assert waited_s == pytest.approx(3, abs=0.1)


# --- the switch -------------------------------------------------------------------------------------------------------


@watching()
async def test_marking_is_allowed_once_the_switch_was_read_and_not_while_it_is_off(bench: Bench) -> None:
    watch, marks = bench.watch, bench.world.marks
    assert not watch.is_enabled
    bench.start("follow_switch")
    await asyncio.sleep(0.1)
    assert watch.is_enabled
    assert watch.changed.is_set()
    watch.changed.clear()
    await marks.disable()
    await asyncio.sleep(0.1)
    assert not watch.is_enabled
    assert watch.changed.is_set()
    await marks.enable()
    await asyncio.sleep(0.1)
    assert watch.is_enabled


@watching(retry_s=3)
async def test_a_switch_that_cannot_be_read_is_read_again(bench: Bench) -> None:
    bench.world.store.fail_next(
        MetadataUnavailable("away"), matching=lambda op, path: path == LAYOUT.replication_disabled
    )
    bench.start("follow_switch")
    assert await seconds_until(lambda: bench.watch.is_enabled) == pytest.approx(3, abs=0.1)


# --- what is stored ---------------------------------------------------------------------------------------------------


async def stored(bench: Bench) -> Any:
    return await bench.world.records.get_cursor("lost-bookies")


@watching(delay_s=50)
async def test_observed_absences_are_stored_and_resumed_by_the_next_leader(bench: Bench) -> None:
    await bench.watch.poll()
    await bench.world.stop_bookie("b1")
    await bench.watch.poll()
    await asyncio.sleep(20)
    bench.watch.observe()
    await bench.watch.save()
    kept = await stored(bench)
    assert list(kept["bookies"]) == [B1]
    assert (kept["delay_s"], kept["saved_ms"]) == (50, EPOCH_MS + 20_000)
    next_ = Bench(bench.world, bench.store, bench.vote, delay_s=50, limits={})
    (await next_.watch.begin())()
    await next_.watch.poll()
    assert next_.watch.left_s(B1) == pytest.approx(30.0)


@watching()
async def test_absences_that_did_not_change_are_not_stored_again(bench: Bench) -> None:
    await bench.watch.poll()
    await bench.watch.save()
    assert await stored(bench) is None


@watching()
async def test_events_that_could_not_be_written_are_kept_in_order(bench: Bench) -> None:
    def record(*texts: str) -> None:
        for text in texts:
            bench.watch.record(HistoryEvent(clock_ms(), "leader", text, {}))

    record("first")
    await bench.watch.save()
    record("second", "third")
    writes = 0

    def is_third(operation: str, path: str) -> bool:
        nonlocal writes
        writes += operation == "multi"
        return writes == 2

    bench.store.fail_next(MetadataUnavailable("away"), matching=is_third)
    with pytest.raises(MetadataUnavailable):
        await bench.watch.save()
    record("fourth")
    await bench.watch.save()
    texts = [event.text for event in reversed(await bench.world.records.history())]
    assert texts == ["first", "second", "third", "fourth"]


@watching(save_interval_s=20, poll_interval_s=1)
async def test_growing_absences_are_stored_at_an_interval_and_a_new_one_at_once(bench: Bench) -> None:
    bench.start("follow_delay", "follow_bookies")
    await asyncio.sleep(2)
    await bench.world.stop_bookie("b1")
    await asyncio.sleep(1)
    first = await stored(bench)
    assert list(first["bookies"]) == [B1]
    await asyncio.sleep(18)
    assert await stored(bench) == first
    await asyncio.sleep(4)
    second = await stored(bench)
    assert second["saved_ms"] - first["saved_ms"] == pytest.approx(20_000, abs=1_100)


# --- history ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_handled", "text", "returns"),
    [
        (False, "b1 is back after 20 s, in time: nothing was marked for it", 1),
        (True, "b1 is back after 20 s; entries that it still stores are no longer copied", 0),
    ],
)
def test_the_return_of_a_bookie_is_recorded(is_handled: bool, text: str, returns: int) -> None:
    @watching(delay_s=50)
    async def scenario(bench: Bench) -> None:
        watch = bench.watch
        await watch.poll()
        await bench.world.stop_bookie("b1")
        await watch.poll()
        await asyncio.sleep(20.14)
        watch.observe()
        if is_handled:
            watch.lost.absences[B1].phase = Phase.HANDLED
        await bench.world.start_bookie("b1")
        await watch.poll()
        await watch.save()
        back, absent = await bench.world.records.history()
        assert (absent.kind, absent.text) == ("bookie_absent", "b1 is not registered; it counts as lost in 50 s")
        assert absent.fields == {"absent_s": 0.0, "bookie_id": "b1"}
        assert (back.kind, back.text) == ("bookie_back", text)
        assert back.fields == {"absent_s": 20.1, "bookie_id": "b1", "returns_in_time": returns}
        assert back.at_ms == EPOCH_MS + 20_140

    scenario()


@pytest.mark.parametrize(
    ("intent", "text"),
    [
        (Intent.REMOVED, "b1 was declared permanently lost after 20 s; the lost-bookie delay no longer applies to it"),
        (
            Intent.MAINTENANCE,
            "b1 is absent under a maintenance lease, after 20 s; it does not count as lost",
        ),
    ],
)
def test_an_absent_bookie_to_which_the_delay_does_not_apply_any_more_is_recorded(intent: Intent, text: str) -> None:
    @watching(delay_s=50)
    async def scenario(bench: Bench) -> None:
        watch = bench.watch
        await watch.poll()
        await bench.world.stop_bookie("b1")
        await watch.poll()
        await asyncio.sleep(20)
        until_ms = clock_ms() + 100_000 if intent is Intent.MAINTENANCE else None
        await bench.world.memberships.set(B1, intent, until_ms=until_ms)
        await watch.poll()
        await watch.save()
        event = (await bench.world.records.history(1))[0]
        assert (event.kind, event.text) == ("bookie_excused", text)
        assert event.fields == {"absent_s": 20.0, "bookie_id": "b1"}

    scenario()
