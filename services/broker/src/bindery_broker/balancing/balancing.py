"""Balance the load of one broker against that of the others.

    registration --watch--> Brokers --> choose: which broker gets a bundle (every broker, from what it has in memory)
         ^                     `------> round: which bundles move          (the leader, every `interval_s`)
         |
      report <-- measure (every broker, every `report_interval_s`) --> hot bundles are split by their owner

Every broker chooses by itself, from the same reports, so that the assignment of bundles needs no leader and no answer
of one. The choice is only made for a bundle without owner: the way of a message does not come here.

A broker that runs without `run`, or with balancing switched off, sees no others and chooses itself, as does a broker
that has not read the registrations yet.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Final, Protocol

from bindery_core.errors import BinderyError
from bindery_core.sources import MonotonicClock, WallClock
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.usage import ProcessUsage
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.store import MetadataStore

from bindery_broker.balancing import choice
from bindery_broker.balancing.brokers import Brokers
from bindery_broker.balancing.choice import Candidate, Pending
from bindery_broker.balancing.hot import hot
from bindery_broker.balancing.leadership import Leadership
from bindery_broker.balancing.planning import Move, plan
from bindery_broker.balancing.reports import must_store, report
from bindery_broker.balancing.rounds import Rounds, is_receiver
from bindery_broker.balancing.settings import BalancingSettings
from bindery_broker.balancing.weights import NO_LOAD, weight, weight_of
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.listeners import Listeners
from bindery_broker.ownership.records import (
    BrokerRecord,
    BundleLoad,
    Usage,
    own_record,
)
from bindery_broker.ownership.registration import Registration

SUSPECT_S: Final = 15.0
"""Seconds for which no bundle is given to a broker that has not answered. Its registration ends by then if it is dead.
"""
SPLIT_REST_S: Final = 60.0
"""Seconds after which a bundle that was not split because of an error is tried again."""
MIB: Final = 2**20

log = get_logger(__name__)


class Peers(Protocol):
    """What is done at other brokers."""

    async def move(self, bundle: str, destination: str) -> bool:
        """Move a bundle from its owner to the broker `destination`, `host:port`. Returns whether that has it now."""
        ...


class Balancing:
    """`measure`: returns the load of the owned bundles. `split`: splits an owned bundle, and returns whether it did."""

    def __init__(
        self,
        settings: BalancingSettings,
        *,
        url: str,
        store: MetadataStore,
        leases: Leases,
        clock: WallClock,
        now: MonotonicClock,
        measure: Callable[[], Awaitable[dict[Bundle, BundleLoad]]],
        held: Callable[[], Collection[Bundle]],
        split: Callable[[Bundle, int], Awaitable[bool]],
        listeners: Listeners | None = None,
    ) -> None:
        self.settings = settings
        self._base = own_record(url, listeners)
        self._clock = clock
        self._now = now
        self._measure = measure
        self._held = held
        self._split = split
        self._usage = ProcessUsage(now)
        self._loads: dict[Bundle, BundleLoad] = {}
        """As measured last."""
        self._cpu = self._memory = Usage()
        self._stored: BrokerRecord | None = None
        self._stored_at = float("-inf")
        self._draining = False
        self._pending = Pending()
        self._suspects: dict[str, float] = {}
        """By name: until when, in monotonic seconds."""
        self._tried: dict[Bundle, float] = {}
        """Hot bundles, and the time of the last attempt to split them."""
        self._rounds = Rounds(rest_s=settings.rest_s)
        self.brokers = Brokers(store)
        self.brokers.on_report = self._on_report
        self.leadership = Leadership(
            leases,
            url=url,
            has_pulsar=lambda: self.brokers.has_pulsar,
            is_candidate=lambda: settings.enabled and not self._draining,
        )
        self.brokers.on_change = self.leadership.look_again
        self.registration = Registration(leases, name=self.name, record=self.record)
        self.peers: Peers | None = None
        """None: this broker moves no bundles."""
        self.assigned = 0
        """Number of bundles without owner that other brokers took because this one has chosen them."""
        self.moves = 0
        """Number of bundles that this broker has moved as the leader."""
        self.moves_failed = 0
        """Number of moves that failed."""
        self.sources = 0
        """Number of brokers from which bundles moved, counted again in each round."""
        self.splits = 0
        """Number of hot bundles that this broker has split."""

    @property
    def name(self) -> str:
        """`host:port` of this broker."""
        return self._base.broker_id

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def weight(self) -> float:
        """Load of this broker in units, of all bundles that it owns now."""
        return sum(weight(self._loads.get(bundle, NO_LOAD)) for bundle in self._held())

    # --- choosing -------------------------------------------------------------------------------------------------

    def choose(self, bundle: Bundle, *, exclude: Collection[str] = ()) -> str | None:
        """Return the broker that gets a bundle, `host:port`; None: there is none besides `exclude`.

        It may be this broker. A draining broker is never chosen. The choice counts as load of its broker from now on,
        until that reports the bundle, so that the next choice differs. Does not wait.
        """
        chosen = self.peek(bundle, exclude=exclude)
        if chosen is not None and chosen != self.name:
            self._pending.add(str(bundle), chosen, weight=weight(self._loads.get(bundle, NO_LOAD)), now=self._now())
        return chosen

    def peek(self, bundle: Bundle, *, exclude: Collection[str] = ()) -> str | None:
        """Return what `choose` would return, and record nothing."""
        if not self.settings.enabled:
            return None if self._draining or self.name in exclude else self.name
        return choice.choose(str(bundle), self._candidates(), exclude=exclude)

    def url_of(self, name: str) -> str | None:
        """Return the address of a live broker of Bindery; None: there is none of this name."""
        record = self.brokers.records.get(name)
        return record.url if record is not None and record.bindery and record.url else None

    def suspect(self, name: str) -> None:
        """Choose a broker that has not answered no more for some time."""
        self._suspects[name] = self._now() + SUSPECT_S
        log.warning("broker_suspected", broker=name, seconds=SUSPECT_S)

    def not_taken(self, bundle: Bundle) -> None:
        """Record that the broker that was chosen last did not take the bundle."""
        self._pending.discard(str(bundle))

    def _candidates(self) -> list[Candidate]:
        now = self._now()
        pending = self._pending.weights(now)
        self._suspects = {name: until for name, until in self._suspects.items() if until > now}
        found = [
            Candidate(name, weight_of(record) + pending.get(name, 0.0))
            for name, record in self.brokers.records.items()
            if name != self.name and name not in self._suspects and is_receiver(record)
        ]
        if not self._draining:
            found.append(Candidate(self.name, self.weight))
        return found

    def _on_report(self, name: str, record: BrokerRecord) -> None:
        self._pending.reported(name, record.bindery_bundles)

    # --- reporting ------------------------------------------------------------------------------------------------

    def record(self) -> BrokerRecord:
        """Return the record of this broker with its load, as measured last. It is about to be stored."""
        self._stored, self._stored_at = self._built(), self._now()
        return self._stored

    def report_now(self) -> BrokerRecord:
        """Return the record of this broker with its load, as measured last."""
        return self._built()

    def loads(self) -> dict[str, BundleLoad]:
        """Return the load of each bundle that this broker owns, as measured last."""
        return {str(bundle): self._loads.get(bundle, NO_LOAD) for bundle in self._held()}

    def hottest(self, tenant: str, namespace: str) -> str | None:
        """Return the name of the bundle of a namespace with the greatest weight: of those of this broker as measured
        last, and of those in the reports of others, which are some seconds old. None: no bundle has any load."""
        prefix = f"{tenant}/{namespace}/"
        loads: dict[str, BundleLoad] = {}
        for record in self.brokers.records.values():
            loads |= record.bindery_bundles
        loads |= self.loads()
        found = {name: weight(load) for name, load in loads.items() if name.startswith(prefix) and load != NO_LOAD}
        return max(sorted(found), key=found.__getitem__).removeprefix(prefix) if found else None

    def _built(self) -> BrokerRecord:
        return report(
            self._base,
            {bundle: self._loads.get(bundle, NO_LOAD) for bundle in self._held()},
            cpu=self._cpu,
            memory=self._memory,
            draining=self._draining,
            wall_ms=self._clock(),
        )

    async def drain(self) -> None:
        """Get no more bundles, and do not lead any more. Returns once the other brokers can read it, or cannot be told
        because the metadata store does not answer."""
        self._draining = True
        self.leadership.look_again()
        await self.registration.publish()

    async def resume(self) -> None:
        """End `drain`: get bundles again."""
        self._draining = False
        self.leadership.look_again()
        await self.registration.publish()

    async def report_forever(self) -> None:
        """Measure and report periodically, and split hot bundles, until cancelled."""
        while True:
            await self.report()
            await asyncio.sleep(self.settings.report_interval_s)

    async def report(self) -> None:
        """Measure the load once, report it if that is due, and split hot bundles."""
        self._loads = await self._measure()
        self._cpu = Usage(round(self._usage.cpu_percent(), 1), 100.0)
        self._memory = Usage(round(self._usage.memory() / MIB, 1), round(self._usage.memory_limit() / MIB, 1))
        settings = self.settings
        is_due = must_store(
            self._built(),
            self._stored,
            change=settings.report_change_percent / 100,
            age_s=self._now() - self._stored_at,
            age_s_max=settings.report_interval_s_max,
        )
        if is_due and not await self.registration.publish():
            self._stored = None
        if settings.enabled and settings.split_enabled and not self._draining:
            await self._split_hot()

    async def _split_hot(self) -> None:
        now = self._now()
        self._tried = {bundle: at for bundle, at in self._tried.items() if now - at < SPLIT_REST_S}
        held = set(self._held())
        loads = {bundle: load for bundle, load in self._loads.items() if bundle in held}
        for bundle, why in hot(loads, self.settings, resting=self._tried).items():
            self._tried[bundle] = now
            try:
                if await self._split(bundle, self.settings.split_bundles_max):
                    self.splits += 1
                    log.info("hot_bundle_split", bundle=str(bundle), reason=why)
            except BinderyError as error:
                log.warning("hot_bundle_not_split", bundle=str(bundle), reason=why, **error_fields(error))

    # --- leading --------------------------------------------------------------------------------------------------

    async def lead_forever(self) -> None:
        """Run a round periodically while this broker leads, until cancelled."""
        while True:
            await asyncio.sleep(self.settings.interval_s)
            if self.settings.enabled and self.leadership.is_leader and self.peers is not None:
                await self.round(self.peers)

    def plan(self) -> list[Move]:
        """Return the moves of a round."""
        now = self._now()
        return plan(
            self._rounds.loaded(self.brokers.records, now=now),
            threshold=self.settings.threshold_percent / 100,
            moves_max=self.settings.moves_max,
            resting=self._rounds.resting(now),
        )

    async def round(self, peers: Peers) -> int:
        """Move bundles from loaded brokers to others. Returns the number of bundles that have moved."""
        moves = self.plan()
        if not moves:
            return 0
        log.info("bundles_move", bundles=len(moves), sources=sorted({move.source for move in moves}))
        turns = asyncio.Semaphore(self.settings.moves_in_parallel)

        async def move(one: Move) -> bool:
            async with turns:
                if not self.leadership.is_leader:
                    return False
                try:
                    moved = await peers.move(one.bundle, one.destination)
                except BinderyError as error:
                    log.warning(
                        "bundle_not_moved", bundle=one.bundle, destination=one.destination, **error_fields(error)
                    )
                    moved = False
                self._rounds.ended(one, moved=moved, now=self._now())
                return moved

        done = await asyncio.gather(*map(move, moves))
        self.moves += sum(done)
        self.moves_failed += len(moves) - sum(done)
        self.sources += len({move.source for move, moved in zip(moves, done, strict=True) if moved})
        log.info("bundles_moved", bundles=sum(done), failed=len(moves) - sum(done))
        return sum(done)

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Register, report, follow the others and lead if elected, until cancelled."""
        self.brokers.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                for work in (
                    self.registration.run(),
                    self.report_forever(),
                    self.leadership.run(),
                    self.lead_forever(),
                ):
                    tasks.create_task(work)
        finally:
            await self.brokers.close()
