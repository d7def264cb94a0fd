"""Play a run: continuous traffic, faults step by step, and a final check of the whole cluster.

If a fault fails, the failure is a finding, the fault is undone, and no further fault is injected. The final check
follows as usual, so that everything recorded so far is judged. After any other error and after Ctrl-C, injected faults
are undone, and the history is judged and reported, too.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from bindery_e2e.cluster.cluster import ClusterError
from bindery_e2e.cluster.endpoint import BrokerEndpoint
from bindery_e2e.cluster.release import ROOT
from bindery_e2e.cluster.world import Compared, World
from bindery_e2e.faults.faults import Fault
from bindery_e2e.judging.history import Fault as Recorded
from bindery_e2e.judging.history import History
from bindery_e2e.traffic.traffic import Traffic, TrafficSettings, find_files

T = TypeVar("T")

WARM_UP: Final = 200
"""Messages that must be acknowledged before the first fault, and again after the last."""
WARM_UP_S: Final = 60.0
"""Maximum seconds until these messages are acknowledged."""
CHOOSE_S: Final = 120.0
"""Maximum seconds until a fault has found a target."""
FINAL_S: Final = 180.0
"""Maximum seconds until no ledger is under-replicated, and until consumers have drained their subscriptions."""
SETTLE_S: Final = 120.0
"""Maximum seconds until all replicas agree. Several times the age at which the releases under test close a ledger."""
READ_RATE: Final = 500.0
"""Minimum rate of the last reading in messages per second; the messages of an hour take minutes to read."""
UNDO_S: Final = 60.0
"""Maximum seconds for which a cancelled run waits for a blocking call to end."""
REASON_LENGTH_MAX: Final = 2000
"""Maximum characters of a failure's reason in the history."""

Step = Sequence[Fault]
"""Faults that overlap, or a single fault."""


@dataclass
class RunSettings:
    folder: Path
    """Folder for history.jsonl, report.html, summary.json and, after a failure, the logs of the pods."""
    seed: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts needed to repeat the run, for the history's first line."""
    seconds: float | None = None
    """Seconds after which no step begins; None: no limit."""
    seconds_min: float = 0.0
    """Minimum duration of the traffic in seconds."""
    traffic: TrafficSettings = field(default_factory=TrafficSettings)
    data: Sequence[Path] = ()
    """Files and folders whose contents are the payloads; empty: this repository."""


