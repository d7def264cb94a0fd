"""Terms of the auditor: failover, the end of a term, guarded writes and the periodic checks."""

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import pytest
from auditor_world import EPOCH_MS, LAYOUT, LEDGERS, OF_B1, World, clock_ms
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent
from bindery_metadata.coordination.election import Leadership, NotLeader
from bindery_metadata.layout.layout import BinderyLayout, CheckKind
from bindery_metadata.stores.store import Check, Create
from scripted import ledger
from simulated import simulate

B1, B2 = BookieId("b1"), BookieId("b2")


@pytest.mark.parametrize("dies_after_s", [5, 60, 110])
def test_a_failover_within_the_delay_neither_restarts_nor_shortens_it(dies_after_s: int) -> None:
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
    assert 120 <= lasted_s <= 120 + 25, "a failover adds the unobserved time and the quiet time"


def test_the_delay_ends_even_if_leaders_fail_repeatedly() -> None:
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
        await world.store.delete(vote, version=None)  # another auditor leads; the old leader is not notified
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
    """The leader handles a lost and a draining bookie, and all checks run. Empty directories are ignored."""

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
            "lostBookieRecoveryDelay",
            "checkallledgersctime",
            "placementpolicycheckctime",
            "replicascheckctime",
            "urL0000000000",
            "/bindery/recovery/ledgers",
            "/bindery/recovery/history",
            "cursors/lost-bookies",
            "cursors/draining",
            "cursors/ledger-check",
            "cursors/placement-check",
            "cursors/replicas-check",
        ):
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


def test_placement_and_replica_checks_run_at_their_intervals() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        racks = {BookieId("b1"): "/a", BookieId("b2"): "/a", BookieId("b3"): "/a", BookieId("b4"): "/b"}
        running = await world.start_auditor(
            placement_check_interval_s=1000,
            replica_check_interval_s=1000,
            racks=lambda: racks,
            placement_repair=False,
        )
        await asyncio.sleep(60)
        checks = running.auditor.state.checks
        assert checks[CheckKind.PLACEMENT].result == {
            "ledgers": 3,
            "open_ledgers": 1,
            "strict": 2,
            "soft": 1,
            "failed": 0,
            "unreadable": 0,
        }
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


@pytest.mark.parametrize(
    ("is_enabled", "is_blind", "is_pending", "audits", "is_open"),
    [
        (True, False, False, 1, True),
        (False, False, False, 1, False),
        (True, True, False, 1, False),
        (True, False, True, 1, False),
        (True, False, False, 0, False),
    ],
)
def test_checks_of_all_ledgers_wait_while_a_condition_forbids_them(
    *, is_enabled: bool, is_blind: bool, is_pending: bool, audits: int, is_open: bool
) -> None:
    """They wait while recovery is disabled, the store is disconnected, or an audit is pending or none has completed."""

    async def scenario() -> None:
        world = await World.make()
        auditor = (await world.start_auditor()).auditor
        auditor.state.audit.audits = audits
        watch: Any = SimpleNamespace(is_enabled=is_enabled, is_blind=is_blind)
        audit: Any = SimpleNamespace(is_pending=is_pending)
        passed = asyncio.create_task(_finish(auditor._gate(watch, audit)()))
        await asyncio.sleep(10)
        assert passed.done() is is_open
        passed.cancel()

    simulate(scenario())


async def _finish(waiting: Awaitable[None]) -> None:
    await waiting


# --- the state of a term and of its checks ----------------------------------------------------------------------------


def test_the_state_of_a_process_counts_its_terms() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor("auditor-7")
        state = running.auditor.state
        assert (state.is_leading, state.terms, state.leading_since_ms) == (False, 0, 0)
        await asyncio.sleep(60)
        assert (state.is_leading, state.terms) == (True, 1)
        assert EPOCH_MS <= state.leading_since_ms < EPOCH_MS + 5_000
        assert running.auditor.watch is not None
        (event,) = await world.records.history()
        assert (event.kind, event.text, event.fields) == (
            "leader",
            "auditor-7 is the auditor",
            {"name": "auditor-7"},
        )
        await running.election.resign()
        assert (state.is_leading, state.terms) == (False, 1)
        assert running.auditor.watch is None

    simulate(scenario())


def test_a_term_begins_as_soon_as_the_observed_absences_can_be_read() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor(limits={"retry_s": 7})
        cursor = BinderyLayout().recovery_cursor("lost-bookies")
        for _ in range(2):
            running.store.fail_next(MetadataUnavailable("away"), matching=lambda _, path: path == cursor)
        await asyncio.sleep(13)
        assert running.auditor.state.terms == 0
        await asyncio.sleep(5)
        assert running.auditor.state.terms == 1
        assert not running.task.done()

    simulate(scenario())


