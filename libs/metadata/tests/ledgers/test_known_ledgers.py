"""Which ledger ids the metadata may have known, and how the record of it changes."""

import asyncio
import dataclasses
import json
import random

import pytest
from bindery_core.errors import Conflict, Corrupt, MetadataUnavailable
from bindery_metadata.layout.layout import SHORT_ID_END, BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.id_counters import IdCounters
from bindery_metadata.ledgers.known_ledgers import (
    SKIPPED_MAX,
    SUSPECTED,
    HighWaterMark,
    KnownLedgers,
    KnownLedgersStore,
    MetadataRollbackSuspected,
    RollbackReport,
    refuse_if_suspected,
)
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment

LAYOUT = LedgersLayout()
NODE = BinderyLayout().known_ledgers
LONG = SHORT_ID_END
NONE = HighWaterMark(0, LONG)
REPORT = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)


@pytest.mark.parametrize(
    ("mark", "ledger_id", "expected"),
    [
        # a new cluster: no id was generated
        (NONE, 0, False),
        (NONE, LONG - 1, False),
        (NONE, LONG, False),
        (NONE, 2**63 - 1, False),
        # the counter is the first id that was not generated
        (HighWaterMark(100, LONG), 0, True),
        (HighWaterMark(100, LONG), 99, True),
        (HighWaterMark(100, LONG), 100, False),
        # the ends of short and long ids are independent
        (HighWaterMark(100, 2**62), 100, False),
        (HighWaterMark(100, 2**62), LONG - 1, False),
        (HighWaterMark(100, 2**62), LONG, True),
        (HighWaterMark(100, 2**62), 2**62 - 1, True),
        (HighWaterMark(100, 2**62), 2**62, False),
        (HighWaterMark(LONG, LONG), LONG - 1, True),
        (HighWaterMark(LONG, LONG), LONG, False),
        (HighWaterMark(LONG, (1 << 32) + 5), (1 << 32) + 4, True),
        (HighWaterMark(LONG, (1 << 32) + 5), (1 << 32) + 5, False),
        # skipped ids were not generated, although they are below the end
        (HighWaterMark(100, LONG, ((50, 60),)), 49, True),
        (HighWaterMark(100, LONG, ((50, 60),)), 50, False),
        (HighWaterMark(100, LONG, ((50, 60),)), 59, False),
        (HighWaterMark(100, LONG, ((50, 60),)), 60, True),
        (HighWaterMark(100, LONG, ((0, 1), (50, 60))), 0, False),
    ],
)
def test_the_metadata_may_have_known_an_id(mark: HighWaterMark, ledger_id: int, expected: bool) -> None:
    assert mark.may_know(ledger_id) is expected


@pytest.mark.parametrize("seed", range(200))
def test_the_searches_in_a_list_agree_with_the_rule_for_one_id(seed: int) -> None:
    rng = random.Random(seed)
    near = [0, 30, LONG - 20, LONG, LONG + 30]

    def some_id() -> int:
        return max(0, rng.choice(near) + rng.randrange(-20, 20))

    skipped = tuple(tuple(sorted((some_id(), some_id()))) for _ in range(rng.randrange(3)))
    mark = HighWaterMark(min(some_id(), LONG), max(some_id(), LONG), skipped)  # type: ignore[arg-type]
    ids = sorted({some_id() for _ in range(rng.randrange(30))})
    short, long = mark.above(ids)
    assert all(one < LONG for one in short)
    assert all(one >= LONG for one in long)
    found = {*short, *long, *mark.within_skipped(ids)}
    assert found == {one for one in ids if not mark.may_know(one)}


def test_the_counters_and_the_recorded_ends_are_combined() -> None:
    known = KnownLedgers("cluster", short_end=10, long_end=LONG + 10, skipped=((1, 2),))
    assert known.mark(IdCounters(5, LONG)) == HighWaterMark(10, LONG + 10, ((1, 2),))
    assert known.mark(IdCounters(50, LONG + 50)) == HighWaterMark(50, LONG + 50, ((1, 2),))


def test_ends_only_rise() -> None:
    known = KnownLedgers("cluster", short_end=10, long_end=LONG + 10)
    assert known.raised(short_end=3, long_end=LONG) == known
    assert known.raised(short_end=11).short_end == 11
    assert known.raised(long_end=LONG + 11).long_end == LONG + 11


