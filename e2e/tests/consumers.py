"""Build histories of the consumers of one subscription, and simulate a correct Key_Shared broker with its consumers.

`Consumers` has one call per operation. `play` is a simulation of discrete events: consumers that join, leave, are
killed, disappear and return messages, and a broker that does the right thing, or one wrong thing (`DEFECTS`).
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_e2e.judging.history import Record
from histories import MS, Story, digest

SUBSCRIPTION: Final = "s"
PRODUCER: Final = "p0"
DEFECTS: Final = {
    "overtakes a returned message": ["out-of-order"],
    "overtakes a message that another consumer holds": ["held-twice", "out-of-order"],
    "gives a new owner what was returned while the old owner holds the rest": ["held-twice"],
    "returns the messages of a consumer in reverse order": ["out-of-order"],
    "ends a lease early": ["held-twice"],
    "keeps the messages of a consumer that left": ["stuck", "out-of-order"],
    "forgets acknowledgements": ["redelivered"],
    "loses a returned message": ["unacknowledged", "out-of-order", "undelivered"],
}
"""Defect -> the kinds of errors that it may cause; the first one must be found."""
OVERTAKING: Final = ("overtakes a returned message", "returns the messages of a consumer in reverse order")


class Consumers(Story):
    """A history with messages of keys, numbered from 0 in the order of the topic."""

    def __init__(self, *, kind: str = "key_shared", order: str = "key") -> None:
        super().__init__()
        self.kind = kind
        self.keys: list[str] = []
        where = {"topic": self.topic, "subscription": SUBSCRIPTION, "kind": kind, "order": order}
        self.add("observation", what="subscribed", **where)

    def begin_send(self, *keys: str) -> int:
        numbers = list(range(len(self.keys), len(self.keys) + len(keys)))
        self.keys += keys
        digests = [digest(PRODUCER, number) for number in numbers]
        return self.begin(
            "produce", PRODUCER, sequences=numbers, sizes=[1] * len(numbers), digests=digests, keys=list(keys)
        )

    def produce(self, *keys: str) -> None:
        """Send a message for each key, which is acknowledged."""
        first = len(self.keys)
        n = self.begin_send(*keys)
        self.add("ok", n, ids=[self.id(first + index) for index in range(len(keys))])

    def id(self, number: int) -> str:
        return f"{1 + number // 50}:{number % 50}:-1:-1"

    def begin_op(self, op: str, consumer: str, **values: Any) -> int:
        return self.begin(op, consumer, subscription=SUBSCRIPTION, **values)

    def begin_receive(
        self, consumer: str, *, count_max: int = 100, ack_timeout_ms: int = 30_000, session_ttl_ms: int = 60_000
    ) -> int:
        limits = {"max": count_max, "ack_timeout_ms": ack_timeout_ms, "session_ttl_ms": session_ttl_ms}
        return self.begin_op("receive", consumer, kind=self.kind, **limits)

    def end_receive(self, n: int, *numbers: int) -> None:
        rows = [[self.id(number), PRODUCER, number, digest(PRODUCER, number), 0] for number in numbers]
        self.add("ok", n, messages=rows)

    def receive(self, consumer: str, *numbers: int, **limits: int) -> None:
        self.end_receive(self.begin_receive(consumer, **limits), *numbers)

    def poll(self, *consumers: str, seconds: float, **limits: int) -> None:
        """Let the consumers receive nothing, five times per second."""
        for _ in range(round(seconds * 5)):
            calls = [self.begin_receive(consumer, **limits) for consumer in consumers]
            self.wait(0.2)
            for n in calls:
                self.end_receive(n)

    def ack(self, consumer: str, *numbers: int) -> None:
        self.add("ok", self.begin_op("ack", consumer, ids=[self.id(number) for number in numbers]))

    def nack(self, consumer: str, *numbers: int, delay_ms: int = 0) -> None:
        ids = [self.id(number) for number in numbers]
        self.add("ok", self.begin_op("nack", consumer, ids=ids, delay_ms=delay_ms), returned=ids)

    def leave(self, consumer: str) -> None:
        self.add("ok", self.begin_op("leave", consumer))

    def finish(self) -> list[Record]:
        """Record that the subscription was drained, and a reading of the topic. Returns the whole history."""
        self.drained(SUBSCRIPTION)
        rows = [[self.id(number), PRODUCER, number, digest(PRODUCER, number)] for number in range(len(self.keys))]
        self.read(*rows)
        return self.records


# -- the simulated broker ----------------------------------------------------------------------------------------------


@dataclass
class Message:
    key: str
    state: str = "waiting"
    """waiting, held or acknowledged."""
    holder: str = ""
    deadline: int = 0
    due: int = 0
    """End of the delay of a negative acknowledgement."""


@dataclass
class Broker:
    """A Key_Shared subscription in the simulation: at most one consumer holds messages of a key, in order."""

    defect: str
    """One of DEFECTS, or "none"."""
    rng: random.Random
    messages: list[Message] = field(default_factory=list)
    open: dict[int, Message] = field(default_factory=dict)
    """The messages that are not acknowledged, by number."""
    members: dict[str, int] = field(default_factory=dict)
    """Consumer -> time at which its session ends."""

    def store(self, keys: list[str]) -> None:
        for key in keys:
            self.open[len(self.messages)] = message = Message(key)
            self.messages.append(message)

    def owner(self, key: str) -> str:
        return max(self.members, key=lambda name: random.Random(f"{name} {key}").random())

    def deliver(self, consumer: str, *, count_max: int, now: int, timeout: int, ttl: int) -> list[int]:
        self.tick(now)
        self.members[consumer] = now + ttl
        taken: list[int] = []
        numbers = list(self.open)
        if self.defect == "returns the messages of a consumer in reverse order":
            numbers = numbers[::-1] if self.rng.random() < 0.1 else numbers
        for number in numbers:
            if len(taken) < count_max and self._is_due(number, consumer, now):
                message = self.messages[number]
                message.state, message.holder, message.deadline = "held", consumer, now + timeout
                if self.defect == "ends a lease early" and self.rng.random() < 0.1:
                    message.deadline = now + timeout // 10
                taken.append(number)
        return taken

    def _is_due(self, number: int, consumer: str, now: int) -> bool:
        message = self.messages[number]
        if message.state != "waiting" or message.due > now or self.owner(message.key) != consumer:
            return False
        for other_number, other in self.open.items():
            if other.key != message.key or other is message:
                continue
            if other.state == "held" and other.holder != consumer:
                is_later = other_number > number
                if self.defect == "overtakes a message that another consumer holds" and not is_later:
                    continue
                if self.defect.startswith("gives a new owner") and is_later:
                    continue
                return False
            if other.state == "waiting" and other_number < number and not self.defect.startswith(OVERTAKING):
                return False
        return True

    def acknowledge(self, numbers: list[int]) -> None:
        for number in numbers:
            if self.defect == "forgets acknowledgements" and self.rng.random() < 0.05:
                self.messages[number].deadline = 0
                continue
            self.messages[number].state = "acknowledged"
            self.open.pop(number, None)

    def give_back(self, consumer: str, numbers: list[int], *, due: int) -> list[int]:
        returned = []
        for number in numbers:
            message = self.messages[number]
            if message.state == "held" and message.holder == consumer:
                message.state, message.due = "waiting", due
                if self.defect == "loses a returned message" and self.rng.random() < 0.3:
                    message.state = "acknowledged"
                    del self.open[number]
                returned.append(number)
        return returned

    def leave(self, consumer: str) -> None:
        self.members.pop(consumer, None)
        if self.defect != "keeps the messages of a consumer that left":
            self.give_back(consumer, list(self.open), due=0)

    def tick(self, now: int) -> None:
        for message in self.open.values():
            if message.state == "held" and message.deadline <= now:
                message.state = "waiting"
        for consumer, end in list(self.members.items()):
            if end <= now and not any(m.state == "held" and m.holder == consumer for m in self.open.values()):
                del self.members[consumer]


class Simulation:
    """Consumers of a simulated broker. Requests and responses take 1 to 30 ms each; times are in nanoseconds."""

    def __init__(self, seed: int, *, defect: str, keys: int = 5, seconds: float = 12.0) -> None:
        self.rng = random.Random(seed)
        self.story = Consumers()
        self.broker = Broker(defect, self.rng)
        self._keys = [f"k{n}" for n in range(keys)]
        self._end = int(seconds * 1e9)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self.timeout_ms = 3_000
        self.ttl_ms = 1_000

    def play(self) -> list[Record]:
        self.after(0, self.produce)
        for slot in range(3):
            self.after(self.rng.randrange(500), lambda slot=slot: self.live(f"c{slot}", 0))
        while self._events:
            at, _, act = heapq.heappop(self._events)
            self.story.now = max(self.story.now, at)
            act()
        return self.story.finish()

    @property
    def is_over(self) -> bool:
        return self.story.now > self._end

    @property
    def is_drained(self) -> bool:
        return not self.broker.open

    def after(self, ms: float, act: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.story.now + int(ms * MS), self._serial, act))

    def travel(self, act: Callable[[], None]) -> None:
        self.after(self.rng.uniform(1, 30), act)

    def produce(self) -> None:
        if self.is_over:
            return
        keys = self.rng.choices(self._keys, k=self.rng.randint(1, 3))
        first = len(self.story.keys)
        n = self.story.begin_send(*keys)

        def store() -> None:
            self.broker.store(keys)
            self.travel(done)

        def done() -> None:
            self.story.add("ok", n, ids=[self.story.id(first + index) for index in range(len(keys))])
            self.after(self.rng.uniform(5, 150), self.produce)

        self.travel(store)

    def live(self, name: str, life: int) -> None:
        """One consumer from its first receive to its end; the next one of this name follows, or one of a new name."""
        consumer = name if self.rng.random() < 0.5 else f"{name}.{life}"
        ends_at = self.story.now + int(self.rng.uniform(300, 3_000) * MS)

        def again() -> None:
            pause = self.rng.uniform(10, 1_500)
            if consumer == name and how == "vanish":
                pause += 5_000  # its session and its leases are over
            self.after(pause, lambda: self.live(name, life + 1))

        how = self.rng.choice(["leave", "close", "kill", "vanish"])
        Consumer(self, consumer, ends_at, how, again).receive()


@dataclass
class Consumer:
    simulation: Simulation
    name: str
    ends_at: int
    how: str
    again: Callable[[], None]

    @property
    def is_ending(self) -> bool:
        return self.simulation.story.now >= self.ends_at and not self.simulation.is_over

    def receive(self) -> None:
        simulation, story = self.simulation, self.simulation.story
        if simulation.is_over and (simulation.is_drained or story.now > simulation._end + 20_000 * MS):
            return
        if self.is_ending and self.how == "leave":
            self.leave()
            return
        limits = {"ack_timeout_ms": simulation.timeout_ms, "session_ttl_ms": simulation.ttl_ms}
        n = story.begin_receive(self.name, count_max=20, **limits)
        until = story.now + 250 * MS
        if self.is_ending and self.how == "kill":
            simulation.travel(lambda: self.act(n, until, is_lost=True))
            return
        simulation.travel(lambda: self.act(n, until))

    def act(self, n: int, until: int, *, is_lost: bool = False) -> None:
        simulation, story = self.simulation, self.simulation.story
        numbers = simulation.broker.deliver(
            self.name,
            count_max=20,
            now=story.now,
            timeout=simulation.timeout_ms * MS,
            ttl=simulation.ttl_ms * MS,
        )
        if is_lost:
            story.add("unknown", n, error="killed")
            self.leave()
        elif numbers or story.now >= until:
            simulation.travel(lambda: self.received(n, numbers))
        else:
            simulation.after(10, lambda: self.act(n, until))

    def received(self, n: int, numbers: list[int]) -> None:
        simulation, story, rng = self.simulation, self.simulation.story, self.simulation.rng
        story.end_receive(n, *numbers)
        if self.is_ending and self.how == "close":
            self.leave()
            return
        if self.is_ending and self.how == "vanish":
            self.again()
            return
        if not numbers:
            simulation.after(rng.uniform(0, 50), self.receive)
            return
        returned = [number for number in numbers if not simulation.is_over and rng.random() < 0.15]
        kept = [number for number in numbers if number not in returned]
        if not simulation.is_over and rng.random() < 0.03:
            kept = []  # their leases end
        self.nack(returned, kept) if returned else self.ack(kept)

    def nack(self, numbers: list[int], kept: list[int]) -> None:
        simulation, story = self.simulation, self.simulation.story
        delay = simulation.rng.choice([0, 0, 200])
        ids = [story.id(number) for number in numbers]
        n = story.begin_op("nack", self.name, ids=ids, delay_ms=delay)

        def act() -> None:
            returned = simulation.broker.give_back(self.name, numbers, due=story.now + delay * MS)
            simulation.travel(lambda: done(returned))

        def done(returned: list[int]) -> None:
            story.add("ok", n, returned=[story.id(number) for number in returned])
            self.ack(kept)

        simulation.travel(act)

    def ack(self, numbers: list[int]) -> None:
        simulation, story = self.simulation, self.simulation.story
        if not numbers:
            self.receive()
            return

        def begin() -> None:
            n = story.begin_op("ack", self.name, ids=[story.id(number) for number in numbers])
            simulation.travel(lambda: act(n))

        def act(n: int) -> None:
            simulation.broker.acknowledge(numbers)
            simulation.travel(lambda: done(n))

        def done(n: int) -> None:
            story.add("ok", n)
            self.receive()

        simulation.after(simulation.rng.uniform(0, 40), begin)

    def leave(self) -> None:
        simulation, story = self.simulation, self.simulation.story
        n = story.begin_op("leave", self.name)

        def act() -> None:
            simulation.broker.leave(self.name)
            simulation.travel(done)

        def done() -> None:
            story.add("ok", n)
            self.again()

        simulation.travel(act)
