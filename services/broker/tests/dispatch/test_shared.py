"""Shared dispatch: every message is acknowledged or delivered again, and has at most one lease."""

from bindery_broker.dispatch.item import DispatchLimits, Item
from bindery_broker.dispatch.read_ahead import ReadAhead
from bindery_broker.dispatch.shared import SharedDispatcher
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule


def key(n: int) -> tuple[int, int, int]:
    return (0, n, -1)


def item(n: int, size: int = 10) -> Item[int]:
    return Item(key(n), size, n)


def dispatcher(count: int = 0, **limits: int) -> SharedDispatcher[int]:
    shared: SharedDispatcher[int] = SharedDispatcher(limits=DispatchLimits(**limits) if limits else None)
    shared.offer([item(n) for n in range(count)], generation=0)
    return shared


def take(shared: SharedDispatcher[int], consumer: str = "c", count: int = 100, *, now: float = 0.0) -> list[int]:
    taken = shared.take(consumer, count_max=count, bytes_max=10**6, ack_timeout_s=30, now=now)
    return [delivery.message for delivery in taken]


def replay(shared: SharedDispatcher[int]) -> list[int]:
    """Read all returned messages again, as the owner does."""
    keys = shared.replay(100)
    shared.offer_again([item(n) for _, n, _ in keys], generation=shared.generation)
    return [n for _, n, _ in keys]


def test_a_second_delay_is_not_cut_short_by_the_first():
    """Nack with a delay, acknowledge without success, nack again: the deadline of the first nack is void."""
    shared = dispatcher(1)
    take(shared, now=0)
    shared.nack([key(0)], delay_s=10, now=0)
    shared.fail_ack(shared.begin_ack([key(0)]))
    assert replay(shared) == [0]
    assert take(shared, now=1) == [0]
    shared.nack([key(0)], delay_s=100, now=1)
    assert shared.tick(now=10) == 0
    assert replay(shared) == []
    assert shared.tick(now=100) == 0
    assert shared.tick(now=101) == 1
    assert replay(shared) == [0]


def test_messages_are_delivered_in_order_and_once():
    shared = dispatcher(5)
    assert take(shared, "a", 2) == [0, 1]
    assert take(shared, "b", 2) == [2, 3]
    assert take(shared, "a") == [4]
    assert take(shared, "a") == []


def test_bytes_limit_a_call_that_always_gets_one_message():
    shared = dispatcher()
    shared.offer([item(0, size=100), item(1, size=100)], generation=0)
    taken = shared.take("c", count_max=10, bytes_max=50, ack_timeout_s=30, now=0)
    assert [delivery.message for delivery in taken] == [0]


def test_a_timeout_returns_a_message_and_counts_a_redelivery():
    shared = dispatcher(1)
    take(shared, now=0)
    assert shared.next_deadline() == 30
    assert shared.tick(now=29.9) == 0
    assert shared.tick(now=30) == 1
    assert replay(shared) == [0]
    again = shared.take("d", count_max=1, bytes_max=1, ack_timeout_s=30, now=30)
    assert [(delivery.message, delivery.redelivery_count) for delivery in again] == [(0, 1)]


def test_a_negative_acknowledgement_waits_for_its_delay():
    shared = dispatcher(1)
    take(shared)
    assert shared.nack([key(0)], delay_s=5, now=1) == [key(0)]
    assert shared.next_deadline() == 6
    shared.tick(now=5.9)
    assert replay(shared) == []
    shared.tick(now=6)
    assert replay(shared) == [0]


def test_returned_messages_are_delivered_before_new_ones_lowest_first():
    shared = dispatcher(6)
    take(shared, "a", 4)
    shared.nack([key(3), key(1)], delay_s=0, now=0)
    assert replay(shared) == [1, 3]
    assert take(shared, "b") == [1, 3, 4, 5]


def test_messages_of_a_consumer_that_left_are_returned_without_counting():
    shared = dispatcher(2)
    take(shared, "a")
    assert shared.release("a") == 2
    assert replay(shared) == [0, 1]
    taken = shared.take("b", count_max=2, bytes_max=100, ack_timeout_s=30, now=0)
    assert [delivery.redelivery_count for delivery in taken] == [0, 0]


def test_messages_are_returned_only_if_the_given_consumer_holds_them():
    shared = dispatcher(2)
    take(shared, "a", 1)
    take(shared, "b", 1)
    assert shared.nack([key(0), key(1)], delay_s=0, now=0, consumer="b") == [key(1)]


def test_a_message_being_acknowledged_does_not_time_out():
    shared = dispatcher(1)
    take(shared)
    keys = shared.begin_ack([key(0)])
    assert shared.tick(now=1_000) == 0
    shared.fail_ack(keys)
    assert replay(shared) == [0]


