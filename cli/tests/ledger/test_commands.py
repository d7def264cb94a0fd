"""`bindery ledger show|read|compare` on ledgers in memory, intact and damaged."""

import json
from typing import Any

import pytest
from bindery.common import operator
from bindery.ledger import replicas
from bindery.main import app
from bindery_core.errors import BadRequest, BinderyError, BookieUnavailable, NoSuchEntry, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerState
from bindery_core.ids import BookieId, EntryId
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from fake_replicas import FakeReplicas, connecting_to
from typer.testing import CliRunner, Result


@pytest.fixture(autouse=True)
def no_second_look_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RECHECK_PAUSE_S", 0.0)


def run(source: FakeReplicas, *arguments: str) -> Result:
    before = operator.connected
    operator.connected = connecting_to(source)  # type: ignore[assignment]
    try:
        result = CliRunner().invoke(app, ["ledger", arguments[0], "7", *arguments[1:]])
    finally:
        operator.connected = before
    assert source.recoveries == 0, "reads must not fence"
    return result


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def damaged() -> FakeReplicas:
    """Entry 1 corrupt at b0, entry 2 missing at b1, entry 3 diverged at b2."""
    source = FakeReplicas([b"zero", b"one", b"two", b"three", b"four"])
    source.corrupt("b0", 1)
    del source.frames[BookieId("b1")][2]
    source.put("b2", 3, b"THREE")
    return source


# -- compare ----------------------------------------------------------------------------------------------------------


def test_compare_of_a_good_ledger_prints_a_row_for_each_entry_and_exits_with_0() -> None:
    result = run(FakeReplicas([b"zero", b"one"]), "compare")
    assert result.exit_code == 0
    heading, first, second, *summary = result.stdout.splitlines()
    assert heading.split() == ["entry", "b0", "b1", "b2", "verdict"]
    assert first.split()[:1] + first.split()[-1:] == ["0", "agree"]
    assert second.count("lac=0 len=1000000") == 3
    assert summary[0] == "ledger 7 (closed) agrees: 2 entries from 0 to 1: 2 agree"
    assert summary[1:] == ["  b0: 2 good", "  b1: 2 good", "  b2: 2 good"]


def test_compare_shows_every_kind_of_difference_and_exits_with_3() -> None:
    result = run(damaged(), "compare", "--only-bad")
    assert result.exit_code == 3
    rows = [line for line in result.stdout.splitlines() if line.strip()[0].isdigit()]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    for row, words in zip(rows, ("corrupt at b0", "missing at b1", "diverged: b0,b1 | b2"), strict=True):
        assert row.endswith(words) or (words.startswith("diverged") and "diverged: " in row)
    assert "corrupt lac=0" in rows[0]
    assert "absent" in rows[1]
    assert (
        "ledger 7 (closed) differs: 5 entries from 0 to 4: 2 agree, 1 corrupt, 1 missing, 1 diverged" in result.stdout
    )


def test_compare_with_json_prints_a_line_for_each_entry_then_the_summary() -> None:
    result = run(damaged(), "compare", "--json")
    assert result.exit_code == 3
    *rows, summary = lines(result)
    assert [row["verdict"] for row in rows] == ["agree", "corrupt", "missing", "diverged", "agree"]
    assert rows[1]["copies"]["b0"]["reason"] == "entry digest mismatch"
    assert rows[2]["copies"]["b1"] == {"verdict": "absent"}
    sums = {bookie: copy["crc32c"] for bookie, copy in rows[3]["copies"].items()}
    assert sums["b0"] == sums["b1"] != sums["b2"]
    assert (summary["verdict"], summary["entries"], summary["diverged"]) == ("differs", 5, 1)
    assert summary["bookies"]["b0"] == {"good": 4, "corrupt": 1}
    assert [row["entry_id"] for row in lines(run(damaged(), "compare", "--json", "--only-bad"))[:-1]] == [1, 2, 3]


def test_compare_is_incomplete_if_a_bookie_is_down_unless_copies_differ() -> None:
    source = FakeReplicas([b"zero", b"one"])
    source.down[BookieId("b1")] = "bookie cannot be reached"
    result = run(source, "compare")
    assert result.exit_code == 1
    assert "incomplete" in result.stdout
    assert "not all copies could be read: b1: bookie cannot be reached (2 entries)" in result.stderr
    source.corrupt("b0", 1)
    assert run(source, "compare").exit_code == 3


