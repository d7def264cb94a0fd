"""RollbackGuard: which stored ledgers make it report a rollback, and what it does then."""

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance import rollback_guard
from bindery_bookie.maintenance.rollback_guard import READS_MAX, RollbackGuard
from bindery_core.errors import Conflict, MetadataOutcomeUnknown, MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.health import Health
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import SHORT_ID_END, BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.id_generator import LedgerIdGenerator
from bindery_metadata.ledgers.known_ledgers import (
    SUSPECTED,
    KnownLedgers,
    KnownLedgersStore,
    MetadataRollbackSuspected,
    RollbackReport,
)
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from structlog.testing import capture_logs

LAYOUT = LedgersLayout()
NODE = BinderyLayout().known_ledgers
LONG = 1 << 32


class Shard:
    def __init__(self, *ledger_ids: int) -> None:
        self.ledger_ids = list(ledger_ids)
        self.listed = 0
        self.error: Exception | None = None

    async def list_ledger_ids(self) -> Sequence[int]:
        self.listed += 1
        if self.error is not None:
            raise self.error
        return sorted(self.ledger_ids)

    def active_ledger_ids(self) -> Sequence[int]:
        return self.ledger_ids


class Cluster:
    """A metadata tree, and guards of bookies."""

    def __init__(self) -> None:
        self.tree = MemoryTree(now_ms=lambda: self.now_ms)
        self.store = self.tree.connect()
        self.health = Health()
        self.now_ms = 1000
        self.instance_id = ""
        self.snapshot: dict[str, Any] = {}

    async def initialize(self) -> None:
        self.instance_id = (await initialize_cluster(self.store, LAYOUT, randomness=random.Random(1))).instance_id

    async def generate(self, count: int) -> list[LedgerId]:
        """Create ledgers with new ids."""
        ids = LedgerIdGenerator(self.store, LAYOUT)
        found = [await ids.next_id() for _ in range(count)]
        await ids.close()
        await self.put(*found)
        return found

    async def put(self, *ledger_ids: int) -> None:
        for ledger_id in ledger_ids:
            await self.store.create(LAYOUT.ledger(LedgerId(ledger_id)), b"metadata", make_parents=True)

    async def remove(self, *ledger_ids: int) -> None:
        for ledger_id in ledger_ids:
            await self.store.delete(LAYOUT.ledger(LedgerId(ledger_id)), version=None)

    def take_snapshot(self) -> None:
        self.snapshot = copy.deepcopy(self.tree.znodes._nodes)

    def roll_back(self) -> None:
        self.tree.znodes._nodes = copy.deepcopy(self.snapshot)

    def guard(
        self, *shards: Shard, bookie: str = "b1", store: MemoryStore | None = None, **changes: Any
    ) -> RollbackGuard:
        return RollbackGuard(
            shards,
            store or self.store,
            LAYOUT,
            instance_id=self.instance_id,
            bookie_id=BookieId(bookie),
            health=self.health,
            wall_clock_ms=lambda: self.now_ms,
            **changes,
        )

    @property
    def known(self) -> KnownLedgersStore:
        return KnownLedgersStore(self.store, instance_id=self.instance_id)

    async def reports(self) -> dict[str, RollbackReport]:
        return dict((await self.known.read())[0].reports)

    async def accept(self) -> None:
        await self.known.accept(version=(await self.known.read())[1], by="me", at_ms=self.now_ms)

    @property
    def notes(self) -> dict[str, str]:
        return dict(self.health._notes)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.initialize()
    yield cluster
    await cluster.store.close()


async def test_a_new_cluster_and_an_empty_bookie_are_not_suspicious(cluster: Cluster) -> None:
    guard = cluster.guard(Shard(), Shard())
    await guard.check_all()
    assert (guard.state.name, guard.state.checked_ms) == ("ok", 1000)
    shard = Shard(*await cluster.generate(3))
    await cluster.guard(shard).check_all()
    await cluster.remove(0, 1, 2)
    await cluster.guard(shard).check_all()
    assert await cluster.store.exists(NODE) is None, "ids of the generator need no record"


