"""Handles of closed ledgers: opened once, kept up to a limit, and released."""

import asyncio
from typing import Any

import pytest
from bindery_broker.managed_ledger.read_handles import ReadHandles
from bindery_core.errors import BookieUnavailable, NoSuchLedger, TryAgain
from bindery_core.ids import LedgerId


class OneHandle:
    def __init__(self, ledger_id: int) -> None:
        self.ledger_id = ledger_id
        self.releases = 0

    async def release(self) -> None:
        self.releases += 1


class CountingClient:
    """Opens any ledger. `opened` has the calls as (ledger id, recover)."""

    def __init__(self) -> None:
        self.opened: list[tuple[int, bool]] = []
        self.handles: list[OneHandle] = []
        self.error: Exception | None = None
        self.answers = asyncio.Event()
        self.answers.set()

    async def open(self, ledger_id: LedgerId, *, recover: bool) -> OneHandle:
        self.opened.append((ledger_id, recover))
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        self.handles.append(OneHandle(ledger_id))
        return self.handles[-1]


def keeping(count_max: int = 2) -> tuple[ReadHandles, CountingClient]:
    client: Any = CountingClient()
    return ReadHandles(client, count_max=count_max, timeout_s=3), client


async def test_a_ledger_is_opened_once_and_without_recovery() -> None:
    handles, client = keeping()
    first = await handles.get(5)
    assert await handles.get(5) is first
    assert client.opened == [(5, False)]
    assert first.ledger_id == 5


async def test_two_calls_at_once_open_a_ledger_once() -> None:
    handles, client = keeping()
    client.answers.clear()
    calls = [asyncio.ensure_future(handles.get(5)) for _ in range(2)]
    await asyncio.sleep(0.01)
    client.answers.set()
    one, two = await asyncio.gather(*calls)
    assert one is two
    assert client.opened == [(5, False)]


async def test_the_least_recently_used_handle_is_released_first() -> None:
    handles, client = keeping(2)
    await handles.get(1)
    await handles.get(2)
    await handles.get(1)
    await handles.get(3)
    assert [(handle.ledger_id, handle.releases) for handle in client.handles] == [(1, 0), (2, 1), (3, 0)]
    await handles.get(1)
    await handles.get(3)
    assert len(client.opened) == 3


async def test_a_handle_opened_elsewhere_is_kept_and_replaces_the_former_one() -> None:
    handles, client = keeping(2)
    former: Any = await handles.get(5)
    other: Any = OneHandle(5)
    await handles.put(other)
    assert await handles.get(5) is other
    assert (former.releases, other.releases, len(client.opened)) == (1, 0, 1)


async def test_handles_opened_elsewhere_count_against_the_limit() -> None:
    handles, _ = keeping(1)
    one, two = OneHandle(1), OneHandle(2)
    await handles.put(one)  # type: ignore[arg-type]
    await handles.put(two)  # type: ignore[arg-type]
    assert (one.releases, two.releases) == (1, 0)


async def test_a_dropped_ledger_is_released_and_opened_again() -> None:
    handles, client = keeping()
    first: Any = await handles.get(5)
    await handles.drop(5)
    await handles.drop(5)
    assert first.releases == 1
    assert await handles.get(5) is not first
    assert len(client.opened) == 2


async def test_all_handles_are_released_once() -> None:
    handles, client = keeping()
    await handles.get(1)
    await handles.get(2)
    await handles.release()
    await handles.release()
    assert [handle.releases for handle in client.handles] == [1, 1]
    await handles.get(1)
    assert len(client.opened) == 3


@pytest.mark.parametrize("error", [NoSuchLedger("made up"), BookieUnavailable("made up")])
async def test_an_error_is_not_remembered(error: Exception) -> None:
    handles, client = keeping()
    client.error = error
    with pytest.raises(type(error)):
        await handles.get(5)
    client.error = None
    assert (await handles.get(5)).ledger_id == 5


async def test_an_open_without_an_answer_fails_at_the_time_limit() -> None:
    handles, client = keeping()
    client.answers.clear()
    began = asyncio.get_running_loop().time()
    with pytest.raises(TryAgain, match="could not open a ledger for reading in time"):
        await handles.get(5)
    assert asyncio.get_running_loop().time() == began + 3
