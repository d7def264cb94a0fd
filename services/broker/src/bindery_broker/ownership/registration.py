"""Register the broker as live: an ephemeral znode `/loadbalance/brokers/<host:port>`, created again if it is lost.

The value is a BrokerRecord, in the form of Pulsar's LocalBrokerData. It is replaced when the load has changed.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_pulsar import znode_layout

from bindery_broker.ownership.records import BrokerRecord, encode_broker

RETRY_S: Final = 1.0
"""Seconds before a failed registration is tried again."""

log = get_logger(__name__)


class Registration:
    """The registration of one broker. `run` keeps it."""

    def __init__(self, leases: Leases, *, name: str, record: Callable[[], BrokerRecord]) -> None:
        """`name`: `host:port`. `record`: returns what is to be stored now."""
        self.name = name
        self._leases = leases
        self._record = record
        self._path = znode_layout.broker(name)
        self._lease: Lease | None = None
        self._publishing = asyncio.Lock()

    async def run(self) -> None:
        """Keep the broker registered until the task is cancelled, then release the registration."""
        try:
            while True:
                try:
                    self._lease = await self.register()
                except BinderyError as error:
                    log.warning("broker_not_registered", **error_fields(error))
                    self._lease = None
                if self._lease is None:
                    await asyncio.sleep(RETRY_S)
                    continue
                lost = asyncio.Event()
                self._lease.on_lost(lost.set)
                log.info("broker_registered", broker=self.name)
                await lost.wait()
                log.warning("broker_registration_lost", broker=self.name)
        finally:
            lease, self._lease = self._lease, None
            if lease is not None and lease.is_held:
                try:
                    await lease.release()
                except BinderyError as error:
                    log.warning("broker_not_deregistered", **error_fields(error))

    async def register(self) -> Lease | None:
        """Return the lease; None: another session holds the znode, usually that of this broker before its restart."""
        return await self._leases.acquire(self._path, encode_broker(self._record()))

    async def publish(self) -> bool:
        """Store the present record. Returns False, with the reason in the log, if that failed, or if the broker is not
        registered now: the registration will contain it then."""
        async with self._publishing:
            lease = self._lease
            if lease is None or not lease.is_held:
                return False
            try:
                await lease.replace(encode_broker(self._record()))
            except BinderyError as error:
                log.warning("load_not_reported", **error_fields(error))
                return False
            return True