def test_a_message_acknowledged_before_its_redelivery_is_forgotten():
    shared = dispatcher(3)
    take(shared, count=2)
    shared.nack([key(0), key(1)], delay_s=0, now=0)
    loading = shared.replay(1)
    shared.finish_ack(shared.begin_ack([key(0), key(1), key(2)]))
    shared.offer_again([item(n) for _, n, _ in loading], generation=0)
    assert shared.replay(10) == []
    assert take(shared) == []


def test_the_key_of_an_entry_means_all_messages_of_its_batch():
    shared = dispatcher()
    shared.offer([Item((0, 7, n), 1, n) for n in range(3)], generation=0)
    take(shared, count=2)
    assert sorted(shared.begin_ack([(0, 7, -1)])) == [(0, 7, 0), (0, 7, 1), (0, 7, 2)]
    assert take(shared) == []


def test_messages_read_before_a_reset_are_dropped():
    shared = dispatcher(2)
    shared.reset()
    shared.offer([item(9)], generation=0)
    assert take(shared) == []
    shared.offer([item(5)], generation=shared.generation)
    assert take(shared) == [5]


def test_limits_stop_reading_until_messages_are_acknowledged():
    shared = dispatcher(4, unacked_max=4, unacked_per_consumer_max=2, ready_max=10)
    assert shared.room() == 0
    assert take(shared, "a") == [0, 1]
    assert take(shared, "a") == []  # its own limit
    assert take(shared, "b") == [2, 3]
    shared.finish_ack(shared.begin_ack([key(0)]))
    assert shared.room() == 1


def test_renewing_restarts_the_leases_of_held_messages():
    shared = dispatcher(3)
    take(shared, "a", 2)
    take(shared, "b", 1)
    lease, kept = shared.renew("a", [key(0), key(1), key(2)], ack_timeout_s=30, now=20)
    assert kept == [key(0), key(1)]
    assert lease
    assert shared.tick(now=30) == 1  # only b's


def test_ready_messages_are_put_down():
    """New messages are forgotten and read from the cursor again. Returned messages stay known and are replayed."""
    ahead = ReadAhead(1_000)
    shared: SharedDispatcher[int] = SharedDispatcher(read_ahead=ahead)
    shared.offer([item(n) for n in range(6)], generation=0)
    take(shared, "a", 2)
    shared.release("a")
    replay(shared)
    assert (ahead.used, ahead.messages) == (60, 6)
    assert shared.put_down() == key(2)
    assert (ahead.used, ahead.messages) == (0, 0)
    assert shared.known_count == 2
    assert take(shared) == []
    assert replay(shared) == [0, 1]
    shared.offer([item(n) for n in range(2, 6)], generation=0)
    assert take(shared) == [0, 1, 2, 3, 4, 5]


def test_messages_in_delivery_are_kept_if_others_are_put_down():
    """What is read again is known: leased, returned with a delay, or being acknowledged."""
    shared = dispatcher(6)
    take(shared, "a", 3)
    shared.nack([key(1)], delay_s=5, now=0)
    keys = shared.begin_ack([key(2), key(4)])
    assert shared.put_down() == key(3)
    shared.offer([item(n) for n in range(6)], generation=shared.generation)
    assert take(shared, "b") == [3, 5]
    shared.finish_ack(keys)
    assert shared.leases.holder(key(0)) == "a"
    assert shared.tick(now=5) == 1
    assert replay(shared) == [1]


def test_without_room_to_read_ahead_one_entry_is_read_again_while_no_message_is_ready():
    shared = dispatcher()
    shared.offer([Item((0, n, index), 1, n) for n in range(3) for index in range(2)], generation=0)
    take(shared, "a")
    shared.release("a")
    keys = shared.replay(100, entries_max=1)
    assert keys == [(0, 0, 0), (0, 0, 1)]
    shared.offer_again([Item(key, 1, 0) for key in keys], generation=0)
    assert shared.replay(100, entries_max=1) == []
    assert shared.room(asked=5) == 0
    take(shared)
    assert shared.room(asked=5) == 5
    assert shared.replay(100, entries_max=1) == [(0, 1, 0), (0, 1, 1)]


def test_the_entries_of_returned_messages_are_counted_once_each():
    shared = dispatcher()
    shared.offer([Item((0, n, index), 1, n) for n in range(3) for index in range(2)], generation=0)
    take(shared, "a")
    shared.release("a")
    assert shared.replay(100, entries_max=2) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]


def test_returned_messages_are_not_read_again_beyond_the_byte_limit():
    shared = dispatcher(20, ready_bytes_max=50)
    take(shared, "a")
    shared.release("a")
    for _ in range(3):
        shared.offer_again([item(n) for _, n, _ in shared.replay(5)], generation=0)
    assert shared.ready_count == 5
    got = take(shared)
    while again := replay(shared):
        got += take(shared)
        assert again
    assert got == list(range(20))


