"""Elect the broker that moves bundles: the leader.

| node                        | holder                                                                            |
|-----------------------------|-----------------------------------------------------------------------------------|
| `/bindery/balancing/leader` | the leader of Bindery's brokers: the one that created it                          |
| `/loadbalance/leader`       | the same broker while no Pulsar broker is registered, otherwise Pulsar's leader   |

Both are ephemeral and contain Pulsar's LeaderBroker. Pulsar's brokers elect by creating the second one. The first one
decides who moves bundles of Bindery, also while a Pulsar broker leads. The second one is for tools, which ask any
broker for the leader.

A Pulsar broker sends the lookups of bundles without owner to the leader. A broker of Bindery cannot answer them, so it
gives `/loadbalance/leader` up as soon as a Pulsar broker is registered, and none takes it until the last Pulsar broker
has gone. The node of a Pulsar leader is never touched.

Two leaders at a time, for example while one does not know yet that its session has expired, do no harm: each move is
an unload, which its owner runs once.
Source: Pulsar LeaderElectionService, NamespaceService.searchForCandidateBroker.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec
from bindery_core.errors import BinderyError
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.coordination.leases import Lease, Leases
from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_pulsar import znode_layout

from bindery_broker.ownership.records import LeaderRecord, broker_id

LEADER_PATH: Final = f"{BINDERY_ROOT}/balancing/leader"
RETRY_S: Final = 5.0
"""Seconds after which a candidate tries again, also without an event."""

log = get_logger(__name__)


class Leadership:
    """The candidacy of one broker. `run` keeps it."""

    def __init__(self, leases: Leases, *, url: str, has_pulsar: Callable[[], bool], is_candidate: Callable[[], bool]):
        """`has_pulsar`: whether a Pulsar broker is registered. `is_candidate`: whether this broker may lead now."""
        self._leases = leases
        self._has_pulsar = has_pulsar
        self._is_candidate = is_candidate
        self._value = msgspec.json.encode(LeaderRecord(broker_id=broker_id(url), service_url=url))
        self._own: Lease | None = None
        self._pulsars: Lease | None = None
        self._changed = asyncio.Event()

    @property
    def is_leader(self) -> bool:
        """Whether this broker leads, as far as is certain."""
        return self._own is not None and self._own.is_certain

    def look_again(self) -> None:
        """Check soon whether this broker leads: brokers have come or gone, or it is no candidate any more."""
        self._changed.set()

    async def run(self) -> None:
        """Stand for election until the task is cancelled, then resign."""
        try:
            while True:
                self._changed.clear()
                try:
                    await self._stand()
                except BinderyError as error:
                    log.warning("leader_not_elected", **error_fields(error))
                try:
                    async with asyncio.timeout(RETRY_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await self._resign()

    async def _stand(self) -> None:
        if not self._is_candidate():
            await self._resign()
            return
        was_leader = self.is_leader
        if self._own is None or not self._own.is_held:
            self._own = await self._take(LEADER_PATH)
        if self.is_leader and not was_leader:
            log.info("balancing_leader")
        if not self.is_leader or self._has_pulsar():
            await self._give_up_pulsars()
        elif self._pulsars is None or not self._pulsars.is_held:
            self._pulsars = await self._take(znode_layout.LEADER)

    async def _take(self, path: str) -> Lease | None:
        """Return the lease; None: another broker has it, and its end is noticed."""
        lease = await self._leases.acquire(path, self._value)
        if lease is not None:
            lease.on_lost(self._changed.set)
        elif await self._leases.owner(path, on_change=self._changed.set) is None:
            self._changed.set()
        return lease

    async def _give_up_pulsars(self) -> None:
        lease, self._pulsars = self._pulsars, None
        if lease is not None and lease.is_held:
            await lease.release()

    async def _resign(self) -> None:
        leases, self._own, self._pulsars = (self._pulsars, self._own), None, None
        for lease in leases:
            if lease is not None and lease.is_held:
                try:
                    await lease.release()
                except BinderyError as error:  # the end of the session releases it
                    log.warning("leadership_not_released", path=lease.path, **error_fields(error))
