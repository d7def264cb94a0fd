"""Machines: a host with a disk, and the process that runs on it for now.

A `BookieMachine` runs the bookie as `bindery_bookie.process` puts it together: identity, storage engine, server,
presence and storage watch, over a simulated disk, network and metadata session; only the HTTP port is left out. A
`ClientMachine` runs a LedgerClient. Both can be killed, lose power, be paused and started again; what a process did not
sync is kept by the kernel after a kill, and kept at random after a power cut.
"""

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bindery_bookie.maintenance.deleted_ledgers import GarbageCollector
from bindery_bookie.maintenance.limbo_listing import LimboListing
from bindery_bookie.maintenance.repair import Repairer
from bindery_bookie.maintenance.storage_watch import StorageWatch
from bindery_bookie.membership.identity import REFUSE, REPAIR, Claim, any_ledger, establish_identity
from bindery_bookie.membership.own_membership import OwnMembership
from bindery_bookie.membership.presence import Presence
from bindery_bookie.metrics import BookieMetrics
from bindery_bookie.server.server import BookieServer
from bindery_bookie.settings import BookieSettings, ServerSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.settings import KIB, StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_client.client import LedgerClient
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester, master_key
from bindery_core.entry import pack, peek_ids
from bindery_core.errors import BinderyError, Corrupt
from bindery_core.formats import bookie_service_info
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId
from bindery_core.wire.messages import AddRequest, Status
from bindery_kit.observability.health import Health
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.ledgers.ledger_manager import LedgerManager

from bindery_simulation.disk import CrashableDisk, CrashableKV
from bindery_simulation.loop import Process
from bindery_simulation.network import ListeningSocket
from bindery_simulation.service.metadata_tree import SimStore
from bindery_simulation.service.worker import PowerLost, SimWorker, job_times

if TYPE_CHECKING:
    from bindery_simulation.service.world import World

SESSION_TIMEOUT_S: Final = 4.0
RESTART_S: Final = 1.0
"""After a process ended by itself, the machine starts it again so much later."""
BOOKIE_PORT: Final = 3181
REPAIR_RATES: Final = (2 * KIB, 16 * KIB, 256 * KIB)
"""Bytes a second at which a bookie that lost its disk refills itself: slow enough to be met in limbo."""
INSPECT_STEP: Final = 200
REST_S_MAX: Final = 60.0
"""What was begun on a disk that stood still may take so long after it was mended."""
INTRUDER_ID: Final = 1_000_000
"""Entry id of adds that only a fence that was forgotten would let in."""
WALL_CLOCK_START_MS: Final = 1_800_000_000_000

STORAGE_SETTINGS: Final = StorageSettings(
    journal_directory="/journal",
    ledger_directory="/ledgers",
    journal_file_size_max=64 * KIB,
    journal_group_size_max=64 * KIB,
    write_cache_size_max=16 * KIB,
    flush_chunk_size=8 * KIB,
    entry_log_size_max=64 * KIB,
    read_cache_size_max=8 * KIB,
    read_ahead_entries_max=8,
    read_ahead_size_max=8 * KIB,
    flush_interval_s=3.0,
    flush_retry_s=0.2,
    waiting_time_max_s=2.0,
    reserve_size=0,
)
"""Small, so that files roll, caches fill and flushes overlap within a second."""

SERVER_SETTINGS: Final = ServerSettings(drain_timeout_s=1.0, adds_size_max=64 * KIB, reads_size_max=64 * KIB)
BOOKIE_SETTINGS: Final = BookieSettings(
    journal_dir="/journal", ledger_dir="/ledgers", disk_check_interval_s=2.0, high_priority_free_size_min=0
)
"""Budgets small enough that connections are paused now and then."""


