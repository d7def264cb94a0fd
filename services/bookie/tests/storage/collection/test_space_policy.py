"""Which logs are rewritten because of dead bytes, and how fast."""

import random

import pytest
from bindery_bookie.storage.collection.collection_interface import LogInfo, LogState
from bindery_bookie.storage.collection.space_policy import (
    ADDS_MIN,
    GOAL,
    SPEED_MAX,
    SpacePlan,
    Speed,
    dead_allowed,
    dead_bytes,
    plan_space,
    wanted_speed,
)


def a_log(log_id: int, size: int, live: int, state: LogState = LogState.SEALED) -> LogInfo:
    return LogInfo(log_id, f"{log_id:x}.log", state, size, live, live / size, 1, 1, log_id, 0)


def plan(*logs: LogInfo, allowed: int, threshold: float = 0.8, excluded: tuple[int, ...] = (), begun: bool = False):  # type: ignore[no-untyped-def]
    return plan_space(logs, allowed=allowed, threshold=threshold, excluded=excluded, has_begun=begun)


@pytest.mark.parametrize(
    ("live", "ratio", "least", "allowed"),
    [(0, 1.0, 512, 512), (512, 1.0, 512, 512), (1000, 1.0, 512, 1000), (1000, 0.5, 0, 500)],
)
def test_dead_bytes_are_allowed_in_proportion_to_live_ones(live: int, ratio: float, least: int, allowed: int) -> None:
    assert dead_allowed(live, ratio_max=ratio, size_min=least) == allowed


def test_nothing_is_rewritten_while_the_dead_bytes_are_allowed() -> None:
    logs = a_log(1, 100, 10), a_log(2, 100, 50)
    assert dead_bytes(logs) == 140
    assert plan(*logs, allowed=140) == SpacePlan()
    assert plan(*logs, allowed=139) == SpacePlan((1,))


def test_the_sparsest_logs_are_rewritten_until_the_goal_is_reached() -> None:
    logs = a_log(1, 100, 60), a_log(2, 100, 10), a_log(3, 100, 30), a_log(4, 100, 100)
    assert plan(*logs, allowed=190) == SpacePlan((2,)), "200 - 90 is below three quarters of 190"
    assert plan(*logs, allowed=120) == SpacePlan((2, 3)), "200 - 90 - 70 is below three quarters of 120"
    assert plan(*logs, allowed=10) == SpacePlan((2, 3, 1))


def test_a_pass_that_has_begun_ends_at_the_goal() -> None:
    logs = a_log(1, 100, 10), a_log(2, 100, 20)
    assert plan(*logs, allowed=200) == SpacePlan()
    assert plan(*logs, allowed=200, begun=True) == SpacePlan((1,))
    assert plan(*logs, allowed=230, begun=True) == SpacePlan()


def test_logs_above_the_threshold_and_excluded_and_damaged_logs_are_not_rewritten() -> None:
    logs = a_log(1, 100, 80), a_log(2, 100, 10), a_log(3, 100, 20, LogState.DAMAGED), a_log(4, 100, 79)
    assert plan(*logs, allowed=1) == SpacePlan((2, 4))
    assert plan(*logs, allowed=1, excluded=(2,)) == SpacePlan((4,))
    assert plan(*logs, allowed=1, threshold=0.0) == SpacePlan()


def test_a_dead_log_is_left_to_removal() -> None:
    assert plan(a_log(1, 100, 0), allowed=1) == SpacePlan()


def test_the_open_log_is_closed_only_if_closed_logs_do_not_suffice() -> None:
    opened = a_log(9, 100, 10, LogState.OPEN)
    assert plan(opened, a_log(1, 100, 50), allowed=20) == SpacePlan((1,))
    assert plan(opened, a_log(1, 100, 90), allowed=20) == SpacePlan(closes_open=True)
    assert plan(a_log(9, 100, 85, LogState.OPEN), allowed=1) == SpacePlan(), "it is not sparse"


