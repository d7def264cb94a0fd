"""Shared dispatch: every message is acknowledged or delivered again, and has at most one lease."""

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import SINGLE, WHOLE, DispatchLimits, Item, count_of
from bindery_broker.dispatch.portions import PortionTable
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.shared import SharedDispatcher
from dispatch_parts import SIZE, Pair, StoredCounts, Topic, as_refs, at, batch, bodies, item, pairs, ref, refs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def dispatcher(count: int = 0, **limits: int) -> SharedDispatcher[int]:
    shared: SharedDispatcher[int] = SharedDispatcher(limits=DispatchLimits(**limits) if limits else None)
    shared.offer([item(n) for n in range(count)], generation=0)
    return shared


def take(
    shared: SharedDispatcher[int], consumer: Consumer | None = None, count: int = 100, *, now: float = 0.0
) -> list[int]:
    """Take for `consumer`, or else for a new one."""
    taken = shared.take(consumer or Consumer("c"), count_max=count, bytes_max=10**6, lease_s=30, now=now)
    return bodies(taken)


def replay(shared: SharedDispatcher[int]) -> list[int]:
    """Read all returned messages again, as the owner does. They must be entries that are no batches."""
    again = [position.entry_id for position, _ in shared.replay(100)]
    shared.offer_again([item(n) for n in again], generation=shared.generation)
    return again


def test_a_second_delay_is_not_cut_short_by_the_first():
    """Nack with a delay, acknowledge without success, nack again: the deadline of the first nack is void."""
    shared = dispatcher(1)
    take(shared, now=0)
    shared.nack(refs(0), delay_s=10, now=0)
    shared.fail_ack(shared.begin_ack(refs(0)))
    assert replay(shared) == [0]
    assert take(shared, now=1) == [0]
    shared.nack(refs(0), delay_s=100, now=1)
    assert shared.tick(now=10) == 0
    assert replay(shared) == []
    assert shared.tick(now=100) == 0
    assert shared.tick(now=101) == 1
    assert replay(shared) == [0]


def test_messages_are_delivered_in_order_and_once():
    shared = dispatcher(5)
    a, b = Consumer("a"), Consumer("b")
    assert take(shared, a, 2) == [0, 1]
    assert take(shared, b, 2) == [2, 3]
    assert take(shared, a) == [4]
    assert take(shared, a) == []


def test_consumers_with_the_same_name_are_different_ones():
    shared = dispatcher(3)
    first, second = Consumer("c"), Consumer("c")
    take(shared, first, 2)
    take(shared, second, 1)
    assert shared.held(second, refs(0, 1, 2))[0].ref == ref(2)
    assert shared.nack(refs(0, 2), delay_s=0, now=0, consumer=second) == refs(2)
    assert shared.leave(second) == 0
    assert (first.held, len(shared.leases)) == (2, 2)


def test_the_first_waiting_consumer_of_the_lowest_priority_number_is_served():
    shared = dispatcher(3, unacked_per_consumer_max=1)
    low = Consumer("low", priority=1)
    first, second = Consumer("a"), Consumer("b")
    waiting = [low, first, second]
    order = []
    while (consumer := shared.taker(waiting, now=0)) is not None:
        order.append(consumer)
        assert shared.reads_for(waiting) is not None
        assert len(take(shared, consumer)) == 1
    assert order == [first, second, low]
    assert shared.reads_for(waiting) is None, "nobody may hold more"


def test_without_a_ready_message_nobody_is_served():
    shared = dispatcher(1)
    consumer = Consumer("c")
    shared.begin_ack(refs(0))
    assert shared.taker([consumer], now=0) is None
    assert shared.reads_for([consumer]) is consumer


def test_bytes_limit_a_call_that_always_gets_one_message():
    shared = dispatcher()
    shared.offer([item(0, size=100), item(1, size=100)], generation=0)
    consumer = Consumer("c")
    assert shared.next_size(consumer) == 100
    taken = shared.take(consumer, count_max=10, bytes_max=50, lease_s=30, now=0)
    assert bodies(taken) == [0]


def test_a_batch_is_divided_between_consumers_and_shares_its_body():
    shared = dispatcher()
    shared.offer([batch(7, 0b11101)], generation=0)
    taken = [
        shared.take(Consumer("a"), count_max=1, bytes_max=10**6, lease_s=30, now=0),
        shared.take(Consumer("b"), count_max=9, bytes_max=2 * SIZE, lease_s=30, now=0),
        shared.take(Consumer("c"), count_max=9, bytes_max=0, lease_s=30, now=0),
    ]
    assert [pairs(part) for part in taken] == [[(7, 0)], [(7, 2), (7, 3)], [(7, 4)]]
    assert [bodies(part) for part in taken] == [[7]] * 3
    assert len({part[0].lease for part in taken}) == 3


