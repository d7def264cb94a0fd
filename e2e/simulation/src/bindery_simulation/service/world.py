"""World: one simulated cluster from its first start to the verdict, all of it decided by one seed.

A run: some bookies and clients start; the clients work while a few faults strike; everything is healed; whatever
was begun must end; every ledger is closed, read and judged, sometimes once more after the power went everywhere; new
writes must go through. Simulated time costs nothing but the work that is done in it.
"""

import asyncio
import contextlib
import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead
from bindery_client.ledger.replica import Verdict as ReplicaVerdict
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout

from bindery_simulation.loop import Process, SimLoop, Stuck, current_process
from bindery_simulation.network import Network
from bindery_simulation.service.faults import FAULTS, Fault
from bindery_simulation.service.healing.faults import schedule
from bindery_simulation.service.healing.plan import AuditorMachine, HealingKind, HealingPlan, draw_plan
from bindery_simulation.service.healing.verdict import HealingVerdict
from bindery_simulation.service.machine import BookieMachine, ClientMachine, Machine, client_settings
from bindery_simulation.service.metadata_tree import SimStore, SimTree
from bindery_simulation.service.verdict import Verdict, Violation, payload_of
from bindery_simulation.service.worker import PowerLost
from bindery_simulation.service.workload import Workload
from bindery_simulation.trace import Trace

TIME_MAX_S: Final = 600.0
CALLBACKS_MAX: Final = 3_000_000
TIME_WITH_HEALING_MAX_S: Final = 6_000.0
CALLBACKS_WITH_HEALING_MAX: Final = 10_000_000
START_S_MAX: Final = 30.0
"""Bookies serve so soon after they were started, sessions of former lives included."""
TRAFFIC_S: Final = 10.0
FINISH_S_MAX: Final = 60.0
"""After the heal, whatever clients had begun ends within this time: above the sum of their own limits."""
AUDIT_S_MAX: Final = 60.0
HEALED_S_MAX: Final = 400.0
"""After every ledger was closed, nothing lacks copies any more within this time and the one that it takes to read all
copies at the lowest rate: the longest back-off of a worker, and the time that copies take."""
LEDGERS_MAX: Final = 12
COPIES_AT_A_TIME: Final = 30
EXPECTED: Final = (BinderyError, OSError, PowerLost)
"""What a task may end with; OSError covers TimeoutError."""


@dataclass(slots=True)
class Outcome:
    """What came of one seed."""

    seed: int
    violation: Violation | None
    trace: Trace
    faults: list[str] = field(default_factory=list)
    ledgers: int = 0
    acknowledged: int = 0
    simulated_s: float = 0.0
    callbacks: int = 0
    healing: HealingPlan | None = None
    entries_healed: int = 0
    """Copies that workers made."""
    marks_removed: int = 0


