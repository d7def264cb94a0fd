"""The clients of a run with policies. They use a topic slowly, for hours."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

from bindery_simulation.policies.plan import IdlePlan, TopicPlan
from bindery_simulation.topics.calls import Answer, Caller
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Kind,
    Leave,
    Payload,
    Produce,
    Receive,
    Subscribe,
    SubscriptionId,
    Unsubscribe,
)

RETRY_S: Final = 5.0
"""Time in seconds after which a client repeats a request that must succeed."""
COUNT_MAX: Final = 20
"""Maximum number of messages of one call."""
BURST_MAX: Final = 6
"""Maximum number of calls of a consumer in one visit."""


class Client:
    """A client that works while `is_busy()`."""

    def __init__(self, caller: Caller, rng: random.Random, is_busy: Callable[[], bool]) -> None:
        self._caller = caller
        self._rng = rng
        self._is_busy = is_busy
        self._sent = 0

    async def _pause(self, mean_s: float) -> None:
        """Wait, but not for long after the end of the traffic."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self._rng.expovariate(1 / mean_s)
        while self._is_busy() and (left_s := ends - loop.time()) > 0:
            await asyncio.sleep(min(left_s, 30.0))

    async def produce(self, topic: str, size: int, deliver_at_s: float | None = None) -> Answer:
        self._sent += 1
        text = f"{self._caller.name}-{self._sent}-".ljust(size, "x")
        return await self._caller.call(Produce(topic, (Payload(text, deliver_at_s=deliver_at_s),), batch=False))

    async def _drain(self, subscription: SubscriptionId, *, share: float = 1.0) -> bool:
        """Receive and acknowledge until nothing comes. Returns whether everything was acknowledged."""
        consumer, is_complete = f"{self._caller.name}-{self._rng.randrange(10**6)}", False
        for _ in range(BURST_MAX):
            request = Receive(subscription, consumer, Kind.SHARED, COUNT_MAX, ack_timeout_s=5.0, session_ttl_s=5.0)
            answer = await self._caller.call(request)
            if not answer.is_done or not isinstance(answer.result, tuple):
                break
            if not answer.result:
                is_complete = share == 1.0
                break
            keys = tuple(one.key for one in answer.result if self._rng.random() < share)
            if keys and not (await self._caller.call(Acknowledge(subscription, keys))).is_done:
                break
        await self._caller.call(Leave(subscription, consumer))
        return is_complete


class Producer(Client):
    async def run(self, plan: TopicPlan) -> None:
        while self._is_busy():
            deliver_at_s = None
            if self._rng.random() < plan.delayed_share:
                deliver_at_s = asyncio.get_running_loop().time() + plan.pause_s * self._rng.choice((0.5, 4.0))
            await self.produce(plan.name, plan.size, deliver_at_s)
            await self._pause(plan.pause_s)


class Consumer(Client):
    async def run(self, subscription: SubscriptionId, pause_s: float) -> None:
        while self._is_busy():
            await self._pause(pause_s)
            if self._is_busy():
                await self._drain(subscription, share=self._rng.choice((1.0, 1.0, 0.7)))


class IdleUser(Client):
    """Uses a topic in bursts, with pauses in which it may become inactive."""

    async def run(self, plan: IdlePlan, prepare: Callable[[], Coroutine[Any, Any, None]]) -> None:
        seconds = plan.policy.inactive_s or 0
        generation = 0
        while self._is_busy():
            await prepare()  # a deletion of the topic removes its policies, too
            subscription = SubscriptionId(plan.name, "s0", generation)
            generation += 1
            if self._rng.random() < 0.8:
                await self._caller.call(Subscribe(subscription, earliest=True))
            for _ in range(self._rng.choice((1, 2, 4))):
                await self.produce(plan.name, plan.size)
            await self._drain(subscription, share=self._rng.choice((1.0, 1.0, 1.0, 0.5)))
            if self._rng.random() < 0.5:
                await self._caller.call(Unsubscribe(subscription))
            await self._caller.settled()
            loop = asyncio.get_running_loop()
            ends = loop.time() + seconds * self._rng.choice((0.4, 0.8, 1.5, 3.0))
            while self._is_busy() and loop.time() < ends:
                await asyncio.sleep(min(30.0, max(ends - loop.time(), 0.1)))
