"""Key-shared dispatch compared with a naive state of each message, for random steps of its owner and its consumers."""

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import DispatchLimits, count_of
from bindery_broker.dispatch.key_shared import KeySharedDispatcher, KeySharedMode
from bindery_broker.dispatch.read_ahead import ReadAhead
from dispatch_parts import SIZE, Pair, StoredCounts, Topic, as_refs, at, pairs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

HELD_MAX = 5
RANGES = {"a": (0, 20_000), "b": (20_001, 39_999), "c": (40_000, 65_535)}


class KeySharedModel(RuleBasedStateMachine):
    """Each message is unread, free, held by a consumer until a time, delayed, being acknowledged, or acknowledged.

    A message may be delivered if it is free, to the owner of its key, if no other consumer holds a message of the key
    and no earlier message of the key is free or delayed. A consumer that waits gets everything that it may get.
    """

    mode = KeySharedMode()
    who = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.topic = Topic(keys=5)
        self.ahead = ReadAhead(10_000)
        self.stored = StoredCounts()
        self.dispatcher: KeySharedDispatcher[int] = KeySharedDispatcher(
            limits=DispatchLimits(unacked_max=1_000, unacked_per_consumer_max=HELD_MAX, ready_max=6),
            read_ahead=self.ahead,
            counts_of=self.stored,
            mode=self.mode,
        )
        self.members = [
            Consumer(name, key_ranges=(RANGES[name],) if self.mode.sticky else ()) for name in ("a", "b", "c")
        ]
        self.present: list[Consumer] = []
        self.now = 0.0
        self.end = 3
        self.position: Pair = (0, 0)
        self.held: dict[Pair, tuple[Consumer, float]] = {}
        self.delayed: dict[Pair, float] = {}
        self.acking: list[tuple[int, list, set[Pair]]] = []
        self.acked: set[Pair] = set()
        self.counts: dict[Pair, int] = {}
        self.join_or_leave(0)

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def published(self) -> list[Pair]:
        return [message for n in range(self.end) for message in self.topic.messages(n)]

    @property
    def being_acked(self) -> set[Pair]:
        return {message for _, _, chosen in self.acking for message in chosen}

    def free(self) -> list[Pair]:
        gone = self.acked | self.being_acked | self.held.keys() | self.delayed.keys()
        return [message for message in self.published if message not in gone]

    def key(self, message: Pair) -> int:
        return self.topic.key(message[0])

    def is_deliverable(self, message: Pair, consumer: Consumer, free: list[Pair]) -> bool:
        key = self.key(message)
        if message not in free or self.dispatcher.ranges.owner(key) is not consumer:
            return False
        if self.mode.allow_out_of_order:
            return True
        if any(holder is not consumer and self.key(other) == key for other, (holder, _) in self.held.items()):
            return False
        return not any(
            other < message and self.key(other) == key for others in (free, self.delayed) for other in others
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def publish(self, count):
        self.end += count

    def read(self, count, *, is_short=False) -> bool:
        """Read as the owner does. Returns whether anything was read."""
        self.stored.store(self.dispatcher.redelivered)
        again = pairs(self.dispatcher.replay(count, entries_max=1 if is_short else None))
        if again:
            self.dispatcher.offer_again(self.topic.items(again), generation=self.dispatcher.generation)
            return True
        room = min(count, self.dispatcher.room(asked=count if is_short else None))
        left = [message for message in self.published if message >= self.position]
        new: list[Pair] = []
        while left and len(new) < room:
            whole = [message for message in left if message[0] == left[0][0]]
            new += [message for message in whole if message not in self.acked]
            left = left[len(whole) :]
            self.position = (whole[-1][0] + 1, 0)
        self.dispatcher.offer(self.topic.items(new), generation=self.dispatcher.generation)
        return bool(new)

    @rule(count=st.integers(1, 6), is_short=st.booleans())
    def read_some(self, count, is_short):
        self.read(count, is_short=is_short)

    @rule(count=st.integers(1, 6), data=st.data())
    def read_a_part(self, count, data):
        """A read that ends early, or fails."""
        self.stored.store(self.dispatcher.redelivered)
        again = pairs(self.dispatcher.replay(count))
        if again:
            read = data.draw(st.sets(st.sampled_from(again)))
            self.dispatcher.offer_again(self.topic.items(read), generation=self.dispatcher.generation)
            self.dispatcher.give_back(as_refs(set(again) - read))

    @rule(chosen=st.sets(who), is_short=st.booleans())
    def prepare(self, chosen, is_short):
        waiting = [self.members[who] for who in chosen if self.members[who] in self.present]
        self.dispatcher.prepare(waiting)
        if is_short:
            self.dispatcher.make_room(waiting)

    @rule()
    def put_down(self):
        """There is no room, or no call for some time. New messages are read again from the first one on."""
        first = self.dispatcher.put_down()
        assert self.ahead.used == self.ahead.messages == 0
        if first is not None:
            self.position = min(self.position, *pairs([first]))

    @rule(ok=st.booleans())
    def reset(self, ok):
        """The cursor was moved to its first message. Acknowledgements in progress end later."""
        self.dispatcher.reset()
        self.held.clear()
        self.delayed.clear()
        self.counts = {message: n for message, n in self.stored.counts.items() if message not in self.acked}
        self.position = (0, 0)
        for row in list(self.acking):
            self.end_ack_of(row, ok)

    # -- consumers -------------------------------------------------------------------------------------------------

    @rule(who=who)
    def join_or_leave(self, who):
        consumer = self.members[who]
        if consumer in self.present:
            mine = [message for message, (holder, _) in self.held.items() if holder is consumer]
            assert self.dispatcher.leave(consumer) == len(mine)
            for message in mine:
                del self.held[message]
            self.present.remove(consumer)
        else:
            self.dispatcher.join(consumer)
            self.present.append(consumer)

    @precondition(lambda self: self.present)
    @rule(who=who, count=st.integers(1, 6), size=st.integers(0, 4))
    def take(self, who, count, size):
        consumer = self.present[who % len(self.present)]
        self.take_for(consumer, count, size)

    def take_for(self, consumer, count=9, size=100) -> list[Pair]:
        self.advance(0)
        is_served = self.dispatcher.taker([consumer], now=self.now) is consumer
        assert not is_served or self.dispatcher.next_size(consumer) == SIZE
        taken = self.dispatcher.take(consumer, count_max=count, bytes_max=size * SIZE, lease_s=10, now=self.now)
        got = pairs(taken)
        assert is_served == bool(got)
        assert len(got) <= min(count, max(size, 1))
        for message in got:
            assert self.is_deliverable(message, consumer, self.free()), message
            self.held[message] = (consumer, self.now + 10)
        for delivery in taken:
            assert delivery.body == delivery.position.entry_id
            assert {self.counts.get(message, 0) for message in pairs([delivery])} == {delivery.redelivery_count}
        return got

    @precondition(lambda self: self.present)
    @rule(who=who, is_short=st.booleans())
    def receive_everything(self, who, is_short):
        """One consumer waits, and acknowledges what it gets. Keys and messages of others do not hold it up."""
        consumer = self.present[who % len(self.present)]
        waiting = [consumer]
        for _ in range(500):
            self.dispatcher.prepare(waiting)
            if self.dispatcher.reads_for(waiting) is None:
                assert consumer.held == HELD_MAX
                return
            if is_short:
                self.dispatcher.make_room(waiting)
            has_read = self.read(3, is_short=is_short)
            got = self.take_for(consumer)
            self.end_ack_of(self.begin_ack_of(got), ok=True)
            if not has_read and not got:
                break
        else:
            raise AssertionError("the messages never end")
        free = self.free()
        assert [message for message in free if self.is_deliverable(message, consumer, free)] == []

    @rule(seconds=st.sampled_from([0.5, 3, 11]))
    def advance(self, seconds):
        self.now += seconds
        expired = [message for message, (_, until) in self.held.items() if until <= self.now]
        due = [message for message, until in self.delayed.items() if until <= self.now]
        assert self.dispatcher.tick(now=self.now) == len(expired) + len(due)
        for message in expired:
            del self.held[message]
            self.counts[message] = self.counts.get(message, 0) + 1
        for message in due:
            del self.delayed[message]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delay=st.sampled_from([0, 4]))
    def nack(self, data, delay):
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1, max_size=4))
        returned = pairs(self.dispatcher.nack(as_refs(chosen), delay_s=delay, now=self.now))
        assert sorted(returned) == sorted(chosen)
        for message in returned:
            del self.held[message]
            self.counts[message] = self.counts.get(message, 0) + 1
            if delay:
                self.delayed[message] = self.now + delay

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renew_or_hand_back(self, data):
        message, (consumer, _) = data.draw(st.sampled_from(sorted(self.held.items(), key=lambda row: row[0])))
        if data.draw(st.booleans()):
            self.dispatcher.hand_back(consumer, as_refs([message]))
            del self.held[message]
        else:
            self.dispatcher.renew(consumer, as_refs([message]), lease_s=10, now=self.now)
            self.held[message] = (consumer, self.now + 10)

    # -- acknowledgements ------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def begin_ack(self, data):
        """Acknowledge any messages that were read, also those that nobody holds."""
        known = [message for message in self.published if self.is_known(message)]
        if known:
            self.begin_ack_of(data.draw(st.sets(st.sampled_from(known), min_size=1, max_size=3)))

    def begin_ack_of(self, messages):
        chosen = set(messages) - self.being_acked - self.acked
        portions = self.dispatcher.begin_ack(as_refs(chosen))
        assert set(pairs(portions)) == chosen
        for message in chosen:
            self.held.pop(message, None)
            self.delayed.pop(message, None)
        row = (self.dispatcher.generation, portions, chosen)
        self.acking.append(row)
        return row

    @precondition(lambda self: self.acking)
    @rule(data=st.data(), ok=st.booleans())
    def end_ack(self, data, ok):
        self.end_ack_of(data.draw(st.sampled_from(self.acking)), ok)

    def end_ack_of(self, row, ok):
        generation, portions, chosen = row
        self.acking.remove(row)
        if not ok:
            self.dispatcher.fail_ack(portions)
            return
        self.dispatcher.finish_ack(portions)
        if generation != self.dispatcher.generation:
            self.dispatcher.finish_ack(self.dispatcher.begin_ack(as_refs(chosen)))
        self.acked |= chosen
        for message in chosen:
            self.counts.pop(message, None)
            self.held.pop(message, None)
            self.delayed.pop(message, None)

    # -- what always holds -----------------------------------------------------------------------------------------

    def is_known(self, message: Pair) -> bool:
        return bool(self.dispatcher.known_bits(at(message[0])) >> message[1] & 1)

    @invariant()
    def nothing_is_lost(self):
        """What was read stays known, or is read again."""
        for message in self.published:
            if message in self.acked:
                assert not self.is_known(message)
            elif message < self.position:
                assert self.is_known(message)

    @invariant()
    def each_key_has_one_holder(self):
        if self.mode.allow_out_of_order:
            return
        for key in self.topic.hashes:
            assert len({holder for message, (holder, _) in self.held.items() if self.key(message) == key}) <= 1

    @invariant()
    def counts_are_exact(self):
        dispatcher = self.dispatcher
        holders = {
            message: portion.grant and portion.grant.consumer
            for portion in dispatcher.leases
            for message in pairs([portion])
        }
        assert holders == {message: holder for message, (holder, _) in self.held.items()}
        assert len(dispatcher.leases) == len(self.held) == dispatcher.leases.bytes_held / SIZE
        for consumer in self.members:
            assert consumer.held == sum(holder is consumer for holder, _ in self.held.values()) <= HELD_MAX
        ready = sum(count_of(portion.bits) for portion in dispatcher._table if portion.item is not None)
        assert dispatcher.ready_count == ready == self.ahead.messages == self.ahead.used / SIZE
        assert dispatcher.known_count == sum(self.is_known(message) for message in self.published)
        states = dispatcher.state_counts()
        assert states.get("ready", 0) == ready
        assert (states.get("leased", 0), states.get("delayed", 0)) == (len(self.held), len(self.delayed))
        deadlines = [until for _, until in self.held.values()] + list(self.delayed.values())
        assert dispatcher.next_deadline() == min(deadlines, default=None)

    @invariant()
    def waiting_keys_are_those_held_elsewhere(self):
        free = [message for message in self.free() if self.is_known(message)] + list(self.delayed)
        expected = {}
        for message, (holder, _) in self.held.items():
            owner = self.dispatcher.ranges.owner(self.key(message))
            if owner is not holder and any(self.key(other) == self.key(message) for other in free):
                expected[self.key(message)] = (holder, owner)
        found = {one.key_hash: (one.holder, one.owner) for one in self.dispatcher.keys_held(count_max=100)}
        if not self.mode.allow_out_of_order:
            assert found == expected

    def teardown(self):
        """Nothing is lost: consumers that keep receiving and acknowledging get everything."""
        for row in list(self.acking):
            self.end_ack_of(row, ok=False)
        for who in range(3):
            if self.members[who] not in self.present:
                self.join_or_leave(who)
        self.advance(1_000)
        for is_short in (False, True, False):
            for who in range(3):
                self.receive_everything(who, is_short)
        assert set(self.published) == self.acked
        assert (self.dispatcher.known_count, self.ahead.used, self.dispatcher._keys) == (0, 0, {})


class OutOfOrderModel(KeySharedModel):
    """Messages that are held or returned hold up no others, but each key has an owner."""

    mode = KeySharedMode(allow_out_of_order=True)


class StickyModel(KeySharedModel):
    """Keys whose owner is not present wait for it."""

    mode = KeySharedMode(sticky=True)


BUDGET = settings(max_examples=40, stateful_step_count=40, deadline=None)

TestKeySharedModel = KeySharedModel.TestCase
TestKeySharedModel.settings = BUDGET
TestOutOfOrderModel = OutOfOrderModel.TestCase
TestOutOfOrderModel.settings = BUDGET
TestStickyModel = StickyModel.TestCase
TestStickyModel.settings = BUDGET


def test_the_keys_of_the_model_have_different_owners():
    """Otherwise the model would not test what a change of the owner does."""
    model = KeySharedModel()
    for who in (1, 2):
        model.join_or_leave(who)
    owners = {model.dispatcher.ranges.owner(key) for key in model.topic.hashes}
    assert len(owners) >= 2
