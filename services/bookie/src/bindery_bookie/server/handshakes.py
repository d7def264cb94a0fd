"""Handshakes: limit the number of TLS handshakes in progress.

A client begins a handshake with a few bytes, and it takes much more memory than a connection. Above the limit, the
oldest handshake of the address with the most of them ends. So a flood from a few addresses does not end those of
others, although they may take longer.

Invariant: at most `count_max` handshakes are counted.
"""

from typing import Protocol

from bindery_kit.limits.held_bytes import Holder


class Shaking(Holder, Protocol):
    """A connection in the handshake."""

    group: str
    """Its address (`address_counts.group_of`)."""


class Handshakes:
    kind = "handshakes"
    """Name in logs and metrics."""

    def __init__(self, count_max: int) -> None:
        assert count_max >= 1
        self.count_max = count_max
        self.count = 0
        self._of: dict[str, dict[Shaking, None]] = {}
        """By address, in the order in which they began."""

    def begin(self, connection: Shaking) -> None:
        """Count a handshake, after another one was ended if that is necessary."""
        if self.count >= self.count_max:
            most = max(self._of, key=lambda group: len(self._of[group]))
            oldest = next(iter(self._of[most]))
            self.end(oldest)
            oldest.evict(self.kind, 1)
        self._of.setdefault(connection.group, {})[connection] = None
        self.count += 1

    def end(self, connection: Shaking) -> None:
        """Do not count a handshake any longer. Idempotent."""
        shaking = self._of.get(connection.group)
        if shaking is not None and connection in shaking:
            del shaking[connection]
            self.count -= 1
            if not shaking:
                del self._of[connection.group]
