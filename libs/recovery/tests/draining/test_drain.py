"""Start, refuse, follow and cancel drains and recoveries; the tests move the ledgers."""

import random
from collections.abc import AsyncIterator, Mapping

import pytest
from bindery_core.errors import Conflict, Corrupt, NotThere, VersionConflict
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, MetadataRollbackSuspected, RollbackReport
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    Pause,
    Reason,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_recovery.draining.drain import (
    POLL_S,
    BelowQuorum,
    BookieEmptier,
    CannotDrain,
    CannotRecover,
    Held,
    Holdings,
    Progress,
    _Pace,
    end_maintenance,
    holdings_of,
    set_maintenance,
)

LAYOUT = LedgersLayout()
B = [BookieId(f"b{number}") for number in range(6)]


class Cluster:
    """Metadata in memory, and ledgers that a test moves by hand. The clock stands still unless a test moves it."""

    def __init__(self, bookies: int) -> None:
        self.store: MemoryStore = MemoryTree().connect()
        self.manager = LedgerManager(self.store, LAYOUT, randomness=random.Random(1))
        self.memberships = MembershipStore(self.store, clock_ms=self.clock_ms)
        self.records = RecoveryRecords(self.store)
        self.marks = UnderreplicationManager(
            self.store, LAYOUT, randomness=random.Random(2), clock_ms=self.clock_ms, worker_name="w"
        )
        self.cookies = CookieStore(self.store, LAYOUT)
        self.registered: dict[BookieId, bool] = dict.fromkeys(B[:bookies], True)
        self.follows_membership = True
        """Whether bookies turn read-only when they are drained, as Bindery's do."""
        self.now_ms = 1_000_000
        self.unreadable: set[LedgerId] = set()
        self.listings = 0
        """Number of times that all ledgers were listed."""
        self.emptier = BookieEmptier(
            self.store, LAYOUT, self, randomness=random.Random(3), clock_ms=self.clock_ms, by="operator"
        )

    def clock_ms(self) -> int:
        return self.now_ms

    async def ledger(self, *ensemble: BookieId, entries: int = 10, length: int = 1000, closed: bool = True) -> LedgerId:
        metadata = LedgerMetadata(
            ensemble_size=len(ensemble),
            write_quorum=min(2, len(ensemble)),
            ack_quorum=1,
            segments=(Segment(EntryId(0), tuple(ensemble)),),
        )
        if closed:
            metadata = metadata.with_changes(
                state=LedgerState.CLOSED, last_entry_id=EntryId(entries - 1), length=length
            )
        return (await self.manager.create(metadata))[0]

    async def move(self, ledger_id: LedgerId, old: BookieId, new: BookieId) -> None:
        def transform(metadata: LedgerMetadata) -> LedgerMetadata:
            (segment,) = metadata.segments
            ensemble = tuple(new if bookie == old else bookie for bookie in segment.ensemble)
            return metadata.with_changes(segments=(Segment(EntryId(0), ensemble),))

        await self.manager.update(ledger_id, transform)

    # the part of a ledger client that the emptier uses

    def list_ledgers(self) -> AsyncIterator[LedgerId]:
        self.listings += 1
        return self.manager.list()

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        if ledger_id in self.unreadable:
            raise Corrupt("ledger metadata cannot be read")
        return (await self.manager.read(ledger_id)).value

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        if not self.follows_membership:
            return dict(self.registered)
        memberships = await self.memberships.all()
        draining = {b for b, one in memberships.items() if one.intent is Intent.DRAINING}
        return {b: is_writable and b not in draining for b, is_writable in self.registered.items()}


async def cluster_of(bookies: int) -> Cluster:
    cluster = Cluster(bookies)
    await cluster.store.create(LAYOUT.root)
    return cluster


