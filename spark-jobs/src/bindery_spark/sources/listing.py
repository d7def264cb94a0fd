"""Listing ledgers by a range of ids, reading only the directories that the range touches, and reading metadata."""

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


class ReadLedger(NamedTuple):
    """One ledger's znode."""

    ledger_id: LedgerId
    found: Versioned[LedgerMetadata] | None
    problem: str = ""
    """Why it cannot be read; `found` is None then."""


async def ledger_ids(manager: LedgerManager, wanted: Wanted) -> list[LedgerId]:
    """Ascending. Raises MetadataUnavailable: a list that is not whole is no list."""
    if wanted.is_empty:
        return []
    return [each async for each in manager.list() if wanted.has(each)]


async def read_ledgers(manager: LedgerManager, ids: Sequence[LedgerId]) -> AsyncIterator[ReadLedger]:
    """In their order; those deleted meanwhile are left out. Raises MetadataUnavailable."""
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
