"""Checks of copies: each fault by hand, and hundreds of random clusters compared with the naive oracle. All are in one
DataFrame, because a Spark job costs more than its rows."""

import random
from typing import Any

import pytest
from bindery_core.placement.write_set import write_set
from bindery_spark.audit.checks import copies as checks
from bindery_spark.audit.checks.finding_rows import together
from frames import NOW_MS, RUN, Tables, bookie, copy, facts, ledger, random_copy
from oracle import copy_facts
from pyspark.sql import SparkSession
from pyspark.sql.types import Row

pytestmark = pytest.mark.timeout(600)  # seconds, but minutes on a busy machine


RANDOM_WORLDS = range(1_000, 1_400)
"""Ids of the random ledgers."""


BOOKIES = [bookie("a"), bookie("b"), bookie("c"), bookie("d")]


NAMES = ["a", "b", "c", "d", "gone"]
"""Bookies in the metadata. The last one is not registered and has no cookie."""


ABC = ["a", "b", "c"]


class ByHand:
    """One ledger for each case."""

    def __init__(self) -> None:
        self.replicas: list[dict] = []
        self.ledgers: list[dict] = []
        self.wanted: set[tuple] = set()

    def case(
        self, ledger_id: int, changes: dict[tuple[int, str], Any], *expected: tuple, last: int | None = 3, **more: Any
    ) -> None:
        self.ledgers.append(ledger(ledger_id, [(0, ABC)], last=last, **more))
        for entry_id in range(4):
            for name in ABC:
                change = changes.get((entry_id, name), "good")
                more_of_it = change if isinstance(change, dict) else {"status": change}
                self.replicas.append(copy(ledger_id, entry_id, name, **more_of_it))
        self.wanted.update((kind, severity, ledger_id, 0, *rest) for kind, severity, *rest in expected)


def by_hand() -> ByHand:
    it = ByHand()
    it.case(1, {})
    it.case(
        2,
        {(1, "a"): "missing", (2, "a"): "missing", (3, "b"): "missing"},
        ("MISSING_REPLICA", "under_replicated", 1, 2, "a"),
        ("MISSING_REPLICA", "under_replicated", 3, 3, "b"),
    )
    it.case(3, {(0, "c"): "corrupt"}, ("DIGEST_MISMATCH", "corrupt", 0, 0, "c"))
    it.case(4, {(2, "b"): {"payload_crc32c": 255}}, ("REPLICA_DIVERGENCE", "corrupt", 2, 2, "b"))
    it.case(5, {(2, "b"): {"payload_length": 11}}, ("REPLICA_DIVERGENCE", "corrupt", 2, 2, "b"))
    it.case(6, {(1, "a"): {"ledger_length": 21}}, ("LENGTH_MISMATCH", "corrupt", 1, 1, "a"))
    it.case(
        7,
        {(0, "a"): "missing", (0, "b"): "corrupt", (0, "c"): "missing"},
        ("ENTRY_LOST", "unreadable", 0, 0, None),
        ("MISSING_REPLICA", "under_replicated", 0, 0, "a"),
        ("DIGEST_MISMATCH", "corrupt", 0, 0, "b"),
        ("MISSING_REPLICA", "under_replicated", 0, 0, "c"),
    )
    it.case(16, {(1, "b"): "damaged"}, ("DIGEST_MISMATCH", "corrupt", 1, 1, "b"))
    # An unknown copy is not missing, and an entry with an unknown copy is not lost.
    it.case(8, {(0, "a"): "unknown", (1, "a"): "unknown"})
    it.case(
        9,
        {(0, "a"): "unknown", (0, "b"): "missing", (0, "c"): "missing"},
        ("MISSING_REPLICA", "under_replicated", 0, 0, "b"),
        ("MISSING_REPLICA", "under_replicated", 0, 0, "c"),
    )
    # All three differ, so there is no majority.
    it.case(
        10,
        {(1, "a"): {"payload_crc32c": 1}, (1, "b"): {"payload_crc32c": 2}},
        *(("REPLICA_DIVERGENCE", "corrupt", 1, 1, name) for name in ABC),
    )
    it.case(11, {}, ("LENGTH_MISMATCH", "corrupt", 3, 3, None), length=41)
    # LACs may differ, and bookies may store entries beyond the last confirmed one.
    it.case(12, {(1, "a"): {"lac": -1}, (1, "b"): {"lac": 0}})
    beyond = {"expected": False}
    it.case(13, {(3, "a"): beyond, (3, "b"): {**beyond, "status": "missing"}, (3, "c"): beyond}, last=None)
    # Copies without a verified digest count as stored.
    it.case(14, {(0, name): {"digest_ok": None, "payload_crc32c": None, "payload_length": None} for name in ABC})
    # A bookie that left for good is not a missing copy (STALE_ENSEMBLE reports it), but the entry may be lost.
    it.ledgers.append(ledger(15, [(0, ["a", "gone"])], last=1))
    it.replicas += [copy(15, 0, "a"), copy(15, 0, "gone", "unknown")]
    it.replicas += [copy(15, 1, "a", "missing"), copy(15, 1, "gone", "unknown")]
    it.wanted |= {
        ("ENTRY_LOST", "unreadable", 15, 0, 1, 1, None),
        ("MISSING_REPLICA", "under_replicated", 15, 0, 1, 1, "a"),
    }
    return it


