"""A tiny world for the ledger state machines: bookies, a metadata node, and messages in flight, all in one thread.

Everything that is under way lies in `World.flying`; each step takes one thing out at random and lets it happen or get
lost. Nothing keeps any order, which is more than a network may do. Time moves only when a step says so.
Bookies here hold entries in a dict and never forget; a crash makes one silent until it returns.

Checked at each step
- `durable`: an entry confirmed, or of a closed ledger, lies on an ack quorum of the write set that metadata names.
- `dense`: confirmations follow one another without gap, and stop for good once the handle is broken.
- `sealed`: metadata that is CLOSED never changes, and holds every entry confirmed before or after.
Checked by `verdict` at the end: every entry up to the last one reads back, with the payload that it was given.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from bindery_core.digest import Digester
from bindery_core.entry import peek_ids
from bindery_core.errors import BinderyError, LedgerClosed, LostOwnership
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Confirm,
    Degraded,
    Done,
    Fail,
    Recovered,
    SealLedger,
    SendAdds,
    SendLac,
    SendReads,
)
from bindery_core.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ledger_plans import (
    Plan,
    plan_begin_recovery,
    plan_close,
    plan_ensemble_change,
    plan_recovery_close,
    replace_failed,
)
from bindery_core.ledger_reader import LedgerRead
from bindery_core.ledger_recovery import LedgerRecovery, RecoverySettings
from bindery_core.ledger_writer import LedgerWriter
from bindery_core.placement import Candidate, choose_replacements
from bindery_core.wire.messages import AddResponse, ReadResponse, Status
from bindery_core.write_set import write_set

LEDGER_ID = LedgerId(7)
REFUSALS = (Status.IO_ERROR, Status.READ_ONLY, Status.TOO_MANY_REQUESTS, Status.UNKNOWN_LEDGER_STATE)


@dataclass
class SimBookie:
    """One ledger's worth of a bookie."""

    bookie_id: BookieId
    entries: dict[int, bytes] = field(default_factory=dict)
    is_fenced: bool = False
    is_up: bool = True

    def add(self, entry_id: int, frame: bytes, *, recovery: bool) -> AddResponse:
        assert peek_ids(frame) == (LEDGER_ID, entry_id)
        if self.is_fenced and not recovery:
            return AddResponse(0, Status.FENCED, LEDGER_ID, entry_id)
        self.entries[entry_id] = frame
        return AddResponse(0, Status.OK, LEDGER_ID, entry_id)

    def read(self, entry_id: int, *, fence: bool) -> ReadResponse:
        self.is_fenced |= fence
        wanted = max(self.entries, default=-1) if entry_id == -1 else entry_id
        frame = self.entries.get(wanted)
        status = Status.NO_ENTRY if frame is None else Status.OK
        return ReadResponse(0, status, LEDGER_ID, entry_id, frame)


@dataclass(frozen=True, eq=False)
class Flying:
    """Something under way: what happens if it arrives, and what if it is lost (None: it cannot be)."""

    arrive: Callable[[], None]
    lose: Callable[[], None] | None
    what: str
    link: tuple[str, str] | None


