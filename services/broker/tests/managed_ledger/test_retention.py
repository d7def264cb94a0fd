"""The ledgers that may be trimmed, and what keeps the others."""

import pytest
from bindery_broker.managed_ledger.ledger_list import LedgerList, LedgerRecord
from bindery_broker.managed_ledger.retention import (
    COMPACTION_CURSOR,
    DEDUPLICATION_CURSOR,
    RetentionRule,
    judge,
    trimmable,
)
from bindery_pulsar.message_id import Position
from hypothesis import given
from hypothesis import strategies as st

LEDGERS = LedgerList(
    [
        LedgerRecord(ledger_id=1, entries=10, size=100, closed_ms=1_000),
        LedgerRecord(ledger_id=2, entries=5, size=50, closed_ms=2_000),
        LedgerRecord(ledger_id=3, entries=7, size=70, closed_ms=3_000),
        LedgerRecord(ledger_id=4, entries=2, size=20),
    ]
)
ALL = {"s": Position(4, 1)}
AT_ONCE = RetentionRule(0, 0)


@pytest.mark.parametrize(
    ("mark_deletes", "rule", "count"),
    [
        ([(1, 8)], AT_ONCE, 0),
        ([(1, 9)], AT_ONCE, 1),
        ([(2, 3)], AT_ONCE, 1),
        ([(2, 4)], AT_ONCE, 2),
        ([(4, 1)], AT_ONCE, 3),  # never the current one
        ([(4, 1), (1, 9)], AT_ONCE, 1),  # the slowest counts
        ([], AT_ONCE, 3),
        ([(4, 1)], (7, None), 2),  # two were closed at least 7 s ago
        ([(4, 1)], (8.5, None), 0),
        ([(4, 1)], (None, 240), 0),
        ([(4, 1)], (None, 239), 1),
        ([(4, 1)], (None, 140), 1),
        ([(4, 1)], (None, 139), 2),
        ([(4, 1)], (None, 0), 3),
        ([(1, 9)], (None, 0), 1),  # the size deletes nothing that is not acknowledged
        ([(4, 1)], (7, 10), 3),  # either is enough
        ([(4, 1)], (7, 1_000), 2),
        ([(4, 1)], (1e9, 139), 2),
        ([(4, 1)], (None, None), 0),
    ],
)
def test_only_unneeded_ledgers_are_trimmable(
    mark_deletes: list[tuple[int, int]], rule: tuple[float | None, int | None], count: int
) -> None:
    positions = {f"s{i}": Position(*mark_delete) for i, mark_delete in enumerate(mark_deletes)}
    assert count == trimmable(LEDGERS, positions, now_ms=9_000, retention=RetentionRule(*rule))


def model(
    ledgers: list[LedgerRecord], mark_deletes: list[Position], time_s: float | None, size_max: int | None, now_ms: int
) -> list[int]:
    """Return the ids of the ledgers that remain, by deleting one at a time."""
    left = list(ledgers)
    while len(left) > 1:
        oldest = left[0]
        entries = [Position(oldest.ledger_id, entry) for entry in range(oldest.entries)]
        if any(entry > mark_delete for entry in entries for mark_delete in mark_deletes):
            break
        too_old = time_s is not None and oldest.closed_ms + 1000 * time_s <= now_ms
        too_large = size_max is not None and sum(one.size for one in left) > size_max
        if not (too_old or too_large):
            break
        left.pop(0)
    return [one.ledger_id for one in left]


RECORDS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 50), st.integers(0, 2_000)), min_size=1, max_size=8).map(
    lambda rows: [
        LedgerRecord(ledger_id=3 * i + 1, entries=entries, size=size, closed_ms=sum(row[2] for row in rows[: i + 1]))
        for i, (entries, size, _) in enumerate(rows)
    ]
)


