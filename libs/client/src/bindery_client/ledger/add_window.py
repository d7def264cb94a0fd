"""AddWindow: the adds of one writer that wait or are in flight, and the limits on them.

Flow: `submit` queues a call. A call is admitted when the window has room: its entries get their ids, and its payloads
wait in `take_admitted`. `confirm` completes calls from the head of the queue and admits waiting ones.

Invariants: calls are admitted and completed in the order they were made; entries in flight stay within
`in_flight_entries_max`, bytes within `in_flight_bytes_max` and the client's budget, except that one larger call is
allowed alone.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from bindery_core.errors import BinderyError
from bindery_core.ids import EntryId

from bindery_client.connection.in_flight_budget import InFlightBudget
from bindery_client.settings import ClientSettings


class _Call:
    """One `add_many`."""

    __slots__ = ("count", "first", "future", "payloads", "size")

    def __init__(self, payloads: Sequence[bytes], size: int, future: "asyncio.Future[EntryId]") -> None:
        self.payloads = payloads
        self.count = len(payloads)
        self.size = size
        self.future = future
        self.first = -1
        """Set when the call is admitted."""

    def fail(self, error: BinderyError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # no warning if no caller waits any more


class AddWindow:
    """See the module. Belongs to one writer."""

    def __init__(self, budget: InFlightBudget, settings: ClientSettings, *, on_admitted: Callable[[], None]) -> None:
        """`on_admitted` is called in the next turn of the loop after calls were admitted, once for all of them."""
        self.next_entry_id = 0
        self.length = 0
        """Payload bytes of all calls admitted."""
        self._budget = budget
        self._settings = settings
        self._on_admitted = on_admitted
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Call] = deque()
        """Not admitted yet."""
        self._in_flight: deque[_Call] = deque()
        """Admitted, by ascending entry ids."""
        self._admitted: list[bytes] = []
        """Payloads of admitted calls that `take_admitted` has not returned yet."""
        self._is_scheduled = False
        self._entries_in_flight = 0
        self._bytes_in_flight = 0

    def submit(self, payloads: Sequence[bytes]) -> "asyncio.Future[EntryId]":
        """Queue an add. The future returns the id of the first entry; if it is cancelled before the call is admitted,
        the add is dropped."""
        call = _Call(payloads, sum(map(len, payloads)), self._loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._admit()
        return call.future

    def _admit(self) -> None:
        waiting = self._waiting
        settings = self._settings
        while waiting:
            call = waiting[0]
            if call.future.cancelled():
                waiting.popleft()
                continue
            if self._in_flight and (
                self._entries_in_flight + call.count > settings.in_flight_entries_max
                or self._bytes_in_flight + call.size > settings.in_flight_bytes_max
            ):
                return
            if not self._budget.take(call.size, self._admit):
                return
            waiting.popleft()
            call.first = self.next_entry_id
            self.next_entry_id += call.count
            self.length += call.size
            self._entries_in_flight += call.count
            self._bytes_in_flight += call.size
            self._in_flight.append(call)
            self._admitted += call.payloads
            call.payloads = ()
            if not self._is_scheduled:
                self._is_scheduled = True
                self._loop.call_soon(self._announce)

    def _announce(self) -> None:
        self._is_scheduled = False
        self._on_admitted()

    def take_admitted(self) -> list[bytes]:
        """Return the payloads of calls admitted since the last call of this method, in order."""
        payloads, self._admitted = self._admitted, []
        return payloads

    def confirm(self, last_entry_id: int) -> None:
        """Complete the calls whose entries are all confirmed."""
        in_flight = self._in_flight
        entries = size = 0
        while in_flight and in_flight[0].first + in_flight[0].count - 1 <= last_entry_id:
            call = in_flight.popleft()
            entries += call.count
            size += call.size
            if not call.future.done():
                call.future.set_result(EntryId(call.first))
        self._entries_in_flight -= entries
        self._bytes_in_flight -= size
        if entries:
            self._budget.give_back(size)
            if self._waiting:
                self._admit()

    def fail_waiting(self, error: BinderyError) -> None:
        """Fail the calls that were not admitted."""
        for call in self._waiting:
            call.fail(error)
        self._waiting.clear()

    def fail(self, error: BinderyError) -> None:
        """Fail all calls, admitted or not."""
        calls = [*self._in_flight, *self._waiting]
        self._in_flight.clear()
        self._waiting.clear()
        self._admitted.clear()
        for call in calls:
            call.fail(error)
        size, self._bytes_in_flight, self._entries_in_flight = self._bytes_in_flight, 0, 0
        self._budget.forget(self._admit)
        self._budget.give_back(size)
