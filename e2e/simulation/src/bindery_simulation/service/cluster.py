"""The machines of a simulated cluster, and the actions of its operator."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from bindery_client.client import LedgerClient
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent, MembershipStore

from bindery_simulation.loop import Process
from bindery_simulation.service.bookie_machine import BookieMachine
from bindery_simulation.service.healing.auditor_machine import AuditorMachine
from bindery_simulation.service.healing.plan import HealingPlan
from bindery_simulation.service.healing.verdict import HealingVerdict
from bindery_simulation.service.machine import ClientMachine, Machine
from bindery_simulation.service.metadata_tree import SimStore
from bindery_simulation.service.site import Site
from bindery_simulation.trace import Trace


class Cluster(Site):
    """A cluster of three to six bookies, one to three clients, and auditors if `healing` is given."""

    def __init__(self, seed: int, *, trace: Trace, healing: HealingPlan | None) -> None:
        super().__init__(seed, trace=trace, healing=healing)
        self.bookies: list[BookieMachine] = []
        self.healing_verdict = HealingVerdict(self, healing, self.bookies)
        self.verdict.heals = healing is not None
        self.verdict.on_change = self.healing_verdict.changed
        self.verdict.on_close = self.healing_verdict.closed
        self.tree.watch(self.healing_verdict.sees)
        self.on_disk_lost = self.healing_verdict.disk_lost
        self.on_copies = self.healing_verdict.copying
        rng = self.rng
        bookie_count = rng.choice((3, 4, 4, 5, 6))
        if healing is not None:
            bookie_count = max(bookie_count, 3 + healing.spares)
        self.bookies += [BookieMachine(self, f"bookie{number}") for number in range(bookie_count)]
        self.clients = self.make_clients()
        self.callers: list[str] = []
        """Names of the hosts of clients of brokers."""
        self.auditors: list[AuditorMachine] = []
        if healing is not None:
            self.auditors = [AuditorMachine(self, f"auditor{number}", healing) for number in range(healing.auditors)]
        self.is_disk_lost = False
        self.drained: set[BookieId] = set()
        self.reserved: set[BookieId] = set()
        """Bookies that the operator drains or maintains."""
        self.is_healing = False
        """Whether all faults are undone and no new faults are injected."""
        self._operator: tuple[Process, SimStore] | None = None
        self._kept: list[Any] = []

    def make_clients(self) -> Sequence[ClientMachine]:
        """Return the machines that use ledgers: one to three clients."""
        count = self.rng.choice((1, 2, 2, 3))
        return [ClientMachine(self, f"client{number}", self.client_work) for number in range(count)]

    async def client_work(self, client: LedgerClient, machine: ClientMachine) -> None:
        """Do the work of a new client process."""
        raise NotImplementedError

    @property
    def machines(self) -> list[Machine]:
        return [*self.bookies, *self.clients, *self.auditors]

    @property
    def wanted_machines(self) -> list[Machine]:
        """The machines that must run at the end."""
        return [*self.bookies, *self.auditors]

    @property
    def bookie_count(self) -> int:
        """Maximum size of an ensemble."""
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

    def keep(self, thing: Any) -> None:
        """Keep a reference to an object that a client dropped, so that its deletion does not influence the run."""
        self._kept.append(thing)

    def heal(self) -> None:
        """Undo every fault. The cluster must repair the consequences without help."""
        self.is_healing = True
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
        for machine in self.wanted_machines:
            machine.is_wanted = True
            machine.start()

    # --- the operator -----------------------------------------------------------------------------------------------

    def set_operator(self, process: Process, session: SimStore) -> None:
        """Run the operator's actions in this process, with this session."""
        self._operator = process, session

    def drain(self, bookie: BookieMachine) -> None:
        """Mark a bookie as draining."""
        self.drained.add(bookie.bookie_id)
        self.reserved.add(bookie.bookie_id)
        self._operate(self._set_intent(bookie, Intent.DRAINING))

    def maintain(self, bookie: BookieMachine, *, away_s: float) -> None:
        """Put a bookie into maintenance, stop it, and start it again after `away_s`."""
        self.reserved.add(bookie.bookie_id)
        self._operate(self._maintain(bookie, away_s))

    def _operate(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._operator is not None
        self._operator[0].spawn(work)

    async def _set_intent(self, bookie: BookieMachine, intent: Intent) -> None:
        assert self._operator is not None
        store = MembershipStore(self._operator[1], clock_ms=bookie.wall_clock_ms)
        await store.set(bookie.bookie_id, intent, by="operator")
        self.trace.add("operator", str(intent), bookie_id=bookie.bookie_id)

    async def _maintain(self, bookie: BookieMachine, away_s: float) -> None:
        await self._set_intent(bookie, Intent.MAINTENANCE)
        if bookie.is_lost or self.is_healing:
            return
        bookie.is_wanted = False
        if bookie.is_serving:
            bookie.stop()
        else:
            bookie.kill()
        await asyncio.sleep(away_s)
        bookie.is_wanted = True
        bookie.start()
