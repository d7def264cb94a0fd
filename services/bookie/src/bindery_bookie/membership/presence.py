"""Presence: keep the bookie's registration and its state consistent.

| ZooKeeper session | registered | adds      | reads  |
|-------------------|------------|-----------|--------|
| CONNECTED         | yes        | accepted  | served |
| SUSPENDED         | yes        | accepted  | served |
| LOST              | no         | READ_ONLY | served |
| new session       | yes, again | accepted  | served |

Adds are refused after LOST because an unregistered bookie counts as down, and its ledgers are re-replicated elsewhere:
a writer that is refused replaces the bookie at once, while a writer that runs into its timeout stalls. Accepting the
adds would be safe, but they would be stored on a bookie that is about to be replaced.

A bookie that is read-only for another reason (disk, journal, operator) moves to `available/readonly`.
"""

import asyncio
from typing import Protocol

from bindery_core.errors import BinderyError
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger

from bindery_bookie.state import READ_ONLY_SESSION, BookieState

log = get_logger(__name__)


class Registration(Protocol):
    """The part of `bindery_metadata.bookies.registration.BookieRegistration` that is used here."""

    async def set_read_only(self, read_only: bool) -> None: ...


class Presence:
    """`registration_changed` is the registration's listener. Call `run` as a task."""

    def __init__(self, registration: Registration, state: BookieState, health: Health) -> None:
        self._registration = registration
        self._state = state
        self._health = health
        self._state_changed = asyncio.Event()
        state.on_change(self._state_changed.set)

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
        """Move the registration between the writable and the read-only list with the state, until cancelled."""
        while True:
            await self._state_changed.wait()
            self._state_changed.clear()
            read_only = self._state.has_reason_besides(READ_ONLY_SESSION)
            try:
                await self._registration.set_read_only(read_only)
            except BinderyError as error:
                # The registration repeats the change when ZooKeeper answers again.
                log.warning("read_only_not_announced", read_only=read_only, **error_fields(error))
