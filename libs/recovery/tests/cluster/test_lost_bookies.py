"""Each line of the table in `lost_bookies`, failovers, outages, and random histories compared with a naive count."""

import random

import pytest
from bindery_core.ids import BookieId
from bindery_recovery.cluster.lost_bookies import GAP_MAX_S, Change, ChangeKind, LostBookies, Observation, Phase

B1, B2, B3 = BookieId("b1"), BookieId("b2"), BookieId("b3")
KNOWN = frozenset({B1, B2, B3})
EPOCH_MS = 1_700_000_000_000


class Watchman:
    """A LostBookies that observes the bookies every second."""

    def __init__(self, *, delay_s: float = 60.0, settle_s: float = 0.0, now_s: float = 0.0) -> None:
        self.lost = LostBookies(delay_s, settle_s)
        self.now_s = now_s
        self.registered = set(KNOWN)
        self.exempt: set[BookieId] = set()
        self.known = set(KNOWN)
        self.told: list[Change] = []
        self.lost.begin(now_s)
        self.look()

    def look(self) -> None:
        view = Observation(frozenset(self.known), frozenset(self.registered), frozenset(self.exempt))
        self.told += self.lost.observe(view, self.now_s, EPOCH_MS + int(self.now_s * 1000))

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1
            self.look()

    @property
    def due(self) -> set[BookieId]:
        return set(self.lost.due(self.now_s))

    def whats(self, bookie_id: BookieId = B1) -> list[ChangeKind]:
        return [change.kind for change in self.told if change.bookie_id == bookie_id]


@pytest.fixture
def seen() -> Watchman:
    return Watchman()


