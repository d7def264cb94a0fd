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
    """The ledgers to keep, all closed."""
    handle: ReadHandle | None
    """Handle of the last ledger; None: there are no ledgers, or the last one was dropped."""
    empty_ledger_id: int | None
    """Ledger that was dropped from the list and can be deleted."""


async def recover_ledgers(
    name: str, info: TopicInfo, *, client: LedgerClient, timeout_s: float, clock: Callable[[], int]
) -> RecoveredLedgers:
    """Fence and close the last ledger of the topic.

    The ledger is dropped from the list if it is missing, or if it is empty and the topic is not terminated.
    """
    records = list(info.ledgers)
    if not records:
        return RecoveredLedgers(records, None, None)
    last = records.pop()
    handle = await _recover(client, last.ledger_id, timeout_s=timeout_s)
    entries = handle.last_add_confirmed + 1 if handle is not None else 0
    if handle is None or not (entries or info.terminated is not None):
        log.info("topic_ledger_dropped", topic=name, ledger_id=last.ledger_id, missing=handle is None)
        return RecoveredLedgers(records, None, last.ledger_id if handle is not None else None)
    records.append(
        LedgerRecord(
            ledger_id=last.ledger_id,
            entries=entries,
            size=handle.metadata.length,
            closed_ms=last.closed_ms or clock(),
            extension=last.extension,
        )
    )
    return RecoveredLedgers(records, handle, None)


async def _recover(client: LedgerClient, ledger_id: int, *, timeout_s: float) -> ReadHandle | None:
    """Fence and close a ledger; None: it does not exist."""
    try:
        async with limited(timeout_s, "recover the topic's last ledger"):
            return await client.open(LedgerId(ledger_id), recover=True)
    except NoSuchLedger:
        return None
