"""The messages of entries, parts of them, and the limits of a subscription."""

import pytest
from bindery_broker.dispatch.item import (
    NOT_IN_BATCH,
    SINGLE,
    WHOLE,
    DispatchLimits,
    Item,
    MessageRef,
    bits_of,
    count_of,
    indexes_of,
    lowest,
    refs_of,
)
from bindery_pulsar.message_id import MessageId, Position
from hypothesis import given
from hypothesis import strategies as st

AT = Position(7, 5)

sets_of_indexes = st.sets(st.integers(0, 5_000), min_size=1, max_size=20)


def batch(bits: int, *sizes: int) -> Item[str]:
    return Item(AT, size=sum(sizes), sizes=sizes, bits=bits, body="b", key_hash=3, deliver_at_ms=4)


def facts(item: Item[str]) -> tuple[object, ...]:
    return (item.position, item.bits, item.size, item.sizes, item.body, item.key_hash, item.deliver_at_ms)


def all_known(_position: Position) -> int:
    return 0b111


def test_the_reference_of_a_message_leaves_its_partition_out() -> None:
    assert refs_of([MessageId(7, 5, 2, 3)], all_known) == [MessageRef(AT, 0b100)]


def test_an_id_without_a_batch_index_names_all_messages_of_its_entry() -> None:
    assert (NOT_IN_BATCH, WHOLE) == (-1, -1)
    assert refs_of([MessageId.parse("7:5:3:-1")], all_known) == [MessageRef(AT, WHOLE)]
    ids = [MessageId(7, 5, index, -1) for index in (0, NOT_IN_BATCH, 1)]
    assert refs_of(ids, all_known) == [MessageRef(AT, WHOLE)]


def test_messages_of_one_entry_are_one_reference() -> None:
    ids = [MessageId(7, 5, 2, -1), MessageId(7, 6, 1, -1), MessageId(7, 5, 0, -1)]
    assert refs_of(ids, all_known) == [MessageRef(AT, 0b101), MessageRef(Position(7, 6), 0b10)]


def test_indexes_that_are_not_known_are_left_out() -> None:
    """A client may send any index. A reference with its bit would take as many bits of memory."""
    assert refs_of([MessageId(7, 5, 3, -1), MessageId(7, 6, 2**31 - 1, -1)], all_known) == []


def test_an_index_that_no_batch_has_is_left_out_if_the_number_of_messages_is_not_known() -> None:
    ids = [MessageId(7, 5, 999_999, -1), MessageId(7, 6, 1_000_000, -1), MessageId(7, 7, 2**31 - 1, -1)]
    assert refs_of(ids, lambda _position: WHOLE) == [MessageRef(AT, 1 << 999_999)]


def test_the_messages_of_an_entry_are_looked_up_once() -> None:
    """An entry may consist of thousands of parts, and a call may name as many of its messages."""
    looked_up: list[Position] = []

    def known_bits(position: Position) -> int:
        looked_up.append(position)
        return 0b111

    ids = [MessageId(7, 5, index, -1) for index in (2, 0, 1, 4)]
    assert refs_of(ids, known_bits) == [MessageRef(AT, 0b111)]
    assert looked_up == [AT]


def test_references_have_the_order_of_the_topic() -> None:
    positions = [Position(2, 0), Position(1, 1), Position(1, 0)]
    assert sorted(MessageRef(position, SINGLE).position for position in positions) == positions[::-1]


@given(sets_of_indexes)
def test_indexes_become_bits_and_bits_indexes(indexes: set[int]) -> None:
    ascending = sorted(indexes)
    bits = bits_of(ascending)
    assert bits == sum(1 << index for index in ascending)
    assert list(indexes_of(bits)) == ascending
    assert lowest(bits) == ascending[0]
    assert count_of(bits) == len(ascending)


def test_no_bits_are_no_indexes() -> None:
    assert list(indexes_of(0)) == []


def test_the_indexes_of_an_unknown_number_of_messages_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        list(indexes_of(WHOLE))


def test_an_unknown_number_of_messages_counts_as_one() -> None:
    assert [count_of(bits) for bits in (0, SINGLE, 0b101, WHOLE, WHOLE & ~0b111)] == [0, 1, 2, 1, 1]


def test_a_part_of_a_batch_is_cut_off_with_its_sizes() -> None:
    item = batch(0b1011, 1, 20, 300)
    part = item.cut(0b0010)
    assert facts(part) == (AT, 0b0010, 20, [20], "b", 3, 4)
    assert facts(item) == (AT, 0b1001, 301, [1, 300], "b", 3, 4)


def test_only_messages_of_the_item_are_cut_off() -> None:
    item = batch(0b110, 1, 2)
    assert facts(item.cut(0b1011))[1:4] == (0b10, 1, [1])


@pytest.mark.parametrize("bits", [0b110, WHOLE, 0b1, 0])
def test_everything_or_nothing_is_no_part(bits: int) -> None:
    with pytest.raises(AssertionError):
        batch(0b110, 1, 2).cut(bits)


@given(sets_of_indexes, st.data())
def test_the_parts_of_a_batch_are_complete_and_disjoint(indexes: set[int], data: st.DataObject) -> None:
    """The size of each message is its index, so that each must be in the same part as its bit."""
    ascending = sorted(indexes)
    item = batch(bits_of(ascending), *ascending)
    chosen = data.draw(st.sets(st.sampled_from(ascending), min_size=1, max_size=len(ascending)))
    if chosen == indexes:
        return
    part = item.cut(bits_of(sorted(chosen)))
    for one, expected in ((part, sorted(chosen)), (item, sorted(indexes - chosen))):
        assert list(indexes_of(one.bits)) == list(one.sizes or ()) == expected
        assert one.size == sum(expected)
        assert one.first_size == expected[0]


def test_an_entry_that_is_no_batch_is_taken_as_a_whole() -> None:
    item = Item(AT, size=100, body="m")
    assert (item.bits, item.sizes, item.first_size) == (SINGLE, None, 100)
    assert item.first_bits(count_max=1, size_max=1) == SINGLE


@pytest.mark.parametrize(
    ("count_max", "size_max", "expected"),
    [
        (1, 1_000, 0b10),
        (2, 1_000, 0b1010),
        (3, 1_000, 0b11010),
        (9, 1_000, 0b11010),
        (9, 35, 0b11010),
        (9, 34, 0b1010),
        (9, 20, 0b1010),
        (9, 19, 0b10),
        (9, 0, 0b10),
    ],
)
def test_the_first_messages_of_a_batch_are_limited_by_count_and_bytes(
    count_max: int, size_max: int, expected: int
) -> None:
    assert batch(0b11010, 10, 10, 15).first_bits(count_max=count_max, size_max=size_max) == expected


def test_no_message_follows_one_that_does_not_fit() -> None:
    assert batch(0b111, 10, 50, 10).first_bits(count_max=9, size_max=20) == 0b1


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
