"""Key-shared dispatch, event by event. `test_key_shared_model` compares it with a model for random events."""

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import WHOLE, DispatchLimits
from bindery_broker.dispatch.key_ranges import HashRing, StickyRanges
from bindery_broker.dispatch.key_shared import HeldKey, KeySharedDispatcher, KeySharedMode
from bindery_broker.dispatch.portions import PortionTable
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_core.errors import BadRequest, Conflict
from dispatch_parts import SIZE, Pair, StoredCounts, at, batch, bodies, item, pairs, ref, refs

X, Y, Z = 1_000, 40_000, 60_000
"""Hashes of three keys. In a sticky subscription, X and Y are in the range of the first consumer, Z in the second's."""
FIRST, SECOND = ((1, 50_000),), ((50_001, 65_535),)


class Subscription:
    """A dispatcher, the keys of the entries that were published, and the messages in the way of the owner's steps."""

    def __init__(self, mode: KeySharedMode | None = None, **limits: int) -> None:
        self.ahead = ReadAhead(10_000)
        self.counts = StoredCounts()
        self.dispatcher: KeySharedDispatcher[int] = KeySharedDispatcher(
            limits=DispatchLimits(**limits) if limits else None,
            read_ahead=self.ahead,
            counts_of=self.counts,
            mode=mode or KeySharedMode(),
        )
        self.keys: dict[int, int] = {}

    def join(self, name: str, ranges: tuple[tuple[int, int], ...] = ()) -> Consumer:
        consumer = Consumer(name, key_ranges=ranges)
        self.dispatcher.join(consumer)
        return consumer

    def offer(self, *keys: int) -> None:
        """Read the next entries, one for each of `keys`."""
        first = len(self.keys)
        self.keys.update(enumerate(keys, first))
        self.offer_from(first)

    def offer_from(self, first: int) -> None:
        new = [item(n, key_hash=self.keys[n]) for n in range(first, len(self.keys))]
        self.dispatcher.offer(new, generation=self.dispatcher.generation)

    def replay(self, count_max: int = 100, *, is_short: bool = False) -> list[int]:
        """Read returned messages again."""
        self.counts.store(self.dispatcher.redelivered)
        again = self.dispatcher.replay(count_max, entries_max=1 if is_short else None)
        items = [item(position.entry_id, key_hash=self.keys[position.entry_id]) for position, _ in again]
        self.dispatcher.offer_again(items, generation=self.dispatcher.generation)
        return [one.body for one in items]

    def take(self, consumer: Consumer, count_max: int = 100, *, now: float = 0.0) -> list[int]:
        return bodies(self.dispatcher.take(consumer, count_max=count_max, bytes_max=10**6, lease_s=30, now=now))

    def ack(self, *numbers: int) -> None:
        self.dispatcher.finish_ack(self.dispatcher.begin_ack(refs(*numbers)))

    def nack(self, *numbers: int, delay_s: float = 0) -> None:
        assert self.dispatcher.nack(refs(*numbers), delay_s=delay_s, now=0) == refs(*numbers)


def sticky(**limits: int) -> tuple[Subscription, Consumer, Consumer]:
    """Return a subscription with two consumers. The first owns X and Y, the second owns Z."""
    subscription = Subscription(KeySharedMode(sticky=True), **limits)
    return subscription, subscription.join("a", FIRST), subscription.join("b", SECOND)


def moved_key(subscription: Subscription, *, joining: str) -> int:
    """Return a hash that the only consumer owns and that the consumer `joining` would own."""
    ring: HashRing[str] = HashRing()
    ring.add("present", "a")
    ring.add("new", joining)
    assert len(subscription.dispatcher._runnable) == 1
    return next(key for key in range(1, 65_536) if ring.owner(key) == "new")


# -- who gets a message --------------------------------------------------------------------------------------------


def test_each_key_is_delivered_to_its_owner_in_order():
    subscription, a, b = sticky()
    subscription.offer(X, Z, Y, X, Z)
    assert subscription.take(b) == [1, 4]
    assert subscription.take(a) == [0, 2, 3]
    assert subscription.take(a) == subscription.take(b) == []


def test_the_next_message_may_follow_to_the_owner_while_it_holds_earlier_ones():
    subscription, a, _ = sticky()
    subscription.offer(X, X, X)
    assert subscription.take(a, 1) == [0]
    assert subscription.take(a, 1) == [1]
    subscription.ack(1)
    assert subscription.take(a, 1) == [2]