def test_the_next_message_of_a_call_may_begin_a_batch_that_does_not_fit():
    shared = dispatcher(1)
    shared.offer([batch(1, 0b111)], generation=0)
    taken = shared.take(Consumer("c"), count_max=10, bytes_max=2 * SIZE, lease_s=30, now=0)
    assert pairs(taken) == [(0, 0), (1, 0)]


def test_a_timeout_returns_a_message_and_counts_a_redelivery():
    shared = dispatcher(1)
    take(shared, now=0)
    assert shared.next_deadline() == 30
    assert shared.tick(now=29.9) == 0
    assert shared.tick(now=30) == 1
    assert replay(shared) == [0]
    again = shared.take(Consumer("d"), count_max=1, bytes_max=1, lease_s=30, now=30)
    assert [(delivery.body, delivery.redelivery_count) for delivery in again] == [(0, 1)]


def test_a_negative_acknowledgement_waits_for_its_delay():
    shared = dispatcher(1)
    take(shared)
    assert shared.nack(refs(0), delay_s=5, now=1) == refs(0)
    assert shared.next_deadline() == 6
    shared.tick(now=5.9)
    assert replay(shared) == []
    shared.tick(now=6)
    assert replay(shared) == [0]


def test_returned_messages_are_delivered_before_new_ones_lowest_first():
    shared = dispatcher(6)
    take(shared, count=4)
    shared.nack(refs(3, 1), delay_s=0, now=0)
    assert replay(shared) == [1, 3]
    assert take(shared) == [1, 3, 4, 5]


def test_messages_of_a_consumer_that_left_are_returned_without_counting():
    shared = dispatcher(2)
    consumer = Consumer("a")
    take(shared, consumer)
    assert shared.release(consumer) == 2
    assert consumer.held == 0
    assert replay(shared) == [0, 1]
    taken = shared.take(Consumer("b"), count_max=2, bytes_max=100, lease_s=30, now=0)
    assert [delivery.redelivery_count for delivery in taken] == [0, 0]
    assert shared.redelivered == []


def test_messages_are_returned_only_if_the_given_consumer_holds_them():
    shared = dispatcher(2)
    a, b = Consumer("a"), Consumer("b")
    take(shared, a, 1)
    take(shared, b, 1)
    assert shared.nack(refs(0, 1), delay_s=0, now=0, consumer=b) == refs(1)


def test_a_message_being_acknowledged_does_not_time_out():
    shared = dispatcher(1)
    take(shared)
    portions = shared.begin_ack(refs(0))
    assert shared.tick(now=1_000) == 0
    shared.fail_ack(portions)
    assert replay(shared) == [0]


def test_a_message_acknowledged_before_its_redelivery_is_forgotten():
    shared = dispatcher(3)
    take(shared, count=2)
    shared.nack(refs(0, 1), delay_s=0, now=0)
    loading = shared.replay(1)
    shared.finish_ack(shared.begin_ack(refs(0, 1, 2)))
    shared.offer_again([item(position.entry_id) for position, _ in loading], generation=0)
    assert shared.replay(10) == []
    assert take(shared) == []


def test_a_reference_to_an_entry_means_all_messages_of_its_batch():
    shared = dispatcher()
    shared.offer([batch(7, 0b111)], generation=0)
    take(shared, count=2)
    assert sorted(pairs(shared.begin_ack([ref(7, WHOLE)]))) == [(7, 0), (7, 1), (7, 2)]
    assert take(shared) == []


def test_a_part_of_a_batch_that_was_acknowledged_while_it_was_read_again_is_not_delivered():
    shared = dispatcher()
    shared.offer([batch(7, 0b1111)], generation=0)
    consumer = Consumer("c")
    take(shared, consumer)
    shared.release(consumer)
    assert shared.replay(10) == [ref(7, 0b1111)]
    shared.finish_ack(shared.begin_ack([ref(7, 0b0110)]))
    shared.offer_again([batch(7, 0b1111)], generation=0)
    assert pairs(shared.take(consumer, count_max=9, bytes_max=99, lease_s=30, now=0)) == [(7, 0), (7, 3)]
    assert shared.known_count == 2


def test_a_batch_that_is_read_again_in_parts_is_delivered_once():
    shared = dispatcher()
    shared.offer([batch(7, 0b1111)], generation=0)
    consumer = Consumer("c")
    take(shared, consumer)
    shared.release(consumer)
    assert shared.replay(10) == [ref(7, 0b1111)]
    shared.offer_again([batch(7, 0b0011)], generation=0)
    shared.give_back([ref(7, 0b1100)])
    assert shared.replay(10) == [ref(7, 0b1100)]
    shared.offer_again([batch(7, 0b1100)], generation=0)
    taken = shared.take(consumer, count_max=9, bytes_max=99, lease_s=30, now=0)
    assert pairs(taken) == [(7, 0), (7, 1), (7, 2), (7, 3)]


