"""BookiePool: the connections to bookies, one per bookie and wire version, and the bookies to avoid.

A bookie whose request failed is quarantined for `quarantine_s`: new ensembles avoid it while there are others. The
quarantine ends early when the bookie registers again. A bookie that disappears from the directory keeps its connection
for ABSENT_TIME_S, and longer while requests are in flight: it may only have lost its session and still serve
requests. After a longer outage of ZooKeeper, all bookies lose their sessions at once. New ledgers do not choose a
bookie that is absent from the directory.

If the client's token or certificate is replaced, the pool opens a new connection beside each one that began with an
earlier one, sends new requests to it once it is ready, and closes the old one when all of its requests are answered. A
bookie ends connections whose credentials have expired or were taken back, so requests would fail if clients waited for
that. If the new connection fails, the old one stays, and the next check tries again.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from itertools import count
from typing import Any, Final, TypeVar

from bindery_core.errors import BookieUnavailable, NotEnoughBookies
from bindery_core.ids import BookieId
from bindery_core.placement.placement import (
    DEFAULT_RACK,
    Candidate,
    RackRule,
    choose_ensemble,
    choose_move,
    choose_replacements,
)
from bindery_core.sources import RandomFloats
from bindery_metadata.bookies.racks import RackFollower
from bindery_metadata.bookies.registration import BookieDirectory, BookieRecord

from bindery_client.connection.connection import BookieConnection
from bindery_client.connection.security import NO_SECURITY, RENEWAL_CHECK_S, ClientSecurity
from bindery_client.settings import ClientSettings

Chosen = TypeVar("Chosen")

UNUSED_CHECK_S: Final = 0.1
"""Seconds between two checks whether a connection that was replaced has answered all of its requests."""
ABSENT_TIME_S: Final = 60.0
"""Time in seconds for which the connection to an absent bookie is kept, many times as long as a bookie needs to
register again. BookKeeper's clients keep such connections forever."""


