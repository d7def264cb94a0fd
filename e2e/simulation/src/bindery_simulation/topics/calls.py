"""Call brokers over the simulated network, like a client of their HTTP ports. Every call is recorded in the history.

A request or an answer is lost during a partition. If the process of the broker ends, its connections are reset. The
client gives up after CALL_S_MAX; the broker learns that later, and carries the request out nevertheless.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from bindery_broker.subscriptions.consumer import ClientWatch

from bindery_simulation.loop import Process
from bindery_simulation.service.site import Site
from bindery_simulation.topics.broker_machine import BrokerMachine
from bindery_simulation.topics.gateway import Gateway, Redirected, Settled
from bindery_simulation.topics.judging.history import Call, History, Outcome, Receive, Request

CALL_S_MAX: Final = 8.0
"""Maximum time in seconds that a client waits for an answer, in addition to the wait of a receive call."""
SETTLED_POLL_S: Final = 0.1
"""Time in seconds between two checks whether requests are in progress."""
REDIRECTS_MAX: Final = 3
"""Maximum number of redirections of one request."""


class Answer:
    """What the client learns about a call."""

    __slots__ = ("call", "error", "is_definite", "result")

    def __init__(self, call: Call, settled: Settled | None) -> None:
        self.call = call
        self.is_definite = settled is not None and settled.outcome is not Outcome.UNKNOWN
        """Whether the client knows whether the request was carried out."""
        self.result = settled.result if settled is not None else None
        self.error = settled.error if settled is not None else "no answer"

    @property
    def is_done(self) -> bool:
        return self.is_definite and self.call.is_done


class Caller:
    """The calls of one client."""

    def __init__(self, site: Site, name: str, brokers: Sequence[BrokerMachine], history: History) -> None:
        self.name = name
        self.process = Process(site.loop, name)
        self._site = site
        self._brokers = brokers
        self._history = history
        self._rng = site.rng
        self._broker: BrokerMachine | None = None
        """The broker that served the last call."""
        self._exchanges: list[_Exchange] = []

    async def call(self, request: Request) -> Answer:
        """Send a request to the last broker, or to a random one, and follow redirections."""
        call = self._history.begin(self.name, request)
        self._site.trace.add(self.name, f"call {call.number}", request=request)
        machine = self._broker or self._rng.choice(self._brokers)
        for _ in range(1 + REDIRECTS_MAX):
            settled, redirected = await self._send(machine, call)
            if redirected is None:
                break
            machine = next(one for one in self._brokers if one.url == redirected)
        else:
            settled = Settled(Outcome.REFUSED, error="too many redirections")
            self._settle(call, settled)
        self._broker = machine if settled is not None and settled.outcome is Outcome.DONE else None
        answer = Answer(call, settled)
        self._site.trace.add(
            self.name, f"answer {call.number}", outcome=call.outcome, result=answer.result, error=answer.error
        )
        return answer

    async def settled(self) -> None:
        """Return once none of the requests of this client can have an effect any more."""
        while self._exchanges:
            self._exchanges = [one for one in self._exchanges if not one.is_over]
            await asyncio.sleep(SETTLED_POLL_S)

    async def _send(self, machine: BrokerMachine, call: Call) -> tuple[Settled | None, str | None]:
        """Return the answer (None: there is none), and the URL of the broker to ask instead, if there is one."""
        exchange = _Exchange(self._site, self._history, self.process, machine, call)
        self._exchanges.append(exchange)
        network = self._site.network
        network.at(network.delay_s(self.name, machine.name), exchange.arrive)
        wait_s = CALL_S_MAX + (call.request.wait_s if isinstance(call.request, Receive) else 0.0)
        try:
            async with asyncio.timeout(wait_s):
                return await exchange.answered
        except TimeoutError:
            network.at(network.delay_s(self.name, machine.name), exchange.client_gone)
            return None, None

    def _settle(self, call: Call, settled: Settled) -> None:
        call.outcome, call.error = settled.outcome, settled.error
        call.settled = self._history.instant()


class _Exchange:
    """One request to one broker, and its answer."""

    def __init__(self, site: Site, history: History, client: Process, machine: BrokerMachine, call: Call) -> None:
        self.answered: asyncio.Future[tuple[Settled | None, str | None]] = site.loop.create_future()
        self._site = site
        self._history = history
        self._client = client
        self._machine = machine
        self._call = call
        self._process: Process | None = None
        self._watch = ClientWatch()
        self._has_arrived = False
        self._is_handled = False

    @property
    def is_over(self) -> bool:
        """Whether the request can have no effect any more: it is handled or lost, or the process has ended."""
        if not self._has_arrived:
            return False
        return self._is_handled or self._process is None or not self._process.is_alive

    # --- callbacks outside all processes ------------------------------------------------------------------------------

    def arrive(self) -> None:
        """The request arrives at the host of the broker."""
        machine, call = self._machine, self._call
        self._has_arrived = True
        if self._site.network.is_blocked(self._client.host, machine.name):
            return
        process, gateway = machine.process, machine.gateway
        if process is None or gateway is None:
            call.outcome, call.settled = Outcome.REFUSED, self._history.instant()
            self._answer(Settled(Outcome.REFUSED, error="connection refused"), None)
            return
        self._process = process
        lost = self._site.loop.create_future()
        machine.lost.append(lost)
        lost.add_done_callback(self._connection_lost, context=self._client.context)
        process.spawn(self._handle(gateway, process, lost))

    def client_gone(self) -> None:
        """The client has closed the connection."""
        process = self._process
        if process is not None and process.is_alive:
            process.call_soon(self._watch.set_gone)

    # --- in the process of the broker ---------------------------------------------------------------------------------

    async def _handle(self, gateway: Gateway, process: Process, lost: "asyncio.Future[None]") -> None:
        call, history = self._call, self._history
        call.started, call.broker = history.instant(), self._machine.name
        url: str | None = None
        settled: Settled | None = None
        try:
            settled = await gateway.handle(call, self._watch)
        except Redirected as redirected:
            url = redirected.url
            call.started = None
        if settled is not None:
            call.outcome, call.result, call.error = settled.outcome, settled.result, settled.error
            call.settled = history.instant()
        self._is_handled = True
        lost.cancel()
        if lost in self._machine.lost:
            self._machine.lost.remove(lost)
        if not self._site.network.is_blocked(self._machine.name, self._client.host):
            self._answer(settled, url)

    # --- towards the client -------------------------------------------------------------------------------------------

    def _answer(self, settled: Settled | None, url: str | None) -> None:
        network = self._site.network
        network.at(network.delay_s(self._machine.name, self._client.host), self._deliver, settled, url)

    def _deliver(self, settled: Settled | None, url: str | None) -> None:
        if not self.answered.done():
            self.answered.set_result((settled, url))

    def _connection_lost(self, lost: "asyncio.Future[None]") -> None:
        if not lost.cancelled():
            self._call.is_lost = True
            self._answer(None, None)