def test_a_cumulative_acknowledgement_that_began_before_the_type_was_changed_is_in_force():
    shared = dispatcher(2)
    shared.offer([batch(2, 0b111)], generation=0)
    take(shared, count=1)
    portions = shared.begin_cumulative_ack(ref(2, 0b011))
    assert sorted(pairs(portions)) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    shared.finish_ack(portions)
    assert (shared.known_bits(at(2)), shared.known_count, shared.ready_count) == (0b100, 1, 1)


def test_messages_read_before_a_reset_are_dropped():
    shared = dispatcher(2)
    shared.reset()
    shared.offer([item(9)], generation=0)
    assert take(shared) == []
    shared.offer([item(5)], generation=shared.generation)
    assert take(shared) == [5]


def test_messages_that_are_known_are_not_added_again():
    shared = dispatcher(2)
    shared.offer([batch(2, 0b011)], generation=0)
    take(shared)
    shared.offer([item(0), item(1), batch(2, 0b111), item(3)], generation=0)
    assert (shared.ready_count, shared.known_count) == (2, 6)
    taken = shared.take(Consumer("d"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert pairs(taken) == [(2, 2), (3, 0)]


def test_limits_stop_reading_until_messages_are_acknowledged():
    shared = dispatcher(4, unacked_max=4, unacked_per_consumer_max=2, ready_max=10)
    assert shared.room() == 0
    a, b = Consumer("a"), Consumer("b")
    assert take(shared, a) == [0, 1]
    assert take(shared, a) == []  # its own limit
    assert take(shared, b) == [2, 3]
    shared.finish_ack(shared.begin_ack(refs(0)))
    assert shared.room() == 1


def test_renewing_restarts_the_leases_of_held_messages():
    shared = dispatcher(3)
    a, b = Consumer("a"), Consumer("b")
    take(shared, a, 2)
    take(shared, b, 1)
    lease, kept = shared.renew(a, refs(0, 1, 2), lease_s=30, now=20)
    assert [portion.ref for portion in kept] == refs(0, 1)
    assert lease
    assert shared.tick(now=30) == 1  # only b's


def test_a_part_of_a_batch_can_be_renewed_and_the_rest_times_out():
    shared = dispatcher()
    shared.offer([batch(7, 0b111)], generation=0)
    consumer = Consumer("c")
    take(shared, consumer)
    shared.renew(consumer, [ref(7, 0b010)], lease_s=30, now=20)
    assert shared.tick(now=30) == 2
    assert (consumer.held, shared.replay(10)) == (1, [ref(7, 0b101)])


def test_ready_messages_are_put_down():
    """New messages are forgotten and read from the cursor again. Returned messages stay known and are replayed."""
    ahead = ReadAhead(1_000)
    shared: SharedDispatcher[int] = SharedDispatcher(read_ahead=ahead)
    shared.offer([item(n) for n in range(6)], generation=0)
    consumer = Consumer("a")
    take(shared, consumer, 2)
    shared.release(consumer)
    replay(shared)
    assert (ahead.used, ahead.messages) == (60, 6)
    assert shared.put_down() == ref(2)
    assert (ahead.used, ahead.messages) == (0, 0)
    assert shared.known_count == 2
    assert take(shared) == []
    assert replay(shared) == [0, 1]
    shared.offer([item(n) for n in range(2, 6)], generation=0)
    assert take(shared) == [0, 1, 2, 3, 4, 5]


def test_messages_in_delivery_are_kept_if_others_are_put_down():
    """What is read again is known: leased, returned with a delay, or being acknowledged."""
    shared = dispatcher(6)
    consumer = Consumer("a")
    take(shared, consumer, 3)
    shared.nack(refs(1), delay_s=5, now=0)
    portions = shared.begin_ack(refs(2, 4))
    assert shared.put_down() == ref(3)
    shared.offer([item(n) for n in range(6)], generation=shared.generation)
    assert take(shared, Consumer("b")) == [3, 5]
    shared.finish_ack(portions)
    assert [portion.ref for portion in shared.held(consumer, refs(*range(6)))] == refs(0)
    assert shared.tick(now=5) == 1
    assert replay(shared) == [1]


def test_the_rest_of_a_batch_is_put_down_from_its_first_message_on():
    shared = dispatcher()
    shared.offer([batch(7, 0b1111), item(8)], generation=0)
    take(shared, count=2)
    assert shared.put_down() == ref(7, 0b0100)
    assert (shared.known_count, shared.ready_count, shared.known_bits(at(7))) == (2, 0, 0b0011)
    shared.offer([batch(7, 0b1100), item(8)], generation=0)
    taken = shared.take(Consumer("d"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert pairs(taken) == [(7, 2), (7, 3), (8, 0)]


def released_batches(count: int) -> SharedDispatcher[int]:
    """Return a dispatcher with batches of two messages each, whose messages were returned one by one."""
    shared = dispatcher()
    shared.offer([batch(n, 0b11) for n in range(count)], generation=0)
    consumer = Consumer("a")
    while take(shared, consumer, 1):
        pass
    shared.release(consumer)
    return shared


def test_without_room_to_read_ahead_one_entry_is_read_again_while_no_message_is_ready():
    shared = released_batches(3)
    again = shared.replay(100, entries_max=1)
    assert again == [ref(0, 0b01), ref(0, 0b10)]
    shared.offer_again([batch(0, 0b11)], generation=0)
    assert shared.replay(100, entries_max=1) == []
    assert shared.room(asked=5) == 0
    take(shared)
    assert shared.room(asked=5) == 5
    assert shared.replay(100, entries_max=1) == [ref(1, 0b01), ref(1, 0b10)]


def test_the_entries_of_returned_messages_are_counted_once_each():
    shared = released_batches(3)
    assert shared.replay(100, entries_max=2) == [ref(n, bits) for n in range(2) for bits in (0b01, 0b10)]


def test_returned_messages_are_not_read_again_beyond_the_byte_limit():
    shared = dispatcher(20, ready_bytes_max=50)
    consumer = Consumer("a")
    take(shared, consumer)
    shared.release(consumer)
    for _ in range(3):
        shared.offer_again([item(position.entry_id) for position, _ in shared.replay(5)], generation=0)
    assert shared.ready_count == 5
    got = take(shared)
    while again := replay(shared):
        got += take(shared)
        assert again
    assert got == list(range(20))


def test_stale_ready_messages_do_not_prevent_reading():
    """Messages that were acknowledged while ready must not count as ready, else nothing would be read any more."""
    shared = dispatcher(3)
    shared.finish_ack(shared.begin_ack(refs(0, 1, 2)))
    assert shared.ready_count == 0
    assert shared.room(asked=1) == 1


def test_messages_of_a_batch_with_different_counts_are_delivered_apart():
    """A delivery has one redelivery count. What was stored before is in force after a restart."""
    counts = StoredCounts()
    counts.counts = {(7, 0): 2, (7, 2): 2, (7, 3): 1}
    shared: SharedDispatcher[int] = SharedDispatcher(counts_of=counts)
    shared.offer([batch(7, 0b11111), batch(8, 0b11)], generation=0)
    taken = shared.take(Consumer("c"), count_max=9, bytes_max=99, lease_s=30, now=0)
    found = {(message, delivery.redelivery_count) for delivery in taken for message in pairs([delivery])}
    assert found == {((7, 0), 2), ((7, 1), 0), ((7, 2), 2), ((7, 3), 1), ((7, 4), 0), ((8, 0), 0), ((8, 1), 0)}
    assert len(taken) == 4


def test_stored_counts_are_in_force_for_a_delayed_entry_that_is_due_after_a_restart():
    counts = StoredCounts()
    counts.counts = {(7, 0): 2, (7, 2): 1}
    shared: SharedDispatcher[int] = SharedDispatcher(counts_of=counts)
    shared.replay_due([at(7), at(8)])
    shared.replay(10)
    shared.offer_again([batch(7, 0b111), item(8)], generation=0)
    shared.forget_missing([ref(7, ~0b111), ref(8, ~1)])
    taken = shared.take(Consumer("c"), count_max=9, bytes_max=99, lease_s=30, now=0)
    found = {(message, delivery.redelivery_count) for delivery in taken for message in pairs([delivery])}
    assert found == {((7, 0), 2), ((7, 1), 0), ((7, 2), 1), ((8, 0), 0)}
    assert shared.known_count == 4


def test_due_entries_are_read_after_returned_messages_lowest_first():
    shared = dispatcher(3)
    a = Consumer("a")
    take(shared, a)
    shared.replay_due([at(9), at(4), at(1), at(9)])
    shared.release(a)
    assert shared.replayable()
    assert [position.entry_id for position, _ in shared.replay(4)] == [0, 1, 2, 4]
    shared.give_back([ref(4, WHOLE)])
    shared.replay_due([at(4), at(3)])
    assert [position.entry_id for position, _ in shared.replay(9)] == [4, 9, 3]
    assert not shared.replayable()
    assert shared.replay(9) == []


def test_a_due_entry_that_is_acknowledged_before_it_is_read_is_not_read():
    shared = dispatcher()
    shared.replay_due([at(1), at(2), at(3)])
    shared.finish_ack(shared.begin_ack([ref(1, WHOLE)]))
    failing = shared.begin_ack([ref(2, WHOLE)])
    assert [position.entry_id for position, _ in shared.replay(1)] == [3]
    shared.fail_ack(failing)
    assert [position.entry_id for position, _ in shared.replay(9)] == [2]
    shared.replay_due([at(5)])
    shared.reset()
    assert not shared.replayable()


def test_a_due_entry_that_is_one_message_has_nothing_left_to_read():
    shared = dispatcher()
    shared.replay_due([at(1), at(2)])
    shared.replay(9)
    assert shared.known_count == 2
    part = shared.begin_ack([ref(2, SINGLE)])
    shared.offer_again([item(1), item(2)], generation=0)
    assert (shared.known_bits(at(1)), shared.known_count, shared.ready_count) == (SINGLE, 2, 1)
    assert take(shared) == [1]
    shared.finish_ack(part)
    assert shared.known_bits(at(2)) == 0


def test_putting_down_nothing_does_not_look_at_what_consumers_hold(monkeypatch):
    """This happens at the end of each call while all subscriptions together hold too much."""
    shared: SharedDispatcher[int] = SharedDispatcher()
    shared.offer([item(n) for n in range(3)], generation=0)
    take(shared, Consumer("c"))
    with monkeypatch.context() as patch:
        patch.setattr(PortionTable, "__iter__", lambda _table: pytest.fail("looked"))
        assert shared.put_down() is None
    assert shared.known_count == 3


def test_a_count_of_the_whole_item_does_not_divide_it():
    counts = StoredCounts()
    counts.counts = {(7, index): 3 for index in range(4)}
    shared: SharedDispatcher[int] = SharedDispatcher(counts_of=counts)
    shared.offer([batch(7, 0b0110)], generation=0)
    (delivery,) = shared.take(Consumer("c"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert (delivery.bits, delivery.redelivery_count) == (0b0110, 3)


def test_each_return_is_counted_once_and_from_the_stored_count_on():
    counts = StoredCounts()
    counts.counts = {(7, 0): 2}
    shared: SharedDispatcher[int] = SharedDispatcher(counts_of=counts)
    shared.offer([batch(7, 0b11)], generation=0)
    consumer = Consumer("c")
    take(shared, consumer)
    shared.nack([ref(7, 0b11)], delay_s=0, now=0)
    assert sorted(shared.redelivered, key=lambda one: one.bits) == [(at(7), 0b01, 3), (at(7), 0b10, 1)]
    counts.store(shared.redelivered)
    shared.replay(10)
    shared.offer_again([batch(7, 0b11)], generation=0)
    take(shared, consumer)
    shared.tick(now=30)
    assert sorted(shared.redelivered, key=lambda one: one.bits) == [(at(7), 0b01, 4), (at(7), 0b10, 2)]


class SharedModel(RuleBasedStateMachine):
    """Compare with a naive state of each message: free, held by one consumer until a time, delayed, or acknowledged.

    Entries are batches of one to three messages, and each step may concern a part of them.
    """

    consumers = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.ahead = ReadAhead(1_000)
        self.stored = StoredCounts()
        self.topic = Topic()
        self.shared: SharedDispatcher[int] = SharedDispatcher(
            limits=DispatchLimits(unacked_max=12, unacked_per_consumer_max=5, ready_max=6),
            read_ahead=self.ahead,
            counts_of=self.stored,
        )
        self.members = [Consumer("a"), Consumer("b"), Consumer("a")]
        self.now = 0.0
        self.next_entry = 0
        self.known: list[Pair] = []
        self.held: dict[Pair, tuple[int, float]] = {}
        self.delayed: dict[Pair, float] = {}
        self.free: set[Pair] = set()
        self.counts: dict[Pair, int] = {}
        self.acked: set[Pair] = set()

    def offer_again(self, again):
        self.shared.offer_again(self.topic.items(pairs(again)), generation=self.shared.generation)

    @rule(count=st.integers(1, 4))
    def read(self, count):
        self.stored.store(self.shared.redelivered)
        again = self.shared.replay(count)
        if again:
            self.offer_again(again)
            return
        new: list[Pair] = []
        while len(new) < min(count, self.shared.room()):
            new += self.topic.messages(self.next_entry)
            self.next_entry += 1
        self.shared.offer(self.topic.items(new), generation=self.shared.generation)
        self.known += new
        self.free.update(new)

    @rule(count=st.integers(1, 4))
    def failed_read(self, count):
        self.shared.give_back(self.shared.replay(count))

    @rule(count=st.integers(1, 4), data=st.data())
    def read_of_a_part(self, count, data):
        """The read ends before all messages were read; the rest is given back."""
        self.stored.store(self.shared.redelivered)
        again = pairs(self.shared.replay(count))
        if again:
            read = data.draw(st.sets(st.sampled_from(again)))
            self.offer_again(as_refs(read))
            self.shared.give_back(as_refs(set(again) - read))

    @rule(who=consumers, count=st.integers(1, 6))
    def take(self, who, count):
        self.advance(0)
        consumer = self.members[who]
        ready = self.shared.ready_count
        size = self.shared.next_size(consumer)
        taken = self.shared.take(consumer, count_max=count, bytes_max=3 * SIZE, lease_s=10, now=self.now)
        got = pairs(taken)
        assert bool(size) == bool(ready)
        assert bool(got) == bool(ready and sum(holder == who for holder, _ in self.held.values()) < 5)
        assert len(got) <= min(count, 3)
        for delivery in taken:
            assert delivery.body == delivery.position.entry_id
            for message in pairs([delivery]):
                assert message in self.free, "taken while held, delayed or gone"
                assert delivery.redelivery_count == self.counts.get(message, 0)
                self.free.remove(message)
                self.held[message] = (who, self.now + 10)
        assert sum(holder == who for holder, _ in self.held.values()) <= 5

    @rule(seconds=st.sampled_from([0.5, 3, 11]))
    def advance(self, seconds):
        self.now += seconds
        expired = [message for message, (_, until) in self.held.items() if until <= self.now]
        due = [message for message, until in self.delayed.items() if until <= self.now]
        assert self.shared.tick(now=self.now) == len(expired) + len(due)
        for message in expired:
            del self.held[message]
            self.counts[message] = self.counts.get(message, 0) + 1
            self.free.add(message)
        for message in due:
            del self.delayed[message]
            self.free.add(message)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), ok=st.booleans(), whole=st.booleans())
    def ack(self, data, ok, whole):
        chosen = data.draw(st.sets(st.sampled_from(self.known), max_size=4))
        if whole:
            chosen = {message for n, _ in chosen for message in self.topic.messages(n)}
            portions = self.shared.begin_ack([ref(n, WHOLE) for n in {n for n, _ in chosen}])
        else:
            portions = self.shared.begin_ack(as_refs(chosen))
        assert sorted(pairs(portions)) == sorted(chosen - self.acked)
        if ok:
            self.shared.finish_ack(portions)
        else:
            self.shared.fail_ack(portions)
        for message in chosen - self.acked:
            self.held.pop(message, None)
            self.delayed.pop(message, None)
            self.free.discard(message)
            if ok:
                self.acked.add(message)
                self.counts.pop(message, None)
            else:
                self.free.add(message)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), delay=st.sampled_from([0, 4]), who=st.one_of(st.none(), consumers))
    def nack(self, data, delay, who):
        chosen = data.draw(st.sets(st.sampled_from(self.known), max_size=4))
        returned = pairs(
            self.shared.nack(
                as_refs(chosen), delay_s=delay, now=self.now, consumer=None if who is None else self.members[who]
            )
        )
        assert sorted(returned) == sorted(
            message for message in chosen & self.held.keys() if who in (None, self.held[message][0])
        )
        for message in returned:
            del self.held[message]
            self.counts[message] = self.counts.get(message, 0) + 1
            if delay:
                self.delayed[message] = self.now + delay
            else:
                self.free.add(message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), who=consumers)
    def renew(self, data, who):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.held)), max_size=4))
        _, kept = self.shared.renew(self.members[who], as_refs(chosen), lease_s=10, now=self.now)
        mine = {message for message in chosen if self.held[message][0] == who}
        assert sorted(pairs(kept)) == sorted(mine)
        self.held.update(dict.fromkeys(mine, (who, self.now + 10)))

    @rule(who=consumers)
    def leave(self, who):
        mine = {message for message, (holder, _) in self.held.items() if holder == who}
        assert self.shared.release(self.members[who]) == len(mine)
        for message in mine:
            del self.held[message]
            self.free.add(message)

    @rule()
    def put_down(self):
        """There is no room, or no call for some time. New messages are read from the cursor again."""
        first = self.shared.put_down()
        assert self.ahead.used == self.ahead.messages == 0
        if first is not None:
            self.stored.store(self.shared.redelivered)
            self.read_from(*pairs([first]))

    def read_from(self, first):
        new = [message for message in self.known if message >= first and message not in self.acked]
        self.shared.offer(self.topic.items(new), generation=self.shared.generation)

    @rule()
    def reset(self):
        """The cursor is read again from its first unacknowledged message. Counts that are not stored are lost."""
        self.shared.reset()
        assert not any(consumer.grants for consumer in self.members)
        self.counts = {message: n for message, n in self.stored.counts.items() if message not in self.acked}
        self.free = set(self.known) - self.acked
        self.held.clear()
        self.delayed.clear()
        self.read_from((0, 0))

    @invariant()
    def leases_are_the_models(self):
        shared = self.shared
        holders = {
            message: portion.grant and portion.grant.consumer
            for portion in shared.leases
            for message in pairs([portion])
        }
        assert holders == {message: self.members[who] for message, (who, _) in self.held.items()}
        assert len(shared.leases) == len(self.held) == shared.leases.bytes_held / SIZE
        for who, consumer in enumerate(self.members):
            assert consumer.held == sum(holder == who for holder, _ in self.held.values())
        deadlines = [until for _, until in self.held.values()] + list(self.delayed.values())
        assert shared.next_deadline() == min(deadlines, default=None)

    @invariant()
    def counts_are_exact(self):
        shared = self.shared
        assert shared.known_count == len(self.known) - len(self.acked)
        assert shared.known_count <= 12 + 2, "the last entry is read as a whole"
        ready = sum(count_of(portion.bits) for portion in shared._table if portion.item is not None)
        assert shared.ready_count == ready == self.ahead.messages == self.ahead.used / SIZE
        states = shared.state_counts()
        assert states.get("ready", 0) == ready
        assert (states.get("leased", 0), states.get("delayed", 0)) == (len(self.held), len(self.delayed))
        for n in range(self.next_entry):
            known = [message for message in self.topic.messages(n) if message not in self.acked]
            assert shared.known_bits(at(n)) == (as_refs(known)[0].bits if known else 0)

    def teardown(self):
        """Nothing is lost: a consumer that keeps receiving and acknowledging gets everything."""
        self.advance(1_000)
        left = set(self.known) - self.acked
        assert left == self.free
        consumer = Consumer("z")
        for _ in range(40):
            self.offer_again(self.shared.replay(5))
            taken = self.shared.take(consumer, count_max=5, bytes_max=10**6, lease_s=10, now=self.now)
            left.difference_update(pairs(taken))
            self.shared.finish_ack(self.shared.begin_ack([ref(one.position.entry_id, one.bits) for one in taken]))
        assert not left
        assert (self.shared.known_count, self.ahead.used, consumer.held) == (0, 0, 0)


