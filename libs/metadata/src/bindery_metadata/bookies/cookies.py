"""Cookies and the instance id in the metadata store, which tie a bookie's disks to one cluster.

Format: `bindery_core.formats.cookie`.
"""

from bindery_core.errors import AlreadyExists, BadRequest, MetadataOutcomeUnknown, NoSuchNode
from bindery_core.ids import BookieId, validate_bookie_id

from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned


class CookieStore:
    """Reads and changes cookies as bytes. Each change is a compare-and-set."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout) -> None:
        self._store = store
        self._layout = layout

    async def instance_id(self) -> str:
        """Return the cluster's id. Raises NoSuchNode if the cluster was never initialized."""
        try:
            node = await self._store.get(self._layout.instance_id)
        except NoSuchNode:
            raise NoSuchNode("the cluster is not initialized", path=self._layout.instance_id) from None
        return node.data.decode("ascii", "replace")

    async def read(self, bookie_id: BookieId) -> Versioned[bytes] | None:
        """Return the cookie of a bookie, or None if the bookie has none."""
        try:
            node = await self._store.get(self._layout.cookie(bookie_id))
        except NoSuchNode:
            return None
        return Versioned(node.data, node.stat.version, node.stat.ctime_ms)

    async def write(self, bookie_id: BookieId, text: bytes, *, version: int | None) -> Versioned[bytes]:
        """Store the cookie of a bookie and return it with its new version.

        `version=None` creates the cookie and raises AlreadyExists if the bookie has one. Otherwise the cookie is
        replaced if it has this version; else VersionConflict or NoSuchNode is raised.
        A lost response is resolved by reading again: if the same text is stored, this write or an equal one succeeded.
        """
        path = self._layout.cookie(bookie_id)
        written_version = 0 if version is None else version + 1
        try:
            if version is None:
                await self._store.create(path, text, make_parents=True)
            else:
                await self._store.set(path, text, version=version)
        except AlreadyExists:
            raise AlreadyExists("the bookie already has a cookie", bookie_id=bookie_id) from None
        except MetadataOutcomeUnknown:
            await self._store.sync(path)
            found = await self.read(bookie_id)
            if found is None or found.value != text or found.version != written_version:
                raise
        return Versioned(text, written_version)

    async def delete(self, bookie_id: BookieId, *, version: int) -> None:
        """Delete the cookie of a bookie. Raises VersionConflict, NoSuchNode."""
        await self._store.delete(self._layout.cookie(bookie_id), version=version)

    async def bookies(self) -> list[BookieId]:
        """Return the bookies that have a cookie, sorted. These are the known bookies of the cluster."""
        try:
            names = await self._store.children(self._layout.cookies)
        except NoSuchNode:
            return []
        known = []
        for name in names:
            try:
                known.append(validate_bookie_id(name))
            except BadRequest:
                continue  # not the name of a bookie
        return known
