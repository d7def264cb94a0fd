"""The auditor in a cluster of metadata: who is marked, when, and what outages, switches and other leaders do to it."""

import asyncio
from collections.abc import Callable

import pytest
from auditor_world import EPOCH_MS, LAYOUT, World, clock_ms
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.layout.layout import CheckKind
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryState
from bindery_metadata.stores.store import Check, Create
from bindery_recovery.cluster import bookie_watch
from scripted import ledger
from simulated import simulate

B1, B2 = BookieId("b1"), BookieId("b2")
LEDGERS = {
    1: ledger(("b1", "b2", "b3")),
    2: ledger(("b2", "b3", "b4")),
    3: ledger(("b2", "b3", "b4"), ("b1", "b3", "b4"), firsts=(0, 5), last=None),
    5_000_000_000: ledger(("b4", "b3", "b1")),
}
OF_B1 = {1: ("b1",), 3: ("b1",), 5_000_000_000: ("b1",)}


def cluster(**auditor: object) -> Callable[[Callable[[World], object]], Callable[[], None]]:
    """Runs a scenario in a world with LEDGERS and one auditor that leads and is settled."""

    def decorate(scenario):  # type: ignore[no-untyped-def]
        def test() -> None:
            async def run() -> None:
                world = await World.make(ledgers=LEDGERS)
                world.first = await world.start_auditor(**auditor)  # type: ignore[attr-defined, arg-type]
                await asyncio.sleep(60)
                assert await world.marked() == {}
                await scenario(world)
                assert not world.first.task.done()  # type: ignore[attr-defined]

            simulate(run())

        test.__name__ = scenario.__name__
        return test

    return decorate


# --- lost bookies -----------------------------------------------------------------------------------------------------


@cluster()
async def test_the_ledgers_of_a_lost_bookie_are_marked_after_the_delay_with_reason_and_size(world: World) -> None:
    await world.stop_bookie("b1")
    await asyncio.sleep(118)
    assert await world.marked() == {}
    await asyncio.sleep(6)
    assert await world.marked() == OF_B1
    record = await world.records.get(LedgerId(1))
    assert record is not None
    assert (record.state, record.reason, record.bookies) == (RecoveryState.WAITING, Reason.BOOKIE_LOST, ("b1",))
    assert (record.missing_entries, record.missing_bytes) == (10, 1000)
    assert abs(record.first_marked_ms - clock_ms()) < 10_000
    open_record = await world.records.get(LedgerId(3))
    assert open_record is not None
    assert open_record.missing_bytes is None
    assert await world.kinds() == ["leader", "bookie_absent", "bookie_lost"]
    lost = (await world.records.history(1))[0]
    assert lost.text == "b1 is lost: 3 of the 3 ledgers that name it were marked now"
    await asyncio.sleep(3600)
    assert [mark.version for mark in await world.mark_list()] == [0, 0, 0], "marked once, and then left alone"


@cluster()
async def test_a_bookie_that_returns_within_its_delay_costs_nothing(world: World) -> None:
    for _ in range(4):
        await world.stop_bookie("b1")
        await asyncio.sleep(100)
        await world.start_bookie("b1")
        await asyncio.sleep(30)
    await asyncio.sleep(300)
    assert await world.marked() == {}
    assert await world.kinds() == ["leader", *["bookie_absent", "bookie_back"] * 4]
    assert (await world.records.history(1))[0].fields["returns_in_time"] == 4, "a flapping bookie can be told by it"


@cluster()
async def test_several_lost_at_once_are_not_a_reason_to_hurry(world: World) -> None:
    for name in ("b1", "b2", "b3"):
        await world.stop_bookie(name)
    await asyncio.sleep(100)
    for name in ("b1", "b2"):
        await world.start_bookie(name)
    await asyncio.sleep(30)
    assert await world.marked() == dict.fromkeys(LEDGERS, ("b3",))


@cluster()
async def test_one_that_returns_while_the_ledgers_are_being_read_is_not_marked(world: World) -> None:
    """It comes back between the delay's end and its first mark."""
    await world.stop_bookie("b1")
    state = world.first.auditor.state.audit  # type: ignore[attr-defined]
    while not state.is_running:
        await asyncio.sleep(0.001)
    await world.start_bookie("b1")
    await asyncio.sleep(60)
    assert state.audits == 2
    assert await world.marked() == {}