def test_skipped_ranges_are_kept_once_and_in_bounded_number() -> None:
    known = KnownLedgers("cluster")
    assert known.with_skipped((5, 5), (7, 6)) == known, "empty ranges"
    assert known.with_skipped((1, 2)).with_skipped((1, 2), (3, 4)).skipped == ((1, 2), (3, 4))
    for at in range(SKIPPED_MAX + 1):
        known = known.with_skipped((at, at + 1))
    assert (len(known.skipped), known.skipped[0]) == (SKIPPED_MAX, (1, 2))


def test_a_later_report_keeps_the_time_and_the_highest_ends_of_the_first() -> None:
    """What `accept` must cover may have been deleted by a restart in between, but not by another bookie."""
    known = KnownLedgers("cluster").with_report("b1", dataclasses.replace(REPORT, missing=4))
    later = RollbackReport(found_ms=50, unknown=1, first=7, last=7, short_end=8, long_end=LONG + 1)
    found = known.with_report("b1", later).reports["b1"]
    assert (found.found_ms, found.unknown, found.short_end, found.long_end) == (5, 1, 10, LONG + 1)
    assert found.missing == 4, "until it is counted again"
    assert known.with_report("b1", dataclasses.replace(later, missing=0)).reports["b1"].missing == 0


def test_accepting_makes_all_reported_ledgers_known() -> None:
    other = RollbackReport(found_ms=6, unknown=1, first=LONG + 7, last=LONG + 7, long_end=LONG + 8)
    known = KnownLedgers("cluster", short_end=3).with_report("b1", REPORT).with_report("b2", other)
    accepted = known.with_skipped((3, 12)).accepted(by="me", at_ms=70)
    assert accepted == KnownLedgers("cluster", 10, LONG + 8, accepted_ms=70, accepted_by="me")
    mark = accepted.mark(IdCounters(0, LONG))
    assert all(mark.may_know(one) for one in (7, 9, LONG + 7))
    assert not mark.may_know(10)
    assert not mark.may_know(LONG + 8)


# --- the node ---------------------------------------------------------------------------------------------------------


def known_in(store: MetadataStore, instance_id: str = "cluster") -> KnownLedgersStore:
    return KnownLedgersStore(store, instance_id=instance_id)


async def test_without_a_node_nothing_is_known_beyond_the_counters(store: MetadataStore) -> None:
    assert await known_in(store).read() == (KnownLedgers("cluster"), None)
    await known_in(store).update(lambda known: known.raised(short_end=0))
    assert await store.exists(NODE) is None, "an update that changes nothing writes nothing"


async def test_what_was_written_is_read(store: MetadataStore) -> None:
    written = await known_in(store).update(
        lambda known: known.raised(short_end=4, long_end=2**63).with_skipped((1, 2)).with_report("b1", REPORT)
    )
    assert await known_in(store).read() == (written, 0)
    assert json.loads((await store.get(NODE)).data) == {
        "accepted_by": "",
        "accepted_ms": 0,
        "instance_id": "cluster",
        "long_end": 2**63,
        "reports": {
            "b1": {
                "first": 7,
                "found_ms": 5,
                "ids_protected": False,
                "last": 9,
                "long_end": 0,
                "missing": None,
                "short_end": 10,
                "unknown": 2,
            }
        },
        "short_end": 4,
        "skipped": [[1, 2]],
    }


async def test_several_bookies_may_change_the_node_at_the_same_time(store: MetadataStore, other: MetadataStore) -> None:
    def change(number: int) -> "asyncio.Future[KnownLedgers]":
        session = (store, other)[number % 2]
        return asyncio.ensure_future(
            known_in(session).update(lambda known: known.raised(short_end=number).with_report(f"b{number}", REPORT))
        )

    await asyncio.gather(*map(change, range(8)))
    known, version = await known_in(store).read()
    assert known.short_end == 7
    assert sorted(known.reports) == [f"b{number}" for number in range(8)]
    assert version == 7


@pytest.mark.parametrize("applied", [True, False])
async def test_a_change_with_a_lost_response_is_applied_once(
    environment: StoreEnvironment, store: MetadataStore, applied: bool
) -> None:
    await known_in(store).update(lambda known: known.raised(short_end=1))
    environment.lose_next_write(store, applied=applied)
    await known_in(store).update(lambda known: known.raised(short_end=2))
    known, version = await known_in(store).read()
    assert (known.short_end, version) == (2, 1)


