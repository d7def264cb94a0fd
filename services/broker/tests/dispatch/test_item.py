"""The keys of messages and the limits of a subscription."""

import pytest
from bindery_broker.dispatch.item import NOT_IN_BATCH, DispatchLimits, key_of
from bindery_pulsar.message_id import MessageId


def test_the_key_of_a_message_leaves_its_partition_out() -> None:
    assert key_of(MessageId(7, 5, 2, 3)) == (7, 5, 2)


def test_a_message_that_is_an_entry_of_its_own_has_the_index_minus_one() -> None:
    assert NOT_IN_BATCH == -1
    assert key_of(MessageId.parse("7:5:3:-1")) == (7, 5, NOT_IN_BATCH)


def test_keys_have_the_order_of_the_topic() -> None:
    ids = [MessageId(2, 0, -1, -1), MessageId(1, 1, 1, -1), MessageId(1, 1, 0, -1), MessageId(1, 0, -1, -1)]
    assert sorted(key_of(each) for each in ids) == [(1, 0, -1), (1, 1, 0), (1, 1, 1), (2, 0, -1)]


def test_the_default_limits() -> None:
    assert DispatchLimits() == DispatchLimits(
        unacked_max=50_000, unacked_per_consumer_max=10_000, ready_max=2_000, ready_bytes_max=8_388_608
    )


def test_the_smallest_limits() -> None:
    limits = DispatchLimits(unacked_max=1, unacked_per_consumer_max=1, ready_max=1, ready_bytes_max=1)
    assert (limits.unacked_max, limits.ready_bytes_max) == (1, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"unacked_per_consumer_max": 0},
        {"unacked_max": 5, "unacked_per_consumer_max": 6},
        {"ready_max": 0},
        {"ready_bytes_max": 0},
    ],
)
def test_impossible_limits_are_a_mistake_of_the_caller(fields: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        DispatchLimits(**fields)
