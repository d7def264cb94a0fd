"""Presence: keeps what the cluster sees of this bookie and what the bookie does in step.

| ZooKeeper session | node stands | adds        | reads  |
|-------------------|-------------|-------------|--------|
| CONNECTED         | yes         | taken       | served |
| SUSPENDED         | yes         | taken       | served |
| LOST              | no          | READ_ONLY   | served |
| new one           | yes, again  | taken       | served |

Why READ_ONLY after LOST: without its node the bookie counts as dead, and its ledgers are being healed elsewhere; a
writer that is refused moves to another bookie at once, while one that is left to time out stalls. Nothing unsafe would
come of taking the adds; they would only land on a bookie that is about to be replaced.

A bookie that is read-only for a reason of its own (disk, journal, operator) moves to `available/readonly`.
"""

import asyncio
from typing import Protocol

from bindery_core.errors import BinderyError
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger

from bindery_bookie.state import READ_ONLY_SESSION, BookieState

log = get_logger(__name__)


class Registration(Protocol):
    """What is needed of bindery_metadata.bookies.registration.BookieRegistration."""

    async def set_read_only(self, read_only: bool) -> None: ...


class Presence:
    """`registration_changed` is the registration's listener; `run` belongs to a task."""

    def __init__(self, registration: Registration, state: BookieState, health: Health) -> None:
        self._registration = registration
        self._state = state
        self._health = health
        self._look_again = asyncio.Event()
        state.on_change(self._look_again.set)

    def registration_changed(self, registered: bool) -> None:
        self._state.registered = registered
        if registered:
            log.info("bookie_registered")
            self._state.set_read_only(READ_ONLY_SESSION, None)
            self._health.clear("metadata")
        elif not self._state.shutting_down:
            log.warning("bookie_not_registered")
            self._state.set_read_only(READ_ONLY_SESSION, "the ZooKeeper session was lost")
            self._health.block("metadata", "the ZooKeeper session was lost; registering again")

    async def run(self) -> None:
        """Move between the lists as the state says, until cancelled."""
        while True:
            await self._look_again.wait()
            self._look_again.clear()
            read_only = self._state.has_reason_besides(READ_ONLY_SESSION)
            try:
                await self._registration.set_read_only(read_only)
            except BinderyError as error:
                # The registration keeps the wish and carries it out when ZooKeeper answers again.
                log.warning("read_only_not_announced", read_only=read_only, **error_fields(error))
