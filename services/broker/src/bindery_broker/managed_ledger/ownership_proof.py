"""Determine whether a ledger of this topic was fenced or closed by the topic's next owner or by recovery.

Recovery closes the open ledger of an idle topic if one of its bookies is lost or drained; the owner stays the same. The
metadata store distinguishes the two cases. Its answer may be outdated when it arrives, so safety does not depend on the
answer: the caller then changes the topic's znode with a compare-and-set, which fails for a stale owner. The check
prevents a replaced owner from disturbing its successor.
"""

from collections.abc import Awaitable, Callable

from bindery_broker.managed_ledger.topic_metadata import limited

OwnershipCheck = Callable[[], Awaitable[bool]]
"""Reads from the metadata store whether this broker owns the topic. Raises TryAgain if the store does not answer."""


class OwnershipProof:
    """Checks the ownership of one open topic."""

    def __init__(self, check: OwnershipCheck | None, *, timeout_s: float) -> None:
        """`check=None`: any process that fences a ledger counts as the new owner."""
        self._check = check
        self._timeout_s = timeout_s

    @property
    def is_possible(self) -> bool:
        return self._check is not None

    async def holds(self) -> bool:
        """Return whether this broker still owns the topic. Raises TryAgain while that is unknown."""
        if self._check is None:
            return False
        async with limited(self._timeout_s, "determine the owner of the topic"):
            return await self._check()
