"""Initialising a cluster, and telling whether that was done."""

from dataclasses import dataclass

from bindery_metadata.layout import LedgersLayout
from bindery_metadata.ledger_manager import RandomBits
from bindery_metadata.store import MetadataStore


@dataclass(frozen=True, slots=True)
class ClusterInit:
    instance_id: str
    created: tuple[str, ...]
    """Paths made by this call."""
    found: tuple[str, ...]
    """Paths that stood already."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    initialized: bool
    instance_id: str | None
    writable: tuple[str, ...]
    read_only: tuple[str, ...]
    known: tuple[str, ...]
    """Bookies with a cookie."""


async def initialize_cluster(store: MetadataStore, layout: LedgersLayout, *, randomness: RandomBits) -> ClusterInit:
    """Make what is missing of a new cluster; doing it again, or at the same time twice, is harmless."""
    raise NotImplementedError


async def cluster_status(store: MetadataStore, layout: LedgersLayout) -> ClusterStatus:
    raise NotImplementedError
