"""Blocks: rows that describe many copies, compared with the rows of single copies."""

import random

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId, LedgerId
from bindery_spark.reading.blocks import SCHEMA, SPAN_BYTES, SPAN_MAX, Blocks, expand, facts_of, span_of
from bindery_spark.reading.fragments import Fragment, Ledger
from bindery_spark.reading.rows import judge
from bindery_spark.schemas import BLOCKS
from pyspark.sql.pandas.types import to_arrow_schema


def ledger(last: int, *, sizes: tuple[int, int] = (3, 3), entry_size: int = 1000) -> Ledger:
    return Ledger(LedgerId(7), DigestType.CRC32C, b"", *sizes, True, last, entry_size)


def fragment(of: Ledger, first: int = 0, *, index: int = 0, bookie: str = "b") -> Fragment:
    assert of.limit is not None
    return Fragment(of, BookieId(bookie), 0, (index,), first, of.limit)


def frames(last: int, payload: bytes = b"payload") -> list[bytes]:
    return pack_many(
        Digester(DigestType.CRC32C), [payload] * (last + 1), ledger_id=7, first_entry_id=0, lac=-1, length=0
    )


def rows_of(blocks: Blocks) -> list[dict]:
    return blocks.take().to_pylist()


def test_the_columns_are_those_of_the_declared_schema() -> None:
    assert to_arrow_schema(BLOCKS, timezone="UTC").equals(SCHEMA)


@pytest.mark.parametrize(("size", "slots"), [(1, SPAN_MAX), (1000, SPAN_MAX), (4096, 256), (10 * SPAN_BYTES, 1)])
def test_blocks_are_bounded_in_entries_and_in_bytes(size: int, slots: int) -> None:
    assert span_of(ledger(9, entry_size=size)) == slots
    assert span_of(ledger(9, entry_size=size, sizes=(5, 2))) == 5 * slots


@pytest.mark.parametrize("digest_type", DigestType)
def test_a_fact_equals_the_columns_of_a_single_row(digest_type: DigestType) -> None:
    digester = Digester(digest_type, b"secret")
    sound = pack_many(digester, [b"", b"x", b"yy" * 99], ledger_id=7, first_entry_id=5, lac=4, length=100)
    for frame in (sound, [sound[1], b"short", sound[2][:-1] if digest_type is not DigestType.DUMMY else b""]):
        oks, lengths, sizes, crcs, _ = judge(digester, 7, range(5, 8), frame)
        found = facts_of(digester, 7, range(5, 8), frame)
        assert [fact is not None for fact in found] == oks
        for at, fact in enumerate(found):
            if fact is not None:
                numbers = (fact[:4], fact[4:8], fact[8:])
                assert tuple(int.from_bytes(n, "big") for n in numbers) == (crcs[at], sizes[at], lengths[at])


def test_equal_copies_are_one_row_each_with_one_fingerprint() -> None:
    of = ledger(2_999)
    by_bookie = []
    for name in "ab":
        blocks = Blocks(name)
        mine = fragment(of, bookie=name)
        for start in (0, 250, 1500):  # responses have any sizes
            ids = range(start, {0: 250, 250: 1500, 1500: 3000}[start])
            blocks.add_frames(mine, ids, frames(2_999)[ids.start : ids.stop])
            blocks.complete(mine, ids.stop, is_last=ids.stop == 3000)
        by_bookie.append(rows_of(blocks))
    for rows in by_bookie:
        assert [(r["block"], r["first_entry"], r["last_entry"], r["copies"]) for r in rows] == [
            (0, 0, 1023, 1024),
            (1, 1024, 2047, 1024),
            (2, 2048, 2999, 952),
        ]
        assert {(r["bad"], r["unknown"], r["states"]) for r in rows} == {(0, 0, None)}
        assert rows[-1]["end_length"] == 3000 * 7
        assert sum(r["bytes"] for r in rows) == 3000 * 7
    assert [r["fingerprint"] for r in by_bookie[0]] == [r["fingerprint"] for r in by_bookie[1]]


@pytest.mark.parametrize("what", ["payload", "missing", "length"])
def test_any_difference_changes_the_fingerprint(what: str) -> None:
    def row_with(change: str) -> dict:
        blocks, mine = Blocks("a"), fragment(ledger(9))
        found = frames(9)
        if change == "payload":
            found[4] = frames(9, b"pAyload")[4]
        if change == "length":
            found[4] = pack_many(
                Digester(DigestType.CRC32C), [b"payload"], ledger_id=7, first_entry_id=4, lac=-1, length=1
            )[0]
        blocks.add_frames(mine, range(10), found)
        if change == "missing":
            blocks.add_absent(mine, [4])
        blocks.complete(mine, 10, is_last=True)
        (row,) = rows_of(blocks)
        return row

    assert row_with(what)["fingerprint"] != row_with("")["fingerprint"]
    assert row_with("")["fingerprint"] == row_with("")["fingerprint"]