async def test_a_cluster_of_apache_bookkeeper_without_our_nodes_is_not_suspicious(cluster: Cluster) -> None:
    """Neither with ids that its clients chose, as long as their ledgers exist at the first check."""
    shard = Shard(*await cluster.generate(3), 700, 2**62, SHORT_ID_END)
    await cluster.put(700, 2**62)
    await cluster.put(SHORT_ID_END)
    await cluster.remove(1)
    await cluster.guard(shard).check_all()
    known, _ = await cluster.known.read()
    assert (known.short_end, known.long_end, known.reports) == (701, 2**62 + 1, {})
    await cluster.remove(700, 2**62, SHORT_ID_END)
    await cluster.guard(shard).check_all()


async def test_ledgers_newer_than_a_snapshot_are_reported(cluster: Cluster) -> None:
    old = await cluster.generate(3)
    cluster.take_snapshot()
    new = await cluster.generate(4)
    guard = cluster.guard(Shard(old[0], new[1]), Shard(old[1], new[3]))
    await guard.check_all()
    cluster.roll_back()
    with capture_logs() as logs, pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    expected = RollbackReport(1000, unknown=2, first=new[1], last=new[3], short_end=new[3] + 1, ids_protected=True)
    assert await cluster.reports() == {"b1": expected}
    assert (guard.state.name, guard.state.since_ms, guard.own_report) == (SUSPECTED, 1000, expected)
    assert "never knew" in cluster.notes[SUSPECTED]
    [event] = [one for one in logs if one["event"] == SUSPECTED]
    assert (event["log_level"], event["unknown"], event["last_ledger_id"]) == ("error", 2, new[3])
    cluster.now_ms = 9000
    before = (await cluster.store.get(NODE)).stat.version
    with capture_logs() as logs, pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    assert logs == [], "it is logged once"
    assert (await cluster.store.get(NODE)).stat.version == before, "an operator's version stays valid"


async def test_ids_of_lost_ledgers_are_not_generated_again(cluster: Cluster) -> None:
    """A new ledger of the same id would be another ledger, whose entries a bookie cannot tell apart."""
    await cluster.generate(3)
    cluster.take_snapshot()
    new = await cluster.generate(4)
    cluster.roll_back()
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(Shard(*new)).check_all()
    assert await cluster.generate(1) == [new[-1] + 1]


async def test_the_suspicion_stays_although_new_ledgers_pass_the_lost_ones(cluster: Cluster) -> None:
    cluster.take_snapshot()
    new = await cluster.generate(4)
    cluster.roll_back()
    shard = Shard(*new)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(shard).check_all()
    await cluster.generate(10)
    for guard in (cluster.guard(shard), cluster.guard(Shard(), bookie="b2")):
        with pytest.raises(MetadataRollbackSuspected):
            await guard.check_all()
        with pytest.raises(MetadataRollbackSuspected):
            await guard.confirm(())
    assert (await cluster.reports())["b1"].unknown == 4


@pytest.mark.parametrize("highest", [LONG + 7, (2 << 32) + 1])
async def test_long_ids_are_reported_and_protected(cluster: Cluster, highest: int) -> None:
    await cluster.store.create(LAYOUT.hob(1), make_parents=True)
    await cluster.generate(3)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(Shard(LONG, highest)).check_all()
    report = (await cluster.reports())["b1"]
    assert (report.first, report.short_end, report.long_end) == (highest, 0, highest + 1)
    assert report.ids_protected
    assert (await cluster.generate(1))[0] > highest


async def test_an_id_far_above_the_generator_cannot_be_protected(cluster: Cluster) -> None:
    shard = Shard(5_000_000, 2**62)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(shard).check_all()
    report = (await cluster.reports())["b1"]
    assert (report.unknown, report.short_end, report.long_end) == (2, 5_000_001, 2**62 + 1)
    assert not report.ids_protected
    assert await cluster.generate(1) == [0], "millions of ids are not used up because of one ledger"


