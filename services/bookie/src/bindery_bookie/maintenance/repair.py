"""Repairer: refill the storage that this bookie lost from the other bookies, and replace damaged entries.

Steps for a ledger in limbo:
1. If its metadata is gone, which `is_gone` must confirm, the ledger was deleted, and it is deleted here too.
2. If it is not closed and this bookie is in its last ensemble, it is recovered through the ledger client. This bookie
   then answers UNKNOWN, which a recovery does not take as a denial, so the other bookies determine its last entry.
3. For every closed fragment that names this bookie, each entry that is missing here is read from the other members of
   its write set, verified by the ledger's digest, and stored as a recovery add.
4. When all of them are stored, the ledger leaves limbo. It stays fenced.

A ledger that cannot be repaired now stays in limbo, with its reason in the shard's `LimboState`, and is retried with
back-off. The only stored state is the flags of the ledgers, so a repair continues after a restart where it stopped. A
damaged entry is fetched and stored in the same way; the index then points to the good copy.

Invariants: one batch of entries is in memory, and all batches together are limited to `rate` bytes per second; no entry
is stored without verification; a ledger leaves limbo only after this bookie's own journal has acknowledged every entry
that it should have here.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from bindery_core.backoff import Backoff
from bindery_core.errors import BinderyError, NoSuchLedger, TryAgain
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import Status
from bindery_kit.observability.logs import get_logger

from bindery_bookie.maintenance.refill_history import Refill
from bindery_bookie.storage.collection.log_usage import is_in
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister, Healed
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.opening.opening import log_id_of

BATCH_ENTRIES_MAX: Final = 64
"""Maximum number of entries that one batch reads from another bookie."""
BATCH_SIZE: Final = 2 * 1024 * 1024
"""Target size of a batch in bytes, estimated by the size of earlier entries."""
RETRY_MIN_S: Final = 1.0
"""Minimum pause in seconds before a failed repair is retried."""
RETRY_MAX_S: Final = 300.0
"""Maximum pause in seconds before a failed repair is retried."""
_BACKOFF: Final = Backoff(RETRY_MIN_S, RETRY_MAX_S)
_NEVER_FAILED: Final = (0, -math.inf)
BUSY_PAUSE_S: Final = 0.2
"""Pause in seconds before a retry of entries that this bookie refused because it was busy or read-only."""
PROBLEMS_MAX: Final = 1000
"""Maximum number of damaged entries whose reason is kept."""
_PLACE_ENTRIES: Final = 1000
"""Number of entries of a damaged file that are read from the index at a time."""

log = get_logger(__name__)


class Client(Protocol):
    """The part of `bindery_client.client.LedgerClient` that is used here."""

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> Any: ...

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[Any], Any],
    ) -> list[Any]: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class RepairState:
    """Progress of the repair, for health, metrics and the admin API."""

    is_running: bool = False
    ledgers_done: int = 0
    """Ledgers that left limbo since the start."""
    ledgers_left: int = 0
    entries_back: int = 0
    """Number of entries that are stored here of the ledgers that left limbo. This repair copied some of them (see
    `entries_copied`), replication workers copied others, and some were not lost."""
    entries_copied: int = 0
    bytes_copied: int = 0
    entries_failed: int = 0
    """Number of failed fetches; each is retried."""
    current_ledger: int | None = None
    blocked: str = ""
    """Why no repair is possible; empty otherwise."""
    problems: dict[tuple[int, int], str] = field(default_factory=dict)
    """(ledger id, entry id) -> why a damaged entry could not be replaced. At most PROBLEMS_MAX."""

    def set_problem(self, key: tuple[int, int], reason: str | None) -> None:
        if reason is None:
            self.problems.pop(key, None)
        elif key in self.problems or len(self.problems) < PROBLEMS_MAX:
            self.problems[key] = reason


class _NotNow(TryAgain):
    """Some entries could not be fetched or stored; the message has the cause."""

    code = "repair_incomplete"


class Repairer:
    """`connect`: connects the ledger client, when there is something to repair. `clock`: monotonic seconds."""

    def __init__(
        self,
        shards: Sequence[StorageEngine],
        damage: DamageRegister,
        bookie_id: BookieId,
        *,
        connect: Callable[[], Awaitable[Client]],
        is_gone: Callable[[int], Awaitable[bool]],
        rate: float,
        clock: Callable[[], float],
        accepts: Callable[[], bool] = lambda: True,
        changed: Callable[[], None] = lambda: None,
        refilled: Callable[[Refill], Awaitable[None]] | None = None,
    ) -> None:
        """`damage`: the register to which the shards report. `is_gone` returns whether a ledger was certainly deleted,
        as garbage collection confirms it, because a single read may reach a server that lags, or another cluster;
        `is_gone` raises BinderyError. `rate`: bytes per second. `accepts`: whether this bookie accepts entries.
        `changed` is called after progress, `refilled` when all shards have left limbo.
        """
        self.state = RepairState()
        self._shards = shards
        self._register = damage
        self._bookie_id = bookie_id
        self._connect = connect
        self._is_gone = is_gone
        self._rate = rate
        self._clock = clock
        self._accepts = accepts
        self._changed = changed
        self._refilled = refilled
        self._refills = Refill(0, 0, 0, 0)
        """Sum of the refills that were reported since the start."""
        self._client: Client | None = None
        self._retries: dict[object, tuple[int, float]] = {}
        """Repairer, ledger id or key of a damage -> (failures in a row, time of the next attempt)."""
        self._wanted = asyncio.Event()
        self._entry_size = BATCH_SIZE / 8
        """Bytes per entry, averaged over recent copies. The first batch is small."""
        self._free_at_s = 0.0
        damage.on_report(self._reported)
        damage.on_healed(self._healed)

    def request(self) -> None:
        """Retry everything now, regardless of the back-off."""
        self._retries.clear()
        self._wanted.set()

    async def run(self) -> None:
        """Repair until cancelled."""
        try:
            while True:
                self._wanted.clear()
                if self._is_needed:
                    await self._round()
                else:
                    self._retries.clear()  # what failed was repaired or deleted by other processes
                self._changed()
                await self._wait()
        finally:
            await self._disconnect()

    @property
    def _is_needed(self) -> bool:
        return any(shard.limbo is not None for shard in self._shards) or bool(self._damage())

    def _reported(self, damage: Damage) -> None:
        self._wanted.set()

    def _healed(self, healed: Healed) -> None:
        if healed.ledger_id is not None and healed.entry_id is None:
            for key in [key for key in self.state.problems if key[0] == healed.ledger_id]:
                self.state.set_problem(key, None)

    async def _wait(self) -> None:
        now = self._clock()
        due = min((due_at_s for _, due_at_s in self._retries.values()), default=None)
        if due is None and not self._is_needed:
            await self._disconnect()
            await self._wanted.wait()
            return
        try:
            async with asyncio.timeout(max(RETRY_MIN_S, RETRY_MIN_S if due is None else due - now)):
                await self._wanted.wait()
        except TimeoutError:
            pass

    async def _round(self) -> None:
        """Attempt each repair that is due once."""
        self.state.is_running = True
        try:
            if self._client is None:
                self._client = await self._connect()
            self.state.blocked = ""
        except BinderyError as error:
            if str(error) != self.state.blocked:
                log.error("repair_blocked", error=str(error))
            self.state.blocked = str(error)
            self.state.is_running = False
            self._failed(self)
            return
        self._retries.pop(self, None)
        try:
            for shard in self._shards:
                if shard.limbo is not None:
                    await self._repair_limbo(shard)
            await self._heal()
        except Exception as error:  # an error of the storage, or a defect: it must not end the bookie
            log.error("repair_interrupted", error=repr(error))
            self._failed(self)
        finally:
            self.state.is_running = False
            self.state.current_ledger = None

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    # --- back-off

    def _is_due(self, key: object) -> bool:
        _, due_at_s = self._retries.get(key, _NEVER_FAILED)
        return self._clock() >= due_at_s

    def _due_of(self, ledger_ids: Sequence[int]) -> list[int]:
        """Return the ledgers whose next attempt is due."""
        now, retries = self._clock(), self._retries
        return [one for one in ledger_ids if now >= retries.get(one, _NEVER_FAILED)[1]]

    def _failed(self, key: object) -> None:
        failures = self._retries.get(key, _NEVER_FAILED)[0] + 1
        self._retries[key] = (failures, self._clock() + _BACKOFF.delay_s(failures))

    # --- ledgers in limbo

    async def _repair_limbo(self, shard: StorageEngine) -> None:
        limbo = shard.limbo
        assert limbo is not None
        left = await shard.repair.limbo_ledger_ids()
        limbo.left = len(left)
        for ledger_id in [one for one in limbo.problems if not is_in(left, one)]:
            limbo.set_problem(ledger_id, None)  # garbage collection has deleted it
        self._count_left()
        for ledger_id in self._due_of(left):
            self.state.current_ledger = ledger_id
            try:
                await self._repair_ledger(shard, LedgerId(ledger_id))
            except BinderyError as error:
                self._failed(ledger_id)
                limbo.set_problem(ledger_id, str(error))
                log.warning("ledger_not_repaired", ledger_id=ledger_id, error=str(error))
            else:
                self._retries.pop(ledger_id, None)
                limbo.set_problem(ledger_id, None)
                limbo.left -= 1
                self.state.ledgers_done += 1
                self._count_left()
            self._changed()
        if not limbo.left and not await shard.repair.limbo_ledger_ids(reread=True):
            await shard.repair.end_limbo()
            log.warning(
                "limbo_left",
                ledgers=self.state.ledgers_done,
                entries=self.state.entries_back,
                entries_copied=self.state.entries_copied,
                bytes_copied=self.state.bytes_copied,
            )
            self._changed()
            if all(one.limbo is None for one in self._shards):
                await self._report_refill()

    async def _report_refill(self) -> None:
        """Report the refill since the last report. Called when all shards have left limbo."""
        state, before = self.state, self._refills
        self._refills = Refill(state.ledgers_done, state.entries_back, state.entries_copied, state.bytes_copied)
        if self._refilled is not None:
            await self._refilled(
                Refill(
                    ledgers=self._refills.ledgers - before.ledgers,
                    entries=self._refills.entries - before.entries,
                    entries_copied=self._refills.entries_copied - before.entries_copied,
                    bytes_copied=self._refills.bytes_copied - before.bytes_copied,
                )
            )

    def _count_left(self) -> None:
        self.state.ledgers_left = sum(shard.limbo.left for shard in self._shards if shard.limbo is not None)

    async def _repair_ledger(self, shard: StorageEngine, ledger_id: LedgerId) -> None:
        """Repair a ledger in limbo. Raises BinderyError if entries are still missing."""
        metadata = await self._closed_metadata(ledger_id)
        if metadata is None:
            if not await self._is_gone(ledger_id):
                raise _NotNow("the ledger was missing from the metadata and is there again", ledger_id=ledger_id)
            await shard.delete_ledger(ledger_id)
            return
        if metadata.state is not LedgerState.CLOSED and self._bookie_id in metadata.last_segment.ensemble:
            raise _NotNow("the ledger is open again", ledger_id=ledger_id)
        here = _Runs(await shard.repair.entries_here(ledger_id))
        ours = [fragment.entry_ids for fragment in closed_fragments(metadata) if fragment.bookie_id == self._bookie_id]
        wanted = (entry_id for entry_ids in ours for entry_id in entry_ids if entry_id not in here)
        problem: BinderyError | None = None
        while batch := self._take_batch(wanted):
            try:
                await self._copy(shard, ledger_id, metadata, batch)
            except BinderyError as error:  # continue: the other batches may succeed
                problem = error
        if problem is not None:
            raise problem
        shard.repair.leave_limbo(ledger_id)
        self.state.entries_back += sum(map(len, ours))
        log.info("ledger_repaired", ledger_id=ledger_id)

    async def _closed_metadata(self, ledger_id: LedgerId) -> LedgerMetadata | None:
        """Return the metadata, after a recovery if the ledger is open on this bookie. None: there is no such ledger."""
        assert self._client is not None
        try:
            metadata = await self._client.metadata(ledger_id)
            if metadata.state is not LedgerState.CLOSED and self._bookie_id in metadata.last_segment.ensemble:
                handle = await self._client.open(ledger_id, password=metadata.password or b"")
                await handle.release()
                metadata = await self._client.metadata(ledger_id)
        except NoSuchLedger:
            return None
        return metadata

    def _take_batch(self, wanted: Iterator[int]) -> list[EntryId]:
        count = max(1, min(BATCH_ENTRIES_MAX, int(BATCH_SIZE / self._entry_size)))
        return [EntryId(entry_id) for _, entry_id in zip(range(count), wanted, strict=False)]

    # --- damage

    def _damage(self) -> list[Damage]:
        """Return the damage that copying can repair: of entries, and of entry logs."""
        return [
            damage
            for damage in self._register.items()
            if damage.entry_id is not None or (log_id_of(damage.path) is not None and self._shard_of(damage.path))
        ]

    def _shard_of(self, path: str) -> StorageEngine | None:
        return next((shard for shard in self._shards if shard.repair.holds(path)), None)

    async def _heal(self) -> None:
        for damage in self._damage():
            key = damage.key
            if not self._is_due(key):
                continue
            try:
                if damage.ledger_id is not None and damage.entry_id is not None:
                    shard = self._shards[damage.ledger_id % len(self._shards)]
                    await self._heal_entries(shard, damage.ledger_id, [damage.entry_id])
                elif (place := self._shard_of(damage.path)) is not None:
                    await self._heal_place(place, damage)
            except BinderyError as error:
                self._failed(key)
                log.warning("damage_not_healed", path=damage.path, offset=damage.offset, error=str(error))
            else:
                self._retries.pop(key, None)
            self._changed()

    async def _heal_place(self, shard: StorageEngine, damage: Damage) -> None:
        """Replace every entry that the index places in the file of `damage` at or after its offset."""
        log_id = log_id_of(damage.path)
        assert log_id is not None
        after: tuple[int, int] = (-1, -1)
        problem: BinderyError | None = None
        while found := await shard.repair.entries_in_log(
            log_id, start=damage.offset, after=after, count=_PLACE_ENTRIES
        ):
            after = found[-1]
            by_ledger: dict[int, list[int]] = {}
            for ledger_id, entry_id in found:
                by_ledger.setdefault(ledger_id, []).append(entry_id)
            for ledger_id, entry_ids in by_ledger.items():
                try:
                    await self._heal_entries(shard, ledger_id, entry_ids)
                except BinderyError as error:
                    problem = error
        if problem is not None:
            raise problem
        self._register.healed_region(damage.path, damage.offset)
        log.warning("damage_healed", path=damage.path, offset=damage.offset)

    async def _heal_entries(self, shard: StorageEngine, ledger_id: int, entry_ids: Sequence[int]) -> None:
        assert self._client is not None
        try:
            metadata = await self._client.metadata(LedgerId(ledger_id))
        except NoSuchLedger:
            self._register.ledger_deleted(ledger_id)  # garbage collection removes it
            return
        ids = iter(entry_ids)
        problem: BinderyError | None = None
        while batch := self._take_batch(ids):
            try:
                await self._copy(shard, LedgerId(ledger_id), metadata, batch)
            except NoSuchLedger:
                # deleted here, because its metadata no longer names this bookie
                self._register.ledger_deleted(ledger_id)
                return
            except BinderyError as error:
                problem = error
                for entry_id in batch:
                    self.state.set_problem((ledger_id, entry_id), str(error))
            else:
                for entry_id in batch:
                    self.state.set_problem((ledger_id, entry_id), None)
                    self._register.healed(ledger_id, entry_id)
        if problem is not None:
            raise problem

    # --- copying

    async def _copy(
        self, shard: StorageEngine, ledger_id: LedgerId, metadata: LedgerMetadata, entry_ids: Sequence[EntryId]
    ) -> None:
        """Fetch entries from other bookies and store them. Raises BinderyError if one of them cannot be fetched."""
        assert self._client is not None
        await self._until_writable()
        left = list(entry_ids)
        reasons: dict[int, str] = {}
        for turn in range(max(metadata.ensemble_size, 1)):
            by_source: dict[BookieId, list[EntryId]] = {}
            for entry_id in left:
                sources = self._sources(metadata, entry_id)
                if turn < len(sources):
                    by_source.setdefault(sources[turn], []).append(entry_id)
            if not by_source:
                break
            for source, wanted in by_source.items():
                frames: list[bytes] = []
                for entry_id, frame, reason in await self._client.read_replicas(
                    ledger_id, metadata, source, wanted, _frame_or_reason
                ):
                    if frame is None:
                        reasons[entry_id] = f"{reasons[entry_id]}; {reason}" if entry_id in reasons else reason
                    else:
                        frames.append(frame)
                        left.remove(entry_id)
                await self._store(shard, ledger_id, frames)
        if left:
            self.state.entries_failed += len(left)
            reason = reasons.get(left[0], "no other bookie is in its write set")
            raise _NotNow(f"{len(left)} entries cannot be fetched now, the first: {reason}", entry_id=left[0])

    def _sources(self, metadata: LedgerMetadata, entry_id: int) -> list[BookieId]:
        """Return the other bookies in the write set of an entry, in the order in which they are tried."""
        segment = max(
            (one for one in metadata.segments if one.first_entry_id <= entry_id), key=lambda one: one.first_entry_id
        )
        indexes = write_set(entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
        members = [segment.ensemble[index] for index in indexes]
        # Begin after this bookie, so that the entries of one fragment come from the same bookie, in large batches.
        at = members.index(self._bookie_id) + 1 if self._bookie_id in members else 0
        return [member for member in members[at:] + members[:at] if member != self._bookie_id]

    async def _store(self, shard: StorageEngine, ledger_id: int, frames: Sequence[bytes]) -> None:
        if not frames:
            return
        size = sum(map(len, frames))
        self._entry_size = (self._entry_size + size / len(frames)) / 2
        statuses = await shard.repair.store_recovered(ledger_id, frames)
        while Status.TOO_MANY_REQUESTS in statuses or Status.READ_ONLY in statuses:
            await asyncio.sleep(BUSY_PAUSE_S)
            await self._until_writable()
            statuses = await shard.repair.store_recovered(ledger_id, frames)
        bad = [status for status in statuses if status != Status.OK]
        if bad:
            raise _NotNow("this bookie refused the entries", ledger_id=ledger_id, status=bad[0])
        self.state.entries_copied += len(frames)
        self.state.bytes_copied += size
        self._changed()
        now = self._clock()
        self._free_at_s = max(self._free_at_s, now) + size / self._rate
        if self._free_at_s > now:
            await asyncio.sleep(self._free_at_s - now)

    async def _until_writable(self) -> None:
        while not self._accepts():
            self.state.blocked = "this bookie is read-only and accepts no recovered entries"
            self._changed()
            await asyncio.sleep(RETRY_MIN_S)
        self.state.blocked = ""


class _Runs:
    """The entry ids of ascending runs (first, count). Lookups are fast if they are in ascending order."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self._runs = runs
        self._at = 0

    def __contains__(self, entry_id: int) -> bool:
        runs = self._runs
        if self._at and entry_id < runs[self._at - 1][0]:
            self._at = 0
        while self._at < len(runs) and sum(runs[self._at]) <= entry_id:
            self._at += 1
        return self._at < len(runs) and runs[self._at][0] <= entry_id


def _frame_or_reason(replica: Any) -> tuple[EntryId, bytes | None, str]:
    """Convert a `bindery_client.ledger.replica.ReplicaRead`: (entry id, entry or None, why it is not good)."""
    if replica.verdict.value == "good":
        return replica.entry_id, replica.frame, ""
    return replica.entry_id, None, f"{replica.bookie_id}: {replica.reason or replica.verdict.value}"
