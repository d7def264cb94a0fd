"""Run one simulated cluster with brokers, from its first start to the judgement. The seed determines every decision.

Bookies and brokers start, clients produce and consume while faults are injected. Then all faults are undone. Every
client must end, every topic must accept a message, and a consumer takes what is left in each subscription. The judge
gets the recorded history.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bindery_broker.ownership.bundles import Bundle
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.stores.store import Create, Op, Set
from bindery_pulsar.managed_ledger_codec import decode_topic
from bindery_pulsar.topic_name import TopicName
from bindery_pulsar.znode_layout import MANAGED_LEDGERS_ROOT

from bindery_simulation.loop import Process, current_process
from bindery_simulation.service.director import START_S_MAX, Director, quiet
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.machine import ClientMachine, Machine
from bindery_simulation.service.verdict import Violation
from bindery_simulation.topics.broker_machine import BrokerMachine
from bindery_simulation.topics.calls import Caller
from bindery_simulation.topics.faults import FAULTS
from bindery_simulation.topics.gateway import RULES, SUPPORTED
from bindery_simulation.topics.judging.history import History, Key, Kind, Retry, SubscriptionId, Trimmed, Written
from bindery_simulation.topics.judging.judge import judge
from bindery_simulation.topics.peers import Switchboard
from bindery_simulation.topics.plan import REMOTE_SHARE, SubscriptionPlan, draw_plan, targets
from bindery_simulation.topics.settings import broker_settings
from bindery_simulation.topics.workload import Consumer, Drainer, Operator, Producer
from bindery_simulation.trace import Trace

TIME_MAX_S: Final = 900.0
"""Maximum simulated time of a run in seconds."""
CALLBACKS_MAX: Final = 3_000_000
"""Maximum number of callbacks of a run."""
FINISH_S_MAX: Final = 60.0
"""Maximum time in seconds from the end of all faults to the end of all clients."""
DRAIN_S_MAX: Final = 120.0
"""Maximum time in seconds until a subscription has nothing left, or another message is acknowledged, once only one
consumer takes from it. A slow cluster takes 4 s for four messages."""
TOPIC_DEPTH: Final = 4
"""Number of parts of a topic's path below the root of managed ledgers: tenant, namespace, domain, name."""
WRITE_S_MAX: Final = 60.0
"""Maximum time in seconds until a topic accepts a message after all faults."""