def test_the_taker_is_a_waiting_consumer_that_can_get_a_message():
    subscription, a, b = sticky(unacked_max=10, unacked_per_consumer_max=1)
    subscription.offer(X, Y)
    assert subscription.dispatcher.taker([b, a], now=0) is a
    assert subscription.dispatcher.taker([b], now=0) is None
    assert (subscription.dispatcher.next_size(a), subscription.dispatcher.next_size(b)) == (SIZE, 0)
    subscription.take(a)
    assert subscription.dispatcher.taker([b, a], now=0) is None, "it may not hold more"
    assert subscription.dispatcher.reads_for([a, b]) is b


def test_a_consumer_that_has_not_joined_gets_nothing():
    subscription, _, _ = sticky()
    subscription.offer(X)
    assert subscription.dispatcher.taker([Consumer("a")], now=0) is None


def test_the_priority_of_a_consumer_does_not_move_keys():
    """As in Pulsar: the keys are shared by all consumers."""
    subscription = Subscription(KeySharedMode(sticky=True))
    low = Consumer("low", priority=9, key_ranges=FIRST)
    subscription.dispatcher.join(low)
    high = subscription.join("high", SECOND)
    subscription.offer(X, Z)
    assert subscription.dispatcher.taker([low, high], now=0) is low
    assert (subscription.take(low), subscription.take(high)) == ([0], [1])


def test_a_key_without_an_owner_waits_for_one():
    subscription = Subscription(KeySharedMode(sticky=True))
    b = subscription.join("b", SECOND)
    subscription.offer(X, Z, X)
    assert subscription.take(b) == [1]
    a = subscription.join("a", FIRST)
    assert subscription.take(a) == [0, 2]


def test_overlapping_ranges_are_refused_and_change_nothing():
    subscription, a, _ = sticky()
    with pytest.raises(Conflict):
        subscription.join("c", ((40_000, 40_001),))
    with pytest.raises(BadRequest):
        subscription.join("c")
    subscription.offer(Y)
    assert subscription.take(a) == [0]


def test_ranges_need_the_mode_sticky():
    subscription = Subscription()
    with pytest.raises(BadRequest):
        subscription.join("a", FIRST)
    assert subscription.dispatcher.ranges.ranges() == {}


def test_the_hash_of_a_key_depends_on_the_mode():
    ring, ranges = Subscription(), Subscription(KeySharedMode(sticky=True))
    assert ring.dispatcher.hash_of(b"order-1") == HashRing().hash_of(b"order-1")
    assert ranges.dispatcher.hash_of(b"order-1") == StickyRanges().hash_of(b"order-1")


def test_a_range_that_was_freed_can_be_declared_again():
    subscription, a, _ = sticky()
    subscription.offer(X, X)
    assert subscription.take(a, 1) == [0]
    assert subscription.dispatcher.leave(a) == 1
    c = subscription.join("c", FIRST)
    assert subscription.take(c) == [], "the first message was returned, and is read again first"
    assert subscription.replay() == [0]
    assert subscription.take(c) == [0, 1]


# -- messages that are returned ------------------------------------------------------------------------------------


def test_a_returned_message_holds_up_later_ones_of_its_key_only():
    subscription, a, _ = sticky()
    subscription.offer(X, Y, X, Y)
    assert subscription.take(a, 2) == [0, 1]
    subscription.nack(0)
    assert subscription.take(a) == [3]
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 2]


def test_a_delay_holds_up_later_messages_of_the_key_until_it_ends():
    subscription, a, _ = sticky()
    subscription.offer(X, Y, X)
    assert subscription.take(a, 1) == [0]
    subscription.nack(0, delay_s=5)
    assert subscription.take(a) == [1]
    assert subscription.dispatcher.tick(now=4.9) == 0
    assert (subscription.replay(), subscription.take(a)) == ([], [])
    assert subscription.dispatcher.tick(now=5) == 1
    assert (subscription.replay(), subscription.take(a, now=5)) == ([0], [0, 2])


def test_messages_in_flight_stay_with_the_owner_when_an_earlier_one_is_returned():
    subscription, a, _ = sticky()
    subscription.offer(X, X, X)
    assert subscription.take(a, 2) == [0, 1]
    subscription.nack(0)
    assert a.held == 1
    subscription.ack(1)
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 2]


