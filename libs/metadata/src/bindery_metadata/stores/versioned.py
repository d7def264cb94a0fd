"""A value with the version that its compare-and-set needs."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    value: T
    version: int
    """Data version of the znode that held `value`."""
    created_ms: int = 0
    """The znode's creation time by ZooKeeper's clock, ms since 1970. Never written back into the data."""
