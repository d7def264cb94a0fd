"""Compare, adopt and retire the identity of a stopped bookie's disks (`bindery bookie cookie`).

An identity is the cookie of `membership.identity`: one copy in ZooKeeper and one VERSION file in each directory. The
expected cookie follows from the bookie's settings and the cluster's INSTANCEID.

Adopting can be interrupted at any point: it writes the limbo markers first, then the VERSION files, then the cookie in
ZooKeeper. A bookie that starts in between refuses, and a second adoption completes the first.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BinderyError, Conflict, NoSuchLedger, NoSuchNode
from bindery_core.formats.cookie import FILE_NAME, Cookie, Difference, differences, parse
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import ABSENT, Intent, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import refuse_if_suspected
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned

from bindery_bookie.membership.identity import (
    Claim,
    absolute,
    cluster_options,
    instance_id_of,
    read_version,
    shards_without_data,
    write_version,
)
from bindery_bookie.offline.places import Place, bookie_of, running_pid
from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_bookie.storage.io.disk import RealDisk

IN_ZOOKEEPER: Final = "ZooKeeper"
"""Name of the place that is the cookie's znode."""
LEDGERS_SHOWN_MAX: Final = 20
"""Maximum number of ledger ids in the error of a refused retirement."""
_CONCURRENT_READS_MAX: Final = 50
"""Maximum number of metadata reads in flight while all ledgers are searched."""


class CannotAdopt(Conflict):
    """The directories must not be assigned to this bookie; nothing was written."""

    code = "cannot_adopt"


class CannotRetire(Conflict):
    """The cookie must not be removed; nothing was removed."""

    code = "cannot_retire"


@dataclass(frozen=True, slots=True)
class FoundCookie:
    """The content of one place: a cookie, an unreadable text, or nothing."""

    where: str
    cookie: Cookie | None
    problem: str = ""
    """Why the text is not a cookie; empty if there is no text."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The expected cookie, and the cookie found in each place."""

    claim: Claim
    expected: Cookie
    found: dict[str, FoundCookie]
    """Cookies by place: each configured directory, and IN_ZOOKEEPER."""
    zookeeper_version: int | None
    """Version of the cookie's znode; None if there is none."""

    def differences(self) -> dict[str, list[Difference]]:
        """Return the differences by place, only for places that differ. A missing or unreadable cookie differs."""
        wrong = {}
        for name, found in self.found.items():
            if found.cookie is None:
                wrong[name] = [Difference("cookie", "(as above)", found.problem or "(none)")]
            elif problems := differences(self.expected, absolute(found.cookie)):
                wrong[name] = problems
        return wrong


@dataclass(frozen=True, slots=True)
class Adoption:
    """The result of `DiskIdentity.adopt`."""

    comparison: Comparison
    plan: tuple[str, ...]
    """The steps, one sentence each; empty if every cookie is as expected."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """The result of `DiskIdentity.retire`."""

    bookie_id: BookieId
    had_cookie: bool
    ledgers_count: int
    """Number of ledgers whose metadata still names the bookie."""
    wiped: tuple[str, ...]
    """Directories whose VERSION file was removed."""
    cleared_intent: Intent | None
    """The operator's intent that was cleared; None: there was none, or it was kept."""


