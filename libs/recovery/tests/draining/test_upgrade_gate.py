"""Each line of the tables in `upgrade_gate`, on metadata in memory."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from bindery_core.errors import BadRequest, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, RollbackReport
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_recovery.draining import upgrade_gate
from bindery_recovery.draining.upgrade_gate import Scale, Verdict, check_gate
from scripted import ledger

LAYOUT = LedgersLayout()
TEMPLATE = "b-{}.ns"
B = [BookieId(TEMPLATE.format(ordinal)) for ordinal in range(4)]
LAST = B[3]
"""The bookie that a scale of 3 removes."""
NOW_MS = 1_000_000


class Cluster:
    """Four bookies with cookies, registered as writable, and an auditor."""

    def __init__(self) -> None:
        self.store: MemoryStore = MemoryTree().connect()
        self.ledgers = LedgerManager(self.store, LAYOUT, randomness=random.Random(1))
        self.marks = UnderreplicationManager(self.store, LAYOUT, randomness=random.Random(2), clock_ms=lambda: NOW_MS)
        self.memberships = MembershipStore(self.store, clock_ms=lambda: NOW_MS)
        self.closings = ClosingRecords(self.store)

    async def register(self, *bookies: BookieId, read_only: bool = False) -> None:
        for bookie_id in bookies:
            await self.store.create(LAYOUT.bookie(bookie_id, read_only=read_only), make_parents=True)

    async def stop(self, bookie_id: BookieId) -> None:
        for read_only in (False, True):
            path = LAYOUT.bookie(bookie_id, read_only=read_only)
            if await self.store.exists(path):
                await self.store.delete(path, version=None)

    async def turn_read_only(self, bookie_id: BookieId) -> None:
        await self.stop(bookie_id)
        await self.register(bookie_id, read_only=True)

    async def add(self, number: int, *ensemble: BookieId, is_open: bool = False, note: bool = False) -> None:
        metadata = ledger(ensemble or B[:2], last=None if is_open else 9)
        await self.ledgers.create_with_id(LedgerId(number), metadata)
        if note:
            await self.closings.add(LedgerId(number), ClosingCause.RECOVERED)

    async def damage(self, number: int) -> None:
        await self.store.set(LAYOUT.ledger(LedgerId(number)), b"damaged", version=None)

    async def check(self, bookies: int | None = None, template: str = TEMPLATE, **mode: bool) -> Verdict:
        scale = None if bookies is None else Scale(bookies, template)
        return await check_gate(
            self.store, LAYOUT, scale=scale, randomness=random.Random(3), clock_ms=lambda: NOW_MS, **mode
        )

    async def refused(self, bookies: int | None = None, **mode: bool) -> list[tuple[str, str | None]]:
        verdict = await self.check(bookies, **mode)
        assert verdict.is_open == (not verdict.refusals)
        return [(refusal.kind, refusal.bookie_id) for refusal in verdict.refusals]


@pytest.fixture
async def cluster() -> Cluster:
    cluster = Cluster()
    await initialize_cluster(cluster.store, LAYOUT, randomness=random.Random(4))
    for bookie_id in B:
        await CookieStore(cluster.store, LAYOUT).write(bookie_id, b"cookie", version=None)
    await cluster.register(*B)
    await cluster.marks.prepare()
    await cluster.store.create(f"{LAYOUT.auditor_election}/V_", b'bookieId: "a"\n', sequential=True, make_parents=True)
    return cluster


async def test_a_healthy_cluster_passes_without_notes(cluster: Cluster) -> None:
    await cluster.add(1)
    assert await cluster.check() == await cluster.check(4) == Verdict()
    assert await cluster.check(3, only_going=True) == Verdict()
    assert Verdict().is_open


async def test_a_cluster_that_is_not_initialized_passes() -> None:
    verdict = await Cluster().check(3)
    assert verdict.is_open
    assert verdict.notes == ("the cluster is not initialized: there is no data to protect",)


@pytest.mark.parametrize("error", [MetadataUnavailable, MetadataOutcomeUnknown])
async def test_a_metadata_store_that_does_not_answer_is_a_refusal(cluster: Cluster, error: type[Exception]) -> None:
    cluster.store.fail_next(error("connection lost", host="zk"))  # type: ignore[arg-type]
    (refusal,) = (await cluster.check()).refusals
    assert (refusal.kind, refusal.bookie_id) == ("unreachable", None)
    assert "connection lost" in refusal.text


async def test_the_check_sees_what_other_clients_wrote_before_it_began(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ZooKeeper server of this session may lag behind until `sync`."""

    async def sync(path: str) -> None:
        await cluster.marks.mark(LedgerId(1))

    monkeypatch.setattr(cluster.store, "sync", sync)
    assert await cluster.refused() == [("under_replicated", None)]


