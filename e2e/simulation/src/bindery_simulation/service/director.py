"""Direct a run of a simulated cluster: wait for conditions within limits, collect unexpected errors, undo the power.

`World` and `topics.world` decide what happens in a run; this module has what their runs share.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final

import structlog
from bindery_core.errors import BinderyError

from bindery_simulation.loop import Process, Stuck, current_process
from bindery_simulation.service.cluster import Cluster
from bindery_simulation.service.faults import Fault
from bindery_simulation.service.healing.plan import HealingPlan
from bindery_simulation.service.worker import PowerLost
from bindery_simulation.trace import Trace

START_S_MAX: Final = 30.0
"""Maximum time in seconds from the start of a bookie until it serves, including the timeout of its former session."""
AUDIT_S_MAX: Final = 60.0
"""Maximum time in seconds until a ledger is closed and read, or a new ledger is written, after all faults."""
EXPECTED: Final = (BinderyError, OSError, PowerLost)
"""Exceptions with which a task may end. OSError includes TimeoutError."""


class Director(Cluster):
    """One run of a cluster."""

    def __init__(self, seed: int, *, trace: Trace, healing: HealingPlan | None, caught: Sequence[str]) -> None:
        """`caught`: list to which exceptions that the product logs are added, see `quiet`."""
        super().__init__(seed, trace=trace, healing=healing)
        self.seed = seed
        self.loop.on_exception = self._unexpected
        self._caught = caught
        self.faults: list[str] = []

    def play(self, *, time_max: float, callbacks_max: int) -> None:
        """Run until `_direct` ends, an invariant is violated, or a limit is exceeded; then check all tasks."""
        director = Process(self.loop, "director").spawn(self._direct())
        try:
            self.loop.run_until(
                lambda: director.done() or self.verdict.violation is not None,
                time_max=time_max,
                callbacks_max=callbacks_max,
            )
        except Stuck as stuck:
            self.verdict.broken("liveness", str(stuck))
        self._check_tasks()

    async def _direct(self) -> None:
        raise NotImplementedError

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _all_serve(self) -> bool:
        return all(bookie.is_serving or bookie.is_lost for bookie in self.bookies)

    async def _within(self, limit_s: float, condition: Callable[[], bool], complaint: str) -> None:
        deadline = self.loop.time() + limit_s
        await self._poll(lambda: condition() or self.loop.time() > deadline)
        self.verdict.check(condition(), "liveness", f"{complaint} within {limit_s} s")

    async def _poll(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds."""
        while not condition():
            await asyncio.sleep(0.1)

    async def _repeat(self, attempt: Callable[[], Any], complaint: str) -> None:
        deadline = self.loop.time() + AUDIT_S_MAX
        while not await attempt():
            if self.loop.time() > deadline:
                self.verdict.broken("liveness", f"{complaint} within {AUDIT_S_MAX} s")
                return
            await asyncio.sleep(0.5)

    def _inject(self, fault: Fault) -> None:
        if not self.is_healing:
            self.faults.append(fault.__name__)
            self.trace.add("FAULT", fault.__name__)
            fault(self)

    async def _cut_all_power(self) -> None:
        self.trace.add("FAULT", "the power goes everywhere")
        for bookie in self.bookies:
            bookie.kill(power=True)
        for bookie in self.bookies:
            bookie.start()
        await self._within(START_S_MAX, self._all_serve, "after a power cut, not every bookie serves")

    # --- checks -----------------------------------------------------------------------------------------------------

    def _unexpected(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, PowerLost):
            self.verdict.broken("no-crash", f"{context.get('message')}: {error!r}")

    def _check_tasks(self) -> None:
        for one in self._caught:
            self.verdict.broken("no-crash", f"the product logged an unexpected exception: {one}")
        for task in self.loop.tasks:
            if task.done() and not task.cancelled():
                error = task.exception()
                if error is not None and not isinstance(error, EXPECTED):
                    name = getattr(task.get_coro(), "__qualname__", "?")
                    self.verdict.broken("no-crash", f"{name} ended with {error!r}")


@contextlib.contextmanager
def quiet(trace: Trace) -> Iterator[list[str]]:
    """Add the log lines of the product to the trace, if the trace is on.

    Yield the list of exceptions that the product logged: it handled them, but did not expect them.
    """
    caught: list[str] = []

    def keep(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        process = current_process()
        what = str(event.pop("event", ""))
        event.pop("module", None)
        if method == "exception":
            caught.append(f"{what} at {process.host if process else '-'}: {sys.exc_info()[1]!r}")
            event.pop("exc_info", None)
        trace.add(process.host if process else "-", f"{method} {what}", **event)
        raise structlog.DropEvent

    before, disabled = structlog.get_config(), logging.root.manager.disable
    level = logging.INFO if trace.is_on else logging.ERROR
    structlog.configure(
        processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(level), cache_logger_on_first_use=False
    )
    logging.disable(logging.CRITICAL)
    try:
        yield caught
    finally:
        structlog.configure(**before)
        logging.disable(disabled)
