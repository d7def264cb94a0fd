"""What the owner of a dispatcher expects from every subscription type."""

from collections.abc import Callable

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.dispatcher import CountsOf, Dispatcher, no_counts
from bindery_broker.dispatch.item import DispatchLimits, MessageRef
from bindery_broker.dispatch.key_shared import KeySharedDispatcher, KeySharedMode
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.dispatch.single_active import SingleActiveDispatcher
from dispatch_parts import StoredCounts, at, batch, bodies, item, ref, refs

LIMITS = DispatchLimits(unacked_max=10, unacked_per_consumer_max=4, ready_max=6)
KEY_HASH = 9

Create = Callable[..., Dispatcher[int]]


def exclusive(counts_of: CountsOf = no_counts) -> Dispatcher[int]:
    return SingleActiveDispatcher(limits=LIMITS, counts_of=counts_of)


def failover(counts_of: CountsOf = no_counts) -> Dispatcher[int]:
    return SingleActiveDispatcher(
        limits=LIMITS, counts_of=counts_of, pick_active=lambda consumers: min(consumers, key=lambda c: c.name)
    )


def shared(counts_of: CountsOf = no_counts) -> Dispatcher[int]:
    return SharedDispatcher(limits=LIMITS, counts_of=counts_of)


def key_shared(counts_of: CountsOf = no_counts) -> Dispatcher[int]:
    return KeySharedDispatcher(limits=LIMITS, counts_of=counts_of)


def key_shared_out_of_order(counts_of: CountsOf = no_counts) -> Dispatcher[int]:
    return KeySharedDispatcher(limits=LIMITS, counts_of=counts_of, mode=KeySharedMode(allow_out_of_order=True))


ALL = [exclusive, failover, shared, key_shared, key_shared_out_of_order]
every = pytest.mark.parametrize("create", ALL)


def joined(dispatcher: Dispatcher[int], name: str = "c") -> Consumer:
    consumer = Consumer(name)
    dispatcher.join(consumer)
    return consumer


def offer(dispatcher: Dispatcher[int], *numbers: int) -> None:
    dispatcher.offer([item(n, key_hash=KEY_HASH) for n in numbers], generation=dispatcher.generation)


def take(dispatcher: Dispatcher[int], consumer: Consumer, *, now: float = 0.0) -> list[int]:
    return bodies(dispatcher.take(consumer, count_max=100, bytes_max=1000, lease_s=30, now=now))


def read_again(dispatcher: Dispatcher[int], *expected: int) -> None:
    """Read `expected` again, as the owner does: after a rewind, or as replayed messages."""
    if dispatcher.in_order:
        assert dispatcher.rewind_wanted
        dispatcher.rewound()
        offer(dispatcher, *expected)
    else:
        assert dispatcher.replayable()
        assert dispatcher.replay(10) == refs(*expected)
        again = [item(n, key_hash=KEY_HASH) for n in expected]
        dispatcher.offer_again(again, generation=dispatcher.generation)


@pytest.mark.parametrize(
    ("create", "in_order", "needs_hashes"),
    [(exclusive, True, False), (failover, True, False), (shared, False, False), (key_shared, False, True)],
)
def test_a_dispatcher_tells_whether_it_keeps_the_order_and_needs_keys(
    create: Create, in_order: bool, needs_hashes: bool
) -> None:
    assert (create().in_order, create().hash_of is not None) == (in_order, needs_hashes)


