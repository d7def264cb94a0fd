"""The tag filter of a subscription."""

import pytest
from bindery_broker.subscriptions.consumer import MessageFilter, ReceiveRequest
from bindery_pulsar.message_codec import decode_entry
from subscription_parts import single

MESSAGES = [decode_entry(single(*arguments))[0] for arguments in ((b"a", "red"), (b"b", "blue", "red"), (b"c",))]


@pytest.mark.parametrize(
    ("properties", "tags", "matching"),
    [
        ({}, set(), b"abc"),
        ({"blue": "1"}, {"blue"}, b"bc"),
        ({"blue": "1", "red": "1"}, {"blue", "red"}, b"abc"),
        ({"green": "1"}, {"green"}, b"c"),
        ({"*": "1", "green": "1"}, {"*", "green"}, b"abc"),
        ({"red": "2", "team": "x"}, set(), b"abc"),
    ],
)
def test_a_message_matches_if_it_has_one_of_the_tags_or_none(
    properties: dict[str, str], tags: set[str], matching: bytes
) -> None:
    tag_filter = MessageFilter(properties)
    assert tag_filter.tags == tags
    assert b"".join(message.payload for message in tag_filter.matching(MESSAGES)) == matching


def test_a_request_returns_no_messages_of_an_earlier_one_unless_it_asks() -> None:
    request = ReceiveRequest(consumer="c", count_max=1, bytes_max=1, wait_s=0, ack_timeout_s=30, session_ttl_s=60)
    assert (request.redeliver, request.request_id) == (False, None)
