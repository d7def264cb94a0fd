"""Clients that repeat each request until it succeeds store each message once, whatever fails at brokers and bookies."""

import asyncio
import json
import random

import pytest
from bindery_client.memory.memory import MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import TOPIC, Clock, Harness
from managed_ledger_faults import Plan

QUICK = {
    "age_s_min": 0,
    "retry_pause_s": 0.01,
    "retry_pause_s_max": 0.1,
    "operation_timeout_s": 5,
    "add_timeout_s": 5,
}


class Owners:
    """One broker after another, which fail and die by the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._parts = {"tree": MemoryTree(), "ledgers": MemoryLedgers(), "clock": Clock()}
        self.plan = Plan(seed, die_at=None, fault_rate=0.0)
        self.broker = self._start()
        self.count = 1

    def _start(self) -> Harness:
        self.plan = Plan(self.random.randrange(2**32), die_at=self.random.randrange(20, 200), fault_rate=0.05)
        return Harness(**self._parts, url="http://one", plan=self.plan, ledger=QUICK)

    async def replace(self) -> None:
        """Let the next broker take the topics over: this one dies, or stops."""
        former, self.broker = self.broker, self._start()
        self.count += 1
        self.plan.steps = 0
        await former.die()

    async def post(self, body: str, options: dict) -> tuple[int, dict]:
        """Return the status and the body of an answer; 0: there is none."""
        broker, plan = self.broker, self.plan
        call = asyncio.create_task(broker.client.post(f"{TOPIC}/messages", content=body, **options))
        death = asyncio.create_task(plan.died.wait())
        try:
            await asyncio.wait([call, death], timeout=30, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return 0, {}
            answer = call.result()
            return answer.status_code, answer.json()
        finally:
            for task in (call, death):
                task.cancel()
            if plan.died.is_set() and broker is self.broker:
                await self.replace()


async def produce(owners: Owners, name: str, count: int) -> list[list[str]]:
    """Send requests one after another, each until it succeeds. Returns the ids of each."""
    chance = random.Random(f"{owners.random.random()} {name}")
    found: list[list[str]] = []
    sequence = 0
    for number in range(count):
        numbers = range(sequence, sequence + chance.randint(1, 4))
        sequence = numbers.stop
        body = "\n".join(json.dumps({"payload": f"{name} {i}", "key": f"k{chance.randint(0, 1)}"}) for i in numbers)
        options: dict = {"headers": {"content-type": "application/x-ndjson"}}
        if name.startswith("k"):
            options["headers"]["idempotency-key"] = f"{name}-{number}"
        else:
            options["params"] = {"producer": name, "sequence_id": numbers.start}
        for attempt in range(500):
            status, answer = await owners.post(body, options)
            assert status in (0, 200, 207, 409, 429, 503, 504), answer
            if status == 200 and (attempt or chance.random() < 0.8):
                found.append(answer["message_ids"])
                break
            await asyncio.sleep(chance.random())
        else:
            raise AssertionError(f"{name} {number} does not succeed: {status} {answer}")
    return found


@pytest.mark.parametrize("seed", range(8))
async def test_each_message_is_stored_once_and_in_order(seed: int) -> None:
    owners = Owners(seed)
    names = ["k0", "k1", "s0", "s1"]
    await asyncio.gather(*(produce(owners, name, 12) for name in names))
    owners.plan._fault_rate = 0.0
    owners.plan._die_at = None
    stored: list[str] = []
    start = "earliest"
    while True:
        answer = await owners.broker.client.get(f"{TOPIC}/messages", params={"start": start, "max": 1000})
        if answer.status_code != 200:
            await asyncio.sleep(1)
            continue
        stored += [one["payload"] for one in answer.json()["messages"]]
        if not answer.json()["messages"]:
            break
        start = answer.json()["next"]
    assert len(stored) == len(set(stored)), f"stored twice after {owners.count} owners"
    for name in names:
        mine = [int(one.split()[1]) for one in stored if one.startswith(name)]
        assert mine == list(range(len(mine))), name
        assert len(mine) >= 12
    await owners.broker.die()
