"""OwnMembership: apply what operators set for this bookie (`bindery_metadata.bookies.membership`).

| it finds    | at its start                                      | while it runs                              |
|-------------|---------------------------------------------------|--------------------------------------------|
| nothing     | nothing; at its very first, it says joining       | writable again, as far as membership goes  |
| joining     | once it is registered and serves, it ends that    | nothing                                    |
| maintenance | once it is registered and serves, it ends that    | nothing: it is about to be stopped         |
| draining    | registers read-only                               | turns read-only                            |
| removed     | refuses to start                                  | turns read-only                            |

Read-only, so that every client looks elsewhere for new ledgers, Apache's too; entries are served as ever, and adds of
high priority are still taken. Only the maintenance that stood at the start is ended: one that is said meanwhile is for
the next stop. What cannot be read changes nothing. Joining is for who looks: a bookie that stays so never got to serve.
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
_NOTE: Final = "membership"

log = get_logger(__name__)


class BookieRemoved(Conflict):
    """This bookie was taken out of the cluster; its entries are elsewhere."""

    code = "bookie_removed"


class OwnMembership:
    """Use: `check_start` before the storage is opened; `run` as a task once registered."""

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
        """`cluster_options`: the options that name the cluster, for the command in the refusal."""
        self._metadata = metadata
        self._bookie_id = bookie_id
        self._state = state
        self._health = health
        self._wall_clock_ms = wall_clock_ms
        self._cluster_options = cluster_options
        self._path = BinderyLayout().membership(bookie_id)
        self._passing_version: int | None = None
        """Of what ends once this bookie serves: the maintenance that stood at the start, or its joining."""

    async def check_start(self) -> None:
        """Raises BookieRemoved, MetadataUnavailable."""
        if await self._metadata.exists(self._path) is None:
            return  # as nearly always, and nothing more is imported
        try:
            membership = await (await self._store()).get(self._bookie_id)
        except Corrupt as error:
            log.error("membership_unreadable", **error_fields(error))
            return
        if membership.intent == "removed":
            command = f"bindery bookie drain {self._bookie_id} --cancel {self._cluster_options}".rstrip()
            raise BookieRemoved(
                f"this bookie was removed from the cluster{_said(membership)}, and others hold what it held: it does "
                f"not start. To take it back: `{command}`",
                bookie_id=self._bookie_id,
            )
        if membership.intent in ("maintenance", "joining"):
            self._passing_version = membership.version
        self.changed(membership)

    async def join(self) -> None:
        """Say that the first start has begun. It is not worth a start when that cannot be said."""
        try:
            store = await self._store()
            from bindery_metadata.bookies.membership import ABSENT, Intent  # `_store` has imported it in a thread

            membership = await store.set(self._bookie_id, Intent.JOINING, by=str(self._bookie_id), version=ABSENT)
            self._passing_version = membership.version
        except VersionConflict:
            pass  # something else was said about it already, and that counts
        except BinderyError as error:
            log.warning("joining_not_said", **error_fields(error))

    async def serves(self) -> None:
        """It is registered and serves: end what was to last until then. What cannot be ended now, `run` ends."""
        if self._passing_version is not None:
            try:
                await self._end(self._passing_version)
                self._passing_version = None
            except BinderyError as error:
                log.warning("membership_not_ended", **error_fields(error))

    async def run(self) -> None:
        """End the maintenance of this restart; then follow what is said, until cancelled."""
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
        """`membership` is what is said now."""
        intent = membership.effective(self._wall_clock_ms())
        shown = {"intent": str(intent), "sinceMs": membership.since_ms, "untilMs": membership.until_ms}
        self._state.membership = {**shown, "reason": membership.reason, "by": membership.by}
        said = _said(membership)
        self._state.set_read_only(
            READ_ONLY_DRAINING, f"draining: its ledgers move to others{said}" if intent == "draining" else None
        )
        self._state.set_read_only(READ_ONLY_REMOVED, f"removed from the cluster{said}" if intent == "removed" else None)
        self._health.note(_NOTE, None if intent == "active" else f"{intent}{said}")
        log.info("bookie_membership", intent=str(intent), by=membership.by, reason=membership.reason)

    async def _end(self, version: int) -> None:
        with contextlib.suppress(NoSuchNode, VersionConflict):  # ended, or said anew, by somebody else
            await self._metadata.delete(self._path, version=version)
            log.info("membership_ended")

    async def _store(self) -> "MembershipStore":
        store = await in_thread(import_membership_store)
        return store(self._metadata, clock_ms=self._wall_clock_ms)


def import_membership_store() -> "type[MembershipStore]":
    from bindery_metadata.bookies.membership import MembershipStore  # its parser takes long to import

    return MembershipStore


def _said(membership: "Membership") -> str:
    """` (by ann: reason)`."""
    words = ": ".join(word for word in (membership.by and f"by {membership.by}", membership.reason) if word)
    return f" ({words})" if words else ""