class DiskIdentity:
    """The identity of one bookie, in one cluster. `clock_ms`: wall clock, milliseconds since 1970."""

    def __init__(
        self,
        settings: BookieSettings,
        store: MetadataStore,
        layout: LedgersLayout,
        ledgers: LedgerManager,
        *,
        clock_ms: Callable[[], int],
    ) -> None:
        """Raises BadRequest if the settings give no bookie id."""
        self._store = store
        self._layout = layout
        self._ledgers = ledgers
        self._cookies = CookieStore(store, layout)
        self._clock_ms = clock_ms
        self._disk = RealDisk()
        self._claim = Claim(
            bookie_id=settings.resolved_bookie_id(port=settings.port),
            journal_dirs=settings.journal_dirs,
            ledger_dirs=settings.ledger_dirs,
            cluster_options=cluster_options(zookeeper=settings.zookeeper, ledgers_root=settings.ledgers_root),
        )

    async def compare(self) -> Comparison:
        """Compare the cookies of all places with the expected one. Raises WrongIdentity if there is no cluster."""
        in_zookeeper = await self._cookies.read(self._claim.bookie_id)
        return self._comparison(await instance_id_of(self._cookies), in_zookeeper)

    def _comparison(self, instance_id: str, in_zookeeper: Versioned[bytes] | None) -> Comparison:
        found = {IN_ZOOKEEPER: _found(IN_ZOOKEEPER, None if in_zookeeper is None else in_zookeeper.value)}
        for directory in self._claim.directories:
            found[directory] = _found(f"{directory}/current/{FILE_NAME}", read_version(self._disk, directory))
        return Comparison(
            self._claim,
            self._claim.cookie(instance_id),
            found,
            zookeeper_version=None if in_zookeeper is None else in_zookeeper.version,
        )

    async def adopt(self, *, apply: bool) -> Adoption:
        """Assign the directories to this bookie. Without `apply`, only return the plan.

        Raises CannotAdopt; nothing was written then.
        """
        comparison = await self.compare()
        await self._refuse_running(CannotAdopt)
        _refuse_other_shards(comparison)
        limbo = self._uncertain_shards(comparison)
        plan = [f"shard {shard} goes into limbo: {reason}" for shard, reason in limbo.items()]
        wrong = comparison.differences()
        plan += [
            f"write {directory}/current/{FILE_NAME}" for directory in self._claim.directories if directory in wrong
        ]
        if IN_ZOOKEEPER in wrong:
            plan.append(f"write the cookie of {self._claim.bookie_id} in ZooKeeper")
        if plan and apply:
            await self._adopt(comparison, limbo)
        return Adoption(comparison, tuple(plan))

    async def _adopt(self, comparison: Comparison, limbo: Mapping[int, str]) -> None:
        for shard, reason in limbo.items():
            write_marker(self._disk, self._claim.places_of(shard)[1], reason, self._clock_ms())
        text = comparison.expected.text()
        wrong = comparison.differences()
        for directory in self._claim.directories:
            if directory in wrong:
                write_version(self._disk, directory, text)
        if IN_ZOOKEEPER in wrong:
            await self._cookies.write(self._claim.bookie_id, text, version=comparison.zookeeper_version)

    def _uncertain_shards(self, comparison: Comparison) -> dict[int, str]:
        """Return the shards whose directories may miss entries that this bookie acknowledged, with the reason."""
        expected = comparison.expected
        reasons: dict[int, str] = {}
        known = comparison.found[IN_ZOOKEEPER].cookie
        empty = shards_without_data(self._disk, self._claim)
        for shard in range(self._claim.shards_count):
            if known is None:
                reasons[shard] = "adopted; ZooKeeper had no cookie of this bookie"
            elif (known.bookie_id, known.instance_id) != (expected.bookie_id, expected.instance_id):
                reasons[shard] = "adopted; the cookie in ZooKeeper named another bookie or cluster"
            for directory in dict.fromkeys(self._claim.directories_of(shard)):
                cookie = comparison.found[directory].cookie
                if cookie is None:
                    reasons[shard] = f"adopted {directory}, which had no readable cookie"
                elif cookie.bookie_id != expected.bookie_id:
                    reasons[shard] = f"adopted {directory}, which belonged to {cookie.bookie_id}"
            if shard in empty:
                reasons.setdefault(shard, f"adopted; no data in {', '.join(empty[shard])}")
        return reasons

    async def retire(self, *, wipe_version: bool, force: bool) -> Retirement:
        """Remove the cookie in ZooKeeper. Raises CannotRetire, MetadataRollbackSuspected; nothing was removed then.

        `wipe_version`: also remove the VERSION files. `force`: even if ledgers still name the bookie, or the metadata
        may lack some that do.
        """
        bookie_id = self._claim.bookie_id
        await self._refuse_running(CannotRetire, files=wipe_version)
        if not force:
            await refuse_if_suspected(self._store, self._layout, f"the cookie of {bookie_id} is not removed")
        named = await self._ledgers_that_name(bookie_id)
        if named and not force:
            shown = ", ".join(map(str, named[:LEDGERS_SHOWN_MAX])) + (", ..." if len(named) > LEDGERS_SHOWN_MAX else "")
            raise CannotRetire(
                f"{len(named)} ledgers still name {bookie_id}: {shown}\n"
                "Re-replicate or delete them first; to remove the cookie nevertheless, pass --force --yes"
            )
        found = await self._cookies.read(bookie_id)
        if found is not None:
            await self._cookies.delete(bookie_id, version=found.version)
        return Retirement(
            bookie_id,
            had_cookie=found is not None,
            ledgers_count=len(named),
            cleared_intent=None if named else await self._clear_intent(bookie_id),
            wiped=tuple(directory for directory in self._claim.directories if wipe_version and self._wipe(directory)),
        )

    async def _clear_intent(self, bookie_id: BookieId) -> Intent | None:
        """Clear and return the operator's intent, for example a drain.

        A removal is kept, so that a bookie with the old disks does not start.
        """
        memberships = MembershipStore(self._store, clock_ms=self._clock_ms)
        membership = await memberships.get(bookie_id)
        if membership.version == ABSENT or membership.intent is Intent.REMOVED:
            return None
        await memberships.clear(bookie_id)
        return membership.intent

    async def _ledgers_that_name(self, bookie_id: BookieId) -> list[LedgerId]:
        """Return the ledgers whose metadata names the bookie, ascending. Reads the metadata of all ledgers."""
        named: list[LedgerId] = []
        batch: list[LedgerId] = []

        async def names_bookie(ledger_id: LedgerId) -> bool:
            try:
                metadata = (await self._ledgers.read(ledger_id)).value
            except NoSuchLedger:
                return False  # deleted since it was listed
            return any(bookie_id in segment.ensemble for segment in metadata.segments)

        async def read_batch() -> None:
            answers = await asyncio.gather(*map(names_bookie, batch))
            named.extend(ledger_id for ledger_id, is_named in zip(batch, answers, strict=True) if is_named)
            batch.clear()

        async for ledger_id in self._ledgers.list():
            batch.append(ledger_id)
            if len(batch) == _CONCURRENT_READS_MAX:
                await read_batch()
        await read_batch()
        return named

    def _wipe(self, directory: str) -> bool:
        current = f"{directory}/current"
        if FILE_NAME not in self._disk.list_names(current):
            return False
        self._disk.remove(f"{current}/{FILE_NAME}")
        self._disk.sync_directory(current)
        return True

    async def _refuse_running(self, refusal: type[Conflict], *, files: bool = True) -> None:
        """Raise `refusal` if the bookie is registered or, with `files`, if a bookie runs on these directories."""
        bookie_id = self._claim.bookie_id
        for read_only in (False, True):
            try:
                await self._store.get(self._layout.bookie(bookie_id, read_only=read_only))
            except NoSuchNode:
                continue
            raise refusal(
                f"{bookie_id} is registered: stop it first (its registration ends with its ZooKeeper session)"
            )
        for shard in range(self._claim.shards_count if files else 0):
            place = self._claim.places_of(shard)[1]
            pid = running_pid(Place(place, None, has_journal=False, has_ledgers=True))
            if pid is not None:
                raise refusal(f"{bookie_of(pid)} runs on {place}: stop it first")


