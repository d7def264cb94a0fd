"""InFlightBudget: the bytes that all ledgers of a client share."""

from bindery_client.connection.in_flight_budget import InFlightBudget


def test_refused_callers_are_called_in_order_when_bytes_are_released() -> None:
    budget = InFlightBudget(10)
    called: list[str] = []
    assert budget.take(8, lambda: None)
    assert not budget.take(4, first := lambda: called.append("first"))
    assert not budget.take(3, lambda: called.append("second"))
    assert not budget.take(3, first)
    budget.give_back(8)
    assert called == ["first", "second"]
    budget.give_back(0)
    assert called == ["first", "second"]


def test_a_request_larger_than_the_limit_is_allowed_alone() -> None:
    budget = InFlightBudget(10)
    assert budget.take(50, lambda: None)
    assert not budget.take(1, lambda: None)
    budget.give_back(50)
    assert budget.used == 0


def test_bytes_up_to_exactly_the_limit_are_allowed_together() -> None:
    budget = InFlightBudget(10)
    assert budget.take(4, lambda: None)
    assert budget.take(6, lambda: None)
    assert not budget.take(1, lambda: None)


def test_a_caller_that_was_forgotten_is_not_called() -> None:
    budget = InFlightBudget(10)
    called: list[str] = []
    retry = lambda: called.append("retry")  # noqa: E731
    assert budget.take(10, retry)
    assert not budget.take(1, retry)
    budget.forget(retry)
    budget.give_back(10)
    assert called == []
