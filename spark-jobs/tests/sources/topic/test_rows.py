"""Messages as rows, without a cluster."""

import json
import struct
from datetime import UTC, datetime

import pytest
from bindery_core.ids import ID_MAX
from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.pulsar_messages_pb2 import ZLIB, MessageMetadata
from bindery_spark.sources.topic.positions import (
    ALL,
    TIME_MS_MAX,
    Bounds,
    parse_bounds,
)
from bindery_spark.sources.topic.rows import NOT_DECODED, OUT_OF_RANGE, MessageRows


def test_messages_batches_and_undecodable_entries_become_rows() -> None:
    one = OutgoingMessage(payload=b"p", key=b"\xff", properties={"a": "b"}, event_time_ms=7)
    tombstone = OutgoingMessage(payload=b"", key="k", null_value=True)
    rows = MessageRows(Bounds(from_ms=10, to_ms=20))
    facts = {"producer_name": "me", "publish_time_ms": 10}
    rows.add(encode_message(one, sequence_id=5, **facts), ledger_id=3, entry_id=0, partition=-1)
    rows.add(encode_batch([one, tombstone], sequence_ids=[6, 7], **facts), ledger_id=3, entry_id=1, partition=2)
    rows.add(
        encode_message(one, sequence_id=8, producer_name="me", publish_time_ms=20),
        ledger_id=3,
        entry_id=2,
        partition=-1,
    )
    rows.add(b"no message", ledger_id=3, entry_id=3, partition=-1)
    found = rows.take().to_pylist()
    assert rows.is_empty
    assert [row["message_id"] for row in found] == ["3:0:-1:-1", "3:1:2:0", "3:1:2:1", "3:3:-1:-1"]
    first, _, third, bad = found
    assert (first["key"], first["key_is_base64"], first["payload"], first["properties"]) == (
        "/w==",
        True,
        b"p",
        [("a", "b")],
    )
    assert first["publish_time"] == datetime(1970, 1, 1, 0, 0, 0, 10_000, tzinfo=UTC)
    assert first["event_time"] == datetime(1970, 1, 1, 0, 0, 0, 7_000, tzinfo=UTC)
    assert (third["key"], third["payload"], third["event_time"], third["sequence_id"]) == ("k", None, None, 7)
    assert bad["publish_time"] is None
    assert "cut short" in bad["problem"] or "cannot be read" in bad["problem"]


def test_values_out_of_range_are_in_the_problem_and_the_message_has_a_row() -> None:
    rows = MessageRows(ALL)
    late_ms, far_ms = 1_700_000_000_000_000, 1_700_000_000_000_000_000  # us and ns instead of ms
    odd = OutgoingMessage(payload=b"p", key="k", event_time_ms=far_ms)
    facts = {"producer_name": "me", "publish_time_ms": late_ms, "sequence_id": 2**63 + 5}
    rows.add(encode_message(odd, **facts), ledger_id=3, entry_id=0, partition=-1)
    plain = OutgoingMessage(payload=b"p", event_time_ms=TIME_MS_MAX - 1)
    facts = {"producer_name": "me", "publish_time_ms": TIME_MS_MAX - 1, "sequence_id": 2**63 - 1}
    rows.add(encode_message(plain, **facts), ledger_id=3, entry_id=1, partition=-1)
    first, second = rows.take().to_pylist()
    assert (first["key"], first["payload"], first["producer"]) == ("k", b"p", "me")
    assert (first["publish_time"], first["event_time"], first["sequence_id"]) == (None, None, None)
    assert first["problem"] == (
        f"{OUT_OF_RANGE}publish_time {late_ms} ms, event_time {far_ms} ms, sequence_id {2**63 + 5}"
    )
    assert (second["publish_time"].year, second["event_time"].year) == (9999, 9999)
    assert (second["sequence_id"], second["problem"]) == (2**63 - 1, None)
    rows = MessageRows(parse_bounds("earliest", "2026-01-01"))
    rows.add(encode_message(odd, **facts), ledger_id=3, entry_id=0, partition=-1)
    assert rows.is_empty, "later than the requested end"


def test_an_encrypted_message_with_an_invalid_date_has_a_row() -> None:
    metadata = MessageMetadata(producer_name="me", sequence_id=2**64 - 1, publish_time=2**64 - 1)
    metadata.encryption_keys.add(key="k", value=b"v")
    head = metadata.SerializeToString()
    rows = MessageRows(ALL)
    rows.add(struct.pack(">I", len(head)) + head + b"secret", ledger_id=3, entry_id=0, partition=-1)
    (row,) = rows.take().to_pylist()
    assert (row["publish_time"], row["sequence_id"]) == (None, None)
    assert row["problem"] == (
        f"{NOT_DECODED}encrypted; {OUT_OF_RANGE}publish_time {2**64 - 1} ms, sequence_id {2**64 - 1}"
    )


def small(rows: MessageRows, count: int) -> None:
    entry = encode_message(OutgoingMessage(payload=b""), producer_name="me", publish_time_ms=1, sequence_id=1)
    for entry_id in range(count):
        rows.add(entry, ledger_id=3, entry_id=entry_id, partition=-1)


