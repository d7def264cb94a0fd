"""The intended state of a bookie: joining, in maintenance, draining or removed. A bookie without a node is active.

    first start --> JOINING --registered, serving--> (active)
    (active) --drain--> DRAINING --finished--> REMOVED
                        DRAINING --cancel--> (active)
    (active) --orderly stop--> MAINTENANCE --serving again, or until_ms has passed--> (active)

The state is stored as JSON in `/bindery/membership/<bookie id>`. A maintenance ends at its time `until_ms` without a
write, so callers use `Membership.effective`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.ids import BookieId, validate_bookie_id
from bindery_core.sources import WallClock

from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.stores import json_node
from bindery_metadata.stores.followers import Followers
from bindery_metadata.stores.store import MetadataStore, Watch

ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
TEXT_SIZE_MAX: Final = 1_000
"""Maximum number of characters of `reason` and of `by`."""
ABSENT: Final = -1
"""Version of a membership without a node. The bookie is active."""

_log = logging.getLogger(__name__)


class Intent(StrEnum):
    ACTIVE = "active"
    JOINING = "joining"
    """The bookie has been started for the first time and does not serve yet."""
    MAINTENANCE = "maintenance"
    """The bookie is temporarily stopped and does not count as lost until `until_ms`."""
    DRAINING = "draining"
    """The ledgers of the bookie are moved to other bookies, and it accepts no new ledgers."""
    REMOVED = "removed"
    """The bookie is removed permanently. Data that it still holds does not count as a replica."""


@dataclass(frozen=True, slots=True)
class Membership:
    bookie_id: BookieId
    intent: Intent = Intent.ACTIVE
    since_ms: int = 0
    """Start of this intent in ms since 1970."""
    until_ms: int | None = None
    """End of a maintenance in ms since 1970; None: no end."""
    reason: str = ""
    by: str = ""
    """Name of the operator or process that set the intent."""
    drain: Mapping[str, int] = field(default_factory=dict)
    """Sizes at the start of draining: ledgers_total, bytes_total."""
    version: int = ABSENT

    def effective(self, now_ms: int) -> Intent:
        """Return the intent at `now_ms`: ACTIVE instead of a maintenance that has ended."""
        if self.intent is Intent.MAINTENANCE and self.until_ms is not None and now_ms >= self.until_ms:
            return Intent.ACTIVE
        return self.intent


MembershipListener = Callable[[Membership], None]
"""Called in the event loop with the current membership, and again after each change."""


class MembershipStore:
    """Reads and changes memberships. Each change is a compare-and-set. Owns its watches, not the store."""

    def __init__(self, store: MetadataStore, *, clock_ms: WallClock, layout: BinderyLayout | None = None) -> None:
        self._store = store
        self._clock_ms = clock_ms
        self._layout = layout or BinderyLayout()
        self._followers = Followers()

    async def get(self, bookie_id: BookieId, *, watch: Watch | None = None) -> Membership:
        """Return the membership of a bookie: ACTIVE with version ABSENT if it has no node.

        Raises Corrupt, MetadataUnavailable.
        """
        path = self._layout.membership(bookie_id)
        while True:
            try:
                node = await self._store.get(path, watch=watch)
            except NoSuchNode:
                if watch is None or await self._store.exists(path, watch=watch) is None:
                    return Membership(bookie_id)
                continue
            return json_node.decode(node.data, Membership, path=path, bookie_id=bookie_id, version=node.stat.version)

    async def all(self, *, watch: Watch | None = None) -> dict[BookieId, Membership]:
        """Return the membership of every bookie that has a node; an unreadable node is logged and left out.

        `watch` is called, once or a few times, when a node or the list may have changed. Raises MetadataUnavailable.
        """
        found: dict[BookieId, Membership] = {}
        for name in await self._names(watch):
            try:
                membership = await self.get(validate_bookie_id(name), watch=watch)
            except BadRequest:
                continue  # not a bookie id
            except Corrupt as error:
                _log.error("membership_unreadable", extra={"bookie_id": name, "error": str(error)})
                continue
            if membership.version != ABSENT:
                found[membership.bookie_id] = membership
        return found

    async def set(
        self,
        bookie_id: BookieId,
        intent: Intent,
        *,
        until_ms: int | None = None,
        reason: str = "",
        by: str = "",
        drain: Mapping[str, int] | None = None,
        version: int | None = None,
    ) -> Membership:
        """Store an intent and return the stored membership.

        If the bookie already has this intent, `since_ms` is kept, and also `drain` if the argument is None.
        `version`: the expected version (ABSENT: no node), otherwise VersionConflict is raised; None: any version, and
        an unreadable node is overwritten.
        Raises MetadataUnavailable, MetadataOutcomeUnknown (the outcome could not be determined).
        """
        lost: MetadataOutcomeUnknown | None = None
        for _ in range(ATTEMPTS_MAX):
            current = await self._current(bookie_id)
            is_same = current.intent is intent and current.version != ABSENT
            wanted = Membership(
                bookie_id,
                intent,
                since_ms=current.since_ms if is_same else self._clock_ms(),
                until_ms=until_ms,
                reason=reason[:TEXT_SIZE_MAX],
                by=by[:TEXT_SIZE_MAX],
                drain=dict(drain if drain is not None else current.drain if is_same else {}),
                version=current.version,
            )
            if lost and wanted == current:
                return current  # the write whose response was lost was applied
            if version is not None and version != current.version:
                raise VersionConflict(
                    "the bookie's membership has changed", bookie_id=bookie_id, expected=version, found=current.version
                )
            try:
                return await self._write(wanted)
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
            except MetadataOutcomeUnknown as error:
                lost = error
                await self._settle(bookie_id, error)
        raise MetadataUnavailable("the membership keeps changing", bookie_id=bookie_id, attempts=ATTEMPTS_MAX)

    async def clear(self, bookie_id: BookieId) -> None:
        """Delete the node, so that the bookie is active. Does nothing if there is no node."""
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._store.delete(self._layout.membership(bookie_id), version=None)
                return
            except NoSuchNode:
                return
            except MetadataOutcomeUnknown as error:
                await self._settle(bookie_id, error)
        raise MetadataUnavailable("the responses were lost", bookie_id=bookie_id, attempts=ATTEMPTS_MAX)

    def watch(self, bookie_id: BookieId, listener: MembershipListener) -> Callable[[], None]:
        """Call `listener` with the current membership and after each change. Return a function that ends the watch.

        Changes in quick succession may be reported as one. The watch continues after outages and session losses. An
        unreadable node is logged and not reported.
        """
        reported: Membership | None = None

        async def look(watch: Watch) -> None:
            nonlocal reported
            current = await self.get(bookie_id, watch=watch)
            if current != reported:
                reported = current
                try:
                    listener(current)
                except Exception:
                    _log.exception("membership_listener_failed")

        return self._followers.follow("membership", look, bookie_id=bookie_id)

    async def close(self) -> None:
        """End all watches. The store stays open."""
        await self._followers.close()

    async def _names(self, watch: Watch | None) -> list[str]:
        path = self._layout.memberships
        while True:
            try:
                return await self._store.children(path, watch=watch)
            except NoSuchNode:
                if watch is None or await self._store.exists(path, watch=watch) is None:
                    return []

    async def _current(self, bookie_id: BookieId) -> Membership:
        try:
            return await self.get(bookie_id)
        except Corrupt as error:
            stat = await self._store.exists(self._layout.membership(bookie_id))
            _log.warning("membership_overwritten", extra={"bookie_id": bookie_id, "error": str(error)})
            return Membership(bookie_id, version=stat.version if stat else ABSENT)

    async def _write(self, wanted: Membership) -> Membership:
        path = self._layout.membership(wanted.bookie_id)
        data = json_node.encode(wanted, leave_out=("bookie_id", "version"))
        if wanted.version == ABSENT:
            await self._store.create(path, data, make_parents=True)
            return json_node.with_version(wanted, 0)
        stat = await self._store.set(path, data, version=wanted.version)
        return json_node.with_version(wanted, stat.version)

    async def _settle(self, bookie_id: BookieId, lost: MetadataOutcomeUnknown) -> None:
        try:
            await self._store.sync(self._layout.membership(bookie_id))
        except MetadataUnavailable as error:
            raise lost from error
