"""Marks of under-replicated ledgers, the locks on them, and the switches of automatic recovery: BookKeeper's znodes.

A mark requests a check of its ledger and names the bookies whose replicas are missing. Its lock is an ephemeral node.
The holder of the lock may repair the ledger. Only the holder deletes the mark, and only at the version that the mark
had when it was locked, so a ledger that is marked again during its repair stays marked.

    (no mark) --mark--> free --lock--> locked --mark_replicated--> (no mark)
                                          `--release, end of session--> free

The content of a mark is only a hint for operators: an unreadable mark (`Mark.problem`) is listed, locked and deleted
like any other.
Source: BookKeeper's ZkLedgerUnderreplicationManager.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.formats import replication_formats as formats
from bindery_core.ids import LedgerId
from bindery_core.sources import RandomBits, WallClock

from bindery_metadata.coordination.election import Guard
from bindery_metadata.layout.layout import CheckKind, LedgersLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores.ephemerals import delete_own
from bindery_metadata.stores.parents import make_path, prune_empty_parents
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Node, Op, Set, Stat, Watch

__all__ = ["CheckKind", "Guard", "HeldMark", "Mark", "UnderreplicationManager", "has_marks"]

ATTEMPTS_MAX: Final = 50
"""Maximum consecutive conflicts and lost responses that one call resolves itself."""
READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent reads of marks and directories."""
LEVELS: Final = 4
"""Number of directories above a mark."""
POLL_S: Final = 5.0
"""Maximum time in seconds of one `wait_for_marks`. Callers then find changes that no watch reports."""
WATCHED_DIRECTORIES_MAX: Final = 256
"""Maximum number of directories with a watch."""
WATCHED_LOCKS_MAX: Final = 64
"""Maximum number of locks of other sessions with a watch."""
SEARCH_READS_MAX: Final = 1_000
"""Maximum number of directories that `has_marks` reads."""
DELAY_S_MAX: Final = 2**31 - 1
"""Maximum lost-bookie delay in seconds."""

