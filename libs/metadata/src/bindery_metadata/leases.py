"""Leases: ephemeral nodes that say who owns something while its session lives."""

from collections.abc import Callable
from dataclasses import dataclass

from bindery_metadata.store import MetadataStore


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    value: bytes
    session_id: int
    mine: bool


class Lease:
    """A held lease."""

    path: str

    @property
    def is_held(self) -> bool: ...

    def on_lost(self, listener: Callable[[], None]) -> Callable[[], None]:
        """`listener` is called once when the lease is no longer ours, not by release()."""
        raise NotImplementedError

    async def verify(self) -> bool:
        """Ask the store whether the node still carries our session."""
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError


class Leases:
    def __init__(self, store: MetadataStore) -> None: ...

    async def acquire(self, path: str, value: bytes) -> Lease | None:
        """The lease, or None when another session holds it (see `owner`). Parents are made."""
        raise NotImplementedError

    async def owner(self, path: str, *, on_change: Callable[[], None] | None = None) -> LeaseOwner | None:
        """Who holds it, None: nobody. `on_change` is called once when that may have changed."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop watching; nodes stay until released or the session ends."""
        raise NotImplementedError