def test_compare_reads_a_range_beyond_the_last_confirmed_entry() -> None:
    source = FakeReplicas([b"zero", b"one", b"two"], closed=False)
    source.put("b1", 3, b"in flight")
    result = run(source, "compare", "--first", "2", "--last", "4", "--json")
    assert result.exit_code == 0
    *rows, summary = lines(result)
    assert [(row["entry_id"], row["verdict"]) for row in rows] == [
        (2, "agree"),
        (3, "unacknowledged"),
        (4, "unacknowledged"),
    ]
    assert (summary["last_confirmed"], summary["state"]) == (2, "open")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--first", "3", "--last", "2"), "--last is before --first"), (("--first", "9"), "--last reads entries beyond")],
)
def test_an_empty_range_is_refused_with_the_fix(arguments: tuple[str, ...], words: str) -> None:
    result = run(FakeReplicas([b"x"]), "compare", *arguments)
    assert isinstance(result.exception, BadRequest)
    assert words in str(result.exception)


def test_an_empty_ledger_agrees() -> None:
    result = run(FakeReplicas([]), "compare")
    assert (result.exit_code, result.stdout) == (0, "ledger 7 (closed): no confirmed entries\n")


def test_columns_show_each_ensemble_and_no_copy_outside_the_write_set() -> None:
    source = FakeReplicas([b"x"] * 3, ensembles={0: ("b0", "b1", "b2"), 2: ("b0", "b3", "b2")}, write_quorum=2)
    table = run(source, "compare").stdout.splitlines()
    assert [line.split() for line in table if "verdict" in line] == [
        ["entry", "b0", "b1", "b2", "verdict"],
        ["entry", "b0", "b3", "b2", "verdict"],
    ]
    assert table[1].split()[-2:] == ["-", "agree"]


# -- read -------------------------------------------------------------------------------------------------------------


def test_read_returns_verified_entries_and_skips_damaged_copies() -> None:
    result = run(damaged(), "read", "--last", "1", "--json")
    assert result.exit_code == 0
    assert [(line["entry_id"], line["payload_base64"]) for line in lines(result)] == [(0, "emVybw=="), (1, "b25l")]
    assert run(damaged(), "read", "--bytes").stdout == "zeroonetwothreefour"
    assert run(damaged(), "read", "--payload", "hex", "--first", "4").stdout.split() == ["4", "4", "bytes", "666f7572"]


def test_read_that_fails_points_to_compare() -> None:
    source = FakeReplicas([b"x"])
    for frames in source.frames.values():
        frames.clear()
    result = run(source, "read")
    assert isinstance(result.exception, NoSuchEntry)
    assert "`bindery ledger compare 7` shows the state of every copy" in result.stderr


def test_raw_shows_header_digest_and_payload_of_every_copy_damaged_or_not() -> None:
    result = run(damaged(), "read", "--raw", "--first", "1", "--last", "1")
    assert result.exit_code == 3
    text = result.stdout
    assert "entry 1 of b1: good\n  ledger_id  7\n  entry_id   1\n  lac        0\n  length     1000000\n" in text
    assert "entry 1 of b2: good, identical to b1\n" in text
    assert "entry 1 of b0: corrupt (entry digest mismatch)\n" in text
    assert " WRONG, its bytes give " in text
    assert b"one".hex() in text
    assert b"ond".hex() in text  # the damaged payload, unchanged
    assert "1 entries with corrupt or without good copies" in result.stderr


def test_raw_in_json_has_the_header_and_the_verdict_on_the_digest() -> None:
    result = run(damaged(), "read", "--raw", "--first", "1", "--last", "2", "--json", "--payload", "escaped")
    found = {(line["entry_id"], line["bookie"]): line for line in lines(result)}
    corrupt = found[1, "b0"]
    assert (corrupt["verdict"], corrupt["header"]["digest_verdict"]) == ("corrupt", "wrong")
    assert corrupt["header"]["digest"] != corrupt["header"]["digest_expected"]
    assert corrupt["payload_escaped"] == "ond"
    good = found[1, "b1"]["header"]
    assert (good["ledger_id"], good["entry_id"], good["lac"], good["length"], good["size"]) == (7, 1, 0, 1000000, 3)
    assert good["digest_type"] == "crc32c"
    assert found[2, "b1"]["verdict"] == "absent"
    assert found[2, "b1"]["in_write_set"]


