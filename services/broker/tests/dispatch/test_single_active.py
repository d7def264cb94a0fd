"""Exclusive dispatch: the order of the topic is kept, also when messages are returned."""

import pytest
from bindery_broker.dispatch.exclusive import ExclusiveDispatcher
from bindery_broker.dispatch.item import DispatchLimits, Item
from bindery_broker.dispatch.read_ahead import ReadAhead
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule


def key(n: int) -> tuple[int, int, int]:
    return (0, n, -1)


def item(n: int, size: int = 10) -> Item[int]:
    return Item(key(n), size, n)


class Reader:
    """The part of the cursor: the acknowledged entries and the read position."""

    def __init__(self, entries: int, **limits: int) -> None:
        self.dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher(
            limits=DispatchLimits(**limits) if limits else None
        )
        self.entries = entries
        self.acked: set[int] = set()
        self.position = 0

    def read(self, count: int = 100) -> None:
        if self.dispatcher.rewind_wanted:
            self.position = 0
            self.dispatcher.rewound()
        new = [n for n in range(self.position, self.entries) if n not in self.acked]
        new = new[: min(count, self.dispatcher.room())]
        self.dispatcher.offer([item(n) for n in new], generation=self.dispatcher.generation)
        if new:
            self.position = new[-1] + 1

    def take(self, count: int = 100, *, now: float = 0.0, consumer: str = "c") -> list[int]:
        taken = self.dispatcher.take(consumer, count_max=count, bytes_max=10**6, ack_timeout_s=30, now=now)
        return [delivery.message for delivery in taken]

    def put_down(self) -> None:
        first = self.dispatcher.put_down()
        if first is not None:
            self.position = min(self.position, first[1])

    def ack(self, *entries: int) -> None:
        keys = self.dispatcher.begin_ack([key(n) for n in entries])
        self.acked.update(entries)
        self.dispatcher.finish_ack(keys)


def test_messages_are_delivered_in_order():
    reader = Reader(5)
    reader.read()
    assert reader.take(2) == [0, 1]
    assert reader.take() == [2, 3, 4]


def test_a_negative_acknowledgement_returns_all_unacknowledged_messages_in_order():
    reader = Reader(5)
    reader.read()
    reader.take(4)
    reader.ack(1)
    assert reader.dispatcher.nack([key(2)], delay_s=0, now=0) == [key(2)]
    reader.read()
    assert reader.take() == [0, 2, 3, 4]
    assert [reader.dispatcher.redelivery_count(key(n)) for n in range(5)] == [0, 0, 1, 0, 0]


def test_a_delay_also_delays_all_later_messages():
    reader = Reader(3)
    reader.read()
    reader.take(1)
    reader.dispatcher.nack([key(0)], delay_s=5, now=0)
    reader.read()
    assert reader.take(now=4.9) == []
    assert reader.dispatcher.next_deadline() == 5
    assert reader.take(now=5) == [0, 1, 2]


def test_a_delay_ends_even_if_no_consumer_takes_messages():
    reader = Reader(3)
    reader.read()
    reader.take(1)
    reader.dispatcher.nack([key(0)], delay_s=5, now=0)
    reader.dispatcher.tick(now=4.9)
    assert reader.dispatcher.next_deadline() == 5
    reader.dispatcher.tick(now=5)
    assert reader.dispatcher.next_deadline() is None, "nothing keeps the topic open any more"


def test_a_timeout_rewinds_to_the_lowest_unacknowledged_message():
    reader = Reader(3)
    reader.read()
    reader.take(2, now=0)
    reader.ack(0)
    assert reader.dispatcher.tick(now=30) == 1
    reader.read()
    assert reader.take(now=30) == [1, 2]


def test_messages_read_before_a_rewind_are_dropped():
    reader = Reader(3)
    reader.read(1)
    reader.take()
    generation = reader.dispatcher.generation
    reader.dispatcher.nack([key(0)], delay_s=0, now=0)
    reader.dispatcher.offer([item(1), item(2)], generation=generation)
    assert reader.take() == []
    reader.read()
    assert reader.take() == [0, 1, 2]


def test_a_message_being_acknowledged_is_not_offered_by_a_rewind():
    reader = Reader(3)
    reader.read()
    reader.take()
    keys = reader.dispatcher.begin_ack([key(1)])
    reader.dispatcher.nack([key(0)], delay_s=0, now=0)
    reader.read()  # the cursor does not have the acknowledgement yet
    assert reader.take() == [0, 2]
    reader.acked.add(1)
    reader.dispatcher.finish_ack(keys)


