"""Producers that repeat each request until it succeeds, through proxies that cut connections, while brokers are killed.

Half of the producers use an idempotency key for each request, the others their name and sequence ids. A producer has
one request in progress. Each request has up to five messages, of one or several keys, so that some are stored as
several entries. At the end the topic is read without a proxy.

With partitions, the topic is a partitioned one, whose partitions belong to all brokers. A consumer then receives from
the whole topic while brokers are killed, and another one receives everything at the end. Both acknowledge what they got
with the next call, directly at one of the brokers.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.judging.repeats import AFTERWARDS, LIVE
from bindery_e2e.traffic.clients import TrafficError
from bindery_e2e.traffic.cutting_proxy import CuttingProxy
from bindery_e2e.traffic.kills import BrokerProcess

AGAIN: Final = frozenset((408, 409, 429))
"""Statuses below 500 after which the request is repeated."""
NDJSON: Final = "application/x-ndjson"
REQUEST_S: Final = 20.0
RECEIVE_MAX: Final = 200
RECEIVE_WAIT_MS: Final = 1_000
ACK_TIMEOUT_MS: Final = 4_000
"""Milliseconds after which a message comes again whose delivery was not received."""
QUIET_S: Final = 2 * ACK_TIMEOUT_MS / 1000
"""Seconds without a message after which a consumer ends."""
ENDING_S: Final = 120.0
"""Maximum seconds after the load until all requests have succeeded."""
PAGE: Final = 1_000


@dataclass(frozen=True, slots=True)
class RepeatsSettings:
    """The load. The same seed plays the same choices, at times that differ."""

    seed: int = 0
    seconds: float = 60.0
    kills: int = 4
    producers: int = 8
    topic: str = "public/default/repeats"
    partitions: int = 0
    """Partitions of the topic; 0: it is not partitioned."""
    down_s: tuple[float, float] = (0.0, 2.0)
    """Seconds from a kill to the start."""
    pause_s: float = 0.02
    """Mean seconds between two requests of a producer."""


class RepeatRun:
    def __init__(
        self, history: History, urls: Sequence[str], brokers: Sequence[BrokerProcess], settings: RepeatsSettings
    ) -> None:
        self._history = history
        self._urls = urls
        self._brokers = brokers
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._proxies = [CuttingProxy(url, seed=self._random.randrange(2**32)) for url in urls]
        self._topic = f"/v1/topics/{settings.topic}"
        self._path = f"{self._topic}/messages"
        self._requests = 0

    async def play(self) -> None:
        """Raises TrafficError if a broker cannot be killed or started, or if the topic cannot be read."""
        async with contextlib.AsyncExitStack() as stack:
            for proxy in self._proxies:
                await stack.enter_async_context(proxy.serve())
            if self._settings.partitions:
                await self._prepare()
            until = time.monotonic() + self._settings.seconds
            async with asyncio.TaskGroup() as group:
                if self._settings.partitions:
                    group.create_task(self._consume(LIVE, until))
                for number in range(self._settings.producers):
                    chance = random.Random(self._random.randrange(2**32))
                    group.create_task(self._produce(number, chance, until))
                await self._kill(until)
        cuts = sum((proxy.fates for proxy in self._proxies), start=type(self._proxies[0].fates)())
        self._history.observe("cuts", cuts=dict(cuts))
        if not self._settings.partitions:
            await self._read({})
            return
        for partition in range(self._settings.partitions):
            await self._read({"partition": partition})
        await self._consume(AFTERWARDS, time.monotonic())

    async def _prepare(self) -> None:
        """Create the topic, with the subscription of the consumer that receives afterwards."""
        async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as http:
            for path, body in (
                ("/partitions", {"partitions": self._settings.partitions}),
                (f"/subscriptions/{LIVE}", {"initial": "earliest"}),
                (f"/subscriptions/{AFTERWARDS}", {"initial": "earliest"}),
            ):
                answer = await http.put(f"{self._urls[0]}{self._topic}{path}", json=body)
                if answer.status_code not in (200, 201):
                    raise TrafficError(f"{path} is not created: {answer.status_code} {answer.text[:200]}")

    async def _consume(self, name: str, until: float) -> None:
        """Receive from the whole topic, at least until the time `until`, and then until nothing is left."""
        chance = random.Random(f"{self._settings.seed} {name}")
        ids: list[str] = []
        quiet_since = until
        async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as http:
            while (now := time.monotonic()) < max(until, quiet_since + QUIET_S):
                if now > until + ENDING_S:
                    raise TrafficError(f"the consumer {name} does not come to an end")
                body: dict[str, Any] = {
                    "consumer": name,
                    "type": "failover",
                    "max": RECEIVE_MAX,
                    "wait_ms": RECEIVE_WAIT_MS,
                    "ack_timeout_ms": ACK_TIMEOUT_MS,
                }
                if ids:
                    body["ack"] = ids
                n = self._history.invoke("receive", name, topic=self._settings.topic)
                try:
                    answer = await http.post(
                        f"{chance.choice(self._urls)}{self._topic}/subscriptions/{name}/receive", json=body
                    )
                    problem = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
                except httpx.HTTPError as error:
                    problem = f"{type(error).__name__} {error}"
                if problem:
                    self._history.unknown(n, problem)
                    quiet_since = time.monotonic()
                    await asyncio.sleep(chance.uniform(0.05, 0.4))
                    continue
                messages = answer.json()["messages"]
                self._history.ok(n, messages=[_row(one) for one in messages])
                ids = [one["message_id"] for one in messages]
                if messages:
                    quiet_since = time.monotonic()

    async def _produce(self, number: int, chance: random.Random, until: float) -> None:
        name = f"p{number}"
        by_key = number % 2 == 0
        sequence = 0
        # A connection for each request: the proxy draws the fate of a connection.
        async with httpx.AsyncClient(
            timeout=REQUEST_S, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        ) as http:
            while time.monotonic() < until:
                sequences = list(range(sequence, sequence + chance.randint(1, 5)))
                sequence = sequences[-1] + 1
                lines = [
                    json.dumps({"payload": f"{name} {one}", "key": f"k{chance.randint(0, 1)}"}) for one in sequences
                ]
                options: dict[str, Any] = {"content": "\n".join(lines), "headers": {"content-type": NDJSON}}
                if by_key:
                    options["headers"]["idempotency-key"] = f"{name}-{chance.getrandbits(64):x}"
                else:
                    options["params"] = {"producer": name, "sequence_id": sequences[0]}
                self._requests += 1
                if not await self._until_done(http, name, self._requests, sequences, options, chance, until):
                    return
                await asyncio.sleep(chance.expovariate(1 / self._settings.pause_s))

    async def _until_done(
        self,
        http: httpx.AsyncClient,
        name: str,
        request: int,
        sequences: list[int],
        options: dict[str, Any],
        chance: random.Random,
        until: float,
    ) -> bool:
        """Repeat a request until it succeeds. Returns False if it is refused, or not done in time."""
        while time.monotonic() < until + ENDING_S:
            url = chance.choice(self._proxies).url
            n = self._history.invoke("produce", name, topic=self._settings.topic, request=request, sequences=sequences)
            try:
                answer = await http.post(url + self._path, **options)
                body = answer.json() if answer.content else {}
            except (httpx.HTTPError, ValueError) as error:
                self._history.unknown(n, f"{type(error).__name__} {error}")
            else:
                if answer.status_code == 200:
                    self._history.ok(n, ids=body["message_ids"])
                    if chance.random() < 0.9:
                        return True
                    continue  # as a client does that died before it has recorded the answer
                text = f"{answer.status_code} {answer.text[:200]}"
                if answer.status_code < 500 and answer.status_code not in AGAIN and answer.status_code != 207:
                    self._history.failed(n, text)
                    return False
                self._history.unknown(n, text)
            await asyncio.sleep(chance.uniform(0.05, 0.4))
        return False

    async def _kill(self, until: float) -> None:
        kills = self._settings.kills
        for number in range(kills):
            left = until - time.monotonic()
            await asyncio.sleep(max(0.0, left / (kills - number + 1) * self._random.uniform(0.6, 1.4)))
            broker = self._brokers[number % len(self._brokers)]
            with self._history.fault("kill", broker.name):
                await broker.kill()
                await asyncio.sleep(self._random.uniform(*self._settings.down_s))
                await broker.start()

    async def _read(self, place: dict[str, Any]) -> None:
        """Read the topic, or the partition that `place` names."""
        start = "earliest"
        deadline = time.monotonic() + ENDING_S
        async with httpx.AsyncClient(timeout=REQUEST_S, trust_env=False) as http:
            while True:
                n = self._history.invoke("read", "reader", topic=self._settings.topic, start=start, round=0, **place)
                try:
                    answer = await http.get(self._urls[0] + self._path, params={"start": start, "max": PAGE, **place})
                except httpx.HTTPError as error:
                    problem = f"{type(error).__name__} {error}"
                else:
                    problem = f"{answer.status_code} {answer.text[:200]}" if answer.status_code != 200 else ""
                if problem:
                    self._history.unknown(n, problem)
                    if time.monotonic() > deadline:
                        raise TrafficError(f"the topic cannot be read: {problem}")
                    await asyncio.sleep(0.5)
                    continue
                body = answer.json()
                rows = [_row(one) for one in body["messages"]]
                self._history.ok(n, messages=rows, end=not rows)
                if not rows:
                    return
                start = body["next"]


def _row(message: dict[str, Any]) -> list[Any]:
    name, _, sequence = message["payload"].partition(" ")
    return [message["message_id"], name, int(sequence), message.get("key", "")]
