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


def test_entries_from_the_first_one_on_are_confirmed_up_to_and_including_the_lac() -> None:
    metadata = metadata_of((0, "abc"), (5, "abd"), write_quorum=3)
    parts = [each.confirmed() for each in shares(metadata, Tail(lac=5, held={BookieId("a"): 20}))]
    assert [(f.segment, f.first, f.last) for f in parts if f] == [(0, 0, 4)] * 3 + [(1, 5, 5)] * 3


def test_the_entries_of_a_dense_share_are_counted_exactly() -> None:
    for last in (0, 1, 9):
        (first, *_) = shares(metadata_of((0, "abc"), write_quorum=3, last=last))
        assert first.entry_count == last + 1 == len(first.entry_ids())


def test_a_share_has_no_ends_if_no_entry_is_confirmed() -> None:
    metadata = metadata_of((0, "abc"), (5, "abd"), write_quorum=3)
    unconfirmed = [each for each in shares(metadata, Tail(lac=4, held={BookieId("a"): 20})) if each.segment == 1]
    assert [(each.ends(), each.shared_ends()) for each in unconfirmed] == [((), ())]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("first", [0, 4, 7])
def test_the_ends_of_a_short_share_are_within_it(size: int, first: int) -> None:
    for last in range(first, first + 2 * size + 2):
        metadata = metadata_of((0, "vwxyz"[:size]), (first or 1, "abcde"[:size]), write_quorum=1, last=last)
        for share in shares(metadata):
            ids = list(share.entry_ids())
            assert share.ends() == tuple(sorted({ids[0], ids[-1]}))


def test_a_tail_without_further_facts_names_no_entry() -> None:
    tail = Tail(7)
    assert (tail.length, tail.length_at, tail.held) == (0, -1, None)


def test_an_entry_has_an_estimated_size_of_at_least_one_byte() -> None:
    def size(last: int, length: int) -> int:
        return ledger_of(LedgerId(1), metadata_of((0, "abc"), last=last, length=length), None).entry_size

    assert [size(0, 700), size(1, 700), size(-1, 0), size(9, 3)] == [700, 350, 1, 1]

    def size_of_open(length_at: int, length: int) -> int:
        tail = Tail(3, length=length, length_at=length_at)
        return ledger_of(LedgerId(1), metadata_of((0, "abc")), tail).entry_size

    assert [size_of_open(0, 700), size_of_open(1, 700), size_of_open(-1, 700), size_of_open(9, 3)] == [
        700,
        350,
        1024,
        1,
    ]


def test_the_password_of_the_ledger_is_passed_to_its_readers() -> None:
    metadata = metadata_of((0, "abc"), last=3)
    assert ledger_of(LedgerId(1), metadata.with_changes(password=b"secret"), None).password == b"secret"
    assert ledger_of(LedgerId(1), metadata, None).password == b""


def test_an_earlier_segment_ends_at_the_end_of_a_ledger_that_was_closed_before_it() -> None:
    closed = metadata_of((0, "abc"), (10, "abd"), write_quorum=3, last=4)
    assert {(f.segment, f.first, f.last) for f in shares(closed)} == {(0, 0, 4)}
    opened = metadata_of((0, "abc"), (10, "abd"), write_quorum=3)
    assert {(f.segment, f.last) for f in shares(opened, Tail(lac=4, held={}))} == {(0, 9)}
    assert {(f.segment, f.last) for f in shares(opened, Tail(lac=12, held=None))} == {(0, 9), (1, 12)}
    assert {(f.segment, f.last) for f in shares(opened, Tail(lac=12, held={}))} == {(0, 9), (1, 12)}


def test_a_bookie_that_stores_nothing_beyond_the_lac_has_no_unconfirmed_entries() -> None:
    opened = metadata_of((0, "abc"), write_quorum=3)
    assert shares(opened, Tail(lac=-1, held={BookieId("a"): -1})) == []
    assert [(f.bookie_id, f.first, f.last) for f in shares(opened, Tail(lac=-1, held={BookieId("a"): 0}))] == [
        ("a", 0, 0)
    ]
    silent = Tail(lac=None, held={BookieId("a"): -1, BookieId("b"): 7})
    assert [(f.bookie_id, f.first, f.last) for f in shares(opened, silent)] == [("c", 0, 0)]


def test_an_entry_is_expected_only_on_its_write_set() -> None:
    metadata = metadata_of((0, "abcd"), (10, "efgh"), write_quorum=2, last=20)
    for entry_id in range(21):
        segment = metadata.segment_of(EntryId(entry_id))
        wanted = {segment.ensemble[n] for n in write_set(entry_id=entry_id, ensemble_size=4, write_quorum=2)}
        assert {b for b in map(BookieId, "abcdefgh") if is_expected(metadata, b, entry_id)} == wanted
