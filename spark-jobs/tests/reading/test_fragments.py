"""The entries that each bookie must store, compared with a naive reading of the metadata."""

import random

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_spark.reading.fragments import Fragment, Tail, fragments_of, is_expected, ledger_of


def metadata_of(
    *ensembles: tuple[int, str], write_quorum: int = 2, last: int | None = None, length: int = 0
) -> LedgerMetadata:
    """`ensembles`: (first entry, one letter for each bookie); `last`: of a closed ledger."""
    segments = tuple(Segment(EntryId(first), tuple(BookieId(b) for b in letters)) for first, letters in ensembles)
    closed = {} if last is None else {"state": LedgerState.CLOSED, "last_entry_id": EntryId(last), "length": length}
    return LedgerMetadata(
        ensemble_size=len(ensembles[0][1]), write_quorum=write_quorum, ack_quorum=1, segments=segments, **closed
    )


def shares(metadata: LedgerMetadata, tail: Tail | None = None) -> list[Fragment]:
    return list(fragments_of(ledger_of(LedgerId(7), metadata, tail), metadata, tail))


def naive(metadata: LedgerMetadata, last: int) -> set[tuple[str, int]]:
    found = set()
    for entry_id in range(last + 1):
        segment = metadata.segment_of(EntryId(entry_id))
        for index in write_set(
            entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        ):
            found.add((str(segment.ensemble[index]), entry_id))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_every_required_copy_is_in_exactly_one_fragment(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    quorum = rng.randint(1, size)
    firsts = [0, *sorted(rng.sample(range(1, 40), rng.randint(0, 3)))]
    # A bookie may be twice in an ensemble: that is bad placement, but valid metadata.
    ensembles = [(first, "".join(rng.choice("abcdef") for _ in range(size))) for first in firsts]
    last = rng.randint(-1, 60)
    metadata = metadata_of(*ensembles, write_quorum=quorum, last=last)
    fragments = shares(metadata)
    copies = [(str(f.bookie_id), entry_id) for f in fragments for entry_id in f.entry_ids()]
    assert len(copies) == len(set(copies))
    assert set(copies) == naive(metadata, last)
    for fragment in fragments:
        ids = list(fragment.entry_ids())
        assert fragment.entry_count >= len(ids) > 0
        assert fragment.ends() == tuple(sorted({ids[0], ids[-1]}))
        assert all(is_expected(metadata, fragment.bookie_id, entry_id) for entry_id in ids)


@pytest.mark.parametrize("seed", range(40))
def test_an_end_of_one_share_is_read_from_its_whole_write_set(seed: int) -> None:
    """Otherwise an entry that is missing on one bookie would look like a lost entry."""
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    quorum = rng.randint(1, size)
    firsts = [0, *sorted(rng.sample(range(1, 40), rng.randint(0, 3)))]
    ensembles = [(first, "".join(rng.choice("abcdef") for _ in range(size))) for first in firsts]
    last = rng.randint(-1, 60)
    metadata = metadata_of(*ensembles, write_quorum=quorum, last=last)
    fragments = shares(metadata)
    asked = {(str(f.bookie_id), entry_id) for f in fragments for entry_id in f.shared_ends()}
    for fragment in fragments:
        ends = fragment.ends()
        assert set(ends) <= set(fragment.shared_ends()) <= set(fragment.entry_ids())
        assert len(fragment.shared_ends()) <= 2 * size, "a few, for any length"
    entries = {entry_id for _, entry_id in asked}
    assert asked == {copy for copy in naive(metadata, last) if copy[1] in entries}


def test_an_empty_closed_ledger_has_no_fragments() -> None:
    assert shares(metadata_of((0, "abc"), last=-1)) == []


def test_fragments_of_an_open_ledger_extend_to_the_last_stored_entry() -> None:
    metadata = metadata_of((0, "abc"), write_quorum=3)
    tail = Tail(lac=4, held={BookieId("a"): 9, BookieId("b"): 3})
    assert [(f.bookie_id, f.first, f.last, f.ledger.limit) for f in shares(metadata, tail)] == [
        ("a", 0, 9, 4),
        ("b", 0, 4, 4),
        ("c", 0, 4, 4),
    ]
    assert shares(metadata, tail)[0].ends() == (0, 4)


def test_entries_before_the_last_ensemble_are_always_confirmed() -> None:
    metadata = metadata_of((0, "abc"), (10, "abd"), write_quorum=3)
    ledger = ledger_of(LedgerId(7), metadata, Tail(lac=-1, held={}))
    assert ledger.limit == 9
    assert {(f.segment, f.bookie_id, f.last) for f in fragments_of(ledger, metadata, Tail(-1, held={}))} == {
        (0, "a", 9),
        (0, "b", 9),
        (0, "c", 9),
    }


def test_without_any_lac_each_bookie_has_a_fragment_of_one_entry() -> None:
    metadata = metadata_of((0, "abc"), write_quorum=3)
    assert [(f.bookie_id, list(f.entry_ids()), f.ledger.limit) for f in shares(metadata, Tail(lac=None))] == [
        ("a", [0], None),
        ("b", [0], None),
        ("c", [0], None),
    ]


def test_with_too_few_lacs_only_silent_bookies_have_a_fragment_of_one_entry() -> None:
    metadata = metadata_of((0, "abc"), (10, "abd"), write_quorum=3)
    tail = Tail(lac=None, held={BookieId("a"): -1})
    assert [(f.segment, f.bookie_id, f.first, f.last, f.ledger.limit) for f in shares(metadata, tail)] == [
        (0, "a", 0, 9, 9),
        (0, "b", 0, 9, 9),
        (0, "c", 0, 9, 9),
        (1, "b", 10, 10, None),
        (1, "d", 10, 10, None),
    ]
    assert all(each.confirmed() is each for each in shares(metadata, tail))


def test_confirmed_fragments_end_at_the_lac() -> None:
    metadata = metadata_of((0, "abc"), (5, "abd"), write_quorum=3)
    ahead = Tail(lac=6, held={BookieId("a"): 20, BookieId("b"): 6, BookieId("d"): 7})
    parts = [each.confirmed() for each in shares(metadata, ahead)]
    assert [(f.segment, f.first, f.last) for f in parts if f] == [(0, 0, 4)] * 3 + [(1, 5, 6)] * 3
    unconfirmed = Tail(lac=4, held={BookieId("a"): 20})
    assert [f and f.segment for f in (each.confirmed() for each in shares(metadata, unconfirmed))] == [0, 0, 0, None]


def test_the_size_of_an_entry_is_estimated_from_what_is_known() -> None:
    closed = metadata_of((0, "abc"), last=9, length=5000)
    assert ledger_of(LedgerId(1), closed, None).entry_size == 500
    opened = metadata_of((0, "abc"))
    assert ledger_of(LedgerId(1), opened, Tail(3, length=400, length_at=3)).entry_size == 100
    assert ledger_of(LedgerId(1), opened, Tail(-1)).entry_size == 1024