def test_a_timeout_returns_a_message_before_later_ones():
    subscription, a, _ = sticky()
    subscription.offer(X, X)
    assert subscription.take(a, 1, now=0) == [0]
    assert subscription.dispatcher.tick(now=30) == 1
    assert subscription.take(a, now=30) == []
    assert subscription.replay() == [0]
    taken = subscription.dispatcher.take(a, count_max=9, bytes_max=99, lease_s=30, now=30)
    assert [(delivery.body, delivery.redelivery_count) for delivery in taken] == [(0, 1), (1, 0)]


def test_a_message_whose_read_fails_holds_up_its_key_until_it_is_read():
    subscription, a, _ = sticky()
    subscription.offer(X, X)
    subscription.take(a, 1)
    subscription.nack(0)
    subscription.dispatcher.give_back(subscription.dispatcher.replay(10))
    assert subscription.take(a) == []
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 1]


def test_an_acknowledged_message_no_longer_holds_up_its_key():
    subscription, a, _ = sticky()
    subscription.offer(X, X, X)
    subscription.take(a, 1)
    subscription.nack(0)
    subscription.ack(0)
    assert subscription.take(a, 1) == [1]
    subscription.ack(2)
    assert subscription.take(a) == []


def test_a_failed_acknowledgement_returns_the_message_before_later_ones():
    subscription, a, _ = sticky()
    subscription.offer(X, X)
    subscription.take(a, 1)
    subscription.dispatcher.fail_ack(subscription.dispatcher.begin_ack(refs(0)))
    assert subscription.take(a) == []
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 1]


def test_a_cumulative_acknowledgement_is_not_offered_but_one_that_began_before_is_in_force():
    """It may have begun while the subscription was exclusive."""
    subscription, a, b = sticky()
    assert not subscription.dispatcher.in_order
    subscription.offer(X, Z, X, X)
    subscription.take(a, 1)
    portions = subscription.dispatcher.begin_cumulative_ack(ref(2))
    assert sorted(pairs(portions)) == [(0, 0), (1, 0), (2, 0)]
    subscription.dispatcher.finish_ack(portions)
    assert (subscription.take(b), subscription.take(a), a.held) == ([], [3], 1)


def test_a_reset_frees_every_key():
    subscription, a, b = sticky()
    subscription.offer(X, X, Z)
    subscription.take(a, 1)
    subscription.take(b)
    subscription.nack(2, delay_s=9)
    subscription.dispatcher.reset()
    assert (subscription.dispatcher.known_count, a.held, b.held, subscription.ahead.used) == (0, 0, 0, 0)
    assert (subscription.take(a), subscription.take(b)) == ([], [])
    subscription.offer_from(0)
    assert (subscription.take(a), subscription.take(b)) == ([0, 1], [2])


# -- batches -------------------------------------------------------------------------------------------------------


def take_pairs(subscription: Subscription, consumer: Consumer, count_max: int = 100) -> list[Pair]:
    return pairs(subscription.dispatcher.take(consumer, count_max=count_max, bytes_max=10**6, lease_s=30, now=0))


def replay_batch(subscription: Subscription, n: int = 0) -> int:
    """Read the returned messages of one batch again. Returns their bits."""
    bits = 0
    for position, part in subscription.dispatcher.replay(100):
        assert position == at(n)
        bits |= part
    subscription.dispatcher.offer_again([batch(n, bits, key_hash=X)], generation=subscription.dispatcher.generation)
    return bits


def test_the_first_messages_of_a_batch_are_delivered_before_later_ones_after_their_return():
    subscription, a, _ = sticky()
    subscription.dispatcher.offer([batch(0, 0b1111, key_hash=X)], generation=0)
    assert take_pairs(subscription, a, 1) == [(0, 0)]
    subscription.dispatcher.nack([ref(0, 0b0001)], delay_s=0, now=0)
    assert take_pairs(subscription, a) == [], "the rest follows the first message"
    assert replay_batch(subscription) == 0b0001
    assert take_pairs(subscription, a) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_returned_messages_of_a_batch_wait_for_an_earlier_one_between_them():
    subscription, a, _ = sticky()
    subscription.dispatcher.offer([batch(0, 0b1111, key_hash=X)], generation=0)
    assert len(take_pairs(subscription, a)) == 4
    subscription.dispatcher.nack([ref(0, 0b0010)], delay_s=9, now=0)
    subscription.dispatcher.nack([ref(0, 0b1101)], delay_s=0, now=0)
    assert replay_batch(subscription) == 0b1101
    assert take_pairs(subscription, a) == [(0, 0)]
    subscription.dispatcher.tick(now=9)
    assert replay_batch(subscription) == 0b0010
    assert take_pairs(subscription, a) == [(0, 1), (0, 2), (0, 3)]


