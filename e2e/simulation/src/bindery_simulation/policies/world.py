"""Run one simulated cluster whose topics have policies, from its first start to the judgement. The seed determines it.

Clients use topics slowly for hours, while policies change and faults are injected. An operator looks at every
subscription from time to time. Then all faults are undone, the clients end, and after some rounds of maintenance only
what the policies keep may be left.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from unittest.mock import patch

from bindery_bookie.maintenance import storage_watch
from bindery_bookie.settings import BookieSettings
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.namespaces import policy_codec
from bindery_broker.namespaces.policy_store import PolicyStore
from bindery_broker.settings import BrokerSettings
from bindery_core.errors import BinderyError
from bindery_core.ids import LedgerId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.stores.store import Create, Delete, Op, Set
from bindery_pulsar.managed_ledger_codec import decode_topic
from bindery_pulsar.topic_name import TopicName
from bindery_pulsar.znode_layout import MANAGED_LEDGERS_ROOT

from bindery_simulation.loop import current_process
from bindery_simulation.policies.judge import DELAY_S, Ledger, Record, Run, Seen, Trim, Use, Write, judge
from bindery_simulation.policies.model import FOREVER, Key, Message, Policy, Topic
from bindery_simulation.policies.plan import IdlePlan, draw_plan
from bindery_simulation.policies.workload import Client, Consumer, IdleUser, Producer
from bindery_simulation.service import faults as service
from bindery_simulation.service.director import START_S_MAX, Director, quiet
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.machine import ClientMachine, Machine
from bindery_simulation.service.verdict import Violation
from bindery_simulation.topics import faults
from bindery_simulation.topics.broker_machine import BrokerMachine
from bindery_simulation.topics.calls import Caller
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Call,
    History,
    Inspect,
    Outcome,
    Produce,
    Receive,
    Subscribe,
    SubscriptionId,
    Unsubscribe,
)
from bindery_simulation.topics.peers import Switchboard
from bindery_simulation.topics.workload import RETRY_S
from bindery_simulation.trace import Trace

TIME_MAX_S: Final = 48 * 3_600.0
"""Maximum simulated time of a run in seconds."""
CALLBACKS_MAX: Final = 5_000_000
"""Maximum number of callbacks of a run."""
FINISH_S_MAX: Final = 120.0
"""Maximum time in seconds from the end of all faults to the end of all clients, or until a request is answered."""
INSPECTIONS: Final = 25
"""Number of times that the operator looks at each subscription during the traffic."""
UNSUBSCRIBED_S: Final = 1_000.0
"""Setting `retention_unsubscribed_s` of the brokers."""
SIZE_UNIT: Final = 1024
"""Bytes of what Pulsar's policies call a megabyte. Topics of megabytes would take the simulated disks too long."""
NO_SUBSCRIPTIONS: Final = "delete_when_no_subscriptions"
CAUGHT_UP: Final = "delete_when_subscriptions_caught_up"
WATCH_S: Final = 60.0
"""Seconds between two looks of a bookie at its journal. One a second would be most of what a run costs."""

FAULTS: Final[tuple[Fault, ...]] = (
    faults.kill_broker, faults.kill_broker, faults.stop_broker, faults.close_topics, faults.pause_broker,
    faults.expire_broker, faults.lose_session, faults.suspend_session, service.kill_bookie, service.cut_power,
    service.stop_bookie, service.pause_bookie, service.partition, service.flaky_connections, service.slow_disk,
)  # fmt: skip


@dataclass(slots=True)
class Result:
    """The result of one seed."""

    seed: int
    violation: Violation | None
    trace: Trace
    faults: list[str] = field(default_factory=list)
    calls: int = 0
    trimmed: int = 0
    """Number of ledgers that were deleted."""
    refused: int = 0
    """Number of requests that a quota refused."""
    released: int = 0
    """Number of messages that a policy had acknowledged when the operator looked."""
    deleted: int = 0
    """Number of topics that were deleted because they were inactive."""
    simulated_s: float = 0.0
    callbacks: int = 0


