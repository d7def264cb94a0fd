"""The broker of a cluster of local processes: where it answers, and how it is killed and started again."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from bindery.standalone.control import ask
from bindery.standalone.throwaway import ThrowawayCluster

from bindery_e2e.traffic.clients import TrafficError

BOOKIES: Final = 3
CHANGE_TIMEOUT_S: Final = 60.0
"""Maximum seconds until the supervisor has stopped a process, or has begun to start it."""
POLL_S: Final = 0.01


@contextlib.contextmanager
def broker_at(url: str | None) -> Iterator[str]:
    """The URL of a broker. `url`: of one that runs already; None: of a temporary cluster."""
    if url is not None:
        yield url
        return
    with ThrowawayCluster(bookies=BOOKIES) as cluster:
        yield cluster.url


class LocalBroker:
    """Kills the broker of a cluster, and lets the supervisor start it again.

    The supervisor waits for up to 15 s before it restarts a process that exits often. So it is told to keep the process
    stopped before the process is killed, and to start it afterwards, which it does at once. From its SIGTERM, the
    process gets nothing: it is stopped with SIGSTOP at the moment of the kill, and continues never.
    """

    def __init__(self, cluster: ThrowawayCluster, name: str = "broker-0") -> None:
        self.name = name
        self._cluster = cluster

    @property
    def pid(self) -> int:
        """Raises FileNotFoundError if the process is down."""
        return self._cluster.pid(self.name)

    async def kill(self) -> None:
        """End the process with SIGKILL. Waits for a process that is about to be started. Raises TrafficError."""
        pid = await self._until(lambda: self._stopped_pid(), "the process has started")
        holding = asyncio.create_task(self._ask("stop"))
        await self._until(lambda: self._is_held or holding.done(), "the supervisor keeps it stopped")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await holding

    async def start(self) -> None:
        """Let the supervisor start the process; return when it has begun to. Raises TrafficError."""
        starting = asyncio.create_task(self._ask("start"))
        await self._until(lambda: not self._is_held or starting.done(), "the supervisor starts it")
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _stopped_pid(self) -> int | None:
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            pid = self.pid
            os.kill(pid, signal.SIGSTOP)
            return pid
        return None

    @property
    def _is_held(self) -> bool:
        status = self._cluster.status()
        processes = [] if status is None else status["processes"]
        return any(process["held"] for process in processes if process["name"] == self.name)

    async def _ask(self, verb: str) -> None:
        request = {"verb": verb, "name": self.name}
        socket = self._cluster.directory.control_socket
        answer = await asyncio.to_thread(ask, socket, request, timeout_s=CHANGE_TIMEOUT_S)
        if answer is None or "error" in answer:
            raise TrafficError(f"the supervisor did not {verb} {self.name}: {answer}")

    async def _until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        while not (found := await asyncio.to_thread(condition)):
            if time.monotonic() > deadline:
                raise TrafficError(f"{self.name}: timeout while waiting until {what}\n{self._cluster.output()}")
            await asyncio.sleep(POLL_S)
        return found
