"""Choose the broker that gets a bundle. Pure.

The broker with the least load gets it. Brokers that differ by less than a margin count as equal, and among these a hash
of bundle and broker decides: brokers that choose at the same time, from slightly different reports, then choose the
same broker for one bundle, and different ones for different bundles.

What was chosen counts as load of its destination at once (`Pending`), until a report of that broker contains it or
PENDING_S have passed. Without that, a hundred bundles that are assigned between two reports would all go to one broker.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from bindery_broker.balancing.weights import BUNDLE_UNITS

MARGIN: Final = 0.1
"""Loads that exceed the least one by this part of the mean count as equal to it; at least by BUNDLE_UNITS."""
PENDING_S: Final = 15.0
"""Seconds for which a choice counts as load if no report contains it."""
PENDING_MAX: Final = 10_000
"""Maximum number of choices that are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A broker that can take bundles."""

    name: str
    """`host:port`."""
    weight: float
    """Load in units, with what was chosen for it."""


def choose(bundle: str, candidates: Iterable[Candidate], *, exclude: Collection[str] = ()) -> str | None:
    """Return the name of the broker that gets a bundle; None: there is none. The result does not depend on the order of
    `candidates`, whose names are unique."""
    left = [one for one in candidates if one.name not in exclude]
    if not left:
        return None
    mean = sum(one.weight for one in left) / len(left)
    limit = min(one.weight for one in left) + max(BUNDLE_UNITS, MARGIN * mean)
    equal = (one.name for one in left if one.weight < limit)
    return max(equal, key=lambda name: (_hash(bundle, name), name))


class Pending:
    """Choices that no report contains yet. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._chosen: dict[str, tuple[str, float, float]] = {}
        """By bundle: the broker, the weight and the time, in the order of times."""

    def __len__(self) -> int:
        return len(self._chosen)

    def add(self, bundle: str, broker: str, *, weight: float, now: float) -> None:
        self._chosen.pop(bundle, None)
        while len(self._chosen) >= PENDING_MAX:
            del self._chosen[next(iter(self._chosen))]
        self._chosen[bundle] = (broker, weight, now)

    def discard(self, bundle: str) -> None:
        self._chosen.pop(bundle, None)

    def reported(self, broker: str, bundles: Collection[str]) -> None:
        """Forget the choices that a report of `broker` contains."""
        for bundle in [name for name, (to, _, _) in self._chosen.items() if to == broker and name in bundles]:
            del self._chosen[bundle]

    def weights(self, now: float) -> dict[str, float]:
        """Return the weight of the choices by broker."""
        while self._chosen:
            oldest = next(iter(self._chosen))
            if now - self._chosen[oldest][2] < PENDING_S:
                break
            del self._chosen[oldest]
        found: dict[str, float] = {}
        for broker, weight, _ in self._chosen.values():
            found[broker] = found.get(broker, 0.0) + weight
        return found


def _hash(bundle: str, broker: str) -> bytes:
    return blake2b(f"{bundle} {broker}".encode(), digest_size=8).digest()
