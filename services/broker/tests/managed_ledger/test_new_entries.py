"""Listeners for new entries, and calls that wait for one."""

import asyncio

import pytest
from bindery_broker.managed_ledger.new_entries import Listeners, NewEntries
from bindery_core.errors import TopicFenced


def test_listeners_are_called_in_their_order_each_time() -> None:
    called: list[str] = []
    listeners = Listeners()
    listeners.add(lambda: called.append("a"))
    listeners.add(lambda: called.append("b"))
    listeners.call()
    listeners.call()
    assert called == ["a", "b", "a", "b"]


def test_a_removed_listener_is_not_called_and_may_be_removed_again() -> None:
    called: list[str] = []
    listeners = Listeners()
    remove = listeners.add(lambda: called.append("a"))
    listeners.add(lambda: called.append("b"))
    remove()
    remove()
    listeners.call()
    assert called == ["b"]


def test_a_listener_may_remove_itself_while_it_is_called() -> None:
    called: list[str] = []
    listeners = Listeners()

    def once() -> None:
        called.append("once")
        remove()

    remove = listeners.add(once)
    listeners.add(lambda: called.append("each"))
    listeners.call()
    listeners.call()
    assert called == ["once", "each", "each"]


async def test_an_announcement_calls_the_listeners_and_ends_the_waiting() -> None:
    new, called = NewEntries(), []
    count = 0
    new.listeners.add(lambda: called.append(count))
    waiting = [asyncio.ensure_future(new.wait_until(lambda: count >= 1, timeout_s=60)) for _ in range(2)]
    await asyncio.sleep(0.01)
    count = 1
    new.announce()
    assert called == [1]
    assert await asyncio.gather(*waiting) == [True, True]


async def test_a_wake_evaluates_conditions_without_the_listeners() -> None:
    new, called = NewEntries(), []
    new.listeners.add(lambda: called.append("listener"))
    is_there = False
    waiting = asyncio.ensure_future(new.wait_until(lambda: is_there, timeout_s=60))
    await asyncio.sleep(0.01)
    new.wake()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    is_there = True
    new.wake()
    assert await waiting is True
    assert called == []


async def test_a_condition_that_holds_needs_no_announcement() -> None:
    began = asyncio.get_running_loop().time()
    assert await NewEntries().wait_until(lambda: True, timeout_s=60) is True
    assert asyncio.get_running_loop().time() == began


async def test_a_condition_is_not_evaluated_without_a_wake() -> None:
    began = asyncio.get_running_loop().time()
    evaluated = 0

    def never() -> bool:
        nonlocal evaluated
        evaluated += 1
        return False

    assert await NewEntries().wait_until(never, timeout_s=7) is False
    assert asyncio.get_running_loop().time() == began + 7
    assert evaluated == 1


async def test_an_error_of_the_condition_reaches_the_caller() -> None:
    new = NewEntries()
    is_lost = False

    def check() -> bool:
        if is_lost:
            raise TopicFenced("made up")
        return False

    waiting = asyncio.ensure_future(new.wait_until(check, timeout_s=60))
    await asyncio.sleep(0.01)
    is_lost = True
    new.wake()
    with pytest.raises(TopicFenced):
        await waiting


async def test_a_call_cancelled_in_the_same_turn_as_a_wake_does_not_disturb_the_others() -> None:
    new = NewEntries()
    is_there = False
    first, second = (asyncio.ensure_future(new.wait_until(lambda: is_there, timeout_s=60)) for _ in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    is_there = True
    new.wake()
    assert await second is True
    assert (await asyncio.gather(first, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    new.wake()
