"""What the owner of a dispatcher expects from both subscription types."""

from collections.abc import Callable

import pytest
from bindery_broker.dispatch.dispatcher import Dispatcher
from bindery_broker.dispatch.exclusive import ExclusiveDispatcher
from bindery_broker.dispatch.item import DispatchLimits, Item, MessageKey
from bindery_broker.dispatch.shared import SharedDispatcher

LIMITS = DispatchLimits(unacked_max=10, unacked_per_consumer_max=4, ready_max=6)


def exclusive() -> Dispatcher[str]:
    return ExclusiveDispatcher(limits=LIMITS)


def shared() -> Dispatcher[str]:
    return SharedDispatcher(limits=LIMITS)


both = pytest.mark.parametrize("create", [exclusive, shared])


def key(n: int) -> MessageKey:
    return (0, n, -1)


def offer(dispatcher: Dispatcher[str], *numbers: int) -> None:
    dispatcher.offer([Item(key(n), 10, str(n)) for n in numbers], generation=dispatcher.generation)


def take(dispatcher: Dispatcher[str], *, now: float = 0.0) -> list[str]:
    taken = dispatcher.take("c", count_max=100, bytes_max=1000, ack_timeout_s=30, now=now)
    return [delivery.message for delivery in taken]


@pytest.mark.parametrize(("create", "in_order"), [(exclusive, True), (shared, False)])
def test_a_dispatcher_tells_whether_it_keeps_the_order(create: Callable[[], Dispatcher[str]], in_order: bool) -> None:
    assert create().in_order is in_order


@both
def test_a_new_dispatcher_is_empty(create: Callable[[], Dispatcher[str]]) -> None:
    dispatcher = create()
    assert (dispatcher.ready_count, dispatcher.known_count, dispatcher.room()) == (0, 0, 6)
    assert (dispatcher.rewind_wanted, dispatcher.paused_until, dispatcher.next_deadline()) == (False, None, None)
    assert dispatcher.replay(10) == []
    assert take(dispatcher) == []


@both
def test_a_consumer_gets_messages_up_to_its_limit(create: Callable[[], Dispatcher[str]]) -> None:
    dispatcher = create()
    offer(dispatcher, 0, 1, 2, 3, 4)
    assert take(dispatcher) == ["0", "1", "2", "3"]
    assert take(dispatcher) == []
    assert (dispatcher.ready_count, dispatcher.known_count, len(dispatcher.leases)) == (1, 5, 4)
    assert dispatcher.next_deadline() == 30


@both
def test_acknowledged_messages_make_room(create: Callable[[], Dispatcher[str]]) -> None:
    dispatcher = create()
    offer(dispatcher, 0, 1, 2, 3)
    take(dispatcher)
    dispatcher.finish_ack(dispatcher.begin_ack([key(0), key(2)]))
    assert (dispatcher.known_count, len(dispatcher.leases)) == (2, 2)
    offer(dispatcher, 4, 5)
    assert take(dispatcher) == ["4", "5"]


@both
def test_messages_that_were_read_before_a_reset_are_dropped(create: Callable[[], Dispatcher[str]]) -> None:
    dispatcher = create()
    offer(dispatcher, 0, 1)
    take(dispatcher)
    before = dispatcher.generation
    dispatcher.reset()
    dispatcher.offer([Item(key(2), 10, "2")], generation=before)
    assert (dispatcher.ready_count, dispatcher.known_count, len(dispatcher.leases)) == (0, 0, 0)
    offer(dispatcher, 0)
    assert take(dispatcher) == ["0"]


@both
def test_an_expired_message_is_delivered_again_as_the_owner_reads_it(create: Callable[[], Dispatcher[str]]) -> None:
    dispatcher = create()
    offer(dispatcher, 0)
    take(dispatcher)
    assert dispatcher.tick(now=29.9) == 0
    assert dispatcher.tick(now=30) == 1
    if dispatcher.in_order:
        assert dispatcher.rewind_wanted
        dispatcher.rewound()
        offer(dispatcher, 0)
    else:
        assert dispatcher.replayable()
        assert dispatcher.replay(10) == [key(0)]
        dispatcher.offer_again([Item(key(0), 10, "0")], generation=dispatcher.generation)
    (delivery,) = dispatcher.take("d", count_max=100, bytes_max=1000, ack_timeout_s=30, now=31)
    assert (delivery.message, delivery.redelivery_count) == ("0", 1)
