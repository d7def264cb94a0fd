"""Requests between brokers over the simulated network: moves to topics of other brokers.

The messages are those of `http.peers.moves`. `Wire` takes the place of its proxy, and `answer` that of the operations
of the HTTP port: the errors of the owner become problems, as there. While faults are injected, a share of the requests
has trouble, by the seed, most often those that store copies:

| trouble      | what happens                                                                              |
|--------------|-------------------------------------------------------------------------------------------|
| LATE         | the request arrives late, perhaps after the caller has given up                           |
| BROKEN       | the connection breaks for the caller; the request arrives nevertheless, perhaps late      |
| LOST         | the request never arrives                                                                 |
| UNANSWERED   | the request is carried out, and its answer is lost                                        |

A request or an answer is also lost during a partition of the two brokers. If the process of the owner ends, the
connection breaks.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from typing import Final, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from bindery_broker.broker import Broker
from bindery_broker.errors import NotOwner
from bindery_broker.http.peers.moves import Peers
from bindery_broker.http.proxy import Proxy
from bindery_broker.http.v1.message_view import parse_place
from bindery_broker.http.v1.messages import result_of
from bindery_broker.http.v1.schemas import ProducedPartly
from bindery_broker.ownership.bundles import bundle_named
from bindery_broker.retries.copy_codec import decode_copies
from bindery_broker.retries.intents import MESSAGES_MAX
from bindery_broker.topics.topic import Topic
from bindery_core.errors import BadRequest, BinderyError, OutcomeUnknown, TopicFenced
from bindery_kit.http.problem import problem_of
from bindery_pulsar.message_id import EARLIEST
from bindery_pulsar.topic_name import TopicName

from bindery_simulation.loop import Process, current_process
from bindery_simulation.service.cluster import Cluster

ATTEMPTS_MAX: Final = 2
"""Maximum number of attempts of a broker to carry out a request whose topic moves. The product repeats for some
seconds."""
ANSWER_S_MAX: Final = 8.0
"""Maximum time in seconds that a broker waits for an answer. Shorter than that of the product, so that short runs reach
it."""
LATE_S: Final = (0.0, 0.5, 3.0, 6.0, 12.0)
"""Additional times in seconds until a request with trouble arrives."""
OTHERS_SHARE: Final = 0.25
"""Share of the trouble of other requests, in that of requests to store copies. A move whose beginning fails is harmless
and delays the next one."""
BROKEN_S: Final = (0.0, 0.3, 2.0)
"""Times in seconds after which a connection breaks."""

Query = Mapping[str, str]


class Trouble(Enum):
    NONE = auto()
    LATE = auto()
    BROKEN = auto()
    LOST = auto()
    UNANSWERED = auto()


TROUBLES: Final = (Trouble.LATE, Trouble.LATE, Trouble.BROKEN, Trouble.LOST, Trouble.UNANSWERED)


class Host(Protocol):
    """The machine of a broker: `BrokerMachine`."""

    name: str
    url: str
    process: Process | None
    lost: list[asyncio.Future[None]]

    @property
    def broker(self) -> Broker | None: ...


# --- the network ------------------------------------------------------------------------------------------------------


class Switchboard:
    """Connects the brokers of a run. `trouble_share`: share of the requests to store copies that have trouble."""

    def __init__(self, cluster: Cluster, *, trouble_share: float) -> None:
        self.cluster = cluster
        self.hosts: dict[str, Host] = {}
        """By URL."""
        self.counts: Counter[str] = Counter()
        """What happened to the requests: operation and status, or trouble."""
        self.copies = 0
        """Number of copies that brokers stored for others."""
        self._trouble_share = trouble_share
        self._exchanges: list[_Exchange] = []

    def proxy(self) -> Proxy:
        """Return what sends requests of the broker of the present process to others: `call` is all that it has."""
        process = current_process()
        assert process is not None
        return cast(Proxy, Wire(self, process))

    def peers(self) -> Peers:
        """Return the other brokers for the broker of the present process."""
        return Peers(self.proxy())

    @property
    def is_idle(self) -> bool:
        """Whether no request can have an effect any more."""
        self._exchanges = [one for one in self._exchanges if not one.is_over]
        return not self._exchanges

    def draw_trouble(self, path: str) -> Trouble:
        rng = self.cluster.rng
        share = self._trouble_share if "/copies?" in path else self._trouble_share * OTHERS_SHARE
        if self.cluster.is_healing or not share or rng.random() >= share:
            return Trouble.NONE
        return rng.choice(TROUBLES)

    def add(self, exchange: "_Exchange") -> None:
        self._exchanges.append(exchange)


class Wire:
    """The requests of one broker process: `call` of `http.proxy.Proxy`."""

    def __init__(self, switchboard: Switchboard, process: Process) -> None:
        self._switchboard = switchboard
        self._process = process

    async def call(
        self, _method: str, url: str, path: str, body: bytes | None = None, *, timeout_s: float, **_headers: object
    ) -> tuple[int, bytes]:
        """See `Proxy.call`."""
        return await self._ask(url, path, body or b"", min(timeout_s, ANSWER_S_MAX))

    async def _ask(self, url: str, path: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Return status and body. Raises NotOwner if the broker does not serve, OutcomeUnknown without an answer."""
        exchange = _Exchange(self._switchboard, self._process, url, path, body)
        exchange.send()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await exchange.answered
        except TimeoutError:
            answer = None
        trace = self._switchboard.cluster.trace
        if answer is None:
            trace.add(self._process.host, "no answer", url=url, path=path)
            raise OutcomeUnknown("the connection to the topic's owner broke", owner=url)
        status, content = answer
        trace.add(self._process.host, "answer", url=url, path=path, status=status, body=content)
        if status == 0:
            raise NotOwner("the topic's owner cannot be reached; retry", owner=url)
        return answer


