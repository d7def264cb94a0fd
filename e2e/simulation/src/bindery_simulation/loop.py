"""An asyncio event loop with simulated time, which advances only when no callback is ready.

Ready callbacks run in the order in which they were scheduled. Timers run in the order of their time, and timers of
equal time in the order in which they were scheduled. The clock jumps to the next timer. Sockets, threads and signals
raise NotImplementedError; the `Network` provides connections.

Each callback belongs to the `Process` that scheduled it. The callback's context contains the process, so that tasks and
futures keep their process even if another process wakes them. A killed process loses all its callbacks at once, and no
finally block runs. The callbacks of a paused process run, in order, when it resumes.

Invariants: time never decreases; a callback of a killed process never runs; tasks are kept until `dispose`, so that
garbage collection does not determine when a finally block runs.
"""

import asyncio
import contextlib
import heapq
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_process: ContextVar["Process | None"] = ContextVar("bindery_simulation_process", default=None)


class Stuck(AssertionError):
    """Raised when simulated time or the number of callbacks exceeds its limit, or when nothing is left to run."""


class Process:
    """Callbacks that are killed and paused together. A restart on the same host is a new process."""

    def __init__(self, loop: "SimLoop", host: str) -> None:
        self.host = host
        self.is_alive = True
        self.is_paused = False
        self.deferred: list[SimHandle] = []
        self._loop = loop
        self.context = copy_context()
        self.context.run(_process.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        return self.context.copy().run(self._loop.create_task, work)

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        self._loop.call_soon(callback, *args, context=self.context)

    def kill(self) -> None:
        """End the process at once, like SIGKILL."""
        self.is_alive = False
        self.deferred.clear()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            deferred, self.deferred = self.deferred, []
            self._loop.run_deferred(deferred)


def current_process() -> Process | None:
    """Return the process of the running callback; None: it belongs to no process."""
    return _process.get()


class SimHandle:
    """A scheduled callback, like Handle and TimerHandle of asyncio."""

    __slots__ = ("_args", "_callback", "_context", "_is_cancelled", "_when")

    def __init__(self, when: float, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self._when = when
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = context
        self._is_cancelled = False

    def cancel(self) -> None:
        self._is_cancelled = True
        self._callback = None
        self._args = ()

    def cancelled(self) -> bool:
        return self._is_cancelled

    def when(self) -> float:
        return self._when


class SimTask(asyncio.Task[Any]):
    """A Task whose order in a set does not depend on its address."""

    _number = 0

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimLoop(asyncio.AbstractEventLoop):
    """The loop. `network` serves create_server and create_connection, and must be set before their first call."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._ready: deque[SimHandle] = deque()
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._tasks: list[SimTask] = []
        self._is_disposed = False
        self.network: Any = None
        self.on_advance: Callable[[float], None] = lambda now: None
        self.on_exception: Callable[[dict[str, Any]], None] = lambda context: None
        self.callbacks_run = 0

    # --- running ----------------------------------------------------------------------------------------------------

    def run_until(self, is_done: Callable[[], bool], *, time_max: float, callbacks_max: int) -> None:
        """Run until `is_done()`. Raises Stuck if no callback is left or a limit is exceeded before.

        `time_max`: simulated seconds. `callbacks_max`: number of callbacks since the loop was created.
        """
        ready, timers = self._ready, self._timers
        events._set_running_loop(self)
        try:
            while not is_done():
                if not ready and not self._advance(time_max):
                    why = "the time limit is reached" if timers else "no callback is left"
                    raise Stuck(f"not done at {self._now:.3f} s: {why}")
                if self.callbacks_run > callbacks_max:
                    raise Stuck(f"not done after {callbacks_max} callbacks, at {self._now:.3f} s")
                for _ in range(len(ready)):
                    self._run(ready.popleft())
        finally:
            events._set_running_loop(None)

    def _run(self, handle: SimHandle) -> None:
        callback = handle._callback
        if callback is None:
            return
        process = handle._context.get(_process)
        if process is not None:
            if not process.is_alive:
                return
            if process.is_paused:
                process.deferred.append(handle)
                return
        self.callbacks_run += 1
        try:
            handle._context.run(callback, *handle._args)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            name = getattr(callback, "__qualname__", type(callback).__name__)
            self.call_exception_handler({"message": f"exception in {name}", "exception": error})

    def _advance(self, time_max: float) -> bool:
        timers = self._timers
        while timers and timers[0][2]._is_cancelled:
            heapq.heappop(timers)
        if not timers or timers[0][0] > time_max:
            return False
        self._now = now = max(self._now, timers[0][0])
        self.on_advance(now)
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle._is_cancelled:
                self._ready.append(handle)
        return True

    def run_deferred(self, handles: list[SimHandle]) -> None:
        """Run deferred callbacks now, in their order."""
        self._ready.extend(handles)

    def dispose(self) -> None:
        """Close unfinished coroutines and drop all callbacks. Callbacks that are scheduled meanwhile do not run."""
        self._is_disposed = True
        self._ready.clear()
        self._timers.clear()
        events._set_running_loop(self)
        # A coroutine that waits again while it is closed would report an unraisable error.
        before, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]
                    with contextlib.suppress(BaseException):
                        task.get_coro().close()
                else:
                    task._log_traceback = False
        finally:
            sys.unraisablehook = before
            events._set_running_loop(None)
        self._tasks.clear()
        self.network = None

    @property
    def tasks(self) -> list[SimTask]:
        """All tasks created so far, including finished ones."""
        return self._tasks

    # --- asyncio.AbstractEventLoop ----------------------------------------------------------------------------------

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(self._now, callback, args, copy_context() if context is None else context)
        if not self._is_disposed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> SimHandle:
        if context is None:
            place = getattr(getattr(callback, "__self__", None), "simulated_context", None)
            context = copy_context() if place is None else place(callback)
        handle = SimHandle(when, callback, args, context)
        if not self._is_disposed:
            self._count += 1
            heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], *, name: str | None = None, context: Any = None
    ) -> "asyncio.Task[T]":
        task = SimTask.__new__(SimTask)
        task._number = len(self._tasks) + 1
        SimTask.__init__(task, coro, loop=self, name=name or f"task-{task._number}", context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Run late imports (`bindery_kit.process.late_imports`) at once. Raises NotImplementedError for the rest."""
        if not getattr(func, "__name__", "").startswith("import_"):
            raise NotImplementedError
        done: asyncio.Future[T] = asyncio.Future(loop=self)
        done.set_result(func(*args))
        return done

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._is_disposed

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.on_exception(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_disposed:
            self.on_exception(context)

    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **kwargs: Any) -> Any:
        return self.network.listen(protocol_factory, sock)

    async def create_connection(
        self, protocol_factory: Any, host: str | None = None, port: int | None = None, **kwargs: Any
    ) -> Any:
        return await self.network.connect(protocol_factory, host, port)
