"""The ledger protocol under random schedules: writer, recoveries, failing bookies, lost and reordered messages.

The goal: no schedule makes an acknowledged entry vanish. `ledger_world` checks its named invariants at every step; the
mutants at the end show that the checks see the protocol's known defects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
from bindery_core import ledger_recovery, ledger_writer
from bindery_core.ledger_metadata import LedgerMetadata, LedgerState
from bindery_simulation.ledger_world import RecoveryClient, World, WriterClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SEED_COUNT = 150
QUORUMS = [(3, 3, 2), (3, 2, 2), (4, 3, 2), (5, 3, 2), (3, 3, 3), (2, 2, 1), (1, 1, 1), (4, 4, 3), (5, 4, 2)]


def run_once(seed: int, *, steps: int = 400) -> World:
    """One life of a ledger: adds, crashes and returns, perhaps rival recoveries, an end by close or by recovery."""
    rng = Random(seed)
    ensemble_size, write_quorum, ack_quorum = rng.choice(QUORUMS)
    world = World(
        rng,
        bookie_count=ensemble_size + rng.randrange(3),
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
    )
    clients = ["writer", "recovery0", "recovery1", "recovery2"]
    for link in [(client, bookie) for client in clients for bookie in world.bookies]:
        if rng.random() < 0.25:
            world.slow_links.add(link)
    writer = WriterClient(world)
    world.fence_loss = rng.choice([0.0, 0.0, 0.3])
    world.refusal = rng.choice([0.0, 0.0, 0.02])
    world.unknown = rng.choice([0.0, 0.3])
    rates = Rates(
        add=rng.choice([0.03, 0.15]),
        loss=rng.choice([0.0, 0.01, 0.05]),
        crash=rng.choice([0.0, 0.005, 0.03]),
        haste=rng.choice([0.0, 0.0, 0.005, 0.03]),
        recover=rng.choice([0.0, 0.0, 0.005, 0.02, 0.2]),
        close=rng.choice([0.0, 0.005]),
    )
    if rng.random() < 0.2:  # nothing but a writer in full swing and a recovery: the races of fencing
        world.fence_loss, world.refusal = 0.4, 0.0
        rates = Rates(add=0.05, loss=0.0, crash=0.0, haste=0.0, recover=0.1, close=0.0)
    try:
        live(world, writer, rates, steps)
        finish(world, writer)
    except AssertionError as error:
        sizes = f"E={ensemble_size} Qw={write_quorum} Qa={ack_quorum}"
        trace = "\n".join(world.log[-60:])
        raise AssertionError(f"run_once({seed}, steps={steps}) {sizes}: {error}\n{trace}") from error
    return world


@dataclass(frozen=True)
class Rates:
    """Chances per step."""

    add: float
    loss: float
    crash: float
    haste: float
    recover: float
    close: float


def live(world: World, writer: WriterClient, rates: Rates, steps: int) -> None:
    rng = world.rng
    for _ in range(steps):
        if rng.random() < rates.add:
            writer.add(*(bytes([rng.randrange(256)]) * rng.randrange(5) for _ in range(rng.randint(1, 4))))
        if rng.random() < rates.crash:
            bookie = rng.choice(list(world.bookies.values()))
            bookie.is_up = not bookie.is_up
        if rng.random() < rates.recover and len(world.clients) < 4:
            RecoveryClient(world, f"recovery{len(world.clients) - 1}")
        if rng.random() < rates.close:
            writer.close()
        world.step(loss=rates.loss, haste=rates.haste)


def finish(world: World, writer: WriterClient) -> None:
    """Half of the writers die, the others go on beside the last recovery; everybody comes back; then the verdict."""
    writer.is_gone = world.rng.random() < 0.5
    first = RecoveryClient(world, "first")
    live(world, writer, Rates(add=0.05, loss=0.05, crash=0.05, haste=0.0, recover=0.0, close=0.0), 60)
    for bookie in world.bookies.values():
        bookie.is_up = True
    world.fence_loss = world.refusal = 0.0
    world.settle()
    last = first
    for attempt in range(5):
        if last.result is not None:
            break
        last = RecoveryClient(world, f"last{attempt}")
        world.settle()
    assert last.result is not None, f"recovery fails though every bookie is up: {last.failure}"
    assert last.result == world.metadata
    world.verdict()
    writer.add(b"too late")
    world.settle()
    world.verdict()


@pytest.mark.parametrize("seed", range(SEED_COUNT))
def test_acknowledged_entries_survive_every_schedule(seed: int) -> None:
    """What was confirmed is in the closed ledger and reads back; the rest may or may not be."""
    run_once(seed)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(min_value=SEED_COUNT, max_value=2**32), steps=st.integers(min_value=1, max_value=600))
def test_and_schedules_that_hypothesis_finds(seed: int, steps: int) -> None:
    run_once(seed, steps=steps)


def test_the_schedules_reach_what_they_should() -> None:
    """Goal: the runs above are not vacuous. Among them entries are confirmed, ensembles change, recoveries race."""
    worlds = [run_once(seed) for seed in range(SEED_COUNT)]
    assert sum(world.confirmed >= 5 for world in worlds) > SEED_COUNT / 4
    assert sum(len(world.metadata.segments) > 1 for world in worlds) > SEED_COUNT / 15
    assert sum(len(world.clients) > 2 for world in worlds) > SEED_COUNT / 5
    assert any(world.metadata.last_entry_id > world.confirmed for world in worlds)
    assert all(world.metadata.state is LedgerState.CLOSED for world in worlds)


# -- mutants: each puts one defect in, and some schedule must show it (issue 2614: test_ledger_scenarios) --------------


def _recovery_forgets_where_the_last_ensemble_begins(patch: pytest.MonkeyPatch) -> None:
    """BookKeeper issue 2615: recovery starts at what the bookies say, -1 if they know nothing."""

    class Zero(int):
        def __sub__(self, other: int) -> int:
            return -1

    original = ledger_recovery.LedgerRecovery._start_reading

    def from_the_bookies_lac(self: ledger_recovery.LedgerRecovery, now: float) -> object:
        began = self._began
        assert began is not None
        last = began.last_segment
        disguised = type(last)(Zero(last.first_entry_id), last.ensemble)  # type: ignore[arg-type]
        self._began = began.with_changes(segments=(*began.segments[:-1], disguised))
        return original(self, now)

    patch.setattr(ledger_recovery.LedgerRecovery, "_start_reading", from_the_bookies_lac)


def _acks_of_a_replaced_bookie_still_count(patch: pytest.MonkeyPatch) -> None:
    original = ledger_writer.LedgerWriter._replaced

    def keep_acks(self: ledger_writer.LedgerWriter, bit: int) -> None:
        before = list(self._acks)
        original(self, bit)
        self._acks[:] = before

    patch.setattr(ledger_writer.LedgerWriter, "_replaced", keep_acks)


def _entries_confirm_during_an_ensemble_change(patch: pytest.MonkeyPatch) -> None:
    original = ledger_writer.LedgerWriter._drain

    def impatient(self: ledger_writer.LedgerWriter, now: float) -> object:
        changing, self._changing = self._changing, False
        try:
            return original(self, now)
        finally:
            self._changing = changing

    patch.setattr(ledger_writer.LedgerWriter, "_drain", impatient)


def _one_denial_ends_the_ledger(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_recovery, "denials_needed", lambda **_: 1)


def _silence_counts_as_denial(patch: pytest.MonkeyPatch) -> None:
    original = ledger_recovery.LedgerRecovery._go_on

    def credulous(self: ledger_recovery.LedgerRecovery, now: float) -> object:
        for read in self._reads.values():
            read.denied |= read.silent
        return original(self, now)

    patch.setattr(ledger_recovery.LedgerRecovery, "_go_on", credulous)


def _recovery_closes_before_its_write_back_is_done(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_writer.LedgerWriter, "pending_count", property(lambda self: 0))


def _recovery_reads_from_the_newcomers(patch: pytest.MonkeyPatch) -> None:
    """Recovery reads from the ensembles it changed itself: the newcomers deny what they were never sent."""
    original = ledger_recovery.LedgerRecovery.ensemble_changed

    def forgetful(self: ledger_recovery.LedgerRecovery, metadata: LedgerMetadata, *, now: float) -> object:
        self._began = metadata
        return original(self, metadata, now=now)

    patch.setattr(ledger_recovery.LedgerRecovery, "ensemble_changed", forgetful)


MUTANTS = [
    _recovery_forgets_where_the_last_ensemble_begins,
    _acks_of_a_replaced_bookie_still_count,
    _entries_confirm_during_an_ensemble_change,
    _one_denial_ends_the_ledger,
    _silence_counts_as_denial,
    _recovery_closes_before_its_write_back_is_done,
    _recovery_reads_from_the_newcomers,
]
MUTANT_SEED_COUNT = 2_000


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_a_known_defect_is_seen(mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: prove that the checks above can fail."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        run_many(MUTANT_SEED_COUNT)


def run_many(count: int) -> None:
    for seed in range(count):
        run_once(seed)
