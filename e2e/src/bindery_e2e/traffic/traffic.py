"""Producers and consumers over the broker's HTTP data API, and the reading of everything at the end.

Traffic knows nothing of faults. Every request is in the history before it is sent, and its outcome after.

Rules that make the history judgeable:

- A message is (producer, sequence); both travel as its properties, and the payload's digest stands in the history.
- A producer has one request outstanding. So of two of its messages the one with the lower sequence stands first,
  unless the outcome of a request was unknown: such a message may still be written at any later time.
- **Nothing is sent twice.** After a refusal or an unknown outcome the next request carries new data under new
  sequences, so any second copy of a message is the cluster's. (The validators also judge histories in which a
  sequence was invoked several times: as many copies may then stand as invocations did not definitely fail.)
- Subscriptions are there before the first message. One more, `keeper`, is never read: it keeps what all others have
  acknowledged from being trimmed, so that the last reading finds it.
- A consumer that lost an answer says `redeliver` in its next request, and gets what that answer held first.
- The last reading goes over the topic without a subscription, from `earliest` to its end: that is the truth.
"""

import asyncio
import base64
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, Door, Endpoint, Outcome, fixed, refusal_kind
from bindery_e2e.traffic.payloads import Payloads, digest_of, find_files

__all__ = ["Counts", "Endpoint", "Traffic", "TrafficError", "TrafficSettings", "find_files", "fixed"]

KEEPER: Final = "keeper"
SETUP_TIMEOUT_S: Final = 60.0
READ_MAX: Final = 500
"""Messages of one page of the last reading."""
BEHIND_S_MAX: Final = 1.0
"""A producer that fell behind its rate makes up for so much of it, no more."""
POLL_S: Final = 0.1


class TrafficError(Exception):
    """The run cannot begin, or a client of ours broke; says why and what to do."""


@dataclass(frozen=True, slots=True)
class TrafficSettings:
    """What is sent and who consumes it. The same seed sends the same data; times differ."""

    seed: int = 0
    topics: tuple[str, ...] = ("public/default/e2e-0", "public/default/e2e-1")
    """`tenant/namespace/name`; must hold no messages."""
    producers_per_topic: int = 2
    messages_per_s: float = 100.0
    """Of all producers together; 0: as fast as answers come."""
    batch_share: float = 0.3
    """Of the requests: those with several messages."""
    batch_max: int = 20
    subscriptions: tuple[tuple[str, str, int], ...] = (("workers", "shared", 2), ("ledger", "exclusive", 1))
    """(name, "shared" or "exclusive", consumers) on each topic."""
    receive_max: int = 100
    receive_wait_ms: int = 1000
    ack_timeout_ms: int = 15_000
    nack_share: float = 0.01
    """Of the messages of shared subscriptions: returned once in a while, so that redelivery happens."""
    request_timeout_s: float = 15.0


