"""A host of a simulated cluster, and the process that runs on it.

A process can be killed, paused, lose power, and be started again. After a kill, all written data is kept, even if it
was not synced. After a power cut, a random part of the unsynced data is kept.
"""

import random
from collections.abc import Callable
from typing import Any, Final

from bindery_client.client import LedgerClient
from bindery_core.errors import BinderyError

from bindery_simulation.loop import Process
from bindery_simulation.service.metadata_tree import SimStore
from bindery_simulation.service.settings import SESSION_TIMEOUT_S
from bindery_simulation.service.site import Site

RESTART_S: Final = 1.0
"""Time in seconds after which the machine restarts a process that ended by itself."""
WALL_CLOCK_START_MS: Final = 1_800_000_000_000
"""Time of an exact wall clock at the start of a run, in ms since 1970."""


class Machine:
    """A host. Invariants: it has at most one process, and none while the power is off."""

    def __init__(self, site: Site, name: str) -> None:
        self.site = site
        self.name = name
        self.rng = random.Random(site.rng.getrandbits(64))
        self.process: Process | None = None
        self.session: SimStore | None = None
        self.is_wanted = True
        """Whether the machine restarts a process that ended by itself."""
        self.clock_ahead_ms = self.rng.randint(-60_000, 60_000)
        """Error of the machine's wall clock in ms."""

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def start(self) -> None:
        if self.process is not None:
            return
        self.site.network.power_on(self.name)
        self.process = Process(self.site.loop, self.name)
        self.site.trace.add(self.name, "starts")
        self.process.spawn(self._life(self.process))

    def kill(self, *, power: bool = False) -> None:
        """Kill the process with SIGKILL, or by a power cut if `power`."""
        if self.process is None:
            return
        self.site.trace.add(self.name, "loses power" if power else "is killed")
        process, self.process = self.process, None
        process.kill()
        if power:
            self.site.network.power_off(self.name)
            self.after_power_cut()
        self.site.network.process_killed(process)
        self.site.later(SESSION_TIMEOUT_S, self.site.tree.end, process)

    def after_power_cut(self) -> None:
        """Apply a power cut to the disk."""

    def pause(self) -> None:
        if self.process is not None and not self.process.is_paused:
            self.site.trace.add(self.name, "is paused")
            self.process.pause()
            if self.session is not None:
                self.site.later(SESSION_TIMEOUT_S, self._time_out, self.process, self.session)

    def resume(self) -> None:
        if self.process is not None and self.process.is_paused:
            self.site.trace.add(self.name, "goes on")
            if self.session is not None:
                self.process.call_soon(self.site.tree.catch_up, self.session)
            self.process.resume()

    def _time_out(self, process: Process, session: SimStore) -> None:
        if process is self.process and process.is_paused:
            self.site.tree.time_out(session)

    def ended(self, process: Process, why: str) -> None:
        """Record that the process ended by itself."""
        if self.process is process:
            self.site.trace.add(self.name, "ended", why=why)
            self.kill()
            if self.is_wanted:
                self.site.later(RESTART_S, self.start)

    def wall_clock_ms(self) -> int:
        return WALL_CLOCK_START_MS + self.clock_ahead_ms + int(self.site.loop.time() * 1000)

    async def _life(self, process: Process) -> None:
        raise NotImplementedError


class ClientMachine(Machine):
    """A machine whose processes run `work(client, machine)`. Each process starts the work again."""

    def __init__(self, site: Site, name: str, work: Callable[[LedgerClient, "ClientMachine"], Any]) -> None:
        super().__init__(site, name)
        self._work = work
        self.is_finished = False

    async def _life(self, process: Process) -> None:
        self.is_finished = False
        session = self.session = self.site.tree.open_session(process)
        try:
            client = await LedgerClient.connect(
                session, randomness=self.rng, layout=self.site.layout, settings=self.site.client_settings
            )
        except BinderyError as error:
            self.ended(process, repr(error))
            return
        await self._work(client, self)
        self.is_finished = True