def test_messages_of_a_batch_with_different_counts_are_delivered_apart_and_in_order():
    subscription, a, _ = sticky()
    subscription.counts.counts = {(0, 1): 2, (0, 3): 2}
    subscription.dispatcher.offer([batch(0, 0b11111, key_hash=X)], generation=0)
    taken = subscription.dispatcher.take(a, count_max=9, bytes_max=99, lease_s=30, now=0)
    assert [(delivery.bits, delivery.redelivery_count) for delivery in taken] == [
        (0b00001, 0),
        (0b00010, 2),
        (0b00100, 0),
        (0b01000, 2),
        (0b10000, 0),
    ]


def test_a_reference_to_an_entry_means_all_messages_of_its_batch():
    subscription, a, _ = sticky()
    subscription.dispatcher.offer([batch(0, 0b111, key_hash=X)], generation=0)
    take_pairs(subscription, a, 1)
    assert len(pairs(subscription.dispatcher.begin_ack([ref(0, WHOLE)]))) == 3
    assert a.held == 0


# -- consumers that join and leave ---------------------------------------------------------------------------------


def test_a_joining_consumer_waits_only_for_keys_in_flight_elsewhere():
    subscription = Subscription()
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    free = next(key for key in range(moved + 1, 65_536) if subscription.dispatcher.ranges.owner(key) is a)
    subscription.offer(moved, moved, free)
    assert subscription.take(a, 1) == [0]
    b = subscription.join("b")
    assert subscription.dispatcher.ranges.owner(moved) is b
    assert subscription.take(b, 1) == ([2] if subscription.dispatcher.ranges.owner(free) is b else [])
    assert subscription.take(a, 1) == ([2] if subscription.dispatcher.ranges.owner(free) is a else [])
    assert subscription.dispatcher.keys_held(count_max=10) == [HeldKey(moved, a, b)]
    assert subscription.dispatcher.keys_held([moved, 7], count_max=10) == [HeldKey(moved, a, b)]
    assert subscription.dispatcher.keys_held(count_max=0) == []
    subscription.ack(0)
    assert subscription.dispatcher.keys_held(count_max=10) == []
    assert subscription.take(a) == []
    assert subscription.take(b) == [1]


def test_a_message_that_the_former_owner_returns_goes_to_the_new_owner_first():
    subscription = Subscription()
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    subscription.offer(moved, moved, moved)
    assert subscription.take(a, 2) == [0, 1]
    b = subscription.join("b")
    subscription.nack(0)
    assert subscription.replay() == [0]
    assert (subscription.take(a), subscription.take(b)) == ([], []), "the former owner still holds one"
    subscription.nack(1)
    assert subscription.replay() == [1]
    assert (subscription.take(a), subscription.take(b)) == ([], [0, 1, 2])


def test_a_key_that_returns_to_the_consumer_that_holds_it_is_not_held_up():
    """In Pulsar, a key that came back to its first owner stayed blocked."""
    subscription = Subscription()
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    subscription.offer(moved, moved)
    assert subscription.take(a, 1) == [0]
    b = subscription.join("b")
    assert subscription.take(b) == []
    assert subscription.dispatcher.leave(b) == 0
    assert subscription.take(a) == [1]


def test_a_consumer_that_leaves_frees_its_keys_at_once():
    subscription = Subscription()
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    subscription.offer(moved, moved)
    assert subscription.take(a, 1) == [0]
    b = subscription.join("b")
    assert subscription.dispatcher.leave(a) == 1
    assert subscription.replay() == [0]
    assert subscription.take(b) == [0, 1]


def test_without_a_consumer_messages_wait_for_the_next_one():
    subscription = Subscription()
    a = subscription.join("a")
    subscription.offer(X, Y)
    subscription.dispatcher.leave(a)
    assert subscription.dispatcher.taker([a], now=0) is None
    assert subscription.take(subscription.join("b")) == [0, 1]