class World:
    """`faults`: the kinds to draw from; None: what goes with `healing`."""

    def __init__(
        self,
        seed: int,
        *,
        trace: Trace,
        faults: tuple[Fault, ...] | None = None,
        healing: HealingPlan | None = None,
        caught: Sequence[str] = (),
    ) -> None:
        """`caught`: exceptions that the product logs."""
        self._caught = caught
        self.seed = seed
        self.trace = trace
        self.rng = rng = random.Random(seed)
        self.loop = SimLoop()  # type: ignore[abstract]  # what is missing is what must not be used
        self.loop.on_advance = self._advanced
        self.loop.on_exception = self._unexpected
        self.network = Network(self.loop, random.Random(rng.getrandbits(64)), trace)
        self.loop.network = self.network
        self.layout = LedgersLayout()
        self.verdict = Verdict(trace)
        self.healing = healing
        self.healing_verdict = HealingVerdict(self, healing)
        self.verdict.heals = healing is not None
        self.verdict.on_change = self.healing_verdict.changed
        self.verdict.on_close = self.healing_verdict.closed
        self.tree = SimTree(
            self.layout, random.Random(rng.getrandbits(64)), self.verdict.committed,
            self.healing_verdict.sees,
        )  # fmt: skip
        self.client_settings = client_settings(rng)
        bookie_count = rng.choice((3, 4, 4, 5, 6))
        if healing is not None:
            bookie_count = max(bookie_count, 3 + healing.spares)
        self.bookies = [BookieMachine(self, f"bookie{number}") for number in range(bookie_count)]
        self.clients = [
            ClientMachine(self, f"client{number}", self._client_work) for number in range(rng.choice((1, 2, 2, 3)))
        ]
        self.auditors: list[AuditorMachine] = []
        if healing is not None:
            self.auditors = [AuditorMachine(self, f"auditor{number}", healing) for number in range(healing.auditors)]
        self.is_disk_lost = False
        self.drained: set[BookieId] = set()
        self.spoken_for: set[BookieId] = set()
        """Bookies with which an operator has plans."""
        self._operator: Process | None = None
        self._operators_session: SimStore | None = None
        self._fault_kinds = faults
        self.faults: list[str] = []
        self.ledgers: list[LedgerId] = []
        self._kept: list[Any] = []
        self._visits: list[tuple[Process, asyncio.Task[None]]] = []
        self._workloads: dict[str, tuple[Process, Workload]] = {}
        """By client machine: of its youngest process."""
        self._is_healing = False

    @property
    def machines(self) -> list[Machine]:
        return [*self.bookies, *self.clients, *self.auditors]

    @property
    def bookie_count(self) -> int:
        """That an ensemble may have."""
        return len(self.bookies) - (self.healing.spares if self.healing else 0)

    @property
    def may_lose_disk(self) -> bool:
        return self.healing is not None and self.healing.loses_disk

    def some_bookie(self) -> BookieMachine:
        return self.rng.choice(self.bookies)

    def some_client(self) -> ClientMachine:
        return self.rng.choice(self.clients)

    def some_machine(self) -> Machine:
        return self.rng.choice(self.machines)

    def later(self, delay_s: float, callback: Callable[..., Any], *args: Any) -> None:
        """As nobody's code."""
        self.network.at(delay_s, callback, *args)

    def keep(self, thing: Any) -> None:
        """Hold what a client forgot: no garbage collection shall take part."""
        self._kept.append(thing)

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        director = Process(self.loop, "director").spawn(self._direct())
        try:
            self.loop.run_until(
                lambda: director.done() or self.verdict.violation is not None,
                time_max=TIME_WITH_HEALING_MAX_S if self.healing else TIME_MAX_S,
                callbacks_max=CALLBACKS_WITH_HEALING_MAX if self.healing else CALLBACKS_MAX,
            )
        except Stuck as stuck:
            self.verdict.broken("liveness", str(stuck))
        self._look_at_tasks()
        outcome = Outcome(
            self.seed, self.verdict.violation, self.trace, self.faults, len(self.ledgers),
            self.verdict.acknowledged_count, self.loop.time(), self.loop.callbacks_run, self.healing,
            sum(auditor.entries_copied for auditor in self.auditors), self.healing_verdict.marks_removed,
        )  # fmt: skip
        self.trace.is_on = False  # what ends now is no part of it
        self.loop.dispose()
        return outcome

    async def _direct(self) -> None:
        process = current_process()
        assert process is not None
        session = self.tree.open_session(process)
        self._operator, self._operators_session = process, session
        await initialize_cluster(session, self.layout, randomness=self.rng)
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "a new cluster's bookies do not start")
        for machine in (*self.auditors, *self.clients):
            machine.start()
        if self.healing is not None:
            for at_s, fault in schedule(self, self.healing, self._fault_kinds):
                self.later(at_s, self._strike, fault)
            healed_at = self.loop.time() + self.healing.traffic_s
            await self._poll(lambda: self.loop.time() > healed_at)
        else:
            kinds = self._fault_kinds or FAULTS
            for _ in range(self.rng.choice((1, 1, 2, 2, 3, 3, 6))):
                self.later(self.rng.uniform(0.1, 3.5), self._strike, self.rng.choice(kinds))
            until = self.loop.time() + TRAFFIC_S
            await self._poll(lambda: self._all_finished() or self.loop.time() > until)
        self.heal()
        await self._within(START_S_MAX, self._all_serve, "healed, not every bookie serves")
        await self._within(FINISH_S_MAX, self._all_finished, "healed, not everything that was begun ends")
        if self.rng.random() < 0.5:
            await self._cut_all_power()
        auditor_client = await LedgerClient.connect(
            session, randomness=self.rng, layout=self.layout, settings=self.client_settings
        )
        auditor = Workload(self, auditor_client, "auditor", self.rng)
        await self._audit_all(auditor)
        await self._repeat(auditor.prove_writable, "healed, new writes do not go through")
        if self.healing is not None:
            await self._await_healed(auditor_client)
        if self.rng.random() < 0.3:
            await self._cut_all_power()
            await self._audit_all(auditor)
        await self._inspect()

    async def _await_healed(self, client: LedgerClient) -> None:
        """Until nothing is left to be healed, as every copy of every closed ledger shows."""
        assert self.healing is not None
        size = sum(found.length * found.write_quorum for found in self.healing_verdict.unseen.values())
        limit_s = HEALED_S_MAX + size / self.healing.settings.bytes_per_s_min
        deadline = self.loop.time() + limit_s
        while left := self.healing_verdict.what_is_left() or await self._missing_copy(client):
            if self.loop.time() > deadline:
                self.verdict.broken("not-healed", f"{left}, {limit_s:.0f} s after all faults were undone")
                return
            await asyncio.sleep(2.0)
        copied = sum(auditor.entries_copied for auditor in self.auditors)
        for auditor in self.auditors:
            self.verdict.check(not auditor.deaths, "no-crash", f"{auditor.name}: {auditor.deaths[:1]}")
        self.trace.add("HEALED", "nothing is missing", copied=copied, marks=self.healing_verdict.marks_removed)

    async def _missing_copy(self, client: LedgerClient) -> str:
        """Which copy is not what its writer wrote; empty: none. Where there are no checks of all ledgers, what writers
        did without is found by the notes of who closed them."""
        for ledger_id, metadata in self.healing_verdict.unseen.items():
            try:
                missing = await self._missing_copy_of(client, LedgerId(ledger_id), metadata)
            except BinderyError as error:
                missing = f"ledger {ledger_id} cannot be looked at: {error}"
            if missing:
                return missing
            self.healing_verdict.is_whole(ledger_id, metadata)
        return ""

    async def _missing_copy_of(self, client: LedgerClient, ledger_id: LedgerId, metadata: LedgerMetadata) -> str:
        missing: list[str] = []

        def look(replica: ReplicaRead) -> None:
            is_good = replica.verdict is ReplicaVerdict.GOOD
            if not is_good or replica.payload != payload_of(ledger_id, replica.entry_id):
                what = f"{replica.verdict.value} {replica.reason}"
                missing.append(f"ledger {ledger_id}, entry {replica.entry_id} at {replica.bookie_id}: {what}")

        for fragment in closed_fragments(metadata):
            for at in range(0, len(fragment.entry_ids), COPIES_AT_A_TIME):
                ids = [EntryId(one) for one in fragment.entry_ids[at : at + COPIES_AT_A_TIME]]
                await client.read_replicas(ledger_id, metadata, fragment.bookie_id, ids, look)
                if missing:
                    return missing[0]
        return ""

    async def _inspect(self) -> None:
        """Look into the bookies themselves. One may yet end by itself, of an error that its disk was slow to tell."""
        for bookie in self.bookies:
            if bookie.is_lost:
                continue
            is_done = False
            while not is_done and self.verdict.violation is None:
                await self._within(START_S_MAX, partial(getattr, bookie, "is_serving"), f"{bookie.name} does not serve")
                process = bookie.process
                if process is not None:
                    inspection = process.spawn(bookie.inspect())
                    await self._poll(lambda: inspection.done() or not process.is_alive)  # noqa: B023 - awaited within this turn
                    is_done = inspection.done()

    async def _client_work(self, client: LedgerClient, machine: ClientMachine) -> None:
        """What a client process does from its start."""
        assert machine.process is not None
        workload = Workload(self, client, machine.name, machine.rng)
        self._workloads[machine.name] = machine.process, workload
        if not self._is_healing:
            await workload.run(ledgers=machine.rng.choice((1, 2, 3)))

    def ledger_made(self, ledger_id: LedgerId) -> None:
        """Others come to see it."""
        self.ledgers.append(ledger_id)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            visitor = self.some_client()
            process, workload = self._workloads.get(visitor.name, (None, None))
            if workload is not None and process is visitor.process and len(self.ledgers) <= LEDGERS_MAX:
                assert process is not None
                self._visits.append((process, process.spawn(workload.visit(ledger_id))))

    def _strike(self, fault: Fault) -> None:
        if not self._is_healing:
            self.faults.append(fault.__name__)
            self.trace.add("FAULT", fault.__name__)
            fault(self)

    def heal(self) -> None:
        """Undo every fault. What it broke must mend by itself."""
        self._is_healing = True
        self.trace.add("HEAL", "all faults are undone")
        self.network.heal()
        for bookie in self.bookies:
            bookie.mend_disk()
            if bookie.disk.is_cutting:
                bookie.finish_power_cut()
        for machine in self.machines:
            machine.resume()
            session = machine.session
            if machine.process is not None and session is not None:
                machine.process.call_soon(self.tree.resume, session)
        for machine in (*self.bookies, *self.auditors):
            machine.is_wanted = True
            machine.start()

    # --- operators --------------------------------------------------------------------------------------------------

    def drain(self, bookie: BookieMachine) -> None:
        self.drained.add(bookie.bookie_id)
        self.spoken_for.add(bookie.bookie_id)
        self._operate(self._say(bookie, Intent.DRAINING))

    def maintain(self, bookie: BookieMachine, *, away_s: float) -> None:
        """Give leave, stop, and start again after `away_s`."""
        self.spoken_for.add(bookie.bookie_id)
        self._operate(self._maintain(bookie, away_s))

    def _operate(self, work: Any) -> None:
        assert self._operator is not None
        self._operator.spawn(work)

    async def _say(self, bookie: BookieMachine, intent: Intent) -> None:
        assert self._operators_session is not None
        store = MembershipStore(self._operators_session, clock_ms=bookie.wall_clock_ms)
        await store.set(bookie.bookie_id, intent, by="operator")
        self.trace.add("operator", str(intent), bookie_id=bookie.bookie_id)

    async def _maintain(self, bookie: BookieMachine, away_s: float) -> None:
        await self._say(bookie, Intent.MAINTENANCE)
        if bookie.is_lost or self._is_healing:
            return
        bookie.is_wanted = False
        if bookie.is_serving:
            bookie.stop()
        else:
            bookie.kill()
        await asyncio.sleep(away_s)
        bookie.is_wanted = True
        bookie.start()

    async def _cut_all_power(self) -> None:
        self.trace.add("FAULT", "the power goes everywhere")
        for bookie in self.bookies:
            bookie.kill(power=True)
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "after a power cut, not every bookie serves")

    async def _audit_all(self, auditor: Workload) -> None:
        for ledger_id in sorted(self.ledgers):
            complaint = f"healed, ledger {ledger_id} cannot be closed and read"
            await self._repeat(partial(auditor.audit, ledger_id), complaint)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _all_serve(self) -> bool:
        return all(bookie.is_serving or bookie.is_lost for bookie in self.bookies)

    def _all_finished(self) -> bool:
        visits_end = all(visit.done() or not process.is_alive for process, visit in self._visits)
        return visits_end and all(client.is_finished for client in self.clients if client.process is not None)

    async def _within(self, limit_s: float, condition: Callable[[], bool], complaint: str) -> None:
        deadline = self.loop.time() + limit_s
        await self._poll(lambda: condition() or self.loop.time() > deadline)
        self.verdict.check(condition(), "liveness", f"{complaint} within {limit_s} s")

    async def _poll(self, condition: Callable[[], bool]) -> None:
        """The world looks on from outside: nobody in it will say when."""
        while not condition():
            await asyncio.sleep(0.1)

    async def _repeat(self, attempt: Callable[[], Any], complaint: str) -> None:
        deadline = self.loop.time() + AUDIT_S_MAX
        while not await attempt():
            if self.loop.time() > deadline:
                self.verdict.broken("liveness", f"{complaint} within {AUDIT_S_MAX} s")
                return
            await asyncio.sleep(0.5)

    # --- looking ----------------------------------------------------------------------------------------------------

    def _advanced(self, now: float) -> None:
        self.trace.now = now

    def _unexpected(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, PowerLost):
            self.verdict.broken("no-crash", f"{context.get('message')}: {error!r}")

    def _look_at_tasks(self) -> None:
        for one in self._caught:
            self.verdict.broken("no-crash", f"an exception that nobody expects: {one}")
        for task in self.loop.tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, EXPECTED):
                    name = getattr(task.get_coro(), "__qualname__", "?")
                    self.verdict.broken("no-crash", f"{name} died of {error!r}")