def test_a_check_that_fails_reports_its_error_until_it_succeeds() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        loop = asyncio.get_running_loop()
        attempts: list[float] = []
        is_broken = True

        def racks() -> dict[BookieId, str]:
            attempts.append(loop.time())
            if is_broken:
                raise MetadataUnavailable("no racks")
            return {}

        running = await world.start_auditor(
            placement_check_interval_s=1000, racks=racks, limits={"retry_s": 7}, placement_repair=False
        )
        check = running.auditor.state.checks[CheckKind.PLACEMENT]
        await asyncio.sleep(60)
        assert len(attempts) > 2
        assert attempts[1] - attempts[0] == pytest.approx(7, abs=0.1)
        assert "no racks" in check.last_error
        assert (check.is_running, check.finished_ms, check.result) == (False, 0, {})
        assert EPOCH_MS < check.started_ms <= clock_ms()
        assert await world.marks.check_time_ms(CheckKind.PLACEMENT) is None
        is_broken = False
        await asyncio.sleep(10)
        assert check.last_error == ""
        assert check.finished_ms >= check.started_ms > EPOCH_MS + 60_000
        assert check.result["ledgers"] == 3
        assert (await world.records.history(1))[0].text.startswith("3 closed ledgers: ")

    simulate(scenario())


def test_a_check_in_progress_is_visible_and_its_duration_is_known_afterwards() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor(ledger_check_interval_s=1000, ledger_check_rate=0.1)
        auditor, check = running.auditor, running.auditor.state.checks[CheckKind.LEDGERS]
        assert not check.is_running
        await asyncio.sleep(30)
        assert check.is_running
        assert auditor.full_check is not None
        assert (check.finished_ms, check.duration_s) == (0, 0.0)
        await asyncio.sleep(60)
        assert not check.is_running
        assert auditor.full_check is None
        assert check.duration_s == pytest.approx((check.finished_ms - check.started_ms) / 1000, abs=0.1)
        assert 25 < check.duration_s < 45, "four ledgers at one ledger per ten seconds"
        assert check.result["ledgers"] == 4

    simulate(scenario())


def test_checks_without_an_interval_never_run() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        running = await world.start_auditor()
        await asyncio.sleep(300)
        assert [check.started_ms for check in running.auditor.state.checks.values()] == [0, 0, 0]
        assert "check_finished" not in await world.kinds()

    simulate(scenario())


# --- when a check is due ----------------------------------------------------------------------------------------------


async def seconds_until_the_placement_check(world: World) -> float | None:
    """Start an auditor and return the seconds until its first placement check; None: it does not run soon."""
    auditor = (await world.start_auditor(placement_check_interval_s=1000)).auditor
    for waited_s in range(100):
        if auditor.state.checks[CheckKind.PLACEMENT].finished_ms:
            return waited_s
        await asyncio.sleep(1)
    return None


@pytest.mark.parametrize(
    ("ago_s", "expected_s"),
    [
        pytest.param(1001, 17, id="the interval has passed"),
        pytest.param(940, 61, id="a minute of the interval is left"),
        pytest.param(400, None, id="most of the interval is left"),
        pytest.param(-3500, None, id="a small clock skew"),
        pytest.param(-3700, 17, id="a time in the far future would delay the check too long"),
    ],
)
def test_a_check_is_due_an_interval_after_its_last_end(ago_s: int, expected_s: float | None) -> None:
    async def scenario() -> float | None:
        world = await World.make(ledgers=LEDGERS)
        await world.marks.set_check_time_ms(CheckKind.PLACEMENT, clock_ms() - ago_s * 1000)
        return await seconds_until_the_placement_check(world)

    assert simulate(scenario()) == expected_s


def test_a_check_whose_time_is_unreadable_runs_at_once() -> None:
    async def scenario() -> float | None:
        world = await World.make(ledgers=LEDGERS)
        await world.store.create(LAYOUT.check_time(CheckKind.PLACEMENT), b"?", make_parents=True)
        return await seconds_until_the_placement_check(world)

    assert simulate(scenario()) == 17, "after the quiet time and the first audit"


def test_an_unfinished_check_of_all_ledgers_continues_although_its_interval_has_not_passed() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.marks.set_check_time_ms(CheckKind.LEDGERS, clock_ms())
        await world.records.put_cursor("ledger-check", {"started_ms": EPOCH_MS, "next_ledger": 3})
        running = await world.start_auditor(ledger_check_interval_s=100_000)
        await asyncio.sleep(60)
        assert running.auditor.state.checks[CheckKind.LEDGERS].finished_ms > EPOCH_MS
        assert {ledger_id for ledger_id, _ in world.checked} == {3, 5_000_000_000}

    simulate(scenario())


# --- what the checks know ---------------------------------------------------------------------------------------------


def test_placement_is_checked_in_one_rack_if_racks_are_unknown_and_without_draining_bookies() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        await world.memberships.set(B2, Intent.DRAINING, drain={"ledgers_total": 3})
        running = await world.start_auditor(placement_check_interval_s=1000)
        await asyncio.sleep(60)
        result = running.auditor.state.checks[CheckKind.PLACEMENT].result
        assert (result["ledgers"], result["failed"], result["strict"] + result["soft"]) == (3, 2, 1)
        cursor = await world.records.get_cursor("placement-check")
        assert cursor is not None
        assert cursor["last_result"] == result
        assert EPOCH_MS < cursor["last_finished_ms"] <= clock_ms()

    simulate(scenario())


def test_the_check_of_all_ledgers_marks_missing_copies_but_not_those_of_a_bookie_that_may_return() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers=LEDGERS)
        world.replicas = {(1, "b2"): Verdict.ABSENT}
        await world.stop_bookie("b3")
        await world.start_auditor(delay_s=100_000, ledger_check_interval_s=1000)
        await asyncio.sleep(100)
        assert await world.marked() == {1: ("b2",)}

    simulate(scenario())