def test_a_consumer_may_join_again():
    subscription = Subscription()
    a = subscription.join("a")
    subscription.offer(X, Y)
    subscription.dispatcher.leave(a)
    subscription.dispatcher.join(a)
    assert subscription.take(a) == [0, 1]


# -- room for what can be delivered --------------------------------------------------------------------------------


def test_ready_messages_that_a_waiting_consumer_cannot_get_are_put_aside_if_they_leave_no_room():
    subscription, a, b = sticky(unacked_max=100, unacked_per_consumer_max=100, ready_max=3)
    subscription.offer(X, Y, X)
    assert subscription.dispatcher.room() == 0
    subscription.dispatcher.prepare([b])
    assert (subscription.dispatcher.room(), subscription.ahead.used, subscription.ahead.messages) == (3, 0, 0)
    assert subscription.dispatcher.state_counts() == {"shelved": 3}
    subscription.offer(Z, X)
    assert subscription.take(b) == [3]
    assert subscription.replay() == [], "put aside, until its owner waits"
    subscription.dispatcher.prepare([a])
    assert subscription.replay() == [0, 1, 2]
    assert subscription.take(a) == [0, 1, 2, 4]


def test_messages_are_kept_ready_while_there_is_room_or_a_waiting_consumer_can_get_one():
    subscription, a, b = sticky(unacked_max=100, unacked_per_consumer_max=100, ready_max=3)
    subscription.offer(X, Y)
    subscription.dispatcher.prepare([b])
    assert subscription.dispatcher.ready_count == 2
    subscription.offer(Z)
    subscription.dispatcher.prepare([b])
    assert subscription.dispatcher.ready_count == 3
    subscription.dispatcher.prepare([])
    assert subscription.dispatcher.ready_count == 3
    assert subscription.take(b) == [2]
    assert subscription.take(a) == [0, 1]


def test_a_waiting_consumer_that_may_hold_no_more_keeps_no_messages_ready():
    """Its messages would take the room of those that others wait for."""
    subscription, a, b = sticky(unacked_max=100, unacked_per_consumer_max=1, ready_max=2)
    subscription.offer(X, Y, X)
    assert subscription.take(a) == [0]
    subscription.dispatcher.prepare([a])
    assert subscription.dispatcher.ready_count == 2, "nobody else waits"
    subscription.dispatcher.prepare([a, b])
    assert subscription.dispatcher.ready_count == 0
    subscription.offer(Z)
    assert subscription.take(b) == [3]


def test_messages_are_put_aside_if_nothing_else_can_be_read_ahead():
    """Without room in the budget of the broker, nothing is read while a message is ready."""
    subscription, _, b = sticky()
    subscription.offer(X)
    subscription.dispatcher.prepare([b])
    assert subscription.dispatcher.room(asked=5) == 0
    subscription.dispatcher.make_room([b])
    assert (subscription.dispatcher.room(asked=5), subscription.dispatcher.state_counts()) == (5, {"shelved": 1})


def test_limit_of_unacknowledged_messages_puts_nothing_aside():
    """It would make no room."""
    subscription, _, b = sticky(unacked_max=2, unacked_per_consumer_max=2, ready_max=10)
    subscription.offer(X, Y)
    assert subscription.dispatcher.room() == 0
    subscription.dispatcher.prepare([b])
    assert subscription.dispatcher.ready_count == 2


def test_the_order_is_kept_when_some_messages_were_put_aside():
    subscription, a, b = sticky(unacked_max=100, unacked_per_consumer_max=100, ready_max=2)
    subscription.offer(X, X)
    subscription.dispatcher.prepare([b])
    subscription.offer(X)
    assert subscription.take(a) == [], "the third message waits for the first"
    subscription.dispatcher.prepare([a])
    assert subscription.replay(1) == [0]
    assert subscription.take(a) == [0]
    assert subscription.replay() == [1]
    assert subscription.take(a) == [1, 2]


def test_a_limited_number_of_messages_is_taken_up_again_at_a_time():
    subscription, a, b = sticky(unacked_max=1_000, unacked_per_consumer_max=1_000, ready_max=250)
    subscription.offer(*[X] * 250)
    subscription.dispatcher.prepare([b])
    got = []
    for expected in (100, 100, 50):
        subscription.dispatcher.prepare([a])
        assert len(subscription.replay(1_000)) == expected
        got += subscription.take(a, 1_000)
    assert got == list(range(250))


