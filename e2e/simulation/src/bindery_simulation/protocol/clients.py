"""Writers and recoveries: clients that execute the actions of the core's state machines in the simulated world."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from bindery_core.entry import pack_lac
from bindery_core.errors import BinderyError, LedgerClosed
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId
from bindery_core.ledger import ledger_plans
from bindery_core.ledger.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Confirm,
    Degraded,
    Fail,
    Recovered,
    SealLedger,
    SendAdds,
    SendLac,
    SendReads,
)
from bindery_core.ledger.ledger_recovery import LedgerRecovery, RecoverySettings
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings
from bindery_core.wire.messages import AddResponse, ReadLacResponse, ReadResponse

from bindery_simulation.protocol.invariants import Invariant, Violation
from bindery_simulation.protocol.ledger import LEDGER_ID
from bindery_simulation.protocol.world import DIGESTER, World


class Client:
    """An `Endpoint` of a world. Subclasses override the methods for the answers that they receive."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_gone = False
        self.is_cut_off = False
        self.failure: BinderyError | None = None
        self.epoch = 0
        self.slow: set[BookieId] = set()
        self.cuts: set[tuple[bool, BookieId]] = set()
        world.clients.append(self)

    def next_deadline(self) -> float | None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def bookie_failed(self, bookie_id: BookieId) -> None:
        raise NotImplementedError

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        """Receive answers to adds."""

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        """Receive answers to reads."""

    def receive_poll(self, bookie_id: BookieId, answer: ReadResponse) -> None:
        """Receive the answer to a long poll."""

    def receive_lac(self, bookie_id: BookieId, answer: ReadLacResponse) -> None:
        """Receive the answer to a LAC read."""

    def describe(self) -> str:
        """Describe the state for the trace."""
        return ""


class Writer(Client):
    """The writer of the ledger, and the application that adds entries with it."""

    def __init__(self, world: World, *, settings: WriterSettings | None = None) -> None:
        super().__init__(world, "writer")
        self.machine = LedgerWriter(
            LEDGER_ID, world.ledger.metadata, digester=DIGESTER, settings=settings or WriterSettings()
        )
        self.is_sealed = False
        self.close_failed = False

    def add(self, payloads: tuple[bytes, ...]) -> None:
        machine = self.machine
        if self.is_gone or machine.error is not None:
            return
        first, lac = machine.next_entry_id, machine.lac
        try:
            actions = machine.add_many(payloads, now=self.world.now)
        except LedgerClosed:
            return
        if first != len(self.world.ledger.payloads):
            raise Violation(Invariant.DENSE, f"entry {first} pushed after {len(self.world.ledger.payloads)} entries")
        self.world.ledger.pushed(payloads, lac=lac)
        self.act(actions)

    def close(self) -> None:
        if self.is_gone or self.close_failed:
            return
        self.world.note("writer closes its handle")
        try:
            self.act(self.machine.close(now=self.world.now))
        except BinderyError as error:
            self.failure = error

    def next_deadline(self) -> float | None:
        return self.machine.next_deadline()

    def tick(self) -> None:
        self.act(self.machine.tick(now=self.world.now))

    def bookie_failed(self, bookie_id: BookieId) -> None:
        self.act(self.machine.bookie_failed(bookie_id, "connection lost", now=self.world.now))

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        actions = self.machine.receive_many(bookie_id, answers, now=self.world.now)
        if actions:
            self.act(actions)

    def act(self, actions: Sequence[Any]) -> None:
        world = self.world
        for action in actions:
            kind = type(action)
            if kind is SendAdds:
                world.send_adds(self, action)
            elif kind is Confirm:
                world.ledger.confirm(action.first_entry_id, action.last_entry_id, is_broken=self.failure is not None)
                world.note(f"writer confirms {action.first_entry_id}..{action.last_entry_id}")
            elif kind is ChangeEnsemble:
                plan = partial(
                    ledger_plans.plan_ensemble_change,
                    failed=action.failed,
                    first_entry_id=action.first_entry_id,
                    choose=world.choose,
                )
                world.note(f"writer asks to replace {','.join(action.failed.values())} from {action.first_entry_id} on")
                world.count("changes asked")
                world.update(self, (plan, self._changed, self._change_failed))
            elif kind is Fail:
                self.failure = action.error
                world.count("handles broken")
                world.note(f"writer is broken: {action.error.message}")
            elif kind is SealLedger:
                plan = partial(ledger_plans.plan_close, last_entry_id=action.last_entry_id, length=action.length)
                world.update(self, (plan, self._closed, self._close_failed))
            elif kind is SendLac:
                packet = pack_lac(DIGESTER, ledger_id=LEDGER_ID, lac=action.lac)
                world.count("explicit lacs")
                for bookie_id in action.bookie_ids:
                    world.post((world.to_write_lac, self, bookie_id, action.lac, packet))
            elif kind is Degraded:
                world.ledger.set_mark()
                world.count("degraded")
            else:
                raise AssertionError(action)

    def _changed(self, metadata: LedgerMetadata) -> None:
        self.world.count("changes")
        self.act(self.machine.ensemble_changed(metadata, now=self.world.now))

    def _change_failed(self, error: BinderyError) -> None:
        self.act(self.machine.ensemble_change_failed(error, now=self.world.now))

    def _closed(self, metadata: LedgerMetadata) -> None:
        self.is_sealed = True
        self.world.count("closed by the writer")

    def _close_failed(self, error: BinderyError) -> None:
        self.close_failed = True
        self.failure = error

    def describe(self) -> str:
        machine = self.machine
        text = f"lac={machine.lac} pending={machine.pending_count}"
        return text + (" changing" if machine.is_changing else "") + (" BROKEN" if self.failure is not None else "")


