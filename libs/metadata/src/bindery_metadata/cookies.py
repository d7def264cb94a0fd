"""Cookies and the instance id: what ties a bookie's disks to one cluster."""

from bindery_core.ids import BookieId

from bindery_metadata.layout import LedgersLayout
from bindery_metadata.store import MetadataStore
from bindery_metadata.versioned import Versioned


class CookieStore:
    """Cookie texts as bytes; `bindery_core.cookie` reads and writes them."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout) -> None: ...

    async def instance_id(self) -> str:
        """The cluster's id. Raises NoSuchNode when the cluster was never initialised."""
        raise NotImplementedError

    async def read(self, bookie_id: BookieId) -> Versioned[bytes] | None:
        """None: the bookie has no cookie."""
        raise NotImplementedError

    async def write(self, bookie_id: BookieId, text: bytes, *, version: int | None) -> Versioned[bytes]:
        """`version=None`: it must not exist yet (AlreadyExists); else compare-and-set."""
        raise NotImplementedError

    async def delete(self, bookie_id: BookieId, *, version: int) -> None:
        raise NotImplementedError

    async def bookies(self) -> list[BookieId]:
        """Every bookie with a cookie, sorted: the known bookies of the cluster."""
        raise NotImplementedError