# --- ledgers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 ledger is under-replicated (1)"),
        (2, "2 ledgers are under-replicated (1, 2)"),
        (5, "5 ledgers are under-replicated (1, 2, 3, 4, 5)"),
        (6, "6 ledgers are under-replicated (1, 2, 3, 4, 5, ...)"),
    ],
)
async def test_marked_ledgers_are_counted_and_the_first_five_are_named(cluster: Cluster, count: int, text: str) -> None:
    for number in range(1, count + 1):
        await cluster.marks.mark(LedgerId(number))
    (refusal,) = (await cluster.check()).refusals
    assert (refusal.kind, refusal.text) == ("under_replicated", text)
    assert refusal.fix.startswith("wait until")
    assert "`bindery recovery explain 1`" in refusal.fix


@pytest.mark.parametrize(
    ("count", "start", "end"),
    [
        (1, "1 ledger was closed", "(1)"),
        (2, "2 ledgers were closed", "(1, 2)"),
        (5, "5 ledgers were closed", "(1, 2, 3, 4, 5)"),
        (6, "6 ledgers were closed", "(1, 2, 3, 4, 5, ...)"),
    ],
)
async def test_ledgers_with_unchecked_copies_are_counted_and_the_first_five_are_named(
    cluster: Cluster, count: int, start: str, end: str
) -> None:
    for number in range(1, count + 1):
        await cluster.add(number, note=True)
    (refusal,) = (await cluster.check()).refusals
    assert (refusal.kind, refusal.text.startswith(start), refusal.text.endswith(end)) == ("unknown_copies", True, True)
    assert "`bindery recovery explain 1`" in refusal.fix


async def test_only_a_closed_or_unreadable_ledger_can_have_unchecked_copies(cluster: Cluster) -> None:
    """The writer or the recovery of an open ledger completes its copies; a marked ledger is refused already."""
    await cluster.closings.add(LedgerId(1), ClosingCause.RECOVERED)  # a deleted ledger
    await cluster.add(2, is_open=True, note=True)
    await cluster.add(3, note=True)
    await cluster.marks.mark(LedgerId(3))
    assert await cluster.refused() == [("under_replicated", None)]
    await cluster.add(4, note=True)
    await cluster.damage(4)
    (_, refusal) = (await cluster.check()).refusals
    assert refusal.text.endswith("(4)")


async def test_closing_records_beyond_the_limit_of_one_check_are_refused_unread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade_gate, "NOTES_READ_MAX", 2)
    for number in (1, 2):
        await cluster.add(number, is_open=True, note=True)
    assert await cluster.refused() == []
    await cluster.add(3, is_open=True, note=True)
    (refusal,) = (await cluster.check()).refusals
    assert refusal.text.endswith("(3)")


