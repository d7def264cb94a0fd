"""Kinds, severities and verdicts."""

from pathlib import Path

import pytest
from bindery_spark.audit.findings.findings import WHAT_TO_DO, Exit, Kind, Severity, Verdict, verdict_of


@pytest.mark.parametrize(
    ("severities", "complete", "verdict", "code"),
    [
        ([], True, "HEALTHY", 0),
        (["info", "warning"], True, "HEALTHY", 0),
        ([], False, "INCOMPLETE", 3),
        (["warning", "incomplete"], True, "INCOMPLETE", 3),
        (["incomplete", "under_replicated"], False, "UNDER-REPLICATED", 1),
        (["under_replicated", "corrupt"], False, "CORRUPT", 2),
        (["unreadable"], True, "CORRUPT", 2),
    ],
)
def test_the_worst_severity_decides_the_verdict(severities: list[str], complete: bool, verdict: str, code: int) -> None:
    found = verdict_of(severities, is_complete=complete)
    assert (found, found.exit_code) == (verdict, code)


def test_every_kind_has_advice_and_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[4] / "docs" / "audit.md").read_text()
    assert WHAT_TO_DO.keys() == set(Kind)
    for kind in Kind:
        assert f"### {kind}\n" in manual
    for verdict in Verdict:
        assert verdict in manual
    for code in Exit:
        assert f"| {code:d} " in manual


def test_severities_are_in_ascending_order() -> None:
    assert [str(each) for each in Severity][-3:] == ["under_replicated", "corrupt", "unreadable"]
