"""OwnershipProof: a ledger of ours was fenced or closed by somebody else. By the topic's next owner, or by healing?

Healing recovers the open ledger of a topic that is idle when one of its bookies is lost or drained; the topic stays
ours. The metadata store tells the two apart. Its answer may be old when it arrives, so no safety rests on it: what is
done upon it is a compare-and-set of the topic's znode, which a stale owner fails. It keeps an owner that was replaced
from getting in its successor's way.
"""

from collections.abc import Awaitable, Callable

from bindery_broker.managed_ledger.topic_metadata import limited

OwnershipCheck = Callable[[], Awaitable[bool]]
"""Asks the metadata store whether this broker owns the topic. Raises TryAgain when it cannot be asked."""


class OwnershipProof:
    """Of one open topic."""

    def __init__(self, check: OwnershipCheck | None, *, timeout_s: float) -> None:
        """`check=None`: whoever fences owns the topic."""
        self._check = check
        self._timeout_s = timeout_s

    @property
    def is_possible(self) -> bool:
        return self._check is not None

    async def holds(self) -> bool:
        """Whether the topic is still ours. Raises TryAgain while that cannot be found out."""
        if self._check is None:
            return False
        async with limited(self._timeout_s, "find out who owns the topic"):
            return await self._check()