class Recoverer(Client):
    """A client that recovers the ledger."""

    def __init__(self, world: World, name: str, *, entries_in_flight_max: int) -> None:
        super().__init__(world, name)
        settings = RecoverySettings(entries_in_flight_max=entries_in_flight_max)
        self.machine = LedgerRecovery(LEDGER_ID, digester=DIGESTER, settings=settings)
        self.result: LedgerMetadata | None = None
        world.count("recoveries")
        if any(type(client) is Recoverer and client.is_busy for client in world.clients[:-1]):
            world.count("rival recoveries")

    def start(self) -> None:
        self.act(self.machine.start(now=self.world.now))

    @property
    def is_busy(self) -> bool:
        return not self.is_gone and not self.machine.is_finished

    def next_deadline(self) -> float | None:
        return self.machine.next_deadline()

    def tick(self) -> None:
        self.act(self.machine.tick(now=self.world.now))

    def bookie_failed(self, bookie_id: BookieId) -> None:
        self.act(self.machine.bookie_failed(bookie_id, "connection lost", now=self.world.now))

    def receive_adds(self, bookie_id: BookieId, answers: list[AddResponse]) -> None:
        self.act(self.machine.receive_adds(bookie_id, answers, now=self.world.now))

    def receive_reads(self, bookie_id: BookieId, answers: list[ReadResponse]) -> None:
        self.act(self.machine.receive_reads(bookie_id, answers, now=self.world.now))

    def act(self, actions: Sequence[Any]) -> None:
        world = self.world
        for action in actions:
            kind = type(action)
            if kind is SendReads:
                world.send_reads(self, action)
            elif kind is SendAdds:
                world.count("write-backs")
                world.send_adds(self, action)
            elif kind is BeginRecovery:
                world.update(self, (ledger_plans.plan_begin_recovery, self._begun, self._metadata_failed))
            elif kind is ChangeEnsemble:
                world.in_flight.append((self.meta_plan, self, None, action.failed, action.first_entry_id))
            elif kind is CloseRecovered:
                plan = partial(
                    ledger_plans.plan_recovery_close,
                    began=action.began,
                    recovered=action.recovered,
                    last_entry_id=action.last_entry_id,
                    length=action.length,
                )
                world.update(self, (plan, self._closed, self._metadata_failed))
            elif kind is Recovered:
                self.result = action.metadata
                world.count("recovered")
                world.note(f"{self.name} is done: closed at {action.metadata.last_entry_id}")
            elif kind is Fail:
                self.failure = action.error
                world.count("recoveries failed")
                world.note(f"{self.name} fails: {action.error.message}")
            elif kind is not Degraded:
                raise AssertionError(action)

    def _begun(self, metadata: LedgerMetadata) -> None:
        self.act(self.machine.recovery_begun(metadata, now=self.world.now))

    def _closed(self, metadata: LedgerMetadata) -> None:
        self.act(self.machine.recovery_closed(metadata, now=self.world.now))

    def _metadata_failed(self, error: BinderyError) -> None:
        self.act(self.machine.metadata_failed(error, now=self.world.now))

    def meta_plan(self, message: tuple[Any, ...]) -> None:
        """Change ensembles in memory, as recovery does. Other messages may be delivered before this change."""
        failed: Mapping[int, BookieId] = message[3]
        if self.is_gone or self.machine.is_finished:
            return
        try:
            changed = ledger_plans.replace_failed(
                self.machine.metadata, failed=failed, first_entry_id=message[4], choose=self.world.choose
            )
        except BinderyError as error:
            self.act(self.machine.ensemble_change_failed(error, now=self.world.now))
            return
        except AssertionError as error:
            raise Violation(Invariant.SEGMENTS, f"{self.name} would change ensembles out of order") from error
        self.world.count("changes in recovery")
        self.act(self.machine.ensemble_changed(changed or self.machine.metadata, now=self.world.now))

    def describe(self) -> str:
        return f"step={self.machine.step}"