_GROUP = re.compile(r"[0-9a-f]{4}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark as read from the store."""

    ledger_id: LedgerId
    replicas: tuple[str, ...]
    """Ids of the bookies with missing replicas, as in ledger metadata; empty: not recorded."""
    ctime_ms: int | None
    """Time of the last mark by its writer's clock, ms since 1970."""
    version: int
    problem: str = ""
    """Reason why the content of the mark is unreadable; `replicas` is then empty. Empty: readable."""


@dataclass(frozen=True, slots=True)
class HeldMark:
    """A mark whose lock this process holds. Valid until the lock is released or the session ends."""

    mark: Mark
    lock_path: str
    session_id: int


class UnderreplicationManager:
    """Reads and changes marks, locks and switches. Owns its watches, not the store.

    Only one manager per session may take locks: if a lock belongs to the session but the manager does not hold it, the
    manager assumes that one of its own earlier calls created it.
    """

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        randomness: RandomBits,
        clock_ms: WallClock,
        worker_name: str = "",
    ) -> None:
        self._store = store
        self._layout = layout
        self._randomness = randomness
        self._clock_ms = clock_ms
        self._lock_text = formats.encode_lock(worker_name)
        self._held: dict[LedgerId, int] = {}
        """Session id by ledger whose lock is held; 0 while the lock is being taken."""
        self._marks_changed = asyncio.Event()
        self._watching = False
        self._watched_locks: set[str] = set()
        """Paths of locks that kept `take` from a mark, and have a watch."""
        self._lock_ended = False
        """Whether one of them ended since the last `wait_for_marks`."""

    async def prepare(self) -> None:
        """Create the missing nodes of the tree and check its layout.

        Raises BadVersion for an unsupported LAYOUT, MetadataUnavailable.
        """
        for path, data in (
            (self._layout.underreplication_layout, formats.encode_layout()),
            (self._layout.underreplication_ledgers, b""),
            (self._layout.underreplication_locks, b""),
        ):
            await self._create_missing(path, data)
        formats.check_layout((await self._store.get(self._layout.underreplication_layout)).data)

    # --- marks ----------------------------------------------------------------------------------------------------

    async def mark(self, ledger_id: LedgerId, replicas: Collection[str] = (), *, guard: Guard | None = None) -> bool:
        """Mark the ledger, merging `replicas` into an existing mark. Return False if the mark already had all of them.

        A locked mark is rewritten in any case, so that its version changes: the repair in progress may have checked the
        ledger before this damage and must then not delete the mark.
        Raises NotLeader, MetadataUnavailable, MetadataOutcomeUnknown (the outcome could not be determined).
        """
        path = self._layout.mark(ledger_id)
        wanted = tuple(dict.fromkeys(replicas))
        lost: MetadataOutcomeUnknown | None = None
        for _ in range(ATTEMPTS_MAX):
            try:
                mark = await self.get(ledger_id)
                if mark is None:
                    await self._create_mark(path, formats.encode_mark(wanted, self._clock_ms()), guard)
                    return True
                new = [replica for replica in wanted if replica not in mark.replicas]
                if new or mark.problem:
                    data = formats.encode_mark((*mark.replicas, *new), self._clock_ms())
                elif lost:
                    return True  # by the write whose response was lost, or an equal one
                elif await self._store.exists(self._layout.mark_lock(ledger_id)) is not None:
                    data = formats.encode_mark(mark.replicas, mark.ctime_ms)
                else:
                    found = await self.get(ledger_id)
                    if found is not None and found.version == mark.version:
                        return False
                    continue  # a repair ended before the lock was read, and may have deleted the mark
                await self._write([Set(path, data, mark.version)], guard)
                return bool(new) or bool(mark.problem)
            except (AlreadyExists, VersionConflict, NoSuchNode):
                continue  # the ledger was marked or repaired meanwhile
            except MetadataOutcomeUnknown as error:
                lost = error
                await self._settle(path, error)
        raise MetadataUnavailable("the mark keeps changing", ledger_id=ledger_id, attempts=ATTEMPTS_MAX)

    async def get(self, ledger_id: LedgerId) -> Mark | None:
        """Return the mark of a ledger, or None if the ledger is not marked."""
        try:
            return _mark(ledger_id, await self._store.get(self._layout.mark(ledger_id)))
        except NoSuchNode:
            return None

    async def list(self) -> AsyncIterator[Mark]:
        """Yield every mark, ascending by ledger id. An error of the store is raised.

        Marks created or deleted meanwhile may or may not be included.
        """
        async for ledger_ids in self._marked():
            for start in range(0, len(ledger_ids), READS_IN_FLIGHT):
                for mark in await asyncio.gather(*map(self.get, ledger_ids[start : start + READS_IN_FLIGHT])):
                    if mark is not None:
                        yield mark

    async def _create_mark(self, path: str, data: bytes, guard: Guard | None) -> None:
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._write([Create(path, data)], guard)
                return
            except NoSuchNode:
                await make_path(self._store, parent_of(path))
        raise MetadataUnavailable("the parents of a mark are deleted repeatedly", path=path)

    # --- locks ----------------------------------------------------------------------------------------------------

    async def lock(self, ledger_id: LedgerId) -> HeldMark | None:
        """Take the lock of a marked ledger. Return None if the ledger is not marked or is locked, also by this manager.

        Raises MetadataUnavailable, MetadataOutcomeUnknown (the lock may then exist; locking again adopts it).
        """
        if ledger_id in self._held and self._held[ledger_id] in (0, self._store.session_id):
            return None
        self._held[ledger_id] = 0
        held: HeldMark | None = None
        try:
            held = await self._take_lock(ledger_id)
        finally:
            if held is None:
                self._held.pop(ledger_id, None)
            else:
                self._held[ledger_id] = held.session_id
        return held

    async def take(self, *, skip: Callable[[LedgerId], bool] = lambda _: False) -> HeldMark | None:
        """Take the lock of a free mark that `skip` does not exclude. None: no such mark, or recovery is disabled.

        The tree is searched in random order, so that workers seldom try the same mark. Locked and excluded marks are
        not read. If only locked marks are left, the end of a lock ends the next `wait_for_marks`: its holder may have
        died.
        """
        if not await self.is_enabled():
            return None
        try:
            locked = set(await self._store.children(self._layout.underreplication_locks))
        except NoSuchNode:
            locked = set()

        kept_from: list[str] = []

        def is_wanted(ledger_id: LedgerId) -> bool:
            if skip(ledger_id):
                return False
            lock_path = self._layout.mark_lock(ledger_id)
            if lock_path.rsplit("/", 1)[1] not in locked:
                return True
            kept_from.append(lock_path)
            return False

        paths = [(self._layout.underreplication_ledgers, 0)]
        while paths:
            path, depth = paths.pop()
            names = sorted(await self._children(path), key=lambda _: self._randomness.getrandbits(64))
            if depth < LEVELS:
                below = [f"{path}/{name}" for name in names if _GROUP.fullmatch(name)]
                if depth == LEVELS - 1:  # such a directory holds the mark of one ledger, whose id is in the path
                    below = [each for each in below if is_wanted(_ledger_id_of(each))]
                paths += [(each, depth + 1) for each in below]
                continue
            for name in names:
                ledger_id = self._ledger_id(f"{path}/{name}")
                if ledger_id is not None and is_wanted(ledger_id):
                    held = await self.lock(ledger_id)
                    if held is not None:
                        return held
        await self._watch_locks(kept_from)
        return None

    async def release(self, held: HeldMark) -> None:
        """Release the lock. A lock of another session is left unchanged.

        Raises MetadataUnavailable. The lock may then exist until the session ends or `lock` adopts it.
        """
        self._forget(held)
        await delete_own(self._store, held.lock_path, held.session_id)

    async def mark_replicated(self, held: HeldMark) -> bool:
        """Delete the mark and its lock in one transaction. Return True if the mark is deleted.

        False: the ledger was marked again (the mark remains, the lock is released), or the lock was lost (nothing is
        done). Raises MetadataUnavailable, MetadataOutcomeUnknown. The lock may then exist until the session ends.
        """
        ledger_id = held.mark.ledger_id
        path = self._layout.mark(ledger_id)
        self._forget(held)
        removal: Sequence[Op] = [Delete(path, held.mark.version)]
        try:
            if not await delete_own(self._store, held.lock_path, held.session_id, together_with=removal):
                return False
        except VersionConflict:
            await delete_own(self._store, held.lock_path, held.session_id)
            return False
        except NoSuchNode:  # an operator deleted the mark
            await delete_own(self._store, held.lock_path, held.session_id)
        except MetadataOutcomeUnknown as lost:  # the lock no longer exists
            await self._settle(path, lost)
            if await self._store.exists(path) is not None:
                return False
        try:
            await prune_empty_parents(self._store, path, up_to=self._layout.underreplication_ledgers)
        except BinderyError as error:  # empty directories are harmless
            _log.info("mark_parents_left", extra={"ledger_id": ledger_id, "error": str(error)})
        return True

    async def locks(self) -> dict[LedgerId, str]:
        """Return the holder of each lock by ledger. An empty holder is not recorded or unreadable."""
        found: dict[LedgerId, str] = {}
        root = self._layout.underreplication_locks
        for name in await self._children(root):
            ledger_id = self._layout.mark_ledger_id(name)
            if ledger_id is None:
                continue
            with contextlib.suppress(NoSuchNode):
                node = await self._store.get(f"{root}/{name}")
                try:
                    found[ledger_id] = formats.decode_lock(node.data)
                except Corrupt:
                    found[ledger_id] = ""
        return dict(sorted(found.items()))

    async def _take_lock(self, ledger_id: LedgerId) -> HeldMark | None:
        path = self._layout.mark_lock(ledger_id)
        try:
            await self._store.create(path, self._lock_text, ephemeral=True, make_parents=True)
        except AlreadyExists:
            pass  # possibly created by an earlier call that could not determine the outcome
        except MetadataOutcomeUnknown as error:
            await self._settle(path, error)
        stat = await self._store.exists(path)
        if stat is None or stat.ephemeral_owner != self._store.session_id:
            return None
        mark = await self.get(ledger_id)  # read under the lock: the repair applies to this version
        if mark is None:
            await delete_own(self._store, path, stat.ephemeral_owner)
            return None
        return HeldMark(mark, path, stat.ephemeral_owner)

    def _forget(self, held: HeldMark) -> None:
        if self._held.get(held.mark.ledger_id) == held.session_id:
            del self._held[held.mark.ledger_id]

    # --- waiting --------------------------------------------------------------------------------------------------

    async def wait_for_marks(self, timeout_s: float = POLL_S) -> bool:
        """Wait until a mark is created or deleted, or was since the last call, for at most min(timeout_s, POLL_S).

        The end of a lock that kept `take` from the last marks counts as a change, and so does the creation of the first
        watches, and of those after a failure of the store. Return False if no change was noticed. The caller must read
        the marks in both cases. Errors of the store are not raised.
        """
        has_changed = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, POLL_S)):
                if self._watching and not self._lock_ended:
                    await self._marks_changed.wait()
                has_changed = self._watching or self._lock_ended
                self._lock_ended = False
                await self._watch_marks()  # before the caller reads, so that no change is missed
                has_changed = True
        return has_changed

    async def _watch_locks(self, paths: Sequence[str]) -> None:
        """Watch locks of other sessions, WATCHED_LOCKS_MAX at a time."""
        for path in paths:
            if len(self._watched_locks) >= WATCHED_LOCKS_MAX:
                return
            if path in self._watched_locks:
                continue

            def ended(path: str = path) -> None:
                self._watched_locks.discard(path)
                self._lock_ended = True
                self._marks_changed.set()

            self._watched_locks.add(path)
            try:
                stat = await self._store.exists(path, watch=ended)
            except BinderyError:
                self._watched_locks.discard(path)
                raise
            if stat is None:
                ended()

    async def _watch_marks(self) -> None:
        """Watch the directories above the lowest level. A directory of the lowest level exists only with its mark."""
        self._watching = False
        while True:
            self._marks_changed.clear()
            try:
                level = [self._layout.underreplication_ledgers]
                budget = WATCHED_DIRECTORIES_MAX
                for _ in range(LEVELS):
                    below: list[str] = []
                    for path in level[:budget]:
                        names = await self._children(path, watch=self._marks_changed.set)
                        below += [f"{path}/{name}" for name in names if _GROUP.fullmatch(name)]
                    budget -= len(level)
                    level = below
                    if budget <= 0:
                        break
                self._watching = True
                return
            except BinderyError as error:
                _log.info("marks_not_watched", extra={"error": str(error)})
                await asyncio.sleep(min(1.0, POLL_S))

    # --- switches -------------------------------------------------------------------------------------------------

    async def is_enabled(self, *, watch: Watch | None = None) -> bool:
        """Return whether automatic recovery may search for lost bookies and repair ledgers."""
        return await self._store.exists(self._layout.replication_disabled, watch=watch) is None

    async def enable(self) -> None:
        """Enable automatic recovery. Raises NoSuchNode if it is enabled already."""
        path = self._layout.replication_disabled
        lost = False
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._store.delete(path, version=None)
                return
            except NoSuchNode:
                if lost:
                    return
                raise NoSuchNode("automatic recovery is enabled already", path=path) from None
            except MetadataOutcomeUnknown as error:
                lost = True
                await self._settle(path, error)
        raise MetadataUnavailable("the responses were lost", path=path, attempts=ATTEMPTS_MAX)

    async def disable(self) -> None:
        """Disable automatic recovery. Raises AlreadyExists if it is disabled already."""
        if not await self._create_missing(self._layout.replication_disabled, b""):
            raise AlreadyExists("automatic recovery is disabled already", path=self._layout.replication_disabled)

    async def lost_bookie_delay_s(self, *, watch: Watch | None = None) -> int | None:
        """Return the time in seconds that a bookie may be unavailable before its ledgers are marked; None: not set.

        Raises Corrupt.
        """
        node = await self._get(self._layout.lost_bookie_delay, watch=watch)
        if node is None:
            return None
        text = node.data.strip()
        if not (text.isdigit() and len(text) <= 10 and int(text) <= DELAY_S_MAX):
            raise Corrupt("not a number of seconds", path=self._layout.lost_bookie_delay, found=text[:40])
        return int(text)

    async def set_lost_bookie_delay_s(self, seconds: int, *, guard: Guard | None = None) -> None:
        """Store the lost-bookie delay in seconds. Storing the same value again requests an audit at once.

        Raises BadRequest, NotLeader.
        """
        if not 0 <= seconds <= DELAY_S_MAX:
            raise BadRequest("not a delay in seconds", seconds=seconds, seconds_max=DELAY_S_MAX)
        await self._put(self._layout.lost_bookie_delay, str(seconds).encode("ascii"), guard)

    async def check_time_ms(self, kind: CheckKind) -> int | None:
        """Return the time when this check last finished, in ms since 1970; None: never. Raises Corrupt."""
        node = await self._get(self._layout.check_time(kind))
        return formats.decode_check_time(node.data) if node else None

    async def set_check_time_ms(self, kind: CheckKind, at_ms: int, *, guard: Guard | None = None) -> None:
        """Store the time when this check last finished, in ms since 1970."""
        await self._put(self._layout.check_time(kind), formats.encode_check_time(at_ms), guard)

    # --- helpers --------------------------------------------------------------------------------------------------

    async def _marked(self) -> AsyncIterator[Sequence[LedgerId]]:
        """Yield the ids of all marks, ascending, in batches."""
        async for directory in self._directories(self._layout.underreplication_ledgers, LEVELS - 1):
            names = [name for name in await self._children(directory) if _GROUP.fullmatch(name)]
            for start in range(0, len(names), READS_IN_FLIGHT):
                lowest = [f"{directory}/{name}" for name in names[start : start + READS_IN_FLIGHT]]
                leaves = await asyncio.gather(*map(self._children, lowest))
                found = (
                    self._ledger_id(f"{path}/{leaf}")
                    for path, all_ in zip(lowest, leaves, strict=True)
                    for leaf in all_
                )
                yield [ledger_id for ledger_id in found if ledger_id is not None]

    async def _directories(self, path: str, levels: int) -> AsyncIterator[str]:
        """Yield the directories `levels` levels below `path`, ascending."""
        if levels == 0:
            yield path
            return
        for name in await self._children(path):
            if _GROUP.fullmatch(name):
                async for directory in self._directories(f"{path}/{name}", levels - 1):
                    yield directory

    def _ledger_id(self, path: str) -> LedgerId | None:
        """Return the ledger id of the mark at `path`; None: not the path of a mark."""
        ledger_id = self._layout.mark_ledger_id(path)
        return ledger_id if ledger_id is not None and self._layout.mark(ledger_id) == path else None

    async def _children(self, path: str, *, watch: Watch | None = None) -> Sequence[str]:
        try:
            return await self._store.children(path, watch=watch)
        except NoSuchNode:
            if watch is not None:
                await self._store.exists(path, watch=watch)
            return []

    async def _get(self, path: str, *, watch: Watch | None = None) -> Node | None:
        while True:
            try:
                return await self._store.get(path, watch=watch)
            except NoSuchNode:
                if watch is None or await self._store.exists(path, watch=watch) is None:
                    return None

    async def _write(self, ops: Sequence[Op], guard: Guard | None) -> Sequence[str | Stat | None]:
        return await (guard.multi(ops) if guard else self._store.multi(ops))

    async def _put(self, path: str, data: bytes, guard: Guard | None) -> None:
        """Set the node at any version; writing again after a lost response is harmless."""
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._write([Set(path, data, None)], guard)
                return
            except NoSuchNode:
                await make_path(self._store, parent_of(path))
            except MetadataOutcomeUnknown as error:
                await self._settle(path, error)
                continue
            with contextlib.suppress(AlreadyExists, NoSuchNode, MetadataOutcomeUnknown):
                await self._write([Create(path, data)], guard)
                return
        raise MetadataUnavailable("the node cannot be written", path=path, attempts=ATTEMPTS_MAX)

    async def _create_missing(self, path: str, data: bytes) -> bool:
        """Create the node if it is missing. Return whether it was missing."""
        lost = False
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._store.create(path, data, make_parents=True)
                return True
            except AlreadyExists:
                return lost
            except MetadataOutcomeUnknown as error:
                lost = True
                await self._settle(path, error)
        raise MetadataUnavailable("the responses were lost", path=path, attempts=ATTEMPTS_MAX)

    async def _settle(self, path: str, lost: MetadataOutcomeUnknown) -> None:
        """Make sure that the next read shows the outcome of a write. Raise `lost` if that fails."""
        try:
            await self._store.sync(path)
        except MetadataUnavailable as error:
            raise lost from error