class World(Director):
    """One run. `faults`: the faults to choose from; none: no faults."""

    def __init__(
        self, seed: int, *, trace: Trace, faults: Sequence[Fault] = FAULTS, caught: Sequence[str] = ()
    ) -> None:
        self.history = History(lambda: self.loop.time())
        self.plan = draw_plan(random.Random(seed))
        super().__init__(seed, trace=trace, healing=None, caught=caught)
        self._fault_kinds = tuple(faults)
        self._faults_s: list[float] = []
        topics = [Topic(one.name, one.size, one.subscriptions) for one in self.plan.topics]
        if self.plan.idle is not None:
            topics.append(Topic(self.plan.idle.name, self.plan.idle.size, ()))
        self.records = {topic.name: Record(topic) for topic in topics}
        self._ledgers: dict[str, tuple[Ledger, ...]] = {}
        self.bookie_settings = BookieSettings(
            journal_dir="/journal", ledger_dir="/ledgers", disk_check_interval_s=120.0, high_priority_free_size_min=0
        )
        sees = self.healing_verdict.sees
        self.tree.watch(lambda ops, owner: [*sees(ops, owner), *self._sees(ops)])

    def make_clients(self) -> Sequence[ClientMachine]:
        rng = self.rng
        self.switchboard = Switchboard(self, trouble_share=0.0)
        ensemble_size = min(3, len(self.bookies))
        settings = BrokerSettings(
            ledger=ManagedLedgerSettings(
                ensemble_size=ensemble_size,
                write_quorum=ensemble_size,
                ack_quorum=min(2, ensemble_size),
                entries_max=rng.choice((3, 8, 100_000)),
                age_s_min=rng.choice((0.0, 60.0)),
                age_s_max=rng.choice((600.0, 3_600.0)),
                operation_timeout_s=8.0,
                cache_size_max=rng.choice((0, 2**20)),
                retention_unsubscribed_s=UNSUBSCRIBED_S,
            ),
            topic_idle_s=rng.choice((60.0, 3_600.0)),
            maintenance_interval_s=rng.choice((10.0, 20.0)),
        )
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

    def run(self) -> Result:
        self.play(time_max=TIME_MAX_S, callbacks_max=CALLBACKS_MAX)
        violation = self.verdict.violation
        if violation is None or violation.invariant == "liveness":
            self._fill_records()
            existing = frozenset(one for one in self._ids() if self.tree.znodes.exists(self._path(one)) is not None)
            run = Run(list(self.records.values()), self._faults_s, UNSUBSCRIBED_S, existing)
            breach = next(judge(run), None)
            if breach is not None:
                violation = Violation(breach.invariant, breach.text)
                self.trace.add("VERDICT", str(violation))
        records = self.records.values()
        result = Result(
            self.seed,
            violation,
            self.trace,
            self.faults,
            len(self.history.calls),
            sum(len(trim.gone) for record in records for trim in record.trims),
            sum("BacklogQuota" in write.error for record in records for write in record.writes),
            sum(_released(record) for record in records),
            sum(len(record.deletions) for record in records),
            self.loop.time(),
            self.loop.callbacks_run,
        )
        self.trace.is_on = False  # the end of the loop is not part of the run
        self.loop.dispose()
        return result

    async def _direct(self) -> None:
        process = current_process()
        assert process is not None
        session = self.tree.open_session(process)
        self.set_operator(process, session)
        await initialize_cluster(session, self.layout, randomness=self.rng)
        self._policies = PolicyStore(session, cluster="bindery")
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "the bookies of a new cluster do not serve")
        for broker in self.brokers:
            broker.start()
        await self._within(START_S_MAX, self._brokers_serve, "the brokers of a new cluster do not serve")
        operator = self._caller("operator")
        for plan in self.plan.topics:
            await self._set_policy(plan.name, plan.policies[0])
            for name in plan.subscriptions:
                await self._must(operator, Subscribe(SubscriptionId(plan.name, name), earliest=True))
        await asyncio.sleep(60)
        ends = self.loop.time() + self.plan.traffic_s
        work = self._start_clients(lambda: not self.is_healing)
        for _ in range(self.plan.faults if self._fault_kinds else 0):
            self.later(self.rng.uniform(1.0, self.plan.traffic_s), self._inject, self.rng.choice(self._fault_kinds))
        work.append(process.spawn(self._inspect_often(operator)))
        for plan in self.plan.topics:
            work.append(process.spawn(self._change_policies(plan.name, plan.policies[1:], ends)))
        while self.loop.time() < ends:
            await asyncio.sleep(min(60.0, ends - self.loop.time() + 0.1))
        if self.faults:
            self._faults_s.append(self.loop.time())
        self.heal()
        await self._within(START_S_MAX, self._all_serve, "after all faults, not every bookie serves")
        await self._within(START_S_MAX, self._brokers_serve, "after all faults, not every broker serves")
        await self._within(FINISH_S_MAX, lambda: all(task.done() for task in work), "after all faults, a client hangs")
        for record in self.records.values():  # so that every topic is loaded
            if record.topic.subscriptions:
                await self._inspect(operator, record.topic)
            else:
                for broker in self.brokers:
                    broker.ask_for(TopicName.parse(record.topic.name), load=True)
        await asyncio.sleep(400)
        for record in self.records.values():
            await self._inspect(operator, record.topic)
        await asyncio.sleep(2 * DELAY_S)
        for record in self.records.values():
            record.remaining, record.ended_s = self._ledgers.get(record.topic.name, ()), self.loop.time()
        writer = Client(self._caller("writer"), self.rng, lambda: True)
        for record in self.records.values():
            await writer.produce(record.topic.name, record.topic.size)

    def _start_clients(self, is_busy: Callable[[], bool]) -> "list[asyncio.Task[None]]":
        work: list[asyncio.Task[None]] = []
        for plan in self.plan.topics:
            caller = self._caller(f"p{len(self.callers)}")
            work.append(caller.process.spawn(Producer(caller, self.rng, is_busy).run(plan)))
            for name, pause_s in zip(plan.subscriptions, (plan.fast_s, plan.slow_s), strict=False):
                if pause_s:
                    caller = self._caller(f"c{len(self.callers)}")
                    subscription = SubscriptionId(plan.name, name)
                    work.append(caller.process.spawn(Consumer(caller, self.rng, is_busy).run(subscription, pause_s)))
        if (idle := self.plan.idle) is not None:
            caller = self._caller(f"i{len(self.callers)}")
            work.append(
                caller.process.spawn(IdleUser(caller, self.rng, is_busy).run(idle, partial(self._prepare, idle)))
            )
        return work

    async def _prepare(self, idle: IdlePlan) -> None:
        await self._set_policy(idle.name, idle.policy)

    async def _change_policies(self, topic: str, policies: Sequence[Policy], ends_s: float) -> None:
        for number, policy in enumerate(policies):
            part_s = (ends_s - self.loop.time()) / (len(policies) - number + 1)
            await asyncio.sleep(self.rng.uniform(0.3, 1.0) * part_s)
            if not self.is_healing:
                await self._set_policy(topic, policy)

    async def _set_policy(self, topic: str, policy: Policy) -> None:
        """Store the policies of a topic, by the operator's session."""
        sent_s = self.loop.time()
        self.trace.add("operator", "policy", topic=topic, policy=policy)
        while True:
            try:
                await self._policies.update_topic(TopicName.parse(topic), lambda _: _json(policy))
                break
            except BinderyError:
                await asyncio.sleep(RETRY_S)
        self.records[topic].topic.timeline.changes.append((sent_s, self.loop.time(), policy))

    async def _inspect_often(self, operator: Caller) -> None:
        while not self.is_healing:
            ends = self.loop.time() + self.plan.traffic_s / INSPECTIONS
            while self.loop.time() < ends and not self.is_healing:
                await asyncio.sleep(min(30.0, max(ends - self.loop.time(), 0.1)))
            for plan in self.plan.topics:
                for name in plan.subscriptions:
                    await operator.call(Inspect(SubscriptionId(plan.name, name)))

    async def _inspect(self, operator: Caller, topic: Topic) -> None:
        for name in topic.subscriptions:
            await self._must(operator, Inspect(SubscriptionId(topic.name, name)))

    async def _must(self, caller: Caller, request: Subscribe | Inspect) -> None:
        """Repeat a request until it is done."""
        deadline = self.loop.time() + FINISH_S_MAX
        while not (await caller.call(request)).is_done:
            if self.loop.time() > deadline:
                self.verdict.broken("liveness", f"{request} is not answered within {FINISH_S_MAX} s")
                return
            await asyncio.sleep(RETRY_S)

    def _brokers_serve(self) -> bool:
        return all(broker.is_serving for broker in self.brokers)

    def _inject(self, fault: Fault) -> None:
        self._faults_s.append(self.loop.time())
        super()._inject(fault)

    # --- what is observed ---------------------------------------------------------------------------------------------

    def _sees(self, ops: Sequence[Op]) -> list[Callable[[], None]]:
        """Return what records the changes of the znodes of topics."""
        reports: list[Callable[[], None]] = []
        for op in ops:
            parts = op.path.removeprefix(f"{MANAGED_LEDGERS_ROOT}/").split("/")
            if op.path.startswith(f"{MANAGED_LEDGERS_ROOT}/") and len(parts) == 4:
                topic = "/".join((parts[0], parts[1], parts[3]))
                if topic in self.records and isinstance(op, Set | Create | Delete):
                    reports.append(partial(self._written, topic, b"" if isinstance(op, Delete) else op.data, op))
        return reports

    def _written(self, topic: str, data: bytes, op: Op) -> None:
        record, now = self.records[topic], self.loop.time()
        if isinstance(op, Delete):
            self.trace.add("metadata", "topic deleted", topic=topic)
            self._ledgers.pop(topic, None)
            record.deletions.append(now)
            return
        if not data:
            return
        former = self._ledgers.get(topic, ())
        closed = {one.id: one.closed_s for one in former}
        followed = {one.id: one.followed_s for one in former}
        stored = decode_topic(data).ledgers
        ledgers = tuple(
            Ledger(
                one.ledger_id,
                one.size,
                min(closed.get(one.ledger_id, FOREVER), now if one.size or one is not stored[-1] else FOREVER),
                min(followed.get(one.ledger_id, FOREVER), now if one is not stored[-1] else FOREVER),
            )
            for one in stored
        )
        self._ledgers[topic] = ledgers
        gone = tuple(one.id for one in former if one.id not in {other.id for other in ledgers})
        self.trace.add("metadata", "topic", topic=topic, ledgers=ledgers, gone=gone)
        if gone:
            record.trims.append(Trim(now, former, gone))

    def _path(self, ledger_id: int) -> str:
        return self.layout.ledger(LedgerId(ledger_id))

    def _ids(self) -> set[int]:
        return {one for record in self.records.values() for trim in record.trims for one in trim.gone}

    def _fill_records(self) -> None:
        """Add the calls of clients to the records, once all have ended."""
        for call in self.history.calls:
            request = call.request
            topic = request.topic if isinstance(request, Produce) else request.subscription.topic
            record = self.records[topic]
            begin_s = call.sent.time_s if call.started is None else call.started.time_s
            end_s = FOREVER if call.settled is None else call.settled.time_s
            if isinstance(request, Produce):
                _add_message(record, call, begin_s, end_s)
            elif isinstance(request, Acknowledge) and call.may_be_done:
                for message in record.topic.messages:
                    if message.key in request.keys:
                        acks = message.acks.setdefault(request.subscription.name, [])
                        acks.append((call.sent.time_s, end_s if call.is_done else FOREVER))
            elif isinstance(request, Inspect) and call.is_done:
                assert isinstance(call.result, tuple)
                keys: frozenset[Key] = frozenset(call.result)
                record.seen.append(Seen(request.subscription.name, begin_s, end_s, keys))
            if self.plan.idle is not None and topic == self.plan.idle.name and call.is_done:
                if isinstance(request, Produce | Receive | Subscribe | Unsubscribe):
                    record.uses.append(Use(begin_s, end_s))
                if isinstance(request, Subscribe):
                    record.subscribed.append((end_s, FOREVER))
            if isinstance(request, Unsubscribe) and call.may_be_done:
                ends_s = call.sent.time_s
                record.subscribed = [(first_s, min(last_s, ends_s)) for first_s, last_s in record.subscribed]
        for record in self.records.values():
            record.topic.messages.sort(key=lambda one: one.sent_s)
            for number, (first_s, last_s) in enumerate(record.subscribed):
                deleted_s = min((one for one in record.deletions if one > first_s), default=FOREVER)
                record.subscribed[number] = (first_s, min(last_s, deleted_s + 0.001))


