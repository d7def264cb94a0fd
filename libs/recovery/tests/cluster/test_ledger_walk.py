"""Order, bound, errors and cancellation of bounded work; outcomes, rate and resumption of walks over ledgers."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest
from bindery_core.errors import Corrupt, MetadataUnavailable, NoSuchLedger
from bindery_core.ids import LedgerId
from bindery_metadata.coordination.election import NotLeader
from bindery_recovery.cluster.ledger_walk import LedgerWalk, each, in_order
from simulated import simulate


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def test_results_come_in_order_and_concurrency_is_limited() -> None:
    async def scenario() -> None:
        under_way = most = 0

        async def work(number: int) -> int:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1.0 / (number + 1))  # later items are finished earlier
            under_way -= 1
            return number

        assert [result async for result in in_order(numbers(20), work, limit=4)] == list(range(20))
        assert most == 4

    simulate(scenario())


def test_an_error_ends_the_iteration_after_earlier_results_and_cancels_the_rest() -> None:
    async def scenario() -> None:
        cancelled: list[int] = []

        async def work(number: int) -> int:
            if number == 2:
                raise ValueError("two")
            if number > 2:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    cancelled.append(number)
                    raise
            return number

        seen: list[int] = []

        async def take() -> None:
            async for result in in_order(numbers(10), work, limit=5):
                await asyncio.sleep(0.1)
                seen.append(result)

        with pytest.raises(ValueError, match="two"):
            await take()
        assert seen == [0, 1]
        assert cancelled == [3, 4, 5], "6 had not begun"

    simulate(scenario())


def test_closing_the_iteration_early_cancels_all_work() -> None:
    async def scenario() -> None:
        async def work(number: int) -> int:
            if number:
                await asyncio.sleep(1000)
            return number

        async with contextlib.aclosing(in_order(numbers(10), work, limit=5)) as results:
            async for _ in results:
                break
        assert len(asyncio.all_tasks()) == 1

    simulate(scenario())


# --- walks ------------------------------------------------------------------------------------------------------------


async def visit(ledger_id: LedgerId) -> str:
    match ledger_id:
        case 2:
            raise NoSuchLedger("deleted")
        case 3:
            raise Corrupt("garbage")
        case 4:
            await asyncio.sleep(3600)
        case 5:
            raise ValueError("a bug")
    return f"visited {ledger_id}"


def test_an_error_at_one_ledger_does_not_end_the_walk() -> None:
    async def scenario() -> None:
        walk = LedgerWalk(3, timeout_s=10, hung_event="hung", failed_event="failed")
        async with walk.run(each(map(LedgerId, range(1, 7))), visit) as results:
            found = [result async for result in results]
        assert found == [
            (1, "visited 1"),
            (2, "deleted"),
            (3, "unreadable"),
            (4, "hung"),
            (5, "failed"),
            (6, "visited 6"),
        ]
        assert asyncio.get_running_loop().time() == pytest.approx(10)

    simulate(scenario())


@pytest.mark.parametrize(
    ("error", "failed_event"),
    [(MetadataUnavailable("away"), "failed"), (NotLeader("over"), "failed"), (ValueError("a bug"), "")],
)
def test_a_lost_store_a_lost_leadership_and_an_unexpected_error_end_the_walk(
    error: Exception, failed_event: str
) -> None:
    async def fail(ledger_id: LedgerId) -> int:
        if ledger_id == 3:
            raise error
        return int(ledger_id)

    async def scenario() -> None:
        seen = []

        async def walk() -> None:
            async with LedgerWalk(2, failed_event=failed_event).run(each(map(LedgerId, range(9))), fail) as results:
                async for ledger_id, _ in results:
                    seen.append(ledger_id)

        with pytest.raises(type(error)):
            await walk()
        assert seen == [0, 1, 2]

    simulate(scenario())


def test_a_timeout_that_the_walk_did_not_set_ends_the_walk() -> None:
    """Skipping the ledger would make an incomplete index of ledgers look complete."""

    async def visit(_: LedgerId) -> int:
        raise TimeoutError("from the operating system")

    async def scenario() -> None:
        async with LedgerWalk(2, hung_event="hung").run(each([LedgerId(1)]), visit) as results:
            with pytest.raises(TimeoutError):
                await anext(results)

    simulate(scenario())


def test_a_walk_keeps_to_its_rate_resumes_at_an_id_and_makes_up_for_one_second() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        times: list[float] = []
        gates = itertools.count(1)

        async def gate() -> None:
            if next(gates) == 6:
                await asyncio.sleep(10)

        async def note(ledger_id: LedgerId) -> None:
            assert ledger_id >= 100
            times.append(loop.time())

        walk = LedgerWalk(4, rate=2, may_go_on=gate)
        async with walk.run(each(map(LedgerId, range(110))), note, start_at=100) as results:
            assert [ledger_id async for ledger_id, _ in results] == list(range(100, 110))
        assert times == pytest.approx([0, 0.5, 1, 1.5, 2, 12, 12, 12, 12.5, 13])

    simulate(scenario())