@cluster(bookie_check_interval_s=600)
async def test_the_regular_check_finds_ledgers_that_came_to_name_a_lost_bookie_later(world: World) -> None:
    await world.stop_bookie("b1")
    await world.wait_for_marks(3, timeout_s=130)
    await world.add_ledger(7, ledger(("b1", "b2", "b3")))
    await asyncio.sleep(300)
    assert 7 not in await world.marked()
    await asyncio.sleep(400)
    assert (await world.marked())[7] == ("b1",)


@cluster(bookie_check_interval_s=600)
async def test_a_bookie_without_a_cookie_that_ledgers_name_gets_its_delay_too(world: World) -> None:
    await world.add_ledger(7, ledger(("ghost", "b2", "b3")))
    await asyncio.sleep(600)
    waited_s = await world.wait_for_marks(1, timeout_s=300)
    assert 30 < waited_s < 125
    assert await world.marked() == {7: ("ghost",)}


@cluster()
async def test_read_only_bookies_and_those_that_change_lists_are_not_lost(world: World) -> None:
    await world.marks.set_lost_bookie_delay_s(0)
    for round_ in range(200):
        await world.move_bookie("b1", read_only=round_ % 2 == 0)
        await asyncio.sleep(0.0013 * (round_ % 7))
    await world.move_bookie("b1", read_only=True)
    await asyncio.sleep(600)
    assert await world.marked() == {}
    assert await world.kinds() == ["leader"]


# --- what operators say -----------------------------------------------------------------------------------------------


@cluster()
async def test_the_delay_is_initialised_and_obeyed_when_it_changes(world: World) -> None:
    assert await world.marks.lost_bookie_delay_s() == 120
    await world.marks.set_lost_bookie_delay_s(1000)
    await world.stop_bookie("b1")
    await asyncio.sleep(500)
    assert await world.marked() == {}
    await world.marks.set_lost_bookie_delay_s(510)
    assert await world.wait_for_marks(3, timeout_s=20) > 5


@cluster()
async def test_writing_the_same_delay_again_asks_for_an_audit_now(world: World) -> None:
    await world.stop_bookie("b1")
    await world.add_ledger(7, ledger(("ghost", "b2", "b3")))
    await asyncio.sleep(20)
    await world.marks.set_lost_bookie_delay_s(120)
    await world.wait_for_marks(4, timeout_s=5)
    assert await world.marked() == {**OF_B1, 7: ("ghost",)}


@cluster()
async def test_watches_that_fire_after_a_broken_connection_ask_for_nothing(world: World) -> None:
    await world.stop_bookie("b1")
    await asyncio.sleep(20)
    store = world.first.store  # type: ignore[attr-defined]
    world.tree.suspend(store)
    await asyncio.sleep(1)
    world.tree.resume(store)
    await asyncio.sleep(60)
    assert await world.marked() == {}
    await world.wait_for_marks(3, timeout_s=60)


@cluster()
async def test_a_rolling_restart_under_leases_marks_nothing_and_a_lease_that_runs_out_does(world: World) -> None:
    for name in ("b1", "b2", "b3", "b4"):
        await world.memberships.set(BookieId(name), Intent.MAINTENANCE, until_ms=clock_ms() + 900_000)
        await world.stop_bookie(name)
        await asyncio.sleep(400)
        await world.start_bookie(name)
        await world.memberships.clear(BookieId(name))
        await asyncio.sleep(10)
    assert await world.marked() == {}
    await world.memberships.set(B1, Intent.MAINTENANCE, until_ms=clock_ms() + 300_000)
    await world.stop_bookie("b1")
    assert 410 < await world.wait_for_marks(3, timeout_s=440) < 430


