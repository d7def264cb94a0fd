"""Run the clients of a simulated cluster and report their results to the verdict.

The workload does not depend on the injected faults. Writers create ledgers, add entries in overlapping calls, and
close, abandon or drop the ledgers. Other clients tail, read, recover or delete the ledgers meanwhile. A ledger client
may raise any of its errors. A result is ok, failed or unknown; unknown never counts as failed.
"""

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType, LedgerState
from bindery_core.ids import EntryId, LedgerId

from bindery_simulation.service.cluster import Cluster
from bindery_simulation.service.verdict import Verdict, payload_of

if TYPE_CHECKING:
    from bindery_client.ledger.reader import ReadHandle
    from bindery_client.ledger.writer import WriteHandle

DIGESTS = (DigestType.CRC32C, DigestType.CRC32C, DigestType.CRC32, DigestType.MAC)
"""Digest types. Each ledger uses one of them at random."""
READ_STEP = 50
"""Maximum number of entries per read."""
PACES_S = ((0.0, 0.002, 0.05, 0.3, 0.8), (0.001, 0.005, 0.02), (0.01, 0.05, 0.1))
"""Pauses in seconds between two calls of a writer. Each writer uses one of these tuples at random."""


class Workload:
    """The work of one client process."""

    def __init__(
        self,
        cluster: Cluster,
        client: LedgerClient,
        name: str,
        rng: random.Random,
        on_created: Callable[[LedgerId], None] = lambda ledger_id: None,
    ) -> None:
        self._cluster = cluster
        self._on_created = on_created
        self._client = client
        self._name = name
        self._rng = rng
        self._verdict: Verdict = cluster.verdict

    async def run(self, *, ledgers: int) -> None:
        await asyncio.gather(*[self._contain(self._write_ledger(number)) for number in range(ledgers)])

    async def _contain(self, work: Any) -> None:
        try:
            await work
        except BinderyError as error:
            self._trace("gave up", error=error)

    def _trace(self, what: str, **facts: Any) -> None:
        self._cluster.trace.add(self._name, what, **facts)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _write_ledger(self, number: int) -> None:
        """Create a ledger, write to it, and then close, abandon or drop it at random."""
        rng = self._rng
        await asyncio.sleep(rng.uniform(0, 1.5) * (1 + number))
        bookies = self._cluster.bookie_count
        ensemble_size = rng.randint(1, min(bookies, 5)) if rng.random() < 0.5 else min(3, bookies)
        write_quorum = rng.randint(1, ensemble_size) if rng.random() < 0.3 else min(rng.choice((2, 3)), ensemble_size)
        ack_quorum = rng.randint((write_quorum + 1) // 2, write_quorum)
        if self._cluster.may_lose_disk:
            ensemble_size, write_quorum, ack_quorum = (max(2, one) for one in (ensemble_size, write_quorum, ack_quorum))
        password = rng.choice((b"", b"secret"))
        handle = await self._client.create(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            digest_type=rng.choice(DIGESTS),
            password=password,
        )
        history = self._verdict.ledger(handle.ledger_id)
        history.password = password
        self._trace("created", ledger_id=handle.ledger_id, E=ensemble_size, Qw=write_quorum, Qa=ack_quorum)
        self._on_created(handle.ledger_id)
        await self._write(handle)
        await self._end(handle)

    async def _write(self, handle: "WriteHandle") -> None:
        rng = self._rng
        calls: list[asyncio.Task[None]] = []
        next_entry_id = 0
        pauses_s = rng.choice(PACES_S)
        for _ in range(rng.choice((2, 8, 30, 100))):
            for _ in range(rng.choice((1, 1, 2, 4))):
                count = rng.choice((1, 1, 1, 3, 10))
                calls.append(asyncio.ensure_future(self._add(handle, next_entry_id, count)))
                next_entry_id += count
            await asyncio.sleep(rng.choice(pauses_s))
            if rng.random() < 0.1:
                await self._read_back(handle)
            if calls[-1].done() and handle.last_add_confirmed < next_entry_id - 1:
                break  # the handle is broken
        if rng.random() < 0.7:
            await asyncio.gather(*calls)

    async def _add(self, handle: "WriteHandle", first: int, count: int) -> None:
        payloads = [payload_of(handle.ledger_id, entry_id) for entry_id in range(first, first + count)]
        try:
            found = await handle.add_many(payloads)
        except BinderyError as error:
            self._trace("add failed", ledger_id=handle.ledger_id, first=first, count=count, error=error)
        else:
            self._verdict.acknowledged(handle.ledger_id, found, count, expected=first)

    async def _read_back(self, handle: "WriteHandle") -> None:
        """Read confirmed entries with the handle of their writer."""
        last = handle.last_add_confirmed
        if last >= 0:
            first = self._rng.randint(max(0, last - READ_STEP), last)
            try:
                self._verdict.read(handle.ledger_id, first, await handle.read(EntryId(first), EntryId(last)))
            except BinderyError as error:
                self._trace("read failed", ledger_id=handle.ledger_id, error=error)

    async def _end(self, handle: "WriteHandle") -> None:
        rng, ledger_id = self._rng, handle.ledger_id
        fate = rng.random()
        if fate < 0.15:
            self._trace("forgets", ledger_id=ledger_id)
            self._cluster.keep(handle)
            return
        if fate < 0.25:
            self._trace("abandons", ledger_id=ledger_id)
            await handle.abandon()
            return
        for _ in range(rng.choice((1, 3))):
            try:
                metadata = await handle.close()
            except BinderyError as error:
                self._trace("close failed", ledger_id=ledger_id, error=error)
                await asyncio.sleep(0.5)
            else:
                self._trace("closed", ledger_id=ledger_id, last=metadata.last_entry_id)
                self._verdict.closed_by_writer(ledger_id, metadata)
                break
        if rng.random() < 0.15:
            await asyncio.sleep(rng.uniform(0, 2))
            await self.delete(ledger_id)

    # --- other clients ----------------------------------------------------------------------------------------------

    async def visit(self, ledger_id: LedgerId) -> None:
        """Tail, recover, read or delete the ledger of another client."""
        rng = self._rng
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.5, 1.5)))
        fate = rng.random()
        if fate < 0.45:
            await self._contain(self.tail(ledger_id))
        elif fate < 0.85:
            await self._contain(self.recover(ledger_id))
        elif fate < 0.95:
            await self._contain(self.read_confirmed(ledger_id))
        else:
            await self.delete(ledger_id)

    async def tail(self, ledger_id: LedgerId) -> None:
        """Tail a ledger to its end, or for some seconds."""
        reader = await self._open(ledger_id, recover=False)
        self._trace("tails", ledger_id=ledger_id)
        next_entry_id = 0
        seen = -1
        try:
            async with asyncio.timeout(self._rng.uniform(1, 8)):
                async for entries in reader.tail(EntryId(0)):
                    self._verdict.saw_lac(ledger_id, reader.last_add_confirmed, before=seen)
                    seen = reader.last_add_confirmed
                    self._verdict.read(ledger_id, next_entry_id, entries)
                    next_entry_id += len(entries)
        except TimeoutError:
            pass
        finally:
            await reader.release()
        self._trace("tailed", ledger_id=ledger_id, to=next_entry_id - 1)

    async def read_confirmed(self, ledger_id: LedgerId) -> None:
        """Read the LAC and the entries up to it, a few times."""
        reader = await self._open(ledger_id, recover=False)
        seen = -1
        try:
            for _ in range(self._rng.randint(1, 4)):
                lac = await reader.read_last_confirmed()
                self._verdict.saw_lac(ledger_id, lac, before=seen)
                seen = lac
                if lac >= 0:
                    await self._read_all(reader, max(0, lac - READ_STEP), lac)
                await asyncio.sleep(self._rng.uniform(0, 0.5))
        finally:
            await reader.release()

    async def recover(self, ledger_id: LedgerId) -> None:
        """Recover a ledger while its writer may still write."""
        self._trace("recovers", ledger_id=ledger_id)
        reader = await self._open(ledger_id, recover=True)
        metadata = reader.metadata
        self._trace("recovered", ledger_id=ledger_id, last=metadata.last_entry_id)
        try:
            if metadata.state is LedgerState.CLOSED:
                await self._read_all(reader, 0, metadata.last_entry_id)
        finally:
            await reader.release()

    async def delete(self, ledger_id: LedgerId) -> None:
        self._verdict.ledger(ledger_id).delete_tried = True
        self._trace("deletes", ledger_id=ledger_id)
        try:
            await self._client.delete(ledger_id)
        except BinderyError as error:
            self._trace("delete failed", ledger_id=ledger_id, error=error)

    async def _open(self, ledger_id: LedgerId, *, recover: bool) -> "ReadHandle":
        password = self._verdict.ledger(ledger_id).password
        return await self._client.open(ledger_id, password=password, recover=recover)

    async def _read_all(self, reader: "ReadHandle", first: int, last: int) -> None:
        while first <= last:
            step = min(last, first + READ_STEP - 1)
            self._verdict.read(reader.ledger_id, first, await reader.read(EntryId(first), EntryId(step)))
            first = step + 1

    # --- the end of the run -----------------------------------------------------------------------------------------

    async def audit(self, ledger_id: LedgerId) -> bool:
        """Close a ledger if it is open, and read all its entries. Return False if the caller must try again."""
        history = self._verdict.ledger(ledger_id)
        try:
            reader = await self._open(ledger_id, recover=True)
        except NoSuchLedger:
            self._verdict.check(
                history.delete_tried,
                "acknowledged-readable",
                f"ledger {ledger_id} is missing, and no client deleted it",
            )
            return True
        except BinderyError as error:
            self._trace("audit waits", ledger_id=ledger_id, error=error)
            return False
        try:
            metadata = reader.metadata
            self._verdict.final(ledger_id, metadata)
            await self._read_all(reader, 0, metadata.last_entry_id)
        except Corrupt as error:
            self._verdict.unreadable(ledger_id, str(error))
        except BinderyError as error:
            self._trace("audit waits", ledger_id=ledger_id, error=error)
            return False
        finally:
            await reader.release()
        self._trace("audited", ledger_id=ledger_id, last=metadata.last_entry_id)
        return True

    async def prove_writable(self) -> bool:
        """Write, close and read a new ledger. Return False if the caller must try again."""
        size = min(3, self._cluster.bookie_count)
        try:
            handle = await self._client.create(ensemble_size=size, write_quorum=size, ack_quorum=min(2, size))
            self._verdict.ledger(handle.ledger_id)
            await asyncio.gather(*[self._add(handle, first, 5) for first in range(0, 25, 5)])
            await handle.close()
            return await self.audit(handle.ledger_id)
        except BinderyError as error:
            self._trace("writing waits", error=error)
            return False
