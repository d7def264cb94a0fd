"""Recover the last ledger of a topic that is opened, so that the previous owner confirms no more entries in it."""

from collections.abc import Callable
from typing import NamedTuple

import structlog
from bindery_client.ledger.api import LedgerClient, ReadHandle
from bindery_core.errors import NoSuchLedger
from bindery_core.ids import LedgerId
from bindery_pulsar.managed_ledger_codec import TopicInfo

from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_broker.managed_ledger.topic_metadata import limited

log = structlog.get_logger()


class RecoveredLedgers(NamedTuple):
    records: list[LedgerRecord]
    """The ledgers to keep, all closed. The last one may be empty: it is dropped when the next one is started."""
    handle: ReadHandle | None
    """Handle of the last ledger; None: there are no ledgers, or the last one needed no recovery."""
    is_last_missing: bool = False
    """Whether the last ledger does not exist, and was dropped from the list."""


async def recover_ledgers(
    name: str, info: TopicInfo, *, client: LedgerClient, timeout_s: float, clock: Callable[[], int]
) -> RecoveredLedgers:
    """Fence and close the last ledger of the topic, unless its record says that it is closed.

    A record has the time of the close only after the ledger was closed, by us and by Pulsar: nobody can add to it.
    """
    records = list(info.ledgers)
    if not records or records[-1].closed_ms:
        return RecoveredLedgers(records, None)
    last = records.pop()
    handle = await _recover(client, last.ledger_id, timeout_s=timeout_s)
    if handle is None:
        log.warning("topic_ledger_missing", topic=name, ledger_id=last.ledger_id)
        return RecoveredLedgers(records, None, is_last_missing=True)
    records.append(
        LedgerRecord(
            ledger_id=last.ledger_id,
            entries=handle.last_add_confirmed + 1,
            size=handle.metadata.length,
            closed_ms=clock(),
            extension=last.extension,
        )
    )
    return RecoveredLedgers(records, handle)


async def _recover(client: LedgerClient, ledger_id: int, *, timeout_s: float) -> ReadHandle | None:
    """Fence and close a ledger; None: it does not exist."""
    try:
        async with limited(timeout_s, "recover the topic's last ledger"):
            return await client.open(LedgerId(ledger_id), recover=True)
    except NoSuchLedger:
        return None
