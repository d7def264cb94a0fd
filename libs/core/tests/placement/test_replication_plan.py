"""The fragments that may be copied, and the metadata changes that make the copies count."""

from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.placement.replication_plan import closed_fragments, plan_replacement

B = [BookieId(f"b{i}") for i in range(6)]


def metadata_of(*segments: Segment, state: LedgerState = LedgerState.CLOSED, last: int = 5) -> LedgerMetadata:
    closed = {"last_entry_id": EntryId(last), "length": last + 1} if state is LedgerState.CLOSED else {}
    return LedgerMetadata(ensemble_size=3, write_quorum=2, ack_quorum=2, segments=segments, state=state, **closed)


FIRST = Segment(EntryId(0), (B[0], B[1], B[2]))
SECOND = Segment(EntryId(4), (B[0], B[3], B[2]))


def test_each_index_of_each_segment_is_a_fragment_with_the_entries_of_its_stripe() -> None:
    found = {
        (f.segment_first, f.index): (f.bookie_id, list(f.entry_ids))
        for f in closed_fragments(metadata_of(FIRST, SECOND))
    }
    assert found == {
        (0, 0): ("b0", [0, 2, 3]),
        (0, 1): ("b1", [0, 1, 3]),
        (0, 2): ("b2", [1, 2]),
        (4, 0): ("b0", [5]),
        (4, 1): ("b3", [4]),
        (4, 2): ("b2", [4, 5]),
    }


def test_the_last_segment_of_an_open_ledger_is_not_copied() -> None:
    for state in (LedgerState.OPEN, LedgerState.IN_RECOVERY):
        assert {f.segment_first for f in closed_fragments(metadata_of(FIRST, SECOND, state=state))} == {0}
        assert closed_fragments(metadata_of(FIRST, state=state)) == []


def test_an_empty_ledger_and_an_empty_last_segment_have_fragments_without_entries() -> None:
    assert all(not f.entry_ids for f in closed_fragments(metadata_of(FIRST, last=-1)))
    assert [list(f.entry_ids) for f in closed_fragments(metadata_of(FIRST, SECOND, last=3))][3:] == [[], [], []]


def test_a_replacement_takes_the_index_of_the_old_bookie() -> None:
    planned = plan_replacement(metadata_of(FIRST, SECOND), segment_first=0, replacements={1: (B[1], B[4])})
    assert planned is not None
    assert planned.segments == (Segment(EntryId(0), (B[0], B[4], B[2])), SECOND)
    assert (planned.state, planned.last_entry_id) == (LedgerState.CLOSED, 5)
    assert plan_replacement(planned, segment_first=0, replacements={1: (B[1], B[4])}) is None, "its own result"


def test_a_bookie_that_was_replaced_already_is_left_unchanged() -> None:
    metadata = metadata_of(FIRST, SECOND)
    assert plan_replacement(metadata, segment_first=0, replacements={1: (B[5], B[4])}) is None
    assert plan_replacement(metadata, segment_first=2, replacements={1: (B[1], B[4])}) is None
    assert plan_replacement(metadata, segment_first=0, replacements={1: (B[1], B[2])}) is None, "twice in an ensemble"


def test_a_segment_that_is_open_again_is_left_unchanged() -> None:
    metadata = metadata_of(FIRST, SECOND, state=LedgerState.OPEN)
    assert plan_replacement(metadata, segment_first=4, replacements={1: (B[3], B[4])}) is None
    assert plan_replacement(metadata, segment_first=0, replacements={1: (B[1], B[4])}) is not None
