"""A machine that runs a broker like `bindery_broker.main`, with a simulated network and metadata session.

The broker's parts are those of the product: `Broker` with its topics, subscriptions and ownership of bundles, its
ledger client, its registration and its maintenance. There is no HTTP port. Requests of clients arrive through its
`gateway`, those of other brokers through `peers`.
"""

import asyncio
from collections.abc import Collection
from typing import Any, Final

from bindery_broker.broker import Broker, Components
from bindery_broker.http.peers.destinations import Destinations
from bindery_broker.http.peers.handovers import HandOvers
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.records import broker_id
from bindery_broker.ownership.splits import BY_RANGE, BY_TOPICS, Split
from bindery_broker.settings import BrokerSettings
from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError
from bindery_kit.observability.metrics import Metrics
from bindery_metadata.coordination.leases import Leases
from bindery_pulsar.topic_name import TopicName

from bindery_simulation.loop import Process
from bindery_simulation.service.machine import ClientMachine
from bindery_simulation.service.site import Site
from bindery_simulation.topics.gateway import CLOCKS_APART_MS, Gateway
from bindery_simulation.topics.judging.history import History
from bindery_simulation.topics.peers import Switchboard

BROKER_PORT: Final = 8080
"""Port in the URL of every broker."""
CLOSE_S_MAX: Final = 5.0
"""Maximum time in seconds of a clean stop, as `BrokerSettings.stop_timeout_s`."""


class Others(Destinations):
    """The one broker that a hand-over asks, as if it had been chosen by load."""

    def __init__(self, broker: Broker, to: "BrokerMachine") -> None:
        super().__init__(broker)
        self._to = to

    def choose(self, bundle: Bundle, *, exclude: Collection[str] = ()) -> str | None:
        name = broker_id(self._to.url)
        return None if name in exclude else name

    def url(self, name: str) -> str:
        return self._to.url


