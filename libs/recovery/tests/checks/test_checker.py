"""The check of a ledger reports exactly the missing copies, whatever the ledger and the stored entries are."""

import asyncio
import random
from collections.abc import Callable

import pytest
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import Status
from bindery_recovery.budget import RepairBudget
from bindery_recovery.checks.checker import (
    ALL,
    ENDS,
    Depth,
    FragmentState,
    LedgerCheck,
    check_fragments,
    check_ledger,
    entries_to_read,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import simulate

NAMES = [BookieId(f"bookie-{n}:3181") for n in range(7)]


async def written(client: MemoryLedgerClient, count: int, **quorums: int) -> LedgerId:
    writer = await client.create(**quorums)
    if count:
        await writer.add_many([b"payload %d" % n for n in range(count)])
    await writer.close()
    return writer.ledger_id


async def checked(client: MemoryLedgerClient, ledger_id: LedgerId, depth: Depth = ENDS, *leaving: str) -> LedgerCheck:
    return await check_ledger(
        client,
        ledger_id,
        await client.metadata(ledger_id),
        bookies=await client.list_bookies(),
        leaving=[BookieId(one) for one in leaving],
        depth=depth,
        randomness=random.Random(1),
    )


async def test_a_whole_ledger_is_whole_at_every_depth_and_the_ends_need_few_reads() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 500)
    for depth in (ENDS, Depth(10), ALL):
        check = await checked(client, ledger_id, depth)
        assert check.is_whole
        assert check.tail is None
        assert check.missing_entries == 0
    assert (await checked(client, ledger_id)).entries_read == 6
    assert (await checked(client, ledger_id, Depth(10))).entries_read in range(150, 157)
    assert (await checked(client, ledger_id, ALL)).entries_read == 1500


async def test_a_hole_in_the_middle_is_found_by_reading_all_and_not_by_the_ends() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 50)
    holder = (await client.metadata(ledger_id)).last_segment.ensemble[1]
    client.ledgers.find(ledger_id).copies.lose(holder, 20, 21)
    assert (await checked(client, ledger_id)).is_whole
    check = await checked(client, ledger_id, ALL)
    (bad,) = check.bad
    assert (bad.state, bad.bad_entry_ids, bad.fragment.bookie_id) == (FragmentState.MISSING, (20, 21), holder)
    assert check.missing_entries == 2
    assert check.missing_bytes == check.metadata.length * 2 // 50, "entries count as if they had equal sizes"
    assert bad.reason == "entry 20: entry is missing"


async def test_a_corrupt_copy_counts_as_missing() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 9)
    ledger = client.ledgers.find(ledger_id)
    holder = ledger.metadata.last_segment.ensemble[2]
    ledger.copies.damage(ledger.metadata, ledger.entries, holder, 8)
    (bad,) = (await checked(client, ledger_id)).bad
    assert (bad.state, bad.bad_entry_ids) == (FragmentState.MISSING, (8,))
    assert "digest" in bad.reason


async def test_an_unregistered_bookie_is_lost_without_a_read_even_if_it_should_store_nothing() -> None:
    client = MemoryLedgerClient()
    empty, full = await written(client, 0), await written(client, 4)
    gone = BookieId("bookie-2:3183")
    del client.ledgers.bookies[gone]
    for ledger_id, count in ((empty, 0), (full, 4)):
        (bad,) = (await checked(client, ledger_id)).bad
        assert (bad.state, bad.fragment.bookie_id) == (FragmentState.LOST, gone)
        assert list(bad.entries_to_copy) == list(range(count))


async def test_copies_on_a_read_only_bookie_count_and_those_on_a_leaving_one_do_not() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 6)
    holder = (await client.metadata(ledger_id)).last_segment.ensemble[0]
    client.ledgers.bookies[holder] = False
    assert (await checked(client, ledger_id)).is_whole
    (bad,) = (await checked(client, ledger_id, ENDS, holder)).bad
    assert (bad.state, list(bad.entries_to_copy)) == (FragmentState.LEAVING, [0, 1, 2, 3, 4, 5])


