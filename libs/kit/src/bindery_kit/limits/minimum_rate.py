"""MinimumRate: the deadline of data that must not arrive, or be read, more slowly than a rate.

A time limit between two bytes does not end a client that sends one byte at a time, and a time limit for all of the data
ends honest clients on slow links. This deadline moves with the bytes that were transferred.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MinimumRate:
    grace_s: float
    """Seconds that any transfer may take."""
    bytes_per_s: float
    """Rate in bytes per second that is required beyond the grace, in the mean since the beginning."""

    def deadline_s(self, began_s: float, size: int) -> float:
        """Return until when a transfer may go on that began at `began_s` and has moved `size` bytes."""
        return began_s + self.grace_s + size / self.bytes_per_s