class BookiePool:
    """See the module. Belongs to one client; used from one event loop."""

    def __init__(
        self,
        directory: BookieDirectory,
        *,
        settings: ClientSettings,
        randomness: RandomFloats,
        security: ClientSecurity = NO_SECURITY,
        racks: RackFollower | None = None,
    ) -> None:
        """`racks`: the racks of bookies; None: all are in the default rack."""
        self.directory: Final = directory
        self.settings: Final = settings
        self._racks = racks
        self._rule = RackRule(settings.min_racks_per_write_quorum, settings.enforce_min_racks_per_write_quorum)
        self._randomness = randomness
        self._loop = asyncio.get_running_loop()
        self._security = security
        self._connections: dict[tuple[BookieId, int], BookieConnection] = {}
        self.without_batch_reads: set[BookieId] = set()
        """Bookies that end the connection at a batch read: entries are read from them one at a time."""
        self.free_bytes: dict[BookieId, int] = {}
        """Free space that bookies reported, in bytes."""
        self._quarantined: dict[BookieId, tuple[float, str]] = {}
        """Bookie -> (until, reason)."""
        self._present: Collection[BookieId] = frozenset(directory.bookies)
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._txn_ids = count(1)
        self._renewing: asyncio.Task[None] | None = None
        if security.files:
            self._renewing = self._loop.create_task(self._renew_always(), name="renew-credentials")
        self._unwatch = directory.on_change(self._directory_changed)

    # -- connections --------------------------------------------------------------------------------------------------

    def connection(self, bookie_id: BookieId, wire_version: int = 3) -> BookieConnection:
        """Return the connection to this bookie. After `close`, it fails every request."""
        connection = self._connections.get((bookie_id, wire_version))
        if connection is None:
            connection = self._new_connection(bookie_id, wire_version)
            if self._closed:
                connection.shut()
            else:
                self._connections[bookie_id, wire_version] = connection
        return connection

    def _new_connection(self, bookie_id: BookieId, wire_version: int) -> BookieConnection:
        return BookieConnection(
            bookie_id,
            resolve=self._resolve,
            settings=self.settings,
            wire_version=wire_version,
            security=self._security,
        )

    async def _renew_always(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL_CHECK_S)
            await asyncio.to_thread(self._security.poll)
            await self.renew()

    async def renew(self) -> None:
        """Replace the connections that began with credentials that were replaced since then."""
        generation = self._security.generation
        old = [key for key, one in self._connections.items() if one.is_connected and one.generation != generation]
        await asyncio.gather(*map(self._renew, old))

    async def _renew(self, key: tuple[BookieId, int]) -> None:
        old, new = self._connections[key], self._new_connection(*key)
        try:
            is_ready = await new.probe()
        except asyncio.CancelledError:
            await new.close()
            raise
        if is_ready and self._connections.get(key) is old:
            self._connections[key] = new
            self._keep(self._close_unused(old))
        else:
            self._keep(new.close())

    async def _close_unused(self, connection: BookieConnection) -> None:
        """Close a connection that gets no more requests, once it has answered those that it has."""
        while connection.requests_in_flight and connection.is_connected:  # noqa: ASYNC110 - rare, and never urgent
            await asyncio.sleep(UNUSED_CHECK_S)
        await connection.close()

    def _connections_to(self, bookie_id: BookieId) -> list[BookieConnection]:
        return [c for version in (2, 3) if (c := self._connections.get((bookie_id, version))) is not None]

    def txn_id(self) -> int:
        """Return an id that is unique in all connections, so that the same request can be sent to several bookies."""
        return next(self._txn_ids)

    def txn_ids(self, number: int) -> list[int]:
        """Return `number` ids like `txn_id`."""
        txn_ids = self._txn_ids
        return [next(txn_ids) for _ in range(number)]

    async def _resolve(self, bookie_id: BookieId) -> tuple[str, int]:
        address = self.directory.address(bookie_id)
        if address is None:
            await self.directory.refresh()  # it may have registered again just now
            address = self.directory.address(bookie_id)
        if address is None:
            raise BookieUnavailable("bookie is not registered", bookie_id=bookie_id)
        return address

    def _directory_changed(self, bookies: Mapping[BookieId, BookieRecord]) -> None:
        for bookie_id in bookies.keys() - frozenset(self._present):
            self._quarantined.pop(bookie_id, None)
            self.without_batch_reads.discard(bookie_id)
            for connection in self._connections_to(bookie_id):
                connection.retry_now()
        if gone := frozenset(self._present) - bookies.keys():
            self._loop.call_later(ABSENT_TIME_S, self._drop_absent, gone)
        for bookie_id in self.free_bytes.keys() - bookies.keys():
            del self.free_bytes[bookie_id]
        self._present = frozenset(bookies)

    def _drop_absent(self, gone: Collection[BookieId]) -> None:
        absent = [key for key in self._connections if key[0] in gone and key[0] not in self.directory.bookies]
        for key in absent:
            if not self._connections[key].requests_in_flight:
                self._drop(key)
        if any(key in self._connections for key in absent):
            self._loop.call_later(ABSENT_TIME_S, self._drop_absent, gone)

    def _drop(self, key: tuple[BookieId, int]) -> None:
        self._keep(self._connections.pop(key).close())

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` until it ends, or until the pool is closed."""
        task = self._loop.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- bookies to avoid ---------------------------------------------------------------------------------------------

    def quarantine(self, bookie_id: BookieId, reason: str) -> None:
        """Avoid this bookie for `quarantine_s`."""
        self._quarantined[bookie_id] = (self._loop.time() + self.settings.quarantine_s, reason)

    def quarantined(self) -> dict[BookieId, str]:
        """Return the bookies in quarantine, each with the reason."""
        now = self._loop.time()
        self._quarantined = {b: entry for b, entry in self._quarantined.items() if entry[0] > now}
        return {b: f"failed recently: {reason}" for b, (_until, reason) in self._quarantined.items()}

    def is_unreachable(self, bookie_id: BookieId) -> bool:
        """Return whether the last attempt to connect to this bookie failed."""
        return any(connection.is_unreachable for connection in self._connections_to(bookie_id))

    def to_avoid(self) -> frozenset[BookieId]:
        """Return the bookies to read from last."""
        return frozenset(b for (b, _), c in self._connections.items() if c.is_unreachable) | self.quarantined().keys()

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(
                record.bookie_id,
                rack=self._rack_of(record),
                free_bytes=self.free_bytes.get(record.bookie_id),
                refusal="read-only" if record.read_only else None,
            )
            for record in self.directory.bookies.values()
        ]

    def racks(self) -> dict[BookieId, str]:
        """Return the racks of the registered bookies."""
        return {record.bookie_id: self._rack_of(record) for record in self.directory.bookies.values()}

    def _rack_of(self, record: BookieRecord) -> str:
        if self._racks is None:
            return DEFAULT_RACK
        return self._racks.rack_of(record.bookie_id, address=f"{record.host}:{record.port}")

    def _absent(self, ensemble: Collection[BookieId]) -> dict[BookieId, str]:
        """Return the racks of the members that are not registered."""
        if self._racks is None:
            return {}
        return {b: self._racks.rack_of(b) for b in ensemble if b not in self.directory.bookies}

    def choose_ensemble(self, *, ensemble_size: int, write_quorum: int, ack_quorum: int) -> tuple[BookieId, ...]:
        """Choose bookies for a new ledger. Raises NotEnoughBookies with a reason for each bookie that was refused.

        If there are too few others, quarantined bookies are chosen too, except for unreachable ones.
        """
        return self._without_quarantined(
            lambda exclude: choose_ensemble(
                self.candidates(),
                ensemble_size=ensemble_size,
                write_quorum=write_quorum,
                ack_quorum=ack_quorum,
                rng=self._randomness,
                exclude=exclude,
                rule=self._rule,
            )
        )

    def choose_replacements(
        self,
        ensemble: tuple[BookieId, ...],
        failed: Mapping[int, BookieId],
        *,
        write_quorum: int,
        exclude: Mapping[BookieId, str] | None = None,
    ) -> dict[int, BookieId]:
        """Like `choose_ensemble`, for the members of `ensemble` that failed; never one in `exclude`."""
        never = exclude or {}
        return self._without_quarantined(
            lambda avoided: choose_replacements(
                self.candidates(),
                ensemble=ensemble,
                failed=failed,
                write_quorum=write_quorum,
                rng=self._randomness,
                exclude={**avoided, **never},
                rule=self._rule,
                absent=self._absent(ensemble),
            )
        )

    def choose_move(
        self, ensemble: tuple[BookieId, ...], *, write_quorum: int, exclude: Mapping[BookieId, str] | None = None
    ) -> tuple[int, BookieId] | None:
        """Choose a member and a bookie of another rack that replaces it, so that write quorums are on more racks. None:
        no move does. Bookies in quarantine are never chosen: a move can wait."""
        return choose_move(
            self.candidates(),
            ensemble=ensemble,
            write_quorum=write_quorum,
            rng=self._randomness,
            exclude={**self.quarantined(), **(exclude or {})},
            absent=self._absent(ensemble),
        )

    def _without_quarantined(self, choose: Callable[[Mapping[BookieId, str]], Chosen]) -> Chosen:
        exclude = self.quarantined()
        try:
            return choose(exclude)
        except NotEnoughBookies:
            unreachable = self._unreachable(exclude)
            if len(unreachable) == len(exclude):
                raise
            return choose(unreachable)

    async def revisit(self) -> bool:
        """Connect to quarantined bookies that were unreachable, when there are no spares. Return whether one answers.

        A bookie that restarts within its session timeout gives no other sign that it is available again.
        """
        unreachable = [b for b in self._unreachable(self.quarantined()) if b in self.directory.bookies]
        probes = [
            self._loop.create_task(connection.probe())
            for bookie_id in unreachable
            for connection in self._connections_to(bookie_id)
            if connection.is_unreachable
        ]
        if probes:
            await asyncio.wait(probes, timeout=self.settings.revisit_timeout_s)
        for probe in probes:
            probe.cancel()
        return any(probe.done() and not probe.cancelled() and probe.result() for probe in probes)

    def _unreachable(self, reasons: Mapping[BookieId, str]) -> dict[BookieId, str]:
        return {b: reason for b, reason in reasons.items() if self.is_unreachable(b)}

    async def close(self) -> None:
        """Close all connections; requests in flight fail with BookieUnavailable."""
        self._closed = True
        self._unwatch()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        connections, self._connections = self._connections, {}
        await asyncio.gather(*(connection.close() for connection in connections.values()), *self._closing)