@every
def test_a_new_dispatcher_is_empty(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    assert (dispatcher.ready_count, dispatcher.known_count, dispatcher.room()) == (0, 0, 6)
    assert (dispatcher.rewind_wanted, dispatcher.paused_until, dispatcher.next_deadline()) == (False, None, None)
    assert (dispatcher.redelivered, dispatcher.state_counts(), dispatcher.known_bits(at(0))) == ([], {}, 0)
    assert dispatcher.replay(10) == []
    assert dispatcher.taker([consumer], now=0) is None
    assert dispatcher.reads_for([consumer]) is consumer
    assert dispatcher.next_size(consumer) == 0
    assert dispatcher.put_down() is None
    assert take(dispatcher, consumer) == []


@every
def test_nothing_is_read_or_delivered_for_nobody(create: Create) -> None:
    dispatcher = create()
    joined(dispatcher)
    offer(dispatcher, 0)
    assert dispatcher.reads_for([]) is None
    assert dispatcher.taker([], now=0) is None


@every
def test_a_consumer_gets_messages_up_to_its_limit(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    offer(dispatcher, 0, 1, 2, 3, 4)
    assert dispatcher.taker([consumer], now=0) is consumer
    assert dispatcher.next_size(consumer) == 10
    assert take(dispatcher, consumer) == [0, 1, 2, 3]
    assert take(dispatcher, consumer) == []
    assert dispatcher.taker([consumer], now=0) is None
    assert dispatcher.reads_for([consumer]) is None
    assert (dispatcher.ready_count, dispatcher.known_count, len(dispatcher.leases), consumer.held) == (1, 5, 4, 4)
    assert dispatcher.next_deadline() == 30


@every
def test_a_batch_is_divided_at_the_limits_and_in_order(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    dispatcher.offer([batch(0, 0b111110, key_hash=KEY_HASH)], generation=0)
    (one,) = dispatcher.take(consumer, count_max=1, bytes_max=1000, lease_s=30, now=0)
    assert (one.position, one.bits, one.body) == (at(0), 0b10, 0)
    (two,) = dispatcher.take(consumer, count_max=9, bytes_max=20, lease_s=30, now=0)
    assert two.bits == 0b1100
    (limit,) = dispatcher.take(consumer, count_max=9, bytes_max=1000, lease_s=30, now=0)
    assert limit.bits == 0b10000
    assert (dispatcher.ready_count, dispatcher.known_count, consumer.held) == (1, 5, 4)
    assert dispatcher.known_bits(at(0)) | 0b100000 == 0b111110
    assert dispatcher.finish_ack(dispatcher.begin_ack([ref(0, 0b110)])) is None
    assert [each.bits for each in dispatcher.take(consumer, count_max=9, bytes_max=99, lease_s=30, now=0)] == [0b100000]


@every
def test_acknowledged_messages_make_room(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    offer(dispatcher, 0, 1, 2, 3)
    take(dispatcher, consumer)
    dispatcher.finish_ack(dispatcher.begin_ack(refs(0, 2)))
    assert (dispatcher.known_count, len(dispatcher.leases), consumer.held) == (2, 2, 2)
    offer(dispatcher, 4, 5)
    assert take(dispatcher, consumer) == [4, 5]


@every
def test_messages_that_were_read_before_a_reset_are_dropped(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    offer(dispatcher, 0, 1)
    take(dispatcher, consumer)
    before = dispatcher.generation
    dispatcher.reset()
    dispatcher.offer([item(2, key_hash=KEY_HASH)], generation=before)
    assert (dispatcher.ready_count, dispatcher.known_count, len(dispatcher.leases), consumer.held) == (0, 0, 0, 0)
    offer(dispatcher, 0)
    assert take(dispatcher, consumer) == [0]


@every
def test_an_expired_message_is_delivered_again_as_the_owner_reads_it(create: Create) -> None:
    counts = StoredCounts()
    dispatcher = create(counts)
    consumer = joined(dispatcher)
    offer(dispatcher, 0)
    take(dispatcher, consumer)
    assert dispatcher.tick(now=29.9) == 0
    assert dispatcher.tick(now=30) == 1
    assert dispatcher.redelivered == [(at(0), 1, 1)]
    counts.store(dispatcher.redelivered)
    read_again(dispatcher, 0)
    (delivery,) = dispatcher.take(consumer, count_max=100, bytes_max=1000, lease_s=30, now=31)
    assert (delivery.body, delivery.redelivery_count) == (0, 1)


@every
def test_messages_of_a_consumer_that_left_go_to_another_without_counting(create: Create) -> None:
    dispatcher = create()
    first, second = joined(dispatcher, "a"), joined(dispatcher, "b")
    offer(dispatcher, 0, 1)
    holder = dispatcher.taker([first, second], now=0)
    assert holder is not None
    assert take(dispatcher, holder) == [0, 1]
    assert dispatcher.leave(holder) == 2
    assert (holder.held, dispatcher.redelivered) == (0, [])
    read_again(dispatcher, 0, 1)
    left = second if holder is first else first
    taken = dispatcher.take(left, count_max=100, bytes_max=1000, lease_s=30, now=0)
    assert [(delivery.body, delivery.redelivery_count) for delivery in taken] == [(0, 0), (1, 0)]


@every
def test_messages_that_were_not_received_are_handed_back_without_counting(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    offer(dispatcher, 0, 1)
    take(dispatcher, consumer)
    dispatcher.hand_back(Consumer("c"), refs(0, 1))
    assert consumer.held == 2, "only the consumer itself returns its messages"
    dispatcher.hand_back(consumer, refs(0, 1))
    assert (consumer.held, dispatcher.redelivered) == (0, [])
    read_again(dispatcher, 0, 1)
    assert take(dispatcher, consumer) == [0, 1]


@every
def test_renewed_leases_end_later(create: Create) -> None:
    dispatcher = create()
    consumer = joined(dispatcher)
    dispatcher.offer([batch(0, 0b11, key_hash=KEY_HASH)], generation=0)
    take(dispatcher, consumer)
    lease, kept = dispatcher.renew(consumer, [ref(0, 0b10)], lease_s=30, now=20)
    assert [portion.ref for portion in kept] == [ref(0, 0b10)]
    assert lease
    assert [portion.ref for portion in dispatcher.held(consumer, [MessageRef(at(0), -1)])] == [ref(0, 1), ref(0, 2)]
    assert dispatcher.renew(Consumer("c"), [ref(0, 0b11)], lease_s=30, now=20) == ("", [])
    assert dispatcher.tick(now=30) == 1


def test_entries_have_no_counts_unless_they_are_stored() -> None:
    assert no_counts(at(0)) == ()