@given(
    records=RECORDS,
    marks=st.lists(st.tuples(st.integers(0, 26), st.integers(-1, 4)), max_size=3),
    time_s=st.none() | st.integers(0, 10),
    size_max=st.none() | st.integers(0, 300),
    now_ms=st.integers(0, 20_000),
)
def test_the_rule_is_that_of_the_model(
    records: list[LedgerRecord],
    marks: list[tuple[int, int]],
    time_s: int | None,
    size_max: int | None,
    now_ms: int,
) -> None:
    positions = {f"s{i}": Position(*mark) for i, mark in enumerate(marks)}
    rule = RetentionRule(time_s, size_max)
    count = trimmable(LedgerList(records), positions, now_ms=now_ms, retention=rule)
    expected = model(records, list(positions.values()), time_s, size_max, now_ms)
    assert [record.ledger_id for record in records[count:]] == expected
    verdicts = judge(LedgerList(records), positions, now_ms=now_ms, retention=rule)
    assert [verdict.ledger_id for verdict in verdicts if verdict.code != "deletable"] == expected
    assert [verdict.code for verdict in verdicts].count("open") == 1
    kept = [verdict.code for verdict in verdicts[count:]]
    assert kept[0] != "older_kept"


def codes(mark_deletes: dict[str, Position] | None, rule: RetentionRule = AT_ONCE, now_ms: int = 9_000) -> list[str]:
    return [one.code for one in judge(LEDGERS, mark_deletes, now_ms=now_ms, retention=rule)]


@pytest.mark.parametrize(
    ("mark_deletes", "rule", "expected"),
    [
        (ALL, AT_ONCE, ["deletable", "deletable", "deletable", "open"]),
        ({"s": Position(1, 9)}, AT_ONCE, ["deletable", "subscription", "subscription", "open"]),
        (ALL, RetentionRule(7, None), ["deletable", "deletable", "retention", "open"]),
        ({"s": Position(2, 3)}, RetentionRule(8.5, None), ["retention", "subscription", "subscription", "open"]),
        (ALL, RetentionRule(None, 200), ["deletable", "retention", "retention", "open"]),
        ({**ALL, COMPACTION_CURSOR: Position(1, 0)}, AT_ONCE, ["compaction"] * 3 + ["open"]),
        ({**ALL, DEDUPLICATION_CURSOR: Position(2, 0)}, AT_ONCE, ["deletable", *["deduplication"] * 2, "open"]),
        (None, AT_ONCE, ["unsettled"] * 3 + ["open"]),
    ],
)
def test_each_ledger_has_a_reason(
    mark_deletes: dict[str, Position] | None, rule: RetentionRule, expected: list[str]
) -> None:
    assert codes(mark_deletes, rule) == expected


def test_a_ledger_may_only_wait_for_an_older_one() -> None:
    records = [
        LedgerRecord(ledger_id=1, entries=1, size=1, closed_ms=5_000),
        LedgerRecord(ledger_id=2, entries=1, size=1, closed_ms=1_000),  # the clock of the broker was set back
        LedgerRecord(ledger_id=3),
    ]
    verdicts = judge(LedgerList(records), {}, now_ms=9_000, retention=RetentionRule(5, None))
    assert [verdict.code for verdict in verdicts] == ["retention", "older_kept", "open"]


@pytest.mark.parametrize(
    ("rule", "detail", "until_ms"),
    [
        (RetentionRule(60, None), "until 60 seconds after its close", 61_000),
        (RetentionRule(None, 500), "until the topic takes more than 500 bytes", None),
        (
            RetentionRule(60.5, 500),
            "until 60.5 seconds after its close, or until the topic takes more than 500 bytes",
            61_500,
        ),
        (RetentionRule(None, None), "without limit", None),
    ],
)
def test_a_retained_ledger_says_until_when(rule: RetentionRule, detail: str, until_ms: int | None) -> None:
    verdict = judge(LEDGERS, ALL, now_ms=9_000, retention=rule)[0]
    assert (verdict.code, verdict.detail) == ("retention", f"the retention keeps the ledger {detail}")
    assert verdict.until_ms == until_ms


def test_a_needed_ledger_names_the_slowest_subscription() -> None:
    marks = {"fast": Position(4, 1), "slow": Position(1, 3), "slower": Position(1, 2)}
    verdict = judge(LEDGERS, marks, now_ms=9_000, retention=AT_ONCE)[0]
    assert verdict.subscription == "slower"
    assert verdict.detail == "subscription slower has not acknowledged all of the ledger"
    system = judge(LEDGERS, {COMPACTION_CURSOR: Position(1, 2)}, now_ms=9_000, retention=AT_ONCE)[0]
    assert system.subscription is None
