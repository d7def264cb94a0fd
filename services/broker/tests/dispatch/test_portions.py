"""The table of portions compared with a state for each message."""

import operator
import sys

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import SINGLE, WHOLE, MessageRef, indexes_of
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import SHORT_BITS_MAX, Portion, PortionTable, State
from dispatch_parts import SIZE, Pair, as_refs, at, batch, item, pairs, ref
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

EVERY = frozenset(State)


def ready(table: PortionTable[int], n: int, bits: int, *, is_batch: bool = True) -> Portion[int]:
    portion = table.add(at(n), bits, State.READY)
    portion.item = batch(n, bits) if is_batch else item(n)
    portion.size = portion.item.size
    return portion


def test_messages_of_an_entry_are_one_portion_until_a_part_of_them_is_selected() -> None:
    table: PortionTable[int] = PortionTable()
    portion = ready(table, 5, 0b1111)
    assert table.select([ref(5, 0b1111)], EVERY) == [portion]
    (part,) = table.select([ref(5, 0b0110)], EVERY)
    assert part is not portion
    assert (part.bits, portion.bits, table.messages) == (0b0110, 0b1001, 4)
    assert list(table.of(at(5))) == [portion, part]
    assert table.bits_of(at(5)) == 0b1111


def test_the_parts_of_a_ready_portion_share_the_body_and_divide_the_size() -> None:
    table: PortionTable[int] = PortionTable()
    portion = ready(table, 5, 0b111)
    part = table.split(portion, 0b010)
    assert part.item is not None
    assert portion.item is not None
    assert (part.item.bits, part.item.size, part.size) == (0b010, SIZE, SIZE)
    assert (portion.item.bits, portion.item.size, portion.size) == (0b101, 2 * SIZE, 2 * SIZE)
    assert part.item.body == portion.item.body


def test_a_part_has_the_state_the_count_and_the_delay_of_the_portion() -> None:
    table: PortionTable[int] = PortionTable()
    portion = table.add(at(5), 0b111, State.DELAYED)
    portion.redelivery_count, portion.due, portion.key_hash, portion.is_returned = 3, 7.5, 9, True
    part = table.split(portion, 0b1)
    assert (part.position, part.state, part.redelivery_count) == (at(5), State.DELAYED, 3)
    assert (part.due, part.key_hash, part.is_returned, part.item) == (7.5, 9, True, None)


def test_a_part_of_a_held_portion_has_the_same_grant() -> None:
    table: PortionTable[int] = PortionTable()
    leases, consumer = LeaseTable(), Consumer("c")
    portion = table.add(at(5), 0b111, State.LEASED)
    portion.size = 31
    grant = leases.grant(consumer, [portion], deadline=9, now=0)
    part = table.split(portion, 0b011)
    assert (part.grant, list(grant.portions)) == (grant, [portion, part])
    assert part.size + portion.size == 31, "the sizes of single messages are not known"
    leases.drop([part])
    assert (consumer.held, len(leases), leases.bytes_held) == (1, 1, portion.size)
    leases.drop([portion])
    assert (consumer.held, len(leases), leases.bytes_held, consumer.grants) == (0, 0, 0, {})


def test_messages_are_selected_by_state() -> None:
    table: PortionTable[int] = PortionTable()
    first = table.add(at(5), 0b001, State.READY)
    second = table.add(at(5), 0b110, State.ACKING)
    assert table.select([ref(5, WHOLE)], {State.READY}) == [first]
    assert table.select([ref(5, 0b111)], {State.ACKING}) == [second]
    assert table.select([ref(5, 0b010)], {State.READY}) == []
    assert second.bits == 0b110, "only selected portions are split"
    assert table.select([ref(6, WHOLE)], EVERY) == []


def test_a_removed_portion_is_gone_and_the_others_of_its_entry_stay() -> None:
    table: PortionTable[int] = PortionTable()
    portions = [ready(table, 5, 1 << index) for index in range(3)]
    for portion in (portions[1], portions[0], portions[2]):
        assert at(5) in table
        table.remove(portion)
        assert (portion.state, portion.item) == (State.GONE, None)
        assert portion not in list(table)
    assert at(5) not in table
    assert (table.messages, table.bits_of(at(5))) == (0, 0)


def test_portions_may_be_removed_while_those_of_an_entry_are_visited() -> None:
    table: PortionTable[int] = PortionTable()
    for index in range(4):
        table.add(at(5), 1 << index, State.REPLAY)
    visited = []
    for portion in table.of(at(5)):
        visited.append(portion.bits)
        table.remove(portion)
    assert sorted(visited) == [1, 2, 4, 8]


