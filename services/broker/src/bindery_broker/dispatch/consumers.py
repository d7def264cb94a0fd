"""Consumers as dispatchers see them: an identity, never a name.

Two consumers may have the same name (Pulsar allows that for connections); an HTTP consumer is found by its name in
`sessions`, which gives the same object for all its calls.
"""

from typing import TYPE_CHECKING

from bindery_broker.dispatch.key_ranges import KeyRange

if TYPE_CHECKING:
    from bindery_broker.dispatch.leases import Grant


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
        self.grants: dict[int, "Grant"] = {}
        """Its grants that hold a message, by serial, oldest first."""

    def __repr__(self) -> str:
        return f"Consumer({self.name!r})"