async def test_a_drain_reports_its_size_and_is_followed_to_its_end() -> None:
    cluster = await cluster_of(4)
    first = await cluster.ledger(B[0], B[1])
    second = await cluster.ledger(B[2], B[0], length=3000)
    await cluster.ledger(B[1], B[2])
    started = await cluster.emptier.start_drain(B[0], reason="old disks")
    assert not started.goes_on
    membership = await cluster.memberships.get(B[0])
    assert (membership.intent, membership.reason, membership.by) == (Intent.DRAINING, "old disks", "operator")
    assert dict(membership.drain) == {"ledgers_total": 2, "bytes_total": 4000}
    steps = iter((cluster.move(first, B[0], B[3]), cluster.move(second, B[0], B[3])))
    pauses = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await next(steps)

    seen = [progress async for progress in cluster.emptier.follow(started, pause=pause)]
    assert [(p.ledgers_left, p.size_left, p.part, p.done) for p in seen] == [
        (2, 4000, 0.0, False),
        (1, 3000, 0.25, False),
        (0, 0, 1.0, True),
    ]
    assert pauses == [POLL_S, POLL_S]
    assert cluster.listings == 2, "at the start, and once more when none of these ledgers names the bookie"
    assert [event.kind for event in await cluster.records.history()] == ["drain_started"]


async def test_starting_a_drain_again_keeps_the_first_totals() -> None:
    cluster = await cluster_of(4)
    moved = await cluster.ledger(B[0], B[1])
    await cluster.ledger(B[0], B[1])
    await cluster.emptier.start_drain(B[0])
    await cluster.move(moved, B[0], B[2])
    cluster.registered = {B[1]: True}  # too few for a new drain; the existing one continues
    again = await cluster.emptier.start_drain(B[0])
    assert again.goes_on
    progress = await anext(cluster.emptier.follow(again))
    assert (progress.ledgers_left, progress.ledgers_total, progress.size_left, progress.part) == (1, 2, 1000, 0.5)
    assert len(await cluster.records.history()) == 1


async def test_ledgers_created_during_a_drain_are_found_before_the_bookie_is_empty() -> None:
    cluster = await cluster_of(4)
    first = await cluster.ledger(B[0], B[1])
    started = await cluster.emptier.start_drain(B[0])
    late: list[LedgerId] = []

    async def pause(seconds: float) -> None:
        if not late:
            late.append(await cluster.ledger(B[0], B[2]))
            await cluster.move(first, B[0], B[3])
        else:
            await cluster.move(late[0], B[0], B[3])

    seen = [progress async for progress in cluster.emptier.follow(started, pause=pause)]
    assert [(p.ledgers_left, p.done) for p in seen] == [(1, False), (1, False), (0, True)]


async def test_a_drain_below_quorum_is_refused_with_ledger_and_numbers() -> None:
    cluster = await cluster_of(4)
    await cluster.ledger(B[0], B[1])
    wide = await cluster.ledger(B[0], B[1], B[2])
    await cluster.memberships.set(B[3], Intent.DRAINING)
    with pytest.raises(BelowQuorum, match=rf"ledger {wide} needs 3 bookies, and without it 2 would .*: b1, b2. Add 1"):
        await cluster.emptier.start_drain(B[0])
    assert (await cluster.memberships.get(B[0])).intent is Intent.ACTIVE
    cluster.registered[B[4]] = False  # a read-only bookie cannot take over entries
    with pytest.raises(BelowQuorum):
        await cluster.emptier.start_drain(B[0])
    await cluster.memberships.set(B[3], Intent.MAINTENANCE, until_ms=cluster.now_ms)  # an expired lease
    assert not (await cluster.emptier.start_drain(B[0])).goes_on


async def test_an_empty_bookie_can_be_drained_below_quorum() -> None:
    cluster = await cluster_of(1)
    started = await cluster.emptier.start_drain(B[0])
    assert [progress.done async for progress in cluster.emptier.follow(started)] == [True]


async def test_a_writable_bookie_is_not_reported_as_empty() -> None:
    """While the bookie is registered as writable, a client may choose it, so earlier listings prove nothing."""
    cluster = await cluster_of(4)
    cluster.follows_membership = False
    started = await cluster.emptier.start_drain(B[0])
    late: list[LedgerId] = []

    async def pause(seconds: float) -> None:
        if not late:
            late.append(await cluster.ledger(B[0], B[1]))
            cluster.registered[B[0]] = False
        else:
            await cluster.move(late[0], B[0], B[2])

    seen = [progress async for progress in cluster.emptier.follow(started, pause=pause)]
    assert [(p.ledgers_left, p.done) for p in seen] == [(0, False), (1, False), (0, True)]
    assert "b0 is still registered as writable: new ledgers may be placed on it" in seen[0].obstacles[0]
    assert not any("writable" in sentence for sentence in seen[1].obstacles)


