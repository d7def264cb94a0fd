"""Locks have one holder per key, whatever fails or is cancelled, and unused locks are removed."""

import asyncio
import random

import pytest
from bindery_broker.keyed_locks import KeyedLocks


async def test_a_task_that_arrives_between_a_release_and_the_next_wake_up_waits():
    """The lock is free at that moment, but a task still waits for it."""
    locks: KeyedLocks[str] = KeyedLocks()
    inside = most = 0

    async def enter() -> None:
        nonlocal inside, most
        async with locks.hold("a"):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    async with locks.hold("a"):
        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0)
    late = asyncio.create_task(enter())
    await asyncio.gather(waiting, late)
    assert most == 1
    assert len(locks) == 0


async def test_different_keys_do_not_block_each_other():
    locks: KeyedLocks[str] = KeyedLocks()
    async with asyncio.timeout(30), locks.hold("a"), locks.hold("b"):
        assert "a" in locks
        assert "c" not in locks
    assert len(locks) == 0


async def test_a_lock_is_released_when_its_holder_fails():
    locks: KeyedLocks[str] = KeyedLocks()
    with pytest.raises(ZeroDivisionError):
        async with locks.hold("a"):
            raise ZeroDivisionError
    async with asyncio.timeout(30), locks.hold("a"):
        pass
    assert len(locks) == 0


@pytest.mark.parametrize("seed", range(20))
async def test_at_most_one_task_holds_a_key_whichever_is_cancelled(seed: int):
    chance = random.Random(seed)
    locks: KeyedLocks[int] = KeyedLocks()
    inside: set[int] = set()

    async def enter() -> None:
        key = chance.randrange(3)
        async with locks.hold(key):
            assert key not in inside
            inside.add(key)
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside.discard(key)

    tasks = []
    for _ in range(100):
        tasks.append(asyncio.create_task(enter()))
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert not [result for result in results if isinstance(result, Exception)]
    assert len(locks) == 0
