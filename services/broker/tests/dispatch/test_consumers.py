"""Consumers as dispatchers see them."""

from bindery_broker.dispatch.consumers import Consumer


def test_consumers_with_the_same_name_are_not_equal() -> None:
    first, second = Consumer("c"), Consumer("c")
    assert first != second
    assert len({first: 1, second: 2}) == 2


def test_a_new_consumer_holds_nothing_is_preferred_and_has_no_ranges() -> None:
    consumer = Consumer("c")
    assert (consumer.held, consumer.grants, consumer.priority, consumer.key_ranges) == (0, {}, 0, ())
    assert repr(consumer) == "Consumer('c')"
