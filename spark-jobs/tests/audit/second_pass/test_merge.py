"""Findings of both passes, merged by the rule of each ledger, on frames in memory."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_spark.audit.second_pass import merge as module
from bindery_spark.audit.second_pass.merge import SecondResults, merged_findings, repaired
from bindery_spark.audit.second_pass.rules import MergeRule
from bindery_spark.schemas import FINDINGS
from frames import finding
from plain_frames import PlainFrame, create_frame, functions, joined_frames, lit

KEEP, CONFIRM, REPLACE, UPDATE = MergeRule.KEEP, MergeRule.CONFIRM, MergeRule.REPLACE, MergeRule.UPDATE
HOLE, DAMAGE, ORPHANS = "MISSING_REPLICA", "DIGEST_MISMATCH", "ORPHAN_DATA"
STATES = PlainFrame([])
"""The states of copies in the second pass. Only the replaced functions read them."""
Found = tuple[int, str, str | None]
"""Ledger id, kind, and what was found."""


def frame(*rows: tuple[int, str]) -> PlainFrame:
    return PlainFrame([finding(kind, ledger_id, found="x", bookie="a") for ledger_id, kind in rows], FINDINGS.names)


@pytest.fixture(autouse=True)
def _without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions that compare ranges of entries return their first argument with a text in `found`."""

    def noting(text: str, *are_states: bool) -> Any:
        def compare(first: PlainFrame, *others: PlainFrame) -> PlainFrame:
            assert tuple(each is STATES for each in others) == are_states
            return first.withColumn("found", lit(text))

        return compare

    monkeypatch.setattr(module, "F", functions)
    monkeypatch.setattr(module, "together", joined_frames)
    monkeypatch.setattr(module, "overlapping", noting("confirmed", False))
    monkeypatch.setattr(module, "still_open", noting("still open", False, True))
    monkeypatch.setattr(module, "read_well", noting("was bad", True))


def merged(
    first: PlainFrame | None,
    rules: Mapping[tuple[int, bool], MergeRule],
    second: PlainFrame | None = None,
    steady: Sequence[int] = (),
) -> list[Found]:
    spark: Any = SimpleNamespace(createDataFrame=create_frame)
    results: Any = None if second is None else SecondResults(second, STATES, steady)  # type: ignore[arg-type]
    rows: Any = merged_findings(spark, first, rules, results)  # type: ignore[arg-type]
    assert rows.columns == FINDINGS.names
    return [(row["ledger_id"], row["kind"], row["found"]) for row in rows.rows]


def test_without_rules_and_without_a_second_pass_there_are_no_findings() -> None:
    assert merged(None, {}) == []


def test_findings_are_kept_only_of_ledgers_with_that_rule() -> None:
    first = frame((1, HOLE), (2, HOLE), (3, HOLE))
    assert merged(first, {(1, False): KEEP, (3, False): CONFIRM}) == [(1, HOLE, "x")]
    assert merged(first, {(2, False): CONFIRM, (3, False): UPDATE}) == [], "nothing was read again"


def test_orphaned_data_has_a_rule_of_its_own() -> None:
    first = frame((1, HOLE), (1, ORPHANS), (2, HOLE), (2, ORPHANS))
    rules = {(1, False): CONFIRM, (1, True): KEEP, (2, False): KEEP, (2, True): CONFIRM}
    assert merged(first, rules) == [(1, ORPHANS, "x"), (2, HOLE, "x")]
    assert merged(first, rules, frame()) == [
        (1, ORPHANS, "x"),
        (2, HOLE, "x"),
        (1, HOLE, "confirmed"),
        (2, ORPHANS, "confirmed"),
    ]


def test_findings_of_a_replaced_ledger_are_dropped() -> None:
    assert merged(frame((1, HOLE)), {(1, False): REPLACE}, frame((1, HOLE))) == []
    assert merged(frame((1, HOLE)), {(1, False): REPLACE}, frame((1, HOLE)), steady=[1]) == [(1, HOLE, "x")]


def test_open_parts_of_an_updated_ledger_are_kept_beside_the_new_findings() -> None:
    second = frame((1, HOLE), (2, HOLE))
    assert merged(frame((1, HOLE)), {(1, False): UPDATE}, second, steady=[1]) == [
        (1, HOLE, "still open"),
        (1, HOLE, "x"),
    ]


def test_the_second_pass_needs_no_confirmation_for_copies_of_steady_ledgers() -> None:
    second = frame((1, HOLE), (2, HOLE), (2, ORPHANS), (3, HOLE))
    assert merged(None, {}, second, steady=[2, 3]) == [(2, HOLE, "x"), (3, HOLE, "x")]
    assert merged(None, {}, second) == []


@pytest.mark.parametrize("rule", [CONFIRM, REPLACE, UPDATE])
def test_damage_that_was_read_well_again_is_a_warning(rule: MergeRule) -> None:
    found = merged(frame((1, DAMAGE), (2, DAMAGE)), {(1, False): rule}, frame())
    assert (1, DAMAGE, "was bad; intact when it was read again") in found
    assert not [each for each in found if each[0] == 2]


def test_kept_damage_and_other_kinds_are_not_repaired() -> None:
    assert merged(frame((1, DAMAGE)), {(1, False): KEEP}, frame()) == [(1, DAMAGE, "x")]
    assert merged(frame((1, HOLE)), {(1, False): REPLACE}, frame()) == []


def test_repaired_damage_is_inspected_and_not_marked() -> None:
    damage = finding(DAMAGE, 1, severity="corrupt", found="bad digest", repairable=True, action="mark", bookie="a")
    rows: Any = repaired(PlainFrame([damage]))  # type: ignore[arg-type]
    assert rows.rows == [
        {
            **damage,
            "severity": "warning",
            "found": "bad digest; intact when it was read again",
            "repairable": False,
            "action": "inspect",
        }
    ]
