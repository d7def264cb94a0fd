"""Store delayed messages over HTTP, kill the broker before and while they are due, and receive all of them.

| phase      | what happens                                                                                          |
|------------|-------------------------------------------------------------------------------------------------------|
| plain      | messages without a delay, in batches, and one entry each as delayed messages are: the rate to compare |
| sample     | delayed messages that are all due at once: the rates at which they are stored and received            |
| accept     | the messages, due from a later time on, while one consumer waits: the rate; the broker's memory       |
| load       | kill -9, a start; the time until the topic answers, and until a message without a delay was received  |
| drain      | consumers receive what is due, and acknowledge it with the next receive; kill -9 in the middle        |

The payload of a message is its number. Messages are due in the order in which they are sent, or at random times of the
window. The window begins after they are stored, and its rate is at most RATE_SHARE of the rate of the sample, because
consumers and broker share the machine.
"""

import asyncio
import contextlib
import json
import random
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from bindery_e2e.judging.delays import Delays, Receipt, caught_up_at, judge_delays
from bindery_e2e.traffic.clients import TrafficError, topic_path
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S, BrokerAccess, Endpoint, Outcome
from bindery_e2e.traffic.kills import BrokerProcess

SUBSCRIPTION: Final = "due"
RATE_SHARE: Final = 0.7
"""Rate of the window, as a share of the rate at which the sample was received."""
ACCEPT_SHARE: Final = 0.4
"""Rate at which the messages are stored at least, as a share of the rate at which the sample was stored."""
MARGIN_S: Final = 30.0
"""Seconds between the expected end of storing and the begin of the window: for the kill and the load."""
SAMPLE_PART: Final = 20
"""The sample is this part of the messages; the plain messages are twice as many."""
SAMPLE_MIN: Final = 5_000
"""Minimum number of messages of the sample, unless the run has fewer."""
DOWN_S: Final = 5.0
"""Seconds for which the broker is down before its load is measured. A broker takes the topics of one that was killed
when the session of that one has ended, after 4 s: the first answer then shows how long the topic takes to load."""
READY_S: Final = 1.0
"""Seconds before the sample is due at which its consumers begin. They need a tenth of a second until they can send."""
STALL_S: Final = 60.0
"""Seconds without progress after which a phase ends."""
WAIT_MS: Final = 1_000
TIMEOUTS: Final = {"ack_timeout_ms": 120_000, "session_ttl_ms": 10_000}
KIB: Final = 2**10


class MeasuredBroker(BrokerProcess, Protocol):
    @property
    def pid(self) -> int: ...