async def test_a_refilling_bookie_has_no_missing_entries() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 300)
    holder = (await client.metadata(ledger_id)).last_segment.ensemble[0]
    client.ledgers.find(ledger_id).copies.lose(holder)
    client.ledgers.read_answers[holder] = Status.UNKNOWN_LEDGER_STATE
    for depth in (ENDS, ALL):
        check = await checked(client, ledger_id, depth)
        (bad,) = check.bad
        assert (bad.state, bad.bad_entry_ids, tuple(bad.entries_to_copy)) == (FragmentState.REFILLING, (), ())
    assert check.entries_read < 620, "one response applies to the whole ledger"


async def many_segments(client: MemoryLedgerClient, status: Status) -> tuple[LedgerCheck, BookieId]:
    """Check 30 segments, more than three batches of a bookie, that all name a bookie which answers with `status`."""
    ledger_id = await written(client, 60)
    metadata = await client.metadata(ledger_id)
    ensemble = metadata.last_segment.ensemble
    segments = tuple(Segment(EntryId(first), ensemble) for first in range(0, 60, 2))
    client.ledgers.read_answers[ensemble[0]] = status
    bookies = await client.list_bookies()
    check = await check_ledger(client, ledger_id, metadata.with_changes(segments=segments), bookies=bookies)
    assert [one.fragment.segment_first for one in check.bad] == list(range(0, 60, 2))
    return check, ensemble[0]


async def test_all_fragments_of_a_bookie_in_limbo_are_refilling() -> None:
    """Reads stop after two batches without a response. A bookie in limbo does respond."""
    check, holder = await many_segments(MemoryLedgerClient(), Status.UNKNOWN_LEDGER_STATE)
    assert {(one.state, one.fragment.bookie_id) for one in check.bad} == {(FragmentState.REFILLING, holder)}


async def test_a_silent_bookie_gets_two_batches_and_all_its_fragments_are_unsure() -> None:
    check, _ = await many_segments(MemoryLedgerClient(), Status.IO_ERROR)
    assert {one.state for one in check.bad} == {FragmentState.UNSURE}
    assert check.entries_read == 2 * 60 + 8 + 16
    assert "IO_ERROR" in check.bad[0].reason
    assert check.bad[-1].reason == "bookie does not answer"


@pytest.mark.parametrize("status", [Status.IO_ERROR, Status.TOO_MANY_REQUESTS, Status.UNAUTHORIZED])
async def test_an_error_does_not_prove_that_an_entry_is_missing(status: Status) -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 3)
    holder = (await client.metadata(ledger_id)).last_segment.ensemble[0]
    client.ledgers.read_answers[holder] = status
    (bad,) = (await checked(client, ledger_id, ALL)).bad
    assert (bad.state, bad.bad_entry_ids) == (FragmentState.UNSURE, ())
    assert status.name in bad.reason


async def test_the_open_last_segment_is_not_read_but_its_lost_and_leaving_members_are_reported() -> None:
    ledgers = MemoryLedgers()
    client = MemoryLedgerClient(ledgers)
    writer = await client.create()
    await writer.add_many([b"x"] * 10)
    ensemble = writer.metadata.last_segment.ensemble
    check = await checked(client, writer.ledger_id, ALL)
    assert check.is_whole
    assert check.tail is not None
    assert check.entries_read == 0
    assert check.missing_bytes is None
    del ledgers.bookies[ensemble[1]]
    check = await checked(client, writer.ledger_id, ALL, ensemble[2])
    assert not check.is_whole
    assert check.bad == ()
    assert check.tail is not None
    assert (dict(check.tail.lost), dict(check.tail.leaving)) == ({1: ensemble[1]}, {2: ensemble[2]})


async def test_closed_segments_of_an_open_ledger_are_checked() -> None:
    client = MemoryLedgerClient()
    writer = await client.create()
    await writer.add_many([b"x"] * 10)
    ledger = client.ledgers.find(writer.ledger_id)
    first = ledger.metadata.last_segment.ensemble
    (spare,) = set(client.ledgers.bookies) - set(first)
    second = Segment(EntryId(10), (spare, *first[1:]))
    ledger.metadata = ledger.metadata.with_changes(segments=(ledger.metadata.segments[0], second))
    await writer.add_many([b"y"] * 5)
    del client.ledgers.bookies[first[0]]
    check = await checked(client, writer.ledger_id)
    (bad,) = check.bad
    assert (bad.state, bad.fragment.segment_first, list(bad.entries_to_copy)) == (
        FragmentState.LOST,
        0,
        list(range(10)),
    )
    assert check.tail is not None
    assert check.tail.is_whole


