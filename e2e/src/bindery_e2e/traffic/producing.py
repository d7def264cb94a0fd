"""Produce messages of many keys, each key in the order of its sequences: one producer has one request in flight."""

import asyncio
import random
from typing import Protocol

from bindery_e2e.traffic.clients import Clients, Outgoing
from bindery_e2e.traffic.exchange import RETRY_PAUSE_S


class Load(Protocol):
    """What producers send. All of them together send `messages_per_s`, at most."""

    @property
    def topic(self) -> str: ...
    @property
    def keys(self) -> int: ...
    @property
    def producers(self) -> int: ...
    @property
    def messages_per_s(self) -> float: ...
    @property
    def batch_share(self) -> float:
        """Share of the requests that store their messages as one entry."""
        ...


async def produce(clients: Clients, load: Load, number: int, rng: random.Random, *, until: asyncio.Event) -> None:
    """Send as producer `number` until the event is set. The key number n is used as often as 1 / (n + 1)."""
    numbers = range(number, load.keys, load.producers)
    keys, weights = [f"key-{key}" for key in numbers], [1 / (key + 1) for key in numbers]
    sequence, loop = 0, asyncio.get_running_loop()
    due = loop.time()
    async with clients.access.client() as http:
        while not until.is_set():
            messages = Outgoing()
            for key in rng.choices(keys, weights, k=rng.choice((1, 2, 5, 20))):
                messages.add(sequence, rng.randbytes(rng.randint(1, 500)), key=key)
                sequence += 1
            await clients.access.base_url()
            batch = rng.random() < load.batch_share
            ids = await clients.produce(http, f"p{number}", load.topic, messages, batch=batch)
            if not all(":" in text for text in ids):
                await asyncio.sleep(RETRY_PAUSE_S)
            due = max(due, loop.time() - 1.0) + len(ids) * load.producers / load.messages_per_s
            await asyncio.sleep(max(0.0, due - loop.time()))
