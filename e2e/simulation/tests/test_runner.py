"""The runner keeps to the budget of a search, in one process or in several."""

import os
import pickle
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from itertools import count

import pytest
from bindery_simulation.protocol.invariants import Invariant
from bindery_simulation.protocol.invariants import Violation as ProtocolViolation
from bindery_simulation.runner import Budget, run_pieces, search
from bindery_simulation.service.verdict import Violation as ServiceViolation
from bindery_simulation.storage.verdict import Problem
from bindery_simulation.storage.verdict import Violation as StorageViolation


class Numbers:
    """Counts pieces. Each multiple of `failing` is a failure."""

    unit = "numbers"

    def __init__(self, failing: int = 1_000_000) -> None:
        self.seen: list[int] = []
        self._failing = failing

    @property
    def count(self) -> int:
        return len(self.seen)

    @property
    def failed(self) -> list[int]:
        return [one for one in self.seen if one % self._failing == 0]

    def add(self, part: int) -> None:
        self.seen.append(part)


def double(piece: int) -> int:
    return 2 * piece


@pytest.mark.parametrize("jobs", [1, 2])
def test_all_pieces_are_run(jobs: int) -> None:
    tally = Numbers()
    search(double, range(1, 20), tally, Budget(jobs=jobs))
    assert sorted(tally.seen) == list(range(2, 40, 2))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_ends_at_each_limit(jobs: int) -> None:
    """At most `jobs` + 1 pieces are in progress."""
    tally = Numbers()
    search(double, count(1), tally, Budget(count_max=10, jobs=jobs))
    assert 10 <= tally.count <= 10 + jobs
    tally = Numbers(failing=4)
    search(double, count(1), tally, Budget(failures_max=3, jobs=jobs))
    assert 3 <= len(tally.failed) <= 3 + jobs
    tally = Numbers()
    assert search(double, count(1), tally, Budget(seconds=0.05, jobs=jobs)) >= 0.05
    assert tally.count


def test_a_search_ends_if_one_of_its_processes_ends() -> None:
    with pytest.raises(BrokenProcessPool):
        list(run_pieces(os._exit, [3], jobs=2, goes_on=lambda: True))


def test_pieces_are_taken_one_by_one() -> None:
    taken: list[int] = []

    def pieces() -> Iterator[int]:
        for piece in count(1):
            taken.append(piece)
            yield piece

    results = run_pieces(double, pieces(), jobs=1, goes_on=lambda: True)
    assert [next(results), next(results)] == [2, 4]
    assert taken == [1, 2]


@pytest.mark.parametrize(
    "violation",
    [
        ServiceViolation("liveness", "a bookie hangs"),
        ProtocolViolation(next(iter(Invariant)), "two writers"),
        StorageViolation(Problem("lost", (1, 2), "the entry is gone")),
    ],
)
def test_a_violation_survives_the_way_between_processes(violation: AssertionError) -> None:
    copied = pickle.loads(pickle.dumps(violation))
    assert type(copied) is type(violation)
    assert (str(copied), vars(copied)) == (str(violation), vars(violation))
