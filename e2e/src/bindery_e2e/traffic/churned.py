"""What a churn run writes and deletes: ledgers, by Bindery's client, or topics, over HTTP.

Each entry, or message, has the payload that is given. `add` returns the bytes that each bookie stores of it.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, Protocol

import httpx
from bindery_client.client import LedgerClient
from bindery_client.ledger.api import WriteHandle
from bindery_core.ids import BookieId, EntryId, LedgerId

from bindery_e2e.traffic.clients import KEEPER, payload_of, topic_path

ENSEMBLE: Final = 3
QUORUM: Final = 2
"""Copies of each entry of a ledger. Those of a topic are as many as the ensemble, by the default of a broker."""
FRAME_SIZE: Final = 36
"""Bytes of an entry's header and digest, which the bookies store in addition to the payload."""
READ_ENTRIES: Final = 64


class Churned(Protocol):
    """A ledger, or a topic. Methods raise BinderyError or httpx.HTTPError."""

    async def add(self, payload: bytes) -> Mapping[BookieId, int]:
        """Store an entry. Returns the bytes at each bookie."""
        ...

    async def close(self) -> None:
        """Nothing is added any more."""
        ...

    async def delete(self) -> None: ...

    def payloads(self) -> AsyncIterator[bytes]:
        """What is stored, in order."""
        ...


class Store(Protocol):
    """Creates what is written."""

    name: str
    """Of its kind, in the plural."""

    async def create(self, number: int) -> Churned:
        """`number`: of the ledger or topic in this run."""
        ...


class Ledgers:
    """Ledgers of three bookies, two of which store each entry."""

    name = "ledgers"

    def __init__(self, client: LedgerClient) -> None:
        self._client = client

    async def create(self, number: int) -> Churned:
        handle = await self._client.create(ensemble_size=ENSEMBLE, write_quorum=QUORUM, ack_quorum=QUORUM)
        return _Ledger(self._client, handle)


class _Ledger:
    def __init__(self, client: LedgerClient, handle: WriteHandle) -> None:
        self._client = client
        self._ledger_id: LedgerId = handle.ledger_id
        self._handle: WriteHandle | None = handle
        self._entries = 0

    async def add(self, payload: bytes) -> Mapping[BookieId, int]:
        handle = self._handle
        assert handle is not None, "the ledger is closed"
        entry_id, self._entries = self._entries, self._entries + 1
        await handle.add(payload)
        ensemble = handle.metadata.segments[-1].ensemble
        return {ensemble[(entry_id + index) % ENSEMBLE]: len(payload) + FRAME_SIZE for index in range(QUORUM)}

    async def close(self) -> None:
        assert self._handle is not None, "the ledger is closed"
        await self._handle.close()
        self._handle = None

    async def delete(self) -> None:
        await self._client.delete(self._ledger_id)

    async def payloads(self) -> AsyncIterator[bytes]:
        reader = await self._client.open(self._ledger_id)
        try:
            for first in range(0, self._entries, READ_ENTRIES):
                last = min(first + READ_ENTRIES, self._entries) - 1
                for entry in await reader.read(EntryId(first), EntryId(last)):
                    yield entry.payload
        finally:
            await reader.release()


class Topics:
    """Topics of one broker. Each has a subscription that nobody reads, so that only a deletion frees its messages.

    `bookies`: all bookies of the cluster, which are as many as an ensemble has, so that each stores every message.
    """

    name = "topics"

    def __init__(self, http: httpx.AsyncClient, url: str, bookies: Sequence[BookieId]) -> None:
        if len(bookies) != ENSEMBLE:
            raise ValueError(f"{len(bookies)} bookies, not {ENSEMBLE}: which of them store a message is not known")
        self._http = http
        self._url = url
        self._bookies = bookies

    async def create(self, number: int) -> Churned:
        url = self._url + topic_path(f"public/default/churn-{number}")
        (await self._http.put(f"{url}/subscriptions/{KEEPER}", json={"initial": "earliest"})).raise_for_status()
        return _Topic(self._http, url, self._bookies)


class _Topic:
    def __init__(self, http: httpx.AsyncClient, url: str, bookies: Sequence[BookieId]) -> None:
        self._http = http
        self._url = url
        self._bookies = bookies

    async def add(self, payload: bytes) -> Mapping[BookieId, int]:
        headers = {"content-type": "application/octet-stream"}
        (await self._http.post(f"{self._url}/messages", content=payload, headers=headers)).raise_for_status()
        return dict.fromkeys(self._bookies, len(payload) + FRAME_SIZE)

    async def close(self) -> None:
        pass

    async def delete(self) -> None:
        (await self._http.delete(self._url)).raise_for_status()

    async def payloads(self) -> AsyncIterator[bytes]:
        start = "earliest"
        while True:
            params: dict[str, str | int] = {"start": start, "max": READ_ENTRIES}
            page = (await self._http.get(f"{self._url}/messages", params=params)).raise_for_status().json()
            if not page["messages"]:
                return
            for message in page["messages"]:
                yield payload_of(message)
            start = page["next"]