class Machine:
    """Invariants: at most one process; none while the power is off."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.rng = random.Random(world.rng.getrandbits(64))
        self.process: Process | None = None
        self.session: SimStore | None = None
        self.is_wanted = True
        """Start again after the process ended by itself."""
        self.clock_ahead_ms = self.rng.randint(-60_000, 60_000)

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        if self.process is not None:
            return
        self.world.network.power_on(self.name)
        self.process = Process(self.world.loop, self.name)
        self.world.trace.add(self.name, "starts")
        self.process.spawn(self._life(self.process))

    def kill(self, *, power: bool = False) -> None:
        """SIGKILL, or a power cut."""
        if self.process is None:
            return
        self.world.trace.add(self.name, "loses power" if power else "is killed")
        process, self.process = self.process, None
        process.kill()
        if power:
            self.world.network.power_off(self.name)
            self.after_power_cut()
        self.world.network.process_killed(process)
        self.world.later(SESSION_TIMEOUT_S, self.world.tree.end, process)

    def after_power_cut(self) -> None:
        """What becomes of the disk."""

    def pause(self) -> None:
        if self.process is not None and not self.process.is_paused:
            self.world.trace.add(self.name, "is paused")
            self.process.pause()
            if self.session is not None:
                self.world.later(SESSION_TIMEOUT_S, self._time_out, self.process, self.session)

    def resume(self) -> None:
        if self.process is not None and self.process.is_paused:
            self.world.trace.add(self.name, "goes on")
            if self.session is not None:
                self.process.call_soon(self.world.tree.catch_up, self.session)
            self.process.resume()

    def _time_out(self, process: Process, session: SimStore) -> None:
        if process is self.process and process.is_paused:
            self.world.tree.time_out(session)

    def ended(self, process: Process, why: str) -> None:
        """The process ended by itself."""
        if self.process is process:
            self.world.trace.add(self.name, "ended", why=why)
            self.kill()
            if self.is_wanted:
                self.world.later(RESTART_S, self.start)

    def wall_clock_ms(self) -> int:
        return WALL_CLOCK_START_MS + self.clock_ahead_ms + int(self.world.loop.time() * 1000)

    async def _life(self, process: Process) -> None:
        raise NotImplementedError


class BookieMachine(Machine):
    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.bookie_id = BookieId(f"{name}:{BOOKIE_PORT}")
        self.disk = CrashableDisk(capacity=64 * 1024 * KIB)
        self.kv = CrashableKV(self.disk)
        self.disk_fault: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.slowness = 1.0
        self.rot = 0.0
        """Chance that a body read here has a bit flipped."""
        self.is_serving = False
        self.wiped_at = 0.0
        self.is_lost = False
        """For good."""
        self.was_wiped = False
        """It lost its disk once, and got an empty one."""
        self._repair_rate = REPAIR_RATES[-1]

    def start(self) -> None:
        if not self.is_lost:
            super().start()

    def lose(self) -> None:
        """With its disk, for good."""
        self.kill(power=True)
        self.is_lost = True
        self.world.trace.add(self.name, "is lost for good")
        self.world.healing_verdict.disk_lost(self)

    def wipe(self) -> None:
        """Down, and with an empty disk from now on."""
        self.kill(power=True)
        self.was_wiped = True
        self.wiped_at = self.world.loop.time()
        self._repair_rate = self.rng.choice(REPAIR_RATES)
        self.disk = CrashableDisk(capacity=64 * 1024 * KIB)
        self.kv = CrashableKV(self.disk)
        self.world.trace.add(self.name, "has an empty disk")
        self.world.healing_verdict.disk_lost(self)

    def is_in_limbo(self, ledger_id: int) -> bool:
        """Whether it cannot tell what it should have of this ledger, and says so."""
        if not self.was_wiped or not self.is_serving or self.engine.limbo is None:
            return False
        state = self.engine.parts.ledgers.find(ledger_id)
        return state is None or state.is_limbo or self.engine.limbo.is_listing

    async def read_here(self, keys: Sequence[tuple[int, int]]) -> Sequence[bytes | int]:
        """In the bookie's process: what its store answers."""
        read: asyncio.Future[Sequence[bytes | int]] = self.world.loop.create_future()
        self.engine.read_many(keys, read.set_result)
        return await read

    def cut_power_within(self, operations: int) -> None:
        """Lose power in the middle of whatever the disk is asked for."""
        self.disk.cut_after(operations)

    def finish_power_cut(self) -> None:
        """The disk was not asked for enough since `cut_power_within`: the power goes now."""
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
        """From now on such operations fail by lot."""

        def fault(operation: str, path: str) -> OSError | None:
            if operation in operations and self.rng.random() < chance:
                self.world.trace.add(self.name, "disk fails", operation=operation, path=path)
                return OSError(errno.ENOSPC, "No space left on device") if full else OSError(errno.EIO, "I/O error")
            return None

        self.disk_fault = fault

    def mend_disk(self) -> None:
        self.disk_fault = lambda operation, path: None
        self.slowness = 1.0
        self.rot = 0.0

    async def _life(self, process: Process) -> None:
        try:
            await self._serve(process)
        except Corrupt as error:
            self.world.verdict.broken("bookie-starts", f"{self.name} refuses its own disk: {error}")
            self.ended(process, repr(error))
        except (BinderyError, OSError) as error:
            self.ended(process, repr(error))

    async def _serve(self, process: Process) -> None:
        world, loop = self.world, self.world.loop
        session = self.session = world.tree.open_session(process)
        disk = FaultyDisk(self.disk, self.before_disk)
        health, state, stats = Health(), BookieState(), StorageStats()
        membership = OwnMembership(session, self.bookie_id, state, health, wall_clock_ms=self.wall_clock_ms)
        if world.healing is not None:
            await membership.check_start()
        manager = LedgerManager(session, world.layout, randomness=self.rng)
        claim = Claim(bookie_id=self.bookie_id, journal_dirs=("/journal",), ledger_dirs=("/ledgers",))
        identity = await establish_identity(
            CookieStore(session, world.layout), disk, claim, now_ms=0,
            has_ledgers=(lambda: any_ledger(manager.list())) if self.was_wiped else _not_asked,
            on_lost_storage=REPAIR if self.was_wiped else REFUSE,
        )  # fmt: skip
        engine = self.engine = WatchedEngine(self, disk, stats)
        await engine.open()
        # Nothing takes away what was synced, but for the loss of a whole disk.
        if engine.limbo is not None and not self.was_wiped:
            world.verdict.broken("bookie-starts", f"{self.name} takes itself for incomplete: {engine.limbo.reason}")
        for damage in engine.damage.items():
            world.verdict.broken("bookie-starts", f"{self.name} finds damage: {damage.path}: {damage.reason}")
        if engine.limbo is not None:
            sync = partial(session.sync, world.layout.root)
            await LimboListing([engine], manager, self.bookie_id, sync=sync, progress=lambda count: None).run()
        server = self.server = BookieServer(
            engine, state=state, metrics=BookieMetrics(clock=loop.time, storage=stats), settings=SERVER_SETTINGS,
            clock=loop.time,
        )  # fmt: skip
        stopped: asyncio.Future[str] = loop.create_future()
        watch = StorageWatch(
            [engine], disk, state, health, BOOKIE_SETTINGS, wall_clock_ms=self.wall_clock_ms,
            on_journal_failed=lambda reason: None if stopped.done() else stopped.set_result(reason),
        )  # fmt: skip
        watch.check_disk()
        parts = [loop.create_task(watch.run())]
        await server.start(ListeningSocket(self.name, BOOKIE_PORT))  # type: ignore[arg-type]
        registration = BookieRegistration(
            session, world.layout, self.bookie_id,
            bookie_service_info.encode(bookie_service_info.of_bookie(host=self.name, port=BOOKIE_PORT)),
            session_timeout_s=SESSION_TIMEOUT_S,
        )  # fmt: skip
        presence = Presence(registration, state, health)
        registration.on_change(presence.registration_changed)
        await registration.register(read_only=state.read_only)
        parts.append(loop.create_task(presence.run()))
        if world.healing is not None:
            parts.append(loop.create_task(membership.run()))
        if self.was_wiped:
            connect = partial(
                LedgerClient.connect,
                session, randomness=self.rng, layout=world.layout, settings=world.client_settings,
            )  # fmt: skip
            assert identity.cookie.instance_id is not None
            storage = BOOKIE_SETTINGS.storage
            garbage = GarbageCollector(
                [engine], session, world.layout,
                instance_id=identity.cookie.instance_id, bookie_id=self.bookie_id, connect=connect,
                wait_s=storage.gc_wait_time_s, over_replicated_wait_s=0, op_rate=storage.gc_metadata_op_rate,
                clock=loop.time, wall_clock_ms=self.wall_clock_ms, randomness=self.rng,
            )  # fmt: skip
            repairer = Repairer(
                [engine], engine.damage, self.bookie_id,
                connect=connect, is_gone=garbage.is_gone, rate=self._repair_rate, clock=loop.time,
            )  # fmt: skip
            parts.append(loop.create_task(repairer.run()))
        self.is_serving = True
        world.trace.add(self.name, "serves")
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
        """In the bookie's process: does it still know what it answered for?"""
        verdict = self.world.verdict
        keys = verdict.kept_at(self.name)
        for at in range(0, len(keys), INSPECT_STEP):
            step = keys[at : at + INSPECT_STEP]
            verdict.inspected(self.name, step, await self.read_here(step))
        for ledger_id in verdict.fenced_at(self.name):
            password = verdict.ledger(ledger_id).password
            body = pack(
                Digester(DigestType.CRC32C), ledger_id=ledger_id, entry_id=INTRUDER_ID, lac=-1, length=0, payload=b""
            )
            added: asyncio.Future[Sequence[int]] = self.world.loop.create_future()
            request = AddRequest(0, ledger_id, INTRUDER_ID, master_key(password), body)
            self.engine.add_many([request], added.set_result)
            await added  # that none of these is answered OK is judged where all adds are
        operations = self.server.operations
        until = self.world.loop.time() + REST_S_MAX
        while self.world.loop.time() < until and (operations.adds_budget.used or operations.reads_budget.used):
            await asyncio.sleep(0.5)
        for name, budget in (("adds", operations.adds_budget), ("reads", operations.reads_budget)):
            complaint = f"{self.name} is at rest, and {budget.used} bytes of its budget of {name} are in use"
            verdict.check(budget.used == 0, "liveness", complaint)

    def stop(self) -> None:
        """SIGTERM: end in order, then start again."""
        if self.is_serving and self.process is not None:
            self.process.call_soon(self._stop, self.stop_wanted)

    @staticmethod
    def _stop(stopped: "asyncio.Future[str]") -> None:
        if not stopped.done():
            stopped.set_result("SIGTERM")