TestSharedModel = SharedModel.TestCase
TestSharedModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nothing_is_read_ahead_at_the_byte_limit():
    shared = dispatcher(ready_bytes_max=20, ready_max=100)
    shared.offer([item(0, size=19)], generation=0)
    assert shared.room() == 99
    shared.offer([item(1, size=1)], generation=0)
    assert shared.room() == 0
    take(shared, count=1)
    assert shared.room() == 99


def test_a_batch_that_exceeds_the_limits_leaves_no_room():
    """An entry is offered as a whole. A negative room would hide that a limit is reached."""
    shared = dispatcher(0, unacked_max=3, unacked_per_consumer_max=3, ready_max=2)
    shared.offer([batch(0, 0b11111)], generation=0)
    assert shared.room() == 0


def test_returned_messages_are_not_read_again_beyond_the_limit_of_ready_messages():
    shared = dispatcher(6, ready_max=3)
    consumer = Consumer("c")
    take(shared, consumer)
    shared.release(consumer)
    shared.offer_again([item(position.entry_id) for position, _ in shared.replay(2)], generation=0)
    assert shared.replay(1) == refs(2)
    shared.offer_again([item(2)], generation=0)
    assert shared.replay(1) == []


def test_a_message_that_was_read_again_twice_is_delivered_once():
    """The queue holds a stale row of the same message. The bodies must not be compared, because they have no order."""
    shared: SharedDispatcher[object] = SharedDispatcher()

    def offer_again() -> None:
        again = [Item(position, size=10, body=object()) for position, _ in shared.replay(1)]
        shared.offer_again(again, generation=0)

    consumer = Consumer("c")
    shared.offer([Item(at(0), size=10, body=object())], generation=0)
    shared.take(consumer, count_max=1, bytes_max=100, lease_s=30, now=0)
    shared.release(consumer)
    for _ in range(2):
        offer_again()
        shared.fail_ack(shared.begin_ack(refs(0)))
    offer_again()
    taken = shared.take(consumer, count_max=5, bytes_max=100, lease_s=30, now=0)
    assert [delivery.position for delivery in taken] == [at(0)]


