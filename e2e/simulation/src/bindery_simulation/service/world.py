"""Run one simulated cluster from its first start to the verdict. The seed determines every decision.

Bookies and clients start, and clients work while faults are injected. Then all faults are undone. Every operation in
progress must end, and new writes must succeed. Every ledger is closed, read and checked, sometimes again after a power
cut of all bookies.
"""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bindery_client.client import LedgerClient
from bindery_client.ledger.replica import ReplicaRead
from bindery_client.ledger.replica import Verdict as ReplicaVerdict
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import EntryId, LedgerId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_metadata.cluster import initialize_cluster

from bindery_simulation.loop import Process, current_process
from bindery_simulation.service.director import START_S_MAX, Director, quiet
from bindery_simulation.service.faults import FAULTS, Fault
from bindery_simulation.service.healing.faults import schedule
from bindery_simulation.service.healing.plan import HealingKind, HealingPlan, draw_plan
from bindery_simulation.service.machine import ClientMachine
from bindery_simulation.service.verdict import Violation, payload_of
from bindery_simulation.service.workload import Workload
from bindery_simulation.trace import Trace

TIME_MAX_S: Final = 600.0
"""Maximum simulated time of a run in seconds."""
CALLBACKS_MAX: Final = 3_000_000
"""Maximum number of callbacks of a run."""
TIME_WITH_HEALING_MAX_S: Final = 6_000.0
"""Maximum simulated time in seconds of a run with auditors."""
CALLBACKS_WITH_HEALING_MAX: Final = 10_000_000
"""Maximum number of callbacks of a run with auditors."""
TRAFFIC_S: Final = 10.0
"""Maximum time in seconds of traffic and faults in a cluster without auditors."""
FINISH_S_MAX: Final = 60.0
"""Maximum time in seconds from the end of all faults to the end of all operations of clients: more than their
timeouts."""
HEALED_S_MAX: Final = 400.0
"""Maximum time in seconds from the closing of all ledgers until none is under-replicated: the longest back-off of a
worker, and the time that copies take. The time to read all copies at the lowest rate is added, and the time in which
bookies that lost their disk refill it."""
LEDGERS_MAX: Final = 12
"""Number of ledgers after which other clients no longer open new ledgers."""
COPIES_PER_READ: Final = 30
"""Number of entries per read of a bookie's replicas."""


@dataclass(slots=True)
class Outcome:
    """The result of one seed."""

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
    """Number of replicas of entries that workers created."""
    marks_removed: int = 0


