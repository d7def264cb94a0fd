"""Owners of key hashes: the choices of Pulsar's own classes, and what joining and leaving may change."""

import itertools
import json
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bindery_broker.dispatch.key_ranges import HASH_MAX, HashRing, KeyRanges, StickyRanges, checked_ranges
from bindery_core.errors import BadRequest, Conflict
from hypothesis import given, settings
from hypothesis import strategies as st

GOLDEN: dict[str, list[Any]] = json.loads((Path(__file__).parent / "golden" / "pulsar_owners.json").read_text())
RING_HASHES = range(1, HASH_MAX + 1)
STICKY_HASHES = range(HASH_MAX + 1)


def owners(ranges: KeyRanges[Any], hashes: range) -> list[Any]:
    return [ranges.owner(key_hash) for key_hash in hashes]


def crc_of(ranges: KeyRanges[int], hashes: range) -> int:
    return zlib.crc32(bytes(255 if owner is None else owner for owner in owners(ranges, hashes)))


def check_ranges(ranges: KeyRanges[Any], hashes: range) -> None:
    """`ranges()` must cover exactly the hashes that each consumer owns, and so must `owned`."""
    found: dict[int, Any] = {}
    for consumer, held in ranges.ranges().items():
        assert held == sorted(held)
        hashes_held = [key_hash for first, last in held for key_hash in range(first, last + 1)]
        owned = [key_hash for first, last in ranges.owned(consumer) for key_hash in range(first, last + 1)]
        assert sorted(owned) == hashes_held
        for (_, last), (first, _) in itertools.pairwise(held):
            assert last + 1 < first, "adjacent ranges are joined"
        for first, last in held:
            for key_hash in range(first, last + 1):
                assert key_hash not in found, "two consumers own one hash"
                found[key_hash] = consumer
    assert [found.get(key_hash) for key_hash in hashes] == owners(ranges, hashes)
    assert set(found) <= set(hashes)


@pytest.mark.parametrize("row", GOLDEN["keys"], ids=lambda row: row["key_hex"])
def test_keys_have_the_hashes_that_pulsar_computes(row: dict[str, Any]) -> None:
    key = bytes.fromhex(row["key_hex"])
    assert HashRing[int]().hash_of(key) == row["auto_split"]
    assert StickyRanges[int]().hash_of(key) == row["sticky"]


@pytest.mark.parametrize("row", GOLDEN["rings"], ids=lambda row: ",".join(row["steps"])[:40])
def test_a_ring_has_the_owners_that_pulsar_chooses(row: dict[str, Any]) -> None:
    ring = HashRing[int]()
    count = 0
    for step, crc in zip(row["steps"], row["owners_crc32"], strict=True):
        if step.startswith("-"):
            ring.remove(int(step[1:]))
        else:
            ring.add(count, step)
            count += 1
        assert crc_of(ring, RING_HASHES) == crc
    assert [list(held) for held in ring.ranges()[count - 1]] == row["ranges_of_last"]


@pytest.mark.parametrize("row", GOLDEN["sticky"], ids=lambda row: str(row["bounds"]))
def test_sticky_ranges_are_accepted_and_owned_as_in_pulsar(row: dict[str, Any]) -> None:
    sticky = StickyRanges[int]()
    for consumer, (bounds, accepted) in enumerate(zip(row["bounds"], row["accepted"], strict=True)):
        ranges = list(zip(bounds[::2], bounds[1::2], strict=True))
        if accepted:
            sticky.add(consumer, f"c{consumer}", ranges)
        else:
            with pytest.raises((BadRequest, Conflict)):
                sticky.add(consumer, f"c{consumer}", ranges)
    assert crc_of(sticky, STICKY_HASHES) == row["owners_crc32"]
    check_ranges(sticky, STICKY_HASHES)


def test_an_empty_ring_has_no_owner():
    ring = HashRing[str]()
    assert owners(ring, range(1, HASH_MAX, 1000)) == [None] * 66
    assert ring.ranges() == {}
    ring.add("c", "c")
    ring.remove("c")
    assert ring.owner(1) is None
    assert (ring._points, ring._queues, ring._names, ring._numbers) == ([], {}, {}, {})


