"""Comparison of copies: the verdict on every mixture of copies, and the batches in which they are read."""

import itertools
from collections.abc import Sequence

import pytest
from bindery.ledger import replicas
from bindery.ledger.replicas import (
    BATCH_BYTES,
    BATCH_ENTRIES_MAX,
    SILENT_BATCHES_MAX,
    Copy,
    EntryVerdict,
    Row,
    compare,
    judge,
)
from bindery_client.ledger.replica import Verdict
from bindery_core.errors import NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire.messages import Status
from fake_replicas import LEDGER, FakeReplicas

BOOKIES = (BookieId("b0"), BookieId("b1"), BookieId("b2"))
GOOD = Copy(Verdict.GOOD, lac=4, length=50, size=5, crc32c=1, fingerprint=b"same")
OTHER_LAC = Copy(Verdict.GOOD, lac=2, length=50, size=5, crc32c=1, fingerprint=b"same")
OTHER_LENGTH = Copy(Verdict.GOOD, lac=4, length=51, size=5, crc32c=1, fingerprint=b"same")
OTHER_PAYLOAD = Copy(Verdict.GOOD, lac=4, length=50, size=5, crc32c=2, fingerprint=b"else")
ABSENT = Copy(Verdict.ABSENT)
CORRUPT = Copy(Verdict.CORRUPT, "entry digest mismatch", 4, 50, 5, 9, b"junk")
ERROR = Copy(Verdict.ERROR, "no answer in time")


def row_of(*copies: Copy, limit: int = 5) -> Row:
    return judge(EntryId(5), BOOKIES, dict(zip(BOOKIES, copies, strict=True)), limit=limit)


@pytest.mark.parametrize(
    ("copies", "words", "differs", "incomplete"),
    [
        ((GOOD, GOOD, GOOD), "agree", False, False),
        ((GOOD, OTHER_LAC, GOOD), "agree", False, False),
        ((GOOD, ABSENT, GOOD), "missing at b1", True, False),
        ((GOOD, ABSENT, ABSENT), "missing at b1,b2", True, False),
        ((CORRUPT, GOOD, GOOD), "corrupt at b0", True, False),
        ((CORRUPT, ABSENT, GOOD), "corrupt at b0, missing at b1", True, False),
        ((GOOD, GOOD, ERROR), "error at b2", False, True),
        ((GOOD, ABSENT, ERROR), "missing at b1, error at b2", True, True),
        ((GOOD, OTHER_PAYLOAD, GOOD), "diverged: b0,b2 | b1", True, False),
        ((GOOD, GOOD, OTHER_LENGTH), "diverged: b0,b1 | b2", True, False),
        ((GOOD, OTHER_PAYLOAD, ERROR), "diverged: b0 | b1", True, True),
        ((ABSENT, ABSENT, ABSENT), "unreadable: missing at b0,b1,b2", True, False),
        ((CORRUPT, CORRUPT, ABSENT), "unreadable: corrupt at b0,b1, missing at b2", True, False),
        ((ERROR, ERROR, ERROR), "unreadable: error at b0,b1,b2", False, True),
    ],
)
def test_the_verdict_names_the_problem_and_its_bookie(
    copies: tuple[Copy, ...], words: str, differs: bool, incomplete: bool
) -> None:
    row = row_of(*copies)
    assert (row.words, row.differs, row.is_incomplete) == (words, differs, incomplete)


@pytest.mark.parametrize(
    ("copies", "verdict", "bad"),
    [
        ((GOOD, ABSENT, ABSENT), EntryVerdict.UNACKNOWLEDGED, False),
        ((ABSENT, ABSENT, ABSENT), EntryVerdict.UNACKNOWLEDGED, False),
        ((GOOD, GOOD, GOOD), EntryVerdict.UNACKNOWLEDGED, False),
        ((GOOD, OTHER_PAYLOAD, ABSENT), EntryVerdict.DIVERGED, True),
        ((CORRUPT, GOOD, ABSENT), EntryVerdict.CORRUPT, True),
        ((ERROR, ABSENT, ABSENT), EntryVerdict.ERROR, True),
    ],
)
def test_beyond_the_last_confirmed_entry_only_absence_is_allowed(
    copies: tuple[Copy, ...], verdict: EntryVerdict, bad: bool
) -> None:
    row = row_of(*copies, limit=4)
    assert (row.verdict, row.is_bad) == (verdict, bad)


def test_a_mixture_is_bad_unless_all_copies_are_good_and_equal() -> None:
    kinds = (GOOD, OTHER_LAC, OTHER_LENGTH, OTHER_PAYLOAD, ABSENT, CORRUPT, ERROR)
    for copies in itertools.product(kinds, repeat=3):
        contents = {(c.fingerprint, c.length) for c in copies}
        alike = all(c.verdict is Verdict.GOOD for c in copies) and len(contents) == 1
        row = row_of(*copies)
        assert row.is_bad != alike
        assert (row.verdict is EntryVerdict.AGREE) == alike
        for bookie, copy in zip(BOOKIES, copies, strict=True):
            assert copy.verdict is Verdict.GOOD or row.verdict is EntryVerdict.DIVERGED or bookie in row.words


async def no_pause(seconds: float) -> None:
    pass


async def rows(source: FakeReplicas, *, first: int = 0, last: int | None = None) -> list[Row]:
    end = source.lac if last is None else last
    batches = compare(source, LEDGER, source.found, first=first, last=end, limit=source.lac, pause=no_pause)
    return [row async for batch in batches for row in batch]