def test_messages_may_fill_the_bytes_of_a_call_exactly():
    shared = dispatcher(3)
    taken = shared.take(Consumer("c"), count_max=10, bytes_max=20, lease_s=30, now=0)
    assert bodies(taken) == [0, 1]


def test_only_ready_messages_count_as_read_ahead():
    ahead = ReadAhead(1_000)
    shared: SharedDispatcher[int] = SharedDispatcher(read_ahead=ahead)
    shared.offer([item(n) for n in range(4)], generation=0)
    assert ahead.used == 40
    consumer = Consumer("c")
    take(shared, consumer, count=3)
    assert ahead.used == 10
    shared.release(consumer)
    replay(shared)
    assert ahead.used == 40
    assert take(shared, count=1) == [0]
    assert ahead.used == 30
    shared.reset()
    assert ahead.used == 0


def test_the_next_deadline_is_that_of_the_first_lease_or_delay():
    shared = dispatcher(2)
    assert shared.next_deadline() is None
    take(shared)
    shared.nack(refs(0), delay_s=5, now=0)
    assert shared.next_deadline() == 5
    shared.nack(refs(1), delay_s=50, now=0)
    shared.tick(now=5)
    replay(shared)
    assert take(shared, now=6) == [0]
    assert shared.next_deadline() == 36


