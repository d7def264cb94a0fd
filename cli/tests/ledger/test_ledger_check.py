"""`bindery ledger check` on ledgers in memory: quick and deep checks, every kind of finding, exit codes."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from bindery.common import operator
from bindery.ledger import replicas
from bindery.ledger.ledger_check import ends_of
from bindery.main import app
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.placement.write_set import write_set_contains
from fake_replicas import FakeReplicas, connecting_to
from typer.testing import CliRunner, Result


@pytest.fixture(autouse=True)
def no_second_look_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RECHECK_PAUSE_S", 0.0)


class Ledger(FakeReplicas):
    """FakeReplicas with the ledger lengths of a real writer, and bookies that may be unregistered."""

    def __init__(self, payloads: list[bytes], **options: Any) -> None:
        super().__init__(payloads, **options)
        self.gone: set[str] = set()
        length = 0
        for entry_id, payload in enumerate(payloads):
            length += len(payload)
            for bookie in self.write_set(entry_id):
                self.put(bookie, entry_id, payload, length=length)

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        return {bookie: True for bookie in self.frames if bookie not in self.gone}


def run(source: FakeReplicas, *arguments: str) -> Result:
    before = operator.connected
    operator.connected = connecting_to(source)  # type: ignore[assignment]
    try:
        result = CliRunner().invoke(app, ["ledger", "check", "7", *arguments])
    finally:
        operator.connected = before
    assert source.recoveries == 0, "reads must not fence"
    return result


def facts(
    source: FakeReplicas, *arguments: str
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Return (fragments by bookie, bad entries, summary)."""
    lines = [json.loads(line) for line in run(source, "--json", *arguments).stdout.splitlines()]
    fragments = {line["bookie"]: line for line in lines if line["kind"] == "fragment"}
    return fragments, [line for line in lines if line["kind"] == "entry"], lines[-1]


def test_a_good_ledger_passes_the_quick_and_the_deep_check() -> None:
    source = Ledger([b"x" * n for n in range(50)])
    result = run(source)
    assert result.exit_code == 0
    assert "ledger 7 (closed) is good: 2 of 50 entries read from all their bookies" in result.stdout
    assert {entry for _, entries in source.asked for entry in entries} == {0, 49}
    result = run(source, "--deep")
    assert result.exit_code == 0
    assert "is good: 50 of 50 entries" in result.stdout
    heading, first = result.stdout.splitlines()[:2]
    assert heading.split()[:4] == ["entries", "bookie", "holds", "checked"]
    assert first.split() == ["0..49", "b0", "50", "50", "50", "0", "0", "0", "0", "good"]


def test_only_a_deep_check_finds_damage_in_the_middle() -> None:
    source = Ledger([b"x" * n for n in range(50)])
    source.corrupt("b1", 20)
    assert run(source).exit_code == 0
    result = run(source, "--deep")
    assert result.exit_code == 3
    assert "  entry 20: corrupt at b1" in result.stdout
    fragments, bad, summary = facts(source, "--deep")
    assert (fragments["b1"]["verdict"], fragments["b1"]["corrupt"], fragments["b0"]["verdict"]) == (
        "corrupt",
        1,
        "good",
    )
    assert [entry["entry_id"] for entry in bad] == [20]
    assert (summary["verdict"], summary["bad_entries"]) == ("bad", 1)


@pytest.mark.parametrize("entry_id", [0, 4])
def test_an_entry_missing_at_an_end_is_found(entry_id: int) -> None:
    source = Ledger([b"a", b"b", b"c", b"d", b"e"])
    del source.frames[BookieId("b2")][entry_id]
    result = run(source)
    assert result.exit_code == 3
    assert f"entry {entry_id}: missing at b2" in result.stdout


def test_the_copy_that_disagrees_with_the_others_is_named() -> None:
    source = Ledger([b"a", b"b", b"c"])
    source.put("b2", 1, b"B", length=2)
    fragments, bad, _ = facts(source, "--deep")
    assert {bookie: facts["verdict"] for bookie, facts in fragments.items()} == {
        "b0": "good",
        "b1": "good",
        "b2": "diverged",
    }
    assert bad[0]["verdict"] == "diverged"