async def test_a_refused_drain_names_the_command_to_use() -> None:
    cluster = await cluster_of(3)
    with pytest.raises(NotThere, match="b5 is not a bookie of this cluster; those that are: b0, b1, b2"):
        await cluster.emptier.start_drain(B[5])
    await cluster.cookies.write(B[5], b"cookie", version=None)
    with pytest.raises(CannotDrain, match="bindery bookie recover b5"):
        await cluster.emptier.start_drain(B[5])
    await cluster.memberships.set(B[0], Intent.REMOVED)
    with pytest.raises(CannotDrain, match="drain b0 --cancel"):
        await cluster.emptier.start_drain(B[0])
    with pytest.raises(CannotDrain, match="b1 is not being drained: it is active"):
        await cluster.emptier.cancel_drain(B[1])


async def test_a_cancelled_drain_makes_the_bookie_active() -> None:
    cluster = await cluster_of(3)
    await cluster.emptier.start_drain(B[0])
    assert (await cluster.emptier.cancel_drain(B[0])).intent is Intent.DRAINING
    assert (await cluster.memberships.get(B[0])).intent is Intent.ACTIVE
    assert [event.kind for event in await cluster.records.history()] == ["drain_cancelled", "drain_started"]


async def first_progress(cluster: Cluster, bookie_id: BookieId) -> Progress:
    return await anext(cluster.emptier.follow(await cluster.emptier.start_drain(bookie_id)))


async def test_obstacles_are_reported_as_sentences() -> None:
    cluster = await cluster_of(3)
    ledger_id = await cluster.ledger(B[0], B[1])
    assert (await first_progress(cluster, B[0])).obstacles == (
        "no auditor is running, so no ledgers are marked: start one",
    )
    await cluster.store.create(f"{LAYOUT.auditor_election}/V_", b'bookieId: "a"\n', sequential=True, make_parents=True)
    assert (await first_progress(cluster, B[0])).obstacles == (
        "no replication worker is running, so nothing is copied: start an auditor with workers",
    )
    await cluster.records.report(WorkerReport("w0", 1))
    assert (await first_progress(cluster, B[0])).obstacles == ()
    await cluster.marks.disable()
    await cluster.records.set_pause_info(Pause("anna", "moving racks", 1))
    record = RecoveryRecord(
        ledger_id, state=RecoveryState.BLOCKED, obstacle=Obstacle.NO_SPARE, detail="no spare bookie"
    )
    await cluster.records.put(record)
    assert (await first_progress(cluster, B[0])).obstacles == (
        "recovery is paused (anna: moving racks); `bindery recovery resume` resumes it",
        f"1 ledger waits (no_spare); ledger {ledger_id}: no spare bookie",
    )


async def test_following_ends_when_only_unrecoverable_ledgers_are_left() -> None:
    cluster = await cluster_of(3)
    ledger_id = await cluster.ledger(B[0], B[1])
    started = await cluster.emptier.start_drain(B[0])
    await cluster.records.put(RecoveryRecord(ledger_id, state=RecoveryState.UNRECOVERABLE))
    seen = [progress async for progress in cluster.emptier.follow(started)]
    assert [(p.done, p.unrecoverable) for p in seen] == [(False, (ledger_id,))]


def test_rate_and_remaining_time_follow_the_observed_progress() -> None:
    def left(count: int) -> Holdings:
        return Holdings({LedgerId(ledger_id): Held(10, 1000, 3, False) for ledger_id in range(count)})

    pace = _Pace({"ledgers_total": 8, "bytes_total": 8000}, left(4))
    seen = [pace.progress(left(count), (), (), now_s=at_s) for at_s, count in ((100, 4), (102, 3), (130, 3), (160, 3))]
    assert [(p.bytes_per_s, p.eta_s) for p in seen] == [
        (0, None),
        (500.0, 6.0),
        (pytest.approx(1000 / 30), 90.0),
        (0, None),
    ]
    assert [p.part for p in seen] == [0.5, 0.625, 0.625, 0.625]


def test_slow_polls_still_give_a_rate() -> None:
    """The rate is measured over at least two polls, even if they are further apart than the window."""
    left = [Holdings({LedgerId(1): Held(10, size, 3, False)}) for size in (8000, 6000)]
    pace = _Pace({}, left[0])
    pace.progress(left[0], (), (), now_s=0)
    assert pace.progress(left[1], (), (), now_s=100).bytes_per_s == 20