async def test_striped_segments_are_read_from_their_write_sets_only() -> None:
    source = FakeReplicas(
        [b"%d" % i for i in range(40)],
        write_quorum=2,
        ensembles={0: ("b0", "b1", "b2"), 10: ("b0", "b3", "b2"), 11: ("b4", "b3", "b2")},
    )
    found = await rows(source)
    assert [row.entry_id for row in found] == list(range(40))
    assert {row.verdict for row in found} == {EntryVerdict.AGREE}
    for row in found:
        assert list(row.copies) == source.write_set(row.entry_id)
    asked = sorted((bookie, entry_id) for bookie, ids in source.asked for entry_id in ids)
    assert asked == sorted((bookie, e) for e in range(40) for bookie in source.write_set(e))


@pytest.mark.parametrize("kind", list(DigestType))
async def test_damage_is_found_under_every_digest_type(kind: DigestType) -> None:
    source = FakeReplicas([b"a", b"b", b"c"], digest_type=kind, password=b"pw")
    source.corrupt("b1", 1)
    del source.frames[BookieId("b2")][2]
    words = [row.words for row in await rows(source)]
    expected = "diverged: b1 | b2,b0" if kind is DigestType.DUMMY else "corrupt at b1"
    assert words == ["agree", expected, "missing at b2"]


async def test_batches_grow_until_a_limit_and_shrink_for_large_entries() -> None:
    source = FakeReplicas([b"x"] * (3 * BATCH_ENTRIES_MAX))
    await rows(source)
    sizes = [len(ids) for bookie, ids in source.asked if bookie == "b0"]
    assert sizes[:3] == [8, 16, 32]
    assert max(sizes) == BATCH_ENTRIES_MAX
    large = FakeReplicas([bytes(BATCH_BYTES // 4)] * 30)
    await rows(large)
    assert [len(ids) for bookie, ids in large.asked if bookie == "b0"][1:3] == [3, 3]


async def test_the_rate_limit_is_kept() -> None:
    source = FakeReplicas([b"x"] * 24)
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    batches = compare(source, LEDGER, source.found, first=0, last=23, limit=23, rate=8, pause=pause)
    assert [len(batch) async for batch in batches] == [8, 16]
    assert pauses == pytest.approx([1.0, 2.0], abs=0.2)


async def test_a_bookie_that_never_answers_is_skipped_after_a_few_batches() -> None:
    source = FakeReplicas([b"x"] * 500)
    source.down[BookieId("b1")] = "no answer in time"
    found = await rows(source)
    assert {row.words for row in found} == {"error at b1"}
    assert sum(bookie == "b1" for bookie, _ in source.asked) == SILENT_BATCHES_MAX
    assert "skipped after" in found[-1].copies[BookieId("b1")].reason


async def test_a_bookie_that_answers_with_an_error_is_shown_with_its_status() -> None:
    source = FakeReplicas([b"x"])
    source.statuses[BookieId("b0")] = Status.UNKNOWN_LEDGER_STATE
    (row,) = await rows(source)
    assert (row.verdict, row.copies[BookieId("b0")].reason) == (
        EntryVerdict.ERROR,
        "bookie answers UNKNOWN_LEDGER_STATE",
    )


async def test_adds_in_progress_in_an_open_ledger_are_read_twice() -> None:
    source = FakeReplicas([b"x", b"y"], closed=False)
    late = source.frames[BookieId("b2")].pop(1)

    def arrive() -> None:
        if len(source.asked) > 3:
            source.frames[BookieId("b2")][1] = late

    source.on_read = arrive
    assert [row.words for row in await rows(source)] == ["agree", "agree"]
    del source.frames[BookieId("b2")][1]
    source.on_read = lambda: None
    assert [row.words for row in await rows(source)] == ["agree", "missing at b2"]


async def test_copies_that_moved_meanwhile_are_read_at_their_new_bookies() -> None:
    source = FakeReplicas([b"x"] * 20)
    before = source.found

    def move() -> None:
        source.on_read = lambda: None
        source.frames[BookieId("b9")] = source.frames.pop(BookieId("b1"))
        source.frames[BookieId("b1")] = {}
        ensemble = tuple(BookieId(name) for name in ("b0", "b9", "b2"))
        source.found = before.with_changes(segments=(Segment(EntryId(0), ensemble),))

    source.on_read = move
    found = await rows(source)
    assert [row.entry_id for row in found] == list(range(20))
    assert {row.words for row in found} == {"agree"}
    assert {row.ensemble for row in found} == {("b0", "b9", "b2")}


async def test_a_ledger_deleted_meanwhile_is_reported() -> None:
    source = FakeReplicas([b"x"], closed=False)
    assert source.found.state is LedgerState.OPEN
    source.frames[BookieId("b1")].clear()
    source.deleted = True
    with pytest.raises(NoSuchLedger):
        await rows(source)


@pytest.mark.parametrize("names", [("b0",), ("b0", "b1", "b2", "b3", "b4")])
async def test_ensembles_of_any_size_are_compared(names: Sequence[str]) -> None:
    source = FakeReplicas([b"x"] * 11, ensembles={0: names}, write_quorum=min(2, len(names)))
    assert {row.words for row in await rows(source)} == {"agree"}


def test_no_verdict_is_left_out_of_the_table_in_the_docstring() -> None:
    assert replicas.__doc__ is not None
    for verdict in EntryVerdict:
        assert f"| {verdict.value} " in replicas.__doc__
