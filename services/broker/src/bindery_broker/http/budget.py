"""Limit the bytes of request bodies that the process holds at once.

| bytes of bodies                              | counted                               | above the limit              |
|----------------------------------------------|---------------------------------------|------------------------------|
| that operations have not taken completely    | by the HTTP port (`http_limits`),     | the one that has been        |
|                                              | in HeldBytes                          | arriving longest is ended    |
| complete ones, until their request is        | here                                  | new ones are refused         |
| answered                                     |                                       |                              |

Both are within one limit: the bodies that arrive get the room that complete ones leave, so that slow clients cannot
keep others from sending. A body passes from one to the other at the moment an operation takes its last piece.

Invariants: 0 <= used <= total; no byte counts twice.
"""

from bindery_core.errors import TooManyRequests
from bindery_kit.limits.held_bytes import HeldBytes

FULL = "the broker is at its limit of buffered request bytes; retry"


class ByteBudget:
    def __init__(self, total: int, *, arriving: HeldBytes | None = None) -> None:
        """`total` in bytes. `arriving`: the bodies that operations have not taken completely; None if a port without
        limits serves."""
        self.total = total
        self.refused = 0
        """Number of complete bodies that were refused."""
        self._complete = 0
        self._arriving = HeldBytes("bodies", total) if arriving is None else arriving
        self._arriving.restrict(total)

    @property
    def used(self) -> int:
        return self._complete + self._arriving.used

    def take(self, size: int) -> None:
        """Count a complete body. Raises TooManyRequests, and takes nothing, if complete bodies leave no room."""
        if self._complete + size > self.total:
            self.refused += 1
            raise TooManyRequests(FULL, wanted=size, used=self.used, limit=self.total)
        self._complete += size
        self._arriving.restrict(self.total - self._complete)

    def give(self, size: int) -> None:
        """Return the `size` bytes of a complete body."""
        self._complete -= size
        assert self._complete >= 0
        self._arriving.restrict(self.total - self._complete)
