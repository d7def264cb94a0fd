"""Racks of ensembles, compared with naive oracles: the minimum of racks, replacements under it, and moves."""

from collections import Counter
from itertools import permutations, product
from random import Random

import pytest
from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.placement.placement import (
    Candidate,
    RackRule,
    choose_ensemble,
    choose_move,
    choose_replacements,
)
from bindery_core.placement.rack_spread import fill_racks, racks_per_set, satisfies
from hypothesis import given, settings
from hypothesis import strategies as st

RACKS = ["/a", "/b", "/c"]
a_rack = st.sampled_from(RACKS)


def spans(racks: list[str], write_quorum: int) -> list[int]:
    """The oracle of `racks_per_set`, by the definition of a write set."""
    size = len(racks)
    return [len({racks[(first + i) % size] for i in range(write_quorum)}) for first in range(size)]


def candidates_of(racks: list[str]) -> list[Candidate]:
    return [Candidate(BookieId(f"b{i}"), rack=rack) for i, rack in enumerate(racks)]


def test_write_sets_of_four_bookies_in_two_racks() -> None:
    assert racks_per_set(["/a", "/a", "/b", "/b"], write_quorum=2) == (1, 2, 1, 2)
    assert racks_per_set(["/a", None, "/b", "/b"], write_quorum=2) == (1, 1, 1, 2)


@given(racks=st.lists(a_rack, min_size=1, max_size=6), data=st.data())
def test_racks_are_counted_by_write_set(racks: list[str], data: st.DataObject) -> None:
    write_quorum = data.draw(st.integers(1, len(racks)))
    assert list(racks_per_set(racks, write_quorum=write_quorum)) == spans(racks, write_quorum)


@settings(max_examples=300)
@given(
    spare=st.lists(a_rack, min_size=1, max_size=7),
    fixed=st.lists(st.none() | a_rack, min_size=1, max_size=6),
    data=st.data(),
)
def test_open_places_are_filled_whenever_that_is_possible(
    spare: list[str], fixed: list[str | None], data: st.DataObject
) -> None:
    """Goal: the search finds racks for the open places exactly if trying all of them does."""
    size, count = len(fixed), Counter(spare)
    write_quorum = data.draw(st.integers(1, size))
    needs = data.draw(st.lists(st.integers(1, min(3, write_quorum)), min_size=size, max_size=size))
    free = [index for index, rack in enumerate(fixed) if rack is None]

    def filled(choice: tuple[str, ...]) -> list[str]:
        taken = dict(zip(free, choice, strict=True))
        return [rack if rack is not None else taken[index] for index, rack in enumerate(fixed)]

    possible = any(
        not Counter(choice) - count and satisfies(filled(choice), needs, write_quorum=write_quorum)
        for choice in product(RACKS, repeat=len(free))
    )
    found = fill_racks(fixed, count, needs, write_quorum=write_quorum)
    assert (found is not None) == possible
    if found is not None:
        assert satisfies(found, needs, write_quorum=write_quorum)
        assert not Counter(found[index] for index in free) - count
        assert all(old in (None, new) for old, new in zip(fixed, found, strict=True))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 1_000),
    racks=st.lists(a_rack, min_size=3, max_size=6),
    sizes=st.sampled_from([(3, 3), (3, 2), (4, 2), (4, 3), (5, 3)]),
    minimum=st.integers(1, 3),
)
def test_an_enforced_minimum_is_met_or_the_creation_fails(
    seed: int, racks: list[str], sizes: tuple[int, int], minimum: int
) -> None:
    ensemble_size, write_quorum = sizes
    if len(racks) < ensemble_size:
        return
    needed = min(minimum, write_quorum)
    possible = any(
        min(spans([racks[i] for i in places], write_quorum)) >= needed
        for places in permutations(range(len(racks)), ensemble_size)
    )
    quorums = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": 1}
    candidates = candidates_of(racks)
    for is_enforced in (False, True):
        rule = RackRule(minimum, is_enforced)
        if is_enforced and not possible:
            with pytest.raises(NotEnoughBookies, match="not enough racks for a new ledger") as caught:
                choose_ensemble(candidates, **quorums, rng=Random(seed), rule=rule)
            assert f"each write quorum on {needed} racks" in str(caught.value)
            assert "/a" not in racks or f"/a:{racks.count('/a')}" in str(caught.value)
            continue
        ensemble = choose_ensemble(candidates, **quorums, rng=Random(seed), rule=rule)
        assert len(set(ensemble)) == ensemble_size
        if possible:
            assert min(spans([racks[int(b[1:])] for b in ensemble], write_quorum)) >= needed


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1_000),
    racks=st.lists(a_rack, min_size=4, max_size=7),
    sizes=st.sampled_from([(3, 3), (3, 2), (4, 2)]),
    failed=st.sets(st.integers(0, 2), min_size=1, max_size=3),
    is_absent=st.booleans(),
)
def test_an_enforced_minimum_is_not_given_up_by_replacements(
    seed: int, racks: list[str], sizes: tuple[int, int], failed: set[int], is_absent: bool
) -> None:
    """Goal: no write quorum gets below two racks, or below what it had, by a replacement; also if the failed bookies
    are not registered any more."""
    ensemble_size, write_quorum = sizes
    before, names = racks[:ensemble_size], [BookieId(f"b{i}") for i in range(len(racks))]
    ensemble = names[:ensemble_size]
    gone = {BookieId(f"b{i}") for i in failed} if is_absent else set()
    candidates = [one for one in candidates_of(racks) if one.bookie_id not in gone]
    needs = [min(2, had) for had in spans(before, write_quorum)]
    try:
        chosen = choose_replacements(
            candidates,
            ensemble=ensemble,
            failed={index: ensemble[index] for index in failed},
            write_quorum=write_quorum,
            rng=Random(seed),
            rule=RackRule(2, is_enforced=True),
            absent={names[i]: racks[i] for i in range(len(racks))},
        )
    except NotEnoughBookies:
        singles = [
            [*before[:index], rack, *before[index + 1 :]] for index in failed for rack in set(racks[ensemble_size:])
        ]
        assert not any(satisfies(after, needs, write_quorum=write_quorum) for after in singles)
        return
    after = [racks[int(chosen.get(index, ensemble[index])[1:])] for index in range(ensemble_size)]
    assert satisfies(after, needs, write_quorum=write_quorum)
    assert set(chosen) <= failed
    assert len(set(chosen.values())) == len(chosen)


