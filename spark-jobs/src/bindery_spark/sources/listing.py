"""List the ledgers in a range of ids, from the directories of that range only, and read their metadata."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from bindery_core.errors import BinderyError, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_spark.sources.filters import Wanted

READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent reads of metadata."""


class ReadLedger(NamedTuple):
    """One ledger, as read from its znode."""

    ledger_id: LedgerId
    found: Versioned[LedgerMetadata] | None
    problem: str = ""
    """Why the metadata cannot be read; `found` is then None."""


async def ledger_ids(manager: LedgerManager, wanted: Wanted) -> list[LedgerId]:
    """Return the ids, ascending. Raises MetadataUnavailable rather than return an incomplete list."""
    if wanted.is_empty:
        return []
    return [each async for each in manager.list() if wanted.has(each)]


async def read_ledgers(manager: LedgerManager, ids: Sequence[LedgerId]) -> AsyncIterator[ReadLedger]:
    """Yield the ledgers `ids` in this order, except for ledgers that were deleted meanwhile. Raises
    MetadataUnavailable."""
    rest = iter(ids)
    while batch := list(islice(rest, READS_IN_FLIGHT)):
        for each in await asyncio.gather(*(_read(manager, ledger_id) for ledger_id in batch)):
            if each is not None:
                yield each


async def _read(manager: LedgerManager, ledger_id: LedgerId) -> ReadLedger | None:
    try:
        return ReadLedger(ledger_id, await manager.read(ledger_id))
    except NoSuchLedger:
        return None
    except BinderyError as error:
        if error.status == 503:
            raise
        return ReadLedger(ledger_id, None, str(error))
