"""Count the operations on topics that run in this broker, and the requests that wait for the next owner of a topic.

A bundle is handed over once the operations on its topics have ended (`ended`). Meanwhile new requests for them are held
(`hold`): until the bundle has its next owner, at most for a time, and at most a number of requests. Their bodies count
in `in_flight_bytes_max`, as those of all requests.

Invariants: every `begin` has one `end`; 0 <= held <= held_max.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from bindery_pulsar.topic_name import TopicName

from bindery_broker.errors import NotOwner
from bindery_broker.ownership.bundles import Bundle


class Running:
    def __init__(self, *, held_max: int) -> None:
        """`held_max`: maximum number of requests that wait at the same time."""
        self.held = 0
        """Number of requests that wait for the next owner of their topic."""
        self._held_max = held_max
        self._counts: dict[TopicName, int] = {}
        self._changed: asyncio.Event | None = None
        """Set when the last operation on a topic ends; None: nobody waits for that."""

    def begin(self, name: TopicName) -> None:
        """An operation on a topic begins."""
        self._counts[name] = self._counts.get(name, 0) + 1

    def end(self, name: TopicName) -> None:
        """An operation on a topic ends."""
        left = self._counts[name] - 1
        if left:
            self._counts[name] = left
            return
        del self._counts[name]
        if self._changed is not None:
            self._changed.set()

    def count(self, bundle: Bundle) -> int:
        """Return the number of operations on the topics of a bundle."""
        return sum(count for name, count in self._counts.items() if bundle.contains(name))

    async def ended(self, bundle: Bundle, *, timeout_s: float) -> int:
        """Return once no operation on the topics of the bundle runs, or after the timeout. Returns how many still run.

        No new one may begin for them meanwhile.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.count(bundle):
                    if self._changed is None or self._changed.is_set():
                        self._changed = asyncio.Event()
                    await self._changed.wait()
        return self.count(bundle)

    @property
    def is_full(self) -> bool:
        """Whether no more requests may wait."""
        return self.held >= self._held_max

    @contextlib.contextmanager
    def hold(self, name: TopicName) -> Iterator[None]:
        """The block waits for the next owner of a topic. Raises NotOwner if too many requests wait already."""
        if self.is_full:
            raise NotOwner("too many requests wait for topics that are moving; retry", topic=name.short, held=self.held)
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """How far the drain of a broker is."""

    state: str
    """`active`, `draining` or `drained`."""
    moved: int
    """Number of bundles that were handed over since the drain began."""
    left: int
    """Number of bundles that this broker owns."""
    rate: float
    """Bundles per second, since the drain began."""
    seconds: float
    """Seconds since the drain began, until its end."""
    blocked: bool
    """Whether there are bundles left that no other broker can take."""

    @property
    def eta_s(self) -> float | None:
        """Seconds until the end, at the present rate; None: unknown."""
        if self.state != "draining":
            return 0.0
        return round(self.left / self.rate, 1) if self.rate and not self.blocked else None