@cluster(drain_interval_s=30)
async def test_a_draining_bookies_ledgers_are_marked_until_none_names_it(world: World) -> None:
    await world.memberships.set(B1, Intent.DRAINING)
    await world.wait_for_marks(3, timeout_s=5)
    assert await world.marked() == OF_B1
    record = await world.records.get(LedgerId(1))
    assert record is not None
    assert record.reason is Reason.BOOKIE_DRAINING
    held = await world.marks.lock(LedgerId(1))
    await asyncio.sleep(200)
    assert [mark.version for mark in await world.mark_list()] == [0, 0, 0], "a worker at it is not disturbed"
    await world.manager.update(LedgerId(1), lambda _: ledger(("b4", "b2", "b3")))
    assert held is not None
    assert await world.marks.mark_replicated(held)
    await world.add_ledger(9, ledger(("b1", "b2", "b3")))
    await asyncio.sleep(40)
    assert set(await world.marked()) == {3, 9, 5_000_000_000}
    cursor = await world.records.get_cursor("draining")
    assert cursor is not None
    assert cursor["bookies"] == {"b1": {"bytes_left": 2000, "entries_left": 20, "ledgers_left": 3}}


@cluster(drain_interval_s=30)
async def test_the_end_of_a_drain_is_told_once_by_whoever_leads(world: World) -> None:
    async def told() -> list[str]:
        return [kind for kind in await world.kinds() if kind == "drain_finished"]

    await world.memberships.set(B1, Intent.DRAINING)
    await world.wait_for_marks(3, timeout_s=5)
    await asyncio.sleep(100)
    assert await told() == []
    for ledger_id in OF_B1:
        await world.manager.update(LedgerId(ledger_id), lambda _: ledger(("b4", "b2", "b3")))
    await asyncio.sleep(100)
    assert await told() == [], "as long as it is writable it may get new ledgers"
    await world.move_bookie("b1", read_only=True)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"]
    (event,) = [event for event in await world.records.history() if event.kind == "drain_finished"]
    assert event.fields["bookie_id"] == "b1"

    for number in range(200):  # so much happens that it is not among the newest any more
        await world.records.append_history(HistoryEvent(number, "healed", "", {}))
    await world.first.kill()  # type: ignore[attr-defined]
    world.first = await world.start_auditor("second", drain_interval_s=30)  # type: ignore[attr-defined]
    await asyncio.sleep(200)
    assert await told() == ["drain_finished"]

    await world.memberships.clear(B1)
    await asyncio.sleep(100)
    await world.memberships.set(B1, Intent.DRAINING)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"] * 2, "another drain"


@cluster(drain_interval_s=30)
async def test_the_end_of_a_drain_is_taken_back_when_a_ledger_names_the_bookie_again(world: World) -> None:
    """Whoever still took it for writable made one there."""

    async def told() -> list[str]:
        return [kind for kind in await world.kinds() if kind.startswith("drain_")]

    await world.start_bookie("b8", read_only=True)
    await world.memberships.set(BookieId("b8"), Intent.DRAINING)
    await asyncio.sleep(100)
    assert await told() == ["drain_finished"]
    await world.add_ledger(9, ledger(("b8", "b2", "b3")))
    await asyncio.sleep(200)
    assert await told() == ["drain_finished", "drain_goes_on"]
    await world.manager.update(LedgerId(9), lambda _: ledger(("b1", "b2", "b3")))
    await asyncio.sleep(200)
    assert await told() == ["drain_finished", "drain_goes_on", "drain_finished"]


@cluster(drain_interval_s=30)
async def test_a_drain_whose_end_was_told_by_who_waited_for_it_is_not_told_again(world: World) -> None:
    await world.move_bookie("b4", read_only=True)
    await world.memberships.set(BookieId("b4"), Intent.DRAINING)
    fields = {"bookie_id": "b4"}
    await world.records.append_history(HistoryEvent(1, "drain_finished", "", fields))
    await asyncio.sleep(100)
    assert (await world.kinds()).count("drain_finished") == 1


@cluster(drain_interval_s=30)
async def test_a_drain_is_not_finished_while_metadata_cannot_be_read(world: World) -> None:
    await world.store.set(LAYOUT.ledger(LedgerId(2)), b"nonsense", version=None)
    await world.move_bookie("b4", read_only=True)
    await world.memberships.set(BookieId("b4"), Intent.DRAINING)
    await asyncio.sleep(100)
    assert "drain_finished" not in await world.kinds()


@cluster()
async def test_a_removed_bookie_that_is_not_there_needs_no_delay(world: World) -> None:
    await world.stop_bookie("b1")
    await world.memberships.set(B1, Intent.REMOVED)
    await world.wait_for_marks(3, timeout_s=5)
    assert await world.marked() == OF_B1


