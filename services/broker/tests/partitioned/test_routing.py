"""The partition of a message. The golden values are those of Pulsar's Murmur3_32Hash."""

import pytest
from bindery_broker.partitioned.routing import SEQUENCE_BLOCK, partition_of, route


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


def test_each_sequence_id_of_a_producer_has_a_partition_whatever_the_requests():
    ids = list(range(1_000, 3_000))
    whole = route([None] * len(ids), partitions=5, turn=0, identity="p", sequence_ids=ids)
    placed = {ids[index]: partition for partition, some in whole.items() for index in some}
    for partition, some in whole.items():
        assert some == sorted(some), partition
    for first, last in ((1_000, 1_001), (1_100, 1_900), (1_027, 2_011)):
        part = route([None] * (last - first), partitions=5, turn=9, identity="p", sequence_ids=range(first, last))
        for partition, some in part.items():
            assert {placed[first + index] for index in some} == {partition}


def test_the_sequence_ids_of_a_producer_spread_over_all_partitions_in_blocks():
    found = route([None] * 1_280, partitions=5, turn=0, identity="p", sequence_ids=range(1_280))
    assert {len(some) for some in found.values()} == {2 * SEQUENCE_BLOCK}
    small = route([None] * 100, partitions=5, turn=0, identity="p", sequence_ids=range(100))
    assert len(small) == 1
    starts = {tuple(route([None], partitions=5, turn=0, identity=f"p{n}", sequence_ids=[0])) for n in range(100)}
    assert len(starts) == 5


def test_an_empty_key_is_a_key():
    assert route([""], partitions=5, turn=3) == {0: [0]}