def _refuse_other_shards(comparison: Comparison) -> None:
    """Raise CannotAdopt for what limbo cannot repair: entries of another cluster, or other positions of the shards."""
    expected = comparison.expected
    for place in comparison.found.values():
        if place.cookie is None:
            continue
        found = absolute(place.cookie)
        if found.instance_id != expected.instance_id and place.where != IN_ZOOKEEPER:
            raise CannotAdopt(
                f"{place.where} is of another cluster (instance id {found.instance_id}, not {expected.instance_id}): "
                "the bookie would serve its entries as entries of this cluster. Pass the --zookeeper of that cluster, "
                "or empty the directory"
            )
        for name, wanted, there in (
            ("journal", expected.journal_dirs, found.journal_dirs),
            ("ledger", expected.ledger_dirs, found.ledger_dirs),
        ):
            if len(wanted) != len(there) or (wanted != there and set(wanted) == set(there)):
                raise CannotAdopt(
                    f"{place.where} names {len(there)} {name} directories in this order: {', '.join(there)}; the "
                    f"settings name {', '.join(wanted)}. Number and order of the directories determine where a ledger "
                    "is stored: use those of the cookie"
                )


def _found(where: str, text: bytes | None) -> FoundCookie:
    if text is None:
        return FoundCookie(where, None)
    try:
        return FoundCookie(where, parse(text))
    except BinderyError as error:
        return FoundCookie(where, None, str(error))