class World(Director):
    """One run of a cluster. `faults`: the faults to choose from; None: the faults of the kind of cluster."""

    def __init__(
        self,
        seed: int,
        *,
        trace: Trace,
        faults: tuple[Fault, ...] | None = None,
        healing: HealingPlan | None = None,
        caught: Sequence[str] = (),
    ) -> None:
        """`caught`: list to which exceptions that the product logs are added, see `quiet`."""
        super().__init__(seed, trace=trace, healing=healing, caught=caught)
        self._fault_kinds = faults
        self.ledgers: list[LedgerId] = []
        self._visits: list[tuple[Process, asyncio.Task[None]]] = []
        self._workloads: dict[str, tuple[Process, Workload]] = {}
        """Newest process of each client machine, and the workload of this process."""

    # --- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.play(
            time_max=TIME_WITH_HEALING_MAX_S if self.healing else TIME_MAX_S,
            callbacks_max=CALLBACKS_WITH_HEALING_MAX if self.healing else CALLBACKS_MAX,
        )
        outcome = Outcome(
            self.seed,
            self.verdict.violation,
            self.trace,
            self.faults,
            len(self.ledgers),
            self.verdict.acknowledged_count,
            self.loop.time(),
            self.loop.callbacks_run,
            self.healing,
            sum(auditor.entries_copied for auditor in self.auditors),
            self.healing_verdict.marks_removed,
        )
        self.trace.is_on = False  # the end of the loop is not part of the run
        self.loop.dispose()
        return outcome

    async def _direct(self) -> None:
        process = current_process()
        assert process is not None
        session = self.tree.open_session(process)
        self.set_operator(process, session)
        await initialize_cluster(session, self.layout, randomness=self.rng)
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "the bookies of a new cluster do not serve")
        for machine in (*self.auditors, *self.clients):
            machine.start()
        if self.healing is not None:
            for at_s, fault in schedule(self, self.healing, self._fault_kinds):
                self.later(at_s, self._inject, fault)
            healed_at = self.loop.time() + self.healing.traffic_s
            await self._poll(lambda: self.loop.time() > healed_at)
        else:
            kinds = self._fault_kinds or FAULTS
            for _ in range(self.rng.choice((1, 1, 2, 2, 3, 3, 6))):
                self.later(self.rng.uniform(0.1, 3.5), self._inject, self.rng.choice(kinds))
            until = self.loop.time() + TRAFFIC_S
            await self._poll(lambda: self._all_finished() or self.loop.time() > until)
        self.heal()
        await self._within(START_S_MAX, self._all_serve, "after all faults, not every bookie serves")
        await self._within(FINISH_S_MAX, self._all_finished, "after all faults, not every operation ends")
        if self.rng.random() < 0.5:
            await self._cut_all_power()
        auditor_client = await LedgerClient.connect(
            session, randomness=self.rng, layout=self.layout, settings=self.client_settings
        )
        auditor = Workload(self, auditor_client, "auditor", self.rng)
        await self._audit_all(auditor)
        await self._repeat(auditor.prove_writable, "after all faults, new writes do not succeed")
        if self.healing is not None:
            await self._await_healed(auditor_client)
        if self.rng.random() < 0.3:
            await self._cut_all_power()
            await self._audit_all(auditor)
        await self._inspect()

    async def _await_healed(self, client: LedgerClient) -> None:
        """Wait until every replica of every closed ledger is correct. The replicas are read from the bookies."""
        assert self.healing is not None
        unread = self.healing_verdict.unread.values()
        size = sum(found.length * found.write_quorum for found in unread)
        limit_s = HEALED_S_MAX + size / self.healing.settings.bytes_per_s_min
        limit_s += sum(bookie.refill_s_max(unread) for bookie in self.bookies)
        deadline = self.loop.time() + limit_s
        while left := self.healing_verdict.unrepaired() or await self._missing_copy(client):
            if self.loop.time() > deadline:
                self.verdict.broken("not-healed", f"{left}, {limit_s:.0f} s after all faults were undone")
                return
            await asyncio.sleep(2.0)
        copied = sum(auditor.entries_copied for auditor in self.auditors)
        for auditor in self.auditors:
            self.verdict.check(not auditor.deaths, "no-crash", f"{auditor.name}: {auditor.deaths[:1]}")
        self.trace.add("HEALED", "nothing is missing", copied=copied, marks=self.healing_verdict.marks_removed)

    async def _missing_copy(self, client: LedgerClient) -> str:
        """Return a description of a replica that is missing or wrong; empty: there is none.

        In clusters without full checks, closing records name the ledgers whose writers did not store every entry on
        every bookie.
        """
        for ledger_id, metadata in self.healing_verdict.unread.items():
            try:
                missing = await self._missing_copy_of(client, LedgerId(ledger_id), metadata)
            except BinderyError as error:
                missing = f"ledger {ledger_id} cannot be checked: {error}"
            if missing:
                return missing
            self.healing_verdict.copies_read(ledger_id, metadata)
        return ""

    async def _missing_copy_of(self, client: LedgerClient, ledger_id: LedgerId, metadata: LedgerMetadata) -> str:
        missing: list[str] = []

        def check(replica: ReplicaRead) -> None:
            is_good = replica.verdict is ReplicaVerdict.GOOD
            if not is_good or replica.payload != payload_of(ledger_id, replica.entry_id):
                what = f"{replica.verdict.value} {replica.reason}"
                missing.append(f"ledger {ledger_id}, entry {replica.entry_id} at {replica.bookie_id}: {what}")

        for fragment in closed_fragments(metadata):
            for at in range(0, len(fragment.entry_ids), COPIES_PER_READ):
                ids = [EntryId(one) for one in fragment.entry_ids[at : at + COPIES_PER_READ]]
                await client.read_replicas(ledger_id, metadata, fragment.bookie_id, ids, check)
                if missing:
                    return missing[0]
        return ""

    async def _inspect(self) -> None:
        """Check the state of each bookie. A bookie may restart meanwhile because its disk reported an error late."""
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

    async def client_work(self, client: LedgerClient, machine: ClientMachine) -> None:
        """Do the work of a new client process."""
        assert machine.process is not None
        workload = Workload(self, client, machine.name, machine.rng, self._ledger_created)
        self._workloads[machine.name] = machine.process, workload
        if not self.is_healing:
            await workload.run(ledgers=machine.rng.choice((1, 2, 3)))

    def _ledger_created(self, ledger_id: LedgerId) -> None:
        """Let up to two random clients open the new ledger."""
        self.ledgers.append(ledger_id)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            visitor = self.some_client()
            process, workload = self._workloads.get(visitor.name, (None, None))
            if workload is not None and process is visitor.process and len(self.ledgers) <= LEDGERS_MAX:
                assert process is not None
                self._visits.append((process, process.spawn(workload.visit(ledger_id))))

    async def _audit_all(self, auditor: Workload) -> None:
        for ledger_id in sorted(self.ledgers):
            complaint = f"after all faults, ledger {ledger_id} cannot be closed and read"
            await self._repeat(partial(auditor.audit, ledger_id), complaint)

    def _all_finished(self) -> bool:
        visits_end = all(visit.done() or not process.is_alive for process, visit in self._visits)
        return visits_end and all(client.is_finished for client in self.clients if client.process is not None)


def run_seed(
    seed: int,
    *,
    is_traced: bool = False,
    faults: tuple[Fault, ...] | None = None,
    healing: HealingKind | bool | None = None,
) -> Outcome:
    """Run one cluster from beginning to end, without garbage collection.

    `healing`: the kind of cluster with auditors, True for any kind, or False for no auditors. None: determined by the
    seed, or no auditors if `faults` are given.
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
