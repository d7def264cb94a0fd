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
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import structlog
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.ids import LedgerId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout import LedgersLayout

from bindery_simulation.loop import Process, SimLoop, Stuck, current_process
from bindery_simulation.network import Network
from bindery_simulation.service.faults import FAULTS, Fault
from bindery_simulation.service.machine import BookieMachine, ClientMachine, Machine, client_settings
from bindery_simulation.service.metadata_tree import SimTree
from bindery_simulation.service.verdict import Verdict, Violation
from bindery_simulation.service.worker import PowerLost
from bindery_simulation.service.workload import Workload
from bindery_simulation.trace import Trace

TIME_MAX_S: Final = 600.0
CALLBACKS_MAX: Final = 3_000_000
START_S_MAX: Final = 30.0
"""Bookies serve so soon after they were started, sessions of former lives included."""
TRAFFIC_S: Final = 10.0
FINISH_S_MAX: Final = 60.0
"""After the heal, whatever clients had begun ends within this time: above the sum of their own limits."""
AUDIT_S_MAX: Final = 60.0
LEDGERS_MAX: Final = 12
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


class World:
    """`faults`: the kinds to draw from."""

    def __init__(self, seed: int, *, trace: Trace, faults: tuple[Fault, ...] = FAULTS) -> None:
        self.seed = seed
        self.trace = trace
        self.lots = lots = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.loop = SimLoop()  # type: ignore[abstract]  # what is missing is what must not be used
        self.loop.on_advance = self._advanced
        self.loop.on_exception = self._unexpected
        self.network = Network(self.loop, random.Random(lots.getrandbits(64)), trace)  # noqa: S311
        self.loop.network = self.network
        self.layout = LedgersLayout()
        self.verdict = Verdict(trace)
        self.tree = SimTree(self.layout, random.Random(lots.getrandbits(64)), self.verdict.committed)  # noqa: S311
        self.client_settings = client_settings(lots)
        self.bookies = [BookieMachine(self, f"bookie{number}") for number in range(lots.choice((3, 4, 4, 5, 6)))]
        self.clients = [
            ClientMachine(self, f"client{number}", self._client_work) for number in range(lots.choice((1, 2, 2, 3)))
        ]
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
        return [*self.bookies, *self.clients]

    @property
    def bookie_count(self) -> int:
        return len(self.bookies)

    def some_bookie(self) -> BookieMachine:
        return self.lots.choice(self.bookies)

    def some_client(self) -> ClientMachine:
        return self.lots.choice(self.clients)

    def some_machine(self) -> Machine:
        return self.lots.choice(self.machines)

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
                time_max=TIME_MAX_S,
                callbacks_max=CALLBACKS_MAX,
            )
        except Stuck as stuck:
            self.verdict.broken("liveness", str(stuck))
        self._look_at_tasks()
        outcome = Outcome(
            self.seed, self.verdict.violation, self.trace, self.faults, len(self.ledgers),
            self.verdict.acknowledged_count, self.loop.time(), self.loop.callbacks_run,
        )  # fmt: skip
        self.loop.dispose()
        return outcome

    async def _direct(self) -> None:
        process = current_process()
        assert process is not None
        session = self.tree.open_session(process)
        await initialize_cluster(session, self.layout, randomness=self.lots)
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "a new cluster's bookies do not start")
        for client in self.clients:
            client.start()
        for _ in range(self.lots.choice((1, 1, 2, 2, 3, 3, 6))):
            self.later(self.lots.uniform(0.1, 3.5), self._strike, self.lots.choice(self._fault_kinds))
        until = self.loop.time() + TRAFFIC_S
        await self._poll(lambda: self._all_finished() or self.loop.time() > until)
        self.heal()
        await self._within(START_S_MAX, self._all_serve, "healed, not every bookie serves")
        await self._within(FINISH_S_MAX, self._all_finished, "healed, not everything that was begun ends")
        if self.lots.random() < 0.5:
            await self._cut_all_power()
        auditor_client = await LedgerClient.connect(
            session, randomness=self.lots, layout=self.layout, settings=self.client_settings
        )
        auditor = Workload(self, auditor_client, "auditor", self.lots)
        await self._audit_all(auditor)
        await self._repeat(auditor.prove_writable, "healed, new writes do not go through")
        if self.lots.random() < 0.3:
            await self._cut_all_power()
            await self._audit_all(auditor)
        await self._inspect()

    async def _inspect(self) -> None:
        """Look into the bookies themselves. One may yet end by itself, of an error that its disk was slow to tell."""
        for bookie in self.bookies:
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
        workload = Workload(self, client, machine.name, machine.lots)
        self._workloads[machine.name] = machine.process, workload
        if not self._is_healing:
            await workload.run(ledgers=machine.lots.choice((1, 2, 3)))

    def ledger_made(self, ledger_id: LedgerId) -> None:
        """Others come to see it."""
        self.ledgers.append(ledger_id)
        for _ in range(self.lots.choice((0, 1, 1, 2))):
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
        for bookie in self.bookies:
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
        return all(bookie.is_serving for bookie in self.bookies)

    def _all_finished(self) -> bool:
        visits_end = all(visit.done() or not process.is_alive for process, visit in self._visits)
        return visits_end and all(client.is_finished for client in self.clients if client.process is not None)

    async def _within(self, limit_s: float, condition: Callable[[], bool], complaint: str) -> None:
        deadline = self.loop.time() + limit_s
        await self._poll(lambda: condition() or self.loop.time() > deadline)
        self.verdict.check(condition(), "liveness", f"{complaint} within {limit_s} s")

    async def _poll(self, condition: Callable[[], bool]) -> None:
        """The world looks on from outside: nobody in it will say when."""
        while not condition():  # noqa: ASYNC110
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
        for task in self.loop.tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, EXPECTED):
                    name = getattr(task.get_coro(), "__qualname__", "?")
                    self.verdict.broken("no-crash", f"{name} died of {error!r}")


@contextlib.contextmanager
def quiet(trace: Trace) -> Iterator[None]:
    """The product's log lines become events of the trace, or nothing."""

    def keep(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        process = current_process()
        what = str(event.pop("event", ""))
        event.pop("module", None)
        trace.add(process.host if process else "-", f"{method} {what}", **event)
        raise structlog.DropEvent

    before, disabled = structlog.get_config(), logging.root.manager.disable
    level = logging.INFO if trace.is_on else logging.CRITICAL
    structlog.configure(
        processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(level), cache_logger_on_first_use=False
    )
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        structlog.configure(**before)
        logging.disable(disabled)


def run_seed(seed: int, *, is_traced: bool = False, faults: tuple[Fault, ...] = FAULTS) -> Outcome:
    """One world from beginning to end. Garbage is collected between runs, never within one."""
    was_enabled = gc.isenabled()
    gc.disable()
    trace = Trace(is_on=is_traced)
    try:
        with quiet(trace):
            return World(seed, trace=trace, faults=faults).run()
    finally:
        if was_enabled:
            gc.enable()
