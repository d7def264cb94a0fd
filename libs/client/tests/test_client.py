"""The real client meets the contract, over bookies in this process."""

from collections.abc import AsyncIterator

import pytest
from bindery_client.ledger.api import LedgerClient
from fake_cluster import FakeCluster
from ledger_client_contract import LedgerClientContract, MakeClient


class TestLedgerClient(LedgerClientContract):
    @pytest.fixture
    async def make_client(self) -> AsyncIterator[MakeClient]:
        async with FakeCluster(bookies=4) as cluster:

            async def make() -> LedgerClient:
                return await cluster.client()

            yield make