class BrokerMachine(ClientMachine):
    """A machine with a broker. Its ledger client and its metadata session are those of a `ClientMachine`."""

    def __init__(
        self, site: Site, name: str, *, settings: BrokerSettings, history: History, switchboard: Switchboard
    ) -> None:
        super().__init__(site, name, self._serve)
        self.clock_ahead_ms = max(-CLOCKS_APART_MS, min(self.clock_ahead_ms // 1000, CLOCKS_APART_MS))
        self.url = f"http://{name}:{BROKER_PORT}"
        self.gateway: Gateway | None = None
        """Serves requests; None: the broker does not serve."""
        self.lost: list[asyncio.Future[None]] = []
        """Completed when the process ends: the network then resets the connections of its clients."""
        self._settings = settings
        self._history = history
        self._switchboard = switchboard
        switchboard.hosts[self.url] = self
        self._stop_wanted: asyncio.Future[str] | None = None

    @property
    def is_serving(self) -> bool:
        return self.gateway is not None

    @property
    def broker(self) -> Broker | None:
        """The broker that serves requests."""
        return None if self.gateway is None else self.gateway.broker

    def kill(self, *, power: bool = False) -> None:
        self.gateway = None
        self._stop_wanted = None
        super().kill(power=power)
        lost, self.lost = self.lost, []
        for connection in lost:
            if not connection.done():
                connection.set_result(None)

    def stop(self) -> None:
        """Send SIGTERM. The machine then starts the broker again."""
        if self.process is not None and self._stop_wanted is not None:
            self.process.call_soon(self._stop, self._stop_wanted)

    @staticmethod
    def _stop(wanted: "asyncio.Future[str]") -> None:
        if not wanted.done():
            wanted.set_result("SIGTERM")

    def close_topics(self) -> None:
        """Close the topics of the broker cleanly. Their next use opens them again."""
        if self.process is not None and self.gateway is not None:
            self.process.spawn(self._close_topics(self.gateway.broker))

    def ask_for(self, topic: TopicName, *, load: bool = False) -> None:
        """Ask the broker for a topic, as a client may do: it takes the topic's bundle if nobody owns it. `load`: its
        owner opens it."""
        if self.process is not None and self.broker is not None:
            self.process.spawn(self._locate(self.broker, topic, load))

    def hand_over(self, bundle: Bundle, to: "BrokerMachine | None") -> None:
        """Hand a bundle over to another broker, which is asked to take it; None: whoever is asked for it takes it."""
        if self.process is not None and self.broker is not None:
            self.process.spawn(self._hand_over(self.broker, bundle, to))

    def split(self, bundle: Bundle) -> None:
        """Split a bundle in the middle of its range, or between the topics in its middle."""
        if self.process is not None and self.broker is not None:
            self.process.spawn(self._split(self.broker, bundle))

    async def _hand_over(self, broker: Broker, bundle: Bundle, to: "BrokerMachine | None") -> None:
        try:
            if to is None:
                moved = await broker.unload(bundle, hold_s=0.0)
            else:
                handovers = HandOvers(broker, self._switchboard.proxy())
                handovers.destinations = Others(broker, to)
                moved = await handovers.move(bundle)
        except BinderyError as error:
            self.site.trace.add(self.name, "bundle not handed over", bundle=bundle, error=error)
        else:
            self.site.trace.add(self.name, "bundle handed over", bundle=bundle, to=to and to.name, moved=moved)

    async def _split(self, broker: Broker, bundle: Bundle) -> None:
        try:
            topics = await broker.directory.topics(bundle.tenant, bundle.namespace)
            how = Split(BY_TOPICS if len([one for one in topics if bundle.contains(one)]) > 1 else BY_RANGE)
            points = how.points(bundle, topics)
            done = bool(points) and await broker.split(bundle, points)
        except BinderyError as error:
            self.site.trace.add(self.name, "bundle not split", bundle=bundle, error=error)
        else:
            self.site.trace.add(self.name, "bundle split", bundle=bundle, points=points, done=done)

    async def _locate(self, broker: Broker, topic: TopicName, load: bool) -> None:
        try:
            if await broker.locate(topic, create=True) is None and load:
                await broker.topic(topic)
        except BinderyError as error:
            self.site.trace.add(self.name, "topic not located", topic=topic.short, error=error)

    async def _close_topics(self, broker: Broker) -> None:
        for topic in broker.topics:
            try:
                await topic.close()
            except BinderyError as error:
                self.site.trace.add(self.name, "topic not closed", error=error)

    async def _serve(self, client: LedgerClient, machine: Any) -> None:
        process, session = self.process, self.session
        assert process is not None
        assert session is not None
        loop = self.site.loop
        leases = Leases(session)
        components = Components(
            client=client,
            store=session,
            leases=leases,
            clock=self.wall_clock_ms,
            now=loop.time,
            metrics=Metrics("broker", with_process=False),
        )
        broker = Broker(self._settings, components, url=self.url)
        broker.topics.targets.peers = self._switchboard.peers()
        parts = [
            loop.create_task(broker.maintain_forever()),
            loop.create_task(broker.balancing.registration.run()),
        ]
        stopped = self._stop_wanted = loop.create_future()
        incarnation_opened = self._opened(process)
        self.gateway = Gateway(broker, incarnation_opened)
        self.site.trace.add(self.name, "serves")
        why = await stopped
        self.site.trace.add(self.name, "stops")
        self.gateway = None
        broker.finish()
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await broker.close()
        except TimeoutError:
            self.site.trace.add(self.name, "is not closed in time")
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
        await leases.close()
        await session.close()
        self.ended(process, why)

    def _opened(self, process: Process) -> Any:
        def opened(topic: str, incarnation: int) -> None:
            self._history.topic_opened(topic, incarnation, self.name)
            self.site.trace.add(process.host, "opened", topic=topic, incarnation=incarnation)

        return opened
