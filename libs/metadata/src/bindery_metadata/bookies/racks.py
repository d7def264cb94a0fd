"""The racks of bookies: Pulsar's record in `/bookies`, which brokers of Bindery and of Pulsar share.

The record is a JSON object: group -> bookie -> {"rack": "/zone-a", "hostname": "..."}. A bookie is named by its id, or
by its address `host:port`. A change keeps everything that it is not about, also members that are unknown here.

| rack in the record        | means                                                                                  |
|---------------------------|----------------------------------------------------------------------------------------|
| `/zone-a`, `zone-a`       | `/zone-a`                                                                              |
| empty, `/`, null, missing | unknown: DEFAULT_RACK                                                                  |

A record that cannot be read is refused as a whole: a client keeps the last good one, and a change fails.

Groups are Pulsar's isolation groups. Placement ignores them; new entries are in the group DEFAULT_GROUP, and a bookie
that has an entry in another group stays there. Source: Pulsar 4.x, BookiesRackConfiguration and
BookieRackAffinityMapping.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    Conflict,
    Corrupt,
    MetadataOutcomeUnknown,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.ids import BookieId, validate_bookie_id
from bindery_core.placement.placement import DEFAULT_RACK
from bindery_pulsar.znode_layout import RACKS

from bindery_metadata.stores.followers import Followers
from bindery_metadata.stores.store import MetadataStore, Watch

DEFAULT_GROUP: Final = "default"
"""Group of bookies that belong to no isolation group. Source: the default of `pulsar-admin bookies set-bookie-rack`."""
SIZE_MAX: Final = 1_000_000
"""Maximum number of bytes of a record that is read or written: about 8,000 bookies."""
RACK_SIZE_MAX: Final = 255
"""Maximum number of characters of a rack."""
ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""

_PART = re.compile(r"(/[A-Za-z0-9._:@-]+){1,2}")
_log = logging.getLogger(__name__)

Info = Mapping[str, Any]
"""What the record says about one bookie."""
Groups = Mapping[str, Mapping[str, Info]]
"""Group -> bookie -> its info."""


def parse_rack(text: str) -> str:
    """Return a rack as the record has it: `/zone-a`, or two levels, `/region/zone-a`. Raises BadRequest."""
    rack = text.strip()
    rack = rack if rack.startswith("/") else f"/{rack}"
    if len(rack) > RACK_SIZE_MAX or not _PART.fullmatch(rack):
        raise BadRequest(
            "not a rack: use one or two levels of letters, digits and . _ : @ -, as in /zone-a or /region/zone-a",
            given=text[:300],
        )
    return rack


class RackRecord:
    """One version of the record. Never changed in place."""

    def __init__(self, groups: Groups | None = None) -> None:
        self.groups: Final[Groups] = groups or {}

    @classmethod
    def decode(cls, data: bytes) -> "RackRecord":
        """Raises Corrupt. An empty node is an empty record: it exists because it is the parent of another node."""
        if not data:
            return cls()
        if len(data) > SIZE_MAX:
            raise Corrupt("the record of racks is too large", path=RACKS, size=len(data), size_max=SIZE_MAX)
        try:
            groups = msgspec.json.decode(data, type=dict[str, dict[str, dict[str, Any]]])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Corrupt("the record of racks cannot be read", path=RACKS, reason=str(error)[:200]) from error
        for bookies in groups.values():
            for name, info in bookies.items():
                if not isinstance(info.get("rack"), str | None):
                    raise Corrupt(
                        "the record of racks cannot be read: a rack is no text", path=RACKS, bookie=name[:300]
                    )
        return cls(groups)

    def encode(self) -> bytes:
        """Raises BadRequest if the record would be too large."""
        data = msgspec.json.encode(self.groups, order="deterministic")
        if len(data) > SIZE_MAX:
            raise BadRequest("the record of racks is full: remove entries of bookies that no longer exist")
        return data

    def info(self, bookie: str) -> Info | None:
        """Return what the record says about a bookie; None: nothing."""
        group = self.group(bookie)
        return None if group is None else self.groups[group][bookie]

    def group(self, bookie: str) -> str | None:
        """Return the first group, by name, that contains the bookie."""
        return next((group for group in sorted(self.groups) if bookie in self.groups[group]), None)

    def rack_of(self, bookie_id: str, *, address: str = "") -> str:
        """Return the rack of a bookie. `address`: its `host:port`, under which the record may name it."""
        info = self.info(bookie_id)
        if info is None and address:
            info = self.info(address)
        rack = str((info or {}).get("rack") or "").strip()
        if rack in ("", "/"):
            return DEFAULT_RACK
        return rack if rack.startswith("/") else f"/{rack}"

    def with_bookie(self, bookie: str, *, group: str | None = None, **members: Any) -> "RackRecord":
        """Set `members` of the info of a bookie. `group`: moves it there; None: it stays, or goes to DEFAULT_GROUP."""
        info = {**(self.info(bookie) or {}), **members}
        group = group or self.group(bookie) or DEFAULT_GROUP
        groups = _copied(self.without(bookie).groups)
        groups.setdefault(group, {})[bookie] = info
        return RackRecord(groups)

    def without(self, bookie: str) -> "RackRecord":
        """Remove a bookie from all groups. A group that becomes empty is removed, as by Pulsar."""
        groups = _copied(self.groups)
        for group in [group for group, bookies in groups.items() if bookie in bookies]:
            del groups[group][bookie]
            if not groups[group]:
                del groups[group]
        return RackRecord(groups)


class RackStore:
    """Reads and changes the record. Does not own the store."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store

    async def get(self, *, watch: Watch | None = None) -> RackRecord:
        """Return the record; an empty one if there is none. Raises Corrupt, MetadataUnavailable."""
        return (await self._read(watch))[0]

    async def set_rack(
        self, bookie_id: BookieId, rack: str, *, hostname: str | None = None, group: str | None = None
    ) -> bool:
        """Set the rack of one bookie. Return whether the record was changed.

        Raises BadRequest for a rack that is none, and the errors of `update`.
        """
        members = {"rack": parse_rack(rack)} | ({} if hostname is None else {"hostname": hostname})
        name = validate_bookie_id(bookie_id)
        return await self.update(lambda record: record.with_bookie(name, group=group, **members))

    async def unset_rack(self, bookie_id: BookieId) -> bool:
        """Remove one bookie from the record. Return whether it was there. Raises the errors of `update`."""
        return await self.update(lambda record: record.without(bookie_id))

    async def update(self, change: Callable[[RackRecord], RackRecord]) -> bool:
        """Change the record by compare-and-set. Return whether it was changed by this call.

        Raises Corrupt (nothing is written), Conflict if others keep changing it, MetadataUnavailable.
        """
        was_tried = False
        for _ in range(ATTEMPTS_MAX):
            record, version = await self._read(None)
            changed = change(record)
            if changed.groups == record.groups:
                return was_tried
            try:
                if version is None:
                    await self._store.create(RACKS, changed.encode())
                else:
                    await self._store.set(RACKS, changed.encode(), version=version)
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
            except MetadataOutcomeUnknown:
                was_tried = True
                await self._store.sync(RACKS)
                continue
            return True
        raise Conflict("other processes keep changing the record of racks; try again", path=RACKS)

    async def _read(self, watch: Watch | None) -> tuple[RackRecord, int | None]:
        """Return the record and its version; None: there is no node."""
        while True:
            try:
                node = await self._store.get(RACKS, watch=watch)
            except NoSuchNode:
                if watch is None or await self._store.exists(RACKS, watch=watch) is None:
                    return RackRecord(), None
                continue
            return RackRecord.decode(node.data), node.stat.version


class RackFollower:
    """The newest good record, kept up to date. It is read without waiting."""

    def __init__(self, store: MetadataStore) -> None:
        self._racks = RackStore(store)
        self._followers = Followers()
        self.record = RackRecord()

    async def start(self) -> None:
        """Read the record and follow it. A record that cannot be read is logged. Returns after the first attempt."""
        tried = asyncio.Event()

        async def look(watch: Watch) -> None:
            try:
                record = await self._racks.get(watch=watch)
                if record.groups != self.record.groups:
                    self.record = record
                    _log.info("racks_changed", extra={"path": RACKS, "bookies": sum(map(len, record.groups.values()))})
            finally:
                tried.set()

        self._followers.follow("racks", look, path=RACKS, consequence="the last good record stays in use")
        await tried.wait()

    def rack_of(self, bookie_id: BookieId, *, address: str = "") -> str:
        """Return the rack of a bookie, DEFAULT_RACK if it is unknown. `address`: its `host:port`."""
        return self.record.rack_of(bookie_id, address=address)

    async def close(self) -> None:
        """Stop following. Idempotent."""
        await self._followers.close()


def _copied(groups: Groups) -> dict[str, dict[str, Info]]:
    return {group: dict(bookies) for group, bookies in groups.items()}
