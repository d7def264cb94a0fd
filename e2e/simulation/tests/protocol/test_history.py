"""Random histories of the ledger protocol keep every invariant, and a seed determines a history."""

import hashlib
import os
import subprocess
import sys

import pytest
from bindery_simulation.protocol.history import play
from bindery_simulation.protocol.profiles import PROFILES

SEED_COUNT = 250


@pytest.mark.parametrize("profile", PROFILES)
def test_every_invariant_holds(profile: str) -> None:
    for seed in range(SEED_COUNT):
        outcome = play(seed, profile=profile)
        assert outcome.violation is None, f"seed {seed} of {profile}: {outcome.violation}"


REACHED = {
    "fences": 0.6, "rival recoveries": 0.25, "write-backs": 0.4, "changes": 0.08, "unknown outcomes": 0.03,
    "version conflicts": 0.05, "degraded": 0.1, "limbo": 0.05, "rot": 0.03, "marks removed": 0.15,
    "fragments copied": 0.05, "fragments replaced": 0.01, "long polls with an entry": 0.01, "lacs learned": 0.05,
    "deletes": 0.02, "changes in recovery": 0.01, "recoveries killed": 0.05, "segments 2": 0.02, "segments 3": 0.002,
    "kept unacknowledged entries": 0.1, "links cut": 0.01,
}  # fmt: skip
"""Minimum share of histories that reach each state."""


def test_histories_reach_the_states_where_protocols_fail() -> None:
    """Histories that reach no such state would prove nothing."""
    count = 2_000
    reach = dict.fromkeys(REACHED, 0)
    for seed in range(count):
        for what in play(seed).reach:
            if what in reach:
                reach[what] += 1
    assert not {what: reach[what] for what, share in REACHED.items() if reach[what] < share * count}


def test_a_trace_does_not_influence_a_history() -> None:
    for seed in range(100):
        assert play(seed).reach == play(seed, trace=True).reach


_DIGEST = """
import hashlib
from bindery_simulation.protocol.history import play
found = hashlib.sha256()
for seed in range(200):
    found.update(play(seed, trace=True).chart.digest().encode())
print(found.hexdigest())
"""


def test_a_seed_is_the_same_history_in_every_process() -> None:
    """The process may have another hash seed, because no result depends on the order of a set."""
    digests = set()
    for hash_seed in ("0", "1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST], env=environment, capture_output=True, text=True, timeout=100, check=True
        )
        digests.add(done.stdout)
    here = hashlib.sha256()
    for seed in range(200):
        chart = play(seed, trace=True).chart
        assert chart is not None
        here.update(chart.digest().encode())
    assert digests == {here.hexdigest() + "\n"}