async def test_a_single_fragment_can_be_checked_again() -> None:
    client = MemoryLedgerClient()
    ledger_id = await written(client, 4)
    gone = BookieId("bookie-1:3182")
    is_writable = client.ledgers.bookies.pop(gone)
    (bad,) = (await checked(client, ledger_id)).bad
    metadata = await client.metadata(ledger_id)
    for bookies, state in (
        (dict(client.ledgers.bookies), FragmentState.LOST),
        ({**client.ledgers.bookies, gone: is_writable}, FragmentState.WHOLE),
    ):
        client.ledgers.bookies = bookies
        (again,) = await check_fragments(client, ledger_id, metadata, [bad.fragment], bookies=bookies)
        assert again.state is state


def test_reading_is_paced_by_the_budget() -> None:
    async def run(rate: float) -> float:
        client = MemoryLedgerClient()
        writer = await client.create()
        await writer.add_many([b"x" * 10_000] * 1_000)
        await writer.close()
        loop = asyncio.get_running_loop()
        budget = RepairBudget(bytes_per_s_max=rate, bytes_per_s_min=rate)
        began = loop.time()
        check = await check_ledger(
            client, writer.ledger_id, writer.metadata, bookies=await client.list_bookies(), depth=ALL, budget=budget
        )
        assert check.bytes_read == budget.bytes_paid
        assert budget.entries_in_flight == 0
        return check.bytes_read / (loop.time() - began)

    assert simulate(run(1e6)) == pytest.approx(1e6, rel=0.2)


@given(st.integers(0, 400), st.floats(0, 100), st.integers(0, 100))
def test_a_depth_selects_both_ends_and_its_share_of_the_entries(count: int, percent: float, seed: int) -> None:
    ids = [3 * n + 1 for n in range(count)]
    chosen = list(entries_to_read(ids, Depth(percent), random.Random(seed)))
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(ids)
    assert set(ids[:1] + ids[-1:]) <= set(chosen)
    assert len(chosen) <= min(count, 2 + count * percent / 100 + 1)
    assert len(chosen) >= min(count, count * percent / 100)


def test_the_smallest_depth_selects_the_ends_and_the_largest_all_entries() -> None:
    """If all entries are selected, the sequence is returned as it is."""
    for ids in ([], [7], [7, 8]):
        assert entries_to_read(ids, ENDS) is ids
    assert entries_to_read([7, 8, 9], ENDS) == [7, 9]
    assert entries_to_read(range(1000), ALL) == range(1000)
    assert entries_to_read(range(10), Depth(20)) == [0, 2, 7, 9]
    nearly_all = entries_to_read(range(1000), Depth(99))
    assert 990 <= len(nearly_all) < 1000


@st.composite
def ledgers(draw: st.DrawFn) -> LedgerMetadata:
    ensemble_size = draw(st.integers(1, 5))
    write_quorum = draw(st.integers(1, ensemble_size))
    count = draw(st.integers(0, 40))
    starts = sorted(draw(st.sets(st.integers(1, max(1, count)), max_size=3)) if count else [])
    segments = [Segment(EntryId(start), tuple(draw(st.permutations(NAMES))[:ensemble_size])) for start in [0, *starts]]
    is_closed = draw(st.booleans())
    unclosed = draw(st.sampled_from([LedgerState.OPEN, LedgerState.IN_RECOVERY]))
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=draw(st.integers(1, write_quorum)),
        segments=tuple(segments),
        state=LedgerState.CLOSED if is_closed else unclosed,
        last_entry_id=EntryId(count - 1 if is_closed else -1),
        length=10 * count if is_closed else 0,
    )