async def has_marks(store: MetadataStore, layout: LedgersLayout) -> bool:
    """Return whether any ledger is marked.

    Raises MetadataUnavailable, BinderyError if SEARCH_READS_MAX reads do not find the answer.
    """
    paths = [(layout.underreplication_ledgers, 0)]
    for _ in range(SEARCH_READS_MAX):
        if not paths:
            return False
        path, depth = paths.pop()
        try:
            names = await store.children(path)
        except NoSuchNode:
            continue
        if depth == LEVELS:
            if any(layout.mark_ledger_id(f"{path}/{name}") is not None for name in names):
                return True
        else:
            paths += [(f"{path}/{name}", depth + 1) for name in names if _GROUP.fullmatch(name)]
    raise BinderyError("too many empty directories of marks", reads=SEARCH_READS_MAX)


def _ledger_id_of(directory: str) -> LedgerId:
    """Return the ledger id of a directory of the lowest level. Its last LEVELS names are the id in hexadecimal."""
    return LedgerId(int("".join(directory.split("/")[-LEVELS:]), 16))


def _mark(ledger_id: LedgerId, node: Node) -> Mark:
    try:
        text = formats.decode_mark(node.data)
    except Corrupt as error:
        _log.warning("mark_unreadable", extra={"ledger_id": ledger_id, "error": str(error)})
        return Mark(ledger_id, (), None, node.stat.version, problem=str(error))
    return Mark(ledger_id, text.replicas, text.ctime_ms, node.stat.version)