def orphans() -> tuple[list[dict], list[dict], set[tuple]]:
    def stray(ledger_id: int, name: str, entry_id: int = 0, **more: Any) -> dict:
        return copy(ledger_id, entry_id, name, expected=False, segment=-1, **more)

    metadata = [ledger(31, [(0, ABC)], last=0), ledger(32, [(0, ABC)], last=None)]
    rows = [
        stray(39, "a"),
        stray(39, "a", 4),
        stray(39, "b"),  # of no ledger
        stray(31, "d"),  # of a closed ledger that names others
        stray(31, "a", 5),  # beyond its end
        stray(32, "d"),  # of an open ledger, whose ensemble may change
        stray(38, "a", status="missing"),
    ]
    wanted = {
        ("ORPHAN_DATA", "warning", 39, None, 0, 4, "a"),
        ("ORPHAN_DATA", "warning", 39, None, 0, 0, "b"),
        ("ORPHAN_DATA", "info", 31, None, 0, 0, "d"),
    }
    return rows, metadata, wanted


def random_worlds() -> tuple[list[dict], list[dict]]:
    """Copies and ledgers with random sizes, ensemble changes, and faults of every kind on any copy."""
    rng = random.Random(7)
    replicas, ledgers = [], []
    for ledger_id in RANDOM_WORLDS:
        size = rng.choice([1, 2, 3, 4])
        qw = rng.randint(1, size)
        last = rng.choice([None, rng.randint(0, 9)])
        firsts = sorted({0, *(rng.randint(1, 9) for _ in range(rng.randint(0, 2)))})
        firsts = [first for first in firsts if last is None or first <= last]
        meta = ledger(ledger_id, [(first, rng.sample(NAMES, size)) for first in firsts], last=last, qw=qw)
        ledgers.append(meta)
        faults = rng.choice([0.0, 0.05, 0.3, 0.8])
        confirmed = 7 if last is None else last
        for segment, (first, end, ensemble) in enumerate(meta["segments"]):
            for entry_id in range(first, (9 if end is None else end) + 1):
                for index in write_set(entry_id=entry_id, ensemble_size=size, write_quorum=qw):
                    more = {"segment": segment, "expected": entry_id <= confirmed}
                    replicas.append(random_copy(rng, ledger_id, entry_id, ensemble[index], faults, more))
    rng.shuffle(replicas)
    return replicas, ledgers


@pytest.fixture(scope="module")
def reported(spark: SparkSession) -> list[Row]:
    """All findings of all ledgers: by hand, orphaned and random."""
    tables = Tables(spark)
    hand, (strays, named, _), (replicas, ledgers) = by_hand(), orphans(), random_worlds()
    metadata, bookies = tables.ledgers(*hand.ledgers, *named, *ledgers), tables.bookies(*BOOKIES)
    rows = [*hand.replicas, *strays, *replicas]
    blocks = tables.blocks(rows, [*hand.ledgers, *named, *ledgers]).persist()
    gone = {row.bookie for row in checks.gone_bookies(bookies, metadata).collect()}
    which = checks.suspects(checks.with_gone(blocks, gone)).localCheckpoint()
    found = together(
        [
            checks.entry_faults(blocks, which, gone, metadata, RUN),
            checks.closed_lengths(blocks, metadata, RUN),
            checks.orphan_data(blocks, metadata, RUN),
        ]
    ).localCheckpoint()
    facts(found)
    return found.collect()