def _add_message(record: Record, call: Call, begin_s: float, end_s: float) -> None:
    assert isinstance(call.request, Produce)
    (payload,) = call.request.messages
    if call.outcome is Outcome.REFUSED:
        if call.started is not None:
            record.writes.append(Write(begin_s, end_s, call.error.partition(":")[0] or "refused"))
        return
    message = Message(call.sent.time_s, deliver_at_s=payload.deliver_at_s or 0.0)
    if call.is_done:
        assert isinstance(call.result, tuple)
        message.stored_s, message.key = end_s, call.result[0]
        record.writes.append(Write(begin_s, end_s, ""))
    record.topic.messages.append(message)


def _released(record: Record) -> int:
    """Return how many messages policies had acknowledged when the operator last looked."""
    last = {seen.subscription: seen for seen in record.seen}
    return sum(
        one.key is not None
        and one.stored_s < seen.begin_s
        and one.key not in seen.keys
        and not one.may_be_acked(name, seen.end_s)
        for name, seen in last.items()
        for one in record.topic.messages
    )


def _json(policy: Policy) -> dict[str, Any]:
    """Return the policies as Pulsar's TopicPolicies."""
    quotas = {
        "destination_storage": {"limitSize": policy.quota_size, "limitTime": -1, "policy": str(policy.action)},
        "message_age": {"limitSize": -1, "limitTime": policy.quota_age_s, "policy": str(policy.action)},
    }
    found: dict[str, Any] = {
        "backLogQuotaMap": {
            name: quota
            for name, quota in quotas.items()
            if quota["limitSize"] is not None and quota["limitTime"] is not None
        }
    }
    if policy.ttl_s:
        found["messageTTLInSeconds"] = policy.ttl_s
    if policy.has_retention:
        found["retentionPolicies"] = {
            "retentionTimeInMinutes": -1 if policy.retention_s is None else policy.retention_s // 60,
            "retentionSizeInMB": -1 if policy.retention_size is None else policy.retention_size // SIZE_UNIT,
        }
    if policy.inactive_s is not None:
        found["inactiveTopicPolicies"] = {
            "inactiveTopicDeleteMode": CAUGHT_UP if policy.deletes_caught_up else NO_SUBSCRIPTIONS,
            "maxInactiveDurationSeconds": policy.inactive_s,
            "deleteWhileInactive": True,
        }
    return found


def run_seed(seed: int, *, is_traced: bool = False, faults: Sequence[Fault] = FAULTS) -> Result:
    """Run one cluster from beginning to end, without garbage collection."""
    was_enabled = gc.isenabled()
    gc.disable()
    trace = Trace(is_on=is_traced)
    try:
        with (
            quiet(trace) as caught,
            patch.object(policy_codec, "MIB", SIZE_UNIT),
            patch.object(storage_watch, "TICK_S", WATCH_S),
        ):
            return World(seed, trace=trace, faults=faults, caught=caught).run()
    finally:
        if was_enabled:
            gc.enable()