class World:
    """`rng` decides everything; the same seed gives the same run."""

    def __init__(
        self, rng: Random, *, bookie_count: int, ensemble_size: int, write_quorum: int, ack_quorum: int
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.flying: list[Flying] = []
        self.log: list[str] = []
        self.digester = Digester(DigestType.CRC32C)
        names = [BookieId(f"b{i}") for i in range(bookie_count)]
        self.bookies = {name: SimBookie(name) for name in names}
        self.metadata = LedgerMetadata(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            segments=(Segment(EntryId(0), tuple(names[:ensemble_size])),),
        )
        self.version = 0
        self.slow_links: set[tuple[str, str]] = set()
        """(client, bookie): what travels there is overtaken by nearly everything else."""
        self.unknown = 0.0
        """Chance that a client does not learn whether its write of metadata succeeded: it reads again and compares."""
        self.refusal = 0.0
        """Chance that a bookie answers a request with one of REFUSALS."""
        self.fence_loss = 0.0
        """Chance that a request for the last entry, recovery's first fencing, never arrives."""
        self.clients: list[Client] = []
        self.payloads: list[bytes] = []
        self.confirmed = -1

    # -- what clients do -------------------------------------------------------------------------------------------

    def fly(
        self,
        what: str,
        arrive: Callable[[], None],
        lose: Callable[[], None] | None = None,
        link: tuple[str, str] | None = None,
    ) -> None:
        self.flying.append(Flying(arrive, lose, what, link))

    def publish(self, metadata: LedgerMetadata, version: int) -> bool:
        """Compare-and-set."""
        if version != self.version:
            return False
        before = self.metadata
        assert before.state is not LedgerState.CLOSED, "sealed: CLOSED metadata was changed"
        assert before.state is LedgerState.OPEN or metadata.state is not LedgerState.OPEN, "opened again"
        for segment in metadata.segments:
            assert len(set(segment.ensemble)) == len(segment.ensemble), "a bookie stands twice in an ensemble"
        kept = [s for s in before.segments if s.first_entry_id <= self.confirmed]
        holders = [metadata.segment_of(s.first_entry_id).first_entry_id for s in kept]
        assert holders == [s.first_entry_id for s in kept], "a segment with confirmed entries vanished"
        if metadata.state is LedgerState.CLOSED:
            assert metadata.last_entry_id >= self.confirmed, "sealed: a confirmed entry was cut off"
        self.metadata, self.version = metadata, version + 1
        if metadata.state is LedgerState.CLOSED:
            for entry_id in range(metadata.last_entry_id + 1):
                self.check_durable(entry_id, "closed")
        self.log.append(f"metadata {metadata.state.name} {metadata.segments} last={metadata.last_entry_id}")
        return True

    def confirm(self, first: int, last: int) -> None:
        assert first == self.confirmed + 1, "dense: confirmations have a gap"
        assert last >= first
        if self.metadata.state is LedgerState.CLOSED:
            assert last <= self.metadata.last_entry_id, "sealed: confirmed after the ledger was closed without it"
        for entry_id in range(first, last + 1):
            self.check_durable(entry_id, "confirmed")
        self.confirmed = last

    def check_durable(self, entry_id: int, what: str) -> None:
        copies = sum(entry_id in self.bookies[holder].entries for holder in self.holders(entry_id))
        assert copies >= self.metadata.ack_quorum, f"durable: entry {entry_id} {what} with {copies} copies"

    def holders(self, entry_id: int) -> list[BookieId]:
        ensemble = self.metadata.segment_of(EntryId(entry_id)).ensemble
        indexes = write_set(
            entry_id=entry_id, ensemble_size=self.metadata.ensemble_size, write_quorum=self.metadata.write_quorum
        )
        return [ensemble[index] for index in indexes]

    def choose(self, ensemble: Sequence[BookieId], failed: Any) -> dict[int, BookieId]:
        candidates = [
            Candidate(name, refusal=None if bookie.is_up else "not there") for name, bookie in self.bookies.items()
        ]
        write_quorum = self.metadata.write_quorum
        return choose_replacements(
            candidates, ensemble=ensemble, failed=failed, write_quorum=write_quorum, rng=self.rng
        )

    # -- what happens ----------------------------------------------------------------------------------------------

    def step(self, *, loss: float = 0.0, haste: float = 0.0) -> None:
        """One random event: a thing in flight arrives, is lost (`loss`), or somebody's patience runs out (`haste`)."""
        if not self.flying or self.rng.random() < haste:
            self.pass_time()
            return
        index = self.rng.randrange(len(self.flying))
        for _ in range(10):
            if self.flying[index].link not in self.slow_links:
                break
            index = self.rng.randrange(len(self.flying))
        self.flying[index], self.flying[-1] = self.flying[-1], self.flying[index]
        thing = self.flying.pop()
        if thing.lose is not None and self.rng.random() < loss:
            self.log.append(f"lost: {thing.what}")
            thing.lose()
        else:
            self.log.append(thing.what)
            thing.arrive()

    def deliver(self, pattern: str) -> int:
        """Let everything in flight that matches `pattern` (a regular expression) arrive now. How many did."""
        chosen = [thing for thing in self.flying if re.search(pattern, thing.what)]
        for thing in chosen:
            self.flying.remove(thing)
            self.log.append(thing.what)
            thing.arrive()
        return len(chosen)

    def drop(self, pattern: str) -> int:
        """Let everything in flight that matches vanish without a trace. How many did."""
        chosen = [thing for thing in self.flying if re.search(pattern, thing.what)]
        for thing in chosen:
            self.flying.remove(thing)
        return len(chosen)

    def pass_time(self) -> None:
        deadlines = [at for client in self.clients if (at := client.next_deadline()) is not None]
        self.now = max(self.now, min(deadlines, default=self.now)) + 0.001
        for client in self.clients:
            client.tick()

    def settle(self, *, steps: int = 20_000) -> None:
        """Let everything in flight arrive, and time pass when nothing is, until nothing moves any more."""
        for _ in range(steps):
            if not self.flying and all(client.next_deadline() is None for client in self.clients):
                return
            self.step()
        raise AssertionError("the world does not come to rest:\n" + "\n".join(self.log[-40:]))

    def send_adds(self, client: "Client", action: SendAdds) -> None:
        parts = list(zip(action.entry_ids, action.frames, strict=True))
        if self.rng.random() < 0.5:  # a batch may be torn apart on its way
            cut = self.rng.randrange(len(parts) + 1)
            batches = [batch for batch in (parts[:cut], parts[cut:]) if batch]
        else:
            batches = [parts]
        for batch in batches:
            ids = [entry_id for entry_id, _ in batch]
            self.fly(
                f"{client.name} add {ids} at {action.bookie_id}",
                partial(self._arrive_adds, client, action, batch),
                partial(self._break, client, action.bookie_id),
                (client.name, action.bookie_id),
            )

    def _arrive_adds(self, client: "Client", action: SendAdds, batch: list[tuple[int, bytes]]) -> None:
        bookie = self.bookies[action.bookie_id]
        if not bookie.is_up:
            self._break(client, action.bookie_id)
            return
        answers = [
            AddResponse(0, self.rng.choice(REFUSALS), LEDGER_ID, entry_id)
            if self.rng.random() < self.refusal
            else bookie.add(entry_id, frame, recovery=action.recovery)
            for entry_id, frame in batch
        ]
        self.fly(
            f"{client.name} gets {[(a.entry_id, Status(a.status).name) for a in answers]} from {action.bookie_id}",
            partial(client.receive_adds, action.bookie_id, answers),
            partial(self._break, client, action.bookie_id),
            (client.name, action.bookie_id),
        )

    def send_reads(self, client: "Client", action: SendReads) -> None:
        for entry_id in action.entry_ids:
            if entry_id == -1 and self.rng.random() < self.fence_loss:
                self.log.append(f"lost: {client.name} fence at {action.bookie_id}")
                self._break(client, action.bookie_id)
                continue
            self.fly(
                f"{client.name} read {entry_id} at {action.bookie_id}",
                partial(self._arrive_read, client, action.bookie_id, entry_id, action.fence),
                partial(self._break, client, action.bookie_id),
                (client.name, action.bookie_id),
            )

    def _arrive_read(self, client: "Client", bookie_id: BookieId, entry_id: int, fence: bool) -> None:
        bookie = self.bookies[bookie_id]
        if not bookie.is_up:
            self._break(client, bookie_id)
            return
        answer = bookie.read(entry_id, fence=fence)
        if self.rng.random() < self.refusal:
            answer = ReadResponse(0, self.rng.choice(REFUSALS), LEDGER_ID, entry_id)
        self.fly(
            f"{client.name} gets read {entry_id} {Status(answer.status).name} from {bookie_id}",
            partial(client.receive_reads, bookie_id, [answer]),
            partial(self._break, client, bookie_id),
            (client.name, bookie_id),
        )

    def _break(self, client: "Client", bookie_id: BookieId) -> None:
        """The client learns of it, or has to wait until it loses patience."""
        if self.rng.random() < 0.5:
            self.fly(f"{client.name} loses {bookie_id}", partial(client.bookie_failed, bookie_id))

    def verdict(self) -> None:
        """Every entry of the closed ledger reads back as it was pushed."""
        metadata = self.metadata
        assert metadata.state is LedgerState.CLOSED
        last = metadata.last_entry_id
        assert last >= self.confirmed, "sealed: a confirmed entry was cut off"
        assert metadata.length == sum(map(len, self.payloads[: last + 1])), "the ledger's length is wrong"
        if last < 0:
            return
        read = LedgerRead(LEDGER_ID, metadata, first=0, last=last, digester=self.digester)
        pending = read.start(now=0.0)
        while pending:
            action = pending.pop()
            match action:
                case SendReads(bookie_id, entry_ids, _):
                    bookie = self.bookies[bookie_id]
                    answers = [bookie.read(entry_id, fence=False) for entry_id in entry_ids]
                    pending += read.receive_many(bookie_id, answers, now=0.0)
                case Fail(error):
                    raise AssertionError(f"a closed ledger does not read back: {error}")
                case Done():
                    pass
        assert [entry.payload for entry in read.entries] == self.payloads[: last + 1]


class Client:
    """What writers and recoveries have in common: a machine, and the carrying out of its actions."""

    def __init__(self, world: World, name: str, machine: LedgerWriter | LedgerRecovery) -> None:
        self.world = world
        self.name = name
        self.machine = machine
        self.is_gone = False
        self.failure: BinderyError | None = None
        world.clients.append(self)

    def next_deadline(self) -> float | None:
        return None if self.is_gone else self.machine.next_deadline()

    def tick(self) -> None:
        if not self.is_gone:
            self.do(self.machine.tick(now=self.world.now))

    def bookie_failed(self, bookie_id: BookieId) -> None:
        if not self.is_gone:
            self.do(self.machine.bookie_failed(bookie_id, "connection lost", now=self.world.now))

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        raise NotImplementedError

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        raise NotImplementedError

    def do(self, actions: Sequence[Any]) -> None:
        raise NotImplementedError

    def update(
        self, plan: Plan, done: Callable[[LedgerMetadata], None], failed: Callable[[BinderyError], None]
    ) -> None:
        """The metadata update loop; others may get between its read and its write."""
        self.world.fly(f"{self.name} reads metadata", partial(self._plan, plan, done, failed))

    def _plan(self, plan: Plan, done: Callable[[LedgerMetadata], None], failed: Callable[[BinderyError], None]) -> None:
        if self.is_gone:
            return
        read, version = self.world.metadata, self.world.version
        try:
            planned = plan(read)
        except BinderyError as error:
            failed(error)
            return
        if planned is None:
            done(read)
            return
        self.world.fly(f"{self.name} writes metadata", partial(self._set, plan, planned, version, done, failed))

    def _set(
        self,
        plan: Plan,
        planned: LedgerMetadata,
        version: int,
        done: Callable[[LedgerMetadata], None],
        failed: Callable[[BinderyError], None],
    ) -> None:
        if not self.world.publish(planned, version) or self.world.rng.random() < self.world.unknown:
            self._plan(plan, done, failed)
        elif not self.is_gone:
            self.world.fly(f"{self.name} wrote metadata", lambda: None if self.is_gone else done(planned))


class WriterClient(Client):
    """The ledger's writer."""

    machine: LedgerWriter

    def __init__(self, world: World, name: str = "writer") -> None:
        super().__init__(world, name, LedgerWriter(LEDGER_ID, world.metadata, digester=world.digester))
        self.is_sealed = False

    def add(self, *payloads: bytes) -> None:
        if self.is_gone or self.machine.error is not None:
            return
        try:
            actions = self.machine.add_many(payloads, now=self.world.now)
        except LedgerClosed:
            return
        self.world.payloads += payloads
        self.do(actions)

    def close(self) -> None:
        if self.is_gone:
            return
        try:
            self.do(self.machine.close(now=self.world.now))
        except BinderyError as error:
            self.failure = error

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        if not self.is_gone:
            self.do(self.machine.receive_many(bookie_id, answers, now=self.world.now))

    def do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case SendAdds():
                    self.world.send_adds(self, action)
                case ChangeEnsemble(failed, first_entry_id, publish):
                    assert publish
                    plan = partial(
                        plan_ensemble_change, failed=failed, first_entry_id=first_entry_id, choose=self.world.choose
                    )
                    self.update(plan, self._changed, self._change_failed)
                case Confirm(first, last):
                    assert self.failure is None, "dense: confirmed after the handle was broken"
                    self.world.confirm(first, last)
                case Fail(error):
                    self.failure = error
                case SealLedger(last, length):
                    plan = partial(plan_close, last_entry_id=last, length=length)
                    self.update(plan, self._closed, self._close_failed)
                case SendLac() | Degraded():
                    pass
                case _:
                    raise AssertionError(action)

    def _changed(self, metadata: LedgerMetadata) -> None:
        self.do(self.machine.ensemble_changed(metadata, now=self.world.now))

    def _change_failed(self, error: BinderyError) -> None:
        self.do(self.machine.ensemble_change_failed(error, now=self.world.now))

    def _closed(self, metadata: LedgerMetadata) -> None:
        self.is_sealed = True

    def _close_failed(self, error: BinderyError) -> None:
        assert isinstance(error, LostOwnership)
        self.failure = error


class RecoveryClient(Client):
    """Somebody who recovers the ledger."""

    machine: LedgerRecovery

    def __init__(self, world: World, name: str = "recovery", *, entries_in_flight_max: int | None = None) -> None:
        settings = RecoverySettings(entries_in_flight_max=entries_in_flight_max or world.rng.choice([1, 2, 16]))
        super().__init__(world, name, LedgerRecovery(LEDGER_ID, digester=world.digester, settings=settings))
        self.result: LedgerMetadata | None = None
        self.do(self.machine.start(now=world.now))

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        if not self.is_gone:
            self.do(self.machine.receive_adds(bookie_id, answers, now=self.world.now))

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        if not self.is_gone:
            self.do(self.machine.receive_reads(bookie_id, answers, now=self.world.now))

    def do(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case BeginRecovery():
                    self.update(plan_begin_recovery, self._begun, self._metadata_failed)
                case SendReads():
                    self.world.send_reads(self, action)
                case SendAdds():
                    assert action.recovery
                    self.world.send_adds(self, action)
                case ChangeEnsemble(failed, first_entry_id, publish):
                    assert not publish
                    self.world.fly(f"{self.name} plans", partial(self._change, failed, first_entry_id))
                case CloseRecovered(began, recovered, last, length):
                    plan = partial(
                        plan_recovery_close, began=began, recovered=recovered, last_entry_id=last, length=length
                    )
                    self.update(plan, self._closed, self._metadata_failed)
                case Recovered(metadata):
                    self.result = metadata
                case Fail(error):
                    self.failure = error
                case Degraded():
                    pass
                case _:
                    raise AssertionError(action)

    def _begun(self, metadata: LedgerMetadata) -> None:
        self.do(self.machine.recovery_begun(metadata, now=self.world.now))

    def _closed(self, metadata: LedgerMetadata) -> None:
        self.do(self.machine.recovery_closed(metadata, now=self.world.now))

    def _metadata_failed(self, error: BinderyError) -> None:
        self.do(self.machine.metadata_failed(error, now=self.world.now))

    def _change(self, failed: Mapping[int, BookieId], first_entry_id: int) -> None:
        if self.is_gone or self.machine.is_finished:
            return
        try:
            changed = replace_failed(
                self.machine.metadata, failed=failed, first_entry_id=first_entry_id, choose=self.world.choose
            )
        except BinderyError as error:
            self.do(self.machine.ensemble_change_failed(error, now=self.world.now))
        else:
            self.do(self.machine.ensemble_changed(changed or self.machine.metadata, now=self.world.now))
