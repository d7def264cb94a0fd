"""The broker's entry among the live ones: an ephemeral node `/loadbalance/brokers/<host:port>`, put back after a loss.

The value is the owner record's JSON (Pulsar's LocalBrokerData has these fields among others).
"""

import asyncio
from typing import Final
from urllib.parse import urlsplit

import msgspec
from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_pulsar import znode_layout

from bindery_broker.ownership.ownership import OwnerRecord

RETRY_S: Final = 1.0

log = get_logger(__name__)


async def register(leases: Leases, *, url: str) -> Lease | None:
    """The lease; None while another session (an earlier life of this broker) still holds the place."""
    host_port = urlsplit(url).netloc
    return await leases.acquire(znode_layout.broker(host_port), msgspec.json.encode(OwnerRecord(http_url=url)))


async def keep_registered(leases: Leases, *, url: str) -> None:
    """Register, and again whenever the entry was lost. Runs until cancelled, then the entry is given up."""
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
