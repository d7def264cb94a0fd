"""What is said about a bookie's membership: joining, in maintenance, draining, removed. No node: active.

    first start --> JOINING --registered, serving--> (active)
    (active) --drain--> DRAINING --finished--> REMOVED          --cancel--> (active)
    (active) --orderly stop--> MAINTENANCE --serving again, or until_ms has passed--> (active)

JSON in `/bindery/membership/<bookie id>`. A maintenance ends by the clock without anybody writing: ask `effective`.
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
TEXT_SIZE_MAX: Final = 1_000
"""Characters of `reason` and `by` that are kept."""
ABSENT: Final = -1
"""As a version: nothing is said about the bookie, so it is active."""

_log = logging.getLogger(__name__)


class Intent(StrEnum):
    ACTIVE = "active"
    JOINING = "joining"
    """Its first start has begun, and it does not serve yet."""
    MAINTENANCE = "maintenance"
    """Away for a while: not lost until `until_ms`."""
    DRAINING = "draining"
    """Its ledgers move away; it takes no new ones."""
    REMOVED = "removed"
    """For good: whatever it may still hold does not count."""


@dataclass(frozen=True, slots=True)
class Membership:
    bookie_id: BookieId
    intent: Intent = Intent.ACTIVE
    since_ms: int = 0
    """When this intent began, ms since 1970."""
    until_ms: int | None = None
    """End of a maintenance; None: no end."""
    reason: str = ""
    by: str = ""
    drain: Mapping[str, int] = field(default_factory=dict)
    """Sizes when draining began: ledgers_total, bytes_total."""
    version: int = ABSENT

    def effective(self, now_ms: int) -> Intent:
        """The intent that counts now: a maintenance that has run out is none."""
        if self.intent is Intent.MAINTENANCE and self.until_ms is not None and now_ms >= self.until_ms:
            return Intent.ACTIVE
        return self.intent


MembershipListener = Callable[[Membership], None]
"""Gets the present membership, and again after each change. Called in the loop."""


class MembershipStore:
    """Memberships, each change a compare-and-set. Owns its watches, not the store."""

    def __init__(self, store: MetadataStore, *, clock_ms: WallClock, layout: BinderyLayout | None = None) -> None:
        self._store = store
        self._clock_ms = clock_ms
        self._layout = layout or BinderyLayout()
        self._followers = Followers()

    async def get(self, bookie_id: BookieId, *, watch: Watch | None = None) -> Membership:
        """ACTIVE with version ABSENT when nothing is said. Raises Corrupt, MetadataUnavailable."""
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
        """Every bookie about which something is said; one whose node cannot be read is logged and left out.

        `watch` is called, once or a few times, when any of it or the list may have changed. Raises MetadataUnavailable.
        """
        found: dict[BookieId, Membership] = {}
        for name in await self._names(watch):
            try:
                membership = await self.get(validate_bookie_id(name), watch=watch)
            except BadRequest:
                continue  # no bookie's
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
        """Say it, and return what stands now. The same intent again keeps `since_ms`, and `drain` unless given.

        `version`: as it was read (ABSENT: nothing was said), else VersionConflict; None: whatever stands there, even
        what cannot be read. Raises MetadataUnavailable, MetadataOutcomeUnknown (and it could not be found out).
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
                return current  # what was lost had arrived
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
        """Say nothing about the bookie any more: it is active. Harmless when nothing is said."""
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
        """Call `listener` with the present membership and after each change. The result stops it.

        Changes in quick succession may be seen as one. Outages and session losses are ridden out; what cannot be read
        is logged and not told.
        """
        told: Membership | None = None

        async def look(watch: Watch) -> None:
            nonlocal told
            current = await self.get(bookie_id, watch=watch)
            if current != told:
                told = current
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