def test_a_bookie_is_lost_once_it_was_absent_for_the_delay_and_not_before(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.look()
    assert seen.whats() == [ChangeKind.ABSENT]
    seen.run(59)
    assert seen.due == set()
    assert seen.lost.left_s(B1, seen.now_s) == pytest.approx(1)
    seen.run(1)
    assert seen.due == {B1}
    assert seen.lost.left_s(B1, seen.now_s) == 0


def test_a_return_within_the_delay_ends_the_absence_and_the_next_one_starts_from_zero(seen: Watchman) -> None:
    for _ in range(5):
        seen.registered.discard(B1)
        seen.run(50)
        seen.registered.add(B1)
        seen.run(1)
        assert seen.due == set()
    assert seen.whats() == [ChangeKind.ABSENT, ChangeKind.BACK] * 5
    assert seen.lost.flaps == {B1: 5}
    assert not any(change.was_handled for change in seen.told)


def test_a_leased_bookie_is_exempt_and_the_end_of_the_lease_starts_the_delay(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.run(10)
    seen.exempt.add(B1)
    seen.run(500)
    assert seen.due == set()
    assert seen.whats() == [ChangeKind.ABSENT, ChangeKind.EXEMPT]
    seen.exempt.clear()
    seen.run(60)
    assert seen.due == set()
    seen.run(1)
    assert seen.due == {B1}


def test_a_read_only_bookie_counts_as_registered(seen: Watchman) -> None:
    """An observation does not distinguish read-only from writable bookies."""
    seen.run(1000)
    assert seen.told == []
    assert seen.lost.next_poll_s(seen.now_s) is None


def test_a_handled_bookie_is_not_due_again_until_it_has_returned(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.run(61)
    seen.lost.handled([B1])
    seen.run(1000)
    assert seen.due == set()
    assert seen.lost.left_s(B1, seen.now_s) is None
    seen.registered.add(B1)
    seen.run(1)
    assert seen.told[-1].kind is ChangeKind.BACK
    assert seen.told[-1].was_handled
    assert seen.lost.flaps == {}, "a return after a loss is no flap"
    seen.registered.discard(B1)
    seen.run(61)
    assert seen.due == {B1}


def test_the_regular_recheck_includes_handled_bookies_and_keeps_delays(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.run(61)
    seen.lost.handled([B1])
    seen.registered.discard(B2)
    seen.run(10)
    seen.lost.recheck()
    assert seen.due == {B1}


def test_a_requested_audit_includes_every_absent_bookie(seen: Watchman) -> None:
    seen.registered -= {B1, B2}
    seen.run(2)
    seen.lost.handled([B2])
    seen.lost.force()
    assert seen.due == {B1, B2}
    seen.lost.set_delay(10_000)
    assert seen.due == {B1, B2}, "a changed delay does not withdraw the request"
    seen.registered.add(B1)
    seen.run(1)
    assert seen.due == {B2}


def test_a_requested_audit_excludes_exempt_and_registered_bookies(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.exempt.add(B1)
    seen.run(1)
    seen.lost.force()
    assert seen.due == set()


@pytest.mark.parametrize(
    ("delay_s", "due"), [(0, True), (29, True), (30, True), (31, False), (600, False)], ids=lambda value: str(value)
)
def test_a_changed_delay_counts_the_absence_so_far(seen: Watchman, delay_s: float, due: bool) -> None:
    seen.registered.discard(B1)
    seen.look()
    seen.run(30)
    seen.lost.set_delay(delay_s)
    assert seen.due == ({B1} if due else set())
    if not due:
        seen.run(delay_s - 31)
        assert seen.due == set()
        seen.run(1)
        assert seen.due == {B1}


def test_a_due_bookie_waits_again_after_the_delay_is_extended(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.run(70)
    assert seen.due == {B1}
    seen.lost.set_delay(600)
    assert seen.due == set()


def test_the_delay_applies_to_each_of_several_bookies_lost_at_once(seen: Watchman) -> None:
    """BookKeeper audits at once when a second bookie is lost, so a rolling restart triggers copying."""
    seen.registered.discard(B1)
    seen.look()
    seen.run(30)
    seen.registered.discard(B2)
    seen.look()
    seen.run(29)
    assert seen.due == set()
    seen.run(1)
    assert seen.due == {B1}
    seen.run(30)
    assert seen.due == {B1, B2}


def test_a_bookie_whose_cookie_is_deleted_is_lost_after_its_delay_and_then_forgotten(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.look()
    seen.run(30)
    seen.known.discard(B1)
    seen.run(30)
    assert seen.due == {B1}
    seen.lost.handled([B1])
    seen.run(1)
    assert B1 not in seen.lost.absences
    assert seen.whats() == [ChangeKind.ABSENT]


# --- quiet times and outages ------------------------------------------------------------------------------------------


def test_no_bookie_is_reported_or_due_in_the_quiet_time() -> None:
    seen = Watchman(delay_s=5, settle_s=15)
    seen.registered -= {B1, B2}
    seen.look()
    seen.run(14)
    assert (seen.told, seen.due) == ([], set())
    assert seen.lost.next_poll_s(seen.now_s) == pytest.approx(1)
    seen.registered.add(B2)
    seen.run(1)
    assert seen.told == [Change(B1, ChangeKind.ABSENT, pytest.approx(15))]
    assert seen.due == {B1}
    assert seen.lost.to_json().keys() == {"b1"}


def test_an_audit_requested_in_the_quiet_time_waits_for_its_end() -> None:
    seen = Watchman(delay_s=600, settle_s=15)
    seen.registered.discard(B1)
    seen.run(5)
    seen.lost.force()
    assert seen.due == set()
    seen.run(10)
    assert seen.due == {B1}


def test_an_outage_of_the_metadata_store_does_not_count_as_absence() -> None:
    """All sessions end during the outage, and the bookies return at different times."""
    seen = Watchman(delay_s=60, settle_s=15)
    seen.run(20)
    seen.registered.discard(B1)
    seen.look()
    seen.run(40)
    seen.lost.cut_off(seen.now_s)
    seen.now_s += 3600
    assert seen.due == set()
    seen.lost.begin(seen.now_s)
    seen.registered.clear()
    seen.look()
    assert seen.lost.left_s(B1, seen.now_s) == pytest.approx(20)
    seen.run(10)
    seen.registered |= {B2, B3}
    seen.run(5)
    assert seen.due == set()
    assert [change.bookie_id for change in seen.told] == [B1], "returns within the quiet time are not reported"
    seen.run(5)
    assert seen.due == {B1}


def test_the_time_since_the_last_poll_counts_when_an_outage_begins(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.look()
    seen.now_s += 5
    seen.lost.cut_off(seen.now_s)
    assert seen.lost.left_s(B1, seen.now_s) == 55


def test_a_suspended_process_counts_at_most_the_maximum_gap(seen: Watchman) -> None:
    seen.registered.discard(B1)
    seen.look()
    seen.now_s += 3600
    assert seen.due == set()
    seen.look()
    assert seen.lost.left_s(B1, seen.now_s) == pytest.approx(60 - GAP_MAX_S)


# --- failover ---------------------------------------------------------------------------------------------------------


def test_the_next_leader_continues_the_observed_absence() -> None:
    first = Watchman(delay_s=60, now_s=500)
    first.registered.discard(B1)
    first.look()
    first.run(25)
    second = Watchman(delay_s=60, now_s=90_000)
    second.lost.resume(first.lost.to_json())
    second.registered.discard(B1)
    second.look()
    assert second.lost.absences[B1].since_ms == EPOCH_MS + 500_000
    second.run(34)
    assert second.due == set()
    second.run(1)
    assert second.due == {B1}
    assert second.told == [], "the first leader has reported it"


def test_the_delay_ends_even_if_each_term_is_shorter_than_the_delay() -> None:
    kept: dict[str, object] = {}
    for number in range(6):
        seen = Watchman(delay_s=60, settle_s=5, now_s=number * 10_000)
        seen.lost.resume(kept)
        seen.registered.discard(B1)
        seen.look()
        seen.run(11)
        assert (seen.due == {B1}) == (number == 5)
        kept = seen.lost.to_json()
    assert kept["b1"]["absent_s"] == 66.0  # type: ignore[index]


def test_a_handled_bookie_stays_handled_for_the_next_leader() -> None:
    first = Watchman()
    first.registered.discard(B1)
    first.run(61)
    first.lost.handled([B1])
    second = Watchman()
    second.lost.resume(first.lost.to_json())
    second.registered.discard(B1)
    second.run(100)
    assert second.due == set()
    assert second.lost.absences[B1].phase is Phase.HANDLED


def test_a_return_between_two_leaders_is_reported() -> None:
    first = Watchman()
    first.registered.discard(B1)
    first.run(30)
    second = Watchman()
    second.lost.resume(first.lost.to_json())
    second.look()
    assert second.whats() == [ChangeKind.BACK]


@pytest.mark.parametrize(
    "kept",
    [
        {"b1": None},
        {"b1": {}},
        {"b1": {"absent_s": "x", "phase": "waiting", "since_ms": 1}},
        {"b1": {"absent_s": 5, "phase": "?", "since_ms": 1}},
        {"b1": {"absent_s": -5, "phase": "waiting", "since_ms": 1}},
        {"b1": {"absent_s": float("inf"), "phase": "waiting", "since_ms": 1}},
    ],
)
def test_an_invalid_stored_absence_is_ignored(kept: dict[str, object]) -> None:
    seen = Watchman()
    seen.lost.resume(kept | {"b2": {"absent_s": 0, "phase": "waiting", "since_ms": 1}})
    assert seen.lost.absences.keys() == {B2}, "the valid ones are not"


# --- random histories -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_random_histories_give_the_same_result_as_a_naive_count(seed: int) -> None:
    """Naive implementation: count from the history of all polls how long each bookie has been absent."""
    rng = random.Random(seed)
    delay = rng.randrange(1, 20)
    seen = Watchman(delay_s=delay)
    history: list[set[BookieId]] = [set(KNOWN - seen.registered - seen.exempt)]
    handled: set[BookieId] = set()
    for _ in range(200):
        for bookie_id in KNOWN:
            if rng.random() < 0.08:
                (seen.registered.discard if bookie_id in seen.registered else seen.registered.add)(bookie_id)
            if rng.random() < 0.02:
                (seen.exempt.discard if bookie_id in seen.exempt else seen.exempt.add)(bookie_id)
        seen.run(1)
        history.append(set(KNOWN - seen.registered - seen.exempt))
        handled &= history[-1]
        expected = set()
        for bookie_id in KNOWN:
            looks = 0
            for absent in reversed(history):
                if bookie_id not in absent:
                    break
                looks += 1
            if looks - 1 >= delay and bookie_id not in handled:
                expected.add(bookie_id)
        assert seen.due == expected
        if rng.random() < 0.3:
            seen.lost.handled(expected)
            handled |= expected
