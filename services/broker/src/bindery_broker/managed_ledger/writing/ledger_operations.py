"""Create, recover and delete the ledgers of a topic, each call within `operation_timeout_s`."""

from collections.abc import Mapping

import structlog
from bindery_client.ledger.api import LedgerClient, ReadHandle, WriteHandle
from bindery_core.errors import BinderyError
from bindery_core.ids import LedgerId

from bindery_broker.managed_ledger.settings import ManagedLedgerSettings
from bindery_broker.managed_ledger.topic_metadata import limited

log = structlog.get_logger()


class LedgerOperations:
    """Calls to the ledger client for one topic."""

    def __init__(
        self, topic: str, client: LedgerClient, settings: ManagedLedgerSettings, custom_metadata: Mapping[str, bytes]
    ) -> None:
        self._topic = topic
        self._client = client
        self._settings = settings
        self._custom_metadata = dict(custom_metadata)

    async def create(self) -> WriteHandle:
        settings = self._settings
        async with limited(settings.operation_timeout_s, "create a ledger"):
            return await self._client.create(
                ensemble_size=settings.ensemble_size,
                write_quorum=settings.write_quorum,
                ack_quorum=settings.ack_quorum,
                custom=self._custom_metadata,
            )

    async def close(self, handle: WriteHandle) -> tuple[int, int]:
        """Return the entries and the payload bytes of the closed ledger."""
        async with limited(self._settings.operation_timeout_s, "close a ledger"):
            metadata = await handle.close()
        return metadata.last_entry_id + 1, metadata.length

    async def recover(self, ledger_id: int) -> ReadHandle:
        """Fence and close a ledger."""
        async with limited(self._settings.operation_timeout_s, "recover a ledger"):
            return await self._client.open(LedgerId(ledger_id), recover=True)

    async def abandon(self, handle: WriteHandle) -> None:
        """Release a writer and leave its ledger open. An error is only logged."""
        try:
            await handle.abandon()
        except BinderyError as error:
            log.warning("topic_ledger_not_abandoned", topic=self._topic, error=str(error))

    async def discard(self, handle: WriteHandle, *, delete: bool) -> None:
        """Release the writer of an empty ledger. `delete=False`: the topic's znode may name the ledger."""
        await self.abandon(handle)
        if delete:
            await self.delete(handle.ledger_id)

    async def delete(self, ledger_id: int) -> None:
        """Delete an empty ledger. An error is only logged, because such a ledger occupies only its metadata."""
        try:
            async with limited(self._settings.operation_timeout_s, "delete a ledger"):
                await self._client.delete(LedgerId(ledger_id))
        except BinderyError as error:
            log.warning("empty_ledger_not_deleted", topic=self._topic, ledger_id=ledger_id, error=str(error))