class Run:
    """A single run. Await `play` once; `failures` then lists the failures of the run itself.

    The history has the observations from which findings are derived.
    """

    def __init__(self, world: World, settings: RunSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.world = world
        self.settings = settings
        self.failures: list[str] = []
        self.history_path = settings.folder / "history.jsonl"
        self._clock = clock
        self._began = clock()
        self._under_way: list[Fault] = []

    async def play(self, steps: Iterable[Step]) -> None:
        """Play the steps. Only CancelledError and other exits are raised; failures go to `failures` and the history."""
        settings = self.settings
        settings.folder.mkdir(parents=True, exist_ok=True)
        endpoint = BrokerEndpoint(self.world.cluster)
        files = find_files(settings.data or (ROOT,))
        with History(self.history_path, facts={"seed": settings.seed, **settings.facts}) as history:
            try:
                async with Traffic(history, endpoint, files=files, settings=settings.traffic) as traffic:
                    await self._tried(history, self._play(history, traffic, steps))
                    await self._undo(history)
                    await self._end(history, traffic)
            except asyncio.CancelledError:
                self._incomplete(history, "stopped by hand")
                raise
            except Exception as error:
                await self._failed(history, f"{type(error).__name__}: {error}")
            finally:
                await self._undo(history)
                endpoint.close()

    async def _play(self, history: History, traffic: Traffic, steps: Iterable[Step]) -> None:
        await traffic.wait_acknowledged(WARM_UP, timeout_s=WARM_UP_S)
        self._say(f"traffic runs: {traffic.counts.acknowledged} messages acknowledged")
        self._began = self._clock()
        for step in steps:
            if self.settings.seconds is not None and self._clock() - self._began >= self.settings.seconds:
                return
            outcomes = await asyncio.gather(
                *(self._fault(history, traffic, fault) for fault in step), return_exceptions=True
            )
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
        await asyncio.sleep(self.settings.seconds_min - (self._clock() - self._began))

    async def _fault(self, history: History, traffic: Traffic, fault: Fault) -> None:
        world = self.world
        try:
            why = await self._thread(lambda: fault.precondition(world))
            if not why:
                await self._until(lambda: _chosen(fault, world), "a target", CHOOSE_S)
        except Exception:
            with history.fault(fault.name, ""):
                raise
        if why:
            with history.fault(fault.name, "") as recorded:
                recorded.not_offered(why)
            self._say(f"{fault.name}: NOT OFFERED: {why}")
            return
        limits: dict[str, Any] = {"gap_s_max": fault.gap_s_max}
        if fault.entries_copied_max is not None:
            limits["entries_copied_max"] = fault.entries_copied_max
        acknowledged, result, is_stopped = traffic.counts.acknowledged, "", False
        with history.fault(fault.name, fault.target, **limits) as recorded:
            try:
                result = await self._injected(fault, recorded)
            except asyncio.CancelledError:
                recorded.not_offered("the run was stopped by hand while the fault lasted")
                is_stopped = True
        if is_stopped:
            raise asyncio.CancelledError
        more = traffic.counts.acknowledged - acknowledged
        self._say(f"{fault}: {result}, {more} messages acknowledged meanwhile")

    async def _injected(self, fault: Fault, recorded: Recorded) -> str:
        """Inject and undo the fault, wait until the cluster has recovered, and return a summary for the log."""
        world, began = self.world, self._clock()
        before = (0, 0) if fault.entries_copied_max is None else await self._thread(world.copied)
        self._under_way.append(fault)
        try:
            await self._thread(lambda: fault.inject(world))
        finally:
            await self._thread(lambda: fault.heal(world))
            self._under_way.remove(fault)
        undone = self._clock() - began
        await self._until(lambda: fault.problem(world), f"the cluster has recovered from {fault}", fault.recover_s_max)
        took = self._clock() - began
        recorded.measured(detail=f"{undone:.1f} s until undone, {took:.1f} s until the cluster had recovered")
        if fault.entries_copied_max is None:
            return f"recovered after {took:.1f} s"
        after = await self._thread(world.copied)
        entries, size = after[0] - before[0], after[1] - before[1]
        recorded.measured(entries_copied=entries, bytes_copied=size)
        return f"recovered after {took:.1f} s, {entries} entries copied"

    async def _end(self, history: History, traffic: Traffic) -> None:
        """Drain the traffic and check the cluster. A check that fails does not prevent the others."""
        await self._whole(history, "after the last fault")
        await self._tried(history, traffic.wait_acknowledged(WARM_UP, timeout_s=WARM_UP_S))
        await self._tried(history, self._drain(traffic))
        # Missing entries of the last ledgers are detected only after these are closed, some seconds after the traffic.
        await self._whole(history, "after the last message")
        for check in (self._check_replicas, self._check_marks, self._check_pods):
            await self._tried(history, check(history))

    async def _drain(self, traffic: Traffic) -> None:
        counts = traffic.counts
        await traffic.finish(timeout_s=FINAL_S + counts.acknowledged / READ_RATE)
        self._say(
            f"traffic ended: {counts.acknowledged} acknowledged, {counts.failed} refused, {counts.unknown} unknown"
        )

    async def _check_replicas(self, history: History) -> None:
        compared = await self._thread(lambda: settled(self.world))
        history.observe("replicas", compared=compared.entries, diverged=compared.wrong)
        self._say(
            f"replicas: {compared.copies} of {compared.entries} entries in {compared.ledgers} ledgers "
            f"compared, {len(compared.wrong)} ledgers wrong"
        )

    async def _check_marks(self, history: History) -> None:
        _, status = await self._thread(self.world.cluster.auditor_status)
        history.observe("under-replicated", count=status["marked"])

    async def _check_pods(self, history: History) -> None:
        wanted = sum((await self._thread(self.world.cluster.wanted)).values())
        missing = await self._thread(self.world.cluster.not_ready)
        history.observe("ready", ready=wanted - len(missing), wanted=wanted)

    async def _whole(self, history: History, when: str) -> None:
        """Wait until no ledger is under-replicated. After a timeout, the run continues with its other checks."""
        try:
            took = await self._thread(lambda: self.world.wait_whole(timeout_s=FINAL_S))
        except Exception as error:
            await self._failed(history, f"not whole {when}: {error}")
        else:
            self._say(f"whole {took:.1f} s {when}")

    async def _tried(self, history: History, part: Awaitable[None]) -> None:
        """Await a part of the run. If it fails, record that and continue with the run."""
        try:
            await part
        except Exception as error:
            await self._failed(history, f"{type(error).__name__}: {error}")

    async def _failed(self, history: History, text: str) -> None:
        self._incomplete(history, text)
        self._say(f"FAILED: {text}")
        if len(self.failures) == 1:
            await self._explain()

    def _incomplete(self, history: History, reason: str) -> None:
        """Record in the history that this run is not complete, so that a later `judge` reaches the same verdict."""
        self.failures.append(reason)
        history.observe("incomplete", reason=reason[:REASON_LENGTH_MAX])

    async def _undo(self, history: History) -> None:
        """Undo the faults that are still active."""
        for fault in list(self._under_way):
            self._say(f"undoing {fault}")
            try:
                await asyncio.to_thread(fault.heal, self.world)
            except Exception as error:
                self._incomplete(history, f"{fault} could not be undone: {error}")
        self._under_way.clear()

    async def _explain(self) -> None:
        folder = self.settings.folder / "cluster"
        with contextlib.suppress(Exception):
            await asyncio.to_thread(self.world.release.collect, folder)
            self._say(f"logs of the pods: {folder}")

    async def _until(self, problem: Callable[[], str], what: str, timeout_s: float) -> None:
        await self._thread(lambda: self.world.cluster.until(problem, what, timeout_s=timeout_s))

    async def _thread(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread. A cancellation waits for its end, so that no fault is left half injected."""
        working = asyncio.ensure_future(asyncio.to_thread(call))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(working, UNDO_S)
            raise

    def _say(self, text: str) -> None:
        at = self._clock() - self._began
        left = "" if self.settings.seconds is None else f", {minutes(max(0.0, self.settings.seconds - at))} left"
        self.world.say(f"[{minutes(at)}{left}] {text}")


def settled(world: World, *, timeout_s: float = SETTLE_S) -> Compared:
    """Compare all replicas repeatedly until they agree or the timeout is over, and return the last result.

    Missing entries of an open ledger are copied only after the ledger was closed by its age.
    """
    found: list[Compared] = []

    def wrong() -> str:
        found.append(world.compare_replicas())
        return "; ".join(found[-1].wrong)

    with contextlib.suppress(ClusterError):
        world.cluster.until(wrong, "all replicas agree", timeout_s=timeout_s, poll_s=5.0)
    return found[-1] if found else world.compare_replicas()


def _chosen(fault: Fault, world: World) -> str:
    fault.choose(world)
    return ""


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
