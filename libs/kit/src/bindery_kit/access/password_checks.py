"""PasswordChecks: check passwords in threads, few at a time, and limit the wrong ones of each address.

A hash of a password takes milliseconds, because it is to be expensive for those who guess. On the event loop it would
delay all other requests, and everybody who can connect could cause it.

| limit                                                    | above it                                          |
|----------------------------------------------------------|---------------------------------------------------|
| RUNNING_MAX checks at a time                             | others wait, in the order of their requests       |
| WAITING_PER_ADDRESS_MAX of one address, WAITING_MAX in   | TooManyRequests                                   |
| all, that wait or run                                    |                                                   |
| FAILURES_RATE wrong passwords per second of one address, | TooManyRequests, without a check                  |
| after FAILURES_BURST at once                             |                                                   |

Passwords that were right before are remembered by their verifier and do not come here, so that a client with a wrong
password does not keep out those with the same address that have used theirs. Belongs to one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from bindery_core.errors import TooManyRequests, Unauthorized

from bindery_kit.limits.address_counts import AddressCounts
from bindery_kit.limits.token_bucket import TokenBucket

RUNNING_MAX: Final = 2
"""Maximum number of checks at a time, each in a thread."""
WAITING_MAX: Final = 256
"""Maximum number of checks that wait or run."""
WAITING_PER_ADDRESS_MAX: Final = 16
"""Maximum number of those of one address."""
FAILURES_RATE: Final = 1.0
"""Wrong passwords per second that are checked for one address."""
FAILURES_BURST: Final = 20
"""Number of wrong passwords of one address that are checked at once after a pause."""
ADDRESSES_MAX: Final = 10_000
"""Maximum number of addresses whose wrong passwords are counted. The one that failed longest ago is forgotten first."""

T = TypeVar("T")


class PasswordChecks:
    """`clock`: monotonic seconds. Addresses are those of `bindery_kit.limits.address_counts.group_of`."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = asyncio.Semaphore(RUNNING_MAX)
        self._in_progress = 0
        self._by_address = AddressCounts()
        self._failures: OrderedDict[str, TokenBucket] = OrderedDict()

    async def run(self, check: Callable[[], T], *, address: str) -> T:
        """Return what `check` returns in a thread. Raises what it raises, of which Unauthorized is counted for the
        address; TooManyRequests, without a call."""
        bucket = self._failures.get(address)
        if bucket is not None and bucket.tokens(self._clock()) < 1:
            raise TooManyRequests("too many wrong passwords were sent from this address; correct the password, retry")
        if self._in_progress >= WAITING_MAX or self._by_address.count(address) >= WAITING_PER_ADDRESS_MAX:
            raise TooManyRequests("too many passwords are being checked; retry")
        self._in_progress += 1
        self._by_address.add(address)
        try:
            async with self._running:
                return await asyncio.to_thread(check)
        except Unauthorized:
            self._count_failure(address)
            raise
        finally:
            self._in_progress -= 1
            self._by_address.remove(address)

    def _count_failure(self, address: str) -> None:
        now = self._clock()
        bucket = self._failures.pop(address, None)
        if bucket is None:
            bucket = TokenBucket(rate=FAILURES_RATE, period_s=FAILURES_BURST / FAILURES_RATE, now=now)
        bucket.take(1, now)
        self._failures[address] = bucket
        if len(self._failures) > ADDRESSES_MAX:
            self._failures.popitem(last=False)
