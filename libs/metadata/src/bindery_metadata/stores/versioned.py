"""A stored value with its version, which a compare-and-set of the value needs."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """A value as read from or written to a znode."""

    value: T
    version: int
    """Data version of the znode that held `value`."""
    created_ms: int = 0
    """Creation time of the znode by ZooKeeper's clock, in ms since 1970; 0: not read. Never stored in the data."""
