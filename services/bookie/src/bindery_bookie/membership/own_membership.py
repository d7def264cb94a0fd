"""OwnMembership: apply what operators set for this bookie (`bindery_metadata.bookies.membership`).

| membership  | at its start                                     | while it runs                           |
|-------------|--------------------------------------------------|-----------------------------------------|
| none        | at its first start, it sets joining              | removes read-only reasons of membership |
| joining     | cleared when the bookie is registered and serves | none                                    |
| maintenance | cleared when the bookie is registered and serves | none: it will be stopped                |
| draining    | registers read-only                              | turns read-only                         |
| removed     | refuses to start                                 | turns read-only                         |

A read-only bookie gets no new ledgers from any client, Apache's included; it serves entries, and accepts adds of high
priority. Only a maintenance that existed at the start is cleared, because a later one is for the next stop. Membership
that cannot be read has no effect. Joining informs operators: a bookie that keeps this state has never served.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bindery_core.errors import BinderyError, Conflict, Corrupt, NoSuchNode, VersionConflict
from bindery_core.ids import BookieId
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.stores.store import MetadataStore

from bindery_bookie.state import READ_ONLY_DRAINING, READ_ONLY_REMOVED, BookieState

if TYPE_CHECKING:
    from bindery_metadata.bookies.membership import Membership, MembershipStore

RETRY_S: Final = 1.0
"""Seconds between two attempts to clear the membership."""
_NOTE: Final = "membership"

log = get_logger(__name__)


class BookieRemoved(Conflict):
    """This bookie was removed from the cluster; other bookies have its entries."""

    code = "bookie_removed"


class OwnMembership:
    """Call `check_start` before the storage is opened, and `run` as a task once the bookie is registered."""

    def __init__(
        self,
        metadata: MetadataStore,
        bookie_id: BookieId,
        state: BookieState,
        health: Health,
        *,
        wall_clock_ms: Callable[[], int],
        cluster_options: str = "",
    ) -> None:
        """`cluster_options`: the options that name the cluster, for the command in the error."""
        self._metadata = metadata
        self._bookie_id = bookie_id
        self._state = state
        self._health = health
        self._wall_clock_ms = wall_clock_ms
        self._cluster_options = cluster_options
        self._path = BinderyLayout().membership(bookie_id)
        self._passing_version: int | None = None
        """Version of the maintenance or joining to clear when this bookie serves; None if there is none."""

    async def check_start(self) -> None:
        """Apply the membership at the start. Raises BookieRemoved, MetadataUnavailable."""
        if await self._metadata.exists(self._path) is None:
            return  # the usual case; it needs no further imports
        try:
            membership = await (await self._store()).get(self._bookie_id)
        except Corrupt as error:
            log.error("membership_unreadable", **error_fields(error))
            return
        if membership.intent == "removed":
            command = f"bindery bookie drain {self._bookie_id} --cancel {self._cluster_options}".rstrip()
            raise BookieRemoved(
                f"this bookie was removed from the cluster{_by(membership)}, and other bookies have its entries: it "
                f"does not start. To add it again: `{command}`",
                bookie_id=self._bookie_id,
            )
        if membership.intent in ("maintenance", "joining"):
            self._passing_version = membership.version
        self.changed(membership)

    async def join(self) -> None:
        """Set joining at the first start. A failure is only logged, because it must not fail the start."""
        try:
            store = await self._store()
            from bindery_metadata.bookies.membership import ABSENT, Intent  # `_store` has imported it in a thread

            membership = await store.set(self._bookie_id, Intent.JOINING, by=str(self._bookie_id), version=ABSENT)
            self._passing_version = membership.version
        except VersionConflict:
            pass  # an operator has set something else, which takes precedence
        except BinderyError as error:
            log.warning("joining_not_set", **error_fields(error))

    async def serves(self) -> None:
        """Clear joining or maintenance, as the bookie is registered and serves. `run` retries after a failure."""
        if self._passing_version is not None:
            try:
                await self._end(self._passing_version)
                self._passing_version = None
            except BinderyError as error:
                log.warning("membership_not_ended", **error_fields(error))

    async def run(self) -> None:
        """Clear the maintenance of this restart, then apply changes of the membership, until cancelled."""
        store = await self._store()
        stop = store.watch(self._bookie_id, self.changed)
        try:
            await self.serves()
            while self._passing_version is not None:
                await asyncio.sleep(RETRY_S)
                await self.serves()
            await asyncio.Event().wait()
        finally:
            stop()
            await store.close()

    def changed(self, membership: "Membership") -> None:
        """Apply the current `membership`."""
        intent = membership.effective(self._wall_clock_ms())
        shown = {"intent": str(intent), "sinceMs": membership.since_ms, "untilMs": membership.until_ms}
        self._state.membership = {**shown, "reason": membership.reason, "by": membership.by}
        by = _by(membership)
        self._state.set_read_only(
            READ_ONLY_DRAINING, f"draining: its ledgers move to other bookies{by}" if intent == "draining" else None
        )
        self._state.set_read_only(READ_ONLY_REMOVED, f"removed from the cluster{by}" if intent == "removed" else None)
        self._health.note(_NOTE, None if intent == "active" else f"{intent}{by}")
        log.info("bookie_membership", intent=str(intent), by=membership.by, reason=membership.reason)

    async def _end(self, version: int) -> None:
        with contextlib.suppress(NoSuchNode, VersionConflict):  # cleared or changed by another process
            await self._metadata.delete(self._path, version=version)
            log.info("membership_ended")

    async def _store(self) -> "MembershipStore":
        store = await in_thread(import_membership_store)
        return store(self._metadata, clock_ms=self._wall_clock_ms)


def import_membership_store() -> "type[MembershipStore]":
    from bindery_metadata.bookies.membership import MembershipStore  # its parser takes long to import

    return MembershipStore


def _by(membership: "Membership") -> str:
    """Return ` (by ann: reason)`, or an empty text."""
    words = ": ".join(word for word in (membership.by and f"by {membership.by}", membership.reason) if word)
    return f" ({words})" if words else ""
