"""A machine that runs a bookie like `bindery_bookie.process`, with a simulated disk, network and metadata session.

The bookie has its identity, storage engine, server, presence and storage watch, but no HTTP port.
"""

import asyncio
import errno
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from bindery_bookie.maintenance.deleted_ledgers import GarbageCollector
from bindery_bookie.maintenance.limbo_listing import LimboListing
from bindery_bookie.maintenance.repair import Repairer
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.maintenance.storage_watch import StorageWatch
from bindery_bookie.membership.identity import REFUSE, REPAIR, Claim, any_ledger, establish_identity
from bindery_bookie.membership.own_membership import OwnMembership
from bindery_bookie.membership.presence import Presence
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.server import BookieServer
from bindery_bookie.state import BookieState
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.settings import KIB
from bindery_bookie.storage.stats import StorageStats
from bindery_client.client import LedgerClient
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack, peek_ids
from bindery_core.errors import BinderyError, Corrupt
from bindery_core.formats import bookie_service_info
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata
from bindery_core.ids import BookieId
from bindery_core.wire.messages import AddRequest, Status
from bindery_kit.observability.health import Health
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.ledgers.ledger_manager import LedgerManager

from bindery_simulation.disk import CrashableDisk, CrashableKV
from bindery_simulation.loop import Process
from bindery_simulation.network import ListeningSocket
from bindery_simulation.service.machine import Machine
from bindery_simulation.service.settings import (
    SERVER_SETTINGS,
    SESSION_TIMEOUT_S,
    STORAGE_SETTINGS,
)
from bindery_simulation.service.site import Site
from bindery_simulation.service.worker import PowerLost, SimWorker, job_times

BOOKIE_PORT: Final = 3181
"""TCP port of every bookie."""
DISK_SIZE: Final = 64 * 1024 * KIB
"""Capacity of a disk in bytes."""
REPAIR_RATES: Final = (2 * KIB, 16 * KIB, 256 * KIB)
"""Rates in bytes per second at which a bookie that lost its disk copies its entries back. They are so low that clients
and auditors contact the bookie while it is in limbo."""
INSPECT_STEP: Final = 200
"""Number of entries per read of an inspection."""
REST_S_MAX: Final = 60.0
"""Maximum time in seconds until requests that began on a stalled disk end after the disk was repaired."""
INTRUDER_ID: Final = 1_000_000
"""Entry id of an add that a bookie accepts only if it has lost a fence."""


