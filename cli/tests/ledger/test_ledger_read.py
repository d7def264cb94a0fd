"""`bindery ledger read` on ledgers in memory, intact and damaged."""

import pytest
from bindery.ledger import replicas
from bindery_core.errors import BadRequest, BookieUnavailable, NoSuchEntry
from bindery_core.ids import BookieId
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from fake_replicas import FakeReplicas
from ledger_runs import damaged, lines, run


@pytest.fixture(autouse=True)
def no_second_look_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RECHECK_PAUSE_S", 0.0)


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
