"""Count the producers of a topic that are known by name, and refuse those above the policy `producers_max`. Pure.

A producer of the HTTP API has no connection, so its requests stand for one:

| request                                       | connected producers of the topic                             |
|-----------------------------------------------|--------------------------------------------------------------|
| names its producer                            | it is one of them, until IDLE_S after its last such request  |
| names one while another has the topic         | only the exclusive one (`holding`)                           |
| names none                                    | unchanged: nothing tells one such client from another        |
| is a move, a repeat that is stored, or refused| unchanged                                                    |
| for its message                               |                                                              |

A lower maximum ends nothing: those that are connected go on, and new ones are refused until there is room.
Invariant: the names are in the order of their last requests.
Source: Pulsar's AbstractTopic.isProducersExceeded: connected producers, none of a system topic.
"""

from collections import OrderedDict
from typing import Final

from bindery_broker.errors import TooManyProducers

IDLE_S: Final = 30.0
"""Seconds after its last request for which a producer counts as connected. Less than the minute for which the command
repeats a refused request, so that it gets the place of a producer that has ended."""
NAMES_MAX: Final = 10_000
"""Maximum number of producers that are counted; beyond it, the one that is idle longest is forgotten."""


class ConnectedProducers:
    """Of one loaded topic. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        """Time of the last request of each."""

    def join(self, producer: str, *, now: float, producers_max: int) -> None:
        """Record a request of a producer. `producers_max`: the policy; 0: no limit.

        Raises TooManyProducers if it is a new one and there is no room.
        """
        count = self.count(now)
        if producer not in self._seen and producers_max and count >= producers_max:
            idle_at = next(iter(self._seen.values())) + IDLE_S
            raise TooManyProducers.of(producer, producers=count, limit=producers_max, retry_after_s=idle_at - now)
        self._seen[producer] = now
        self._seen.move_to_end(producer)
        if len(self._seen) > NAMES_MAX:
            self._seen.popitem(last=False)

    def names(self, now: float) -> list[str]:
        """Return the connected producers, those of the last requests last."""
        self.count(now)
        return list(self._seen)

    def count(self, now: float) -> int:
        """Return the number of connected producers."""
        while self._seen and next(iter(self._seen.values())) + IDLE_S <= now:
            self._seen.popitem(last=False)
        return len(self._seen)