def among(reported: list[Row], ledger_ids: range) -> set[tuple]:
    return {
        (r.kind, r.severity, r.ledger_id, r.segment, r.first_entry, r.last_entry, r.bookie)
        for r in reported
        if r.ledger_id in ledger_ids
    }


def test_each_fault_is_found_at_its_place_and_nothing_else(reported: list[Row]) -> None:
    hand = by_hand()
    assert among(reported, range(1, 17)) == hand.wanted
    assert copy_facts(hand.replicas, hand.ledgers, BOOKIES) == hand.wanted, "the oracle agrees"


def test_data_that_no_metadata_names_is_orphaned(reported: list[Row]) -> None:
    assert among(reported, range(30, 40)) == orphans()[2]


def test_findings_agree_with_the_oracle_for_random_clusters(reported: list[Row]) -> None:
    """Every fault is found, and nothing else is reported."""
    wanted = copy_facts(*random_worlds(), BOOKIES)
    assert len({kind for kind, *_ in wanted}) == 5, "all kinds occur"
    assert len(wanted) > len(RANDOM_WORLDS)
    assert among(reported, RANDOM_WORLDS) == wanted


def test_a_finding_has_the_expectation_the_result_and_the_action(reported: list[Row]) -> None:
    rows = {(r.kind, r.ledger_id, r.bookie): r for r in reported}
    missing = rows["MISSING_REPLICA", 2, "a"]
    assert (missing.found, missing.repairable, missing.action) == ("the bookie denies it; 2 entries", True, "mark")
    assert (missing.run_id, missing.first_seen_ms) == ("r1", NOW_MS)
    other = rows["REPLICA_DIVERGENCE", 4, "b"]
    assert other.found == "payload of 10 bytes, crc32c 000000ff"
    assert other.expected == "the payload of most copies"
    assert (other.repairable, other.action) == (False, "inspect")
    assert rows["ENTRY_LOST", 7, None].found == "a missing, b corrupt, c missing"
    assert not rows["MISSING_REPLICA", 7, "a"].repairable, "there is nothing to copy from"
    assert rows["MISSING_REPLICA", 7, "a"].evidence_hash != rows["MISSING_REPLICA", 7, "c"].evidence_hash


def test_coverage_counts_unknown_copies_with_the_reason(spark: SparkSession) -> None:
    tables = Tables(spark)
    rows = [copy(1, 0, "a"), copy(1, 1, "a", "missing"), copy(1, 0, "b", "unknown"), copy(1, 1, "b", "corrupt")]
    rows.append(copy(1, 2, "b", expected=False))
    known = checks.with_gone(tables.blocks(rows, []), ())
    seen = {(r.ledger_id, r.bookie): (r.copies, r.unknown, r.bytes, r.reason) for r in checks.coverage(known).collect()}
    assert seen == {(1, "a"): (2, 0, 10, None), (1, "b"): (2, 1, 0, "unreachable: refused")}


@pytest.mark.parametrize(
    ("known", "gone"),
    [
        pytest.param([bookie("a"), bookie("x", registration="absent", cookie=False)], {"x", "stranger"}, id="cookie"),
        pytest.param([bookie("a", cookie=False), bookie("x", registration="absent", cookie=False)], set(), id="none"),
        pytest.param([], set(), id="no bookie is known"),
        pytest.param([bookie("a"), bookie("x", cookie=False)], {"stranger"}, id="registered without a cookie"),
        pytest.param([bookie("a"), bookie("x", intent="removed")], {"stranger"}, id="removed and still registered"),
        pytest.param(
            [bookie("a", cookie=False), bookie("x", registration="absent", intent="removed", cookie=False)],
            {"x"},
            id="removed where none has a cookie",
        ),
    ],
)
def test_an_absent_bookie_is_gone_if_it_was_removed_or_only_other_bookies_have_cookies(
    spark: SparkSession, known: list[dict], gone: set[str]
) -> None:
    tables = Tables(spark)
    ledgers = tables.ledgers(ledger(1, [(0, ["a", "x"])], last=3), ledger(2, [(0, ["a", "stranger"])], last=3))
    assert {row.bookie for row in checks.gone_bookies(tables.bookies(*known), ledgers).collect()} == gone