@cluster()
async def test_while_disabled_nothing_is_marked_and_enabling_looks_anew(world: World) -> None:
    await world.marks.disable()
    await world.stop_bookie("b1")
    await world.stop_bookie("b2")
    await asyncio.sleep(2000)
    assert await world.marked() == {}
    state = world.first.auditor.state.audit  # type: ignore[attr-defined]
    assert (state.audits, state.postponed) == (1, 0), "there was none but that at the start"
    await world.start_bookie("b2")
    await world.marks.enable()
    await world.wait_for_marks(3, timeout_s=10)
    assert await world.marked() == OF_B1


def test_a_switch_thrown_in_the_middle_of_marking_stops_it() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={n: ledger(("b1", "b2", "b3")) for n in range(300)})
        await world.start_auditor(delay_s=10, limits={"marks_in_flight": 2})
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await world.wait_for_marks(20, timeout_s=30)
        await world.marks.disable()
        await asyncio.sleep(0.1)
        stopped = len(await world.marked())
        assert stopped < 150
        await asyncio.sleep(300)
        assert len(await world.marked()) == stopped
        await world.marks.enable()
        await world.wait_for_marks(300, timeout_s=30)

    simulate(scenario())


def test_a_bookie_that_returns_in_the_middle_of_its_marking_ends_it() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={n: ledger(("b1", "b2", "b3")) for n in range(600)})
        await world.start_auditor(delay_s=10, limits={"marks_in_flight": 1, "debounce_s": 0.1})
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await world.wait_for_marks(20, timeout_s=30)
        await world.start_bookie("b1")
        await asyncio.sleep(60)
        assert len(await world.marked()) < 200

    simulate(scenario())


def test_a_bookie_that_changes_lists_between_two_readings_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.move_bookie("b1", read_only=True)
        running = await world.start_auditor(delay_s=0)
        await asyncio.sleep(60)
        children = running.store.children
        moves = 0

        async def move_after_the_first_reading(path, *, watch=None):  # type: ignore[no-untyped-def]
            nonlocal moves
            names = await children(path, watch=watch)
            if path == LAYOUT.available and moves == 0:
                moves += 1
                await world.move_bookie("b1", read_only=False)
            return names

        monkeypatch.setattr(running.store, "children", move_after_the_first_reading)
        await asyncio.sleep(60)
        assert moves == 1
        assert await world.kinds() == ["leader"]

    simulate(scenario())


# --- outages and other faults -----------------------------------------------------------------------------------------


async def outage(world: World, *, settle_s: float) -> dict[int, tuple[str, ...]]:
    """The store is away for two minutes; every session ends. Bookies are back 2 to 12 s after it. What gets marked?"""
    first = await world.start_auditor(delay_s=0, settle_s=settle_s)
    await asyncio.sleep(60)
    world.tree.suspend(first.store)
    await asyncio.sleep(120)
    for name in ("b1", "b2", "b3", "b4"):
        world.tree.expire(world.bookies[name])
    world.tree.resume(first.store)
    for name in ("b1", "b2", "b3", "b4"):
        await asyncio.sleep(2.5)
        await world.start_bookie(name)
    await asyncio.sleep(120)
    assert not first.task.done()
    return await world.marked()


def test_an_outage_of_the_store_makes_nobody_lost() -> None:
    async def scenario(settle_s: float) -> dict[int, tuple[str, ...]]:
        return await outage(await World.make(ledgers=LEDGERS), settle_s=settle_s)

    assert simulate(scenario(15.0)) == {}
    assert simulate(scenario(0.0)) != {}, "it is the settling that does it"


@pytest.mark.parametrize("operation", ["get", "children"])
def test_nothing_is_marked_from_a_part_of_the_metadata(operation: str) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        auditor = await world.start_auditor(delay_s=10, limits={"retry_s": 20})
        await asyncio.sleep(60)
        store = auditor.store
        path = LAYOUT.ledger(LedgerId(5_000_000_000))

        def is_meant(name: str, asked: str) -> bool:
            return name == operation and path.startswith(asked) and len(asked) > len("/ledgers/000")

        store.fail_next(MetadataUnavailable("away"), matching=is_meant)
        await world.stop_bookie("b1")
        await asyncio.sleep(25)
        assert await world.marked() == {}
        assert auditor.auditor.state.audit.postponed == 1
        assert auditor.auditor.state.audit.last_error == "away"
        await world.wait_for_marks(3, timeout_s=20)
        assert auditor.auditor.state.audit.last_error == ""

    simulate(scenario())


