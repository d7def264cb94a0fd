"""Map topics to namespace bundles. A bundle is a hash range of a namespace; one broker owns all topics in it.

The hash of a topic is the CRC32 of its full name, one of 2^32 values. A namespace is divided into BUNDLE_COUNT equal
ranges; the last one includes 0xffffffff.

| bundle | name                     |
|-------:|--------------------------|
|      0 | `0x00000000_0x40000000`  |
|      1 | `0x40000000_0x80000000`  |
|      2 | `0x80000000_0xc0000000`  |
|      3 | `0xc0000000_0xffffffff`  |

BUNDLE_COUNT is a constant: if two brokers used different values, both could own the same topic and would fence each
other repeatedly.
Source: Pulsar NamespaceBundles, defaultNumberOfNamespaceBundles.
"""

from typing import Final, NamedTuple

from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName

BUNDLE_COUNT: Final = 4
"""Number of bundles in a namespace."""
RING_SIZE: Final = 2**32
"""Number of hash values."""
_WIDTH: Final = RING_SIZE // BUNDLE_COUNT

assert RING_SIZE % BUNDLE_COUNT == 0


class Bundle(NamedTuple):
    tenant: str
    namespace: str
    number: int
    """Index in the namespace, from 0 to BUNDLE_COUNT - 1."""

    @classmethod
    def of(cls, topic: TopicName) -> "Bundle":
        return cls(topic.tenant, topic.namespace, topic.bundle_position // _WIDTH)

    @property
    def name(self) -> str:
        lower = self.number * _WIDTH
        upper = lower + _WIDTH if self.number < BUNDLE_COUNT - 1 else RING_SIZE - 1
        return znode_layout.bundle_name(lower=lower, upper=upper)

    @property
    def owner_path(self) -> str:
        return znode_layout.bundle_owner(tenant=self.tenant, namespace=self.namespace, bundle=self.name)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.namespace}/{self.name}"


def bundles_of(tenant: str, namespace: str) -> list[Bundle]:
    """Return the bundles of a namespace, ascending."""
    return [Bundle(tenant, namespace, number) for number in range(BUNDLE_COUNT)]