def test_a_batch_is_full_at_16384_rows_or_8_mib() -> None:
    rows = MessageRows(ALL)
    small(rows, 16_383)
    assert not rows.is_full
    small(rows, 1)
    assert rows.is_full
    assert rows.take().num_rows == 16_384
    assert rows.is_empty
    facts = {"producer_name": "me", "publish_time_ms": 1, "sequence_id": 1}
    for round_ in range(2):  # a taken batch leaves nothing
        for size in (2**22, 2**22 - 1, 1):
            assert not rows.is_full, round_
            rows.add(
                encode_message(OutgoingMessage(payload=bytes(size)), **facts), ledger_id=3, entry_id=0, partition=-1
            )
        assert rows.is_full
        rows.take()
    rows.add(b"\xff" * 2**23, ledger_id=3, entry_id=0, partition=-1)
    assert rows.is_full, "entries that cannot be decoded count too"


def test_an_entry_that_is_not_decoded_is_a_row_with_its_payload_as_stored() -> None:
    rows = MessageRows(Bounds(from_ms=10, to_ms=20))
    for entry_id, time_ms in enumerate((9, 10, 20)):
        metadata = MessageMetadata(producer_name="me", sequence_id=9, publish_time=time_ms, partition_key="k")
        metadata.properties.add(key="a", value="b")
        metadata.encryption_keys.add(key="key-1", value=b"v")
        head = metadata.SerializeToString()
        entry = struct.pack(">I", len(head)) + head + b"secret"
        rows.add(entry, ledger_id=3, entry_id=entry_id, partition=4)
    (row,) = rows.take().to_pylist()
    encoding = json.loads(row.pop("encoding"))
    assert (encoding["reason"], encoding["encryption"]["keys"][0]["name"]) == ("encrypted", "key-1")
    assert row.pop("problem") == f"{NOT_DECODED}encrypted"
    assert row == {
        "message_id": "3:1:4:-1",
        "ledger_id": 3,
        "entry_id": 1,
        "batch_index": -1,
        "publish_time": datetime(1970, 1, 1, 0, 0, 0, 10_000, tzinfo=UTC),
        "event_time": None,
        "key": "k",
        "key_is_base64": False,
        "properties": [("a", "b")],
        "payload": b"secret",
        "producer": "me",
        "sequence_id": 9,
    }


def damaged(publish_time_ms: int) -> bytes:
    """Return a compressed entry whose payload does not match its metadata."""
    metadata = MessageMetadata(producer_name="me", sequence_id=9, publish_time=publish_time_ms, compression=ZLIB)
    head = metadata.SerializeToString()
    return struct.pack(">I", len(head)) + head + b"damage"


def test_an_entry_that_cannot_be_decoded_has_the_columns_that_are_known() -> None:
    rows = MessageRows(Bounds(from_ms=10, to_ms=20))
    for entry_id, time_ms in enumerate((9, 10, 20)):
        rows.add(damaged(time_ms), ledger_id=3, entry_id=entry_id, partition=4)
    (row,) = rows.take().to_pylist()
    problem = row.pop("problem")
    assert "does not match its metadata" in problem
    assert row == {
        "message_id": "3:1:4:-1",
        "ledger_id": 3,
        "entry_id": 1,
        "batch_index": -1,
        "publish_time": datetime(1970, 1, 1, 0, 0, 0, 10_000, tzinfo=UTC),
        "event_time": None,
        "key": None,
        "key_is_base64": False,
        "properties": [],
        "payload": None,
        "producer": "me",
        "sequence_id": 9,
        "encoding": None,
    }


@pytest.mark.parametrize(
    ("publish_ms", "event_ms", "sequence_id", "problem"),
    [
        (TIME_MS_MAX - 1, TIME_MS_MAX - 1, ID_MAX, None),
        (TIME_MS_MAX, TIME_MS_MAX - 1, ID_MAX, f"publish_time {TIME_MS_MAX} ms"),
        (7, TIME_MS_MAX, ID_MAX, f"event_time {TIME_MS_MAX} ms"),
        (7, 0, ID_MAX + 1, f"sequence_id {ID_MAX + 1}"),
        (0, 0, 0, None),
        (TIME_MS_MAX, 0, 5, f"publish_time {TIME_MS_MAX} ms"),
        (7, 8, ID_MAX + 1, f"sequence_id {ID_MAX + 1}"),
    ],
)
def test_only_values_beyond_the_limits_are_out_of_range(
    publish_ms: int, event_ms: int, sequence_id: int, problem: str | None
) -> None:
    rows = MessageRows(ALL)
    message = OutgoingMessage(payload=b"p", event_time_ms=event_ms)
    facts = {"producer_name": "me", "publish_time_ms": publish_ms, "sequence_id": sequence_id}
    rows.add(encode_message(message, **facts), ledger_id=3, entry_id=0, partition=-1)
    batch = rows.take()
    got = {name: batch.column(name).cast("int64").to_pylist()[0] for name in ("publish_time", "event_time")}
    assert got == {
        "publish_time": None if publish_ms >= TIME_MS_MAX else publish_ms * 1_000,
        "event_time": None if event_ms >= TIME_MS_MAX or not event_ms else event_ms * 1_000,
    }
    (row,) = batch.select(["sequence_id", "problem"]).to_pylist()
    assert row["sequence_id"] == (None if sequence_id > ID_MAX else sequence_id)
    assert row["problem"] == (None if problem is None else OUT_OF_RANGE + problem)