@dataclass(slots=True)
class Counts:
    """Messages so far. `delivered` counts every delivery, repeated ones too."""

    acknowledged: int = 0
    failed: int = 0
    unknown: int = 0
    delivered: int = 0
    bytes_acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A subscription of a topic."""

    topic: str
    subscription: str
    kind: str

    @property
    def path(self) -> str:
        return f"{topic_path(self.topic)}/subscriptions/{self.subscription}"


@dataclass(slots=True)
class Outgoing:
    """Messages of one request."""

    sequences: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)


def topic_path(topic: str) -> str:
    return f"/v1/topics/{topic}"


class Traffic:
    """`async with Traffic(...) as traffic:` sets up and starts; `await traffic.finish()` before the block ends.

    Left without `finish`, everything is cancelled and the history says less: it is judged as incomplete.
    """

    def __init__(
        self,
        history: History,
        endpoint: Endpoint,
        *,
        files: Sequence[Path],
        settings: TrafficSettings = TrafficSettings(),
    ) -> None:
        """`files`: where the payloads come from, see `find_files`. `endpoint`: asked anew after a lost connection."""
        self.counts = Counts()
        self.settings = settings
        self._history = history
        self._door = Door(endpoint, timeout_s=settings.request_timeout_s)
        self._files = files
        self._places = [Place(t, name, kind) for t in settings.topics for name, kind, _ in settings.subscriptions]
        self._over = asyncio.Event()
        self._producers: list[asyncio.Task[None]] = []
        self._consumers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._set_up()
        settings = self.settings
        for number, topic in enumerate(t for t in settings.topics for _ in range(settings.producers_per_topic)):
            self._producers.append(asyncio.create_task(self._produce(f"p{number}", topic)))
        consumers = {(name, kind): count for name, kind, count in settings.subscriptions}
        for place in self._places:
            for number in range(consumers[place.subscription, place.kind]):
                name = f"{place.topic.rpartition('/')[2]}-{place.subscription}-{number}"
                self._consumers.append(asyncio.create_task(self._consume(name, place)))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._producers, *self._consumers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_acknowledged(self, count: int, *, timeout_s: float) -> None:
        """Until so many messages more than now are acknowledged. Raises TrafficError at the timeout."""
        wanted = self.counts.acknowledged + count
        began = time.monotonic()
        while self.counts.acknowledged < wanted:
            self._check()
            if time.monotonic() - began > timeout_s:
                missing = wanted - self.counts.acknowledged
                raise TrafficError(f"{missing} of {count} messages were not acknowledged within {timeout_s:.0f} s")
            await asyncio.sleep(POLL_S)

    async def stop_producing(self) -> None:
        """Producers end their requests under way; no message is sent any more."""
        self._over.set()
        await asyncio.gather(*self._producers)

    async def finish(self, *, timeout_s: float = 180.0) -> None:
        """Stop producing, let consumers come to the end, read every topic. What does not end in time is recorded as
        such, and raises nothing: the verdict is the validators'. `timeout_s` holds for consumers and for reading each.
        """
        await self.stop_producing()
        self._check()
        await asyncio.gather(*(self._drain(place, timeout_s=timeout_s) for place in self._places))
        self._check()
        for task in self._consumers:
            task.cancel()
        await asyncio.gather(*self._consumers, return_exceptions=True)
        await self.read_back(timeout_s=timeout_s)

    async def read_back(self, *, timeout_s: float, number: int = 1) -> None:
        """Read every topic from earliest to its end, as round `number`."""
        await asyncio.gather(*(self._read(topic, number, timeout_s=timeout_s) for topic in self.settings.topics))

    def _check(self) -> None:
        for task in (*self._producers, *self._consumers):
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise TrafficError(f"a client of ours broke: {task.exception()!r}") from task.exception()

    # -- setting up ------------------------------------------------------------------------------------------------

    async def _set_up(self) -> None:
        async with self._door.client() as http:
            for topic in self.settings.topics:
                for place in (Place(topic, KEEPER, "shared"), *(p for p in self._places if p.topic == topic)):
                    await self._surely(http, "PUT", place.path, json={"initial": "earliest"})
                page = await self._surely(http, "GET", f"{topic_path(topic)}/messages", params={"max": 1})
                if page["messages"]:
                    raise TrafficError(f"topic {topic} holds messages already: delete it, or choose another name")
        for place in self._places:
            self._history.observe("subscribed", topic=place.topic, subscription=place.subscription, kind=place.kind)

    async def _surely(self, http: httpx.AsyncClient, method: str, path: str, **request: Any) -> Any:
        """The body of the answer. Only for what may be repeated."""
        outcome = Outcome("failed", error="no broker's address is known")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                while True:
                    await self._door.open()
                    outcome = await self._door.call(http, method, path, **request)
                    if outcome.kind == "ok":
                        return outcome.body
                    await asyncio.sleep(RETRY_PAUSE_S)
        raise TrafficError(f"{method} {path} did not succeed within {SETUP_TIMEOUT_S:.0f} s: {outcome.error}")

    # -- producing -------------------------------------------------------------------------------------------------

    async def _produce(self, producer: str, topic: str) -> None:
        lots = random.Random(f"{self.settings.seed} {producer}")
        payloads = Payloads(self._files, seed=lots.getrandbits(32))
        sequence = 0
        due = asyncio.get_running_loop().time()
        async with self._door.client() as http:
            while not self._over.is_set():
                count = lots.randint(2, self.settings.batch_max) if lots.random() < self.settings.batch_share else 1
                due = await self._pace(due, count)
                await self._door.open()
                if self._over.is_set():
                    return
                messages = await asyncio.to_thread(take, payloads, sequence, count)
                sequence += count
                if not await self._send(http, producer, topic, messages, lots):
                    await asyncio.sleep(RETRY_PAUSE_S * lots.uniform(0.5, 1.5))

    async def _pace(self, due: float, count: int) -> float:
        """Wait until `due`; when the request after this one is due."""
        settings = self.settings
        if settings.messages_per_s <= 0:
            return due
        now = asyncio.get_running_loop().time()
        if now < due:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), due - now)
        producers = len(settings.topics) * settings.producers_per_topic
        return max(due, now - BEHIND_S_MAX) + count * producers / settings.messages_per_s

    async def _send(
        self, http: httpx.AsyncClient, producer: str, topic: str, messages: Outgoing, lots: random.Random
    ) -> bool:
        """Whether all of it was acknowledged."""
        request = produce_request(producer, messages, batch=lots.random() < 0.8)
        sizes = [len(payload) for payload in messages.payloads]
        n = self._history.invoke(
            "produce", producer, topic=topic, sequences=messages.sequences, sizes=sizes, digests=messages.digests
        )
        outcome = await self._recorded(n, self._door.call(http, "POST", f"{topic_path(topic)}/messages", **request))
        if outcome.kind == "ok":
            ids = produced_ids(outcome, len(sizes))
            if ids is None:
                outcome = replace(outcome, kind="unknown", error=f"an answer that is none: {outcome.body!r}")
            else:
                self._history.ok(n, ids=ids)
                self._count(ids, sizes)
                return all(":" in text for text in ids)
        self._refused(n, outcome)
        self._count([outcome.kind] * len(sizes), sizes)
        return False

    def _count(self, outcomes: Sequence[str], sizes: Sequence[int]) -> None:
        for outcome, size in zip(outcomes, sizes, strict=True):
            if outcome == "failed":
                self.counts.failed += 1
            elif outcome == "unknown":
                self.counts.unknown += 1
            else:
                self.counts.acknowledged += 1
                self.counts.bytes_acknowledged += size

    async def _recorded(self, n: int, call: Any) -> Outcome:
        """A cancelled call is unknown."""
        try:
            outcome: Outcome = await call
        except BaseException as error:
            self._history.unknown(n, f"given up: {type(error).__name__}")
            raise
        return outcome

    def _refused(self, n: int, outcome: Outcome) -> None:
        if outcome.kind == "failed":
            self._history.failed(n, outcome.error)
        else:
            self._history.unknown(n, outcome.error)

    # -- consuming -------------------------------------------------------------------------------------------------

    async def _consume(self, consumer: str, place: Place) -> None:
        lots = random.Random(f"{self.settings.seed} {consumer}")
        redeliver = False
        async with self._door.client(longer_s=self.settings.receive_wait_ms / 1000) as http:
            while True:
                await self._door.open()
                messages = await self._receive(http, consumer, place, redeliver=redeliver)
                redeliver = messages is None
                if messages is None:
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                ids = [str(message["message_id"]) for message in messages]
                kept = [i for i in ids if place.kind != "shared" or lots.random() >= self.settings.nack_share]
                returned = sorted(set(ids) - set(kept))
                if returned:
                    await self._door.call(http, "POST", f"{place.path}/nack", json={"message_ids": returned})
                if kept and not await self._ack(http, consumer, place, kept):
                    redeliver = True

    async def _receive(
        self, http: httpx.AsyncClient, consumer: str, place: Place, *, redeliver: bool
    ) -> list[dict[str, Any]] | None:
        """None: no answer, or no good one."""
        settings = self.settings
        body = {
            "consumer": consumer, "type": place.kind, "initial": "earliest", "max": settings.receive_max,
            "wait_ms": settings.receive_wait_ms, "ack_timeout_ms": settings.ack_timeout_ms, "redeliver": redeliver,
        }  # fmt: skip
        where = {"topic": place.topic, "subscription": place.subscription, "kind": place.kind}
        n = self._history.invoke("receive", consumer, **where)
        outcome = await self._recorded(n, self._door.call(http, "POST", f"{place.path}/receive", json=body))
        if outcome.kind != "ok":
            self._refused(n, outcome)
            return None
        messages: list[dict[str, Any]] = outcome.body["messages"]
        rows = [[*row_of(message), message.get("redelivery_count", 0)] for message in messages]
        self._history.ok(n, messages=rows)
        self.counts.delivered += len(rows)
        return messages

    async def _ack(self, http: httpx.AsyncClient, consumer: str, place: Place, ids: list[str]) -> bool:
        where = {"topic": place.topic, "subscription": place.subscription, "ids": ids}
        n = self._history.invoke("ack", consumer, **where)
        body = {"message_ids": ids, "consumer": consumer}
        outcome = await self._recorded(n, self._door.call(http, "POST", f"{place.path}/ack", json=body))
        if outcome.kind == "ok":
            self._history.ok(n)
            return True
        self._refused(n, outcome)
        return False

    # -- the end ---------------------------------------------------------------------------------------------------

    async def _drain(self, place: Place, *, timeout_s: float) -> None:
        complete = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._door.client() as http:
                while not await self._is_empty(http, place):
                    self._check()
                    await asyncio.sleep(POLL_S * 2)
                complete = True
        where = {"topic": place.topic, "subscription": place.subscription}
        self._history.observe("drained", **where, complete=complete)

    async def _is_empty(self, http: httpx.AsyncClient, place: Place) -> bool:
        await self._door.open()
        outcome = await self._door.call(http, "GET", f"{topic_path(place.topic)}/subscriptions")
        if outcome.kind != "ok":
            return False
        for info in outcome.body["subscriptions"]:
            if info["subscription"] == place.subscription:
                return bool(info["backlog_entries"] == 0 and info["unacked"] == 0)
        return False

    async def _read(self, topic: str, number: int, *, timeout_s: float) -> None:
        start = "earliest"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._door.client() as http:
                while True:
                    await self._door.open()
                    n = self._history.invoke("read", "reader", topic=topic, start=start, round=number)
                    call = self._door.call(
                        http, "GET", f"{topic_path(topic)}/messages", params={"start": start, "max": READ_MAX}
                    )
                    outcome = await self._recorded(n, call)
                    if outcome.kind != "ok":
                        self._refused(n, outcome)
                        await asyncio.sleep(RETRY_PAUSE_S)
                        continue
                    rows = [row_of(message) for message in outcome.body["messages"]]
                    self._history.ok(n, messages=rows, end=not rows)
                    if not rows:
                        return
                    start = outcome.body["next"]


def take(payloads: Payloads, sequence: int, count: int) -> Outgoing:
    """The next `count` payloads, as messages from `sequence` on. Reads files."""
    taken = Outgoing()
    for number in range(count):
        payload = payloads.next()
        taken.sequences.append(sequence + number)
        taken.payloads.append(payload)
        taken.digests.append(digest_of(payload))
    return taken


def produce_request(producer: str, messages: Outgoing, *, batch: bool) -> dict[str, Any]:
    """Arguments of httpx for a request that sends them: one as a raw body, several as NDJSON."""
    if len(messages.payloads) == 1:
        return {
            "params": {"producer": producer, "key": producer},
            "content": messages.payloads[0],
            "headers": {
                "content-type": "application/octet-stream",
                "bindery-property-producer": quote(producer),
                "bindery-property-sequence": str(messages.sequences[0]),
            },
        }
    lines = [
        json.dumps(
            {
                "payload_base64": base64.b64encode(payload).decode(),
                "key": producer,
                "properties": {"producer": producer, "sequence": str(sequence)},
            }
        )
        for sequence, payload in zip(messages.sequences, messages.payloads, strict=True)
    ]
    return {
        "params": {"producer": producer, **({} if batch else {"batch": "false"})},
        "content": "\n".join(lines).encode(),
        "headers": {"content-type": "application/x-ndjson"},
    }


def produced_ids(outcome: Outcome, count: int) -> list[str] | None:
    """For each message its id, "failed" or "unknown". None: this is no answer to a request with `count` messages."""
    try:
        if outcome.status != 207:
            ids = [str(text) for text in outcome.body["message_ids"]]
        else:
            ids = [_result(result) for result in outcome.body["results"]]
    except (KeyError, TypeError):
        return None
    return ids if len(ids) == count else None


def _result(result: dict[str, Any]) -> str:
    if "message_id" in result:
        return str(result["message_id"])
    return refusal_kind(int(result["error"]["status"]), result["error"]["code"])


def row_of(message: dict[str, Any]) -> list[Any]:
    """[id, producer, sequence, digest]; producer "" and sequence -1 for a message that is not ours."""
    text = message.get("payload")
    payload = base64.b64decode(message.get("payload_base64", "")) if text is None else text.encode()
    properties = message.get("properties", {})
    sequence = properties.get("sequence", "")
    if not sequence.isdecimal() or "producer" not in properties:
        return [message["message_id"], "", -1, digest_of(payload)]
    return [message["message_id"], properties["producer"], int(sequence), digest_of(payload)]
