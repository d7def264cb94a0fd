"""The clients of a run with brokers: producers, consumers, and an operator that seeks.

They do not depend on the injected faults. A result is done, refused or unknown. A producer never sends a message twice;
a consumer acknowledges only what it received. Consumers acknowledge in time or late, one by one, in parts or
cumulatively, return messages, hold them until their leases end, leave, or die.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from bindery_simulation.topics.calls import Answer, Caller
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Delivered,
    Drain,
    Key,
    Kind,
    Leave,
    Payload,
    Produce,
    ReadCopies,
    Receive,
    Retry,
    Return,
    Seek,
    Subscribe,
    SubscriptionId,
    Unsubscribe,
)
from bindery_simulation.topics.plan import MOVING, SubscriptionPlan

RETRY_S: Final = 0.3
"""Time in seconds after which a client repeats a request that was refused or not answered."""
MESSAGES_MAX: Final = 120
"""Maximum number of messages of one producer."""
IN_ORDER: Final = (Kind.EXCLUSIVE, Kind.FAILOVER)
"""Types of subscriptions that allow cumulative acknowledgements."""
KEYS: Final = (None, "a", "b", "c")
"""Keys of messages."""
DELAYS_S: Final = (0.2, 1.5, 6.0)
"""Delays of messages in seconds."""
DRAIN_COUNT: Final = 8
"""Maximum number of messages of one call at the end of a run."""


class Client:
    """A client that works while `is_busy()`."""

    def __init__(self, caller: Caller, rng: random.Random, is_busy: Callable[[], bool]) -> None:
        self._caller = caller
        self._rng = rng
        self._is_busy = is_busy

    async def _subscribe(self, subscription: SubscriptionId, *, earliest: bool) -> bool:
        """Create the subscription. Returns False if the run ended before that was answered."""
        while self._is_busy():
            if (await self._caller.call(Subscribe(subscription, earliest))).is_done:
                return True
            await asyncio.sleep(RETRY_S)
        return False


class Producer(Client):
    """Sends requests with one to six messages, one after the other."""

    def __init__(
        self, caller: Caller, rng: random.Random, is_busy: Callable[[], bool], *, delayed_share: float = 0.0
    ) -> None:
        """`delayed_share`: see `Plan`."""
        super().__init__(caller, rng, is_busy)
        self._delayed_share = delayed_share

    def _deliver_at_s(self) -> float | None:
        """Draw a time before which the messages of a request are not delivered."""
        if not self._delayed_share or self._rng.random() >= self._delayed_share:
            return None
        return asyncio.get_running_loop().time() + self._rng.choice(DELAYS_S)

    async def run(self, topic: str, begin: "asyncio.Event") -> None:
        rng = self._rng
        await begin.wait()
        pauses_s = rng.choice(((0.0, 0.02), (0.05, 0.3), (0.3, 1.5)))
        sent = 0
        while self._is_busy() and sent < MESSAGES_MAX:
            count = rng.choice((1, 1, 2, 3, 6))
            key = rng.choice(KEYS)
            deliver_at_s = self._deliver_at_s()
            messages = tuple(
                Payload(
                    f"{self._caller.name}-{sent + number}",
                    key=rng.choice(KEYS) if rng.random() < 0.2 else key,
                    deliver_at_s=deliver_at_s,
                )
                for number in range(count)
            )
            sent += count
            await self._caller.call(Produce(topic, messages, batch=rng.random() < 0.7))
            await asyncio.sleep(rng.choice(pauses_s))


class Consumer(Client):
    """Consumes a subscription under one name after the other."""

    def __init__(
        self,
        caller: Caller,
        rng: random.Random,
        is_busy: Callable[[], bool],
        plan: SubscriptionPlan,
        *,
        retry_share: float = 0.0,
        dead_share: float = 0.0,
    ) -> None:
        """`retry_share`, `dead_share`: see `Plan`."""
        super().__init__(caller, rng, is_busy)
        self.plan = plan
        self._retry_share = retry_share if plan.kind in MOVING and not plan.is_temporary else 0.0
        self._dead_share = dead_share
        self._subscription = plan.id
        self._names = 0
        self._late: list[asyncio.Task[None]] = []
        self.received: list[Key] = []
        """Keys of all messages that were received, for seeks."""

    async def run(self, begin: "asyncio.Event") -> None:
        """Consume until the end of the traffic."""
        await begin.wait()
        while self._is_busy():
            await self._live()
            await asyncio.sleep(self._rng.choice((0.1, 1.0)))
        await self._settle()

    async def run_temporary(self) -> None:
        """Create the subscription, consume, delete it, and begin again, until the end of the traffic."""
        while self._is_busy():
            if not await self._subscribe(self._subscription, earliest=self.plan.is_earliest):
                break
            await self._live()
            await self._settle()
            if not self._is_busy():
                break
            await self._unsubscribe()
            subscription = self._subscription
            self._subscription = subscription._replace(generation=subscription.generation + 1)
        await self._settle()

    async def _unsubscribe(self) -> None:
        while True:
            answer = await self._caller.call(Unsubscribe(self._subscription))
            await self._caller.settled()
            if answer.is_done or "NoSuchSubscription" in answer.error:
                return
            await asyncio.sleep(RETRY_S)

    async def _settle(self) -> None:
        """Return once no request of this client is in progress anywhere."""
        await asyncio.gather(*self._late)
        self._late.clear()
        await self._caller.settled()

    async def _live(self) -> None:
        """Consume under one name until the consumer leaves or dies."""
        rng = self._rng
        self._names += 1
        template = Receive(
            self._subscription,
            f"{self._caller.name}.{self._names}",
            self.plan.kind,
            count_max=rng.choice((1, 3, 10)),
            wait_s=rng.choice((0.0, 0.5, 2.0)),
            ack_timeout_s=rng.choice((0.5, 2.0, 6.0)),
            session_ttl_s=rng.choice((0.3, 1.0, 4.0)),
        )
        repeats = rng.random() < 0.5
        is_certain = True
        request = template
        for number in range(rng.choice((3, 8, 30))):
            if not self._is_busy():
                return
            if request is template and repeats:
                request = replace(template, request_id=f"r{number}")
            answer = await self._caller.call(request)
            request = template
            if answer.is_done:
                assert isinstance(answer.result, tuple)
                await self._use(template, answer.result, is_certain=is_certain)
                if not answer.result:
                    await asyncio.sleep(rng.choice((0.05, 0.3)))
            elif not answer.is_definite:
                # The answer may have had messages: this name must not acknowledge cumulatively what it never got.
                is_certain = False
                if rng.random() < 0.3:
                    return
                request = self._again(answer, template)
            else:
                await asyncio.sleep(RETRY_S)
        if rng.random() < 0.5:
            await self._caller.call(Leave(self._subscription, template.consumer))

    def _again(self, answer: Answer, template: Receive) -> Receive:
        """Return the request after one without an answer: the same one, or one that returns what may be held."""
        former = answer.call.request
        assert isinstance(former, Receive)
        if former.request_id is not None and self._rng.random() < 0.7:
            return former
        return replace(template, redeliver=True)

    async def _use(self, request: Receive, deliveries: Sequence[Delivered], *, is_certain: bool) -> None:
        """Do something with the messages of an answer."""
        if not deliveries:
            return
        rng = self._rng
        keys = [one.key for one in deliveries]
        self.received += keys
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.1)))
        if self._retry_share and rng.random() < self._retry_share:
            await self._move(keys)
            return
        fate = rng.random()
        if request.kind in IN_ORDER and is_certain and fate < 0.3:
            await self._ack((keys[rng.randrange(len(keys))],), cumulative=True)
        elif fate < 0.6:
            await self._ack(tuple(keys))
        elif fate < 0.7:
            for key in keys:
                await self._ack((key,))
        elif fate < 0.8:
            await self._ack(tuple(rng.sample(keys, rng.randint(1, len(keys)))))
        elif fate < 0.9:
            chosen = tuple(rng.sample(keys, rng.randint(1, len(keys))))
            await self._caller.call(Return(self._subscription, chosen, delay_s=rng.choice((0.0, 0.0, 0.7))))
            if rest := tuple(key for key in keys if key not in chosen):
                await self._ack(rest)
        elif fate < 0.96:
            late = self._ack_late(tuple(keys), request.ack_timeout_s + rng.choice((-0.01, 0.0, 0.4)))
            self._late.append(asyncio.ensure_future(late))

    async def _move(self, keys: list[Key]) -> None:
        """Move some messages to the retry topic or the dead-letter topic, and acknowledge the rest."""
        rng = self._rng
        chosen = tuple(rng.sample(keys, rng.randint(1, len(keys))))
        delay_s = rng.choice((0.0, 5.0))
        is_dead = bool(self._dead_share) and rng.random() < self._dead_share
        request = Retry(self._subscription, chosen, delay_s=delay_s, is_dead=is_dead)
        for _ in range(rng.choice((1, 2))):
            if (await self._caller.call(request)).is_definite:
                break
        if rest := tuple(key for key in keys if key not in chosen):
            await self._ack(rest)

    async def _ack(self, keys: tuple[Key, ...], *, cumulative: bool = False) -> None:
        request = Acknowledge(self._subscription, keys, cumulative)
        for _ in range(self._rng.choice((1, 2))):
            answer = await self._caller.call(request)
            if answer.is_definite:
                return

    async def _ack_late(self, keys: tuple[Key, ...], after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self._ack(keys)


class Operator(Client):
    """Creates the lasting subscriptions, and moves some of them."""

    async def prepare(self, plans: Sequence[SubscriptionPlan], begin: "asyncio.Event") -> None:
        for plan in plans:
            if not plan.is_temporary:
                await self._subscribe(plan.id, earliest=plan.is_earliest)
        begin.set()
        await self._caller.settled()  # a subscription that is created after the end of the traffic is drained, too

    async def seek(self, subscription: SubscriptionId, keys: Sequence[Key]) -> None:
        """Move a subscription to one of these messages, or to one end of the topic."""
        rng = self._rng
        if keys and rng.random() < 0.7:
            request = Seek(subscription, rng.choice(keys))
        else:
            request = Seek(subscription, None, earliest=rng.random() < 0.6)
        await self._caller.call(request)


class Drainer(Client):
    """Receives and acknowledges whatever is left at the end of a run."""

    _written = 0
    """Number of messages that were sent."""
    acknowledged = 0
    """Number of messages whose acknowledgement was answered."""

    async def drain(self, subscription: SubscriptionId, kind: Kind) -> bool:
        """Receive once. Returns True if nothing is left."""
        request = Receive(
            subscription,
            self._caller.name,
            kind,
            count_max=DRAIN_COUNT,
            wait_s=0.5,
            ack_timeout_s=30.0,
            session_ttl_s=0.1,
            redeliver=True,
        )
        answer = await self._caller.call(request)
        if not answer.is_done:
            return False
        assert isinstance(answer.result, tuple)
        if answer.result:
            acked = await self._caller.call(Acknowledge(subscription, tuple(one.key for one in answer.result)))
            self.acknowledged += len(answer.result) if acked.is_done else 0
            return False
        left = await self._caller.call(Drain(subscription))
        return left.is_done and left.result == 0

    async def read_copies(self, subscription: SubscriptionId, *, is_dead: bool) -> bool:
        """Read the retry topic, or the dead-letter topic, of a subscription. Returns whether that succeeded."""
        return (await self._caller.call(ReadCopies(subscription, is_dead))).is_done

    async def write(self, topic: str) -> bool:
        """Send one message. Returns whether it was stored."""
        self._written += 1
        return (await self._caller.call(Produce(topic, (Payload(f"{self._caller.name}-{self._written}"),)))).is_done