def test_a_message_acknowledged_before_its_delivery_is_not_delivered():
    reader = Reader(4)
    reader.read()
    assert reader.take(1) == [0]
    reader.ack(2)
    assert reader.take() == [1, 3]


def test_a_message_with_a_failed_acknowledgement_is_delivered_again_in_order():
    reader = Reader(3)
    reader.read()
    reader.take()
    reader.dispatcher.fail_ack(reader.dispatcher.begin_ack([key(1)]))
    reader.read()
    assert reader.take() == [0, 1, 2]


def test_a_cumulative_acknowledgement_includes_held_and_ready_messages():
    reader = Reader(4)
    reader.read()
    reader.take(2)
    assert reader.dispatcher.begin_cumulative_ack(key(2)) == [key(0), key(1), key(2)]
    assert reader.take() == [3]


def test_cumulative_acknowledgement_can_end_inside_a_batch():
    dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher()
    dispatcher.offer([Item((4, 7, n), 1, n) for n in range(4)], generation=0)
    dispatcher.take("c", count_max=3, bytes_max=100, ack_timeout_s=30, now=0)
    assert dispatcher.begin_cumulative_ack((4, 7, 1)) == [(4, 7, 0), (4, 7, 1)]
    assert list(dispatcher.leases) == [(4, 7, 2)]
    assert dispatcher.begin_cumulative_ack((4, 7, -1)) == [(4, 7, 2), (4, 7, 3)]


def test_one_message_is_delivered_whatever_its_size():
    dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher()
    dispatcher.offer([item(0, size=100), item(1, size=100)], generation=0)
    taken = dispatcher.take("c", count_max=10, bytes_max=50, ack_timeout_s=30, now=0)
    assert [delivery.message for delivery in taken] == [0]


def test_the_limit_of_unacknowledged_messages_stops_reading():
    reader = Reader(10, unacked_max=3, unacked_per_consumer_max=2, ready_max=10)
    reader.read()
    assert reader.take() == [0, 1]
    assert reader.take() == []
    reader.ack(0)
    reader.read()
    assert reader.take() == [2]


def test_ready_messages_that_are_put_down_are_read_again():
    reader = Reader(5)
    reader.read()
    reader.ack(*reader.take(2))
    assert reader.dispatcher.put_down() == key(2)
    assert reader.dispatcher.ready_count == 0
    assert not reader.dispatcher.rewind_wanted
    reader.position = 2
    reader.read()
    assert reader.take() == [2, 3, 4]
    assert reader.dispatcher.put_down() is None


def test_messages_in_delivery_are_kept_if_later_ones_are_put_down():
    reader = Reader(5)
    reader.read()
    assert reader.take(2) == [0, 1]
    generation = reader.dispatcher.generation
    reader.put_down()
    assert list(reader.dispatcher.leases) == [key(0), key(1)]
    assert reader.dispatcher.generation == generation
    reader.read()
    assert reader.take() == [2, 3, 4]
    assert reader.dispatcher.nack([key(1)], delay_s=0, now=0) == [key(1)]
    reader.read()
    assert reader.take() == [0, 1, 2, 3, 4]


def test_messages_that_are_put_down_may_not_be_read_from_before_a_delivered_one():
    reader = Reader(5)
    reader.read()
    reader.take(2)
    reader.put_down()
    with pytest.raises(AssertionError):
        reader.dispatcher.offer([item(1)], generation=0)


def test_a_message_that_is_acknowledged_after_it_was_put_down_is_not_delivered():
    reader = Reader(4)
    reader.read()
    assert reader.take(1) == [0]
    reader.put_down()
    keys = reader.dispatcher.begin_ack([key(2)])
    reader.read()  # the cursor does not have the acknowledgement yet
    assert reader.take() == [1, 3]
    reader.dispatcher.finish_ack(keys)


def test_without_room_to_read_ahead_nothing_is_read_while_a_message_is_ready():
    reader = Reader(5)
    assert reader.dispatcher.room(asked=2) == 2
    reader.read(1)
    assert reader.dispatcher.room(asked=2) == 0
    reader.take()
    assert reader.dispatcher.room(asked=2) == 2


def test_messages_may_fill_the_bytes_of_a_call_exactly():
    reader = Reader(3)
    reader.read()
    taken = reader.dispatcher.take("c", count_max=10, bytes_max=20, ack_timeout_s=30, now=0)
    assert [delivery.message for delivery in taken] == [0, 1]