REFUSED: Final = (0, b"")
"""The answer of a host without a process: nothing listens there."""


class _Exchange:
    """One request to one broker, and its answer."""

    def __init__(self, switchboard: Switchboard, client: Process, url: str, path: str, body: bytes) -> None:
        self.answered: asyncio.Future[tuple[int, bytes] | None] = switchboard.cluster.loop.create_future()
        """The answer; None: the connection broke."""
        self._switchboard = switchboard
        self._network = switchboard.cluster.network
        self._client = client
        self._host = switchboard.hosts[url]
        self._path = path
        self._body = body
        self._trouble = Trouble.NONE
        self._process: Process | None = None
        self._has_arrived = False
        self._is_handled = False

    @property
    def is_over(self) -> bool:
        """Whether the request can have no effect any more: it is handled or lost, or the process has ended."""
        if not self._has_arrived:
            return False
        return self._is_handled or self._process is None or not self._process.is_alive

    def send(self) -> None:
        switchboard = self._switchboard
        switchboard.add(self)
        rng = switchboard.cluster.rng
        self._trouble = trouble = switchboard.draw_trouble(self._path)
        delay_s = self._network.delay_s(self._client.host, self._host.name)
        if trouble is not Trouble.NONE:
            switchboard.counts[trouble.name] += 1
            switchboard.cluster.trace.add(self._client.host, "trouble", path=self._path, trouble=trouble.name)
        if trouble in (Trouble.LATE, Trouble.BROKEN):
            delay_s += rng.choice(LATE_S)
        if trouble is Trouble.BROKEN:
            self._network.at(rng.choice(BROKEN_S), self._deliver, None)
        self._network.at(delay_s, self._arrive)

    # --- callbacks outside all processes ------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """The request arrives at the host of the broker."""
        host = self._host
        self._has_arrived = True
        if self._trouble is Trouble.LOST or self._network.is_blocked(self._client.host, host.name):
            return
        process, broker = host.process, host.broker
        if process is None or broker is None:
            self._answer(REFUSED)
            return
        self._process = process
        lost: asyncio.Future[None] = self._switchboard.cluster.loop.create_future()
        host.lost.append(lost)
        lost.add_done_callback(self._connection_lost, context=self._client.context)
        process.spawn(self._handle(broker, lost))

    # --- in the process of the owner ----------------------------------------------------------------------------------

    async def _handle(self, broker: Broker, lost: "asyncio.Future[None]") -> None:
        operation, status, content = await answer(broker, self._path, self._body)
        self._is_handled = True
        switchboard = self._switchboard
        switchboard.counts[f"{operation} {status}"] += 1
        if operation == STORE and status == 200:
            switchboard.copies += content.count(b'"message_id"')
        switchboard.cluster.trace.add(
            self._host.name, f"served {operation}", client=self._client.host, path=self._path, status=status
        )
        lost.cancel()
        if lost in self._host.lost:
            self._host.lost.remove(lost)
        if not self._network.is_blocked(self._host.name, self._client.host):
            self._answer((status, content))

    # --- towards the client -------------------------------------------------------------------------------------------

    def _answer(self, answer: tuple[int, bytes] | None) -> None:
        if self._trouble is not Trouble.UNANSWERED:
            self._network.at(self._network.delay_s(self._host.name, self._client.host), self._deliver, answer)

    def _deliver(self, answer: tuple[int, bytes] | None) -> None:
        if not self.answered.done():
            self.answered.set_result(answer)

    def _connection_lost(self, lost: "asyncio.Future[None]") -> None:
        if not lost.cancelled():
            self._answer(None)