@dataclass(frozen=True, slots=True)
class DelayedSettings:
    seed: int = 0
    messages: int = 1_000_000
    rate: float = 20_000.0
    """Messages that are due in a second, at most."""
    is_random: bool = False
    """Whether messages are due at random times of the window, and not in the order of the topic."""
    topic: str = "public/default/delayed"
    """Prefix of the names of the topics."""
    connections: int = 8
    per_request: int = 1_000
    consumers: int = 4
    receive_max: int = 1_000
    request_timeout_s: float = 60.0

    @property
    def sample(self) -> int:
        return max(self.messages // SAMPLE_PART, min(self.messages, SAMPLE_MIN))


@dataclass(slots=True)
class DelayedFigures:
    """What was measured. Rates are messages per second."""

    batched_rate: float = 0.0
    plain_rate: float = 0.0
    sample_rate: float = 0.0
    """Rate at which the sample was stored."""
    sample_received_rate: float = 0.0
    accept_rate: float = 0.0
    window_rate: float = 0.0
    rss_before: int = 0
    """The broker's memory (VmRSS) in bytes before the messages were sent, and after they were stored."""
    rss_after: int = 0
    rss_peak: int = 0
    indexed_s: float = 0.0
    """Seconds from the end of storing until the subscription counted all messages as delayed."""
    start_s: float = 0.0
    """Seconds from the start of the process until its port answered."""
    load_s: float = 0.0
    """Seconds from the first request about the topic to its answer, a message that was stored."""
    plain_s: float = 0.0
    """Seconds from the same request until this message was received."""
    drain_load_s: float = 0.0
    """Seconds from the start of the process in the middle of the drain until messages were received again. They include
    the end of the session of the killed broker."""
    caught_up_s: float | None = None
    """Seconds from that kill until a response had only messages that were in time."""
    drained: bool = False
    drain_rate: float = 0.0
    """Messages received per second, from the first one due to the last receive."""
    delays: Delays = field(default_factory=Delays)

    @property
    def accept_ratio(self) -> float:
        return self.accept_rate / self.plain_rate if self.plain_rate else 0.0

    @property
    def memory_mib(self) -> float:
        return (self.rss_after - self.rss_before) / KIB**2


class Delayed:
    """One run."""

    def __init__(
        self,
        endpoint: Endpoint,
        broker: MeasuredBroker,
        settings: DelayedSettings,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        self.settings = settings
        self.figures = DelayedFigures()
        self.access = BrokerAccess(endpoint, timeout_s=settings.request_timeout_s)
        self._broker = broker
        self._say = say
        self._over = asyncio.Event()
        self._plain_came = asyncio.Event()
        self._plain_number = -1
        self._receipts: list[Receipt] = []
        self._received = 0
        """Number of messages in responses, repeated ones included."""

    async def play(self) -> None:
        """Raises TrafficError if the broker refuses a request, or the window began before everything was stored."""
        await self._measure_plain()
        await self._measure_sample()
        due_at = await self._accept()
        await self._load(due_at)
        await self._drain(due_at)

    # -- phases --------------------------------------------------------------------------------------------------------

    async def _measure_plain(self) -> None:
        settings, figures = self.settings, self.figures
        count = 2 * settings.sample
        await self._produce("-batches", range(count), None, batch=True)  # warms up
        figures.batched_rate = await self._produce("-batches", range(count), None, batch=True)
        figures.plain_rate = await self._produce("-plain", range(count), None)
        self._say(
            f"plain: {figures.batched_rate:,.0f} messages/s in batches, {figures.plain_rate:,.0f}/s as one entry each"
        )

    async def _measure_sample(self) -> None:
        settings, figures = self.settings, self.figures
        topic, count = settings.topic + "-sample", settings.sample
        await self._subscribe(topic)
        due = now_ms() + round(1_000 * (count / figures.plain_rate * 3 + 2))
        figures.sample_rate = await self._produce("-sample", range(count), [due] * count)
        await asyncio.sleep(max(0.0, due / 1_000 - time.time() - READY_S))
        async with self._consuming(topic):
            await asyncio.sleep(max(0.0, due / 1_000 - time.time()))
            await self._until_drained(topic)
        last = max((one.ended for one in self._receipts if one.got), default=now_ms())
        figures.sample_received_rate = count / max(0.001, (last - due) / 1_000)
        judged = judge_delays([due] * count, self._receipts, drained=True)
        if judged.errors:
            raise TrafficError(f"the sample was not received correctly: {judged.examples}")
        self._receipts.clear()
        figures.window_rate = min(settings.rate, RATE_SHARE * figures.sample_received_rate)
        self._say(
            f"sample: stored {figures.sample_rate:,.0f}/s, received {figures.sample_received_rate:,.0f}/s; the window "
            f"has {figures.window_rate:,.0f} due messages/s"
        )

    async def _accept(self) -> list[int]:
        """Store the messages while a consumer waits; return when each is due."""
        settings, figures = self.settings, self.figures
        topic, count = settings.topic, settings.messages
        await self._subscribe(topic)
        figures.rss_before = self._memory()["VmRSS"]
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._broker.pid}/clear_refs").write_text("5")  # the peak is that from here on
        begin = now_ms() + round(1_000 * (count / (ACCEPT_SHARE * figures.sample_rate) + MARGIN_S))
        due_at = [begin + int(1_000 * number / figures.window_rate) for number in range(count)]
        if settings.is_random:
            random.Random(settings.seed).shuffle(due_at)
        self._say(f"accept: {count:,} messages, due from {(begin - now_ms()) / 1_000:.0f} s from now on")
        async with self._consuming(topic, consumers=1):
            figures.accept_rate = await self._produce("", range(count), due_at)
            stored = time.monotonic()
            await self._until(topic, lambda info: info["delayed"] >= count, "all messages are delayed")
            figures.indexed_s = time.monotonic() - stored
            await asyncio.sleep(2)  # the index is stored at most once a second
            memory = self._memory()
            figures.rss_after, figures.rss_peak = memory["VmRSS"], memory["VmHWM"]
        if now_ms() > begin:
            raise TrafficError(f"the messages were due {(now_ms() - begin) / 1_000:.1f} s before all were stored")
        self._say(
            f"accept: {figures.accept_rate:,.0f}/s, {figures.accept_ratio:.2f} of the plain rate; memory "
            f"{figures.rss_before / KIB**2:.0f} -> {figures.rss_after / KIB**2:.0f} MiB, peak "
            f"{figures.rss_peak / KIB**2:.0f} MiB; indexed after {figures.indexed_s:.1f} s"
        )
        return due_at

    async def _load(self, due_at: list[int]) -> None:
        """Kill the broker, and measure the first answer of the topic. The plain message gets the last number."""
        figures = self.figures
        began = await self._kill(down_s=DOWN_S)
        await self._until_up()
        figures.start_s = time.monotonic() - began
        self._plain_number = len(due_at)
        due_at.append(now_ms())
        began = time.monotonic()
        async with self._consuming(self.settings.topic, consumers=1):
            async with self.access.client() as http:
                body, path = str(self._plain_number).encode(), f"{topic_path(self.settings.topic)}/messages"
                outcome = Outcome("failed")
                while outcome.kind != "ok":
                    await self.access.base_url()
                    outcome = await self.access.call(http, "POST", path, content=body)
            figures.load_s = time.monotonic() - began
            try:
                async with asyncio.timeout(STALL_S):
                    await self._plain_came.wait()
            except TimeoutError:
                raise TrafficError(f"a message without a delay was not received within {STALL_S:g} s") from None
            figures.plain_s = time.monotonic() - began
        self._say(
            f"load: the port answered after {figures.start_s:.2f} s, the topic {figures.load_s:.2f} s later; a plain "
            f"message was received {figures.plain_s:.2f} s after the first request"
        )

    async def _drain(self, due_at: list[int]) -> None:
        figures = self.figures
        topic, begin, end = self.settings.topic, min(due_at[:-1]), max(due_at)
        await asyncio.sleep(max(0.0, begin / 1_000 - time.time() - 2))
        self._say(f"drain: {len(due_at):,} messages in {(end - begin) / 1_000:.0f} s")
        async with self._consuming(topic):
            await asyncio.sleep(max(0.0, (begin + end) / 2_000 - time.time()))
            killed_at = now_ms()
            began, before = await self._kill(), self._received
            while self._received == before and time.monotonic() < began + STALL_S:
                await asyncio.sleep(0.01)
            figures.drain_load_s = time.monotonic() - began
            figures.drained = await self._until_drained(topic, no_sooner_than=end)
        caught_up = caught_up_at(due_at, self._receipts, since=killed_at)
        figures.caught_up_s = None if caught_up is None else (caught_up - killed_at) / 1_000
        last = max(one.ended for one in self._receipts)
        figures.drain_rate = len(due_at) / max(
            0.001, (max(one.ended for one in self._receipts if one.got) - begin) / 1_000
        )
        plain_due = due_at[self._plain_number]
        disturbances = [
            (plain_due, plain_due + 1),
            (killed_at - 1_000, last if caught_up is None else caught_up),
        ]
        figures.delays = judge_delays(due_at, self._receipts, drained=figures.drained, disturbances=disturbances)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def _produce(
        self, suffix: str, numbers: range, due_at: Sequence[int] | None, *, batch: bool = False
    ) -> float:
        """Send messages; return messages per second. Raises TrafficError if a request does not succeed."""
        per_request = self.settings.per_request
        parts: Iterator[range] = iter([numbers[at : at + per_request] for at in range(0, len(numbers), per_request)])
        path = f"{topic_path(self.settings.topic + suffix)}/messages"

        async def send() -> None:
            async with self.access.client() as http:
                for part in parts:
                    body = "\n".join(_line(number, due_at) for number in part).encode()
                    outcome = await self.access.call(
                        http,
                        "POST",
                        path,
                        params={} if batch else {"batch": "false"},
                        content=body,
                        headers={"content-type": "application/x-ndjson"},
                    )
                    if outcome.kind != "ok" or outcome.status == 207:
                        raise TrafficError(f"POST {path}: {outcome.status} {outcome.error}")

        await self.access.base_url()
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self.settings.connections):
                    tasks.create_task(send())
        except* TrafficError as errors:
            raise TrafficError(str(errors.exceptions[0])) from errors
        return len(numbers) / (time.monotonic() - began)

    async def _subscribe(self, topic: str) -> None:
        async with self.access.client() as http:
            await self.access.base_url()
            path = f"{topic_path(topic)}/subscriptions/{SUBSCRIPTION}"
            outcome = await self.access.call(http, "PUT", path, json={"initial": "earliest"})
            if outcome.kind != "ok":
                raise TrafficError(f"PUT {path}: {outcome.status} {outcome.error}")

    @contextlib.asynccontextmanager
    async def _consuming(self, topic: str, *, consumers: int | None = None) -> AsyncIterator[None]:
        """Receive during the block."""
        self._over.clear()
        names = [f"consumer-{number}" for number in range(consumers or self.settings.consumers)]
        tasks = [asyncio.create_task(self._consume(topic, name)) for name in names]
        try:
            yield
        finally:
            self._over.set()
            await asyncio.gather(*tasks)

    async def _consume(self, topic: str, name: str) -> None:
        """Receive, and acknowledge with the next receive, until the block ends; then acknowledge the rest."""
        path = f"{topic_path(topic)}/subscriptions/{SUBSCRIPTION}"
        pending: list[str] = []
        numbers = array("q")
        async with self.access.client(longer_s=WAIT_MS / 1_000) as http:
            while not self._over.is_set():
                body = {"consumer": name, "max": self.settings.receive_max, "wait_ms": WAIT_MS, **TIMEOUTS}
                if pending:
                    body["ack"] = pending
                pending, numbers = await self._receive(http, f"{path}/receive", body, numbers)
            if pending:
                body = {"consumer": name, "message_ids": pending}
                await self._receive(http, f"{path}/ack", body, numbers)

    async def _receive(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any], acked: "array[int]"
    ) -> tuple[list[str], "array[int]"]:
        """Send a request and record it as a receipt. Returns ids and numbers of the messages in the response."""
        await self.access.base_url()
        begun = now_ms()
        outcome = await self.access.call(http, "POST", path, json=body)
        ended = now_ms()
        if outcome.status in (400, 422):
            raise TrafficError(f"POST {path}: {outcome.error}")
        messages = outcome.body.get("messages", ()) if outcome.kind == "ok" else ()
        got = array("q", [int(message["payload"]) for message in messages])
        self._receipts.append(Receipt(begun, ended, outcome.kind, got, acked))
        self._received += len(got)
        if self._plain_number in got:
            self._plain_came.set()
        if outcome.kind != "ok":
            await asyncio.sleep(RETRY_PAUSE_S / 4)
        return [message["message_id"] for message in messages], got

    async def _until_drained(self, topic: str, *, no_sooner_than: int = 0) -> bool:
        """Wait until everything is acknowledged. Returns False if there is no progress."""
        received, since = self._received, time.monotonic()
        while True:
            await asyncio.sleep(0.5)
            if now_ms() > no_sooner_than:
                info = await self._info(topic)
                if info is not None and info["backlog_entries"] == 0 and info["unacked"] == 0:
                    return True
            if self._received != received:
                received, since = self._received, time.monotonic()
            if time.monotonic() - since > STALL_S:
                return False

    async def _until(self, topic: str, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        deadline = time.monotonic() + STALL_S
        while True:
            info = await self._info(topic)
            if info is not None and condition(info):
                return
            if time.monotonic() > deadline:
                raise TrafficError(f"timeout while waiting until {what}: {json.dumps(info)[:500]}")
            await asyncio.sleep(0.05)

    async def _info(self, topic: str) -> dict[str, Any] | None:
        async with self.access.client() as http:
            await self.access.base_url()
            outcome = await self.access.call(http, "GET", f"{topic_path(topic)}/subscriptions")
        if outcome.kind != "ok":
            return None
        found: list[dict[str, Any]] = outcome.body["subscriptions"]
        return next((info for info in found if info["subscription"] == SUBSCRIPTION), None)

    # -- the broker's process ------------------------------------------------------------------------------------------

    async def _kill(self, *, down_s: float = 0.0) -> float:
        """Kill the broker and start it after some seconds; return when it was started (monotonic seconds)."""
        await self._broker.kill()
        await asyncio.sleep(down_s)
        began = time.monotonic()
        await self._broker.start()
        return began

    async def _until_up(self) -> None:
        deadline = time.monotonic() + STALL_S
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as http:
            while time.monotonic() < deadline:
                url = await self.access.base_url()
                with contextlib.suppress(httpx.HTTPError):
                    if (await http.get(url + "/readyz")).status_code == 200:
                        return
                await asyncio.sleep(0.01)
        raise TrafficError("the broker did not become ready")

    def _memory(self) -> dict[str, int]:
        """VmRSS and VmHWM of the broker, in bytes."""
        lines = Path(f"/proc/{self._broker.pid}/status").read_text().splitlines()
        rows = (line.split() for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
        return {row[0].rstrip(":"): int(row[1]) * KIB for row in rows}


def _line(number: int, due_at: Sequence[int] | None) -> str:
    return f'{{"payload":"{number}"}}' if due_at is None else f'{{"payload":"{number}","deliver_at":{due_at[number]}}}'


def now_ms() -> int:
    return time.time_ns() // 1_000_000
