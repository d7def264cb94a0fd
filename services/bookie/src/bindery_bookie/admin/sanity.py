"""The sanity check: write a ledger to this bookie alone, read it back, and delete it.

The check uses what every entry uses: metadata store for the ledger's id, journal, write cache, reads. It uses neither
the ledger port nor other bookies. A failed check may leave a ledger without entries in the metadata, or a ledger
without metadata, which garbage collection removes. Source: BookKeeper's SanityTestCommand, which uses a client.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from bindery_core.digest import Digester
from bindery_core.entry import pack_many, unpack
from bindery_core.errors import BookieUnavailable, Corrupt
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.wire.messages import AddRequest, Status

if TYPE_CHECKING:
    from bindery_bookie.admin.context import AdminContext

T = TypeVar("T")

ENTRIES: Final = 10
"""Number of entries that the check writes."""
_PASSWORD: Final = b"sanity"


async def check_sanity(context: "AdminContext") -> None:
    """Run the check. Raises BinderyError or OSError with the cause of a failure."""
    digester = Digester(DigestType.CRC32C, _PASSWORD)
    manager = context.ledger_manager()
    metadata = LedgerMetadata(
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(EntryId(0), (BookieId(context.bookie_id),)),),
        password=_PASSWORD,
    )
    ledger_id, _ = await manager.create(metadata)
    try:
        payloads = [f"sanity check, entry {entry_id}".encode() for entry_id in range(ENTRIES)]
        bodies = pack_many(digester, payloads, ledger_id=ledger_id, first_entry_id=0, lac=-1, length=0)
        adds = [AddRequest(0, ledger_id, at, digester.master_key, body) for at, body in enumerate(bodies)]
        added: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
        context.store.add_many(adds, _once(added))
        _check_statuses("add", await added)
        read: asyncio.Future[Sequence[bytes | int]] = asyncio.get_running_loop().create_future()
        context.store.read_many([(ledger_id, at) for at in range(ENTRIES)], _once(read))
        found = await read
        _check_statuses("read", [one for one in found if isinstance(one, int)])
        for at, (frame, payload) in enumerate(zip(found, payloads, strict=True)):
            assert not isinstance(frame, int)
            if unpack(digester, frame, ledger_id=ledger_id, entry_id=at).payload != payload:
                raise Corrupt(
                    "an entry that was read differs from the entry that was written", ledger_id=ledger_id, entry_id=at
                )
    finally:
        await manager.delete(ledger_id)
        await context.store.delete_ledger(ledger_id)


def _once(future: "asyncio.Future[T]") -> Callable[[T], None]:
    """Return a function that sets the result, unless the future was cancelled."""

    def done(result: T) -> None:
        if not future.done():
            future.set_result(result)

    return done


def _check_statuses(what: str, statuses: Sequence[int]) -> None:
    for status in statuses:
        if status != Status.OK:
            raise BookieUnavailable(f"the bookie could not {what} its own entry", status=int(status))