@dataclass(slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    violation: Violation | None
    trace: Trace
    faults: list[str] = field(default_factory=list)
    calls: int = 0
    deliveries: int = 0
    owners: int = 0
    """Number of times that a broker opened a topic."""
    simulated_s: float = 0.0
    callbacks: int = 0
    trimmed: int = 0
    """Number of ledgers that were deleted."""
    copies: int = 0
    """Number of copies that brokers stored for others."""


class World(Director):
    """One run. `faults`: the faults to choose from; None: FAULTS. `kinds`: types of subscriptions."""

    def __init__(
        self,
        seed: int,
        *,
        trace: Trace,
        faults: Sequence[Fault] | None = None,
        kinds: Sequence[Kind] = SUPPORTED,
        has_delays: bool = True,
        has_retries: bool = True,
        remote_share: float = REMOTE_SHARE,
        caught: Sequence[str] = (),
    ) -> None:
        self.history = History(lambda: self.loop.time())
        self.plan = draw_plan(
            random.Random(seed), kinds, has_delays=has_delays, has_retries=has_retries, remote_share=remote_share
        )
        super().__init__(seed, trace=trace, healing=None, caught=caught)
        self._fault_kinds = tuple(faults or FAULTS)
        self._ledgers: dict[str, tuple[int, ...]] = {}
        self._process_names: dict[Process, str] = {}
        self._subscriptions: dict[SubscriptionId, SubscriptionPlan] = {}
        sees = self.healing_verdict.sees
        self.tree.watch(lambda ops, owner: [*sees(ops, owner), *self._sees(ops, owner)])

    # --- machines -----------------------------------------------------------------------------------------------------

    def make_clients(self) -> Sequence[ClientMachine]:
        settings = broker_settings(self.rng, bookies=len(self.bookies), inactive_s_max=self.plan.inactive_s_max)
        self.switchboard = Switchboard(self, trouble_share=self.plan.trouble_share)
        self.brokers = [
            BrokerMachine(
                self, f"broker{number}", settings=settings, history=self.history, switchboard=self.switchboard
            )
            for number in range(self.plan.brokers)
        ]
        return self.brokers

    @property
    def wanted_machines(self) -> list[Machine]:
        return [*super().wanted_machines, *self.brokers]

    def _caller(self, name: str) -> Caller:
        self.callers.append(name)
        return Caller(self, name, self.brokers, self.history)

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.play(time_max=TIME_MAX_S, callbacks_max=CALLBACKS_MAX)
        violation = self.verdict.violation
        if violation is None or violation.invariant == "liveness":  # the judge may name the reason
            breach = next(judge(self.history, RULES), None)
            if breach is not None:
                violation = Violation(breach.invariant, breach.text)
                self.trace.add("VERDICT", str(violation), calls=breach.calls)
        calls = self.history.calls
        outcome = Outcome(
            self.seed,
            violation,
            self.trace,
            self.faults,
            len(calls),
            sum(len(call.deliveries) for call in calls),
            len(self.history.opened),
            self.loop.time(),
            self.loop.callbacks_run,
            sum(len(event.ledgers) for event in self.history.trimmed),
            self.switchboard.copies,
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
        for broker in self.brokers:
            broker.start()
        await self._within(START_S_MAX, self._brokers_serve, "the brokers of a new cluster do not serve")
        ends = self.loop.time() + self.plan.traffic_s
        work = self._start_clients(lambda: not self.is_healing)
        for _ in range(self.plan.faults):
            self.later(self.rng.uniform(0.1, self.plan.traffic_s), self._inject, self.rng.choice(self._fault_kinds))
        await self._poll(lambda: self.loop.time() > ends)
        self.heal()
        await self._within(START_S_MAX, self._all_serve, "after all faults, not every bookie serves")
        await self._within(START_S_MAX, self._brokers_serve, "after all faults, not every broker serves")
        await self._within(FINISH_S_MAX, lambda: all(task.done() for task in work), "after all faults, a client hangs")
        await self._drain()

    def _start_clients(self, is_busy: Callable[[], bool]) -> "list[asyncio.Task[None]]":
        """Start the clients of the plan. Return their tasks."""
        rng = self.rng
        begin = asyncio.Event()
        work: list[asyncio.Task[None]] = []
        plans = [plan for topic in self.plan.topics for plan in topic.subscriptions]
        consumers: list[Consumer] = []
        for topic in self.plan.topics:
            for _ in range(topic.producers):
                caller = self._caller(f"p{len(self.callers)}")
                producer = Producer(caller, rng, is_busy, delayed_share=self.plan.delayed_share)
                work.append(caller.process.spawn(producer.run(topic.name, begin)))
        for plan in plans:
            for _ in range(plan.consumers):
                caller = self._caller(f"c{len(self.callers)}")
                consumer = Consumer(
                    caller,
                    rng,
                    is_busy,
                    plan,
                    retry_share=self.plan.retry_share,
                    dead_share=self.plan.dead_share,
                )
                consumers.append(consumer)
                run = consumer.run_temporary() if plan.is_temporary else consumer.run(begin)
                work.append(caller.process.spawn(run))
        caller = self._caller("operator")
        operator = Operator(caller, rng, is_busy)
        work.append(caller.process.spawn(operator.prepare(plans, begin)))
        if self.plan.is_remote:
            work.append(caller.process.spawn(self._ask_for_targets(plans, begin, is_busy)))
        for _ in range(self.plan.seeks):
            self.later(rng.uniform(1.0, self.plan.traffic_s), self._seek, caller, operator, consumers)
        return work

    async def _ask_for_targets(
        self, plans: Sequence[SubscriptionPlan], begin: asyncio.Event, is_busy: Callable[[], bool]
    ) -> None:
        """Ask brokers for the targets of moves all the time, preferably those that do not own the source.

        So the targets often belong to another broker, also after their owner was lost.
        """
        await begin.wait()
        while is_busy():
            for plan in plans:
                source = Bundle.of(TopicName.parse(plan.id.topic))
                others = [one for one in self.brokers if one.broker and not one.broker.ownership.is_mine(source)]
                for target in targets(plan.id):
                    self.rng.choice(others or self.brokers).ask_for(target)
            await asyncio.sleep(self.rng.choice((0.3, 1.0)))

    def _seek(self, caller: Caller, operator: Operator, consumers: Sequence[Consumer]) -> None:
        consumer = self.rng.choice(consumers)
        if not self.is_healing and not consumer.plan.is_temporary:
            keys: list[Key] = [key for one in consumers if one.plan.id == consumer.plan.id for key in one.received]
            caller.process.spawn(operator.seek(consumer.plan.id, keys))

    async def _drain(self) -> None:
        """Store a message in each topic, then take what is left in each subscription that certainly exists."""
        for topic in self.plan.topics:
            drainer = self._drainer(f"writer-{topic.name}")
            await self._until(
                WRITE_S_MAX, partial(drainer.write, topic.name), f"after all faults, {topic.name} accepts no message"
            )
        kinds = {
            plan.id._replace(generation=0): plan.kind for topic in self.plan.topics for plan in topic.subscriptions
        }
        for subscription in self.history.lasting():
            drainer = self._drainer(f"drainer-{subscription.name}")
            kind = kinds[subscription._replace(generation=0)]
            complaint = (
                f"after all faults, {subscription.name} of {subscription.topic} still has unacknowledged messages"
            )
            await self._until(
                DRAIN_S_MAX,
                partial(drainer.drain, subscription, kind),
                complaint,
                progress=partial(getattr, drainer, "acknowledged"),
            )
        # A request that arrives late must store nothing any more, so the targets are read after all have arrived.
        complaint = "after all faults, a request between brokers hangs"
        await self._within(FINISH_S_MAX, lambda: self.switchboard.is_idle, complaint)
        requests = [call.request for call in self.history.calls if isinstance(call.request, Retry)]
        for subscription, is_dead in sorted({(request.subscription, request.is_dead) for request in requests}):
            drainer = self._drainer(f"reader-{subscription.name}")
            what = "dead-letter topic" if is_dead else "retry topic"
            complaint = f"after all faults, the {what} of {subscription.name} of {subscription.topic} is not read"
            await self._until(DRAIN_S_MAX, partial(drainer.read_copies, subscription, is_dead=is_dead), complaint)

    def _drainer(self, name: str) -> Drainer:
        return Drainer(self._caller(name), self.rng, lambda: True)

    async def _until(
        self,
        limit_s: float,
        attempt: Callable[[], Coroutine[Any, Any, bool]],
        complaint: str,
        *,
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        """Repeat the attempt until it returns True. The limit begins anew whenever `progress` changes."""
        deadline = self.loop.time() + limit_s
        reached = progress()
        while not await attempt():
            if progress() != reached:
                deadline, reached = self.loop.time() + limit_s, progress()
            if self.loop.time() > deadline:
                self.verdict.broken("liveness", f"{complaint} within {limit_s} s")
                return
            await asyncio.sleep(0.2)

    def _brokers_serve(self) -> bool:
        return all(broker.is_serving for broker in self.brokers)

    # --- metadata -----------------------------------------------------------------------------------------------------

    def _sees(self, ops: Sequence[Op], owner: int) -> list[Callable[[], None]]:
        """Return what records the writes of a transaction to the znodes of topics."""
        reports: list[Callable[[], None]] = []
        for op in ops:
            if isinstance(op, Set | Create) and op.path.startswith(f"{MANAGED_LEDGERS_ROOT}/"):
                parts = op.path.removeprefix(f"{MANAGED_LEDGERS_ROOT}/").split("/")
                process = self.tree.process_of(owner)
                if len(parts) >= TOPIC_DEPTH and process is not None:
                    topic = "/".join((parts[0], parts[1], parts[3]))
                    cursor = parts[TOPIC_DEPTH] if len(parts) > TOPIC_DEPTH else None
                    reports.append(partial(self._written, topic, cursor, process, op.data))
        return reports

    def _written(self, topic: str, cursor: str | None, process: Process, data: bytes) -> None:
        name = self._process_names.setdefault(process, f"{process.host}#{len(self._process_names)}")
        self.history.written.append(Written(self.history.instant(), topic, cursor, name))
        if cursor is not None or not data:
            return
        ledgers = tuple(record.ledger_id for record in decode_topic(data).ledgers)
        gone = tuple(one for one in self._ledgers.get(topic, ()) if one not in ledgers)
        self._ledgers[topic] = ledgers
        self.trace.add("metadata", "topic", topic=topic, ledgers=ledgers, by=name)
        if gone:
            self.history.trimmed.append(Trimmed(self.history.instant(), topic, gone))


def run_seed(
    seed: int,
    *,
    is_traced: bool = False,
    faults: Sequence[Fault] | None = None,
    kinds: Sequence[Kind] = SUPPORTED,
    has_delays: bool = True,
    has_retries: bool = True,
    remote_share: float = REMOTE_SHARE,
) -> Outcome:
    """Run one cluster from beginning to end, without garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    trace = Trace(is_on=is_traced)
    try:
        with quiet(trace) as caught:
            return World(
                seed,
                trace=trace,
                faults=faults,
                kinds=kinds,
                has_delays=has_delays,
                has_retries=has_retries,
                remote_share=remote_share,
                caught=caught,
            ).run()
    finally:
        if was_enabled:
            gc.enable()