@pytest.mark.parametrize("seed", range(200))
def test_plans_reach_the_goal_at_the_least_cost(seed: int) -> None:
    """Compared with all other choices: no choice that reaches the goal copies less per freed byte of its last log."""
    draw = random.Random(seed)
    logs = [a_log(at, size := draw.randint(1, 1000), draw.randint(1, size)) for at in range(1, draw.randint(2, 12))]
    allowed = draw.randint(1, 2000)
    found = plan(*logs, allowed=allowed)
    chosen = [one for one in logs if one.log_id in found.log_ids]
    others = [one for one in logs if one.log_id not in found.log_ids and one.live_ratio < 0.8]
    left = dead_bytes(logs) - dead_bytes(chosen)
    if dead_bytes(logs) <= allowed:
        assert not chosen
        return
    assert left <= int(GOAL * allowed) or not others
    if chosen and others:
        assert max(one.live_ratio for one in chosen) <= min(one.live_ratio for one in others)


@pytest.mark.parametrize(
    ("dead", "allowed", "speed"),
    [
        (0, 100, 1.0),
        (100, 100, 1.0),
        (125, 100, 2.75),
        (150, 100, 4.5),
        (200, 100, 8.0),
        (10_000, 100, 8.0),
        (1, 0, 8.0),
    ],
)
def test_the_wanted_speed_grows_with_the_excess(dead: int, allowed: int, speed: float) -> None:
    assert wanted_speed(dead=dead, allowed=allowed) == speed


class Adds:
    """Totals of a shard's adds."""

    def __init__(self) -> None:
        self.adds = 0
        self.seconds = 0.0

    def some(self, latency_s: float, count: int = 100) -> dict[str, float]:
        self.adds += count
        self.seconds += latency_s * count
        return {"adds": self.adds, "seconds": self.seconds}


def test_speed_grows_step_by_step_while_adds_are_not_slower() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.010))  # type: ignore[arg-type]
    seen = []
    for _ in range(12):
        speed.observe(**adds.some(0.012), wanted=SPEED_MAX)  # type: ignore[arg-type]
        seen.append(speed.now)
    assert seen == sorted(seen)
    assert seen[0] == 1.25
    assert seen[-1] == SPEED_MAX


def test_speed_halves_while_adds_are_slower_and_never_falls_below_the_configured_rate() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.010))  # type: ignore[arg-type]
    for _ in range(20):
        speed.observe(**adds.some(0.010), wanted=8.0)  # type: ignore[arg-type]
    seen = []
    for _ in range(4):
        speed.observe(**adds.some(0.020), wanted=8.0)  # type: ignore[arg-type]
        seen.append(speed.now)
    assert seen == [4.0, 2.0, 1.0, 1.0]


def test_speed_follows_what_is_wanted() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.010))  # type: ignore[arg-type]
    for _ in range(20):
        speed.observe(**adds.some(0.010), wanted=8.0)  # type: ignore[arg-type]
    speed.observe(**adds.some(0.010), wanted=2.0)  # type: ignore[arg-type]
    assert speed.now == 2.0
    speed.end(**adds.some(0.010))  # type: ignore[arg-type]
    assert speed.now == 1.0


def test_speed_without_a_reference_is_the_configured_rate() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.010, count=ADDS_MIN - 1))  # type: ignore[arg-type]
    speed.observe(**adds.some(0.010), wanted=8.0)  # type: ignore[arg-type]
    assert speed.now == 1.0


def test_speed_grows_if_there_are_hardly_any_adds_to_disturb() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.0, count=0))  # type: ignore[arg-type]
    for _ in range(12):
        speed.observe(**adds.some(0.5, count=1), wanted=8.0)  # type: ignore[arg-type]
    assert speed.now == SPEED_MAX


def test_the_reference_is_what_adds_took_between_two_passes() -> None:
    speed, adds = Speed(), Adds()
    speed.begin(**adds.some(0.010))  # type: ignore[arg-type]
    speed.observe(**adds.some(0.100), wanted=8.0)  # type: ignore[arg-type]
    speed.end(**adds.some(0.100))  # type: ignore[arg-type]
    speed.begin(**adds.some(0.050))  # type: ignore[arg-type]
    speed.observe(**adds.some(0.060), wanted=8.0)  # type: ignore[arg-type]
    assert speed.now == 1.25, "60 ms are not slow compared with 50 ms"
