"""Consumers as dispatchers see them: an identity, never a name.

Two consumers may have the same name (Pulsar allows that for connections); an HTTP consumer is found by its name in
`sessions`, which gives the same object for all its calls.
"""

from typing import Any, Generic, TypeVar

from bindery_broker.dispatch.key_ranges import KeyRange

P = TypeVar("P")
"""A portion. `portions` depends on this module."""


class Consumer:
    """A consumer of one subscription. `held` and `grants` are kept by the lease table."""

    __slots__ = ("grants", "held", "key_ranges", "name", "priority")

    def __init__(self, name: str, *, priority: int = 0, key_ranges: tuple[KeyRange, ...] = ()) -> None:
        """`priority`: 0 is served first. `key_ranges`: the ranges of key hashes that it declared (STICKY)."""
        self.name = name
        self.priority = priority
        self.key_ranges = key_ranges
        self.held = 0
        """Number of messages that the consumer holds."""
        self.grants: dict[int, Grant[Any]] = {}
        """Its grants that hold a message, by serial, oldest first."""

    def __repr__(self) -> str:
        return f"Consumer({self.name!r})"


class Grant(Generic[P]):
    """The portions of one delivery that are still held."""

    __slots__ = ("consumer", "deadline", "granted_at", "portions", "serial")

    def __init__(self, serial: int, consumer: Consumer, *, granted_at: float, deadline: float) -> None:
        self.serial = serial
        self.consumer = consumer
        self.granted_at = granted_at
        self.deadline = deadline
        self.portions: dict[P, None] = {}