class BookieMachine(Machine):
    """A bookie with its disk."""

    def __init__(self, site: Site, name: str) -> None:
        super().__init__(site, name)
        self.bookie_id = BookieId(f"{name}:{BOOKIE_PORT}")
        self.disk = CrashableDisk(capacity=DISK_SIZE)
        self.kv = CrashableKV(self.disk)
        self.disk_fault: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.slowness = 1.0
        self.rot = 0.0
        """Probability that a body that this bookie reads has a flipped bit."""
        self.is_serving = False
        self.wiped_at = 0.0
        self.is_lost = False
        """Whether the bookie lost its disk and never starts again."""
        self.was_wiped = False
        """Whether the disk was replaced by an empty one."""
        self._repair_rate = REPAIR_RATES[-1]

    def start(self) -> None:
        if not self.is_lost:
            super().start()

    def lose(self) -> None:
        """Lose the machine and its disk permanently."""
        self.kill(power=True)
        self.is_lost = True
        self.site.trace.add(self.name, "is lost for good")
        self.site.on_disk_lost(self.name)

    def wipe(self) -> None:
        """Stop the bookie and replace its disk by an empty one."""
        self.kill(power=True)
        self.was_wiped = True
        self.wiped_at = self.site.loop.time()
        self._repair_rate = self.rng.choice(REPAIR_RATES)
        self.disk = CrashableDisk(capacity=DISK_SIZE)
        self.kv = CrashableKV(self.disk)
        self.site.trace.add(self.name, "has an empty disk")
        self.site.on_disk_lost(self.name)

    def is_in_limbo(self, ledger_id: int) -> bool:
        """Return whether the bookie answers UNKNOWN_LEDGER_STATE for missing entries of this ledger."""
        if not self.was_wiped or not self.is_serving or self.engine.limbo is None:
            return False
        state = self.engine.parts.ledgers.find(ledger_id)
        return state is None or state.is_limbo or self.engine.limbo.is_listing

    def refill_s_max(self, ledgers: Iterable[LedgerMetadata]) -> float:
        """Return the time in seconds in which the bookie refills a lost disk with its entries of `ledgers`."""
        if not self.was_wiped or self.is_lost:
            return 0.0
        ours = (one for one in ledgers if any(self.bookie_id in segment.ensemble for segment in one.segments))
        return sum(one.length for one in ours) / self._repair_rate

    async def read_here(self, keys: Sequence[tuple[int, int]]) -> Sequence[bytes | int]:
        """Return the answers of the bookie's store. Must run in the process of the bookie."""
        read: asyncio.Future[Sequence[bytes | int]] = self.site.loop.create_future()
        self.engine.read_many(keys, read.set_result)
        return await read

    def cut_power_within(self, operations: int) -> None:
        """Lose power after this number of disk operations."""
        self.disk.cut_after(operations)

    def finish_power_cut(self) -> None:
        """Lose power now if the disk has executed fewer operations than `cut_power_within` requires."""
        if self.process is not None and self.disk.is_cutting:
            self.kill(power=True)
        self.disk.cut_after(None)

    def after_power_cut(self) -> None:
        seed = self.rng.getrandbits(32)
        self.disk = self.disk.after_power_cut(seed)
        self.kv = self.kv.after_power_cut(seed, self.disk)

    def kill(self, *, power: bool = False) -> None:
        self.is_serving = False
        super().kill(power=power)

    def before_disk(self, operation: str, path: str) -> OSError | None:
        if self.disk.is_cut:
            self.kill(power=True)
            raise PowerLost
        return self.disk_fault(operation, path)

    def fail_disk(self, *, operations: Sequence[str], chance: float, full: bool) -> None:
        """Let each of these operations fail with probability `chance`. `full`: with ENOSPC instead of EIO."""

        def fault(operation: str, path: str) -> OSError | None:
            if operation in operations and self.rng.random() < chance:
                self.site.trace.add(self.name, "disk fails", operation=operation, path=path)
                return OSError(errno.ENOSPC, "No space left on device") if full else OSError(errno.EIO, "I/O error")
            return None

        self.disk_fault = fault

    def mend_disk(self) -> None:
        """Undo all faults of the disk."""
        self.disk_fault = lambda operation, path: None
        self.slowness = 1.0
        self.rot = 0.0

    async def _life(self, process: Process) -> None:
        try:
            await self._serve(process)
        except Corrupt as error:
            self.site.verdict.broken("bookie-starts", f"{self.name} does not start: {error}")
            self.ended(process, repr(error))
        except (BinderyError, OSError) as error:
            self.ended(process, repr(error))

    async def _serve(self, process: Process) -> None:
        site, loop = self.site, self.site.loop
        session = self.session = site.tree.open_session(process)
        disk = FaultyDisk(self.disk, self.before_disk)
        health, state, stats = Health(), BookieState(), StorageStats()
        membership = OwnMembership(session, self.bookie_id, state, health, wall_clock_ms=self.wall_clock_ms)
        if site.healing is not None:
            await membership.check_start()
        manager = LedgerManager(session, site.layout, randomness=self.rng)
        claim = Claim(bookie_id=self.bookie_id, journal_dirs=("/journal",), ledger_dirs=("/ledgers",))
        identity = await establish_identity(
            CookieStore(session, site.layout),
            disk,
            claim,
            now_ms=0,
            has_ledgers=(lambda: any_ledger(manager.list())) if self.was_wiped else _no_ledgers,
            on_lost_storage=REPAIR if self.was_wiped else REFUSE,
        )
        engine = self.engine = WatchedEngine(self, disk, stats)
        await engine.open()
        # Synced data is never lost, except with a whole disk.
        if engine.limbo is not None and not self.was_wiped:
            site.verdict.broken("bookie-starts", f"{self.name} is in limbo: {engine.limbo.reason}")
        for damage in engine.damage.items():
            site.verdict.broken("bookie-starts", f"{self.name} reports corruption: {damage.path}: {damage.reason}")
        if engine.limbo is not None:
            sync = partial(session.sync, site.layout.root)
            await LimboListing([engine], manager, self.bookie_id, sync=sync, progress=lambda count: None).run()
        server = self.server = BookieServer(
            engine,
            state=state,
            metrics=BookieMetrics(clock=loop.time, storage=stats),
            settings=SERVER_SETTINGS,
            clock=loop.time,
        )
        stopped: asyncio.Future[str] = loop.create_future()
        watch = StorageWatch(
            [engine],
            disk,
            state,
            health,
            site.bookie_settings,
            wall_clock_ms=self.wall_clock_ms,
            on_journal_failed=lambda reason: None if stopped.done() else stopped.set_result(reason),
        )
        watch.check_disk()
        parts = [loop.create_task(watch.run())]
        await server.start(ListeningSocket(self.name, BOOKIE_PORT))  # type: ignore[arg-type]
        registration = BookieRegistration(
            session,
            site.layout,
            self.bookie_id,
            bookie_service_info.encode(bookie_service_info.of_bookie(host=self.name, port=BOOKIE_PORT)),
            session_timeout_s=SESSION_TIMEOUT_S,
        )
        presence = Presence(registration, state, health)
        registration.on_change(presence.registration_changed)
        await registration.register(read_only=state.read_only)
        parts.append(loop.create_task(presence.run()))
        if site.healing is not None:
            parts.append(loop.create_task(membership.run()))
        if self.was_wiped:
            connect = partial(
                LedgerClient.connect,
                session,
                randomness=self.rng,
                layout=site.layout,
                settings=site.client_settings,
            )
            assert identity.cookie.instance_id is not None
            storage = site.bookie_settings.storage
            guard = RollbackGuard(
                [engine],
                session,
                site.layout,
                instance_id=identity.cookie.instance_id,
                bookie_id=self.bookie_id,
                health=health,
                wall_clock_ms=self.wall_clock_ms,
            )
            garbage = GarbageCollector(
                [engine],
                session,
                site.layout,
                instance_id=identity.cookie.instance_id,
                bookie_id=self.bookie_id,
                guard=guard,
                connect=connect,
                wait_s=storage.gc_wait_time_s,
                wait_min_s=storage.gc_wait_time_s,
                written_max=0,
                over_replicated_wait_s=0,
                op_rate=storage.gc_metadata_op_rate,
                clock=loop.time,
                wall_clock_ms=self.wall_clock_ms,
                randomness=self.rng,
            )
            repairer = Repairer(
                [engine],
                engine.damage,
                self.bookie_id,
                connect=connect,
                is_gone=garbage.is_gone,
                rate=self._repair_rate,
                clock=loop.time,
            )
            parts.append(loop.create_task(repairer.run()))
        self.is_serving = True
        site.trace.add(self.name, "serves")
        self.stop_wanted = stopped
        why = await stopped
        self.is_serving = False
        state.shutting_down = True
        await registration.close()
        await server.close()
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await engine.close()
        await session.close()
        self.ended(process, why)

    async def inspect(self) -> None:
        """Check entries, fences and request budgets. Must run in the process of the bookie."""
        verdict = self.site.verdict
        keys = verdict.kept_at(self.name)
        for at in range(0, len(keys), INSPECT_STEP):
            step = keys[at : at + INSPECT_STEP]
            verdict.inspected(self.name, step, await self.read_here(step))
        for ledger_id in verdict.fenced_at(self.name):
            password = verdict.ledger(ledger_id).password
            body = pack(
                Digester(DigestType.CRC32C), ledger_id=ledger_id, entry_id=INTRUDER_ID, lac=-1, length=0, payload=b""
            )
            added: asyncio.Future[Sequence[int]] = self.site.loop.create_future()
            request = AddRequest(0, ledger_id, INTRUDER_ID, master_key(password), body)
            self.engine.add_many([request], added.set_result)
            await added  # the verdict checks all adds, and reports one that a fenced bookie accepts
        operations = self.server.operations
        until = self.site.loop.time() + REST_S_MAX
        while self.site.loop.time() < until and (operations.adds_budget.used or operations.reads_budget.used):
            await asyncio.sleep(0.5)
        for name, budget in (("adds", operations.adds_budget), ("reads", operations.reads_budget)):
            complaint = f"{self.name} has no requests, but {budget.used} bytes of its budget for {name} are in use"
            verdict.check(budget.used == 0, "liveness", complaint)

    def stop(self) -> None:
        """Send SIGTERM. The machine then starts the bookie again."""
        if self.is_serving and self.process is not None:
            self.process.call_soon(self._stop, self.stop_wanted)

    @staticmethod
    def _stop(stopped: "asyncio.Future[str]") -> None:
        if not stopped.done():
            stopped.set_result("SIGTERM")