async def test_what_a_bookie_holds_are_the_ledgers_that_name_it() -> None:
    cluster = await cluster_of(3)
    closed = await cluster.ledger(B[0], B[1], entries=10, length=1000)
    is_open = await cluster.ledger(B[0], B[1], B[2], closed=False)
    await cluster.ledger(B[1], B[2])
    cluster.unreadable.add(await cluster.ledger(B[1], B[2]))
    holdings = await holdings_of(cluster, B[0])
    assert {ledger_id: held.is_open for ledger_id, held in holdings.ledgers.items()} == {closed: False, is_open: True}
    assert (holdings.entries, holdings.size, holdings.open_count) == (10, 1000, 1)
    assert holdings.unreadable == tuple(cluster.unreadable)
    assert holdings.widest() == (is_open, 3)
    among = await holdings_of(cluster, B[0], among=[closed])
    assert (set(among.ledgers), among.unreadable) == ({closed}, ())


async def test_the_end_of_a_drain_is_recorded_once() -> None:
    cluster = await cluster_of(4)
    await cluster.emptier.start_drain(B[0])
    for _ in range(2):
        await cluster.emptier.finish_drain(B[0])
    finished, started = await cluster.records.history()
    assert (finished.kind, started.kind) == ("drain_finished", "drain_started")
    assert finished.fields == {"bookie_id": "b0", "by": "operator"}


@pytest.mark.parametrize(
    ("left", "total", "part"),
    [((0, 0), (0, 0), 1.0), ((1, 0), (4, 0), 0.75), ((1, 900), (4, 1000), 0.1), ((5, 1200), (4, 1000), 0.0)],
)
def test_the_completed_share_counts_bytes_or_else_ledgers(
    left: tuple[int, int], total: tuple[int, int], part: float
) -> None:
    assert Progress(left[0], total[0], left[1], total[1], 0, None, ()).part == pytest.approx(part)


async def test_at_most_five_ledgers_without_readable_metadata_are_named() -> None:
    cluster = await cluster_of(3)
    obstacles, _ = await cluster.emptier.obstacles(B[0], Holdings({}, tuple(map(LedgerId, range(6)))))
    assert "the metadata of 6 ledgers cannot be read: 0, 1, 2, 3, 4" in obstacles


async def test_the_ledgers_that_wait_for_the_same_reason_are_counted_together() -> None:
    cluster = await cluster_of(3)
    held = Held(10, 1000, 2, False)
    for number, state in ((1, RecoveryState.BLOCKED), (2, RecoveryState.BLOCKED), (3, RecoveryState.COPYING)):
        record = RecoveryRecord(LedgerId(number), state=state, obstacle=Obstacle.NO_SPARE)
        await cluster.records.put(record)
    await cluster.records.put(RecoveryRecord(LedgerId(4), obstacle=Obstacle.SOURCE_UNAVAILABLE, last_error="refused"))
    left = Holdings({LedgerId(number): held for number in range(6)})
    obstacles, unrecoverable = await cluster.emptier.obstacles(B[0], left)
    assert obstacles[1:] == (
        "2 ledgers wait (no_spare); ledger 1: no spare",
        "1 ledger waits (source_unavailable); ledger 4: refused",
    )
    assert unrecoverable == ()


# --- recover ----------------------------------------------------------------------------------------------------------