def should_hold(metadata: LedgerMetadata) -> dict[tuple[int, int], list[int]]:
    """Return the entries by (segment, index) according to the protocol's definition, for segments that have an end."""
    ends = [s.first_entry_id for s in metadata.segments[1:]]
    if metadata.state is LedgerState.CLOSED:
        ends.append(EntryId(metadata.last_entry_id + 1))
    found: dict[tuple[int, int], list[int]] = {}
    for segment, end in zip(metadata.segments, ends, strict=False):
        for index in range(metadata.ensemble_size):
            found[segment.first_entry_id, index] = [
                entry_id
                for entry_id in range(segment.first_entry_id, end)
                if index
                in write_set(
                    entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
                )
            ]
    return found


@settings(max_examples=300, deadline=None)
@given(ledgers(), st.randoms(use_true_random=False), st.sampled_from([ENDS, ALL]))
def test_exactly_the_bad_entries_of_exactly_the_bad_bookies_are_reported(
    metadata: LedgerMetadata, chance: random.Random, depth: Depth
) -> None:
    async def run() -> None:
        client = MemoryLedgerClient(MemoryLedgers(bookies=NAMES))
        ledger = client.ledgers.create(metadata)
        wanted = should_hold(metadata)
        total = max([entry_id + 1 for ids in wanted.values() for entry_id in ids], default=0)
        ledger.metadata = metadata
        for number in range(total):  # store each entry on the ensemble of its segment
            at = metadata.segment_of(EntryId(number))
            ledger.metadata = metadata.with_changes(segments=(Segment(EntryId(0), at.ensemble),))
            ledger.store([b"entry %d" % number])
        ledger.metadata = metadata

        ensemble_of = {s.first_entry_id: s.ensemble for s in metadata.segments}
        kinds = {name: chance.choice(["good"] * 4 + ["gone", "leaving", "refilling", "error"]) for name in NAMES}
        bad: dict[tuple[int, int], list[int]] = {}
        for (first, index), ids in wanted.items():
            bookie_id = ensemble_of[EntryId(first)][index]
            for entry_id in ids:
                harm = chance.choice(["none"] * 5 + ["lose", "damage"])
                if harm == "lose":
                    ledger.copies.lose(bookie_id, entry_id)
                elif harm == "damage":
                    ledger.copies.damage(metadata, ledger.entries, bookie_id, entry_id)
                if harm != "none" and (depth is ALL or entry_id in (ids[0], ids[-1])):
                    bad.setdefault((first, index), []).append(entry_id)
        for name, kind in kinds.items():
            if kind == "gone":
                del client.ledgers.bookies[name]
            elif kind == "refilling":
                client.ledgers.read_answers[name] = Status.UNKNOWN_LEDGER_STATE
            elif kind == "error":
                client.ledgers.read_answers[name] = Status.IO_ERROR
        leaving = [name for name, kind in kinds.items() if kind == "leaving"]

        check = await check_ledger(
            client, ledger.ledger_id, metadata, bookies=client.ledgers.bookies, leaving=leaving, depth=depth
        )

        expected: dict[tuple[int, int], tuple[FragmentState, tuple[int, ...]]] = {}
        state_of: dict[str, Callable[[list[int]], FragmentState | None]] = {
            "gone": lambda ids: FragmentState.LOST,
            "leaving": lambda ids: FragmentState.LEAVING,
            "refilling": lambda ids: FragmentState.REFILLING if ids else None,
            "error": lambda ids: FragmentState.UNSURE if ids else None,
        }
        for key, ids in wanted.items():
            kind = kinds[ensemble_of[EntryId(key[0])][key[1]]]
            if kind == "good":
                if key in bad:
                    expected[key] = (FragmentState.MISSING, tuple(bad[key]))
            elif (state := state_of[kind](ids)) is not None:
                expected[key] = (state, ())
        assert {
            (one.fragment.segment_first, one.fragment.index): (one.state, one.bad_entry_ids) for one in check.bad
        } == expected
        if metadata.state is LedgerState.CLOSED:
            assert check.tail is None
        else:
            assert check.tail is not None
            last = metadata.last_segment.ensemble
            assert set(check.tail.lost.values()) == {b for b in last if kinds[b] == "gone"}
            assert set(check.tail.leaving.values()) == {b for b in last if kinds[b] == "leaving"}

    simulate(run())