async def test_the_fix_names_what_holds_up_the_repair(cluster: Cluster) -> None:
    await cluster.marks.mark(LedgerId(1))
    await cluster.add(2, note=True)

    async def fixes() -> list[str]:
        return [refusal.fix for refusal in (await cluster.check()).refusals]

    marked, noted = await fixes()
    assert marked.startswith("wait until `bindery recovery status --watch` shows none")
    assert noted.startswith("wait some seconds")
    (vote,) = await cluster.store.children(LAYOUT.auditor_election)
    await cluster.store.delete(f"{LAYOUT.auditor_election}/{vote}", version=None)
    assert (await fixes())[1].startswith("start an auditor")
    assert (await cluster.check()).notes == ("no auditor is running: under-replicated ledgers may not be marked",)
    await cluster.marks.disable()
    assert all(fix.startswith("automatic recovery is paused: run `bindery recovery resume`") for fix in await fixes())


# --- bookies ----------------------------------------------------------------------------------------------------------

PASSES, LOST, NOT_DRAINED = None, "lost", "not_drained"


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(
    ("intent", "stays_registered", "goes_registered", "stays_absent", "goes_absent"),
    [
        (Intent.ACTIVE, PASSES, NOT_DRAINED, LOST, LOST),
        (Intent.JOINING, PASSES, NOT_DRAINED, PASSES, PASSES),
        (Intent.MAINTENANCE, PASSES, NOT_DRAINED, PASSES, NOT_DRAINED),
        (Intent.REMOVED, PASSES, PASSES, PASSES, PASSES),
    ],
)
async def test_the_intent_decides_whether_a_bookie_may_stop_or_go(
    cluster: Cluster,
    intent: Intent,
    stays_registered: str | None,
    goes_registered: str | None,
    stays_absent: str | None,
    goes_absent: str | None,
    holds: bool,
) -> None:
    if holds:
        await cluster.add(1, B[0], LAST)
    await cluster.memberships.set(LAST, intent)

    def refusals(kind: str | None) -> list[tuple[str, str]]:
        return [] if kind is None else [(kind, LAST)]

    assert await cluster.refused() == await cluster.refused(4) == refusals(stays_registered)
    assert await cluster.refused(3) == refusals(goes_registered)
    await cluster.turn_read_only(LAST)
    assert await cluster.refused(3) == refusals(goes_registered)
    await cluster.stop(LAST)
    assert await cluster.refused() == await cluster.refused(4) == refusals(stays_absent)
    assert await cluster.refused(3) == refusals(goes_absent)


@pytest.mark.parametrize("holds", ["nothing", "a ledger", "an unreadable ledger"])
async def test_a_draining_bookie_may_go_once_it_is_read_only_and_empty(cluster: Cluster, holds: str) -> None:
    is_empty = holds == "nothing"
    if not is_empty:
        await cluster.add(1, B[0], LAST)
    if holds == "an unreadable ledger":
        await cluster.damage(1)  # it may name the bookie
    await cluster.memberships.set(LAST, Intent.DRAINING)
    assert await cluster.refused() == await cluster.refused(4) == []
    (refusal,) = (await cluster.check(3)).refusals
    assert (refusal.kind, refusal.bookie_id) == (NOT_DRAINED, LAST)
    assert ("registered as writable" if is_empty else "but 1 ledgers still name it") in refusal.text
    await cluster.turn_read_only(LAST)
    assert await cluster.refused() == []
    assert await cluster.refused(3) == ([] if is_empty else [(NOT_DRAINED, LAST)])
    await cluster.stop(LAST)
    lost = [] if is_empty else [(LOST, LAST)]
    assert await cluster.refused() == await cluster.refused(4) == await cluster.refused(3) == lost


async def test_a_lost_bookie_is_reported_with_its_drain_and_with_the_command_that_recovers_it(cluster: Cluster) -> None:
    await cluster.add(1, B[0], LAST)
    await cluster.stop(LAST)
    (refusal,) = (await cluster.check()).refusals
    assert refusal.text == f"bookie {LAST} is lost"
    assert f"`bindery bookie recover {LAST} --yes --wait`" in refusal.fix
    await cluster.memberships.set(LAST, Intent.DRAINING)
    (refusal,) = (await cluster.check()).refusals
    assert refusal.text == f"bookie {LAST} is draining, holds ledgers and is not registered"