def test_an_unregistered_bookie_is_a_finding_even_if_it_holds_all_entries() -> None:
    source = Ledger([b"a", b"b"])
    source.gone = {"b1"}
    result = run(source)
    assert result.exit_code == 3
    assert "GONE: not registered" in result.stdout
    assert facts(source)[2]["gone"] == ["b1"]


def test_a_bookie_that_answers_with_an_error_makes_the_check_incomplete() -> None:
    source = Ledger([b"a", b"b"])
    source.down[BookieId("b1")] = "bookie answers UNKNOWN"
    result = run(source)
    assert result.exit_code == 1
    assert "is incomplete" in result.stdout
    assert "b1 returned an error: bookie answers UNKNOWN (2 entries)" in result.stdout
    source.corrupt("b0", 1)
    assert run(source).exit_code == 3


def test_lengths_must_grow_by_each_payload_and_match_the_metadata() -> None:
    source = Ledger([b"aa", b"bb", b"cc", b"dd"])
    for bookie in ("b0", "b1", "b2"):
        source.put(bookie, 2, b"cc", length=3)
    result = run(source, "--deep")
    assert result.exit_code == 3
    assert "length: entry 2 records a ledger length of 3 bytes instead of 6" in result.stdout
    source = Ledger([b"aa", b"bb"])
    source.found = source.found.with_changes(length=99)
    assert "length: the metadata records 99 bytes, the last entry 4" in run(source, "--deep").stdout


def test_an_open_ledger_is_checked_up_to_the_last_confirmed_entry() -> None:
    source = Ledger([b"a", b"b", b"c"], closed=False)
    source.put("b1", 3, b"in flight")
    result = run(source, "--deep")
    assert result.exit_code == 0
    assert "ledger 7 (open) is good: 3 of 3 entries" in result.stdout


def test_an_empty_ledger_is_good_even_if_a_bookie_is_gone() -> None:
    source = Ledger([])
    source.gone = {"b0"}
    result = run(source)
    assert result.exit_code == 0
    assert "no confirmed entries" in result.stdout


def test_every_segment_has_its_own_fragments() -> None:
    source = Ledger([b"x"] * 10, ensembles={0: ("b0", "b1", "b2"), 4: ("b0", "b3", "b2")}, write_quorum=2)
    del source.frames[BookieId("b3")][4]
    lines = run(source).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:7]] == [
        ["0..3", "b0", "3"],
        ["0..3", "b1", "3"],
        ["0..3", "b2", "2"],
        ["4..9", "b0", "4"],
        ["4..9", "b3", "4"],
        ["4..9", "b2", "4"],
    ]
    assert "MISSING" in lines[5]


@pytest.mark.parametrize("ensemble_size", range(1, 6))
def test_the_ends_equal_a_naive_count(ensemble_size: int) -> None:
    for write_quorum in range(1, ensemble_size + 1):
        for count in range(1, 14):
            for second in range(1, count):
                ensemble = tuple(BookieId(f"b{i}") for i in range(ensemble_size))
                segments = (Segment(EntryId(0), ensemble), Segment(EntryId(second), ensemble))
                metadata = LedgerMetadata(
                    ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=1, segments=segments
                )
                expected = set()
                for first, last in ((0, second - 1), (second, count - 1)):
                    for index in range(ensemble_size):
                        held = [
                            e
                            for e in range(first, last + 1)
                            if write_set_contains(
                                index, entry_id=e, ensemble_size=ensemble_size, write_quorum=write_quorum
                            )
                        ]
                        expected.update(held[:1] + held[-1:])
                assert ends_of(metadata, count - 1) == expected


def test_an_unknown_ledger_is_named() -> None:
    source = Ledger([b"x"])
    source.deleted = True
    result = run(source)
    assert "no such ledger" in str(result.exception)