def test_a_frame_too_short_for_a_header_is_shown_too() -> None:
    source = FakeReplicas([b"x"])
    source.frames[BookieId("b0")][0] = b"short"
    source.frames[BookieId("b1")][0] = source.frames[BookieId("b1")][0][:33]
    result = run(source, "read", "--raw")
    assert "only 5 bytes, too short for a header" in result.stdout
    assert b"short".hex() in result.stdout
    assert "crc32c cut off" in result.stdout


def test_from_bookie_shows_only_that_copy_with_its_verdict() -> None:
    verdicts = [line["verdict"] for line in lines(run(damaged(), "read", "--from-bookie", "b0", "--json"))]
    assert verdicts == ["good", "corrupt", "good", "good", "good"]
    assert run(damaged(), "read", "--from-bookie", "b0").exit_code == 3
    result = run(damaged(), "read", "--from-bookie", "b1")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[2].split() == ["2", "absent"]


def test_absence_on_a_bookie_outside_the_write_set_is_expected() -> None:
    source = FakeReplicas([b"x"] * 2, ensembles={0: ("b0", "b1", "b2")}, write_quorum=2)
    result = run(source, "read", "--from-bookie", "b2", "--first", "0", "--last", "1")
    assert "absent, as expected: not in the write set" in result.stdout.splitlines()[0]
    assert "1 bytes" in result.stdout.splitlines()[1]


def test_an_unknown_bookie_is_refused_with_the_names_of_the_known() -> None:
    result = run(FakeReplicas([b"x"]), "read", "--from-bookie", "b9")
    assert isinstance(result.exception, BookieUnavailable)
    assert "registered bookies: b0, b1, b2" in str(result.exception)


def test_escaped_payloads_are_reversible_text() -> None:
    source = FakeReplicas([b"a\\b\n\x00\xff'"])
    result = run(source, "read", "--payload", "escaped")
    assert result.stdout.rstrip("\n").endswith("a\\\\b\\n\\x00\\xff'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--payload", "octal"), "--payload must be one of hex|escaped|base64|none"),
        (("--bytes", "--json"), "omit --json"),
        (("--last", "7"), "--raw or --from-bookie read entries beyond it"),
        (("--first", "7"), "last confirmed entry is 0"),
        (("--first", "2", "--last", "1", "--raw"), "--last is before --first"),
    ],
)
def test_wrong_use_of_read_names_the_fix(arguments: tuple[str, ...], words: str) -> None:
    result = run(FakeReplicas([b"x"]), "read", *arguments)
    assert isinstance(result.exception, BadRequest)
    assert words in str(result.exception)


def test_decode_shows_messages_and_batches() -> None:
    one = OutgoingMessage(payload=b"hello", key="k", properties={"colour": "blue"})
    entries = [
        encode_message(one, producer_name="p", publish_time_ms=1, sequence_id=9),
        encode_batch(
            [one, OutgoingMessage(payload=b"\xff")], producer_name="p", publish_time_ms=1, sequence_ids=[10, 11]
        ),
        b"no message",
    ]
    found = [line["messages"] for line in lines(run(FakeReplicas(entries), "read", "--decode", "--json"))]
    single, batch, nonsense = found
    assert (single["producer"], single["sequence_id"], single["is_batch"]) == ("p", 9, False)
    (message,) = single["messages"]
    assert (message["key"], message["properties"], message["payload"]) == ("k", {"colour": "blue"}, "hello")
    assert (batch["is_batch"], batch["count"]) == (True, 2)
    assert [m["batch_index"] for m in batch["messages"]] == [0, 1]
    assert batch["messages"][1]["payload_base64"] == "/w=="
    assert "error" in nonsense
    text = run(FakeReplicas(entries), "read", "--decode").stdout
    assert "one message, producer p, sequence 9, published 1" in text
    assert "batch of 2" in text
    assert "cannot decode the messages" in text
    assert "hello" in run(FakeReplicas(entries), "read", "--raw", "--decode", "--payload", "none").stdout


# -- show -------------------------------------------------------------------------------------------------------------


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
