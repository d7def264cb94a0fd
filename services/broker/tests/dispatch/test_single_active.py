"""Exclusive and failover dispatch: the order of the topic is kept, also when messages are returned."""

import functools

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.failover import pick_active
from bindery_broker.dispatch.item import WHOLE, DispatchLimits
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.single_active import HANDOVER_S, PickActive, SingleActiveDispatcher, first_of
from dispatch_parts import SIZE, Pair, StoredCounts, Topic, as_refs, at, batch, bodies, item, pairs, ref, refs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


class Reader:
    """The part of the cursor: the acknowledged entries and the read position. No entry is a batch."""

    def __init__(self, entries: int, **limits: int) -> None:
        self.counts = StoredCounts()
        self.dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(
            limits=DispatchLimits(**limits) if limits else None, counts_of=self.counts
        )
        self.consumer = Consumer("c")
        self.dispatcher.join(self.consumer)
        self.entries = entries
        self.acked: set[int] = set()
        self.position = 0

    def read(self, count: int = 100) -> None:
        self.counts.store(self.dispatcher.redelivered)
        if self.dispatcher.rewind_wanted:
            self.position = 0
            self.dispatcher.rewound()
        new = [n for n in range(self.position, self.entries) if n not in self.acked]
        new = new[: min(count, self.dispatcher.room())]
        self.dispatcher.offer([item(n) for n in new], generation=self.dispatcher.generation)
        if new:
            self.position = new[-1] + 1

    def take(self, count: int = 100, *, now: float = 0.0, bytes_max: int = 10**6) -> list[int]:
        return bodies(self.dispatcher.take(self.consumer, count_max=count, bytes_max=bytes_max, lease_s=30, now=now))

    def put_down(self) -> None:
        first = self.dispatcher.put_down()
        if first is not None:
            self.position = min(self.position, first.position.entry_id)

    def ack(self, *entries: int) -> None:
        portions = self.dispatcher.begin_ack(refs(*entries))
        self.acked.update(entries)
        self.dispatcher.finish_ack(portions)

    def held(self) -> list[Pair]:
        return pairs(self.dispatcher.leases)


def with_batches(*bits: int) -> tuple[SingleActiveDispatcher[int], Consumer]:
    """Return a dispatcher to which batches were offered, from entry 0 on, and its consumer."""
    dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher()
    consumer = Consumer("c")
    dispatcher.join(consumer)
    dispatcher.offer([batch(n, of_entry) for n, of_entry in enumerate(bits)], generation=0)
    return dispatcher, consumer


def take_from(
    dispatcher: SingleActiveDispatcher[int],
    consumer: Consumer,
    count: int = 100,
    *,
    bytes_max: int = 10**6,
    now: float = 0,
) -> list[Pair]:
    return pairs(dispatcher.take(consumer, count_max=count, bytes_max=bytes_max, lease_s=30, now=now))


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
    assert reader.dispatcher.nack(refs(2), delay_s=0, now=0) == refs(2)
    reader.read()
    assert reader.take() == [0, 2, 3, 4]
    assert reader.counts.counts == {(2, 0): 1}


def test_a_delay_also_delays_all_later_messages():
    reader = Reader(3)
    reader.read()
    reader.take(1)
    reader.dispatcher.nack(refs(0), delay_s=5, now=0)
    reader.read()
    assert reader.take(now=4.9) == []
    assert reader.dispatcher.next_deadline() == 5
    assert reader.take(now=5) == [0, 1, 2]


def test_a_delay_ends_even_if_no_consumer_takes_messages():
    reader = Reader(3)
    reader.read()
    reader.take(1)
    reader.dispatcher.nack(refs(0), delay_s=5, now=0)
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
    reader.dispatcher.nack(refs(0), delay_s=0, now=0)
    reader.dispatcher.offer([item(1), item(2)], generation=generation)
    assert reader.take() == []
    reader.read()
    assert reader.take() == [0, 1, 2]


