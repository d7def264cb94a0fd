"""Requests of producers, consumers and readers, each recorded in the history before it is sent and after its response.

`Clients` is shared by all clients of a run; they differ in what they send and when.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

import httpx

from bindery_e2e.judging.history import History
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, BrokerAccess, Endpoint, Outcome, refusal_kind
from bindery_e2e.traffic.payloads import digest_of

KEEPER: Final = "keeper"
"""A subscription that is never read: it keeps messages that all other subscriptions have acknowledged from being
trimmed before the last reading."""
SETUP_TIMEOUT_S: Final = 60.0
READ_MAX: Final = 500
"""Maximum messages per page of the last reading."""
POLL_S: Final = 0.1


class TrafficError(Exception):
    """The run cannot begin, or a client of the traffic failed; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Place:
    """A subscription of a topic. `kind`: its type."""

    topic: str
    subscription: str
    kind: str

    @property
    def path(self) -> str:
        return f"{topic_path(self.topic)}/subscriptions/{self.subscription}"

    @property
    def fields(self) -> dict[str, str]:
        """The fields of the subscription in the history."""
        return {"topic": self.topic, "subscription": self.subscription}


@dataclass(slots=True)
class Outgoing:
    """The messages of one produce request."""

    sequences: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    """Empty: the producer's name is the key of each message."""

    def add(self, sequence: int, payload: bytes, *, key: str | None = None) -> None:
        self.sequences.append(sequence)
        self.payloads.append(payload)
        self.digests.append(digest_of(payload))
        if key is not None:
            self.keys.append(key)


def topic_path(topic: str) -> str:
    return f"/v1/topics/{topic}"