def test_nothing_is_read_ahead_at_the_byte_limit():
    reader = Reader(5, ready_bytes_max=20)
    reader.read(1)
    assert reader.dispatcher.room() > 0
    reader.read(1)
    assert reader.dispatcher.room() == 0
    reader.ack(1)
    assert reader.dispatcher.room() > 0, "a ready message that is acknowledged frees its bytes"
    reader.read(1)
    assert reader.dispatcher.room() == 0
    assert reader.take(1) == [0]
    assert reader.dispatcher.room() > 0


def test_ready_messages_take_the_room_of_messages_to_read():
    reader = Reader(5, ready_max=3)
    assert reader.dispatcher.room() == 3
    reader.read(2)
    assert reader.dispatcher.room() == 1
    assert reader.dispatcher.known_count == 2


def test_a_batch_that_exceeds_the_limits_leaves_no_room():
    """An entry is offered as a whole. A negative room would hide that a limit is reached."""
    reader = Reader(5, unacked_max=3, unacked_per_consumer_max=3, ready_max=2)
    reader.dispatcher.offer([item(n) for n in range(5)], generation=0)
    assert reader.dispatcher.room() == 0


def test_only_ready_messages_count_as_read_ahead():
    ahead = ReadAhead(1_000)
    dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher(read_ahead=ahead)
    dispatcher.offer([item(n) for n in range(5)], generation=0)
    assert ahead.used == 50
    dispatcher.take("c", count_max=1, bytes_max=100, ack_timeout_s=30, now=0)
    assert ahead.used == 40
    dispatcher.begin_ack([key(1)])
    assert ahead.used == 30
    assert (ahead.used, ahead.messages) == (30, 3)
    dispatcher.release("c")
    assert (ahead.used, ahead.messages) == (0, 0)


def test_a_read_that_ends_after_a_completed_rewind_is_dropped():
    reader = Reader(3)
    reader.read(1)
    reader.take()
    generation = reader.dispatcher.generation
    reader.dispatcher.release("c")
    reader.dispatcher.offer([item(1)], generation=reader.dispatcher.generation)  # the read position is not moved yet
    reader.dispatcher.rewound()
    reader.dispatcher.offer([item(1), item(2)], generation=generation)
    assert reader.dispatcher.ready_count == 0
    reader.position = 0
    reader.read()
    assert reader.take() == [0, 1, 2]


def test_no_single_message_is_read_again():
    reader = Reader(2)
    reader.read()
    reader.take()
    reader.dispatcher.nack([key(0)], delay_s=0, now=0)
    assert reader.dispatcher.replayable() is False
    assert reader.dispatcher.replay(10) == []


