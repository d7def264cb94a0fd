"""Run the parts of a process that must never end, restart those that fail, and end the process if one fails too often.

A part is a coroutine function that must not return. If it returns or raises, it has failed. A CancelledError also
counts as a failure, unless the part's own task was cancelled. A failed part is started again after a pause that doubles
with each failure within `window_s`. If it fails `deaths_max` times within `window_s`, all parts are cancelled and the
process is requested to end, with the reason. A supervisor can then start the process again; a process with only some of
its parts running could not be recognized as faulty from outside.

    watcher = DeathWatcher(ask_exit=...)
    watcher.add("auditor", election_loop)
    await watcher.run()

BookKeeper stops all of auto-recovery at the first failure of a part.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from bindery_core.backoff import Backoff
from bindery_kit.observability.logs import get_logger

DEATHS_MAX: Final = 5
"""Number of failures of a part within WINDOW_S after which the process is requested to end."""
WINDOW_S: Final = 300.0
"""Time in seconds over which failures are counted."""
PAUSE_S: Final = 1.0
"""First delay in seconds before a failed part is restarted."""
PAUSE_MAX_S: Final = 30.0
"""Maximum delay in seconds before a failed part is restarted."""

Part = Callable[[], Awaitable[None]]

log = get_logger(__name__)


@dataclass(slots=True)
class PartState:
    """State of a part, for health and metrics."""

    name: str
    is_running: bool = False
    deaths: int = 0
    """Failures since the process started."""
    last_error: str = ""
    died_at: deque[float] = field(default_factory=deque)
    """Loop times of the failures within the window."""


class DeathWatcher:
    """Runs the parts. `ask_exit(reason)` is called once, in the event loop, when a part fails too often."""

    def __init__(
        self,
        *,
        ask_exit: Callable[[str], None],
        deaths_max: int = DEATHS_MAX,
        window_s: float = WINDOW_S,
        pause_s: float = PAUSE_S,
        pause_max_s: float = PAUSE_MAX_S,
    ) -> None:
        assert deaths_max >= 1
        assert window_s > 0
        self._ask_exit = ask_exit
        self._deaths_max = deaths_max
        self._window_s = window_s
        self._backoff = Backoff(pause_s, pause_max_s)
        self._parts: dict[str, Part] = {}
        self._given_up = False
        self.states: dict[str, PartState] = {}

    def add(self, name: str, part: Part) -> None:
        """Add a part; call this before `run`. `part` is called for each start."""
        assert name not in self._parts
        self._parts[name] = part
        self.states[name] = PartState(name)

    @property
    def dead(self) -> list[str]:
        """Parts that are not running although `run` has started: they wait for a restart, or failed too often."""
        return sorted(name for name, state in self.states.items() if not state.is_running)

    async def run(self) -> None:
        """Run all parts until cancelled, or until one has failed too often. All parts have ended when this call ends.
        If it was not cancelled, `ask_exit` has been called."""
        keepers = [
            asyncio.create_task(self._keep(name, part), name=f"keep-{name}") for name, part in self._parts.items()
        ]
        try:
            if keepers:
                ended, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
                self._give_up(f"{', '.join(sorted(keeper.get_name() for keeper in ended))} ended")
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def _keep(self, name: str, part: Part) -> None:
        """Run one part and restart it. Returns when it has failed too often."""
        loop = asyncio.get_running_loop()
        state = self.states[name]
        while True:
            state.is_running = True
            try:
                await part()
                error = "it returned"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                error = "a task that it awaited was cancelled"
                log.warning("part_died", part=name, error=error, exc_info=True)
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
                log.exception("part_died", part=name)
            finally:
                state.is_running = False
            now = loop.time()
            state.deaths += 1
            state.last_error = error
            while state.died_at and state.died_at[0] <= now - self._window_s:
                state.died_at.popleft()
            state.died_at.append(now)
            if len(state.died_at) >= self._deaths_max:
                times = f"{len(state.died_at)} times within {self._window_s:g} s"
                self._give_up(f"{name} failed {times}, the last time because: {error}")
                return
            pause_s = self._backoff.delay_s(len(state.died_at))
            log.warning("part_will_be_restarted", part=name, error=error, deaths=state.deaths, pause_s=pause_s)
            await asyncio.sleep(pause_s)

    def _give_up(self, reason: str) -> None:
        if self._given_up:
            return
        self._given_up = True
        log.error("process_gives_up", reason=reason)
        self._ask_exit(reason)
