"""Simulated clusters with brokers keep every invariant, and a seed determines a run.

`make sim KIND=topics SEED=<n>` replays a seed with its trace. `make sim-ci` searches for longer than these tests may.
"""

import os
import subprocess
import sys

import pytest
from bindery_simulation import runner
from bindery_simulation.runner import Budget
from bindery_simulation.topics import faults, search
from bindery_simulation.topics.judging.history import (
    Acknowledge,
    Key,
    Kind,
    Leave,
    Outcome,
    Produce,
    Receive,
    Retry,
    Return,
    Seek,
    SubscriptionId,
    Unsubscribe,
)
from bindery_simulation.topics.peers import READ, STORE, TROUBLES
from bindery_simulation.topics.world import World, run_seed
from bindery_simulation.trace import Trace

pytestmark = pytest.mark.timeout(600)  # a busy machine takes minutes for seconds
SEEDS = 8
FIRST_SEED = int(os.environ.get("BINDERY_SEED", "0"))
VARIED = (25, 20, 22, 30, 1, 8, 2, 28)
"""Seeds that together reached every state when they were chosen: they are tried first."""


def test_every_invariant_holds_for_the_first_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    tally = search.Tally()
    seconds = runner.search(search.run_one, range(FIRST_SEED, FIRST_SEED + SEEDS), tally, Budget())
    with capsys.disabled():
        sys.stdout.write(f"\n{tally.text(seconds, 1)}\n")
    assert tally.failed == []
    assert tally.count == SEEDS


@pytest.mark.simulator
@pytest.mark.parametrize(("seed", "options"), [(6, ()), (24, ()), (3, ("--faults", "stop_broker,lose_session"))])
def test_a_seed_gives_the_same_run_in_another_process(seed: int, options: tuple[str, ...]) -> None:
    """Another process has other addresses and another order of sets."""
    arguments = ["topics", "--seed", str(seed), "--trace", *options]
    play = f"import sys; from bindery_simulation.command import main; sys.exit(main({arguments!r}))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    first, second = (
        subprocess.run(
            [sys.executable, *command], env={**environment, **extra}, capture_output=True, timeout=300, check=True
        ).stdout
        for command, extra in (
            (["-m", "bindery_simulation", *arguments], {}),
            (["-c", play], {"PYTHONHASHSEED": "17", "PYTHONMALLOC": "malloc"}),
        )
    )
    assert b"every invariant holds" in first
    assert b"sha256" in first
    assert first == second


def test_a_trace_does_not_influence_a_run() -> None:
    traced, untraced = run_seed(5, is_traced=True), run_seed(5)
    assert (traced.callbacks, traced.simulated_s) == (untraced.callbacks, untraced.simulated_s)
    assert traced.trace.events
    assert untraced.trace.events == []


def test_different_seeds_give_different_runs() -> None:
    assert run_seed(1, is_traced=True).trace.digest() != run_seed(2, is_traced=True).trace.digest()


@pytest.mark.simulator
@pytest.mark.parametrize("kind", dict.fromkeys(faults.FAULTS), ids=lambda kind: kind.__name__)
def test_every_invariant_holds_under_each_fault_alone(kind: faults.Fault) -> None:
    for seed in range(2):
        outcome = run_seed(seed, faults=(kind,))
        assert outcome.violation is None, outcome.violation
        assert set(outcome.faults) == {kind.__name__}


def test_runs_reach_the_states_that_the_judge_checks() -> None:
    """Without changes of owners, lost answers, late acknowledgements and trims, the judge proves nothing."""
    wanted = {
        "another owner",
        "call to a stale owner",
        "unknown produce",
        "unknown acknowledgement",
        "cumulative",
        "part of a batch",
        "late acknowledgement",
        "returned",
        "left",
        "seek",
        "deleted",
        "redelivered",
        "trimmed",
        "lost with its broker",
        "moved",
        "moved to the dead-letter topic",
        "unknown move",
        "copies stored for another broker",
        "copies refused by another broker",
        "target of another broker searched",
        *(f"{trouble.name} between brokers" for trouble in TROUBLES),
        "repeated request",
        "refused",
        "delayed",
        *(f"received from {kind}" for kind in Kind),
    }
    seen: set[str] = set()
    for seed in dict.fromkeys((*VARIED, *range(60))):
        world = World(seed, trace=Trace(is_on=False))
        outcome = world.run()
        assert outcome.violation is None, outcome.violation
        seen |= _states(world)
        if seen >= wanted:
            return
    raise AssertionError(f"sixty seeds do not reach {wanted - seen}")


def _states(world: World) -> set[str]:
    history = world.history
    found: set[str] = set()
    for key, name in (
        (f"{STORE} 200", "copies stored for another broker"),
        (f"{STORE} 503", "copies refused by another broker"),
        (f"{READ} 200", "target of another broker searched"),
        *((trouble.name, f"{trouble.name} between brokers") for trouble in TROUBLES),
    ):
        if world.switchboard.counts[key]:
            found.add(name)
    if len({event.broker for event in history.opened}) > 1:
        found.add("another owner")
    if history.trimmed:
        found.add("trimmed")
    newest = 0
    requests: set[tuple[str, str | None]] = set()
    lease_ends_s: dict[tuple[SubscriptionId, Key], float] = {}
    for call in history.calls:
        request = call.request
        if call.incarnation is not None:
            if call.incarnation < newest:
                found.add("call to a stale owner")
            newest = max(newest, call.incarnation)
        if call.is_lost:
            found.add("lost with its broker")
        if call.outcome is Outcome.REFUSED and call.started is not None:
            found.add("refused")
        if call.outcome is Outcome.UNKNOWN and isinstance(request, Retry):
            found.add("unknown move")
        elif call.outcome is Outcome.UNKNOWN and isinstance(request, Produce | Acknowledge):
            found.add("unknown acknowledgement" if isinstance(request, Acknowledge) else "unknown produce")
        if isinstance(request, Receive):
            for key, _, count in call.deliveries:
                found.add(f"received from {request.kind}")
                assert call.settled is not None
                lease_ends_s[request.subscription, key] = call.settled.time_s + request.ack_timeout_s
                if count:
                    found.add("redelivered")
            if request.request_id is not None and (request.consumer, request.request_id) in requests:
                found.add("repeated request")
            requests.add((request.consumer, request.request_id))
        elif call.is_done:
            if isinstance(request, Produce) and any(one.is_delayed for one in request.messages):
                found.add("delayed")
            elif isinstance(request, Retry):
                found.add("moved to the dead-letter topic" if request.is_dead else "moved")
            elif isinstance(request, Acknowledge):
                found |= _kinds_of_ack(request)
                if any(lease_ends_s[request.subscription, key] < call.sent.time_s for key in request.keys):
                    found.add("late acknowledgement")
            elif isinstance(request, Return):
                found.add("returned")
            elif isinstance(request, Leave):
                found.add("left")
            elif isinstance(request, Seek):
                found.add("seek")
            elif isinstance(request, Unsubscribe):
                found.add("deleted")
    return found


def _kinds_of_ack(request: Acknowledge) -> set[str]:
    found: set[str] = set()
    if request.cumulative:
        found.add("cumulative")
    if any(index > 0 for _, _, index in request.keys):
        found.add("part of a batch")
    return found