class PoweredKV:
    """The index, which needs power as the files do."""

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
    """The engine, with the history looking on from outside: what was answered, in which order."""

    def __init__(self, machine: BookieMachine, disk: Any, stats: StorageStats) -> None:
        self._machine = machine
        rng = machine.rng
        super().__init__(
            STORAGE_SETTINGS,
            disk=disk,
            open_kv=lambda path: PoweredKV(machine.kv, machine.before_disk),
            destroy_kv=lambda path: machine.kv.clear(),
            start_worker=lambda name: SimWorker(machine.world.loop, job_times(rng, slow=lambda: machine.slowness)),
            wall_clock_ms=machine.wall_clock_ms,
            stats=stats,
        )

    def add_many(self, adds: Sequence[AddRequest], done: Callable[[Sequence[int]], None]) -> None:
        machine = self._machine
        verdict, trace = machine.world.verdict, machine.world.trace

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
        trace = machine.world.trace

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
        machine.world.trace.add(machine.name, "bit rot", ids=peek_ids(body), at=at)
        return body[:at] + bytes([body[at] ^ 1 << machine.rng.randrange(8)]) + body[at + 1 :]

    async def fence(self, ledger_id: int, master_key: bytes) -> None:
        await super().fence(ledger_id, master_key)
        self._machine.world.trace.add(self._machine.name, "fenced", ledger_id=ledger_id)
        self._machine.world.verdict.fenced(self._machine.name, ledger_id)


