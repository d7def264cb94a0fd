"""Register the broker as live: an ephemeral znode `/loadbalance/brokers/<host:port>`, created again if it is lost.

The value is a BrokerRecord, in the form of Pulsar's LocalBrokerData.
"""

import asyncio
from typing import Final

from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_pulsar import znode_layout

from bindery_broker.ownership.records import broker_id, encode_broker

RETRY_S: Final = 1.0
"""Seconds before a failed registration is tried again."""

log = get_logger(__name__)


async def register(leases: Leases, *, url: str) -> Lease | None:
    """Return the lease; None: another session still holds the znode, usually that of this broker before its restart."""
    return await leases.acquire(znode_layout.broker(broker_id(url)), encode_broker(url))


async def publish(leases: Leases, *, url: str, draining: bool) -> None:
    """Store in the registration of the broker whether it drains. Raises the errors of `Lease.replace`."""
    lease = await register(leases, url=url)
    if lease is not None:
        await lease.replace(encode_broker(url, draining=draining))


async def keep_registered(leases: Leases, *, url: str) -> None:
    """Keep the broker registered until the task is cancelled, then release the registration."""
    lease: Lease | None = None
    try:
        while True:
            try:
                lease = await register(leases, url=url)
            except BinderyError as error:
                log.warning("broker_not_registered", **error_fields(error))
                lease = None
            if lease is None:
                await asyncio.sleep(RETRY_S)
                continue
            lost = asyncio.Event()
            lease.on_lost(lost.set)
            log.info("broker_registered", url=url)
            await lost.wait()
            log.warning("broker_registration_lost", url=url)
    finally:
        if lease is not None and lease.is_held:
            try:
                await lease.release()
            except BinderyError as error:
                log.warning("broker_not_deregistered", **error_fields(error))