@contextlib.contextmanager
def quiet(trace: Trace) -> Iterator[list[str]]:
    """The product's log lines become events of the trace, or nothing. Gives the exceptions that it logged: those that
    it survived, but did not expect."""
    caught: list[str] = []

    def keep(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        process = current_process()
        what = str(event.pop("event", ""))
        event.pop("module", None)
        if method == "exception":
            caught.append(f"{what} at {process.host if process else '-'}: {sys.exc_info()[1]!r}")
            event.pop("exc_info", None)
        trace.add(process.host if process else "-", f"{method} {what}", **event)
        raise structlog.DropEvent

    before, disabled = structlog.get_config(), logging.root.manager.disable
    level = logging.INFO if trace.is_on else logging.ERROR
    structlog.configure(
        processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(level), cache_logger_on_first_use=False
    )
    logging.disable(logging.CRITICAL)
    try:
        yield caught
    finally:
        structlog.configure(**before)
        logging.disable(disabled)


def run_seed(
    seed: int,
    *,
    is_traced: bool = False,
    faults: tuple[Fault, ...] | None = None,
    healing: HealingKind | bool | None = None,
) -> Outcome:
    """One world from beginning to end. Garbage is collected between runs, never within one.

    `healing`: whether there are auditors, and in which kind of world; None: chosen at random, if nobody says which
    `faults` there are.
    """
    if healing is None:
        plan = draw_plan(seed) if faults is None else None
    elif isinstance(healing, HealingKind):
        plan = draw_plan(seed, healing)
    else:
        plan = draw_plan(seed, is_wanted=True) if healing else None
    was_enabled = gc.isenabled()
    gc.disable()
    trace = Trace(is_on=is_traced)
    try:
        with quiet(trace) as caught:
            return World(seed, trace=trace, faults=faults, healing=plan, caught=caught).run()
    finally:
        if was_enabled:
            gc.enable()