def test_stale_ready_messages_do_not_prevent_reading():
    """Messages that were acknowledged while ready must not count as ready, else nothing would be read any more."""
    shared = dispatcher(3)
    shared.finish_ack(shared.begin_ack([key(n) for n in range(3)]))
    assert shared.ready_count == 0
    assert shared.room(asked=1) == 1


class SharedModel(RuleBasedStateMachine):
    """Compare with a naive state of each message: free, held by one consumer until a time, delayed, or acknowledged."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = ReadAhead(1_000)
        self.shared: SharedDispatcher[int] = SharedDispatcher(
            limits=DispatchLimits(unacked_max=12, unacked_per_consumer_max=5, ready_max=6), read_ahead=self.ahead
        )
        self.now = 0.0
        self.next_entry = 0
        self.held: dict[int, tuple[str, float]] = {}
        self.delayed: dict[int, float] = {}
        self.free: set[int] = set()
        self.acking: set[int] = set()
        self.counts: dict[int, int] = {}
        self.acked: set[int] = set()

    @rule(count=st.integers(1, 4))
    def read(self, count):
        keys = self.shared.replay(count)
        if keys:
            self.shared.offer_again([item(n) for _, n, _ in keys], generation=self.shared.generation)
            return
        new = range(self.next_entry, self.next_entry + min(count, self.shared.room()))
        self.shared.offer([item(n) for n in new], generation=self.shared.generation)
        self.next_entry += len(new)
        self.free.update(new)

    @rule(count=st.integers(1, 4))
    def failed_read(self, count):
        self.shared.give_back(self.shared.replay(count))

    @rule(consumer=st.sampled_from("abc"), count=st.integers(1, 6))
    def take(self, consumer, count):
        self.advance(0)
        for delivery in self.shared.take(consumer, count_max=count, bytes_max=30, ack_timeout_s=10, now=self.now):
            n = delivery.message
            assert n in self.free, "taken while held, delayed or gone"
            assert delivery.redelivery_count == self.counts.get(n, 0)
            self.free.remove(n)
            self.held[n] = (consumer, self.now + 10)
        assert sum(holder == consumer for holder, _ in self.held.values()) <= 5

    @rule(seconds=st.sampled_from([0.5, 3, 11]))
    def advance(self, seconds):
        self.now += seconds
        self.shared.tick(now=self.now)
        for n in [n for n, (_, until) in self.held.items() if until <= self.now]:
            del self.held[n]
            self.counts[n] = self.counts.get(n, 0) + 1
            self.free.add(n)
        for n in [n for n, until in self.delayed.items() if until <= self.now]:
            del self.delayed[n]
            self.free.add(n)

    @precondition(lambda self: self.next_entry)
    @rule(data=st.data(), ok=st.booleans())
    def ack(self, data, ok):
        chosen = data.draw(st.sets(st.integers(0, self.next_entry - 1), max_size=4))
        keys = self.shared.begin_ack([key(n) for n in chosen])
        if ok:
            self.shared.finish_ack(keys)
        else:
            self.shared.fail_ack(keys)
        for n in chosen - self.acked:
            self.held.pop(n, None)
            self.delayed.pop(n, None)
            self.free.discard(n)
            if ok:
                self.acked.add(n)
                self.counts.pop(n, None)
            else:
                self.free.add(n)

    @precondition(lambda self: self.next_entry)
    @rule(data=st.data(), delay=st.sampled_from([0, 4]))
    def nack(self, data, delay):
        chosen = data.draw(st.sets(st.integers(0, self.next_entry - 1), max_size=4))
        returned = self.shared.nack([key(n) for n in chosen], delay_s=delay, now=self.now)
        assert sorted(n for _, n, _ in returned) == sorted(chosen & self.held.keys())
        for _, n, _ in returned:
            del self.held[n]
            self.counts[n] = self.counts.get(n, 0) + 1
            if delay:
                self.delayed[n] = self.now + delay
            else:
                self.free.add(n)

    @rule(consumer=st.sampled_from("abc"))
    def leave(self, consumer):
        mine = {n for n, (holder, _) in self.held.items() if holder == consumer}
        assert self.shared.release(consumer) == len(mine)
        for n in mine:
            del self.held[n]
            self.free.add(n)

    @rule()
    def put_down(self):
        """There is no room, or no call for some time. New messages are read from the cursor again."""
        first = self.shared.put_down()
        assert self.ahead.used == 0
        if first is not None:
            new = [n for n in range(first[1], self.next_entry) if n not in self.acked]
            self.shared.offer([item(n) for n in new], generation=self.shared.generation)

    @invariant()
    def leases_are_the_models(self):
        assert {n: self.shared.leases.holder(key(n)) for _, n, _ in self.shared.leases} == {
            n: holder for n, (holder, _) in self.held.items()
        }
        assert self.shared.known_count <= 12
        assert self.shared.known_count == self.next_entry - len(self.acked)

    def teardown(self):
        """Nothing is lost: a consumer that keeps receiving and acknowledging gets everything."""
        self.advance(1_000)
        left = set(range(self.next_entry)) - self.acked
        assert left == self.free
        for _ in range(20):
            self.shared.offer_again([item(n) for _, n, _ in self.shared.replay(5)], generation=0)
            taken = self.shared.take("z", count_max=5, bytes_max=10**6, ack_timeout_s=10, now=self.now)
            for delivery in taken:
                left.remove(delivery.message)
            self.shared.finish_ack(self.shared.begin_ack([delivery.key for delivery in taken]))
        assert not left


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
    shared = dispatcher(5, unacked_max=3, unacked_per_consumer_max=3, ready_max=2)
    assert shared.room() == 0


def test_returned_messages_are_not_read_again_beyond_the_limit_of_ready_messages():
    shared = dispatcher(6, ready_max=3)
    take(shared)
    shared.release("c")
    shared.offer_again([item(n) for _, n, _ in shared.replay(2)], generation=0)
    assert shared.replay(1) == [key(2)]
    shared.offer_again([item(2)], generation=0)
    assert shared.replay(1) == []


def test_a_message_that_was_read_again_twice_is_delivered_once():
    """The queue holds a stale row of the same key. The bodies must not be compared, because they have no order."""
    shared: SharedDispatcher[object] = SharedDispatcher()
    shared.offer([Item(key(0), 10, object())], generation=0)
    shared.take("c", count_max=1, bytes_max=100, ack_timeout_s=30, now=0)
    shared.release("c")
    for _ in range(2):
        shared.offer_again([Item(again, 10, object()) for again in shared.replay(1)], generation=0)
        shared.fail_ack(shared.begin_ack([key(0)]))
    shared.offer_again([Item(again, 10, object()) for again in shared.replay(1)], generation=0)
    taken = shared.take("c", count_max=5, bytes_max=100, ack_timeout_s=30, now=0)
    assert [delivery.key for delivery in taken] == [key(0)]


def test_messages_may_fill_the_bytes_of_a_call_exactly():
    shared = dispatcher(3)
    taken = shared.take("c", count_max=10, bytes_max=20, ack_timeout_s=30, now=0)
    assert [delivery.message for delivery in taken] == [0, 1]


def test_only_ready_messages_count_as_read_ahead():
    ahead = ReadAhead(1_000)
    shared: SharedDispatcher[int] = SharedDispatcher(read_ahead=ahead)
    shared.offer([item(n) for n in range(4)], generation=0)
    assert ahead.used == 40
    take(shared, count=3)
    assert ahead.used == 10
    shared.release("c")
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
    shared.nack([key(0)], delay_s=5, now=0)
    assert shared.next_deadline() == 5
    shared.nack([key(1)], delay_s=50, now=0)
    shared.tick(now=5)
    replay(shared)
    assert take(shared, now=6) == [0]
    assert shared.next_deadline() == 36


def test_a_reset_forgets_messages_in_every_state():
    shared = dispatcher(5)
    take(shared, count=4)
    shared.nack([key(0)], delay_s=5, now=0)
    shared.nack([key(1), key(2)], delay_s=0, now=0)
    shared.offer_again([item(n) for _, n, _ in shared.replay(1)], generation=0)
    assert shared.state_counts() == {"ready": 2, "leased": 1, "delayed": 1, "replay": 1}
    shared.reset()
    assert (shared.state_counts(), shared.ready_count, len(shared.leases)) == ({}, 0, 0)
    assert shared.next_deadline() is None
    assert not shared.replayable()
    shared.offer([item(n) for n in range(5)], generation=shared.generation)
    assert take(shared) == [0, 1, 2, 3, 4]
    assert [shared.redelivery_count(key(n)) for n in range(5)] == [0] * 5


def test_an_unknown_index_of_a_batch_does_not_mean_the_whole_entry():
    shared = dispatcher()
    shared.offer([Item((0, 7, n), 1, n) for n in range(3)], generation=0)
    assert shared.begin_ack([(0, 7, 5)]) == []
    assert take(shared) == [0, 1, 2]


def test_redeliveries_of_an_acknowledged_message_are_forgotten():
    shared = dispatcher(1)
    take(shared)
    shared.nack([key(0)], delay_s=0, now=0)
    assert shared.redelivery_count(key(0)) == 1
    shared.finish_ack(shared.begin_ack([key(0)]))
    assert shared.redelivery_count(key(0)) == 0