async def test_unreadable_ledgers_count_as_ledgers_that_name_a_draining_bookie(cluster: Cluster) -> None:
    await cluster.add(1, B[0], LAST)
    await cluster.add(2, B[0], B[1])
    await cluster.damage(2)
    await cluster.memberships.set(LAST, Intent.DRAINING)
    (refusal,) = (await cluster.check(3)).refusals
    assert "but 2 ledgers still name it" in refusal.text


async def test_a_bookie_is_lost_when_its_maintenance_has_expired(cluster: Cluster) -> None:
    await cluster.stop(LAST)
    await cluster.memberships.set(LAST, Intent.MAINTENANCE, until_ms=NOW_MS + 1)
    assert (await cluster.check()).notes == (f"bookie {LAST} is in maintenance: it does not count as lost",)
    assert await cluster.refused() == []
    await cluster.memberships.set(LAST, Intent.MAINTENANCE, until_ms=NOW_MS - 1)
    assert await cluster.refused() == [(LOST, LAST)]


async def test_registrations_are_those_after_the_ledgers_were_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bookie that returns during the check is not lost. One that turns read-only during the check may have received
    a ledger that the check did not read."""
    real = upgrade_gate.holdings_of

    def during(change: Callable[[], Awaitable[None]]) -> None:
        async def holdings_of(*given: Any) -> Any:
            await change()
            return await real(*given)

        monkeypatch.setattr(upgrade_gate, "holdings_of", holdings_of)

    await cluster.memberships.set(LAST, Intent.DRAINING)
    during(lambda: cluster.turn_read_only(LAST))
    assert await cluster.refused(3) == [(NOT_DRAINED, LAST)]
    await cluster.stop(B[0])
    during(lambda: cluster.register(B[0]))
    assert await cluster.refused(3) == []


async def test_a_registered_bookie_without_a_cookie_counts(cluster: Cluster) -> None:
    writable, read_only = BookieId("b-7.ns"), BookieId("b-8.ns")
    await cluster.register(writable)
    await cluster.register(read_only, read_only=True)
    assert await cluster.refused(4) == [(NOT_DRAINED, writable), (NOT_DRAINED, read_only)]


@pytest.mark.parametrize(
    ("intent", "effect"), [(Intent.DRAINING, "accepts no new ledgers"), (Intent.REMOVED, "does not start")]
)
async def test_a_note_names_bookies_that_stay_but_cannot_serve(cluster: Cluster, intent: Intent, effect: str) -> None:
    for bookie_id in (B[2], LAST, BookieId("elsewhere")):
        await cluster.memberships.set(bookie_id, intent)
    await cluster.memberships.set(B[0], Intent.JOINING)
    for only_going in (False, True):
        (note,) = (await cluster.check(3, only_going=only_going)).notes
        assert note.startswith(f"bookie {B[2]} is to stay, but is {intent.value}: it {effect}; ")
    assert (await cluster.check()).notes == (), "without a scale, no bookie is known to stay"


# --- a rollback -------------------------------------------------------------------------------------------------------


async def test_a_rollback_is_refused_only_for_ledgers_of_the_bookies_that_go(cluster: Cluster) -> None:
    await cluster.marks.mark(LedgerId(7))
    await cluster.add(1, B[0], LAST)
    await cluster.stop(B[0])
    assert await cluster.refused(4, only_going=True) == []
    assert await cluster.refused(3, only_going=True) == [(NOT_DRAINED, LAST)]
    await cluster.turn_read_only(LAST)
    assert await cluster.refused(3, only_going=True) == [(NOT_DRAINED, LAST)]
    await cluster.stop(LAST)
    assert await cluster.refused(3, only_going=True) == [(LOST, LAST)]
    await cluster.memberships.set(LAST, Intent.MAINTENANCE)
    assert await cluster.refused(3, only_going=True) == [(NOT_DRAINED, LAST)]
    await cluster.memberships.set(LAST, Intent.REMOVED)
    assert await cluster.refused(3, only_going=True) == []


async def test_a_rollback_reports_each_bookie_with_ledgers(cluster: Cluster) -> None:
    """A removed or empty bookie does not end the check of the others."""
    await cluster.add(1, B[1], LAST)
    await cluster.memberships.set(B[1], Intent.REMOVED)
    assert await cluster.refused(1, only_going=True) == [(NOT_DRAINED, LAST)]


# --- ordinals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("only_going", [False, True])
async def test_no_bookie_is_removed_while_the_metadata_may_have_been_rolled_back(
    cluster: Cluster, only_going: bool
) -> None:
    """Its newest ledgers may be missing in the metadata, so that it looks empty."""
    await cluster.memberships.set(LAST, Intent.REMOVED, reason="", by="")
    known = KnownLedgersStore(cluster.store, instance_id=await CookieStore(cluster.store, LAYOUT).instance_id())
    report = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)
    assert await cluster.refused(3, only_going=only_going) == []
    await known.update(lambda one: one.with_report("b0", report))
    assert await cluster.refused(3, only_going=only_going) == [("rollback", None)]
    assert await cluster.refused(4, only_going=only_going) == [], "no bookie is removed"
    assert await cluster.refused() == []
    [refusal] = (await cluster.check(3, only_going=only_going)).refusals
    assert (
        "no bookies are removed: bookies (b0) store 2 replicas of ledgers that this metadata never knew" in refusal.text
    )
    await known.accept(version=(await known.read())[1], by="me", at_ms=1)
    assert await cluster.refused(3, only_going=only_going) == []


@pytest.mark.parametrize("template", ["b", "b-{}-{}", ""])
def test_a_template_names_the_ordinal_exactly_once(template: str) -> None:
    with pytest.raises(BadRequest):
        Scale(3, template)


@pytest.mark.parametrize(
    ("bookie_id", "ordinal"),
    [
        ("b-0.ns", 0),
        ("b-10.ns", 10),
        ("b-07.ns", None),
        ("b-.ns", None),
        ("b-x.ns", None),
        ("b-1xns", None),
        ("ab-1.ns", None),
        ("b-1.nsx", None),
    ],
)
def test_an_ordinal_is_a_number_without_leading_zeros(bookie_id: str, ordinal: int | None) -> None:
    assert Scale(3, TEMPLATE).ordinal(bookie_id) == ordinal


def test_bookies_from_the_given_number_on_go() -> None:
    scale = Scale(3, TEMPLATE)
    assert [scale.goes(bookie_id) for bookie_id in (*B, "elsewhere")] == [False, False, False, True, False]


@pytest.mark.parametrize("only_going", [False, True])
async def test_a_template_that_matches_no_bookie_is_refused(cluster: Cluster, only_going: bool) -> None:
    async def kinds(bookies: int, template: str) -> list[str]:
        verdict = await cluster.check(bookies, template, only_going=only_going)
        return [refusal.kind for refusal in verdict.refusals]

    assert await kinds(3, "other-{}") == ["not_named"]
    assert await kinds(1, "other-{}") == ["not_named"]
    assert await kinds(0, "other-{}") == [], "no bookie is to run"
    assert await kinds(5, TEMPLATE) == []
    (refusal,) = (await cluster.check(3, "other-{}", only_going=only_going)).refusals
    assert refusal.text == f"none of the 4 bookies (such as {B[0]}) has an id like other-0"


async def test_a_cluster_without_bookies_passes_with_any_template() -> None:
    cluster = Cluster()
    await initialize_cluster(cluster.store, LAYOUT, randomness=random.Random(4))
    assert await cluster.refused(3) == []
