"""The partition of a message. The golden values are those of Pulsar's Murmur3_32Hash."""

import pytest
from bindery_broker.partitioned.routing import partition_of, route


@pytest.mark.parametrize(
    ("key", "hashed"),
    [("k1", 2110152746), ("k2", 1479966664), ("key1", 462881061), ("key2", 1936800180), ("key01", 39696932)],
)  # fmt: skip
def test_keys_have_the_partition_of_pulsars_clients(key, hashed):
    for partitions in (1, 2, 3, 7, 256):
        assert partition_of(key, partitions) == hashed % partitions
        assert partition_of(key.encode(), partitions) == hashed % partitions


def test_a_key_is_hashed_as_utf_8():
    assert partition_of("ä", 1_000) == partition_of(b"\xc3\xa4", 1_000)


def test_messages_of_a_key_keep_their_order_in_one_partition():
    keys = [f"k{number % 5}" for number in range(100)]
    parts = route(keys, partitions=4, turn=0)
    assert sorted(index for some in parts.values() for index in some) == list(range(100))
    for partition, indexes in parts.items():
        assert indexes == sorted(indexes)
        assert {partition_of(keys[index], 4) for index in indexes} == {partition}


def test_messages_without_a_key_stay_together_and_requests_take_turns():
    assert [route([None, None], partitions=3, turn=turn) for turn in range(4)] == [
        {0: [0, 1]},
        {1: [0, 1]},
        {2: [0, 1]},
        {0: [0, 1]},
    ]


def test_a_repeated_request_goes_to_the_same_partition():
    found = {tuple(route([None], partitions=16, turn=turn, identity="once")) for turn in range(50)}
    assert found == {(partition_of("once", 16),)}
    spread = {
        partition for number in range(50) for partition in route([None], partitions=16, turn=0, identity=f"{number}")
    }
    assert len(spread) > 8


def test_an_empty_key_is_a_key():
    assert route([""], partitions=5, turn=3) == {0: [0]}