# --- the owner --------------------------------------------------------------------------------------------------------

NAMESPACES: Final = "/v1/namespaces/"
TAKE: Final = "take"
BEGIN: Final = "moves"
STORE: Final = "moves/copies"
LAST: Final = ""
READ: Final = "messages"
"""The operations, by the end of their path."""


async def answer(broker: Broker, path: str, body: bytes) -> tuple[str, int, bytes]:
    """Carry out a request of another broker, as the HTTP port does. Return the operation, and status and body."""
    url = urlsplit(path)
    if url.path.startswith(NAMESPACES):
        return await _take(broker, url.path, body)
    _, _, _, tenant, namespace, local, *rest = url.path.split("/")
    name = TopicName.of(tenant=unquote(tenant), namespace=unquote(namespace), local=unquote(local))
    operation = "/".join(rest)
    query = dict(parse_qsl(url.query))
    carry_out = _OPERATIONS[operation]
    broker.topics.begin_use(name)
    try:
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if broker.topics.loaded(name) is None:
                    remote = await broker.locate(name, create=operation == BEGIN)
                    if remote is not None:
                        raise NotOwner("this broker does not own the topic; retry", owner=remote.http_url)
                return operation, 200, await carry_out(broker, name, query, body)
            except (TopicFenced, NotOwner) as error:
                if attempt == ATTEMPTS_MAX:
                    raise NotOwner(f"the topic is moving to another broker, retry: {error}") from error
        raise AssertionError("unreachable")
    except BinderyError as error:
        problem = problem_of(error)
        return operation, problem.status_code, bytes(problem.body)
    finally:
        broker.topics.end_use(name)


async def _take(broker: Broker, path: str, body: bytes) -> tuple[str, int, bytes]:
    """Take a bundle, as `takeBundle` of the HTTP port does."""
    _, _, _, tenant, namespace, _ = path.split("/")
    wanted = msgspec.json.decode(body)
    try:
        bundle = bundle_named(await broker.ownership.divisions.bundles(tenant, namespace), wanted["bundle"])
        if bundle is None:
            raise BadRequest("the namespace has no such bundle", bundle=wanted["bundle"])
        remote = await broker.ownership.locate(bundle, take=True)
    except BinderyError as error:
        problem = problem_of(error)
        return TAKE, problem.status_code, bytes(problem.body)
    if remote is None:
        broker.topics.open_soon(bundle, wanted["topics"])
    owner = broker.url if remote is None else remote.http_url
    return TAKE, 200, msgspec.json.encode({"owner": owner})


async def _begin(broker: Broker, name: TopicName, _query: Query, body: bytes) -> bytes:
    wanted = msgspec.json.decode(body)
    topic = await broker.topic(name, create=wanted["create"])
    if wanted["create"]:
        await topic.subscribe(wanted["subscription"], initial=EARLIEST)
    begun = await broker.topics.targets.hosted.begin(topic, source=wanted["source"])
    return msgspec.json.encode({"epoch": begun.epoch, "end": list(begun.end)})


async def _store(broker: Broker, name: TopicName, query: Query, body: bytes) -> bytes:
    copies = decode_copies(body, count_max=MESSAGES_MAX)
    topic = await broker.topic(name)
    results = await broker.topics.targets.hosted.publish(topic, copies, source=query["source"], epoch=query["epoch"])
    return msgspec.json.encode(ProducedPartly(results=[result_of(result) for result in results]))


async def _last(broker: Broker, name: TopicName, _query: Query, _body: bytes) -> bytes:
    topic: Topic = await broker.topic(name)
    return msgspec.json.encode({"last": str(topic.ledger.last_confirmed)})


async def _read(broker: Broker, name: TopicName, query: Query, _body: bytes) -> bytes:
    topic = await broker.topic(name)
    charge = broker.topics.responses.charge("peer")
    try:
        found, following = await topic.read(
            parse_place(query["start"]), charge=charge, count_max=int(query["max"]), bytes_max=int(query["max_bytes"])
        )
    finally:
        charge.release()
    messages = [{"message_id": str(row.id), "properties": dict(row.message.properties)} for row in found]
    return msgspec.json.encode({"messages": messages, "next": str(following)})


_OPERATIONS: Final[dict[str, Callable[[Broker, TopicName, Query, bytes], Awaitable[bytes]]]] = {
    BEGIN: _begin, STORE: _store, LAST: _last, READ: _read,
}  # fmt: skip
