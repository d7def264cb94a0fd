"""DeathWatcher: sees to it that the parts of a process that should run for ever do, or that the process ends.

A part is a coroutine function that is not meant to return. When it returns or raises it has died, also of a
CancelledError although nobody cancelled it (something that it waited for was): it is started again after a pause that
doubles with every death within `window_s`. Death number `deaths_max` within `window_s` is one too many: every part is
cancelled, and the process is asked to end, with the reason. Whoever started it can start it afresh; half a process that
looks alive cannot be seen from outside.

    watcher = DeathWatcher(ask_exit=...)
    watcher.add("auditor", election_loop)
    await watcher.run()

BookKeeper's stops the whole of auto-recovery at the first death of a part.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from bindery_kit.observability.logs import get_logger

DEATHS_MAX: Final = 5
WINDOW_S: Final = 300.0
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 30.0

Part = Callable[[], Awaitable[None]]

log = get_logger(__name__)


@dataclass(slots=True)
class PartState:
    """For health and metrics."""

    name: str
    is_running: bool = False
    deaths: int = 0
    """Since the start."""
    last_error: str = ""
    died_at: deque[float] = field(default_factory=deque)
    """Loop times within the window."""


class DeathWatcher:
    """Runs parts. `ask_exit(reason)` is called once, in the loop, when one of them dies too often."""

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
        assert 0 < pause_s <= pause_max_s
        assert window_s > 0
        self._ask_exit = ask_exit
        self._deaths_max = deaths_max
        self._window_s = window_s
        self._pause_s = pause_s
        self._pause_max_s = pause_max_s
        self._parts: dict[str, Part] = {}
        self._given_up = False
        self.states: dict[str, PartState] = {}

    def add(self, name: str, part: Part) -> None:
        """Before `run`. A part is called again for each start."""
        assert name not in self._parts
        self._parts[name] = part
        self.states[name] = PartState(name)

    @property
    def dead(self) -> list[str]:
        """Parts that do not run now, once `run` has begun: they wait for their next start, or were given up."""
        return sorted(name for name, state in self.states.items() if not state.is_running)

    async def run(self) -> None:
        """Until cancelled, or until a part has died too often. Parts end with it, and never without `ask_exit` being
        called, unless `run` was cancelled."""
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
        """Returns when the part has died too often."""
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
                error = "what it waited for was cancelled"
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
                self._give_up(f"{name} died {times}, the last time because: {error}")
                return
            pause_s = min(self._pause_max_s, self._pause_s * 2.0 ** (len(state.died_at) - 1))
            log.warning("part_will_be_restarted", part=name, error=error, deaths=state.deaths, pause_s=pause_s)
            await asyncio.sleep(pause_s)

    def _give_up(self, reason: str) -> None:
        if self._given_up:
            return
        self._given_up = True
        log.error("process_gives_up", reason=reason)
        self._ask_exit(reason)