@pytest.mark.parametrize("seed", range(40))
def test_an_expanded_block_has_the_added_entries(seed: int) -> None:
    """Striped and dense blocks, with all states of entries."""
    rng = random.Random(seed)
    size = rng.choice([1, 3, 5])
    quorum = rng.randint(1, size)
    last = rng.choice([0, 7, 2_500])
    of = ledger(last, sizes=(size, quorum), entry_size=rng.choice([10, 9_000]))
    mine = fragment(of, rng.randint(0, last), index=rng.randrange(size))
    wanted = {}
    blocks = Blocks("b")
    found = frames(last)
    absent = []
    for entry_id in mine.entry_ids():
        match rng.choice(["good"] * 8 + ["bad", "absent", "listed", "limbo: x", "io_error: x", "unreported"]):
            case "good":
                blocks.add_frames(mine, [entry_id], [found[entry_id]])
                wanted[entry_id] = (True, True, 7 * (entry_id + 1), None)
            case "bad":
                blocks.add_frames(mine, [entry_id], [found[entry_id][:-1]])
                wanted[entry_id] = (True, False, None, None)
            case "absent":
                absent.append(entry_id)
                wanted[entry_id] = (False, None, None, None)
            case "listed":
                blocks.add_listed(mine, [entry_id])
                wanted[entry_id] = (True, None, None, None)
            case "unreported":
                pass
            case error:
                blocks.add_error(mine, [entry_id], error)
                wanted[entry_id] = (None, None, None, error.split(":")[0])
        if not absent:
            blocks.complete(mine, entry_id + 1, is_last=False)
    if absent:
        blocks.add_absent(mine, absent)
    blocks.complete(mine, last + 1, is_last=True)
    rows = rows_of(blocks)
    got = {
        row[2]: (row[5], row[6], row[7], row[11] and row[11].split(":")[0]) for block in rows for row in expand(block)
    }
    assert got == wanted
    assert sum(row["copies"] for row in rows) == len(wanted)
    assert sum(row["bad"] for row in rows) == sum(
        w[0] is False or w[1] is False or w[3] == "io_error" for w in wanted.values()
    )
    assert sum(row["unknown"] for row in rows) == sum(w[3] == "limbo" for w in wanted.values())


def test_orphaned_data_has_separate_rows() -> None:
    blocks = Blocks("b")
    blocks.add_unexpected(9, -1, [3, 4, 9])
    blocks.add_unlisted(-1, -1, "unlisted: no answer")
    blocks.add_unexpected(9, -1, [])
    first, second = rows_of(blocks)
    assert (first["expected"], first["first_entry"], first["last_entry"], first["copies"]) == (False, 3, 9, 3)
    assert (second["ledger_id"], second["copies"], second["reason"]) == (-1, 0, "unlisted: no answer")
    assert len(blocks) == 0


def test_a_block_has_the_place_the_counts_and_the_states_of_its_copies() -> None:
    of = ledger(19, entry_size=10)
    blocks, mine = Blocks("b"), fragment(of, 10)
    found = frames(19)
    blocks.add_frames(mine, range(11, 13), found[11:13])
    blocks.add_frames(mine, [13], [b"damaged"])
    blocks.add_error(mine, [14, 15], "timeout: no answer in time")
    blocks.add_error(mine, [15], "busy: later")
    blocks.add_error(mine, [16], "io_error: the bookie could not read it")
    blocks.add_listed(mine, [17])
    blocks.add_absent(mine, [18])
    assert len(blocks) == 0
    blocks.complete(mine, 19, is_last=True)
    assert len(blocks) == 1
    (row,) = rows_of(blocks)
    assert isinstance(row.pop("fingerprint"), int)
    facts = row.pop("facts")
    assert len(facts) == 2 * 16
    assert row == {
        "ledger_id": 7,
        "segment": 0,
        "block": 0,
        "stripe": 0,
        "bookie": "b",
        "expected": True,
        "first_entry": 11,
        "last_entry": 18,
        "step": 1,
        "copies": 8,
        "bad": 3,
        "unknown": 2,
        "bytes": 14,
        "end_length": None,
        "reason": "busy: later",
        "states": bytes([0, 0, 2, 4, 4, 3, 6, 1]),
    }
    assert next(expand({**row, "facts": facts}))[:9] == (7, 0, 11, "b", True, True, True, 12 * 7, 7)


