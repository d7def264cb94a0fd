"""One ledger client is connected for the first request that needs it."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.admin.shared_client import SharedClient
from bindery_core.errors import BadRequest, BookieUnavailable, MetadataUnavailable


class Client:
    def __init__(self, error: Exception | None = None) -> None:
        self.closed = 0
        self._error = error

    async def close(self) -> None:
        self.closed += 1
        if self._error is not None:
            raise self._error


class Connector:
    """Connects clients, each once `gate` is set."""

    def __init__(self) -> None:
        self.made: list[Client] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.has_store = True
        self.errors: list[Exception] = []
        self.close_error: Exception | None = None

    def __call__(self) -> Any:
        return self._connect() if self.has_store else None

    async def _connect(self) -> Client:
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop()
        self.made.append(Client(self.close_error))
        return self.made[-1]


async def test_all_requests_use_one_client() -> None:
    connector = Connector()
    connector.gate.clear()
    shared = SharedClient(connector)
    waiting = [asyncio.create_task(shared.get()) for _ in range(3)]
    await asyncio.sleep(0)
    connector.gate.set()
    assert {id(client) for client in await asyncio.gather(*waiting)} == {id(connector.made[0])}
    assert await shared.get() is connector.made[0]  # type: ignore[comparison-overlap]
    assert len(connector.made) == 1


async def test_a_failed_connection_is_tried_again() -> None:
    connector = Connector()
    connector.errors = [BadRequest("no credentials")]
    shared = SharedClient(connector)
    with pytest.raises(BadRequest):
        await shared.get()
    assert await shared.get() is connector.made[0]  # type: ignore[comparison-overlap]


async def test_before_there_is_a_store_no_client_is_connected() -> None:
    connector = Connector()
    connector.has_store = False
    shared = SharedClient(connector)
    with pytest.raises(MetadataUnavailable, match="the bookie has no connection to the metadata store yet"):
        await shared.get()
    connector.has_store = True
    assert await shared.get() is connector.made[0]  # type: ignore[comparison-overlap]


async def test_the_client_is_closed_once_and_no_other_connected() -> None:
    connector = Connector()
    shared = SharedClient(connector)
    await shared.get()
    await shared.close()
    await shared.close()
    assert [client.closed for client in connector.made] == [1]
    with pytest.raises(MetadataUnavailable, match="the bookie is stopping"):
        await shared.get()
    assert len(connector.made) == 1


async def test_closing_without_a_client_connects_none() -> None:
    connector = Connector()
    shared = SharedClient(connector)
    await shared.close()
    with pytest.raises(MetadataUnavailable, match="the bookie is stopping"):
        await shared.get()
    assert connector.made == []


@pytest.mark.parametrize("error", [BookieUnavailable("gone"), OSError("gone")])
async def test_an_error_of_closing_is_ignored(error: Exception) -> None:
    connector = Connector()
    connector.close_error = error
    shared = SharedClient(connector)
    await shared.get()
    await shared.close()
    assert connector.made[0].closed == 1
