"""Placement: racks, weights and refusals. Equal inputs give equal choices."""

from collections import Counter
from random import Random

import pytest
from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.placement.placement import Candidate, choose_ensemble, choose_replacements
from hypothesis import given, settings
from hypothesis import strategies as st


def bookies(count: int, **fields: object) -> list[Candidate]:
    return [Candidate(BookieId(f"b{i}"), **fields) for i in range(count)]  # type: ignore[arg-type]


def test_an_ensemble_has_distinct_members() -> None:
    ensemble = choose_ensemble(bookies(5), ensemble_size=5, write_quorum=3, ack_quorum=2, rng=Random(1))
    assert sorted(ensemble) == ["b0", "b1", "b2", "b3", "b4"]


def test_equal_inputs_give_equal_choices_in_any_order() -> None:
    sizes = {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 2}
    one = choose_ensemble(bookies(9), **sizes, rng=Random(5))
    two = choose_ensemble(list(reversed(bookies(9))), **sizes, rng=Random(5))
    assert one == two
    assert len({choose_ensemble(bookies(9), **sizes, rng=Random(seed)) for seed in range(20)}) > 10


def test_the_error_reports_the_request_the_bookies_and_each_refusal() -> None:
    candidates = [
        Candidate(BookieId("b0")),
        Candidate(BookieId("b1"), refusal="read-only: disk full"),
        Candidate(BookieId("b2")),
    ]
    with pytest.raises(NotEnoughBookies) as raised:
        choose_ensemble(
            candidates,
            ensemble_size=3,
            write_quorum=3,
            ack_quorum=2,
            rng=Random(1),
            exclude={BookieId("b2"): "connection refused"},
        )
    assert raised.value.facts["refused"] == {"b1": "read-only: disk full", "b2": "connection refused"}
    assert raised.value.facts["known"] == 3
    assert str(raised.value) == (
        "not enough bookies for a new ledger: asked=3 (write_quorum=3 ack_quorum=2) usable=1 (b0) known=3 "
        "refused=b1: read-only: disk full; b2: connection refused"
    )


def test_the_error_without_any_bookie_reports_that_none_is_known() -> None:
    with pytest.raises(NotEnoughBookies, match=r"usable=0 known=0 refused=none"):
        choose_ensemble([], ensemble_size=1, write_quorum=1, ack_quorum=1, rng=Random(1))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    racks=st.lists(st.sampled_from(["/a", "/b", "/c"]), min_size=3, max_size=9),
    write_quorum=st.integers(2, 3),
)
def test_each_write_set_spans_two_racks_if_possible(seed: int, racks: list[str], write_quorum: int) -> None:
    """Goal: if the bookies are in at least two racks, no ensemble of three bookies is in one rack."""
    candidates = [Candidate(BookieId(f"b{i}"), rack=rack) for i, rack in enumerate(racks)]
    rack_of = {candidate.bookie_id: candidate.rack for candidate in candidates}
    ensemble = choose_ensemble(candidates, ensemble_size=3, write_quorum=write_quorum, ack_quorum=2, rng=Random(seed))
    if len(set(racks)) > 1:
        assert len({rack_of[bookie_id] for bookie_id in ensemble}) >= 2
    if len(set(racks)) == 3:
        assert len({rack_of[bookie_id] for bookie_id in ensemble}) == 3


def test_racks_are_a_preference_only() -> None:
    candidates = bookies(3, rack="/a")
    assert len(choose_ensemble(candidates, ensemble_size=3, write_quorum=3, ack_quorum=2, rng=Random(1))) == 3


def test_bookies_are_chosen_in_proportion_to_their_free_space() -> None:
    candidates = [Candidate(BookieId("big"), free_bytes=900), Candidate(BookieId("small"), free_bytes=100)]
    rng = Random(7)
    counts = Counter(
        choose_ensemble(candidates, ensemble_size=1, write_quorum=1, ack_quorum=1, rng=rng)[0] for _ in range(2_000)
    )
    assert 0.87 < counts[BookieId("big")] / 2_000 < 0.93


def test_with_unknown_free_space_all_are_equally_likely() -> None:
    candidates = [Candidate(BookieId("big"), free_bytes=900), Candidate(BookieId("unknown"))]
    rng = Random(7)
    counts = Counter(
        choose_ensemble(candidates, ensemble_size=1, write_quorum=1, ack_quorum=1, rng=rng)[0] for _ in range(2_000)
    )
    assert 0.45 < counts[BookieId("big")] / 2_000 < 0.55


def test_replacements_avoid_the_ensemble_the_failed_and_the_excluded() -> None:
    ensemble = [BookieId("b0"), BookieId("b1"), BookieId("b2")]
    chosen = choose_replacements(
        bookies(5),
        ensemble=ensemble,
        failed={1: BookieId("b1")},
        write_quorum=3,
        rng=Random(1),
        exclude={BookieId("b3"): "quarantined"},
    )
    assert chosen == {1: "b4"}


def test_a_partial_replacement_is_better_than_none() -> None:
    ensemble = [BookieId("b0"), BookieId("b1"), BookieId("b2")]
    failed = {0: BookieId("b0"), 2: BookieId("b2")}
    chosen = choose_replacements(bookies(4), ensemble=ensemble, failed=failed, write_quorum=3, rng=Random(1))
    assert chosen == {0: "b3"}


def test_the_error_without_a_replacement_has_the_reasons() -> None:
    ensemble = [BookieId("b0"), BookieId("b1")]
    with pytest.raises(NotEnoughBookies) as raised:
        choose_replacements(
            [*bookies(2), Candidate(BookieId("b9"), refusal="read-only")],
            ensemble=ensemble,
            failed={1: BookieId("b1")},
            write_quorum=2,
            rng=Random(1),
        )
    assert raised.value.facts["refused"] == {
        "b0": "in the ensemble already",
        "b1": "failed in this ledger",
        "b9": "read-only",
    }


def test_a_replacement_is_in_another_rack_than_the_remaining_members() -> None:
    candidates = [
        Candidate(BookieId("b0"), rack="/a"),
        Candidate(BookieId("b1"), rack="/b"),
        Candidate(BookieId("b2"), rack="/a"),
        Candidate(BookieId("b3"), rack="/b"),
    ]
    for seed in range(10):
        chosen = choose_replacements(
            candidates,
            ensemble=[BookieId("b0"), BookieId("b1")],
            failed={1: BookieId("b1")},
            write_quorum=2,
            rng=Random(seed),
        )
        assert chosen == {1: "b3"}
