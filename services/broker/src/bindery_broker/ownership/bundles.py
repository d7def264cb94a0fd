"""Map topics to namespace bundles. A bundle is a hash range of a namespace; one broker owns all topics in it.

The hash of a topic is the CRC32 of its full name, one of 2^32 values. Boundaries divide them into bundles: each begins
at one boundary and ends before the next one, except that the last bundle includes 0xffffffff. A namespace that sets
none has four:

| bundle                   | hashes                          |
|--------------------------|---------------------------------|
| `0x00000000_0x40000000`  | 0x00000000 to 0x3fffffff        |
| `0x40000000_0x80000000`  | 0x40000000 to 0x7fffffff        |
| `0x80000000_0xc0000000`  | 0x80000000 to 0xbfffffff        |
| `0xc0000000_0xffffffff`  | 0xc0000000 to 0xffffffff        |

`divisions` reads the boundaries of a namespace, which brokers change when they split a bundle.
Source: Pulsar NamespaceBundles, NamespaceBundleFactory, BundlesData; defaultNumberOfNamespaceBundles.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from bindery_core.errors import Corrupt
from bindery_metadata.cluster import BUNDLE_BOUNDARIES
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

from bindery_broker.namespaces.records import HASH_MAX

Boundaries = tuple[int, ...]
"""Ascending; the first is 0, the last HASH_MAX."""
BOUNDARIES_DEFAULT: Final[Boundaries] = tuple(int(text, 16) for text in BUNDLE_BOUNDARIES)
"""Of a namespace that sets none."""


class Bundle(NamedTuple):
    tenant: str
    namespace: str
    lower: int
    """First hash."""
    upper: int
    """Hash after the last one; HASH_MAX is included."""

    @classmethod
    def of(cls, topic: TopicName, boundaries: Boundaries = BOUNDARIES_DEFAULT) -> "Bundle":
        index = min(bisect_right(boundaries, topic.bundle_position), len(boundaries) - 1)
        return cls(topic.tenant, topic.namespace, boundaries[index - 1], boundaries[index])

    def contains(self, topic: TopicName) -> bool:
        if (topic.tenant, topic.namespace) != (self.tenant, self.namespace):
            return False
        return self.lower <= topic.bundle_position < self.upper + (self.upper == HASH_MAX)

    def parts(self, points: Sequence[int]) -> "list[Bundle]":
        """Return the bundles into which this one is split at `points`, which ascend and lie between its ends."""
        return [self._replace(lower=lower, upper=upper) for lower, upper in pairwise((self.lower, *points, self.upper))]

    @property
    def name(self) -> str:
        return znode_layout.bundle_name(lower=self.lower, upper=self.upper)

    @property
    def owner_path(self) -> str:
        return znode_layout.bundle_owner(tenant=self.tenant, namespace=self.namespace, bundle=self.name)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}/{self.name}"


def bundles_of(tenant: str, namespace: str, boundaries: Boundaries = BOUNDARIES_DEFAULT) -> list[Bundle]:
    """Return the bundles of a namespace, ascending."""
    return [Bundle(tenant, namespace, lower, upper) for lower, upper in pairwise(boundaries)]


def bundle_named(bundles: Iterable[Bundle], name: str) -> Bundle | None:
    """Return the bundle of this name, such as `0x40000000_0x80000000`; None: there is none."""
    return next((bundle for bundle in bundles if bundle.name == name), None)


def parse_boundaries(bundles: Any, *, path: str) -> Boundaries | None:
    """Return the boundaries in Pulsar's BundlesData; None if it has none. `path`: for the error.

    A number of bundles without boundaries stands for that many equal ones. Raises Corrupt.
    """
    if bundles is None:
        return None
    texts = bundles.get("boundaries") if isinstance(bundles, dict) else None
    count = bundles.get("numBundles") if isinstance(bundles, dict) else None
    if isinstance(texts, Sequence) and not isinstance(texts, str) and texts:
        try:
            found = tuple(int(text, 16) for text in texts)
        except (TypeError, ValueError) as error:
            raise Corrupt("the boundaries of bundles are no numbers", path=path) from error
        if len(found) < 2 or found[0] != 0 or found[-1] != HASH_MAX or any(a >= b for a, b in pairwise(found)):
            raise Corrupt("the boundaries of bundles do not divide all hashes", path=path)
        return found
    if isinstance(count, int) and 0 < count <= HASH_MAX:
        return (*(index * ((HASH_MAX + 1) // count) for index in range(count)), HASH_MAX)
    raise Corrupt("the bundles of the namespace cannot be read", path=path)