class ClientMachine(Machine):
    """`work(client, machine)` is what it does; started again after a crash, it does something new."""

    def __init__(self, world: "World", name: str, work: Callable[[LedgerClient, "ClientMachine"], Any]) -> None:
        super().__init__(world, name)
        self._work = work
        self.is_finished = False

    async def _life(self, process: Process) -> None:
        self.is_finished = False
        session = self.session = self.world.tree.open_session(process)
        try:
            client = await LedgerClient.connect(
                session, randomness=self.rng, layout=self.world.layout, settings=self.world.client_settings
            )
        except BinderyError as error:
            self.ended(process, repr(error))
            return
        await self._work(client, self)
        self.is_finished = True


def client_settings(rng: random.Random) -> ClientSettings:
    """Patience such that a run needs seconds instead of minutes; a little different each time."""
    add_timeout_s = rng.choice((0.5, 2.0))
    return ClientSettings(
        connect_timeout_s=1.0,
        reconnect_pause_s=0.05,
        reconnect_pause_s_max=1.0,
        add_timeout_s=add_timeout_s,
        add_quorum_timeout_s=rng.choice((4.0, 10.0)),
        read_timeout_s=rng.choice((0.5, 2.0)),
        speculative_read_s=rng.choice((0.0, 0.2)),
        fence_timeout_s=0.5,
        recovery_timeout_s=10.0,
        replacement_retry_s=rng.choice((0.5, 2.0)),
        recovery_batch_entries=rng.choice((1, 4, 32)),
        metadata_timeout_s=rng.choice((2.0, 10.0)),
        in_flight_entries_max=rng.choice((8, 64, 64)),
        in_flight_bytes_max=16 * KIB,
        client_bytes_max=32 * KIB,
        connection_bytes_max=64 * KIB,
        read_batch_entries_max=rng.choice((5, 20, 100)),
        read_batch_bytes_max=16 * KIB,
        explicit_lac_idle_s=0.05,
        long_poll_s=2.0,
        lac_refresh_s=0.2,
        quarantine_s=rng.choice((1.0, 5.0)),
        revisit_timeout_s=0.5,
        timer_tick_s=0.1,
    )


async def _not_asked() -> bool:
    return False
