"""PositionMap against a plain dictionary."""

from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.position_map import PositionMap
from hypothesis import given, settings
from hypothesis import strategies as st

POSITION = st.builds(Position, st.integers(0, 3), st.integers(0, 30))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), POSITION),
        st.tuples(st.just("set"), POSITION),
        st.tuples(st.just("delete"), POSITION),
        st.tuples(st.just("upto"), st.builds(Position, st.integers(0, 3), st.integers(-1, 30))),
        st.tuples(st.just("copy"), POSITION),
    ),
    max_size=80,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_a_map_equals_a_dictionary_in_the_order_of_positions(steps: list[tuple[str, Position]]) -> None:
    values, naive = PositionMap[int](weight_of=lambda value: 3 * value + 1), dict[Position, int]()
    for number, (kind, position) in enumerate(steps):
        if kind == "set":
            values[position] = naive[position] = number
        elif kind == "delete":
            assert values.pop(position, None) == naive.pop(position, None)
        elif kind == "copy":
            former, values = values, values.copy()
            former[position] = -1
            former.remove_upto(Position(2, 10))
        else:
            values.remove_upto(position)
            naive = {at: value for at, value in naive.items() if at > position}
        assert list(values.items()) == sorted(naive.items())
        assert values == naive
        assert len(values) == len(naive)
        assert values.weight == sum(3 * value + 1 for value in naive.values())
        assert (position in values) == (position in naive)
    assert PositionMap(naive) == values
    assert PositionMap(naive).weight == 0
    values.clear()
    assert not values
    assert values.weight == 0
    assert list(values) == []


def test_deleted_positions_take_no_memory() -> None:
    values = PositionMap[int]()
    values[Position(0, 10**6)] = 0
    for entry in range(10_000):
        values[Position(0, entry)] = 1
        del values[Position(0, entry)]
    assert len(values._ledgers[0].heap) < 100
    values.remove_upto(Position(0, 10**6))
    assert not values._ledgers