def test_messages_that_were_put_aside_are_acknowledged_like_others():
    subscription, a, b = sticky(unacked_max=100, unacked_per_consumer_max=100, ready_max=2)
    subscription.offer(X, X)
    subscription.dispatcher.prepare([b])
    subscription.ack(0)
    subscription.dispatcher.prepare([a])
    assert subscription.replay() == [1]
    assert subscription.take(a) == [1]
    subscription.ack(1)
    assert (subscription.dispatcher.known_count, subscription.dispatcher._keys) == (0, {})


def test_messages_that_were_put_aside_go_to_the_owner_of_their_key():
    subscription = Subscription(unacked_max=100, unacked_per_consumer_max=100, ready_max=1)
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    subscription.offer(moved)
    c = subscription.join("c")
    other = [each for each in (a, c) if each is not subscription.dispatcher.ranges.owner(moved)]
    subscription.dispatcher.prepare(other)
    assert subscription.dispatcher.state_counts() == {"shelved": 1}
    b = subscription.join("b")
    owner = subscription.dispatcher.ranges.owner(moved)
    subscription.dispatcher.prepare([each for each in (a, b, c) if each is not owner])
    assert subscription.replay() == []
    subscription.dispatcher.prepare([owner])
    assert subscription.replay() == [0]
    assert subscription.take(owner) == [0]


# -- messages that are put down ------------------------------------------------------------------------------------


def test_new_messages_that_are_put_down_are_read_again_and_delivered_in_order():
    subscription, a, b = sticky()
    subscription.offer(X, Z, X, X)
    assert subscription.take(a, 2) == [0, 2]
    subscription.nack(0)
    assert subscription.replay() == [0]
    assert subscription.dispatcher.put_down() == ref(1)
    assert (subscription.ahead.used, subscription.dispatcher.known_count) == (0, 2)
    assert (subscription.take(a), subscription.take(b)) == ([], [])
    subscription.offer_from(1)
    assert subscription.take(b) == [1]
    assert subscription.take(a) == []
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 3]


def test_a_new_message_stays_known_if_a_later_one_of_its_key_does():
    """The acknowledgement of message 1, which nobody has received, fails after both were put down. Message 1 is
    replayed, and that comes before new reads: it must not overtake message 0."""
    subscription, a, _ = sticky()
    subscription.offer(X, X, X, Y)
    portions = subscription.dispatcher.begin_ack(refs(1))
    assert subscription.dispatcher.put_down() == ref(2)
    subscription.dispatcher.fail_ack(portions)
    assert subscription.replay() == [0, 1]
    assert subscription.take(a) == [0, 1]
    subscription.offer_from(2)
    assert subscription.take(a) == [2, 3]


# -- out of order --------------------------------------------------------------------------------------------------


def test_out_of_order_nothing_waits_for_returned_messages():
    subscription = Subscription(KeySharedMode(sticky=True, allow_out_of_order=True))
    a = subscription.join("a", FIRST)
    subscription.offer(X, X, X)
    assert subscription.take(a, 1) == [0]
    subscription.nack(0, delay_s=5)
    assert subscription.take(a, 1) == [1]
    subscription.dispatcher.fail_ack(subscription.dispatcher.begin_ack(refs(2)))
    subscription.dispatcher.tick(now=5)
    assert subscription.replay(1) == [0]
    assert subscription.take(a) == [0]
    assert subscription.replay() == [2]
    assert subscription.take(a) == [2]


def test_out_of_order_a_new_owner_does_not_wait_for_the_former_one():
    subscription = Subscription(KeySharedMode(allow_out_of_order=True))
    a = subscription.join("a")
    moved = moved_key(subscription, joining="b")
    subscription.offer(moved, moved)
    assert subscription.take(a, 1) == [0]
    b = subscription.join("b")
    assert (subscription.take(a), subscription.take(b)) == ([], [1])
    subscription.ack(0, 1)
    assert (a.held, b.held, subscription.dispatcher._keys) == (0, 0, {})


# -- memory --------------------------------------------------------------------------------------------------------


def rows(subscription: Subscription) -> int:
    dispatcher = subscription.dispatcher
    return sum(map(len, dispatcher._runnable.values())) + sum(len(key.waiting) for key in dispatcher._keys.values())


