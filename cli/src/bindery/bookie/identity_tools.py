"""What `bindery bookie cookie` does: compares, adopts, retires.

Adopting is safe to cut short anywhere: limbo is written first, then the VERSION files, then the cookie in ZooKeeper; a
bookie started in between refuses, and adopting again finishes.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

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
from bindery_core.errors import BinderyError, Conflict, NoSuchLedger, NoSuchNode
from bindery_core.formats.cookie import FILE_NAME, Cookie, Difference, describe, differences, parse
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import ABSENT, Intent, MembershipStore
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned

from bindery.common.operator import now_ms

T = TypeVar("T")
IN_ZOOKEEPER: Final = "ZooKeeper"
_READS_AT_ONCE: Final = 50
LEDGERS_SHOWN_MAX: Final = 20
SILENT_S: Final = 1.0
"""How long ZooKeeper may take to answer before it is said what is waited for."""


class CannotAdopt(Conflict):
    code = "cannot_adopt"


class CannotRetire(Conflict):
    code = "cannot_retire"


@dataclass(frozen=True, slots=True)
class _Seen:
    """One cookie that was found, or not."""

    where: str
    text: bytes | None
    cookie: Cookie | None
    problem: str = ""
    """Why the text is no cookie."""


@dataclass(frozen=True, slots=True)
class _Survey:
    """Everything that is known of an identity."""

    claim: Claim
    expected: Cookie
    in_zookeeper: Versioned[bytes] | None
    seen: dict[str, _Seen]
    """By configured directory, and IN_ZOOKEEPER."""

    def differences(self) -> dict[str, list[Difference]]:
        """By place, those that differ; a missing or unreadable cookie is a difference too."""
        found = {}
        for name, seen in self.seen.items():
            if seen.cookie is None:
                found[name] = [Difference("cookie", "(as above)", seen.problem or "(none)")]
            elif problems := differences(self.expected, absolute(seen.cookie)):
                found[name] = problems
        return found

    def facts(self) -> dict[str, Any]:
        wrong = self.differences()
        return {
            "same": not wrong,
            "expected": _cookie_json(self.expected),
            "found": {
                seen.where: _cookie_json(seen.cookie) if seen.cookie else {"problem": seen.problem or "none"}
                for seen in self.seen.values()
            },
            "differences": {
                self.seen[name].where: [
                    {"field": each.field, "expected": each.expected, "found": each.found} for each in problems
                ]
                for name, problems in wrong.items()
            },
        }

    def lines(self) -> list[str]:
        lines = ["expected, by settings and cluster:"]
        lines += [f"  {name:<20} {value}" for name, value in _cookie_json(self.expected).items() if value is not None]
        wrong = self.differences()
        for name, seen in self.seen.items():
            if name not in wrong:
                lines.append(f"{seen.where}: the same")
            else:
                lines += [f"{seen.where}:", *(f"  {line}" for line in describe(wrong[name]).splitlines())]
        return lines


def run_show(settings: BookieSettings) -> tuple[dict[str, Any], list[str]]:
    """(facts, lines) of everything found."""

    async def run(store: MetadataStore, layout: LedgersLayout) -> _Survey:
        return await _survey(settings, CookieStore(store, layout))

    survey = _connected(settings, run)
    lines = survey.lines()
    if survey.differences():
        lines.append(f"to make these disks this bookie's: {survey.claim.command('adopt')}")
    return survey.facts(), lines


def run_adopt(settings: BookieSettings, *, yes: bool) -> tuple[dict[str, Any], list[str]]:
    """Raises CannotAdopt; nothing was written then."""

    async def run(store: MetadataStore, layout: LedgersLayout) -> tuple[dict[str, Any], list[str]]:
        cookies = CookieStore(store, layout)
        survey = await _survey(settings, cookies)
        await _refuse_running(store, layout, survey.claim, CannotAdopt)
        _refuse_other_shards(survey)
        limbo = _uncertain_shards(survey)
        plan = [f"shard {shard} goes into limbo: {reason}" for shard, reason in limbo.items()]
        wrong = survey.differences()
        plan += [
            f"write {directory}/current/{FILE_NAME}" for directory in survey.claim.directories if directory in wrong
        ]
        if IN_ZOOKEEPER in wrong:
            plan.append(f"write the cookie of {survey.claim.bookie_id} in ZooKeeper")
        if plan and yes:
            await _adopt(survey, cookies, limbo)
        facts = survey.facts() | {"plan": plan, "done": yes and bool(plan)}
        did = "done" if yes else "would be done"
        lines = [*survey.lines(), *(f"{did}: {step}" for step in plan)]
        return facts, lines if plan else [*lines, "nothing to do: these disks are this bookie's"]

    return _connected(settings, run)


def run_retire(settings: BookieSettings, *, wipe_version: bool, force: bool) -> tuple[dict[str, Any], list[str]]:
    """Raises CannotRetire; nothing was removed then."""

    async def run(store: MetadataStore, layout: LedgersLayout) -> tuple[dict[str, Any], list[str]]:
        claim = claim_of(settings)
        await _refuse_running(store, layout, claim, CannotRetire, files=wipe_version)
        named = await ledgers_of(store, layout, claim.bookie_id)
        if named and not force:
            shown = ", ".join(map(str, named[:LEDGERS_SHOWN_MAX])) + (", ..." if len(named) > LEDGERS_SHOWN_MAX else "")
            raise CannotRetire(
                f"{len(named)} ledgers still name {claim.bookie_id}: {shown}\n"
                "Have them re-replicated or deleted first; --force --yes removes the cookie all the same"
            )
        cookies = CookieStore(store, layout)
        found = await cookies.read(claim.bookie_id)
        if found is not None:
            await cookies.delete(claim.bookie_id, version=found.version)
        forgotten = None if named else await _forget_membership(store, claim.bookie_id)
        wiped = [directory for directory in claim.directories if wipe_version and _wipe(directory)]
        facts = {
            "bookie_id": claim.bookie_id, "removed": found is not None, "ledgers": len(named), "wiped": wiped,
            "forgotten_intent": forgotten,
        }  # fmt: skip
        lines = [f"{claim.bookie_id}: {'cookie removed' if found else 'it had no cookie'}"]
        if forgotten:
            lines.append(f"it was {forgotten}; that is forgotten: a later bookie of this name is an ordinary one")
        lines += [f"removed {directory}/current/{FILE_NAME}" for directory in wiped]
        if named:
            lines.append(f"{len(named)} ledgers still name it")
        return facts, lines

    return _connected(settings, run)


async def _forget_membership(store: MetadataStore, bookie_id: BookieId) -> str | None:
    """End what was meant with a bookie that is gone, and return it. A removal stays: it keeps old disks out."""
    memberships = MembershipStore(store, clock_ms=now_ms)
    membership = await memberships.get(bookie_id)
    if membership.version == ABSENT or membership.intent is Intent.REMOVED:
        return None
    await memberships.clear(bookie_id)
    return membership.intent.value


def claim_of(settings: BookieSettings) -> Claim:
    """What a bookie with these settings says it is. Raises BadRequest."""
    return Claim(
        bookie_id=settings.resolved_bookie_id(port=settings.port),
        journal_dirs=settings.journal_dirs,
        ledger_dirs=settings.ledger_dirs,
        cluster_options=cluster_options(zookeeper=settings.zookeeper, ledgers_root=settings.ledgers_root),
    )


async def ledgers_of(store: MetadataStore, layout: LedgersLayout, bookie_id: BookieId) -> list[LedgerId]:
    """Every ledger with a fragment on the bookie, ascending. Reads the metadata of all ledgers."""
    import random

    manager = LedgerManager(store, layout, randomness=random.SystemRandom())
    named: list[LedgerId] = []

    async def look(ledger_id: LedgerId) -> LedgerId | None:
        try:
            metadata = (await manager.read(ledger_id)).value
        except NoSuchLedger:
            return None  # deleted since it was listed
        is_named = any(bookie_id in segment.ensemble for segment in metadata.segments)
        return ledger_id if is_named else None

    async def look_at(ledger_ids: list[LedgerId]) -> None:
        named.extend(found for found in await asyncio.gather(*map(look, ledger_ids)) if found is not None)

    batch: list[LedgerId] = []
    async for ledger_id in manager.list():
        batch.append(ledger_id)
        if len(batch) == _READS_AT_ONCE:
            await look_at(batch)
            batch = []
    await look_at(batch)
    return named


# --- adopting


def _refuse_other_shards(survey: _Survey) -> None:
    """What no limbo can repair: entries of other ledgers, or ledgers that would be looked for in other directories."""
    expected = survey.expected
    for seen in survey.seen.values():
        if seen.cookie is None:
            continue
        found = absolute(seen.cookie)
        if found.instance_id != expected.instance_id and seen.where != IN_ZOOKEEPER:
            raise CannotAdopt(
                f"{seen.where} is of another cluster (instance id {found.instance_id}, not {expected.instance_id}): "
                "its entries would be taken for this cluster's. Name the right --zookeeper, or empty the directory"
            )
        for name, wanted, there in (
            ("journal", expected.journal_dirs, found.journal_dirs),
            ("ledger", expected.ledger_dirs, found.ledger_dirs),
        ):
            if len(wanted) != len(there) or (wanted != there and set(wanted) == set(there)):
                raise CannotAdopt(
                    f"{seen.where} names {len(there)} {name} directories in this order: {', '.join(there)}; the "
                    f"settings say {', '.join(wanted)}. Number and order decide where a ledger is: start with those"
                )


def _uncertain_shards(survey: _Survey) -> dict[int, str]:
    """Shards whose directories may lack what this bookie acknowledged, with the reason."""
    claim, expected = survey.claim, survey.expected
    reasons: dict[int, str] = {}
    known = survey.seen[IN_ZOOKEEPER].cookie
    empty = shards_without_data(RealDisk(), claim)
    for shard in range(claim.shards_count):
        if known is None:
            reasons[shard] = "adopted, but the cluster had no cookie of it"
        elif (known.bookie_id, known.instance_id) != (expected.bookie_id, expected.instance_id):
            reasons[shard] = "adopted, but the cluster's cookie was another one"
        for directory in dict.fromkeys(claim.directories_of(shard)):
            cookie = survey.seen[directory].cookie
            if cookie is None:
                reasons[shard] = f"adopted {directory}, of which is not known whose it was"
            elif cookie.bookie_id != expected.bookie_id:
                reasons[shard] = f"adopted {directory}, which was of {cookie.bookie_id}"
        if shard in empty:
            reasons.setdefault(shard, f"adopted with nothing in {', '.join(empty[shard])}")
    return reasons


async def _adopt(survey: _Survey, cookies: CookieStore, limbo: Mapping[int, str]) -> None:
    disk = RealDisk()
    claim = survey.claim
    for shard, reason in limbo.items():
        write_marker(disk, claim.places_of(shard)[1], reason, time.time_ns() // 1_000_000)
    text = survey.expected.text()
    wrong = survey.differences()
    for directory in claim.directories:
        if directory in wrong:
            write_version(disk, directory, text)
    if IN_ZOOKEEPER in wrong:
        version = None if survey.in_zookeeper is None else survey.in_zookeeper.version
        await cookies.write(claim.bookie_id, text, version=version)


def _wipe(directory: str) -> bool:
    disk = RealDisk()
    current = f"{directory}/current"
    if FILE_NAME not in disk.list_names(current):
        return False
    disk.remove(f"{current}/{FILE_NAME}")
    disk.sync_directory(current)
    return True


# --- finding out


async def _survey(settings: BookieSettings, cookies: CookieStore) -> _Survey:
    claim = claim_of(settings)
    expected = claim.cookie(await instance_id_of(cookies))
    in_zookeeper = await cookies.read(claim.bookie_id)
    disk = RealDisk()
    seen = {IN_ZOOKEEPER: _seen(IN_ZOOKEEPER, None if in_zookeeper is None else in_zookeeper.value)}
    for directory in claim.directories:
        seen[directory] = _seen(f"{directory}/current/{FILE_NAME}", read_version(disk, directory))
    return _Survey(claim, expected, in_zookeeper, seen)


def _seen(where: str, text: bytes | None) -> _Seen:
    if text is None:
        return _Seen(where, None, None)
    try:
        return _Seen(where, text, parse(text))
    except BinderyError as error:
        return _Seen(where, text, None, str(error))


async def _refuse_running(
    store: MetadataStore, layout: LedgersLayout, claim: Claim, refusal: type[Conflict], *, files: bool = True
) -> None:
    """Raise `refusal` while a bookie of that id is registered, or one runs on these directories."""
    for read_only in (False, True):
        try:
            await store.get(layout.bookie(claim.bookie_id, read_only=read_only))
        except NoSuchNode:
            continue
        raise refusal(
            f"{claim.bookie_id} is registered: stop it first (its registration ends with its ZooKeeper session)"
        )
    for shard in range(claim.shards_count if files else 0):
        place = claim.places_of(shard)[1]
        pid = running_pid(Place(place, None, has_journal=False, has_ledgers=True))
        if pid is not None:
            raise refusal(f"{bookie_of(pid)} runs on {place}: stop it first")


def _cookie_json(cookie: Cookie) -> dict[str, Any]:
    return {
        "bookie_id": cookie.bookie_id,
        "journal_dirs": ",".join(cookie.journal_dirs),
        "ledger_dirs": ",".join(cookie.ledger_dirs),
        "index_dirs": None if cookie.index_dirs is None else ",".join(cookie.index_dirs),
        "instance_id": cookie.instance_id,
    }


def _connected(settings: BookieSettings, run: Callable[[MetadataStore, LedgersLayout], Awaitable[T]]) -> T:
    async def main() -> T:
        store = await connect(settings)
        try:
            return await run(store, LedgersLayout(settings.ledgers_root))
        finally:
            await store.close()

    return asyncio.run(main())


async def connect(settings: BookieSettings) -> MetadataStore:
    """The cluster's metadata. Raises MetadataUnavailable."""
    from bindery_kit.observability import logs
    from bindery_metadata.stores.zookeeper import CONNECT_TIMEOUT_S, ZooKeeperStore

    logs.configure(service="cli", level="error")  # what is done is told as a result
    connecting = asyncio.ensure_future(ZooKeeperStore.connect(settings.zookeeper))
    try:
        found, _ = await asyncio.wait({connecting}, timeout=SILENT_S)
        if not found:
            told = f"waiting for ZooKeeper at {settings.zookeeper}, for up to {CONNECT_TIMEOUT_S:g} s (--zookeeper)"
            print(told, file=sys.stderr, flush=True)
        return await connecting
    finally:
        connecting.cancel()
