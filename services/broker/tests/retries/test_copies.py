"""Copies of messages for retry and dead-letter topics."""

from typing import Any

import pytest
from bindery_broker.dispatch.item import MessageRef
from bindery_broker.retries.copies import copy_of, id_of, identity_of, reconsume_times
from bindery_pulsar.message_codec import Message
from bindery_pulsar.message_id import MessageId, Position
from bindery_pulsar.topic_name import TopicName

AT = Position(5, 6)
TOPIC = TopicName.parse("t-partition-2")


def message(**fields: Any) -> Message:
    fields = {"payload": b"x", "batch_index": -1, "batch_size": 1, **fields}
    return Message(producer_name="p", sequence_id=3, publish_time_ms=4, **fields)


def copy(original: Message, **options: Any) -> Any:
    return copy_of(original, AT, partition=2, topic=TOPIC, subscription="s", **options)


def test_a_retry_keeps_the_message_and_adds_properties():
    original = message(
        key=b"k", ordering_key=b"o", properties={"a": "1"}, event_time_ms=9, null_value=True, payload=b""
    )
    made = copy(original, times=1, delay_ms=250, now_ms=1_000)
    kept = made.message
    assert (kept.payload, kept.key, kept.ordering_key, kept.event_time_ms) == (b"", b"k", b"o", 9)
    assert (kept.null_value, kept.deliver_at_ms, kept.sequence_id) == (True, 1_250, None)
    assert kept.properties == {
        "a": "1",
        "REAL_TOPIC": "persistent://public/default/t",
        "REAL_SUBSCRIPTION": "s",
        "ORIGIN_MESSAGE_ID": "5:6:2",
        "ORIGIN_MESSAGE_IDY_TIME": "5:6:2",
        "RECONSUMETIMES": "1",
        "DELAY_TIME": "250",
    }
    assert (made.ref, id_of(made, partition=2)) == (MessageRef(AT, 1), MessageId(5, 6, -1, 2))


def test_three_retries_and_a_dead_letter_keep_the_origin():
    made = copy(message(batch_index=3, batch_size=8), times=1)
    assert made.ref == MessageRef(AT, 8)
    for times in (2, 3):
        made = copy(message(properties=dict(made.message.properties)), times=times)
        assert made.identity == ("s", "5:6:2:3", str(times))
        assert made.message.deliver_at_ms is None
    letter = copy(message(properties=dict(made.message.properties)), properties={"why": "bad"})
    assert letter.message.properties == {**made.message.properties, "why": "bad"}


def test_a_redriven_letter_has_an_identity_of_its_own_until_it_is_retried():
    properties = {"ORIGIN_MESSAGE_ID": "1:2:-1", "REAL_TOPIC": "other", "REAL_SUBSCRIPTION": "other"}
    letters = [copy(message(properties=properties), redriven_by=keeper) for keeper in ("k", "l")]
    assert letters[0].message.properties == {
        "ORIGIN_MESSAGE_ID": "1:2:-1",
        "ORIGIN_MESSAGE_IDY_TIME": "1:2:-1",
        "REAL_TOPIC": "persistent://public/default/t",
        "REAL_SUBSCRIPTION": "s",
        "REDRIVEN_FROM": "5:6:2/k",
    }
    assert [made.identity for made in letters] == [("s", "5:6:2/k", ""), ("s", "5:6:2/l", "")]
    again = copy(message(properties=dict(letters[0].message.properties)), times=1)
    assert "REDRIVEN_FROM" not in again.message.properties
    assert again.identity == ("s", "1:2:-1", "1")


@pytest.mark.parametrize(
    ("text", "times"),
    [("0", 0), ("7", 7), ("", 0), ("-1", 0), ("x", 0), ("9" * 10, 2**31 - 1), ("9" * 11, 0), ("٣", 0)],
)
def test_the_number_of_retries_is_read_from_any_text(text, times):
    assert reconsume_times({"RECONSUMETIMES": text}) == times
    assert reconsume_times({}) == 0


def test_an_identity_is_short_whatever_a_producer_has_set():
    assert identity_of({}) == ("", "", "")
    for text in ("x" * 97, "\x00", "é", "\ud800"):
        found = identity_of({"ORIGIN_MESSAGE_ID": text}).origin
        assert found.startswith("sha256:")
        assert len(found) == 71
        assert found != identity_of({"ORIGIN_MESSAGE_ID": text + "x"}).origin