def test_keys_without_messages_take_no_memory():
    subscription, a, _ = sticky()
    for key in range(1, 1_000):
        subscription.offer(key)
        subscription.ack(*subscription.take(a))
    assert (subscription.dispatcher._keys, rows(subscription)) == ({}, 0)


def test_events_that_change_nothing_take_no_memory():
    """A consumer does not receive, while reads fail, and others join and leave."""
    subscription, a, b = sticky()
    subscription.offer(X, X, Y)
    subscription.take(a, 1)
    subscription.nack(0)
    for _ in range(1_000):
        subscription.dispatcher.give_back(subscription.dispatcher.replay(10))
        subscription.dispatcher.leave(b)
        subscription.dispatcher.join(b)
    assert rows(subscription) <= 6
    assert subscription.replay() == [0]
    assert subscription.take(a) == [0, 1, 2]


def test_messages_that_were_returned_one_by_one_are_taken_without_a_search_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An entry may consist of thousands of parts: a look at all of them for each message would take seconds."""
    dispatcher: KeySharedDispatcher[int] = KeySharedDispatcher()
    consumer = Consumer("c")
    dispatcher.join(consumer)
    dispatcher.offer([batch(0, 0b111111, key_hash=X)], generation=0)
    for _ in range(6):
        dispatcher.take(consumer, count_max=1, bytes_max=99, lease_s=30, now=0)
    dispatcher.release(consumer)
    assert len(dispatcher.replay(9)) == 6
    dispatcher.offer_again([batch(0, 0b111111, key_hash=X)], generation=0)
    with monkeypatch.context() as patch:
        patch.setattr(PortionTable, "of", lambda _table, _position: pytest.fail("searched"))
        taken = dispatcher.take(consumer, count_max=9, bytes_max=999, lease_s=30, now=0)
    assert pairs(taken) == [(0, index) for index in range(6)]


def test_a_message_that_is_held_does_not_hold_up_its_key_until_it_is_returned():
    subscription, first, _ = sticky()
    subscription.offer(X, X, X)
    assert subscription.take(first, 1) == [0]
    known, added = subscription.dispatcher.hold(refs(0))
    assert not added
    assert subscription.take(first, 1) == [1]
    subscription.dispatcher.return_held(known, delay_s=3, now=0)
    assert subscription.take(first) == [], "the key waits for the message that was returned"
    subscription.dispatcher.tick(now=3)
    assert subscription.replay() == [0]
    assert subscription.take(first) == [0, 2]


@pytest.mark.parametrize("mode", [KeySharedMode(), KeySharedMode(sticky=True)], ids=["ring", "sticky"])
@pytest.mark.parametrize("shelved", [False, True])
def test_of_very_many_keys_each_goes_to_its_owner_after_consumers_have_joined_and_left(
    mode: KeySharedMode, shelved: bool
) -> None:
    """A consumer that joins or leaves changes the keys of its share only. Here, it has fewer hashes than there are
    keys."""
    subscription = Subscription(mode, ready_max=10_000)
    hashes = range(1, 65_536, 20)
    span = 65_536 // 50
    consumers = [subscription.join(f"c{n}", ((n * span, n * span + span - 1),)[: mode.sticky]) for n in range(25)]
    subscription.offer(*hashes)
    if shelved:
        subscription.dispatcher._shelve()
    for n in range(25, 50):
        consumers.append(subscription.join(f"c{n}", ((n * span, n * span + span - 1),)[: mode.sticky]))
    held = subscription.take(consumers[3])
    assert bool(held) is not shelved
    for consumer in (consumers.pop(3), consumers.pop(-1), consumers.pop(7)):
        subscription.dispatcher.leave(consumer)
    found: dict[Consumer, list[int]] = {consumer: [] for consumer in consumers}
    for _ in range(60):
        subscription.dispatcher.prepare(consumers)
        subscription.replay(10_000)
        for consumer in consumers:
            found[consumer] += subscription.take(consumer)
    owner = subscription.dispatcher.ranges.owner
    expected: dict[Consumer, list[int]] = {consumer: [] for consumer in consumers}
    for n, key_hash in enumerate(hashes):
        if (consumer := owner(key_hash)) is not None:
            expected[consumer].append(n)
    assert {consumer: sorted(got) for consumer, got in found.items()} == expected
    assert sum(map(len, expected.values())) > 3_000
