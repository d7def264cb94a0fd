"""Intents as they are stored: later versions must read these bytes."""

import pytest
from bindery_broker.managed_ledger import BatchAck
from bindery_broker.retries.copies import Identity
from bindery_broker.retries.intents import (
    MESSAGES_MAX,
    Intent,
    Planned,
    acks_of,
    decode_intent,
    encode_intent,
    names_of_intents,
    next_name,
)
from bindery_broker.retries.targets import Destination
from bindery_core.errors import Corrupt
from bindery_pulsar.message_id import Position
from bindery_pulsar.topic_name import TopicName

INTENT = Intent(
    Destination(TopicName.parse("t-s-RETRY"), "s"),
    Position(7, -1),
    (
        Planned(Position(1, 2), -1, 1, Identity("s", "1:2:-1", "1")),
        Planned(Position(1, 3), 4, 10, Identity("s", "1:3:-1:4", "")),
    ),
)
GOLDEN = (
    b'[1,"persistent://public/default/t-s-RETRY","s",7,-1,[[1,2,-1,1,"s","1:2:-1","1"],[1,3,4,10,"s","1:3:-1:4",""]]]'
)


def test_the_format_is_stable():
    assert encode_intent(INTENT) == GOLDEN
    assert decode_intent(GOLDEN) == INTENT
    assert [message.ref.bits for message in INTENT.messages] == [1, 16]


@pytest.mark.parametrize(
    "blob",
    [b"", b"{}", b"[]", GOLDEN[:-1], GOLDEN.replace(b"[1,", b"[2,", 1), GOLDEN.replace(b"persistent://", b"x://")],
)
def test_other_bytes_are_corrupt(blob):
    with pytest.raises(Corrupt, match="a stored move cannot be read"):
        decode_intent(blob)


def test_names_are_ordered_by_their_numbers():
    blobs = ["move-10", "delays-3", "move-9", "move-0", "move-x", "moves-1"]
    assert names_of_intents(blobs) == ["move-9", "move-10"]
    assert next_name(blobs) == "move-11"
    assert next_name([]) == "move-1"


def test_the_largest_intent_fits_into_a_blob():
    identity = Identity("s" * 96, "\\" * 96, "\\" * 96)
    messages = tuple(Planned(Position(2**62, 2**62), 2**20, 2**20, identity) for _ in range(MESSAGES_MAX))
    assert len(encode_intent(Intent(INTENT.to, INTENT.after, messages))) < 2**20


def test_messages_are_acknowledged_as_entries_and_parts_of_batches():
    parts = [Planned(Position(1, 3), index, 10, Identity("", "", "")) for index in (6, 4)]
    assert acks_of([INTENT.messages[0], *parts]) == ([Position(1, 2)], [BatchAck(Position(1, 3), 10, [4, 6])])