async def test_several_bookies_report_at_the_same_time(cluster: Cluster) -> None:
    cluster.take_snapshot()
    new = await cluster.generate(12)
    cluster.roll_back()
    guards = [
        cluster.guard(Shard(*new[at::3]), bookie=f"b{at}", store=cluster.tree.connect(latency_s=0.01))
        for at in range(3)
    ]
    found = await asyncio.gather(*(guard.check_all() for guard in guards), return_exceptions=True)
    assert [type(one) for one in found] == [MetadataRollbackSuspected] * 3
    reports = await cluster.reports()
    assert {bookie: report.unknown for bookie, report in reports.items()} == {"b0": 4, "b1": 4, "b2": 4}
    assert all(report.ids_protected for report in reports.values())
    await cluster.accept()
    for guard in guards:
        await guard.check_all()


async def test_several_bookies_raise_the_mark_at_the_same_time(cluster: Cluster) -> None:
    chosen = [1000 * at for at in range(1, 9)]
    await cluster.put(*chosen)
    guards = [
        cluster.guard(Shard(*chosen[at::4]), bookie=f"b{at}", store=cluster.tree.connect(latency_s=0.01))
        for at in range(4)
    ]
    await asyncio.gather(*(guard.check_all() for guard in guards))
    assert (await cluster.known.read())[0] == KnownLedgers(cluster.instance_id, short_end=8001)


async def test_the_mark_is_raised_to_listed_ledgers(cluster: Cluster) -> None:
    await cluster.generate(3)
    guard = cluster.guard()
    await guard.raise_mark(())
    await guard.raise_mark((2,))
    assert await cluster.store.exists(NODE) is None
    await guard.raise_mark((5, LONG))
    known, _ = await cluster.known.read()
    assert (known.short_end, known.long_end) == (6, LONG + 1)


async def test_unknown_ledgers_below_one_that_exists_are_taken_for_deleted(cluster: Cluster) -> None:
    """The limit of the mark where clients choose ids: it is one number."""
    await cluster.put(700)
    await cluster.guard(Shard(650, 700)).check_all()


async def test_a_check_looks_up_a_bounded_number_of_ledgers(cluster: Cluster) -> None:
    shard = Shard(*range(10, 10 + 10 * READS_MAX))
    await cluster.put(10)
    real, reads = cluster.store.exists, []

    async def exists(path: str, **others: Any) -> Any:
        reads.append(path)
        return await real(path, **others)

    cluster.store.exists = exists  # type: ignore[method-assign]
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(shard).check_all()
    assert sum(LAYOUT.ledger_id(path) is not None for path in reads) == READS_MAX
    assert (await cluster.reports())["b1"].unknown == 10 * READS_MAX


async def test_ledgers_of_skipped_ids_are_unknown_until_their_metadata_is_restored(cluster: Cluster) -> None:
    """After a restore from a backup, the generator's margin covers ledgers that are newer than the backup."""
    await cluster.generate(20)
    await cluster.remove(*range(20))
    await cluster.known.update(lambda known: known.with_skipped((10, 20)))
    await cluster.put(12)
    shard = Shard(5, 12, 15)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(shard).check_all()
    report = (await cluster.reports())["b1"]
    assert (report.unknown, report.first, report.last) == (1, 15, 15)
    await cluster.put(15)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(shard).check_all()
    assert (await cluster.reports())["b1"].unknown == 0, "the report stays until an operator accepts"
    await cluster.accept()
    await cluster.guard(shard).check_all()


