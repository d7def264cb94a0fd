"""Limit the bytes of messages that responses hold, from before their entries are read until the client has read them.

Each response has a `Charge`. It asks for room before messages are read or leased to its client, keeps what its messages
take, and returns it as they are sent. A charge that waits for room holds none, so that charges never wait for each
other. Of the waiting clients, the one whose responses hold least is next, so that a client with many requests does not
make others wait for all of them; the charges of one client get room in the order in which they asked.

If there is no room, the responses whose clients read too slowly (`PACE`) are given up: a client that does not read
keeps others waiting for no more than a few seconds. While there is room, every client may read as slowly as the HTTP
server allows.

Invariants: `used` is the sum of all charges; a released charge holds nothing.
"""

import asyncio
from collections.abc import Callable
from typing import Final, NamedTuple

from bindery_core.sources import MonotonicClock
from bindery_kit.limits.minimum_rate import MinimumRate

STALL_S: Final = 2.0
"""Seconds without progress after which a response is given up if others wait for its room."""
PACE: Final = MinimumRate(grace_s=STALL_S, bytes_per_s=256 * 2**10)
"""The pace below which a response is given up if others wait for its room."""
WAITING_MAX: Final = 64
"""Number of waiting charges above which a response that would wait for its room only is refused at once: thousands of
waiting requests take more memory than the room that they wait for."""
CHECK_S: Final = 0.25
"""Seconds between two searches for responses to give up, while others wait."""


class Charge:
    """The bytes of one response. Created by `ResponseBudget.charge`; the owner must call `release` in the end."""

    def __init__(self, budget: "ResponseBudget", client: str) -> None:
        self._budget = budget
        self.client = client
        self.size = 0
        self.began_s = 0.0
        """When the sending began; monotonic seconds."""
        self.moved_s = 0.0
        """When the client last took bytes."""
        self.sent_size = 0
        self.give_up: Callable[[], None] | None = None
        """Ends the response while it is being sent."""

    def take(self, *, least: int, most: int) -> int:
        """Hold `least` to `most` bytes, as many as fit. Returns the bytes held; 0: not even `least` fit."""
        return self._budget.resize(self, least=least, most=most)

    def room(self, *, least: int, most: int) -> int:
        """Return the bytes that `take` would hold. They are free until the next await."""
        return self._budget.room(self, least=least, most=most)

    def wait(self, *, least: int, most: int) -> "asyncio.Future[None]":
        """Return a future that is done when the charge holds `least` to `most` bytes. Cancel it to stop waiting."""
        self.release()
        return self._budget.enqueue(self, least=least, most=most)

    @property
    def may_wait(self) -> bool:
        """Whether fewer than WAITING_MAX charges wait, or none of this client."""
        return self._budget.may_wait(self.client)

    def another(self) -> "Charge":
        """Return a charge of the same client that holds nothing."""
        return Charge(self._budget, self.client)

    def keep(self, size: int) -> None:
        """Hold exactly `size` bytes, even if they do not fit: the messages are in memory."""
        by = size - self.size
        if by:
            self.size = size
            self._budget.change(self.client, by)

    def begin_sending(self, give_up: Callable[[], None]) -> None:
        """The response is sent from now on. `give_up` is called if its client is too slow and others wait."""
        self.began_s = self.moved_s = self._budget.now()
        self.sent_size = 0
        self.give_up = give_up
        self._budget.sending[self] = None

    def sent(self, size: int) -> None:
        """The client took `size` more bytes."""
        self.sent_size += size
        self.moved_s = self._budget.now()

    def release(self) -> None:
        """Return everything. Idempotent."""
        if self.give_up is not None:
            self.give_up = None
            del self._budget.sending[self]
        if self.size:
            self.keep(0)

    def is_slow(self, now: float) -> bool:
        return now >= min(self.moved_s + STALL_S, PACE.deadline_s(self.began_s, self.sent_size))


class _Waiting(NamedTuple):
    charge: Charge
    least: int
    most: int


class ResponseBudget:
    """`total` in bytes; `now`: monotonic seconds."""

    def __init__(self, total: int, *, now: MonotonicClock) -> None:
        self.total = total
        self.now = now
        self.used = 0
        self.given_up = 0
        """Number of responses that were given up until now."""
        self.sending: dict[Charge, None] = {}
        """Charges of responses that are being sent, in the order in which that began."""
        self._held: dict[str, int] = {}
        """Bytes that are in use, by client; clients without any are left out."""
        self._queues: dict[str, dict[asyncio.Future[None], _Waiting]] = {}
        """Charges that wait for room, by client and in the order in which they asked; clients without any are left
        out."""
        self._check: asyncio.TimerHandle | None = None

    def charge(self, client: str) -> Charge:
        """`client`: what the requests of one client have in common, such as its address."""
        return Charge(self, client)

    @property
    def waiting(self) -> int:
        """Number of charges that wait for room."""
        return sum(map(len, self._queues.values()))

    def may_wait(self, client: str) -> bool:
        """See `Charge.may_wait`."""
        return client not in self._queues or self.waiting < WAITING_MAX

    def resize(self, charge: Charge, *, least: int, most: int) -> int:
        """See `Charge.take`."""
        room = self.room(charge, least=least, most=most)
        if room:
            charge.keep(room)
        return room

    def room(self, charge: Charge, *, least: int, most: int) -> int:
        """See `Charge.room`."""
        room = self.total - self.used + charge.size
        least = min(least, self.total)
        if charge.size < least and (room < least or self._queues):
            self._give_up_slow()
            room = self.total - self.used + charge.size
            if room < least or self._queues:
                return 0
        return max(least, min(most, room))

    def enqueue(self, charge: Charge, *, least: int, most: int) -> "asyncio.Future[None]":
        """See `Charge.wait`."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(charge.client, {})[granted] = _Waiting(charge, min(least, self.total), most)
        granted.add_done_callback(lambda done: self._forget(charge.client, done))
        self._serve()
        return granted

    def change(self, client: str, by: int) -> None:
        """Add `by` bytes, which may be negative, to the bytes that the client uses."""
        self.used += by
        held = self._held.get(client, 0) + by
        assert held >= 0
        if held:
            self._held[client] = held
        else:
            del self._held[client]
        if by < 0 and self._queues:
            self._serve()

    def _forget(self, client: str, granted: "asyncio.Future[None]") -> None:
        """Remove a charge that no longer waits."""
        if self._remove(client, granted):
            self._serve()

    def _remove(self, client: str, granted: "asyncio.Future[None]") -> bool:
        queue = self._queues.get(client, {})
        if queue.pop(granted, None) is None:
            return False
        if not queue:
            del self._queues[client]
        return True

    def _serve(self) -> None:
        """Give room to waiting charges."""
        while self._queues:
            client = min(self._queues, key=lambda one: self._held.get(one, 0))
            granted, (charge, least, most) = next(iter(self._queues[client].items()))
            room = self.total - self.used
            if room < least and not granted.cancelled():
                break
            self._remove(client, granted)
            if not granted.cancelled():
                granted.set_result(None)
                charge.keep(max(least, min(most, room)))
        if self._queues and self._check is None:
            self._check = asyncio.get_running_loop().call_later(CHECK_S, self._relieve)

    def _relieve(self) -> None:
        self._check = None
        if self._queues:
            self._give_up_slow()
            self._serve()

    def _give_up_slow(self) -> None:
        now = self.now()
        for charge in [charge for charge in self.sending if charge.is_slow(now)]:
            give_up = charge.give_up
            charge.release()
            self.given_up += 1
            if give_up is not None:
                give_up()
