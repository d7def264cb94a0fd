"""Start, restart and stop the processes of a standalone cluster.

Start order: ZooKeeper, then the metadata of the cluster, then bookies, brokers and auditors. Processes stop in the
reverse order, so that no auditor detects the stopped bookies as lost. One task per process starts it, restarts it after
a pause if it exits, and keeps it down while it is stopped by name.

Invariants: each data directory has at most one supervisor (its lock); when the first process starts, no process of an
earlier supervisor is alive; after `run` has returned, no process is alive.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest
from bindery_kit.process.runtime import Shutdown

from bindery.standalone.control import ControlServer
from bindery.standalone.directory import DataDirectory, ProcessIdentity, StandaloneError, State, is_port_free
from bindery.standalone.plan import ClusterPlan, Kind, ProcessPlan, http_url
from bindery.standalone.process import STOP_TIMEOUT_S, Child, ChildState
from bindery.standalone.secured import ENVIRONMENT

RESTART_PAUSE_S: Final = 1.0
RESTART_PAUSE_S_MAX: Final = 15.0
"""Pauses in seconds before a restart. The pause doubles with each consecutive exit up to the maximum."""
STABLE_S: Final = 30.0
"""Uptime in seconds after which the restart pause is reset."""
PROGRESS_INTERVAL_S: Final = 5.0
"""Interval in seconds between two progress messages during the start."""
HELD_CHECK_INTERVAL_S: Final = 0.5
"""Interval in seconds at which a wait for a process checks whether it was stopped by name or fails to start."""
STARTS_WAITED_FOR: Final = 2
"""Number of failed starts after which `start NAME` reports an error."""
LOG_TAIL_LINES: Final = 5
"""Number of log lines shown for a process that exited."""
LOG_LINE_SIZE_MAX: Final = 2048
"""Maximum characters of a log line in the status. The last line may end with the command that fixes the problem."""
PRINTED_LINE_SIZE_MAX: Final = 300
"""Maximum characters of a log line shown with each restart message."""
LEFTOVER_TIMEOUT_S: Final = 10.0
"""Time in seconds that leftover processes have to end after SIGTERM, and again after SIGKILL."""
CONTROL_TIMEOUT_S: Final = 120.0
"""Time limit in seconds of a request to stop or start one process."""

Say = Callable[[str], None]
InitCluster = Callable[[str], Awaitable[object]]
"""Creates the metadata of the cluster if it does not exist. The argument is the ZooKeeper connect string."""


BOOKIES_NEEDED: Final = 3
"""Number of bookies of a ledger with the default quorums of a broker: E=3 Qw=3 Qa=2."""


class Supervisor:
    """Keep the processes of a plan running. `say` prints one line for the operator."""

    def __init__(
        self,
        plan: ClusterPlan,
        directory: DataDirectory,
        *,
        init_cluster: InitCluster,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._init_cluster = init_cluster
        self._say = say
        self._clock = clock
        self._children = {p.name: Child(p, directory, clock=clock) for p in plan.processes}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._may_start = {p.name: asyncio.Event() for p in plan.processes}
        self._held: set[str] = set()
        self._began = clock()
        self._shutdown = Shutdown()
        self._announced = False

    # -- start and stop of the cluster ---------------------------------------------------------------------------

    async def run(self, shutdown: Shutdown, *, on_ready: Callable[[], None]) -> int:
        """Start all processes, call `on_ready`, restart processes until `shutdown`, stop them. Return the exit code."""
        self._shutdown = shutdown
        await self._clear_leftovers()
        self._check_ports_free()
        self._held = set(self._directory.load_state().held) & set(self._children)
        self._save_state()
        control = ControlServer(self._directory.control_socket, self._answer)
        await control.start()
        starting = asyncio.create_task(self._start_all(on_ready), name="start")
        progress = asyncio.create_task(self._report_progress(), name="progress")
        ended = asyncio.create_task(shutdown.wait(), name="shutdown")
        try:
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and (error := starting.exception()) is not None:
                raise error
            await ended
            return shutdown.exit_code
        finally:
            for task in (starting, progress, ended):
                task.cancel()
            await asyncio.gather(starting, progress, ended, return_exceptions=True)
            await self._stop_all()
            await control.stop()

    async def _start_all(self, on_ready: Callable[[], None]) -> None:
        for name in sorted(self._held):
            again = self._directory.command("start", name)
            self._say(f"{name} stays down, as it was stopped by name: `{again}` brings it back")
        for name in self._idle_data():
            self._say(
                f"{name} has data here and is not started: its copies are unavailable. To start it, increase --bookies"
            )
        self._keep(self._plan.zookeepers)
        await self._wait_ready(self._plan.zookeepers)
        await self._init_cluster(self._plan.zookeeper_servers)
        self._keep((*self._plan.bookies, *self._plan.brokers, *self._plan.auditors))
        await self._wait_ready(self._plan.processes)
        self._say(f"ready after {self._clock() - self._began:.1f} s")
        on_ready()
        self._announced = True

    def _keep(self, plans: Iterable[ProcessPlan]) -> None:
        for plan in plans:
            if plan.name not in self._held:
                self._may_start[plan.name].set()
            self._keepers[plan.name] = asyncio.create_task(self._keep_one(plan.name), name=f"keep:{plan.name}")

    async def _wait_ready(self, plans: Iterable[ProcessPlan]) -> None:
        """Wait until each process is ready or stopped by name."""
        for plan in plans:
            ready = self._children[plan.name].ready
            while plan.name not in self._held and not ready.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ready.wait(), HELD_CHECK_INTERVAL_S)

    # -- one child -----------------------------------------------------------------------------------------------

    async def _keep_one(self, name: str) -> None:
        child, may_start = self._children[name], self._may_start[name]
        backoff = Backoff(RESTART_PAUSE_S, RESTART_PAUSE_S_MAX)
        while True:
            await may_start.wait()
            began, starts = self._clock(), child.starts
            how = await self._run_once(child, may_start)
            if not may_start.is_set():
                child.enter(ChildState.DOWN)
                continue
            if self._clock() - began > STABLE_S:
                backoff.reset()
            pause = backoff.next_delay_s()
            event = f"exited: {how}" if child.starts > starts else how
            self._say(f"{name} {event}; restart in {pause:.0f} s. Its log ends with:")
            lines = [line[:LOG_LINE_SIZE_MAX] for line in child.log_tail(LOG_TAIL_LINES)] or ["(nothing)"]
            for line in lines:
                self._say(f"    {line[:PRINTED_LINE_SIZE_MAX]}")
            self._say(f"    ({self._directory.log_file(name)})")
            child.last_death = [how, *lines]
            child.enter(ChildState.PAUSING)
            await asyncio.sleep(pause)

    async def _run_once(self, child: Child, may_start: asyncio.Event) -> str:
        """Start `child`, wait until it ends, and return how it ended or why it could not be started."""
        try:
            await child.start()
        except OSError as error:
            return f"could not be started: {error}"
        if not may_start.is_set():
            child.terminate()  # it was stopped by name during the start
        self._save_state()
        probing = asyncio.create_task(self._announce_ready(child))
        try:
            code = await child.wait_end()
        finally:
            probing.cancel()
        self._save_state()
        return _describe_exit(code)

    async def _announce_ready(self, child: Child) -> None:
        await child.wait_ready()
        if child.state is ChildState.READY:
            again = "again " if child.starts > 1 else ""
            self._say(
                f"{child.name} is {again}ready ({', '.join(f'{use} on {port}' for use, port in child.plan.ports)})"
            )

    async def _stop_children(self, names: Iterable[str]) -> None:
        """Send SIGTERM to all, SIGKILL to those alive after STOP_TIMEOUT_S, and wait until all have ended."""
        running = [child for name in names if not (child := self._children[name]).gone.is_set()]
        for child in running:
            child.terminate()
        gone = asyncio.gather(*(child.gone.wait() for child in running))
        done, _ = await asyncio.wait({gone}, timeout=STOP_TIMEOUT_S)
        if not done:
            for child in running:
                if not child.gone.is_set():
                    self._say(f"{child.name} did not stop within {STOP_TIMEOUT_S:.0f} s of SIGTERM: killing it")
                    child.kill()
        await gone

    async def _stop_all(self) -> None:
        for may_start in self._may_start.values():
            may_start.clear()
        for plans in ((*self._plan.auditors, *self._plan.brokers), self._plan.bookies, self._plan.zookeepers):
            names = [plan.name for plan in plans if not self._children[plan.name].gone.is_set()]
            if names:
                self._say(f"stopping {', '.join(names)}")
            await self._stop_children(plan.name for plan in plans)
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        self._save_state()
        self._say("all stopped")

    # -- leftovers of an earlier run -----------------------------------------------------------------------------

    async def _clear_leftovers(self) -> None:
        """Stop the processes of a supervisor that was killed.

        Normally they end with their supervisor; this is a safeguard. The pid files are deleted afterwards: this
        supervisor holds the lock of the directory, so no other supervisor has processes there.
        """
        await self._end_leftovers()
        for path in self._directory.run.glob("*.pid"):
            path.unlink(missing_ok=True)

    async def _end_leftovers(self) -> None:
        left = {name: c for name, c in (self._directory.load_state().children or {}).items() if c.is_alive}
        if not left:
            return
        self._say(f"an earlier supervisor was killed and left {', '.join(left)} running: stopping them first")
        for number, limit_s in ((signal.SIGTERM, LEFTOVER_TIMEOUT_S), (signal.SIGKILL, LEFTOVER_TIMEOUT_S)):
            for identity in left.values():
                identity.kill(number)
            deadline = self._clock() + limit_s
            while self._clock() < deadline:
                left = {name: identity for name, identity in left.items() if identity.is_alive}
                if not left:
                    return
                await asyncio.sleep(0.05)
        processes = ", ".join(f"{name} (pid {identity.pid})" for name, identity in left.items())
        raise StandaloneError(
            f"cannot stop processes of an earlier run: {processes} did not end within {LEFTOVER_TIMEOUT_S:.0f} s of "
            "SIGKILL; start again when they have ended"
        )

    def _check_ports_free(self) -> None:
        taken = [
            (process.name, use, port)
            for process in self._plan.processes
            for use, port in process.ports
            if not is_port_free(port)
        ]
        if not taken:
            return
        which = ", ".join(f"{port} (for {name}, {use})" for name, use, port in taken)
        offset = next(
            (
                offset
                for offset in range(self._plan.options.port_offset + 100, 30000, 100)
                if all(is_port_free(p + offset - self._plan.options.port_offset) for p in self._ports())
            ),
            100,
        )
        raise StandaloneError(
            f"in use already by another program: port {which}. Stop that program (`ss -ltnp` shows it; perhaps another "
            f"cluster?), or move all ports of this one: `{self._directory.command('--port-offset', str(offset))}`"
        )

    def _idle_data(self) -> list[str]:
        """Return the bookies that have data here but are not started, because an earlier start had more bookies."""
        names = sorted(path.name for path in self._directory.root.glob(f"{Kind.BOOKIE}-*") if path.is_dir())
        return [name for name in names if name not in self._children]

    def _ports(self) -> list[int]:
        return [port for process in self._plan.processes for _, port in process.ports]

    def _save_state(self) -> None:
        """Write the state file. A failure, such as a full disk, is only reported: the state is also kept in memory."""
        children = {name: child.identity for name, child in self._children.items() if child.identity is not None}
        state = State(supervisor=ProcessIdentity.of(os.getpid()), children=children, held=frozenset(self._held))
        try:
            self._directory.save_state(state)
        except OSError as error:
            self._say(f"cannot record the running processes in {self._directory.run}: {error.strerror or error}")

    # -- progress, status and control requests -------------------------------------------------------------------

    async def _report_progress(self) -> None:
        while not self._announced:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            for name, child in self._children.items():
                if child.state is ChildState.STARTING:
                    self._say(
                        f"{name} is starting for {self._clock() - child.since:.0f} s, waiting for {child.waiting_for}"
                    )
        while True:
            await asyncio.sleep(60)
            for name in self._children:
                self._directory.trim_log(name)

    def status(self) -> dict[str, Any]:
        """Return the status as JSON: `state`, URLs, and for each process its name, state, pid, ports and starts."""
        now = self._clock()
        unready = [
            name
            for name, child in self._children.items()
            if child.state is not ChildState.READY and name not in self._held
        ]
        return {
            "state": "stopping" if self._shutdown.is_set else "starting" if unready else "ready",
            "announced": self._announced,
            "supervisor_pid": os.getpid(),
            "up_s": round(now - self._began, 1),
            "data": str(self._directory.root),
            "port_offset": self._plan.options.port_offset,
            "zookeeper": self._plan.zookeeper_servers,
            "http": self._plan.broker_urls,
            "auditors": self._plan.auditor_urls,
            "processes": [
                {
                    "name": name,
                    "kind": str(child.plan.kind),
                    "state": str(child.state),
                    "held": name in self._held,
                    "pid": child.identity.pid if child.identity else None,
                    "for_s": round(now - child.since, 1),
                    "starts": child.starts,
                    "waiting_for": child.waiting_for if child.state is ChildState.STARTING else None,
                    "last_death": child.last_death,
                    "ports": dict(child.plan.ports),
                    "log": str(self._directory.log_file(name)),
                }
                for name, child in self._children.items()
            ],
        }

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        verb, name = request.get("verb"), request.get("name")
        if verb == "status":
            return self.status()
        if verb == "stop" and name is None:
            self._shutdown.request("stop was requested")
            return {"ok": True}
        if verb not in ("stop", "start") or name not in self._children:
            raise BadRequest(f"no such process: {name}; there are {', '.join(self._children)}")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                if verb == "stop":
                    await self._hold(name)
                else:
                    await self._unhold(name)
                return {"ok": True}
        raise StandaloneError(f"{name} is still {self._children[name].state}; see {self._directory.log_file(name)}")

    async def _hold(self, name: str) -> None:
        self._held.add(name)
        self._may_start[name].clear()
        self._save_state()
        await self._stop_children([name])
        if self._children[name].state is not ChildState.DOWN:
            self._children[name].enter(ChildState.DOWN)
        self._say(f"{name} is down; `{self._directory.command('start', name)}` brings it back")

    async def _unhold(self, name: str) -> None:
        self._held.discard(name)
        self._may_start[name].set()
        self._save_state()
        child = self._children[name]
        before = child.starts
        while not child.ready.is_set():
            if child.state is ChildState.PAUSING and child.starts - before >= STARTS_WAITED_FOR:
                log_tail = "\n    ".join(child.log_tail(LOG_TAIL_LINES) or ["(nothing)"])
                raise StandaloneError(
                    f"{name} cannot start and is restarted repeatedly; `{self._directory.command('stop', name)}` "
                    f"stops it. Its log ends with:\n    {log_tail}\n    ({self._directory.log_file(name)})"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.ready.wait(), HELD_CHECK_INTERVAL_S)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def first_steps(url: str, *, options: str = "") -> list[str]:
    """Return three shell commands: send a message, receive it, and acknowledge it by the id in the first response.

    `options`: of curl, as a secure cluster needs them.
    """
    curl = f"curl -s {options}".rstrip()
    topic = f"{url}/v1/topics/public/default/hello"
    as_json = "-H 'Content-Type: application/json'"
    return [
        f"{curl} {topic}/messages -d 'hello, world' | tee /tmp/hello.json",
        f"""{curl} {topic}/subscriptions/me/receive {as_json} -d '{{"consumer": "c1", "initial": "earliest"}}'""",
        f"{curl} {topic}/subscriptions/me/ack {as_json} -d @/tmp/hello.json",
    ]


def welcome(plan: ClusterPlan, directory: DataDirectory) -> list[str]:
    """Return the lines to print when the cluster is ready."""
    lines = ["", f"  data and logs    {directory.root}", f"  ZooKeeper        {plan.zookeeper_servers}"]
    lines += [f"  HTTP API         {url}   (described at {url}/docs)" for url in plan.broker_urls]
    lines += [f"  {bookie.name:<16} {http_url(bookie)}/metrics" for bookie in plan.bookies]
    lines += [f"  {auditor.name:<16} {http_url(auditor)}/" for auditor in plan.auditors]
    if plan.options.zookeeper is None and len(plan.bookies) < BOOKIES_NEEDED:
        lines += ["", f"No topic can be written with fewer than {BOOKIES_NEEDED} bookies: --bookies {BOOKIES_NEEDED}"]
    elif plan.broker_urls:
        lines += ["", "Try it, in another terminal: send, receive, acknowledge"]
        options = "" if plan.secured is None else plan.secured.curl_options()
        lines += ["", *(f"  {line}" for line in first_steps(plan.broker_urls[0], options=options))]
    if plan.secured is not None:
        lines += [
            "",
            "All ports have TLS and need a token. For `bindery` commands in another terminal:",
            "",
            f"  . {shlex.quote(plan.secured.file(ENVIRONMENT))}",
        ]
    return [*lines, "", "Ctrl-C stops everything; a later start finds all data again.", ""]
