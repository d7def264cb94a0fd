"""Checks of passwords run in threads, few at a time, and wrong ones are limited by address."""

import asyncio
import threading

import pytest
from bindery_core.errors import TooManyRequests, Unauthorized
from bindery_kit.access import password_checks as module
from bindery_kit.access.password_checks import (
    FAILURES_BURST,
    FAILURES_RATE,
    RUNNING_MAX,
    WAITING_PER_ADDRESS_MAX,
    PasswordChecks,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _wrong() -> str:
    raise Unauthorized("wrong name or password")


async def test_checks_run_beside_the_event_loop_and_few_at_a_time() -> None:
    checks = PasswordChecks(clock=Clock())
    loop_thread = threading.get_ident()
    release, lock = threading.Event(), threading.Lock()
    running, most = 0, 0

    def check() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        assert release.wait(60)
        with lock:
            running -= 1
        return threading.get_ident()

    calls = [asyncio.create_task(checks.run(check, address=f"a{n}")) for n in range(RUNNING_MAX * 3)]
    async with asyncio.timeout(60):
        while running < RUNNING_MAX:
            await asyncio.sleep(0)  # the loop runs while the checks do not end
        release.set()
        threads = await asyncio.gather(*calls)
    assert loop_thread not in threads
    assert most == RUNNING_MAX


async def test_wrong_passwords_of_one_address_are_limited() -> None:
    clock = Clock()
    checks = PasswordChecks(clock=clock)
    for _ in range(FAILURES_BURST):
        with pytest.raises(Unauthorized):
            await checks.run(_wrong, address="10.0.0.1")
    with pytest.raises(TooManyRequests, match="wrong passwords"):
        await checks.run(_wrong, address="10.0.0.1")
    assert await checks.run(lambda: "bob", address="10.0.0.2") == "bob"
    clock.now_s += 1 / FAILURES_RATE
    assert await checks.run(lambda: "bob", address="10.0.0.1") == "bob", "a right one takes nothing"
    with pytest.raises(Unauthorized):
        await checks.run(_wrong, address="10.0.0.1")
    with pytest.raises(TooManyRequests):
        await checks.run(_wrong, address="10.0.0.1")


async def test_checks_that_wait_are_limited_by_address_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = PasswordChecks(clock=Clock())
    release = threading.Event()

    def check() -> bool:
        return release.wait(60)

    calls = [asyncio.create_task(checks.run(check, address="a")) for _ in range(WAITING_PER_ADDRESS_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="being checked"):
        await checks.run(check, address="a")
    monkeypatch.setattr(module, "WAITING_MAX", WAITING_PER_ADDRESS_MAX + 1)
    calls.append(asyncio.create_task(checks.run(check, address="b")))
    await asyncio.sleep(0)
    with pytest.raises(TooManyRequests, match="being checked"):
        await checks.run(check, address="c")
    release.set()
    async with asyncio.timeout(60):
        assert all(await asyncio.gather(*calls))
    assert await checks.run(check, address="a")


async def test_the_addresses_in_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADDRESSES_MAX", 3)
    checks = PasswordChecks(clock=Clock())
    for number in range(10):
        with pytest.raises(Unauthorized):
            await checks.run(_wrong, address=f"10.0.0.{number}")
    assert len(checks._failures) == 3
