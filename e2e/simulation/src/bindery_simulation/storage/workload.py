"""Run seeded traffic on one engine and record it in a History.

The traffic has adds of every kind (ordinary adds, recovery adds, adds with deferred sync followed by a force, repeated
adds with other bytes, adds with gaps), fences, explicit LACs, deletions, flushes, compactions and reads. Several
operations run at a time. An operation that fails because of a power cut has an unknown outcome.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_core.errors import BinderyError
from bindery_core.wire.messages import AddRequest, Status, WriteFlag

from bindery_simulation.storage import calls
from bindery_simulation.storage.history import History, Key
from bindery_simulation.storage.verdict import Problem, Violation, check_entry

ANSWER_S_MAX: Final = 60.0
"""Maximum simulated time of one operation in seconds."""

_READS: Final = 10
"""Maximum number of entries in one read."""

Note = Callable[[str], None]
"""Called with one line for each operation, for a trace."""


@dataclass(slots=True)
class Workload:
    """Traffic on one engine at a time."""

    rng: random.Random
    history: History
    note: Note
    ledgers: int = 5
    """Number of ledgers that are written at a time."""
    compacts_by_kind: bool = True
    """Whether compactions are minor and major ones. If not, dead bytes decide what is compacted."""
    ledger_ids: list[int] = field(default_factory=list)
    serial: int = 0
    """Number that makes the next body unique."""
    rewritten: int = 0
    """Number of entry logs that compaction replaced."""
    rewritten_for_space: int = 0
    """Number of those that it replaced because of dead bytes."""
    removed: int = 0
    """Number of entry logs without live entries that compaction removed."""

    async def work(self, engine: StorageEngine, steps: int) -> None:
        """Run `steps` operations and wait for all answers. Raises Violation for an answer that breaks a promise."""
        waiting: set[asyncio.Task[None]] = set()
        for _ in range(steps):
            waiting.add(asyncio.ensure_future(self._step(engine)))
            waiting = await self._drain(waiting, self.rng.choice((1, 4, 8)))
        await self._drain(waiting, 0)

    async def _drain(self, waiting: set[asyncio.Task[None]], allowed: int) -> set[asyncio.Task[None]]:
        while len(waiting) > allowed:
            finished, waiting = await asyncio.wait(waiting, timeout=ANSWER_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if not finished:
                raise Violation(Problem("answers", None, f"no answer in {ANSWER_S_MAX} s"))
            for one in finished:
                one.result()
        return waiting

    async def _step(self, engine: StorageEngine) -> None:
        while len(self.ledger_ids) < self.ledgers:
            self.ledger_ids.append(len(self.ledger_ids))
        ledger_id = self.rng.choice(self.ledger_ids)
        kind = self.rng.random()
        work: Coroutine[Any, Any, None]
        if kind < 0.63:
            name, work = "add", self._add(engine, ledger_id)
        elif kind < 0.68:
            name, work = "fence", self._fence(engine, ledger_id)
        elif kind < 0.74:
            name, work = "write_lac", self._write_lac(engine, ledger_id)
        elif kind < 0.80:
            name, work = "flush", self._flush(engine)
        elif kind < 0.85:
            name, work = "delete", self._delete(engine, ledger_id)
        elif kind < (0.89 if self.compacts_by_kind else 0.95):
            name, work = "compact", self._compact(engine)
        else:
            name, work = "read", self._read(engine, ledger_id)
        try:
            await work
        except (BinderyError, OSError) as error:
            self.note(f"{name} ledger {ledger_id}: {error!r}")  # power is lost: the outcome is unknown

    async def _add(self, engine: StorageEngine, ledger_id: int) -> None:
        history, rng = self.history, self.rng
        recovery = rng.random() < 0.3
        deferred = rng.random() < 0.15
        adds: list[AddRequest] = []
        keys: list[tuple[Key, int]] = []
        for _ in range(rng.choice((1, 1, 3, 20))):
            following = history.next_id.get(ledger_id, 0)
            again = following and rng.random() < 0.2
            entry_id = rng.randrange(following) if again else following + rng.choice((0, 0, 0, 1, 20))
            self.serial += 1
            payload = b"%d." % self.serial + rng.randbytes(rng.choice((0, 60, 480, 2500)))
            body = calls.entry(ledger_id, entry_id, payload, lac=entry_id - 1)
            keys.append(((ledger_id, entry_id), history.send((ledger_id, entry_id), body)))
            flags = int(WriteFlag.DEFERRED_SYNC) if deferred else 0
            adds.append(calls.add_request(body, recovery=recovery, flags=flags))
        fenced_before = ledger_id in history.fenced
        deletions = history.deletions.get(ledger_id, 0)
        history.unanswered.update(keys)
        statuses = await calls.add(engine, adds)
        history.unanswered.difference_update(keys)
        if deferred and Status.OK in statuses:
            await engine.force(ledger_id)
        self.note(
            f"add {'recovery ' * recovery}{'deferred ' * deferred}ledger {ledger_id} "
            f"{[(key[1], number) for key, number in keys]}: {statuses}"
        )
        if history.deletions.get(ledger_id, 0) != deletions:
            return
        for (key, number), status in zip(keys, statuses, strict=True):
            if status == Status.OK:
                if fenced_before and not recovery:
                    raise Violation(Problem("fences-hold", key, "an ordinary add was acknowledged after the fence"))
                history.acknowledge(key, number)

    async def _fence(self, engine: StorageEngine, ledger_id: int) -> None:
        deletions = self.history.deletions.get(ledger_id, 0)
        await engine.fence(ledger_id, calls.MASTER_KEY)
        self.note(f"fence ledger {ledger_id}: done")
        if self.history.deletions.get(ledger_id, 0) == deletions:
            self.history.fenced.add(ledger_id)
            self.history.keyed.add(ledger_id)

    async def _write_lac(self, engine: StorageEngine, ledger_id: int) -> None:
        history = self.history
        self.serial += 1
        packets = history.lac_packets.setdefault(ledger_id, [])
        packets.append(calls.lac_packet(ledger_id, self.serial))
        number = len(packets) - 1
        deletions = history.deletions.get(ledger_id, 0)
        await engine.write_lac(ledger_id, calls.MASTER_KEY, self.serial, packets[number])
        self.note(f"explicit lac of ledger {ledger_id} number {number}: done")
        if history.deletions.get(ledger_id, 0) == deletions:
            history.lac_acknowledged[ledger_id] = max(number, history.lac_acknowledged.get(ledger_id, -1))
            history.keyed.add(ledger_id)

    async def _flush(self, engine: StorageEngine) -> None:
        hidden = dict(self.history.hidden)
        await engine.flush()
        self.note("flush: done")
        self.history.erased.update(hidden)

    async def _delete(self, engine: StorageEngine, ledger_id: int) -> None:
        """Delete a ledger. Most later adds use another id; some create the deleted ledger again."""
        if self.rng.random() < 0.8 and ledger_id in self.ledger_ids:
            self.ledger_ids[self.ledger_ids.index(ledger_id)] = max(self.ledger_ids) + 1
        self.history.delete(ledger_id)
        await engine.delete_ledger(ledger_id)
        self.note(f"delete ledger {ledger_id}: done")

    async def _compact(self, engine: StorageEngine) -> None:
        """Run a compaction. Only its effects on other operations are checked."""
        by_kind = self.compacts_by_kind
        before = engine.stats.compactions_for_space
        result = await engine.compactor.run(minor=by_kind, major=by_kind, force=self.rng.random() < 0.5)
        self.rewritten += len(result.rewritten)
        self.rewritten_for_space += engine.stats.compactions_for_space - before
        self.removed += len(result.removed)
        self.note(f"compact: rewritten {result.rewritten} removed {result.removed} left {result.left}")

    async def _read(self, engine: StorageEngine, ledger_id: int) -> None:
        """Read entries and check that no body is older than the one acknowledged before the read."""
        history = self.history
        keys = [key for key in history.sent if key[0] == ledger_id]
        keys = self.rng.sample(keys, min(len(keys), _READS))
        floors = [history.acknowledged.get(key, -1) for key in keys]
        hidden = [history.hidden.get(key, 0) for key in keys]
        deletions = history.deletions.get(ledger_id, 0)
        answers = await calls.read(engine, keys)
        if history.deletions.get(ledger_id, 0) != deletions:
            return
        for key, floor, gone, found in zip(keys, floors, hidden, answers, strict=True):
            if found != Status.IO_ERROR:  # the answer after a power cut
                problem = check_entry(history.sent[key], key, max(floor, gone), floor >= 0, found)
                if problem is not None:
                    raise Violation(problem)
