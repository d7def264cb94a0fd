"""The repair budget on simulated time: its rate, the effect of latency on the rate, and the entries in flight."""

import asyncio

import pytest
from bindery_recovery.budget import MIB, RepairBudget
from simulated import simulate


def make(**changes: float) -> RepairBudget:
    settings: dict[str, float] = {"bytes_per_s_max": 64 * MIB, "bytes_per_s_min": MIB, "entries_in_flight_max": 100}
    settings.update(changes)
    return RepairBudget(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [1_000, 100_000, 3 * MIB])
@pytest.mark.parametrize("payers", [1, 4])
def test_the_rate_is_kept_for_any_size_and_any_number_of_payers(size: int, payers: int) -> None:
    async def run() -> float:
        budget = make(bytes_per_s_max=8 * MIB, bytes_per_s_min=8 * MIB)
        loop = asyncio.get_running_loop()
        began = loop.time()

        async def pay() -> None:
            while loop.time() < began + 20:
                await budget.pay(size)

        await asyncio.gather(*(pay() for _ in range(payers)))
        return budget.bytes_paid / (loop.time() - began)

    rate = simulate(run())
    assert rate == pytest.approx(8 * MIB, rel=0.2)


def test_unused_budget_does_not_accumulate_during_a_pause() -> None:
    async def run() -> float:
        budget = make(bytes_per_s_max=MIB, bytes_per_s_min=MIB)
        await asyncio.sleep(1_000)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(20):
            await budget.pay(MIB // 4)
        return loop.time() - began

    assert simulate(run()) == pytest.approx(5.0, abs=0.5)


def test_the_rate_falls_to_its_minimum_while_bookies_are_slow_and_recovers_slowly() -> None:
    async def feel(budget: RepairBudget, latency_s: float, seconds: float) -> list[float]:
        rates = []
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end:
            for _ in range(10):
                budget.observe(latency_s)
            rates.append(budget.bytes_per_s)
            await asyncio.sleep(0.5)
        return rates

    async def run() -> None:
        budget = make()
        assert budget.foreground_p99_ms is None
        grown = await feel(budget, 0.005, 30)
        assert grown == sorted(grown)
        assert grown[-1] == 64 * MIB
        assert budget.foreground_p99_ms == 5.0
        shrunk = await feel(budget, 0.2, 3)
        assert shrunk == sorted(shrunk, reverse=True)
        assert shrunk[-1] <= 64 * MIB / 4, "the rate is halved each second"
        assert (await feel(budget, 0.2, 20))[-1] == MIB, "recovery never stops"
        again = await feel(budget, 0.01, 3)
        assert MIB < again[-1] <= MIB + 4 * 4 * MIB, "the rate grows by steps"
        await asyncio.sleep(60)
        assert budget.foreground_p99_ms is None, "old responses do not count"

    simulate(run())


@pytest.mark.parametrize(
    ("slow", "count", "p99_ms"), [(1, 200, 1.0), (3, 200, 500.0), (1, 5, 1.0), (2, 5, 500.0), (0, 5, 1.0)]
)
def test_the_slowest_percent_of_responses_and_at_least_one_response_are_ignored(
    slow: int, count: int, p99_ms: float
) -> None:
    async def run() -> None:
        budget = make()
        for _ in range(3):
            budget.observe(0.001)
        await asyncio.sleep(1.5)
        before = budget.bytes_per_s
        budget.observe(0.001)  # ends the period of the first responses
        await asyncio.sleep(0.5)
        for number in range(count):
            budget.observe(0.5 if number < slow else 0.001)
        await asyncio.sleep(1.0)
        budget.observe(0.001)
        assert budget.foreground_p99_ms == p99_ms
        assert (budget.bytes_per_s < before) == (p99_ms > 50)

    simulate(run())


def test_a_debt_is_paid_off_at_the_present_rate() -> None:
    async def run() -> float:
        budget = make(bytes_per_s_max=64 * MIB)
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = budget.bytes_per_s
        await budget.pay(int(first))  # a debt of one second at the present rate
        await asyncio.sleep(1.0)
        await budget.pay(int(first) * 4)  # four seconds at the old rate
        for _ in range(5):
            budget.observe(1.0)  # halves the rate: the debt is now eight seconds
        await budget.pay(1)
        return loop.time() - began

    assert 8 <= simulate(run()) <= 10


def test_entries_in_flight_are_limited_in_total_and_a_larger_batch_runs_alone() -> None:
    async def run() -> None:
        budget = make(entries_in_flight_max=10)
        seen: list[int] = []

        async def copy(count: int) -> None:
            async with budget.entries(count):
                seen.append(budget.entries_in_flight)
                await asyncio.sleep(1)

        await asyncio.gather(*(copy(count) for count in (4, 4, 4, 25, 1, 9, 10, 3, 3, 3, 1)))
        assert budget.entries_in_flight == 0
        assert len(seen) == 11
        assert [number for number in seen if number > 10] == [25]

    simulate(run())


def test_a_cancelled_waiter_holds_no_entries() -> None:
    async def run() -> None:
        budget = make(entries_in_flight_max=1)
        entered = asyncio.Event()

        async def hold() -> None:
            async with budget.entries(1):
                entered.set()
                await asyncio.sleep(10)

        holding = asyncio.create_task(hold())
        await entered.wait()
        waiting = [asyncio.create_task(hold()) for _ in range(3)]
        await asyncio.sleep(0.1)
        waiting[0].cancel()
        await asyncio.sleep(0.1)
        holding.cancel()
        waiting[1].cancel()  # it was admitted just before
        await asyncio.gather(holding, *waiting, return_exceptions=True)
        assert budget.entries_in_flight == 0

    simulate(run())


def test_a_cancelled_waiter_lets_in_those_behind_it() -> None:
    async def run() -> None:
        budget = make(entries_in_flight_max=10)

        async def hold(count: int) -> None:
            async with budget.entries(count):
                await asyncio.sleep(10)

        tasks = [asyncio.create_task(hold(count)) for count in (6, 8, 4)]
        await asyncio.sleep(1)
        assert budget.entries_in_flight == 6, "calls are served in order"
        tasks[1].cancel()
        await asyncio.sleep(1)
        assert budget.entries_in_flight == 10
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.entries_in_flight == 0

    simulate(run())
