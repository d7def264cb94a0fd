"""`bindery ledger show`, and the wrong use of all `bindery ledger` commands."""

import json

import pytest
from bindery.ledger import replicas
from bindery_core.errors import BinderyError, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import EntryId
from fake_replicas import FakeReplicas
from ledger_runs import run


@pytest.fixture(autouse=True)
def no_second_look_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RECHECK_PAUSE_S", 0.0)


def test_show_prints_all_metadata() -> None:
    source = FakeReplicas([b"zero", b"one"], ensembles={0: ("b0", "b1", "b2"), 1: ("b0", "b3", "b2")})
    text = run(source, "show").stdout
    for words in (
        "state            closed",
        "ensemble_size    3",
        "write_quorum     3",
        "ack_quorum       2",
        "digest_type      crc32c",
        "last_entry_id    1",
        "length           7 bytes",
        "ctime            2023-11-14T22:13:20.123+00:00 (1700000000123)",
        "custom           application=test",
        "custom           bytes=\\xff",
        "entries 0..0     b0, b1, b2",
        "entries 1..      b0, b3, b2",
    ):
        assert words in text
    facts = json.loads(run(source, "show", "--json").stdout)
    assert facts["length"] == 7
    assert [segment["first_entry_id"] for segment in facts["segments"]] == [0, 1]


def test_show_of_an_open_ledger_reports_no_length() -> None:
    source = FakeReplicas([b"zero"], closed=False)
    text = run(source, "show").stdout
    assert "length           unknown until the ledger is closed" in text
    empty = FakeReplicas([])
    assert "last_entry_id    none (empty ledger)" in run(empty, "show").stdout


def test_show_prints_unusual_metadata() -> None:
    source = FakeReplicas([b"zero"])
    source.found = source.found.with_changes(ctime_ms=2**62, digest_type=None, password=None, custom={})
    assert f"ctime            {2**62}" in run(source, "show").stdout
    source.found = source.found.with_changes(ctime_ms=None, state=LedgerState.IN_RECOVERY, last_entry_id=EntryId(-1))
    assert "ctime            unknown" in run(source, "show").stdout
    source.created_ms = 1000
    assert "ctime            1970-01-01T00:00:01.000+00:00 (1000)" in run(source, "show").stdout
    assert "metadata_version 3" in run(source, "show").stdout


@pytest.mark.parametrize("verb", ["show", "read", "compare"])
def test_a_missing_ledger_is_reported(verb: str) -> None:
    source = FakeReplicas([b"x"])
    source.deleted = True
    result = run(source, verb)
    assert isinstance(result.exception, NoSuchLedger)
    assert isinstance(result.exception, BinderyError)