NAMES = st.lists(st.sampled_from(["a", "b", "c", "same", "", "ü"]), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(names=NAMES, seed=st.integers(0, 999))
def test_joining_takes_hashes_for_the_joiner_only_and_leaving_returns_only_the_leavers(
    names: list[str], seed: int
) -> None:
    hashes = range(1 + seed % 7, HASH_MAX + 1, 7)
    ring = HashRing[int]()
    before = owners(ring, hashes)
    for consumer, name in enumerate(names):
        ring.add(consumer, name)
        after = owners(ring, hashes)
        assert None not in after
        assert all(new in (old, consumer) for old, new in zip(before, after, strict=True))
        before = after
    check_ranges(ring, RING_HASHES)
    order = list(range(len(names)))
    random.Random(seed).shuffle(order)
    for consumer in order:
        ring.remove(consumer)
        after = owners(ring, hashes)
        assert consumer not in after
        assert all(new == old for old, new in zip(before, after, strict=True) if old != consumer)
        before = after
    assert ring._queues == {}
    assert ring._points == []


def test_a_consumer_that_joins_again_gets_its_hashes_back():
    ring = HashRing[object]()
    first, second = object(), object()
    ring.add(first, "a")
    ring.add(second, "b")
    before = owners(ring, RING_HASHES)
    ring.remove(second)
    third = object()
    ring.add(third, "b")
    assert owners(ring, RING_HASHES) == [third if owner is second else owner for owner in before]


@pytest.mark.parametrize("names", ["different", "equal"])
@pytest.mark.parametrize("count", range(2, 21))
def test_a_ring_balances_the_hashes(count: int, names: str) -> None:
    """With 100 points, the standard deviation of a share is a tenth of it, and for 20 consumers 3 of them are rare."""
    ring = HashRing[int]()
    for consumer in range(count):
        ring.add(consumer, f"consumer-{consumer}" if names == "different" else "consumer")
    fair = HASH_MAX / count
    shares = Counter(owners(ring, RING_HASHES))
    assert len(shares) == count
    assert min(shares.values()) > 0.65 * fair
    assert max(shares.values()) < 1.4 * fair


def test_points_that_coincide_go_to_the_consumer_that_waits_longest():
    ring = HashRing[str]()
    for n in range(300):
        ring.add(f"c{n}", f"c{n}")
    contested = [point for point, queue in ring._queues.items() if len(queue) > 2]
    assert contested
    point = contested[0]
    for consumer in list(ring._queues[point]):
        assert ring.owner(point) == consumer
        ring.remove(consumer)


@pytest.mark.parametrize("text", ["0-10", "10-20", "5-15", "0-65535", "20-20", "30-30", "0-0,30-31"])
def test_an_overlap_names_the_holder_and_changes_nothing(text: str) -> None:
    sticky = StickyRanges[int]()
    sticky.add(0, "left", [(10, 20)])
    sticky.add(1, "right", [(30, 40), (0, 5)])
    wanted = [(int(a), int(b)) for a, b in (part.split("-") for part in text.split(","))]
    before = (owners(sticky, STICKY_HASHES), sticky.ranges())
    with pytest.raises(Conflict) as error:
        sticky.add(2, "third", wanted)
    facts = error.value.facts
    holder = {"left": 0, "right": 1}[facts["holder"]]
    assert {sticky.owner(key_hash) for key_hash in facts["overlap"]} == {holder}
    assert tuple(facts["held_range"]) in sticky.ranges()[holder]
    assert tuple(facts["range"]) in wanted
    assert (owners(sticky, STICKY_HASHES), sticky.ranges()) == before
    sticky.remove(holder)
    sticky.remove(1 - holder)
    sticky.add(2, "third", wanted)
    check_ranges(sticky, STICKY_HASHES)


@pytest.mark.parametrize(
    "ranges", [[], [(-1, 5)], [(0, HASH_MAX + 1)], [(6, 5)], [(0, 5), (5, 9)], [(0, 9), (3, 4)], [(1, 1), (1, 1)]]
)
def test_ranges_that_make_no_sense_are_refused(ranges: list[tuple[int, int]]) -> None:
    sticky = StickyRanges[int]()
    with pytest.raises(BadRequest):
        sticky.add(0, "c", ranges)
    with pytest.raises(BadRequest):
        checked_ranges(ranges)
    assert sticky.ranges() == {}
    sticky.add(0, "c", [(0, HASH_MAX)])


def test_hashes_of_no_range_have_no_owner():
    sticky = StickyRanges[str]()
    assert sticky.owner(7) is None
    sticky.add("c", "c", [(10, 11), (20, 20)])
    owned = [key_hash for key_hash in STICKY_HASHES if sticky.owner(key_hash) == "c"]
    assert owned == [10, 11, 20]
    sticky.remove("c")
    assert owners(sticky, range(9, 22)) == [None] * 13


BOUNDS = st.integers(0, 60)


@settings(max_examples=200, deadline=None)
@given(rows=st.lists(st.lists(st.tuples(BOUNDS, BOUNDS), max_size=3), max_size=8), leave=st.sets(st.integers(0, 7)))
def test_sticky_ranges_are_like_a_table_of_owners(rows: list[list[tuple[int, int]]], leave: set[int]) -> None:
    sticky = StickyRanges[int]()
    table: dict[int, int] = {}
    for consumer, ranges in enumerate(rows):
        wanted = [key_hash for first, last in ranges for key_hash in range(first, last + 1)]
        if not ranges or any(first > last for first, last in ranges) or len(wanted) != len(set(wanted)):
            with pytest.raises(BadRequest):
                sticky.add(consumer, f"{consumer}", ranges)
        elif any(key_hash in table for key_hash in wanted):
            with pytest.raises(Conflict):
                sticky.add(consumer, f"{consumer}", ranges)
        else:
            sticky.add(consumer, f"{consumer}", ranges)
            table.update(dict.fromkeys(wanted, consumer))
    for consumer in leave & set(table.values()):
        sticky.remove(consumer)
        table = {key_hash: owner for key_hash, owner in table.items() if owner != consumer}
    assert owners(sticky, range(100)) == [table.get(key_hash) for key_hash in range(100)]
    check_ranges(sticky, range(100))
