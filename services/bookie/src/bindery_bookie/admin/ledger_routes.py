"""Routes about the ledgers of the whole cluster; every bookie serves them.

| path                    | method | parameters                                    | response                       |
|-------------------------|--------|-----------------------------------------------|--------------------------------|
| /api/v1/ledger/list     | GET    | print_metadata, decode_meta (true), page      | `{id: null or metadata}`       |
| /api/v1/ledger/metadata | GET    | ledger_id                                     | `{id: metadata}`               |
| /api/v1/ledger/read     | GET    | ledger_id, start_entry_id, end_entry_id, page | `{entry id: payload}`; guarded |
| /api/v1/ledger/delete   | DELETE | ledger_id                                     | JSON text; it fences first     |

Pages are those of BookKeeper: a page of the list has 100 ledgers, the first one 99, and applies only with
print_metadata; a page of a ledger has 1000 entries. Lists and entries are streamed while they are read; an error after
the first member aborts the connection. An open ledger is read up to its last confirmed entry and is not recovered.
Characters outside ASCII become U+FFFD. Metadata that cannot be read is `{"error"}`. If the port requires tokens for
anything, passwords are masked in requests without one.
Source: BookKeeper's ListLedgerService, GetLedgerMetaService, ReadLedgerEntryService, DeleteLedgerService.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any, Final

from bindery_core.errors import BadRequest, BinderyError, NoSuchLedger
from bindery_core.formats import ledger_metadata_codec as codec
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import ID_MAX, EntryId, LedgerId
from bindery_kit.admin.http import Answer, Request, Route, json_answer, stream_object
from bindery_metadata.stores.versioned import Versioned

from bindery_bookie.admin.context import AdminContext

LIST_PAGE: Final = 100
"""Number of ledgers in a page of the list."""
READ_PAGE: Final = 1000
"""Number of entries in a page of a ledger."""
_METADATA_READS: Final = 32
"""Number of concurrent reads of metadata."""
_READ_SIZE: Final = 1024 * 1024
"""Approximate bytes of entries that are fetched at once."""
_READ_ENTRIES_MAX: Final = 100


def metadata_json(ledger_id: int, found: Versioned[LedgerMetadata], *, with_password: bool) -> dict[str, Any]:
    """Return metadata in BookKeeper's form. If it has no creation time, that of its znode is used. Without
    `with_password` the password is masked."""
    metadata, password = found.value, found.value.password
    shown = base64.b64encode(password or b"").decode() if with_password else "********"
    return {
        "ledgerId": ledger_id,
        "metadataFormatVersion": metadata.format_version,
        "ensembleSize": metadata.ensemble_size,
        "writeQuorumSize": metadata.write_quorum,
        "ackQuorumSize": metadata.ack_quorum,
        "state": metadata.state.name,
        "length": metadata.length,
        "lastEntryId": metadata.last_entry_id,
        "ctime": (found.created_ms or -1) if metadata.ctime_ms is None else metadata.ctime_ms,
        "digestType": None if metadata.digest_type is None else metadata.digest_type.name,
        "password": None if password is None else shown,
        "customMetadata": {name: base64.b64encode(value).decode() for name, value in metadata.custom.items()},
        "closed": metadata.state is LedgerState.CLOSED,
        "allEnsembles": {
            str(segment.first_entry_id): [{"id": str(bookie_id)} for bookie_id in segment.ensemble]
            for segment in metadata.segments
        },
        "ctoken": 0 if metadata.c_token is None else metadata.c_token,
    }


async def _list(context: AdminContext, request: Request) -> Answer:
    with_metadata = request.flag("print_metadata")
    page = request.number("page", -1, low=-(2**31), high=2**31) if with_metadata else -1
    first, last = ((page - 1) * LIST_PAGE, page * LIST_PAGE - 1) if page > 0 else (0, ID_MAX)
    listed = _ledgers(context, request, first, last, with_metadata=with_metadata)
    return Answer(200, "application/json", stream_object(listed))


async def _ledgers(
    context: AdminContext, request: Request, first: int, last: int, *, with_metadata: bool
) -> AsyncIterator[tuple[str, Any]]:
    """Yield the ledgers with the numbers `first`..`last`; numbers begin with 1, as in BookKeeper."""
    manager = context.ledger_manager()
    decoded = request.flag("decode_meta", default=True)

    async def read(ledger_id: LedgerId) -> tuple[str, Any] | None:
        try:
            found = await manager.read(ledger_id)
        except NoSuchLedger:
            return None
        except BinderyError as error:
            if error.status == 503:
                raise
            return str(ledger_id), {"error": str(error)}
        if decoded or not request.is_trusted:
            return str(ledger_id), metadata_json(ledger_id, found, with_password=request.is_trusted)
        return str(ledger_id), codec.encode(found.value).decode("utf-8", "replace")

    number = 0
    ledger_ids: list[LedgerId] = []
    async for ledger_id in manager.list():
        number += 1
        if number > last:
            break
        if number < first:
            continue
        if not with_metadata:
            yield str(ledger_id), None
            continue
        ledger_ids.append(ledger_id)
        if len(ledger_ids) == _METADATA_READS:
            for member in await asyncio.gather(*map(read, ledger_ids)):
                if member is not None:
                    yield member
            ledger_ids.clear()
    for member in await asyncio.gather(*map(read, ledger_ids)):
        if member is not None:
            yield member


async def _metadata(context: AdminContext, request: Request) -> Answer:
    ledger_id = LedgerId(request.number("ledger_id"))
    found = await context.ledger_manager().read(ledger_id)
    shown = metadata_json(ledger_id, found, with_password=request.is_trusted)
    return json_answer({str(ledger_id): shown})


async def _read(context: AdminContext, request: Request) -> Answer:
    ledger_id = LedgerId(request.number("ledger_id"))
    first, last = request.number("start_entry_id", 0), request.number("end_entry_id", -1, low=-1)
    page = request.number("page", -1, low=-(2**31), high=2**31)
    if page > 0:
        first = max(first, (page - 1) * READ_PAGE)
        last = page * READ_PAGE - 1 if last < 0 else min(last, page * READ_PAGE - 1)
    if 0 <= last < first:
        raise BadRequest("the range of entries is empty", start_entry_id=first, end_entry_id=last, page=page)
    return Answer(200, "application/json", stream_object(_entries(context, ledger_id, first, last, page)))


async def _entries(
    context: AdminContext, ledger_id: LedgerId, first: int, last: int, page: int
) -> AsyncIterator[tuple[str, Any]]:
    client = await context.client()
    password = (await client.metadata(ledger_id)).password or b""
    reader = await client.open(ledger_id, password=password, recover=False)
    try:
        if page > 0:
            yield "Entries for page: ", str(page)
        end = reader.last_add_confirmed if last < 0 else min(last, reader.last_add_confirmed)
        count = 1
        while first <= end:
            entries = await reader.read(EntryId(first), EntryId(min(end, first + count - 1)))
            for entry in entries:
                yield str(entry.entry_id), entry.payload.decode("ascii", "replace")
            first += len(entries)
            likely_size = max(1, sum(len(entry.payload) for entry in entries) // len(entries))
            count = max(1, min(_READ_ENTRIES_MAX, _READ_SIZE // likely_size))
    finally:
        await reader.release()


async def _delete(context: AdminContext, request: Request) -> Answer:
    ledger_id = LedgerId(request.number("ledger_id"))
    await context.ledger_manager().read(ledger_id)  # a missing ledger is the client's error
    client = await context.client()
    await client.delete(ledger_id)
    return json_answer(f"Deleted ledger: {ledger_id}")


ROUTES: Final = (
    Route("GET", "/api/v1/ledger/list", _list, is_heavy=True),
    Route("GET", "/api/v1/ledger/metadata", _metadata),
    Route("GET", "/api/v1/ledger/read", _read, is_guarded=True, is_heavy=True),
    Route("DELETE", "/api/v1/ledger/delete", _delete, is_heavy=True, is_cluster_wide=True),
)