@cluster()
async def test_metadata_that_nobody_understands_keep_no_other_ledger_from_being_healed(world: World) -> None:
    await world.store.set(LAYOUT.ledger(LedgerId(2)), b"garbage", version=None)
    await world.stop_bookie("b1")
    await world.wait_for_marks(3, timeout_s=130)
    assert world.first.auditor.state.audit.unreadable == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["deleted", "moved"])
def test_a_ledger_that_changes_after_it_was_read_is_marked_as_it_is(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        auditor = await world.start_auditor(delay_s=10)
        await asyncio.sleep(60)
        look = bookie_watch.BookieWatch.look
        looks_in_audit = 0

        async def change_at_the_second_look(watch):  # type: ignore[no-untyped-def]
            nonlocal looks_in_audit
            looks_in_audit += auditor.auditor.state.audit.is_running
            if looks_in_audit == 2:
                if change == "deleted":
                    await world.manager.delete(LedgerId(1))
                else:
                    await world.manager.update(LedgerId(1), lambda _: ledger(("b4", "b2", "b3")))
            return await look(watch)

        monkeypatch.setattr(bookie_watch.BookieWatch, "look", change_at_the_second_look)
        await world.stop_bookie("b1")
        await asyncio.sleep(30)
        assert looks_in_audit >= 2
        assert set(await world.marked()) == {3, 5_000_000_000}

    simulate(scenario())


# --- leaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies_after_s", [5, 60, 110])
def test_a_leader_that_dies_within_the_delay_neither_restarts_it_nor_shortens_it(dies_after_s: int) -> None:
    async def scenario() -> float:
        world = await World.make(ledgers=LEDGERS)
        first = await world.start_auditor("first")
        await world.start_auditor("second")
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await asyncio.sleep(dies_after_s)
        await first.kill()
        waited_s = await world.wait_for_marks(3, timeout_s=300)
        assert (await world.kinds()).count("bookie_absent") == 1
        return dies_after_s + waited_s

    lasted_s = simulate(scenario())
    assert 120 <= lasted_s <= 120 + 25, "a hand-over costs what nobody observed, and the settling"


def test_leaders_that_die_again_and_again_get_there() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.stop_bookie("b1")
        for number in range(5):
            auditor = await world.start_auditor(f"auditor-{number}")
            await asyncio.sleep(50)
            assert await world.marked() == ({} if number < 2 else OF_B1)
            await auditor.kill()

    simulate(scenario())


def test_a_leader_whose_term_is_over_writes_nothing_and_ends() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor("other", delay_s=10)
        running.task.cancel()
        await asyncio.wait([running.task])
        store = running.store
        vote = await store.create(f"{LAYOUT.auditor_election}/V_", ephemeral=True, sequential=True, make_parents=True)
        leadership = Leadership(store, name="old", vote_path=vote, version=0, session_id=store.session_id)
        term = asyncio.create_task(running.auditor.lead(leadership))
        await asyncio.sleep(60)
        assert not term.done()
        await world.store.delete(vote, version=None)  # another leads; the old one has not heard of it
        before = {path: world.tree.znodes.get(path).data for path in await tree_of(world)}
        await world.stop_bookie("b1")
        await asyncio.sleep(30)
        after = {path: world.tree.znodes.get(path).data for path in await tree_of(world)}
        before.pop(LAYOUT.bookie(B1, read_only=False))
        assert after == before
        with pytest.raises(NotLeader):
            await term
        assert running.auditor.state.is_leading is False

    simulate(scenario())


def test_every_write_of_a_term_checks_the_vote_in_the_same_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for empty directories, which say nothing. Loss, drain, removal, delay, checks: all that a leader writes."""

    async def scenario() -> None:
        world = await World.make(6, ledgers={n: ledger(("b1", "b2", "b3")) for n in range(30)})
        world.replicas = {(7, "b2"): Verdict.ABSENT}
        running = await world.start_auditor(
            delay_s=10, ledger_check_interval_s=100, placement_check_interval_s=100, replica_check_interval_s=100
        )
        written: set[str] = set()
        apply = world.tree.znodes.apply

        def watched(ops, *, owner, now_ms):  # type: ignore[no-untyped-def]
            if owner == running.store.session_id:
                for op in ops:
                    empty = isinstance(op, Create) and not op.data
                    vote = op.path.startswith(LAYOUT.auditor_election)
                    if not (empty or vote or isinstance(op, Check)):
                        assert isinstance(ops[0], Check), op
                        assert ops[0].path.startswith(f"{LAYOUT.auditor_election}/V_")
                        written.add(op.path)
            return apply(ops, owner=owner, now_ms=now_ms)

        monkeypatch.setattr(world.tree.znodes, "apply", watched)
        await asyncio.sleep(60)
        await world.stop_bookie("b1")
        await world.memberships.set(B2, Intent.DRAINING, drain={"ledgers_total": 30})
        await asyncio.sleep(200)
        assert not running.task.done()
        for part in (
            "lostBookieRecoveryDelay", "checkallledgersctime", "placementpolicycheckctime", "replicascheckctime",
            "urL0000000000", "/bindery/recovery/ledgers", "/bindery/recovery/history", "cursors/lost-bookies",
            "cursors/draining", "cursors/ledger-check", "cursors/placement-check", "cursors/replicas-check",
        ):  # fmt: skip
            assert any(part in path for path in written), part

    simulate(scenario())


async def tree_of(world: World, path: str = "/") -> list[str]:
    found = []
    for name in await world.store.children(path):
        child = f"{path.rstrip('/')}/{name}"
        found += [child, *await tree_of(world, child)]
    return found


def test_the_end_of_a_term_leaves_no_task_behind() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor(ledger_check_interval_s=100, ledger_check_rate=0.01)
        await asyncio.sleep(60)
        assert running.auditor.state.is_leading
        assert running.auditor.full_check is not None
        await running.election.resign()
        assert not running.auditor.state.is_leading
        await asyncio.sleep(1)
        assert {task for task in asyncio.all_tasks() if task is not asyncio.current_task()} <= {running.task}

    simulate(scenario())


# --- periodic checks --------------------------------------------------------------------------------------------------


def test_placement_and_replicas_are_counted_at_their_intervals() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        racks = {BookieId("b1"): "/a", BookieId("b2"): "/a", BookieId("b3"): "/a", BookieId("b4"): "/b"}
        running = await world.start_auditor(
            placement_check_interval_s=1000, replica_check_interval_s=1000, racks=lambda: racks
        )
        await asyncio.sleep(60)
        checks = running.auditor.state.checks
        assert checks[CheckKind.PLACEMENT].result == {
            "ledgers": 3, "open_ledgers": 1, "strict": 2, "soft": 1, "failed": 0, "unreadable": 0,
        }  # fmt: skip
        assert checks[CheckKind.REPLICAS].result["ledgers"] == 3
        assert checks[CheckKind.REPLICAS].result["entries_below_write_quorum"] == 0
        first_ms = await world.marks.check_time_ms(CheckKind.PLACEMENT)
        assert first_ms is not None
        assert EPOCH_MS < first_ms <= clock_ms()
        await asyncio.sleep(800)
        assert await world.marks.check_time_ms(CheckKind.PLACEMENT) == first_ms
        await asyncio.sleep(300)
        second_ms = await world.marks.check_time_ms(CheckKind.PLACEMENT)
        assert second_ms is not None
        assert second_ms > first_ms
        await world.marks.set_check_time_ms(CheckKind.PLACEMENT, EPOCH_MS - 21 * 86_400_000)
        await asyncio.sleep(70)
        third_ms = await world.marks.check_time_ms(CheckKind.PLACEMENT)
        assert third_ms is not None
        assert third_ms > second_ms, "an operator who sets the time back gets a check soon"
        assert (await world.kinds()).count("check_finished") == 2 + 2 + 1
        assert await world.marked() == {}

    simulate(scenario())