async def test_a_lost_bookie_is_removed_marked_and_retired_when_no_ledger_names_it() -> None:
    cluster = await cluster_of(3)
    await cluster.cookies.write(B[0], b"cookie", version=None)
    ledger_id = await cluster.ledger(B[0], B[1])
    await cluster.ledger(B[1], B[2])
    with pytest.raises(CannotRecover, match="b0 is registered: it is not lost"):
        await cluster.emptier.plan_recovery(B[0])
    del cluster.registered[B[0]]
    read: list[int] = []
    plan = await cluster.emptier.plan_recovery(B[0], progress=read.append)
    assert read == [1, 2], "progress is the number of ledgers read so far"
    assert (await cluster.memberships.get(B[0])).intent is Intent.ACTIVE
    assert await cluster.marks.get(ledger_id) is None
    started = await cluster.emptier.start_recovery(plan, reason="burnt")
    assert started.marked == 1
    assert (await cluster.memberships.get(B[0])).intent is Intent.REMOVED
    mark = await cluster.marks.get(ledger_id)
    assert mark is not None
    assert mark.replicas == ("b0",)
    record = await cluster.records.get(ledger_id)
    assert record is not None
    assert (record.reason, record.bookies, record.missing_entries, record.missing_bytes) == (
        Reason.OPERATOR,
        ("b0",),
        10,
        1000,
    )
    with pytest.raises(CannotRecover, match="ledgers still name b0"):
        await cluster.emptier.retire(B[0])
    assert await cluster.cookies.bookies() == [B[0]]

    async def pause(seconds: float) -> None:
        await cluster.move(ledger_id, B[0], B[2])

    assert [progress.done async for progress in cluster.emptier.follow(started, pause=pause)] == [False, True]
    known = KnownLedgersStore(cluster.store, instance_id="cluster")
    await cluster.store.create(LAYOUT.instance_id, b"cluster")
    report = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)
    await known.update(lambda one: one.with_report("b0", report))
    with pytest.raises(MetadataRollbackSuspected, match="the cookie of b0 is not deleted"):
        await cluster.emptier.retire(B[0])
    await known.accept(version=(await known.read())[1], by="me", at_ms=1)
    assert await cluster.emptier.retire(B[0])
    assert await cluster.cookies.bookies() == []
    assert not await cluster.emptier.retire(B[0])
    retired = [event.fields for event in await cluster.records.history() if event.kind == "bookie_retired"]
    assert [fields["bookie_id"] for fields in retired] == ["b0"], "reported once"


async def test_a_recovery_continues_and_keeps_the_records_of_workers() -> None:
    cluster = await cluster_of(3)
    del cluster.registered[B[0]]
    ledgers = [await cluster.ledger(B[0], B[1]) for _ in range(2)]
    await cluster.records.put(RecoveryRecord(ledgers[1], reason=Reason.BOOKIE_LOST, attempts=7, bookies=("b9",)))
    await cluster.emptier.start_recovery(await cluster.emptier.plan_recovery(B[0]))
    plan = await cluster.emptier.plan_recovery(B[0])
    assert plan.goes_on
    assert (await cluster.emptier.start_recovery(plan)).marked == 0
    record = await cluster.records.get(ledgers[1])
    assert record is not None
    assert (record.reason, record.attempts, record.bookies) == (Reason.BOOKIE_LOST, 7, ("b0", "b9"))


async def test_a_recovery_is_refused_if_the_membership_has_changed() -> None:
    cluster = await cluster_of(3)
    del cluster.registered[B[0]]
    ledger_id = await cluster.ledger(B[0], B[1])
    plan = await cluster.emptier.plan_recovery(B[0])
    await cluster.memberships.set(B[0], Intent.MAINTENANCE, until_ms=2_000_000)
    with pytest.raises(VersionConflict):
        await cluster.emptier.start_recovery(plan)
    assert await cluster.marks.get(ledger_id) is None


async def test_unreadable_metadata_keeps_the_cookie_and_is_reported() -> None:
    cluster = await cluster_of(3)
    await cluster.cookies.write(B[5], b"cookie", version=None)
    cluster.unreadable.add(await cluster.ledger(B[5], B[1]))
    started = await cluster.emptier.start_recovery(await cluster.emptier.plan_recovery(B[5]))
    progress = await anext(cluster.emptier.follow(started))
    assert not progress.done
    assert "the metadata of 1 ledger cannot be read: 0" in progress.obstacles
    with pytest.raises(CannotRecover):
        await cluster.emptier.retire(B[5])
    assert await cluster.cookies.bookies() == [B[5]]


# --- maintenance ------------------------------------------------------------------------------------------------------


async def test_a_lease_is_set_extended_and_ended_and_never_replaces_a_drain() -> None:
    cluster = await cluster_of(3)
    await set_maintenance(cluster.memberships, B[0], until_ms=2_000_000, reason="disks", by="anna")
    later = await set_maintenance(cluster.memberships, B[0], until_ms=3_000_000)
    assert (later.until_ms, later.effective(2_500_000)) == (3_000_000, Intent.MAINTENANCE)
    assert await end_maintenance(cluster.memberships, B[0])
    assert not await end_maintenance(cluster.memberships, B[0])
    await cluster.emptier.start_drain(B[1])
    with pytest.raises(Conflict, match="b1 is draining"):
        await set_maintenance(cluster.memberships, B[1], until_ms=2_000_000)
    assert not await end_maintenance(cluster.memberships, B[1])
    assert (await cluster.memberships.get(B[1])).intent is Intent.DRAINING
