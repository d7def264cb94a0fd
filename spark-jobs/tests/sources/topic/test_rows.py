"""Messages as rows, without a cluster."""

import struct
from datetime import UTC, datetime

from bindery_pulsar.message_codec import OutgoingMessage, encode_batch, encode_message
from bindery_pulsar.pulsar_messages_pb2 import MessageMetadata
from bindery_spark.sources.topic.positions import (
    ALL,
    TIME_MS_MAX,
    Bounds,
    parse_bounds,
)
from bindery_spark.sources.topic.rows import OUT_OF_RANGE, MessageRows


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
    assert "encrypted" in row["problem"]