def test_messages_that_are_known_cannot_be_added() -> None:
    table: PortionTable[int] = PortionTable()
    table.add(at(5), 0b11, State.READY)
    with pytest.raises(AssertionError):
        table.add(at(5), 0b10, State.READY)


def test_a_cleared_table_has_no_messages() -> None:
    table: PortionTable[int] = PortionTable()
    portion = ready(table, 5, SINGLE, is_batch=False)
    table.clear()
    assert (list(table), table.messages, portion.state, portion.item) == ([], 0, State.GONE, None)


def test_an_entry_with_an_unknown_number_of_messages_counts_as_one_until_a_part_is_known() -> None:
    table: PortionTable[int] = PortionTable()
    portion = table.add(at(5), WHOLE, State.LOADING)
    assert (table.messages, portion.count) == (1, 1)
    (part,) = table.select([ref(5, 0b111)], {State.LOADING})
    assert (part.bits, part.count, portion.count, table.messages) == (0b111, 3, 1, 4)
    table.remove(portion)
    assert (table.messages, table.bits_of(at(5))) == (3, 0b111)


def test_a_message_at_the_end_of_a_large_batch_takes_as_little_memory_as_one_at_the_beginning() -> None:
    sizes = []
    for bits in (1 << 40_000, 1):
        portion = Portion[int](at(5), 0b11 * bits, State.READY)
        portion.bits &= ~bits
        assert (portion.bits, portion.count, portion.ref) == (0b10 * bits, 1, ref(5, 0b10 * bits))
        sizes.append(sum(sys.getsizeof(getattr(portion, slot)) for slot in Portion.__slots__))
    assert sizes[0] <= sizes[1] + 8


def test_a_message_of_a_batch_that_was_delivered_singly_is_found_without_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: PortionTable[int] = PortionTable()
    portions = [table.add(at(5), 1 << index, State.LEASED) for index in range(1_000)]
    looked_at: list[int] = []
    monkeypatch.setattr(Portion, "bits", property(lambda self: looked_at.append(self.index) or 1 << self.index))
    assert table.select([ref(5, 1 << 700)], EVERY) == [portions[700]]
    assert table.find(ref(5, 1 << 700)) is portions[700]
    table.remove(portions[700])
    assert table.find(ref(5, 1 << 700)) is None
    assert set(looked_at) == {700}


class PortionModel(RuleBasedStateMachine):
    """A table of portions against a dictionary of messages."""

    entries = st.integers(0, 3)
    bits = st.builds(operator.lshift, st.integers(1, 63), st.sampled_from([0, 3, 2 * SHORT_BITS_MAX]))

    def __init__(self) -> None:
        super().__init__()
        self.table: PortionTable[int] = PortionTable()
        self.states: dict[Pair, State] = {}

    @rule(n=entries, bits=bits, state=st.sampled_from([State.READY, State.REPLAY, State.ACKING]))
    def add(self, n, bits, state):
        bits &= ~self.table.bits_of(at(n))
        if bits:
            if state is State.READY:
                ready(self.table, n, bits)
            else:
                self.table.add(at(n), bits, state)
            self.states.update(dict.fromkeys(pairs([ref(n, bits)]), state))

    @precondition(lambda self: self.states)
    @rule(n=entries, bits=st.one_of(bits, st.just(WHOLE)), old=st.sets(st.sampled_from(State)), gone=st.booleans())
    def change(self, n, bits, old, gone):
        expected = {
            message
            for message, state in self.states.items()
            if message[0] == n and state in old and bits >> message[1] & 1
        }
        chosen = self.table.select([MessageRef(at(n), bits)], old)
        assert sorted(pairs(chosen)) == sorted(expected)
        for portion in chosen:
            assert portion.state in old
            if gone:
                self.table.remove(portion)
            else:
                portion.state, portion.item = State.REPLAY, None
        for message in expected:
            if gone:
                del self.states[message]
            else:
                self.states[message] = State.REPLAY

    @invariant()
    def the_table_is_the_model(self):
        found: dict[Pair, State] = {}
        for portion in self.table:
            for index in indexes_of(portion.bits):
                message = (portion.position.entry_id, index)
                assert message not in found, "in two portions"
                found[message] = portion.state
            if portion.state is State.READY:
                assert portion.item is not None
                assert (portion.item.bits, portion.item.size) == (portion.bits, portion.size)
        assert found == self.states
        assert self.table.messages == len(found)
        for n in range(4):
            known = [message for message in found if message[0] == n]
            assert (at(n) in self.table) == bool(known)
            assert self.table.bits_of(at(n)) == (as_refs(known)[0].bits if known else 0)


TestPortionModel = PortionModel.TestCase
TestPortionModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
