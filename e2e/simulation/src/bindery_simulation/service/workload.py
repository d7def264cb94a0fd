"""Workload: what the clients of a simulated cluster do. It knows nothing of faults, and tells the verdict what it saw.

Writers create ledgers, add in overlapping calls, and close, abandon or forget them. Others tail them, look at them,
recover them under their writer's hands, or delete them. Every error that a ledger client may raise is expected here; a
result is ok, failed or unknown, and unknown is never counted as failed.
"""

import asyncio
import random
from typing import TYPE_CHECKING, Any

from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType, LedgerState
from bindery_core.ids import EntryId, LedgerId

from bindery_simulation.service.verdict import Verdict, payload_of

if TYPE_CHECKING:
    from bindery_client.ledger.reader import ReadHandle
    from bindery_client.ledger.writer import WriteHandle

    from bindery_simulation.service.world import World

DIGESTS = (DigestType.CRC32C, DigestType.CRC32C, DigestType.CRC32, DigestType.MAC)
READ_STEP = 50
PACES_S = ((0.0, 0.002, 0.05, 0.3, 0.8), (0.001, 0.005, 0.02), (0.01, 0.05, 0.1))
"""Pauses between a writer's calls."""


class Workload:
    """Of one client process. Ends when all its ledgers are done, or, if it is asked to, early."""

    def __init__(self, world: "World", client: LedgerClient, name: str, rng: random.Random) -> None:
        self._world = world
        self._client = client
        self._name = name
        self._lots = rng
        self._verdict: Verdict = world.verdict

    async def run(self, *, ledgers: int) -> None:
        await asyncio.gather(*[self._contain(self._live(number)) for number in range(ledgers)])

    async def _contain(self, work: Any) -> None:
        try:
            await work
        except BinderyError as error:
            self._tell("gave up", error=error)

    def _tell(self, what: str, **facts: Any) -> None:
        self._world.trace.add(self._name, what, **facts)

    # --- writing ----------------------------------------------------------------------------------------------------

    async def _live(self, number: int) -> None:
        """A ledger from its creation to an end that is chosen at random."""
        rng = self._lots
        await asyncio.sleep(rng.uniform(0, 1.5) * (1 + number))
        bookies = self._world.bookie_count
        ensemble_size = rng.randint(1, min(bookies, 5)) if rng.random() < 0.5 else min(3, bookies)
        write_quorum = rng.randint(1, ensemble_size) if rng.random() < 0.3 else min(rng.choice((2, 3)), ensemble_size)
        ack_quorum = rng.randint((write_quorum + 1) // 2, write_quorum)
        if self._world.may_lose_disk:
            ensemble_size, write_quorum, ack_quorum = (max(2, one) for one in (ensemble_size, write_quorum, ack_quorum))
        password = rng.choice((b"", b"secret"))
        handle = await self._client.create(
            ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum,
            digest_type=rng.choice(DIGESTS), password=password,
        )  # fmt: skip
        history = self._verdict.ledger(handle.ledger_id)
        history.password = password
        self._tell("created", ledger_id=handle.ledger_id, E=ensemble_size, Qw=write_quorum, Qa=ack_quorum)
        self._world.ledger_made(handle.ledger_id)
        await self._write(handle)
        await self._end(handle)

    async def _write(self, handle: "WriteHandle") -> None:
        rng = self._lots
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
                await self._look(handle)
            if calls[-1].done() and handle.last_add_confirmed < next_entry_id - 1:
                break  # the handle is broken
        if rng.random() < 0.7:
            await asyncio.gather(*calls)

    async def _add(self, handle: "WriteHandle", first: int, count: int) -> None:
        payloads = [payload_of(handle.ledger_id, entry_id) for entry_id in range(first, first + count)]
        try:
            found = await handle.add_many(payloads)
        except BinderyError as error:
            self._tell("add failed", ledger_id=handle.ledger_id, first=first, count=count, error=error)
        else:
            self._verdict.acknowledged(handle.ledger_id, found, count, expected=first)

    async def _look(self, handle: "WriteHandle") -> None:
        """The writer reads its own entries back."""
        last = handle.last_add_confirmed
        if last >= 0:
            first = self._lots.randint(max(0, last - READ_STEP), last)
            try:
                self._verdict.read(handle.ledger_id, first, await handle.read(EntryId(first), EntryId(last)))
            except BinderyError as error:
                self._tell("read failed", ledger_id=handle.ledger_id, error=error)

    async def _end(self, handle: "WriteHandle") -> None:
        rng, ledger_id = self._lots, handle.ledger_id
        fate = rng.random()
        if fate < 0.15:
            self._tell("forgets", ledger_id=ledger_id)
            self._world.keep(handle)
            return
        if fate < 0.25:
            self._tell("abandons", ledger_id=ledger_id)
            await handle.abandon()
            return
        for _ in range(rng.choice((1, 3))):
            try:
                metadata = await handle.close()
            except BinderyError as error:
                self._tell("close failed", ledger_id=ledger_id, error=error)
                await asyncio.sleep(0.5)
            else:
                self._tell("closed", ledger_id=ledger_id, last=metadata.last_entry_id)
                self._verdict.closed_by_writer(ledger_id, metadata)
                break
        if rng.random() < 0.15:
            await asyncio.sleep(rng.uniform(0, 2))
            await self.delete(ledger_id)

    # --- what others do to it ---------------------------------------------------------------------------------------

    async def visit(self, ledger_id: LedgerId) -> None:
        """Do something with somebody's ledger."""
        rng = self._lots
        await asyncio.sleep(rng.choice((0.0, 0.05, 0.5, 1.5)))
        fate = rng.random()
        if fate < 0.45:
            await self._contain(self.tail(ledger_id))
        elif fate < 0.85:
            await self._contain(self.recover(ledger_id))
        elif fate < 0.95:
            await self._contain(self.glance(ledger_id))
        else:
            await self.delete(ledger_id)

    async def tail(self, ledger_id: LedgerId) -> None:
        """Follow it to its end, or for as long as it is interesting."""
        reader = await self._open(ledger_id, recover=False)
        self._tell("tails", ledger_id=ledger_id)
        next_entry_id = 0
        seen = -1
        try:
            async with asyncio.timeout(self._lots.uniform(1, 8)):
                async for entries in reader.tail(EntryId(0)):
                    self._verdict.saw_lac(ledger_id, reader.last_add_confirmed, before=seen)
                    seen = reader.last_add_confirmed
                    self._verdict.read(ledger_id, next_entry_id, entries)
                    next_entry_id += len(entries)
        except TimeoutError:
            pass
        finally:
            await reader.release()
        self._tell("tailed", ledger_id=ledger_id, to=next_entry_id - 1)

    async def glance(self, ledger_id: LedgerId) -> None:
        """Ask for the last add confirmed a few times, and read up to there."""
        reader = await self._open(ledger_id, recover=False)
        seen = -1
        try:
            for _ in range(self._lots.randint(1, 4)):
                lac = await reader.read_last_confirmed()
                self._verdict.saw_lac(ledger_id, lac, before=seen)
                seen = lac
                if lac >= 0:
                    await self._read_all(reader, max(0, lac - READ_STEP), lac)
                await asyncio.sleep(self._lots.uniform(0, 0.5))
        finally:
            await reader.release()

    async def recover(self, ledger_id: LedgerId) -> None:
        """Take it from its writer."""
        self._tell("recovers", ledger_id=ledger_id)
        reader = await self._open(ledger_id, recover=True)
        metadata = reader.metadata
        self._tell("recovered", ledger_id=ledger_id, last=metadata.last_entry_id)
        try:
            if metadata.state is LedgerState.CLOSED:
                await self._read_all(reader, 0, metadata.last_entry_id)
        finally:
            await reader.release()

    async def delete(self, ledger_id: LedgerId) -> None:
        self._verdict.ledger(ledger_id).delete_tried = True
        self._tell("deletes", ledger_id=ledger_id)
        try:
            await self._client.delete(ledger_id)
        except BinderyError as error:
            self._tell("delete failed", ledger_id=ledger_id, error=error)

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
        """Close it if need be and read all of it. False: not now."""
        history = self._verdict.ledger(ledger_id)
        try:
            reader = await self._open(ledger_id, recover=True)
        except NoSuchLedger:
            self._verdict.check(
                history.delete_tried, "acknowledged-readable", f"ledger {ledger_id} vanished, and nobody deleted it"
            )
            return True
        except BinderyError as error:
            self._tell("audit waits", ledger_id=ledger_id, error=error)
            return False
        try:
            metadata = reader.metadata
            self._verdict.final(ledger_id, metadata)
            await self._read_all(reader, 0, metadata.last_entry_id)
        except Corrupt as error:
            self._verdict.unreadable(ledger_id, str(error))
        except BinderyError as error:
            self._tell("audit waits", ledger_id=ledger_id, error=error)
            return False
        finally:
            await reader.release()
        self._tell("audited", ledger_id=ledger_id, last=metadata.last_entry_id)
        return True

    async def prove_writable(self) -> bool:
        """A new ledger takes entries, is closed and reads back. False: not now."""
        size = min(3, self._world.bookie_count)
        try:
            handle = await self._client.create(ensemble_size=size, write_quorum=size, ack_quorum=min(2, size))
            self._verdict.ledger(handle.ledger_id)
            await asyncio.gather(*[self._add(handle, first, 5) for first in range(0, 25, 5)])
            await handle.close()
            return await self.audit(handle.ledger_id)
        except BinderyError as error:
            self._tell("writing waits", error=error)
            return False