class Clients:
    """Sends requests and records them. `access`: the current broker."""

    def __init__(self, history: History, endpoint: Endpoint, *, timeout_s: float, is_kept: bool = True) -> None:
        """`is_kept`: see `BrokerAccess`."""
        self.access = BrokerAccess(endpoint, timeout_s=timeout_s, is_kept=is_kept)
        self._history = history

    # -- setup ---------------------------------------------------------------------------------------------------------

    async def create(self, places: Sequence[Place]) -> None:
        """Create the subscriptions and the keepers of their topics. Raises TrafficError if a topic is not empty."""
        async with self.access.client() as http:
            for topic in dict.fromkeys(place.topic for place in places):
                for place in (Place(topic, KEEPER, "shared"), *(p for p in places if p.topic == topic)):
                    await self.until_ok(http, "PUT", place.path, json={"initial": "earliest"})
                page = await self.until_ok(http, "GET", f"{topic_path(topic)}/messages", params={"max": 1})
                if page["messages"]:
                    raise TrafficError(f"topic {topic} holds messages already: delete it, or choose another name")

    async def until_ok(self, http: httpx.AsyncClient, method: str, path: str, **request: Any) -> Any:
        """Send an idempotent request until it succeeds, and return the body of the response.

        Raises TrafficError at the timeout.
        """
        outcome = Outcome("failed", error="no broker's address is known")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETUP_TIMEOUT_S):
                while True:
                    await self.access.base_url()
                    outcome = await self.access.call(http, method, path, **request)
                    if outcome.kind == "ok":
                        return outcome.body
                    await asyncio.sleep(RETRY_PAUSE_S)
        raise TrafficError(f"{method} {path} did not succeed within {SETUP_TIMEOUT_S:.0f} s: {outcome.error}")

    # -- operations ----------------------------------------------------------------------------------------------------

    async def produce(
        self, http: httpx.AsyncClient, producer: str, topic: str, messages: Outgoing, *, batch: bool
    ) -> list[str]:
        """Send messages. Returns for each its id, "failed" or "unknown"."""
        request = produce_request(producer, messages, batch=batch)
        n = self._history.invoke(
            "produce",
            producer,
            topic=topic,
            sequences=messages.sequences,
            sizes=[len(payload) for payload in messages.payloads],
            digests=messages.digests,
            **({"keys": messages.keys} if messages.keys else {}),
        )
        outcome = await self._recorded(n, self.access.call(http, "POST", f"{topic_path(topic)}/messages", **request))
        if outcome.kind == "ok":
            ids = produced_ids(outcome, len(messages.payloads))
            if ids is not None:
                self._history.ok(n, ids=ids)
                return ids
            outcome = replace(outcome, kind="unknown", error=f"no produce response: {outcome.body!r}")
        self._refused(n, outcome)
        return [outcome.kind] * len(messages.payloads)

    async def receive(
        self,
        http: httpx.AsyncClient,
        consumer: str,
        place: Place,
        body: Mapping[str, Any],
        *,
        recorded: Sequence[str] = (),
    ) -> list[dict[str, Any]] | None:
        """Return the messages of one receive; None: it did not succeed.

        `body`: fields of the request, besides consumer and type; with `ack`, it is recorded as two operations.
        `recorded`: those of the fields that the history gets.
        """
        limits = {name: body[name] for name in recorded}
        acked = None
        if "ack" in body:
            acked = self._history.invoke("ack", consumer, **place.fields, ids=body["ack"])
        n = self._history.invoke("receive", consumer, **place.fields, kind=place.kind, **limits)
        request = {"consumer": consumer, "type": place.kind, "initial": "earliest", **body}
        call = self._recorded(n, self.access.call(http, "POST", f"{place.path}/receive", json=request))
        outcome = await (call if acked is None else self._recorded(acked, call))
        if outcome.kind != "ok":
            self._refused(n, outcome)
            if acked is not None:  # it may have been done, unless nothing was sent
                self._refused(acked, outcome if not outcome.status else replace(outcome, kind="unknown"))
            return None
        if acked is not None:
            self._history.ok(acked)
        messages: list[dict[str, Any]] = outcome.body["messages"]
        rows = [[*row_of(message), message.get("redelivery_count", 0)] for message in messages]
        self._history.ok(n, messages=rows)
        return messages

    async def ack(self, http: httpx.AsyncClient, consumer: str, place: Place, ids: list[str]) -> bool:
        n = self._history.invoke("ack", consumer, **place.fields, ids=ids)
        body = {"message_ids": ids, "consumer": consumer}
        outcome = await self._recorded(n, self.access.call(http, "POST", f"{place.path}/ack", json=body))
        if outcome.kind == "ok":
            self._history.ok(n)
            return True
        self._refused(n, outcome)
        return False

    async def ack_cumulative(self, http: httpx.AsyncClient, consumer: str, place: Place, last: str) -> bool:
        """Acknowledge everything up to `last`."""
        n = self._history.invoke("ack", consumer, **place.fields, cumulative=last)
        body = {"cumulative": last, "consumer": consumer}
        outcome = await self._recorded(n, self.access.call(http, "POST", f"{place.path}/ack", json=body))
        if outcome.kind == "ok":
            self._history.ok(n)
            return True
        self._refused(n, outcome)
        return False

    async def nack(
        self, http: httpx.AsyncClient, consumer: str, place: Place, ids: list[str], *, delay_ms: int = 0
    ) -> bool:
        n = self._history.invoke("nack", consumer, **place.fields, ids=ids, delay_ms=delay_ms)
        body = {"message_ids": ids, "consumer": consumer, "delay_ms": delay_ms}
        outcome = await self._recorded(n, self.access.call(http, "POST", f"{place.path}/nack", json=body))
        if outcome.kind == "ok":
            self._history.ok(n, returned=outcome.body["returned"])
            return True
        self._refused(n, outcome)
        return False

    async def leave(self, http: httpx.AsyncClient, consumer: str, place: Place) -> bool:
        """End the consumer's session, which returns everything that it holds."""
        n = self._history.invoke("leave", consumer, **place.fields)
        path = f"{place.path}/consumers/{quote(consumer, safe='')}"
        outcome = await self._recorded(n, self.access.call(http, "DELETE", path))
        if outcome.kind == "ok":
            self._history.ok(n)
            return True
        self._refused(n, outcome)
        return False

    async def _recorded(self, n: int, call: Awaitable[Outcome]) -> Outcome:
        """Await a call. If it is cancelled, record its outcome as unknown."""
        try:
            return await call
        except BaseException as error:
            self._history.unknown(n, f"cancelled: {type(error).__name__}")
            raise

    def _refused(self, n: int, outcome: Outcome) -> None:
        if outcome.kind == "failed":
            self._history.failed(n, outcome.error)
        else:
            self._history.unknown(n, outcome.error)

    # -- completion ----------------------------------------------------------------------------------------------------

    async def is_drained(self, http: httpx.AsyncClient, place: Place) -> bool:
        """Whether the broker has no message of the subscription that is not acknowledged."""
        await self.access.base_url()
        outcome = await self.access.call(http, "GET", f"{topic_path(place.topic)}/subscriptions")
        if outcome.kind != "ok":
            return False
        for info in outcome.body["subscriptions"]:
            if info["subscription"] == place.subscription:
                return bool(info["backlog_entries"] == 0 and info["unacked"] == 0)
        return False

    async def drained(self, places: Sequence[Place], *, timeout_s: float) -> bool:
        """Wait until all messages of the subscriptions are acknowledged. Returns False at the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.access.client() as http:
                for place in places:
                    while not await self.is_drained(http, place):
                        await asyncio.sleep(POLL_S)
                return True
        return False

    async def read(self, topic: str, number: int, *, timeout_s: float) -> None:
        """Read a topic from earliest to its end, as round `number`. The history records a timeout by a missing end."""
        start = "earliest"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self.access.client() as http:
                while True:
                    await self.access.base_url()
                    n = self._history.invoke("read", "reader", topic=topic, start=start, round=number)
                    call = self.access.call(
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


def produce_request(producer: str, messages: Outgoing, *, batch: bool) -> dict[str, Any]:
    """Arguments of httpx for a produce request: one message as a raw body, several as NDJSON."""
    keys = messages.keys or [producer] * len(messages.payloads)
    if len(messages.payloads) == 1:
        return {
            "params": {"producer": producer, "key": keys[0]},
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
                "key": key,
                "properties": {"producer": producer, "sequence": str(sequence)},
            }
        )
        for key, sequence, payload in zip(keys, messages.sequences, messages.payloads, strict=True)
    ]
    return {
        "params": {"producer": producer, **({} if batch else {"batch": "false"})},
        "content": "\n".join(lines).encode(),
        "headers": {"content-type": "application/x-ndjson"},
    }


def produced_ids(outcome: Outcome, count: int) -> list[str] | None:
    """Id, "failed" or "unknown" of each message. None: the response does not match a request with `count` messages."""
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


def payload_of(message: Mapping[str, Any]) -> bytes:
    """Return the payload of a message in a response: as text, or in base64 if it is none."""
    text = message.get("payload")
    return base64.b64decode(message.get("payload_base64", "")) if text is None else str(text).encode()


def row_of(message: dict[str, Any]) -> list[Any]:
    """[id, producer, sequence, digest]; producer "" and sequence -1 for a message that the traffic did not send."""
    payload = payload_of(message)
    properties = message.get("properties", {})
    sequence = properties.get("sequence", "")
    if not sequence.isdecimal() or "producer" not in properties:
        return [message["message_id"], "", -1, digest_of(payload)]
    return [message["message_id"], properties["producer"], int(sequence), digest_of(payload)]
