"""ReadAhead: bytes that are read and not handed out yet, of all subscriptions of the process.

Nobody waits for room here. A read that fits may fetch more than its consumer asked for; one that does not fetches what
was asked, and nothing while anything is at hand. So each subscription goes on, whatever the others hold.

Invariant: `used` is what the dispatchers have at hand, and what is reserved for reads under way.
"""


class ReadAhead:
    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    def reserve(self, size: int) -> int:
        """`size` for a read that is about to begin, or 0 when it does not fit. To be given back after the read."""
        if self.used + size > self.total:
            return 0
        self.used += size
        return size

    def change(self, by: int) -> None:
        """What is at hand became so much more, or less."""
        self.used += by
        assert self.used >= 0