async def test_the_highest_ledgers_of_skipped_ids_are_looked_up_first(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not looked up count as unknown."""
    monkeypatch.setattr(rollback_guard, "READS_MAX", 1)
    await cluster.generate(20)
    await cluster.remove(*range(20))
    await cluster.known.update(lambda known: known.with_skipped((10, 20)))
    await cluster.put(12, 15)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(Shard(15), Shard(12)).check_all()
    report = (await cluster.reports())["b1"]
    assert (report.unknown, report.first) == (1, 12)


@pytest.mark.parametrize("check", ["check_all", "_needs_check"])
async def test_the_counters_are_read_after_a_sync_and_before_the_reports(cluster: Cluster, check: str) -> None:
    """A server may lag. Another bookie stores its report before it advances the counters, so that it is read here."""
    calls: list[tuple[str, str]] = []

    def record(name: str, real: Any) -> Any:
        async def call(path: str, **others: Any) -> Any:
            calls.append((name, path))
            return await real(path, **others)

        return call

    for name in ("sync", "get", "exists", "children"):
        setattr(cluster.store, name, record(name, getattr(cluster.store, name)))
    await getattr(cluster.guard(Shard(*await cluster.generate(1))), check)()
    first, *others = calls[-5:] if check == "check_all" else calls[-4:]
    assert first == ("sync", LAYOUT.root)
    assert others[:3] == [("children", LAYOUT.idgen_long), ("exists", LAYOUT.idgen), ("get", NODE)]


async def test_the_number_of_missing_ledgers_is_added_to_the_reports(cluster: Cluster) -> None:
    guard, other = cluster.guard(Shard(7)), cluster.guard(Shard(), bookie="b2")
    await guard.count_missing(3)
    assert await cluster.reports() == {}, "ordinary garbage is not reported"
    with pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    await guard.count_missing(4)
    await other.count_missing(2)
    found = {bookie: (one.unknown, one.missing) for bookie, one in (await cluster.reports()).items()}
    assert found == {"b1": (1, 4), "b2": (0, 2)}


async def test_an_accepted_state_ends_and_is_in_the_history(cluster: Cluster) -> None:
    guard = cluster.guard(Shard(7))
    with pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    version = guard.state.version
    assert version is not None
    with pytest.raises(Conflict):
        await guard.accept(version=version + 1, by="me")
    assert guard.state.is_suspected
    with capture_logs() as logs:
        await guard.accept(version=version, by="me")
    assert [one["event"] for one in logs] == ["metadata_rollback_cleared"]
    assert guard.state.name == "ok"
    assert cluster.notes == {}
    await guard.check_all()
    [event] = await RecoveryRecords(cluster.store).history()
    assert (event.kind, event.fields["unknown"]) == ("metadata_accepted", 1)
    assert "me accepted the metadata" in event.text


async def test_the_newer_metadata_ends_the_state(cluster: Cluster) -> None:
    """An operator may undo the rollback: the node with the reports is part of the older state."""
    cluster.take_snapshot()
    new = await cluster.generate(2)
    newest = copy.deepcopy(cluster.tree.znodes._nodes)
    cluster.roll_back()
    guard = cluster.guard(Shard(*new))
    with pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    cluster.tree.znodes._nodes = newest
    await guard.check_all()
    assert guard.state.name == "ok"


async def test_an_error_while_ids_are_protected_does_not_lose_the_report(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*arguments: Any, **options: Any) -> int:
        raise MetadataOutcomeUnknown("connection lost")

    guard = cluster.guard(Shard(7))
    with monkeypatch.context() as patch:
        patch.setattr(rollback_guard, "skip_ids", failing)
        with pytest.raises(MetadataRollbackSuspected):
            await guard.check_all()
    assert not (await cluster.reports())["b1"].ids_protected
    with pytest.raises(MetadataRollbackSuspected):
        await guard.check_all()
    assert (await cluster.reports())["b1"].ids_protected


async def test_the_report_is_stored_before_the_counter_is_advanced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another bookie that reads the advanced counter must find the report."""
    real = rollback_guard.skip_ids
    found = []

    async def skip_ids(*arguments: Any, **options: Any) -> int:
        found.append(await cluster.reports())
        return await real(*arguments, **options)

    monkeypatch.setattr(rollback_guard, "skip_ids", skip_ids)
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(Shard(7)).check_all()
    assert [list(reports) for reports in found] == [["b1"]]


async def test_a_deletion_is_refused_if_the_mark_fell_since_the_check(cluster: Cluster) -> None:
    cluster.take_snapshot()
    [new] = await cluster.generate(1)
    guard = cluster.guard(Shard(new))
    await guard.check_all()
    await guard.confirm([new])
    cluster.roll_back()
    with pytest.raises(MetadataRollbackSuspected):
        await guard.confirm([new])
    assert list(await cluster.reports()) == ["b1"]
    other = cluster.guard(Shard())
    await cluster.accept()
    with pytest.raises(MetadataRollbackSuspected, match="changed meanwhile"):
        await other.confirm([new + 1])


# --- when it checks ---------------------------------------------------------------------------------------------------


async def test_before_a_registration_only_unavailable_metadata_is_an_error(cluster: Cluster) -> None:
    shard = Shard(7)
    guard = cluster.guard(shard)
    cluster.store.fail_next(MetadataUnavailable("down"))
    with pytest.raises(MetadataUnavailable):
        await guard.before_registration()
    await guard.before_registration()
    assert guard.state.is_suspected
    shard.error = OSError("input/output error")
    await guard.before_registration()
    shard.error = None
    await cluster.store.set(NODE, b"{", version=None)
    await guard.before_registration()


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_all_ledgers_are_checked_after_each_reconnection(cluster: Cluster) -> None:
    shard = Shard(*await cluster.generate(1))
    guard = cluster.guard(shard, check_s=3600.0)
    running = asyncio.ensure_future(guard.run())
    await asyncio.sleep(0)
    for expected in (1, 2):
        cluster.tree.suspend(cluster.store)
        await asyncio.sleep(0.01)
        assert shard.listed == expected - 1
        cluster.tree.resume(cluster.store)
        await until(lambda expected=expected: shard.listed == expected)
    running.cancel()


async def test_ledgers_in_memory_are_checked_periodically(cluster: Cluster) -> None:
    """A ledger with an id that a client chose is noticed while it exists."""
    shard = Shard(*await cluster.generate(1))
    guard = cluster.guard(shard, check_s=0.01)
    running = asyncio.ensure_future(guard.run())
    await asyncio.sleep(0.1)
    assert shard.listed == 0, "only if one is above the mark"
    for listed, ledger_id in enumerate((1, 900), 1):  # the first id above the mark, and one far above it
        await cluster.put(ledger_id)
        shard.ledger_ids.append(ledger_id)
        await until(lambda listed=listed: shard.listed == listed)
        while (await cluster.known.read())[0].short_end != ledger_id + 1:
            await asyncio.sleep(0.001)
        await cluster.remove(ledger_id)
    await asyncio.sleep(0.1)
    assert guard.state.name == "ok"
    running.cancel()


async def test_reports_of_others_are_noticed_periodically(cluster: Cluster) -> None:
    guard = cluster.guard(Shard(), check_s=0.01)
    running = asyncio.ensure_future(guard.run())
    with pytest.raises(MetadataRollbackSuspected):
        await cluster.guard(Shard(7), bookie="b2").check_all()
    await until(lambda: guard.state.is_suspected)
    await cluster.accept()
    await until(lambda: not guard.state.is_suspected)
    running.cancel()


async def test_errors_do_not_end_the_checks(cluster: Cluster) -> None:
    shard = Shard(7)
    guard = cluster.guard(shard, check_s=0.01)
    shard.error = OSError("input/output error")
    running = asyncio.ensure_future(guard.run())
    await until(lambda: shard.listed)
    shard.error = ValueError("a fault of ours")
    seen = shard.listed
    await until(lambda: shard.listed > seen)
    cluster.store.fail_next(MetadataUnavailable("down"))
    shard.error = None
    await until(lambda: guard.state.is_suspected)
    running.cancel()


async def test_without_a_session_nothing_is_checked(cluster: Cluster) -> None:
    shard = Shard(7)
    cluster.tree.suspend(cluster.store)
    running = asyncio.ensure_future(cluster.guard(shard, check_s=0.01).run())
    await asyncio.sleep(0.1)
    assert shard.listed == 0
    cluster.tree.resume(cluster.store)
    await until(lambda: shard.listed)
    running.cancel()
