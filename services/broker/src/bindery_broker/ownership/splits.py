"""Decide where a bundle is split, and which one.

| algorithm                    | the bundle is split                                                                 |
|------------------------------|-------------------------------------------------------------------------------------|
| `range_equally_divide`       | in the middle of its hashes                                                         |
| `topic_count_equally_divide` | between the two topics in the middle: each half has as many; not with one topic     |
| `specified_positions_divide` | at each given position between its ends; not with one topic                         |

Source: Pulsar RangeEquallyDivideBundleSplitAlgorithm, TopicCountEquallyDivideBundleSplitAlgorithm,
SpecifiedPositionsBundleSplitAlgorithm, NamespaceBundles.getBundleWithHighestTopics.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName

from bindery_broker.ownership.bundles import Bundle

BY_RANGE: Final = "range_equally_divide"
BY_TOPICS: Final = "topic_count_equally_divide"
BY_POSITIONS: Final = "specified_positions_divide"
ALGORITHMS: Final = (BY_RANGE, BY_TOPICS, BY_POSITIONS)
POSITIONS_MAX: Final = 1024
"""Maximum number of positions in one request."""


@dataclass(frozen=True, slots=True)
class Split:
    """How a bundle is split."""

    algorithm: str = BY_RANGE
    positions: tuple[int, ...] = ()
    """Hashes, for BY_POSITIONS only."""

    def __post_init__(self) -> None:
        """Raises BadRequest."""
        if self.algorithm not in ALGORITHMS:
            raise BadRequest("there is no such algorithm for splits", algorithm=self.algorithm, known=ALGORITHMS)
        if self.algorithm == BY_POSITIONS and not self.positions:
            raise BadRequest(f"{BY_POSITIONS} needs positions")
        if len(self.positions) > POSITIONS_MAX:
            raise BadRequest("too many positions", positions=len(self.positions), positions_max=POSITIONS_MAX)

    def points(self, bundle: Bundle, topics: Iterable[TopicName]) -> tuple[int, ...]:
        """Return the hashes at which parts of the bundle begin, ascending; empty: it is not split.

        `topics`: of the namespace. Raises BadRequest if the range is too small.
        """
        if bundle.upper - bundle.lower <= 1:
            raise BadRequest("the bundle has one hash only and cannot be split", bundle=bundle.name)
        if self.algorithm == BY_RANGE:
            return (bundle.lower + (bundle.upper - bundle.lower) // 2,)
        hashes = sorted(topic.bundle_position for topic in topics if bundle.contains(topic))
        if len(hashes) <= 1:
            return ()
        if self.algorithm == BY_POSITIONS:
            return tuple(sorted({one for one in self.positions if bundle.lower < one < bundle.upper}))
        before, after = hashes[max(len(hashes) // 2 - 1, 0)], hashes[len(hashes) // 2]
        point = before + (after - before) // 2
        return (point,) if bundle.lower < point < bundle.upper else ()


def largest(bundles: Sequence[Bundle], topics: Iterable[TopicName]) -> Bundle | None:
    """Return the bundle with the most topics, the first one of several; None: the namespace has no topics."""
    boundaries = (*(bundle.lower for bundle in bundles), bundles[-1].upper)
    counts = Counter(Bundle.of(topic, boundaries) for topic in topics)
    return max(bundles, key=lambda bundle: counts[bundle]) if counts else None
