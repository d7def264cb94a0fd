"""Give both clients one interface, so that a case is written once and each client can take each role.

Both clients raise `Refused` for an error, and `NotOffered` for an operation that the client does not have. Payloads are
computed from (seed, entry id, size) in the same way in both languages, and every read compares them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from bindery_client.client import LedgerClient
from bindery_client.ledger.api import ReadHandle, WriteHandle
from bindery_core.errors import BinderyError
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import EntryId, LedgerId, validate_bookie_id

from e2e.interop.java import Driver, Refused

DIGESTS: Final = {
    "CRC32": DigestType.CRC32,
    "CRC32C": DigestType.CRC32C,
    "MAC": DigestType.MAC,
    "DUMMY": DigestType.DUMMY,
}
T = TypeVar("T")
_PATTERN: Final = bytes(range(256))


class NotOffered(Exception):
    """The client does not have this operation."""


@contextmanager
def translated() -> Iterator[None]:
    """Convert errors of Bindery's client to Refused."""
    try:
        yield
    except BinderyError as error:
        raise Refused(type(error).__name__, str(error)) from error


def payload(seed: int, entry: int, size: int) -> bytes:
    """The payload of an entry, as `Driver.payload` computes it."""
    length = size + entry % 7 if size else 0
    start = (seed * 31 + entry * 7) % 256
    return (_PATTERN * ((start + length) // 256 + 1))[start : start + length]


class Handle(Protocol):
    """An open ledger, to write or to read. `seed` and `size` determine the payloads."""

    ledger: int

    async def add(self, count: int, *, first: int = 0, size: int = 100, seed: int = 1) -> None: ...
    async def read(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int: ...
    async def read_unconfirmed(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int: ...
    async def batch_read(self, first: int, *, max_count: int, max_size: int, size: int = 100, seed: int = 1) -> int: ...
    async def known_lac(self) -> int: ...
    async def read_lac(self) -> int: ...
    async def wait_for(self, entry: int, *, timeout_s: float) -> bool: ...
    async def force(self) -> int: ...
    async def close(self) -> None: ...
    async def crash(self) -> None:
        """Drop a writer as a crash does: it sends nothing more and closes nothing."""
        ...


class Actor(Protocol):
    name: str

    async def create(
        self,
        *,
        e: int = 3,
        qw: int = 3,
        qa: int = 2,
        digest: str = "CRC32C",
        password: str = "secret",
        custom: Mapping[str, str] | None = None,
        deferred: bool = False,
    ) -> Handle: ...
    async def open(self, ledger: int, *, recover: bool = True, password: str = "secret") -> Handle: ...
    async def delete(self, ledger: int) -> None: ...
    async def metadata(self, ledger: int) -> dict[str, Any]: ...
    async def entries(self, ledger: int, bookie: str, last: int) -> list[int]:
        """Entries up to `last` that the bookie lists."""
        ...


JAVA_TIMEOUTS: Final = {
    "addEntryTimeoutSec": "60",
    "readEntryTimeoutSec": "60",
    "startTLSTimeoutSecs": "60",
    "clientConnectTimeoutMillis": "60000",
}
"""Timeouts of Apache's client, whose defaults are 5 and 10 s. On a busy machine, the first TLS handshake of two Java
processes takes longer: the client then gives the bookie up, and the add ends with NotEnoughBookies."""


class JavaActor:
    """Apache's client, in the driver process."""

    def __init__(self, driver: Driver, *, name: str, uri: str, settings: Mapping[str, str]) -> None:
        self.name = name
        self._driver = driver
        self._uri = uri
        self._settings = {**JAVA_TIMEOUTS, **settings}
        self._handles = 0

    async def connect(self) -> None:
        await self._driver.call("connect", client=self.name, uri=self._uri, settings=dict(self._settings))

    def _next_handle(self) -> str:
        self._handles += 1
        return f"{self.name}#{self._handles}"

    async def create(
        self,
        *,
        e: int = 3,
        qw: int = 3,
        qa: int = 2,
        digest: str = "CRC32C",
        password: str = "secret",
        custom: Mapping[str, str] | None = None,
        deferred: bool = False,
    ) -> Handle:
        handle = self._next_handle()
        answer = await self._driver.call(
            "create",
            client=self.name,
            handle=handle,
            e=e,
            qw=qw,
            qa=qa,
            digest=digest,
            password=password,
            custom=dict(custom or {}),
            deferred=deferred,
        )
        return JavaHandle(self._driver, handle, answer["ledger"])

    async def open(self, ledger: int, *, recover: bool = True, password: str = "secret") -> Handle:
        handle = self._next_handle()
        await self._driver.call(
            "open", client=self.name, handle=handle, ledger=ledger, recover=recover, digest="CRC32C", password=password
        )
        return JavaHandle(self._driver, handle, ledger)

    async def delete(self, ledger: int) -> None:
        await self._driver.call("delete", client=self.name, ledger=ledger)

    async def metadata(self, ledger: int) -> dict[str, Any]:
        return await self._driver.call("metadata", client=self.name, ledger=ledger)

    async def entries(self, ledger: int, bookie: str, last: int) -> list[int]:
        answer = await self._driver.call("entries", client=self.name, ledger=ledger, bookie=bookie, last=last)
        present: list[int] = answer["present"]
        return present

    async def bookies(self) -> dict[str, Any]:
        """`writable`, `read_only`: bookie ids. `free`: bookie id -> free bytes."""
        return await self._driver.call("bookies", client=self.name)


class JavaHandle:
    def __init__(self, driver: Driver, handle: str, ledger: int) -> None:
        self.ledger = ledger
        self._driver = driver
        self._handle = handle

    async def _call(self, op: str, **facts: Any) -> dict[str, Any]:
        return await self._driver.call(op, handle=self._handle, **facts)

    async def add(self, count: int, *, first: int = 0, size: int = 100, seed: int = 1) -> None:
        await self._call("add", first=first, count=count, size=size, seed=seed)

    async def read(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int:
        return int((await self._call("read", first=first, last=last, size=size, seed=seed))["count"])

    async def read_unconfirmed(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int:
        answer = await self._call("read", first=first, last=last, size=size, seed=seed, unconfirmed=True)
        return int(answer["count"])

    async def batch_read(self, first: int, *, max_count: int, max_size: int, size: int = 100, seed: int = 1) -> int:
        answer = await self._call(
            "batch_read", first=first, max_count=max_count, max_size=max_size, size=size, seed=seed
        )
        return int(answer["count"])

    async def known_lac(self) -> int:
        return int((await self._call("known_lac"))["lac"])

    async def read_lac(self) -> int:
        return int((await self._call("lac"))["lac"])

    async def wait_for(self, entry: int, *, timeout_s: float) -> bool:
        answer = await self._call("long_poll", entry=entry, timeout_ms=int(timeout_s * 1000), seed=1, size=100)
        return bool(answer["lac"] >= entry)

    async def explicit_lac(self) -> int:
        """The explicit LAC, by READ_LAC, which a v2 client sends over a separate v3 connection."""
        return int((await self._call("explicit_lac"))["lac"])

    async def force(self) -> int:
        return int((await self._call("force"))["lac"])

    async def close(self) -> None:
        await self._call("close")

    async def crash(self) -> None:
        await self._call("forget")


class OurActor:
    """Bindery's client, in this process."""

    def __init__(self, client: LedgerClient, *, name: str) -> None:
        self.name = name
        self.client = client

    async def create(
        self,
        *,
        e: int = 3,
        qw: int = 3,
        qa: int = 2,
        digest: str = "CRC32C",
        password: str = "secret",
        custom: Mapping[str, str] | None = None,
        deferred: bool = False,
    ) -> Handle:
        with translated():
            handle = await self.client.create(
                ensemble_size=e,
                write_quorum=qw,
                ack_quorum=qa,
                digest_type=DIGESTS[digest],
                password=password.encode(),
                custom={k: v.encode() for k, v in (custom or {}).items()},
                deferred_sync=deferred,
            )
        return OurHandle(writer=handle)

    async def open(self, ledger: int, *, recover: bool = True, password: str = "secret") -> Handle:
        with translated():
            handle = await self.client.open(LedgerId(ledger), password=password.encode(), recover=recover)
        return OurHandle(reader=handle)

    async def delete(self, ledger: int) -> None:
        with translated():
            await self.client.delete(LedgerId(ledger))

    async def metadata(self, ledger: int) -> dict[str, Any]:
        with translated():
            found = await self.client.metadata(LedgerId(ledger))
        is_closed = found.state.name == "CLOSED"
        return {
            "e": found.ensemble_size,
            "qw": found.write_quorum,
            "qa": found.ack_quorum,
            "state": found.state.name,
            "last": int(found.last_entry_id) if is_closed else -1,
            "length": found.length if is_closed else 0,
            "digest": next(name for name, kind in DIGESTS.items() if kind is found.digest_type),
            "password": (found.password or b"").decode("latin-1"),
            "custom": {name: value.decode("latin-1") for name, value in found.custom.items()},
            "segments": [
                {"first": int(segment.first_entry_id), "ensemble": list(segment.ensemble)} for segment in found.segments
            ],
        }

    async def entries(self, ledger: int, bookie: str, last: int) -> list[int]:
        with translated():
            runs = await self.client.entries_on(LedgerId(ledger), validate_bookie_id(bookie))
        return [entry for start, count in runs for entry in range(start, start + count) if entry <= last]

    @property
    def single_readers(self) -> frozenset[str]:
        """Bookies that were found not to support batch reads."""
        return frozenset(self.client._pool.without_batch_reads)


class OurHandle:
    def __init__(self, *, writer: WriteHandle | None = None, reader: ReadHandle | None = None) -> None:
        handle = writer or reader
        assert handle is not None
        self.ledger = int(handle.ledger_id)
        self._handle = handle
        self._writer = writer
        self._reader = reader

    async def add(self, count: int, *, first: int = 0, size: int = 100, seed: int = 1) -> None:
        payloads = [payload(seed, entry, size) for entry in range(first, first + count)]
        with translated():
            given = await _there(self._writer).add_many(payloads)
        assert given == first

    async def read(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int:
        with translated():
            entries = await self._handle.read(EntryId(first), EntryId(last))
        assert [entry.entry_id for entry in entries] == list(range(first, last + 1))
        for entry in entries:
            assert entry.payload == payload(seed, entry.entry_id, size)
        return len(entries)

    async def read_unconfirmed(self, first: int, last: int, *, size: int = 100, seed: int = 1) -> int:
        raise NotOffered("reads beyond what is confirmed")

    async def batch_read(self, first: int, *, max_count: int, max_size: int, size: int = 100, seed: int = 1) -> int:
        raise NotOffered("a limit in bytes")  # the client uses batch reads by itself

    async def known_lac(self) -> int:
        return int(self._handle.last_add_confirmed)

    async def read_lac(self) -> int:
        with translated():
            return await _there(self._reader).read_last_confirmed()

    async def wait_for(self, entry: int, *, timeout_s: float) -> bool:
        with translated():
            return await _there(self._reader).wait_for_entry(EntryId(entry), timeout_s=timeout_s)

    async def force(self) -> int:
        with translated():
            return await _there(self._writer).force()

    async def close(self) -> None:
        with translated():
            if self._writer is not None:
                await self._writer.close()
            else:
                await _there(self._reader).release()

    async def crash(self) -> None:
        await _there(self._writer).abandon()


def _there(handle: T | None) -> T:
    assert handle is not None, "this handle cannot do that"
    return handle