class PoweredKV:
    """The index. Like the files, it fails without power."""

    def __init__(self, kv: CrashableKV, before: Callable[[str, str], OSError | None]) -> None:
        self._kv = kv
        self._before = before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._kv, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            error = self._before(f"kv.{name}", "index")
            if error is not None:
                raise error
            return method(*args, **kwargs)

        return call


class WatchedEngine(StorageEngine):
    """The storage engine. It reports its answers, in order, to the verdict and the trace."""

    def __init__(self, machine: BookieMachine, disk: Any, stats: StorageStats) -> None:
        self._machine = machine
        rng = machine.rng
        super().__init__(
            STORAGE_SETTINGS,
            disk=disk,
            open_kv=lambda path: PoweredKV(machine.kv, machine.before_disk),
            destroy_kv=lambda path: machine.kv.clear(),
            start_worker=lambda name: SimWorker(machine.site.loop, job_times(rng, slow=lambda: machine.slowness)),
            wall_clock_ms=machine.wall_clock_ms,
            stats=stats,
        )

    def add_many(self, adds: Sequence[AddRequest], done: Callable[[Sequence[int]], None]) -> None:
        machine = self._machine
        verdict, trace = machine.site.verdict, machine.site.trace

        def answered(statuses: Sequence[int]) -> None:
            ids = [peek_ids(add.body) for add in adds]
            for add, (ledger_id, entry_id), status in zip(adds, ids, statuses, strict=True):
                if status == Status.OK:
                    verdict.stored(machine.name, ledger_id, entry_id, recovery=add.recovery)
            if trace.is_on:
                told = [(*both, Status(status).name) for both, status in zip(ids, statuses, strict=True)]
                trace.add(machine.name, "adds", answered=told)
            done(statuses)

        super().add_many(adds, answered)

    def read_many(self, keys: Sequence[tuple[int, int]], done: Callable[[Sequence[bytes | int]], None]) -> None:
        machine = self._machine
        trace = machine.site.trace

        def answered(answers: Sequence[bytes | int]) -> None:
            if machine.rot:
                answers = [self._rotten(one) if isinstance(one, bytes) else one for one in answers]
            if trace.is_on:
                told = [len(one) if isinstance(one, bytes) else Status(one).name for one in answers]
                trace.add(machine.name, "reads", keys=keys, answered=told)
            done(answers)

        super().read_many(keys, answered)

    def _rotten(self, body: bytes) -> bytes:
        machine = self._machine
        if machine.rng.random() >= machine.rot:
            return body
        at = machine.rng.randrange(len(body))
        machine.site.trace.add(machine.name, "bit rot", ids=peek_ids(body), at=at)
        return body[:at] + bytes([body[at] ^ 1 << machine.rng.randrange(8)]) + body[at + 1 :]

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        await super().fence(ledger_id, master_key)
        self._machine.site.trace.add(self._machine.name, "fenced", ledger_id=ledger_id)
        self._machine.site.verdict.fenced(self._machine.name, ledger_id)


async def _no_ledgers() -> bool:
    return False