def test_a_reset_forgets_messages_in_every_state():
    shared = dispatcher(5)
    take(shared, count=4)
    shared.nack(refs(0), delay_s=5, now=0)
    shared.nack(refs(1, 2), delay_s=0, now=0)
    shared.offer_again([item(position.entry_id) for position, _ in shared.replay(1)], generation=0)
    assert shared.state_counts() == {"ready": 2, "leased": 1, "delayed": 1, "replay": 1}
    shared.reset()
    assert (shared.state_counts(), shared.ready_count, len(shared.leases)) == ({}, 0, 0)
    assert shared.next_deadline() is None
    assert not shared.replayable()
    assert shared.redelivered == [], "counts of messages before the reset are not stored after it"
    shared.offer([item(n) for n in range(5)], generation=shared.generation)
    taken = shared.take(Consumer("d"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert [(delivery.body, delivery.redelivery_count) for delivery in taken] == [(n, 0) for n in range(5)]


def test_an_unknown_index_of_a_batch_does_not_mean_the_whole_entry():
    shared = dispatcher()
    shared.offer([batch(7, 0b111)], generation=0)
    assert shared.begin_ack([ref(7, 1 << 5)]) == []
    taken = shared.take(Consumer("c"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert pairs(taken) == [(7, 0), (7, 1), (7, 2)]


def test_redeliveries_of_an_acknowledged_message_are_forgotten():
    shared = dispatcher(1)
    take(shared)
    shared.nack(refs(0), delay_s=0, now=0)
    shared.finish_ack(shared.begin_ack(refs(0)))
    shared.offer([item(0)], generation=0)
    (delivery,) = shared.take(Consumer("c"), count_max=9, bytes_max=99, lease_s=30, now=0)
    assert delivery.redelivery_count == 0


def test_ended_delays_of_acknowledged_messages_take_no_memory():
    """A client may return each message for an hour and then acknowledge it."""
    shared = dispatcher()
    consumer = Consumer("c")
    for n in range(5_000):
        shared.offer([item(n)], generation=0)
        take(shared, consumer)
        shared.nack(refs(n), delay_s=3_600, now=0)
        shared.finish_ack(shared.begin_ack(refs(n)))
    assert len(shared._delayed) < 200
    assert shared.next_deadline() is None


def test_messages_that_are_held_go_to_nobody_until_they_are_returned():
    shared = dispatcher(3)
    a = Consumer("a")
    assert take(shared, a, 1) == [0]
    known, added = shared.hold([ref(0), ref(1), ref(9)])
    assert (pairs(known), pairs(added)) == ([(0, 0), (1, 0)], [(9, 0)])
    assert (a.held, shared.ready_count) == (0, 1)
    shared.offer([item(9)], generation=0)
    assert take(shared, a) == [2]
    assert shared.tick(now=1_000) == 1  # the lease of 2
    shared.return_held([*known, *added], delay_s=0, now=0)
    assert replay(shared) == [0, 1, 2, 9]


def test_a_part_of_what_is_held_can_be_returned_with_a_delay():
    shared: SharedDispatcher[int] = dispatcher()
    shared.offer([batch(0, 0b1111)], generation=0)
    (portion,), added = shared.hold([ref(0, 0b0111)])
    assert not added
    shared.return_held([shared.part_of(portion, 0b0010)], delay_s=5, now=0)
    shared.finish_ack([portion])
    assert shared.known_bits(at(0)) == 0b1010
    assert shared.next_deadline() == 5
    shared.tick(now=5)
    assert pairs(shared.replay(100)) == [(0, 1)]


def test_what_was_held_before_a_reset_is_not_returned():
    shared = dispatcher(1)
    known, _ = shared.hold(refs(0))
    shared.reset()
    shared.return_held(known, delay_s=0, now=0)
    shared.finish_ack(known)
    assert (shared.known_count, shared.replay(100)) == (0, [])


def test_a_message_near_the_limit_of_redeliveries_is_delivered_alone():
    counts = StoredCounts()
    shared: SharedDispatcher[int] = SharedDispatcher(counts_of=counts)
    shared.offer([item(0), item(1), batch(2, 0b11), item(3), item(4)], generation=0)
    consumer = Consumer("c")

    def take_alone(count: int) -> list[Pair]:
        taken = shared.take(consumer, count_max=count, bytes_max=10**6, lease_s=30, now=0, alone_from=1)
        return pairs(taken)

    assert len(take_alone(100)) == 6
    shared.nack([ref(1), ref(2, 0b11)], delay_s=0, now=0)
    shared.release(consumer)
    counts.store(shared.redelivered)
    again = {n: item(n) for n in (0, 1, 3, 4)} | {2: batch(2, 0b11)}
    found = shared.replay(100)
    shared.offer_again([again[position.entry_id] for position, _ in found], generation=0)
    assert [take_alone(100) for _ in range(5)] == [[(0, 0)], [(1, 0)], [(2, 0)], [(2, 1)], [(3, 0), (4, 0)]]
