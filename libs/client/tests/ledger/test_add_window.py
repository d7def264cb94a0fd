"""AddWindow: which calls are in flight, when waiting calls are admitted, and what the shared budget gets back."""

import asyncio
import gc
from collections.abc import Sequence

import pytest
from bindery_client.connection.in_flight_budget import InFlightBudget
from bindery_client.ledger.add_window import AddWindow
from bindery_client.settings import ClientSettings
from bindery_core.errors import AddTimeout, LedgerClosed

LIMITS = ClientSettings(in_flight_entries_max=4, in_flight_bytes_max=100, client_bytes_max=100)


class Sender:
    """A window and the payloads that it announced, one list for each announcement."""

    def __init__(self, budget: InFlightBudget | None = None, settings: ClientSettings = LIMITS) -> None:
        self.budget = budget or InFlightBudget(settings.client_bytes_max)
        self.window = AddWindow(self.budget, settings, on_admitted=self._send)
        self.sent: list[list[bytes]] = []

    def _send(self) -> None:
        self.sent.append(self.window.take_admitted())

    def submit(self, *payloads: bytes) -> "asyncio.Future[int]":
        return self.window.submit(payloads)  # type: ignore[return-value]

    async def turn(self) -> list[list[bytes]]:
        """Return what was announced by the end of this turn of the loop."""
        await asyncio.sleep(0)
        sent, self.sent = self.sent, []
        return sent


def results(calls: Sequence["asyncio.Future[int]"]) -> list[int | None]:
    return [call.result() if call.done() else None for call in calls]


async def test_calls_of_one_turn_are_announced_together_and_each_turn_once() -> None:
    sender = Sender()
    sender.submit(b"a", b"bc")
    sender.submit(b"d")
    assert (sender.window.next_entry_id, sender.window.length) == (3, 4)
    assert sender.sent == [], "never from within submit"
    assert await sender.turn() == [[b"a", b"bc", b"d"]]
    sender.submit(b"e")
    assert await sender.turn() == [[b"e"]]
    assert await sender.turn() == []


async def test_a_call_is_complete_once_its_last_entry_is_confirmed() -> None:
    sender = Sender()
    calls = [sender.submit(b"a", b"b"), sender.submit(b"c")]
    sender.window.confirm(0)
    assert results(calls) == [None, None]
    sender.window.confirm(1)
    assert results(calls) == [0, None]
    sender.window.confirm(2)
    assert results(calls) == [0, 2]
    assert sender.budget.used == 0


async def test_the_window_is_full_at_exactly_its_number_of_entries() -> None:
    sender = Sender()
    calls = [sender.submit(b"a", b"b"), sender.submit(b"c", b"d"), sender.submit(b"e")]
    assert await sender.turn() == [[b"a", b"b", b"c", b"d"]]
    sender.window.confirm(1)
    assert await sender.turn() == [[b"e"]]
    waiting = sender.submit(b"f", b"g")
    assert await sender.turn() == [], "three are in flight"
    sender.window.confirm(3)
    assert await sender.turn() == [[b"f", b"g"]]
    sender.window.confirm(6)
    assert results([*calls, waiting]) == [0, 2, 4, 5]


async def test_the_window_is_full_at_exactly_its_number_of_bytes() -> None:
    sender = Sender(InFlightBudget(1000))
    sender.submit(bytes(60))
    sender.submit(bytes(40))
    sender.submit(b"x")
    assert await sender.turn() == [[bytes(60), bytes(40)]]
    sender.window.confirm(0)
    assert await sender.turn() == [[b"x"]]
    sender.submit(bytes(59))
    assert await sender.turn() == [[bytes(59)]]
    sender.submit(b"y")
    assert await sender.turn() == [], "a hundred bytes are in flight"


async def test_a_later_small_call_does_not_overtake_a_large_one_that_waits() -> None:
    sender = Sender(InFlightBudget(1000))
    sender.submit(bytes(60))
    sender.submit(bytes(60))
    sender.submit(b"small")
    assert await sender.turn() == [[bytes(60)]]
    sender.window.confirm(0)
    assert await sender.turn() == [[bytes(60), b"small"]]


async def test_cancelled_calls_do_not_block_the_calls_behind_them() -> None:
    sender = Sender()
    sender.submit(bytes(100))
    cancelled = [sender.submit(b"1"), sender.submit(b"2")]
    last = sender.submit(b"3")
    for call in cancelled:
        call.cancel()
    await sender.turn()
    sender.window.confirm(0)
    assert await sender.turn() == [[b"3"]]
    sender.window.confirm(1)
    assert results([last]) == [1]


async def test_the_entries_of_a_call_cancelled_after_its_admission_are_confirmed_with_the_others() -> None:
    sender = Sender()
    cancelled, other = sender.submit(b"a"), sender.submit(b"b")
    cancelled.cancel()
    sender.window.confirm(1)
    assert results([other]) == [1]
    assert sender.budget.used == 0


async def test_calls_wait_for_bytes_that_another_writer_gives_back() -> None:
    one = Sender()
    two = Sender(one.budget)
    one.submit(bytes(100))
    waiting = two.submit(b"x")
    assert await two.turn() == []
    one.window.confirm(0)
    assert await two.turn() == [[b"x"]]
    two.window.confirm(0)
    assert results([waiting]) == [0]
    assert one.budget.used == 0


async def test_a_failure_ends_admitted_and_waiting_calls_and_gives_back_their_bytes() -> None:
    sender = Sender()
    calls = [sender.submit(bytes(100)), sender.submit(b"waits")]
    sender.window.fail(AddTimeout("late"))
    for call in calls:
        with pytest.raises(AddTimeout):
            call.result()
    assert sender.budget.used == 0
    assert await sender.turn() == [[]], "what was admitted is not sent any more"
    later = [sender.submit(bytes(25), bytes(25)) for _ in range(2)]
    sender.submit(b"")
    assert await sender.turn() == [[bytes(25)] * 4], "the window is empty again, and as large as before"
    sender.window.confirm(6)
    assert results(later) == [1, 3]


async def test_a_window_that_failed_is_not_admitted_when_bytes_are_given_back() -> None:
    one = Sender()
    two = Sender(one.budget)
    one.submit(bytes(100))
    two.submit(b"x")
    two.window.fail(AddTimeout("late"))
    two.window.fail(AddTimeout("again"))
    one.window.confirm(0)
    assert await two.turn() == []
    assert one.budget.used == 0


async def test_waiting_calls_can_fail_while_admitted_ones_continue() -> None:
    sender = Sender()
    admitted, waiting = sender.submit(bytes(100)), sender.submit(b"waits")
    sender.window.fail_waiting(LedgerClosed("is being closed"))
    with pytest.raises(LedgerClosed):
        waiting.result()
    assert not admitted.done()
    sender.window.confirm(0)
    assert results([admitted]) == [0]
    assert await sender.turn() == [[bytes(100)]]


async def test_a_failed_call_whose_caller_is_gone_leaves_no_warning() -> None:
    """asyncio reports the error of a future that nobody has read when the future is deleted."""
    warnings: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: warnings.append(context))
    sender = Sender()
    sender.submit(b"admitted")
    sender.submit(bytes(100))
    sender.window.fail(AddTimeout("late"))
    gc.collect()
    assert warnings == []