def test_a_message_being_acknowledged_is_not_offered_by_a_rewind():
    reader = Reader(3)
    reader.read()
    reader.take()
    portions = reader.dispatcher.begin_ack(refs(1))
    reader.dispatcher.nack(refs(0), delay_s=0, now=0)
    reader.read()  # the cursor does not have the acknowledgement yet
    assert reader.take() == [0, 2]
    reader.acked.add(1)
    reader.dispatcher.finish_ack(portions)


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
    reader.dispatcher.fail_ack(reader.dispatcher.begin_ack(refs(1)))
    reader.read()
    assert reader.take() == [0, 1, 2]


def test_a_cumulative_acknowledgement_includes_held_and_ready_messages():
    reader = Reader(4)
    reader.read()
    reader.take(2)
    assert pairs(reader.dispatcher.begin_cumulative_ack(ref(2))) == [(0, 0), (1, 0), (2, 0)]
    assert reader.take() == [3]


def test_cumulative_acknowledgement_can_end_inside_a_batch():
    dispatcher, consumer = with_batches(0b11, 0b1111)
    assert take_from(dispatcher, consumer, 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    portions = dispatcher.begin_cumulative_ack(ref(1, 0b0011))
    assert pairs(portions) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert pairs(dispatcher.leases) == [(1, 2)]
    assert pairs(dispatcher.begin_cumulative_ack(ref(1, WHOLE))) == [(1, 2), (1, 3)]
    dispatcher.finish_ack(portions)
    assert (dispatcher.known_count, dispatcher.known_bits(at(1))) == (2, 0b1100)


def test_one_message_is_delivered_whatever_its_size():
    dispatcher, consumer = with_batches()
    dispatcher.offer([item(0, size=100), item(1, size=100)], generation=0)
    assert dispatcher.next_size(consumer) == 100
    assert take_from(dispatcher, consumer, 10, bytes_max=50) == [(0, 0)]


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
    assert reader.dispatcher.put_down() == ref(2)
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
    assert reader.held() == [(0, 0), (1, 0)]
    assert reader.dispatcher.generation == generation
    reader.read()
    assert reader.take() == [2, 3, 4]
    assert reader.dispatcher.nack(refs(1), delay_s=0, now=0) == refs(1)
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
    portions = reader.dispatcher.begin_ack(refs(2))
    reader.read()  # the cursor does not have the acknowledgement yet
    assert reader.take() == [1, 3]
    reader.dispatcher.finish_ack(portions)


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
    assert reader.take(10, bytes_max=2 * SIZE) == [0, 1]


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
    reader.dispatcher.offer([batch(0, 0b11111)], generation=0)
    assert reader.dispatcher.room() == 0


def test_only_ready_messages_count_as_read_ahead():
    ahead = ReadAhead(1_000)
    dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(read_ahead=ahead)
    consumer = Consumer("c")
    dispatcher.join(consumer)
    dispatcher.offer([item(n) for n in range(5)], generation=0)
    assert ahead.used == 50
    take_from(dispatcher, consumer, 1)
    assert ahead.used == 40
    dispatcher.begin_ack(refs(1))
    assert ahead.used == 30
    assert (ahead.used, ahead.messages) == (30, 3)
    dispatcher.release(consumer)
    assert (ahead.used, ahead.messages) == (0, 0)


def test_a_read_that_ends_after_a_completed_rewind_is_dropped():
    reader = Reader(3)
    reader.read(1)
    reader.take()
    generation = reader.dispatcher.generation
    reader.dispatcher.release(reader.consumer)
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
    reader.dispatcher.nack(refs(0), delay_s=0, now=0)
    assert reader.dispatcher.replayable() is False
    assert reader.dispatcher.replay(10) == []


def test_a_reference_to_an_entry_means_all_messages_of_its_batch():
    dispatcher, consumer = with_batches(0b111, 0b111)
    take_from(dispatcher, consumer, 2)
    assert sorted(pairs(dispatcher.begin_ack([ref(0, WHOLE)]))) == [(0, 0), (0, 1), (0, 2)]
    assert dispatcher.begin_ack([ref(0)]) == [], "it is being acknowledged already"
    assert take_from(dispatcher, consumer, 1) == [(1, 0)]
    assert dispatcher.nack([ref(1, WHOLE)], delay_s=0, now=0) == [ref(1)]


def test_an_index_that_is_not_held_does_not_mean_the_whole_entry():
    dispatcher, consumer = with_batches(0b111)
    take_from(dispatcher, consumer, 2)
    assert pairs(dispatcher.begin_ack([ref(0, 0b100)])) == [(0, 2)]
    assert dispatcher.nack([ref(0, 0b100)], delay_s=0, now=0) == []
    assert pairs(dispatcher.leases) == [(0, 0), (0, 1)]


def test_a_cumulative_acknowledgement_ends_with_its_message_and_keeps_later_counts():
    reader = Reader(5)
    reader.read()
    reader.take(4)
    reader.dispatcher.nack(refs(1, 3), delay_s=0, now=0)
    portions = reader.dispatcher.begin_cumulative_ack(ref(2))
    assert pairs(portions) == [(2, 0)], "nothing else is known after a rewind"
    reader.dispatcher.finish_ack(portions)
    reader.acked = {0, 1, 2}
    reader.counts.forget([(1, 0)])  # as the cursor does
    reader.read()
    taken = reader.dispatcher.take(reader.consumer, count_max=9, bytes_max=10**6, lease_s=30, now=0)
    assert [(delivery.body, delivery.redelivery_count) for delivery in taken] == [(3, 1), (4, 0)]
    assert pairs(reader.dispatcher.begin_cumulative_ack(ref(3))) == [(3, 0)]
    assert reader.held() == [(4, 0)]


def test_without_a_delay_returned_messages_are_delivered_at_once():
    reader = Reader(1)
    reader.read()
    reader.take()
    reader.dispatcher.nack(refs(0), delay_s=0, now=7)
    assert reader.dispatcher.paused_until is None
    reader.read()
    assert reader.take(now=7) == [0]


def test_messages_are_returned_only_if_the_given_consumer_holds_them():
    reader = Reader(2)
    reader.read()
    reader.take(1)
    assert reader.dispatcher.nack(refs(0), delay_s=0, now=0, consumer=Consumer("c")) == []
    assert reader.held() == [(0, 0)]
    assert reader.dispatcher.nack(refs(0), delay_s=0, now=0, consumer=reader.consumer) == refs(0)


def test_a_reset_forgets_everything_and_needs_no_rewind():
    """The owner has set the read position: a rewind would move it back."""
    reader = Reader(4)
    reader.read()
    reader.take(2)
    reader.dispatcher.nack(refs(0), delay_s=5, now=0)
    reader.dispatcher.begin_ack(refs(2))
    reader.dispatcher.reset()
    assert (reader.dispatcher.rewind_wanted, reader.dispatcher.paused_until) == (False, None)
    assert (reader.dispatcher.known_count, reader.dispatcher.redelivered, reader.consumer.held) == (0, [], 0)
    reader.position = 0
    reader.read()
    assert reader.take() == [0, 1, 2, 3]


def test_state_counts_leave_out_states_without_messages():
    reader = Reader(4)
    reader.read()
    assert reader.dispatcher.state_counts() == {"ready": 4}
    reader.take(2)
    reader.dispatcher.begin_ack(refs(0))
    assert reader.dispatcher.state_counts() == {"ready": 2, "leased": 1, "acking": 1}
    assert reader.dispatcher.known_count == 4


def test_a_part_of_a_batch_that_is_returned_returns_all_messages_in_order():
    dispatcher, consumer = with_batches(0b1111, 0b11)
    take_from(dispatcher, consumer, 5)
    dispatcher.finish_ack(dispatcher.begin_ack([ref(0, 0b0010)]))
    assert dispatcher.nack([ref(0, 0b0110)], delay_s=0, now=0) == [ref(0, 0b0100)], "of what is held"
    assert dispatcher.redelivered == [(at(0), 0b0100, 1)]
    assert (consumer.held, dispatcher.rewind_wanted) == (0, True)
    dispatcher.rewound()
    dispatcher.offer([batch(0, 0b1101), batch(1, 0b11)], generation=dispatcher.generation)
    assert take_from(dispatcher, consumer) == [(0, 0), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_a_late_acknowledgement_of_an_earlier_delivery_is_in_force_for_a_read_in_progress():
    """After a rewind, the messages are not known; the read that follows may not see the acknowledgement yet."""
    dispatcher, consumer = with_batches(0b11, 0b11, 0b11)
    take_from(dispatcher, consumer)
    dispatcher.release(consumer)
    dispatcher.rewound()
    portions = dispatcher.begin_ack([ref(0, WHOLE), ref(1, 0b01)])
    dispatcher.offer([batch(n, 0b11) for n in range(3)], generation=dispatcher.generation)
    assert take_from(dispatcher, consumer) == [(1, 1), (2, 0), (2, 1)]
    dispatcher.finish_ack(portions)
    assert (dispatcher.known_count, dispatcher.known_bits(at(0)), dispatcher.known_bits(at(1))) == (3, 0, 0b10)


def test_a_late_acknowledgement_that_fails_returns_everything():
    dispatcher, consumer = with_batches(0b11)
    take_from(dispatcher, consumer)
    dispatcher.release(consumer)
    dispatcher.rewound()
    portions = dispatcher.begin_ack([ref(0, WHOLE)])
    dispatcher.offer([batch(0, 0b11)], generation=dispatcher.generation)
    dispatcher.fail_ack(portions)
    assert (dispatcher.rewind_wanted, dispatcher.known_count) == (True, 0)


def test_a_batch_is_put_down_from_its_first_ready_message_on():
    dispatcher, consumer = with_batches(0b1111, 0b1)
    assert take_from(dispatcher, consumer, 2) == [(0, 0), (0, 1)]
    assert dispatcher.put_down() == ref(0, 0b0100)
    dispatcher.offer([batch(0, 0b1100), item(1)], generation=0)
    assert take_from(dispatcher, consumer) == [(0, 2), (0, 3), (1, 0)]


def test_a_batch_may_be_read_in_parts():
    dispatcher, consumer = with_batches(0b0011)
    dispatcher.offer([batch(0, 0b1100)], generation=0)
    assert take_from(dispatcher, consumer) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    with pytest.raises(AssertionError):
        dispatcher.offer([batch(0, 0b1000)], generation=0)


def test_messages_of_a_batch_with_different_counts_are_delivered_apart_and_in_order():
    counts = StoredCounts()
    counts.counts = {(0, 0): 2, (0, 2): 2, (0, 3): 1}
    dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(counts_of=counts)
    consumer = Consumer("c")
    dispatcher.join(consumer)
    dispatcher.offer([batch(0, 0b11111)], generation=0)
    taken = dispatcher.take(consumer, count_max=9, bytes_max=10**6, lease_s=30, now=0)
    assert [(delivery.bits, delivery.redelivery_count) for delivery in taken] == [
        (0b00001, 2),
        (0b00010, 0),
        (0b00100, 2),
        (0b01000, 1),
        (0b10000, 0),
    ]
    dispatcher.tick(now=30)
    assert [one.redelivery_count for one in dispatcher.redelivered] == [3, 1, 3, 2, 1]


def test_no_more_is_delivered_than_the_limits_allow_of_messages_with_different_counts():
    counts = StoredCounts()
    counts.counts = {(0, 1): 1}
    dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(counts_of=counts)
    consumer = Consumer("c")
    dispatcher.join(consumer)
    dispatcher.offer([batch(0, 0b1111)], generation=0)
    assert take_from(dispatcher, consumer, 3) == [(0, 0), (0, 1), (0, 2)]
    assert (dispatcher.ready_count, dispatcher.known_count, consumer.held) == (1, 4, 3)


def failover(*consumers: Consumer, pick: PickActive) -> SingleActiveDispatcher[int]:
    """Return a dispatcher with five messages to which `consumers` have joined."""
    dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(pick_active=pick)
    for consumer in consumers:
        dispatcher.join(consumer)
    dispatcher.offer([item(n) for n in range(5)], generation=0)
    return dispatcher


by_name = functools.partial(min, key=lambda consumer: consumer.name)
by_priority = functools.partial(pick_active, partition=0, topic="persistent://public/default/t-partition-0")


def test_the_first_consumer_of_an_exclusive_subscription_is_active():
    a, b = Consumer("b"), Consumer("a")
    dispatcher = failover(a, b, pick=first_of)
    assert (dispatcher.active, dispatcher.consumers) == (a, [a, b])
    dispatcher.leave(a)
    assert dispatcher.active is b


def test_only_the_active_consumer_gets_messages():
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(b, a, pick=by_name)
    assert dispatcher.active is a
    assert dispatcher.taker([b], now=0) is None
    assert dispatcher.reads_for([b]) is None
    assert (dispatcher.next_size(b), take_from(dispatcher, b)) == (0, [])
    assert dispatcher.taker([b, a], now=0) is a
    assert dispatcher.reads_for([b, a]) is a
    assert (dispatcher.next_size(a), len(take_from(dispatcher, a))) == (SIZE, 5)


def handover(*, taken: int = 3) -> tuple[SingleActiveDispatcher[int], Consumer, Consumer]:
    """Return a dispatcher with five messages, its active consumer, and the former one, which holds the first ones."""
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(b, pick=by_name)
    take_from(dispatcher, b, taken)
    dispatcher.join(a)
    assert dispatcher.active is a
    dispatcher.tick(now=10)
    return dispatcher, a, b


def test_a_consumer_that_becomes_active_waits_for_the_acknowledgements_of_the_former_one():
    """Nothing is delivered twice then, and what was read before is not read again."""
    dispatcher, a, b = handover()
    dispatcher.finish_ack(dispatcher.begin_ack(refs(0, 2)))
    assert (dispatcher.waits_for, b.held, dispatcher.next_deadline()) == (b, 1, 10 + HANDOVER_S)
    assert (dispatcher.taker([a, b], now=10.9), dispatcher.reads_for([a, b]), dispatcher.room()) == (None, None, 0)
    assert take_from(dispatcher, a, now=10.9) == take_from(dispatcher, b, now=10.9) == []
    dispatcher.finish_ack(dispatcher.begin_ack(refs(1)))
    assert dispatcher.waits_for is None
    assert (dispatcher.taker([a, b], now=10.9), dispatcher.reads_for([a, b])) == (a, a)
    assert not dispatcher.rewind_wanted
    assert take_from(dispatcher, a, now=10.9) == [(3, 0), (4, 0)]
    dispatcher.tick(now=11)
    assert (a.held, dispatcher.rewind_wanted) == (2, False), "the wait is over"


def test_after_a_second_a_consumer_that_becomes_active_gets_what_the_former_one_holds_in_order():
    dispatcher, a, b = handover()
    dispatcher.finish_ack(dispatcher.begin_ack(refs(1)))
    assert dispatcher.tick(now=10 + HANDOVER_S - 0.01) == 0
    assert (b.held, dispatcher.rewind_wanted) == (2, False)
    assert dispatcher.tick(now=10 + HANDOVER_S) == 0
    assert (b.held, dispatcher.rewind_wanted, dispatcher.waits_for) == (0, True, None)
    assert dispatcher.redelivered == [], "a change of the consumer is no failure of the messages"
    dispatcher.rewound()
    dispatcher.offer([item(n) for n in (0, 2, 3, 4)], generation=dispatcher.generation)
    assert take_from(dispatcher, b, now=12) == []
    assert take_from(dispatcher, a, now=12) == [(0, 0), (2, 0), (3, 0), (4, 0)]


def leaves(dispatcher: SingleActiveDispatcher[int], former: Consumer) -> None:
    assert dispatcher.leave(former) == 3


def returns_one(dispatcher: SingleActiveDispatcher[int], former: Consumer) -> None:
    assert dispatcher.nack(refs(1), delay_s=0, now=10, consumer=former) == refs(1)


def returns_all(dispatcher: SingleActiveDispatcher[int], former: Consumer) -> None:
    assert dispatcher.release(former) == 3


def has_gone_during_the_call(dispatcher: SingleActiveDispatcher[int], former: Consumer) -> None:
    dispatcher.hand_back(former, refs(0, 1, 2))


def fails_to_acknowledge(dispatcher: SingleActiveDispatcher[int], former: Consumer) -> None:
    dispatcher.fail_ack(dispatcher.begin_ack(refs(1)))


@pytest.mark.parametrize("end", [leaves, returns_one, returns_all, has_gone_during_the_call, fails_to_acknowledge])
def test_the_wait_ends_when_the_former_consumer_returns_its_messages(end):
    dispatcher, a, b = handover()
    end(dispatcher, b)
    assert (b.held, dispatcher.rewind_wanted, dispatcher.waits_for) == (0, True, None)
    dispatcher.rewound()
    dispatcher.offer([item(n) for n in range(5)], generation=dispatcher.generation)
    assert [n for n, _ in take_from(dispatcher, a, now=10)] == [0, 1, 2, 3, 4]


def test_the_wait_ends_when_the_lease_of_the_former_consumer_ends():
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(b, pick=by_name)
    dispatcher.take(b, count_max=1, bytes_max=SIZE, lease_s=0.5, now=0)
    dispatcher.join(a)
    assert dispatcher.tick(now=0.1) == 0
    assert dispatcher.next_deadline() == 0.5
    assert dispatcher.tick(now=0.5) == 1
    assert (dispatcher.waits_for, dispatcher.rewind_wanted, len(dispatcher.redelivered)) == (None, True, 1)


def test_a_former_consumer_that_becomes_active_again_keeps_what_it_holds():
    dispatcher, a, b = handover()
    assert dispatcher.leave(a) == 0
    assert (dispatcher.active, dispatcher.waits_for, dispatcher.next_deadline()) == (b, None, 30)
    dispatcher.tick(now=20)
    assert (b.held, dispatcher.rewind_wanted) == (3, False)
    assert take_from(dispatcher, b, now=20) == [(3, 0), (4, 0)]
    dispatcher.join(a)
    dispatcher.tick(now=21)
    assert dispatcher.next_deadline() == 21 + HANDOVER_S, "each change has its own wait"


def test_a_second_change_does_not_prolong_the_wait():
    dispatcher, _, b = handover()
    dispatcher.join(first := Consumer("0"))
    assert (dispatcher.active, dispatcher.waits_for, dispatcher.next_deadline()) == (first, b, 10 + HANDOVER_S)
    dispatcher.tick(now=10 + HANDOVER_S)
    assert (dispatcher.waits_for, dispatcher.rewind_wanted) == (None, True)


def test_no_consumer_waits_after_a_reset():
    dispatcher, a, _ = handover()
    dispatcher.reset()
    dispatcher.offer([item(7)], generation=dispatcher.generation)
    assert take_from(dispatcher, a, now=10) == [(7, 0)]


def test_a_consumer_that_becomes_active_while_nothing_is_held_gets_what_is_ready():
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(b, pick=by_name)
    dispatcher.finish_ack(dispatcher.begin_ack(refs(*[n for n, _ in take_from(dispatcher, b, 2)])))
    dispatcher.join(a)
    assert not dispatcher.rewind_wanted
    assert take_from(dispatcher, a) == [(2, 0), (3, 0), (4, 0)]


def test_a_consumer_that_joins_or_leaves_without_becoming_active_changes_nothing():
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(a, pick=by_name)
    take_from(dispatcher, a, 2)
    dispatcher.join(b)
    assert dispatcher.leave(b) == 0
    assert (dispatcher.active, dispatcher.rewind_wanted, a.held) == (a, False, 2)


def test_without_a_consumer_nobody_is_active():
    a = Consumer("a")
    dispatcher = failover(a, pick=by_name)
    take_from(dispatcher, a, 2)
    assert dispatcher.leave(a) == 2
    assert (dispatcher.active, dispatcher.consumers, dispatcher.rewind_wanted) == (None, [], True)
    assert dispatcher.taker([a], now=0) is None


def test_a_consumer_with_a_lower_priority_number_becomes_active():
    spare, main = Consumer("a", priority=1), Consumer("b")
    dispatcher = failover(spare, pick=by_priority)
    assert dispatcher.active is spare
    dispatcher.join(main)
    assert dispatcher.active is main
    dispatcher.leave(main)
    assert dispatcher.active is spare


def test_a_delay_outlasts_a_change_of_the_active_consumer():
    a, b = Consumer("a"), Consumer("b")
    dispatcher = failover(b, pick=by_name)
    take_from(dispatcher, b, 1)
    dispatcher.nack(refs(0), delay_s=5, now=0)
    dispatcher.join(a)
    dispatcher.rewound()
    dispatcher.offer([item(0)], generation=dispatcher.generation)
    assert dispatcher.taker([a], now=4.9) is None
    assert dispatcher.taker([a], now=5) is a


class SingleActiveModel(RuleBasedStateMachine):
    """Each delivery is the lowest message that is neither acknowledged nor held.

    Entries are batches of one to three messages, which are read and delivered in parts. Up to three consumers are
    connected, of which the one with the lowest name is active. While another one holds messages, nothing is delivered.
    """

    ENTRIES = 8

    def __init__(self) -> None:
        super().__init__()
        self.topic = Topic()
        self.stored = StoredCounts()
        self.ahead = ReadAhead(1_000)
        self.dispatcher: SingleActiveDispatcher[int] = SingleActiveDispatcher(
            limits=DispatchLimits(unacked_max=8, unacked_per_consumer_max=5, ready_max=4),
            read_ahead=self.ahead,
            counts_of=self.stored,
            pick_active=by_name,
        )
        self.messages = [message for n in range(self.ENTRIES) for message in self.topic.messages(n)]
        self.position = (0, 0)
        self.acked: set[Pair] = set()
        self.counts: dict[Pair, int] = {}
        self.now = 0.0
        self.held: dict[Pair, float] = {}
        self.holder: Consumer | None = None
        self.handover_ends_at: float | None = None
        self.not_before = 0.0
        self.members = [Consumer(name) for name in "abc"]
        self.present = [self.members[1]]
        self.dispatcher.join(self.members[1])

    @property
    def active(self):
        return min(self.present, key=lambda consumer: consumer.name, default=None)

    @property
    def waits(self):
        return bool(self.held) and self.holder is not self.active

    def rewound(self):
        self.held.clear()

    @rule(count=st.integers(1, 4))
    def read(self, count):
        self.stored.store(self.dispatcher.redelivered)
        if self.dispatcher.rewind_wanted:
            self.position = (0, 0)
            self.dispatcher.rewound()
        left = [message for message in self.messages if message >= self.position and message not in self.acked]
        new = left[: min(count, self.dispatcher.room())]
        self.dispatcher.offer(self.topic.items(new), generation=self.dispatcher.generation)
        if new:
            self.position = (new[-1][0], new[-1][1] + 1)

    @rule(count=st.integers(1, 4), size=st.integers(0, 5))
    def take(self, count, size):
        self.advance(0)
        if self.active is None:
            assert self.dispatcher.taker(self.present, now=self.now) is None
            return
        offers = self.dispatcher.taker(self.present, now=self.now)
        taken = self.dispatcher.take(self.active, count_max=count, bytes_max=size * SIZE, lease_s=30, now=self.now)
        got = pairs(taken)
        assert (offers is self.active) == bool(got)
        assert not (got and self.waits)
        if got:
            self.holder = self.active
        expected = [message for message in self.messages if message not in self.acked and message not in self.held]
        assert got == expected[: len(got)]
        assert len(got) <= min(count, max(1, size))
        assert not got or self.now >= self.not_before
        for delivery in taken:
            assert {self.counts.get(message, 0) for message in pairs([delivery])} == {delivery.redelivery_count}
        self.held.update(dict.fromkeys(got, self.now + 30))

    @rule(who=st.integers(0, 2))
    def take_of_another(self, who):
        if self.members[who] is not self.active:
            assert take_from(self.dispatcher, self.members[who]) == []

    @rule(seconds=st.sampled_from([0.4, 1, 31]))
    def advance(self, seconds):
        self.now += seconds
        expired = [message for message, until in self.held.items() if until <= self.now]
        assert self.dispatcher.tick(now=self.now) == len(expired)
        for message in expired:
            self.counts[message] = self.counts.get(message, 0) + 1
        if expired:
            self.rewound()
        elif self.waits and self.handover_ends_at is None:
            self.handover_ends_at = self.now + HANDOVER_S
        elif self.waits and self.now >= self.handover_ends_at:
            self.rewound()

    @rule(data=st.data(), ok=st.booleans())
    def ack(self, data, ok):
        """Acknowledge any messages: held, not read yet, or ready."""
        chosen = data.draw(st.sets(st.sampled_from(self.messages), max_size=3))
        self.end_ack(self.dispatcher.begin_ack(as_refs(chosen)), chosen, ok)

    @rule(data=st.data(), ok=st.booleans())
    def ack_cumulatively(self, data, ok):
        last = data.draw(st.sampled_from(self.messages[:-3]))
        before = {message for message in self.messages if message <= last}
        bits = (1 << last[1] + 1) - 1
        self.end_ack(self.dispatcher.begin_cumulative_ack(ref(last[0], bits)), before, ok)

    def end_ack(self, portions, chosen, ok):
        known = set(pairs(portions))
        assert self.held.keys() & chosen <= known <= chosen
        if ok:
            self.acked |= chosen
            self.dispatcher.finish_ack(portions)
            for message in chosen:
                self.held.pop(message, None)
                self.counts.pop(message, None)
        else:
            self.dispatcher.fail_ack(portions)
            self.rewound()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=st.sampled_from([0, 2]))
    def nack(self, data, delay):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1, max_size=3))
        returned = self.dispatcher.nack(as_refs(chosen), delay_s=delay, now=self.now, consumer=self.holder)
        assert sorted(pairs(returned)) == sorted(chosen)
        for message in chosen:
            self.counts[message] = self.counts.get(message, 0) + 1
        self.rewound()
        if delay:
            self.not_before = max(self.not_before, self.now + delay)

    @rule()
    def release(self):
        if self.holder is not None:
            assert self.dispatcher.release(self.holder) == len(self.held)
            self.rewound()

    @rule(who=st.integers(0, 2))
    def join_or_leave(self, who):
        consumer, before = self.members[who], self.active
        if consumer in self.present:
            self.present.remove(consumer)
            assert self.dispatcher.leave(consumer) == (len(self.held) if consumer is self.holder else 0)
            if consumer is self.holder:
                self.rewound()
        else:
            self.present.append(consumer)
            self.dispatcher.join(consumer)
        if self.active is not before and self.holder is before:
            self.handover_ends_at = None

    @rule()
    def put_down(self):
        """There is no room, or no call for some time."""
        first = self.dispatcher.put_down()
        assert self.ahead.used == 0
        if first is not None:
            self.position = min(self.position, *pairs([first]))

    @invariant()
    def counts_are_exact(self):
        dispatcher = self.dispatcher
        assert dispatcher.active is self.active
        assert sorted(pairs(dispatcher.leases)) == sorted(self.held)
        assert [consumer.held for consumer in self.members] == [
            len(self.held) if consumer is self.holder else 0 for consumer in self.members
        ]
        assert dispatcher.leases.bytes_held == SIZE * len(self.held)
        assert dispatcher.known_count == dispatcher.ready_count + len(self.held) <= 8
        assert self.ahead.used == SIZE * self.ahead.messages == SIZE * dispatcher.ready_count
        assert len(self.held) <= 5

    def teardown(self):
        """A consumer that keeps receiving and acknowledging gets the rest, in order."""
        self.advance(1_000)
        if self.active is None:
            self.join_or_leave(0)
        left = [message for message in self.messages if message not in self.acked]
        got = []
        for _ in range(40):
            self.read(100)
            taken = self.dispatcher.take(self.active, count_max=9, bytes_max=10**6, lease_s=30, now=self.now)
            got += pairs(taken)
            self.acked.update(pairs(taken))
            self.dispatcher.finish_ack(self.dispatcher.begin_ack(as_refs(pairs(taken))))
        assert got == left


TestSingleActiveModel = SingleActiveModel.TestCase
TestSingleActiveModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_messages_that_are_held_are_skipped_until_they_are_returned():
    reader = Reader(5)
    reader.read(3)
    assert reader.take(1) == [0]
    known, added = reader.dispatcher.hold(refs(1, 4))
    assert pairs([*known, *added]) == [(1, 0), (4, 0)]
    reader.read()
    assert reader.take() == [2, 3]
    reader.dispatcher.return_held([*known, *added], delay_s=7, now=0)
    reader.read()
    assert reader.take(now=6) == []
    assert reader.take(now=7) == [0, 1, 2, 3, 4]