def test_the_key_of_an_entry_means_all_messages_of_its_batch():
    dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher()
    dispatcher.offer([Item((0, n // 3, n % 3), 1, n) for n in range(6)], generation=0)
    dispatcher.take("c", count_max=2, bytes_max=100, ack_timeout_s=30, now=0)
    acked = dispatcher.begin_ack([(0, 0, -1)])
    assert [key for key in acked if key[2] >= 0] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert dispatcher.begin_ack([(0, 0, 0)]) == [], "it is being acknowledged already"
    taken = dispatcher.take("c", count_max=1, bytes_max=100, ack_timeout_s=30, now=0)
    assert [delivery.message for delivery in taken] == [3]
    assert dispatcher.nack([(0, 1, -1)], delay_s=0, now=0) == [(0, 1, 0)]


def test_an_index_that_is_not_held_does_not_mean_the_whole_entry():
    dispatcher: ExclusiveDispatcher[int] = ExclusiveDispatcher()
    dispatcher.offer([Item((0, 0, n), 1, n) for n in range(3)], generation=0)
    dispatcher.take("c", count_max=2, bytes_max=100, ack_timeout_s=30, now=0)
    assert dispatcher.begin_ack([(0, 0, 2)]) == [(0, 0, 2)]
    assert dispatcher.nack([(0, 0, 2)], delay_s=0, now=0) == []
    assert list(dispatcher.leases) == [(0, 0, 0), (0, 0, 1)]


def test_a_cumulative_acknowledgement_ends_with_its_message_and_forgets_redeliveries():
    reader = Reader(5)
    reader.read()
    reader.take(4)
    reader.dispatcher.nack([key(1), key(3)], delay_s=0, now=0)
    keys = reader.dispatcher.begin_cumulative_ack(key(2))
    assert keys == [key(1)], "only messages that are known"
    reader.dispatcher.finish_ack(keys)
    assert [reader.dispatcher.redelivery_count(key(n)) for n in (1, 3)] == [0, 1]
    reader.read()
    reader.take()
    assert reader.dispatcher.begin_cumulative_ack(key(2)) == [key(0), key(1), key(2)]
    assert list(reader.dispatcher.leases) == [key(3), key(4)]


def test_without_a_delay_returned_messages_are_delivered_at_once():
    reader = Reader(1)
    reader.read()
    reader.take()
    reader.dispatcher.nack([key(0)], delay_s=0, now=7)
    assert reader.dispatcher.paused_until is None
    reader.read()
    assert reader.take(now=7) == [0]


def test_messages_are_returned_only_if_the_given_consumer_holds_them():
    reader = Reader(2)
    reader.read()
    reader.take(1, consumer="a")
    assert reader.dispatcher.nack([key(0)], delay_s=0, now=0, consumer="b") == []
    assert list(reader.dispatcher.leases) == [key(0)]
    assert reader.dispatcher.nack([key(0)], delay_s=0, now=0, consumer="a") == [key(0)]


def test_a_reset_forgets_everything_and_needs_no_rewind():
    """The owner has set the read position: a rewind would move it back."""
    reader = Reader(4)
    reader.read()
    reader.take(2)
    reader.dispatcher.nack([key(0)], delay_s=5, now=0)
    reader.dispatcher.begin_ack([key(2)])
    reader.dispatcher.reset()
    assert (reader.dispatcher.rewind_wanted, reader.dispatcher.paused_until) == (False, None)
    assert (reader.dispatcher.known_count, reader.dispatcher.redelivery_count(key(0))) == (0, 0)
    reader.position = 0
    reader.read()
    assert reader.take() == [0, 1, 2, 3]


def test_state_counts_leave_out_states_without_messages():
    reader = Reader(4)
    reader.read()
    assert reader.dispatcher.state_counts() == {"ready": 4}
    reader.take(2)
    reader.dispatcher.begin_ack([key(0)])
    assert reader.dispatcher.state_counts() == {"ready": 2, "leased": 1, "acking": 1}
    assert reader.dispatcher.known_count == 4


class ExclusiveModel(RuleBasedStateMachine):
    """Each delivery is the lowest entry that is neither acknowledged nor held."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader(12, unacked_max=8, unacked_per_consumer_max=5, ready_max=4)
        self.now = 0.0
        self.held: dict[int, float] = {}
        self.not_before = 0.0

    @rule(count=st.integers(1, 4))
    def read(self, count):
        self.reader.read(count)

    @rule(count=st.integers(1, 4))
    def take(self, count):
        self.advance(0)
        taken = self.reader.take(count, now=self.now)
        expected = [n for n in range(12) if n not in self.reader.acked and n not in self.held]
        assert taken == expected[: len(taken)]
        assert not taken or self.now >= self.not_before
        self.held.update(dict.fromkeys(taken, self.now + 30))

    @rule(seconds=st.sampled_from([1, 31]))
    def advance(self, seconds):
        self.now += seconds
        self.reader.dispatcher.tick(now=self.now)
        if any(until <= self.now for until in self.held.values()):
            self.held.clear()

    @rule(chosen=st.sets(st.integers(0, 11), max_size=3))
    def ack(self, chosen):
        """Acknowledge any entries: held, not read yet, or ready."""
        self.reader.ack(*chosen)
        for n in chosen:
            self.held.pop(n, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=st.sampled_from([0, 2]))
    def nack(self, data, delay):
        chosen = data.draw(st.sampled_from(sorted(self.held)))
        self.reader.dispatcher.nack([key(chosen)], delay_s=delay, now=self.now)
        self.held.clear()
        if delay:
            self.not_before = max(self.not_before, self.now + delay)

    @rule()
    def leave(self):
        self.reader.dispatcher.release("c")
        self.held.clear()

    @rule()
    def put_down(self):
        """There is no room, or no call for some time."""
        self.reader.put_down()

    def teardown(self):
        """A consumer that keeps receiving and acknowledging gets the rest, in order."""
        self.advance(1_000)
        left = [n for n in range(12) if n not in self.reader.acked]
        got = []
        for _ in range(20):
            self.reader.read()
            taken = self.reader.take(now=self.now)
            got += taken
            self.reader.ack(*taken)
        assert got == left


TestExclusiveModel = ExclusiveModel.TestCase
TestExclusiveModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
