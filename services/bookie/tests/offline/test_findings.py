"""Findings of the offline check as a line of text and as JSON."""

from bindery_bookie.offline.findings import DAMAGE, DEAD, NOTE, Finding, damage_of
from bindery_core.errors import DamagedStorage


def test_a_line_has_severity_place_facts_and_fix() -> None:
    finding = Finding(DAMAGE, "/l/1.log", "it is bad", 64, "repair it", {"ledger_id": 7, "entry_id": 8})
    assert finding.line() == "DAMAGE  /l/1.log at 64: it is bad ledger_id=7 entry_id=8\n    fix: repair it"
    assert Finding(DEAD, "/l/1.log", "old", 0).line() == "dead    /l/1.log at 0: old"
    assert Finding(NOTE, "/l", "new").line() == "note    /l: new"


def test_the_fix_of_the_previous_finding_is_not_repeated() -> None:
    finding = Finding(DAMAGE, "/l", "bad", fix="repair it")
    assert finding.line(last_fix="repair it") == "DAMAGE  /l: bad"
    assert finding.line(last_fix="another") == "DAMAGE  /l: bad\n    fix: repair it"


def test_json_has_the_facts_as_members_and_an_offset_only_if_there_is_one() -> None:
    assert Finding(DAMAGE, "/l", "bad", 0, "repair it", {"size": 3}).as_json() == {
        "severity": "damage",
        "path": "/l",
        "offset": 0,
        "text": "bad",
        "size": 3,
        "fix": "repair it",
    }
    assert Finding(NOTE, "/l", "new").as_json() == {"severity": "note", "path": "/l", "text": "new", "fix": ""}


def test_an_error_of_the_storage_is_damage_at_its_own_place() -> None:
    error = DamagedStorage("bad", path="/j/1.txn", offset=512, expected=3)
    assert damage_of(error, "/j", fix="salvage") == Finding(DAMAGE, "/j/1.txn", "bad", 512, "salvage", {"expected": 3})
    assert error.facts == {"path": "/j/1.txn", "offset": 512, "expected": 3}, "the error is not changed"


def test_an_error_without_a_place_has_the_given_path() -> None:
    assert damage_of(DamagedStorage("bad"), "/j", fix="salvage") == Finding(DAMAGE, "/j", "bad", None, "salvage", {})
    assert damage_of(DamagedStorage("bad", offset="x"), "/j", fix="").offset is None