def test_without_racks_a_replacement_is_chosen_even_if_a_minimum_is_enforced() -> None:
    candidates = [Candidate(BookieId(f"b{i}")) for i in range(4)]
    ensemble = tuple(one.bookie_id for one in candidates[:3])
    chosen = choose_replacements(
        candidates,
        ensemble=ensemble,
        failed={1: ensemble[1]},
        write_quorum=3,
        rng=Random(1),
        rule=RackRule(2, is_enforced=True),
    )
    assert chosen == {1: "b3"}


def test_the_error_of_a_replacement_names_the_racks() -> None:
    candidates = [*candidates_of(["/a", "/b"]), Candidate(BookieId("b9"), rack="/b")]
    with pytest.raises(NotEnoughBookies, match="no spare bookie in the racks that are needed") as caught:
        choose_replacements(
            candidates,
            ensemble=(BookieId("b0"), BookieId("b1")),
            failed={0: BookieId("b0")},
            write_quorum=2,
            rng=Random(1),
            rule=RackRule(2, is_enforced=True),
        )
    assert "each write quorum on 2 racks" in str(caught.value)
    assert "/b:1" in str(caught.value)


@settings(max_examples=300)
@given(
    seed=st.integers(0, 1_000),
    racks=st.lists(a_rack, min_size=3, max_size=8),
    sizes=st.sampled_from([(3, 3), (3, 2), (4, 2), (5, 3)]),
)
def test_moves_end_on_as_many_racks_as_single_moves_reach(seed: int, racks: list[str], sizes: tuple[int, int]) -> None:
    """Goal: each move puts a write quorum on more racks and none on fewer, and moves are found until none is left."""
    ensemble_size, write_quorum = sizes
    if len(racks) < ensemble_size:
        return
    candidates, ensemble = candidates_of(racks), [BookieId(f"b{i}") for i in range(ensemble_size)]
    for _ in range(ensemble_size * write_quorum + 1):
        held = [racks[int(b[1:])] for b in ensemble]
        spare = {rack for i, rack in enumerate(racks) if BookieId(f"b{i}") not in ensemble}
        better = [
            (index, rack)
            for index in range(ensemble_size)
            for rack in spare
            if (after := spans([*held[:index], rack, *held[index + 1 :]], write_quorum)) != spans(held, write_quorum)
            and all(new >= old for new, old in zip(after, spans(held, write_quorum), strict=True))
        ]
        move = choose_move(candidates, ensemble=ensemble, write_quorum=write_quorum, rng=Random(seed))
        assert (move is not None) == bool(better)
        if move is None:
            return
        index, new = move
        assert new not in ensemble
        assert (index, racks[int(new[1:])]) in better
        ensemble[index] = new
    pytest.fail("moves do not end")


def test_a_move_uses_no_bookie_that_is_refused_or_excluded() -> None:
    candidates = [
        *candidates_of(["/a", "/a", "/a"]),
        Candidate(BookieId("read-only"), rack="/b", refusal="read-only"),
        Candidate(BookieId("draining"), rack="/b"),
    ]
    ensemble = tuple(one.bookie_id for one in candidates[:3])
    excluded = {BookieId("draining"): "draining"}
    assert choose_move(candidates, ensemble=ensemble, write_quorum=3, rng=Random(1), exclude=excluded) is None
    assert choose_move(candidates, ensemble=ensemble, write_quorum=3, rng=Random(1)) == (0, "draining")
