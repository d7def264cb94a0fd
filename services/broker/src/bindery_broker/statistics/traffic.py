"""Count messages and bytes, and estimate their rates over the last WINDOW_S seconds.

Time is divided into slots of WINDOW_S. The rate counts the present slot and the part of the slot before that is still
within the window, as if its messages had been spread evenly:

    slots      |---- before ----|-- present --.
    window            |<------- WINDOW_S ---->|       before * (1 - elapsed / WINDOW_S) + present

It is exact for steady traffic, and 0 after two slots without messages. While the traffic is younger than WINDOW_S, the
rate is the mean since its first message, so that it is of use after a second.

Counting costs a comparison and two additions. No timer runs, and reading changes nothing: any number of readers see the
same rates. Times are monotonic seconds, passed by the caller.
"""

from typing import Final, NamedTuple

WINDOW_S: Final = 10.0
"""Seconds over which rates are measured. Pulsar's are those of the last full minute."""
SPAN_S_MIN: Final = 1.0
"""Minimum seconds by which a count is divided."""


class Rates(NamedTuple):
    """Means per second."""

    messages: float
    bytes: float


class Traffic:
    """Invariant: `messages` and `bytes` never decrease."""

    __slots__ = (
        "_before_bytes", "_before_messages", "_began_at", "_slot_bytes", "_slot_ends_at", "_slot_messages", "bytes",
        "messages",
    )  # fmt: skip

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self._began_at = 0.0
        """The first message after the last pause of at least WINDOW_S."""
        self._slot_ends_at = float("-inf")
        self._slot_messages = 0
        """`messages` at the beginning of the slot; `_before_messages`: of the slot before."""
        self._slot_bytes = 0
        self._before_messages = 0
        self._before_bytes = 0

    def add(self, messages: int, size: int, *, now: float) -> None:
        """Count messages of `size` bytes in total."""
        if now >= self._slot_ends_at:
            self._turn(now)
        self.messages += messages
        self.bytes += size

    def _turn(self, now: float) -> None:
        """Begin another slot."""
        if now < self._slot_ends_at + WINDOW_S:
            self._before_messages, self._before_bytes = self._slot_messages, self._slot_bytes
            self._slot_ends_at += WINDOW_S
        else:
            self._before_messages, self._before_bytes = self.messages, self.bytes
            self._began_at = now
            self._slot_ends_at = now + WINDOW_S
        self._slot_messages, self._slot_bytes = self.messages, self.bytes

    def rates(self, now: float) -> Rates:
        """Return the rates at `now`."""
        elapsed = now - self._slot_ends_at + WINDOW_S
        if elapsed >= 2 * WINDOW_S:
            return Rates(0.0, 0.0)
        messages, size = self.messages - self._slot_messages, self.bytes - self._slot_bytes
        if elapsed < WINDOW_S:
            left = 1 - max(elapsed, 0.0) / WINDOW_S
            before = (self._slot_messages - self._before_messages, self._slot_bytes - self._before_bytes)
        else:  # the slot is over, and nothing was counted since
            left, before = 2 - elapsed / WINDOW_S, (messages, size)
            messages = size = 0
        span = min(WINDOW_S, max(now - self._began_at, SPAN_S_MIN))
        return Rates((messages + before[0] * left) / span, (size + before[1] * left) / span)