def test_rows_of_stripes_have_the_step_of_the_ensemble() -> None:
    of = ledger(20, sizes=(4, 2), entry_size=10)
    blocks, mine = Blocks("b"), fragment(of, 2, index=1)
    found = frames(20)
    for entry_id in mine.entry_ids():
        blocks.add_frames(mine, [entry_id], [found[entry_id]])
    blocks.complete(mine, 21, is_last=True)
    rows = rows_of(blocks)
    assert [(r["stripe"], r["first_entry"], r["last_entry"], r["step"], r["copies"], r["bytes"]) for r in rows] == [
        (0, 4, 20, 4, 5, 35),
        (1, 5, 17, 4, 4, 28),
    ]
    assert [r["end_length"] for r in rows] == [21 * 7, 18 * 7]
    assert {r["block"] for r in rows} == {0}
    assert {r["states"] for r in rows} == {None}


def test_orphaned_data_has_no_block_and_no_facts() -> None:
    blocks = Blocks("b")
    blocks.add_unexpected(9, 2, [3, 4, 9])
    blocks.add_unlisted(8, -1, "unlisted: no answer")
    of_nothing = {"fingerprint": None, "end_length": None, "states": None, "facts": None}
    both = {"block": -1, "stripe": 0, "bookie": "b", "expected": False, "step": 1, **of_nothing}
    both |= {"bad": 0, "unknown": 0, "bytes": 0}
    assert rows_of(blocks) == [
        {"ledger_id": 9, "segment": 2, "first_entry": 3, "last_entry": 9, "copies": 3, "reason": None, **both},
        {
            "ledger_id": 8,
            "segment": -1,
            "first_entry": -1,
            "last_entry": -1,
            "copies": 0,
            "reason": "unlisted: no answer",
            **both,
        },
    ]


def test_a_batch_is_full_at_64_rows() -> None:
    blocks = Blocks("b")
    for ledger_id in range(63):
        blocks.add_unexpected(ledger_id, -1, [0])
    assert not blocks.is_full
    blocks.add_unexpected(63, -1, [0])
    assert blocks.is_full
    assert len(rows_of(blocks)) == 64
    assert not blocks.is_full


def test_a_complete_block_has_a_row_before_the_fragment_ends() -> None:
    of = ledger(29, entry_size=2**17)  # eight entries per block
    blocks, mine = Blocks("b"), fragment(of, 3)
    found = frames(29)
    seen = []
    for upto in (7, 8, 9, 23, 24, 30):
        start = 3 if upto == 7 else {8: 7, 9: 8, 23: 9, 24: 23, 30: 24}[upto]
        blocks.add_frames(mine, range(start, upto), found[start:upto])
        blocks.complete(mine, upto, is_last=upto == 30)
        seen.append([(row["block"], row["first_entry"], row["last_entry"]) for row in rows_of(blocks)])
    assert seen == [[], [(0, 3, 7)], [], [(1, 8, 15)], [(2, 16, 23)], [(3, 24, 29)]]


def test_the_reason_of_one_fragment_is_not_that_of_the_next() -> None:
    blocks = Blocks("b")
    for first in (0, 1):
        mine = fragment(ledger(9), first)
        blocks.add_error(mine, [5], f"{'ab'[first]}: x")
        blocks.complete(mine, 10, is_last=True)
    assert [row["reason"] for row in rows_of(blocks)] == ["a: x", "b: x"]


def test_without_the_option_entries_of_one_block_share_a_row() -> None:
    for ends_only, count in ((False, 1), (True, 4)):
        blocks, mine = Blocks("b", ends_only=ends_only), fragment(ledger(3))
        blocks.add_frames(mine, range(4), frames(3))
        blocks.complete(mine, 4, is_last=True)
        rows = rows_of(blocks)
        assert [row["block"] for row in rows] == list(range(count))


@pytest.mark.parametrize("digest_type", DigestType)
def test_frames_and_entries_must_be_as_many(digest_type: DigestType) -> None:
    digester = Digester(digest_type)
    with pytest.raises(ValueError, match="zip"):
        facts_of(digester, 7, range(3), [b"", b""])
    with pytest.raises(ValueError, match="zip"):
        judge(digester, 7, range(3), [b"", b""])


@pytest.mark.parametrize("digest_type", DigestType)
def test_an_entry_of_another_ledger_has_no_fact(digest_type: DigestType) -> None:
    digester = Digester(digest_type)
    sound = pack_many(digester, [b"x", b""], ledger_id=7, first_entry_id=0, lac=-1, length=0)
    assert [fact is not None for fact in facts_of(digester, 7, range(2), sound)] == [True, True]
    assert facts_of(digester, 8, range(2), sound) == [None, None]
    assert facts_of(digester, 7, range(1, 3), sound) == [None, None]


def test_a_damaged_block_row_is_rejected() -> None:
    blocks, mine = Blocks("b"), fragment(ledger(3))
    blocks.add_frames(mine, range(4), frames(3))
    blocks.complete(mine, 4, is_last=True)
    (row,) = rows_of(blocks)
    with pytest.raises(ValueError, match="zip"):
        list(expand({**row, "states": bytes(3)}))