async def test_a_node_that_keeps_changing_is_an_error() -> None:
    store = MemoryTree().connect()
    await known_in(store).update(lambda known: known.raised(short_end=1))
    real = store.set

    async def overtaken(path: str, data: bytes, *, version: int | None) -> object:
        await real(path, data + b" ", version=None)
        return await real(path, data, version=version)

    store.set = overtaken  # type: ignore[method-assign, assignment]
    ends = iter(range(2, 100))
    with pytest.raises(MetadataUnavailable, match="keep changing"):
        await known_in(store).update(lambda known: known.raised(short_end=next(ends)))


async def test_the_record_of_a_former_cluster_does_not_count(store: MetadataStore) -> None:
    """`initnewcluster` after a cluster was removed leaves Bindery's own nodes."""
    await known_in(store, "former").update(lambda known: known.raised(short_end=900).with_report("b1", REPORT))
    known, version = await known_in(store).read()
    assert (known, version) == (KnownLedgers("cluster"), 0)
    await known_in(store).update(lambda known: known.raised(short_end=2))
    assert (await known_in(store).read())[0] == KnownLedgers("cluster", short_end=2)


async def test_a_node_that_cannot_be_read_is_an_error(store: MetadataStore) -> None:
    """Its reports are unknown then, so nothing may be deleted."""
    await store.create(NODE, b"{", make_parents=True)
    with pytest.raises(Corrupt, match=NODE):
        await known_in(store).read()
    await store.create(LAYOUT.instance_id, b"cluster", make_parents=True)
    with pytest.raises(Corrupt):
        await refuse_if_suspected(store, LAYOUT, "nothing is deleted")


# --- accepting --------------------------------------------------------------------------------------------------------


async def test_only_the_reports_that_the_operator_saw_are_accepted(store: MetadataStore) -> None:
    known = known_in(store)
    await known.update(lambda one: one.with_report("b1", REPORT))
    _, version = await known.read()
    await known.update(lambda one: one.with_report("b2", REPORT))
    with pytest.raises(Conflict, match="changed meanwhile"):
        await known.accept(version=version, by="me", at_ms=1)
    _, version = await known.read()
    before = await known.accept(version=version, by="me", at_ms=1)
    assert sorted(before.reports) == ["b1", "b2"]
    after, version = await known.read()
    assert (after.reports, after.short_end, after.accepted_by) == ({}, 10, "me")
    with pytest.raises(Conflict, match="nothing to accept"):
        await known.accept(version=version, by="me", at_ms=2)


async def test_a_report_between_the_read_and_the_write_of_an_accept_is_not_lost() -> None:
    store = MemoryTree().connect()
    known = known_in(store)
    await known.update(lambda one: one.with_report("b1", REPORT))
    real = store.set

    async def overtaken(path: str, data: bytes, *, version: int | None) -> object:
        store.set = real  # type: ignore[method-assign]
        await known.update(lambda one: one.with_report("b2", REPORT))
        return await real(path, data, version=version)

    store.set = overtaken  # type: ignore[method-assign, assignment]
    with pytest.raises(Conflict, match="changed meanwhile"):
        await known.accept(version=0, by="me", at_ms=1)
    assert sorted((await known.read())[0].reports) == ["b1", "b2"]


async def test_a_report_refuses_what_depends_on_complete_metadata(store: MetadataStore) -> None:
    known = known_in(store)
    await known.update(lambda one: one.with_report("b2", REPORT).with_report("b1", REPORT))
    await refuse_if_suspected(store, LAYOUT, "no orphans are deleted")
    await store.create(LAYOUT.instance_id, b"cluster", make_parents=True)
    with pytest.raises(MetadataRollbackSuspected) as raised:
        await refuse_if_suspected(store, LAYOUT, "no orphans are deleted")
    assert raised.value.code == SUSPECTED
    assert "no orphans are deleted: bookies (b1, b2) store 4 replicas" in str(raised.value)
    await known.accept(version=(await known.read())[1], by="me", at_ms=1)
    await refuse_if_suspected(store, LAYOUT, "no orphans are deleted")
    await store.set(LAYOUT.instance_id, b"another", version=None)
    await refuse_if_suspected(store, LAYOUT, "no orphans are deleted")
