"""The state of the storage is shown as notes, which do not make the bookie unready."""

from typing import Any

import pytest
from bindery_bookie.membership.readiness import ReadinessNotes
from bindery_bookie.state import READ_ONLY_DRAINING, READ_ONLY_REMOVED, READ_ONLY_SESSION, BookieState
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState
from bindery_bookie.storage.store import ReplayProgress
from bindery_kit.observability.health import Health


class Shard:
    def __init__(self, limbo: LimboState | None = None) -> None:
        self.limbo = limbo


class World:
    def __init__(self, *shards: Shard) -> None:
        self.health, self.state = Health(), BookieState()
        made: Any = shards
        self.notes = ReadinessNotes(self.health, self.state, made)

    @property
    def shown(self) -> dict[str, Any]:
        self.health.started()
        status, body = self.health.ready_answer()
        assert status == 200, "a note must not make the bookie unready"
        return dict(body.get("notes", {}))

    @property
    def progress(self) -> dict[str, Any]:
        return self.health.startup_answer()[1]


def lost(reason: str, left: int = 0) -> LimboState:
    return LimboState(reason, 5, LimboPhase.REPAIRING, left)


def test_the_reasons_for_being_read_only_are_shown_until_they_end() -> None:
    world = World()
    world.state.set_read_only("disk", "98 % in use")
    world.state.set_read_only("admin", "an operator")
    assert world.shown == {"read_only": "no adds are accepted: 98 % in use; an operator"}
    world.state.set_read_only("disk", None)
    assert world.shown == {"read_only": "no adds are accepted: an operator"}
    world.state.set_read_only("admin", None)
    assert world.shown == {}


@pytest.mark.parametrize("part", [READ_ONLY_SESSION, READ_ONLY_DRAINING, READ_ONLY_REMOVED])
def test_reasons_with_a_place_of_their_own_have_no_note(part: str) -> None:
    world = World()
    world.state.set_read_only(part, "no session")
    assert world.shown == {}


def test_incomplete_storage_is_shown_until_it_is_repaired() -> None:
    shards = [Shard(lost("disk a is empty")), Shard(), Shard(lost("disk a is empty")), Shard(lost("log 7 is lost"))]
    world = World(*shards)
    world.notes.limbo()
    refilled = "storage is incomplete and is being refilled from other bookies"
    assert world.shown == {"limbo": f"{refilled}: disk a is empty; log 7 is lost"}
    for shard, left in zip(shards, (3, 0, 0, 4), strict=True):
        if shard.limbo is not None:
            shard.limbo.left = left
    world.notes.limbo()
    assert world.shown == {"limbo": f"{refilled} (ledgers left: 7): disk a is empty; log 7 is lost"}
    for shard in shards:
        shard.limbo = None
    world.notes.limbo()
    assert world.shown == {}


def test_the_progress_of_the_listing_is_shown_during_the_start() -> None:
    world = World()
    world.notes.ledgers_checked(12)
    text = str(world.progress)
    assert "storage was lost: checking which ledgers were stored here" in text
    assert "12" in text


@pytest.mark.parametrize(
    ("done", "total", "percent"), [(0, 300, 0), (299, 300, 99), (300, 300, 100), (0, 0, 100), (1, 3, 33)]
)
def test_the_progress_of_the_replay_is_shown_in_per_cent(done: int, total: int, percent: int) -> None:
    world = World()
    world.notes.replayed(ReplayProgress(bytes_done=done, bytes_total=total, entries=5))
    assert f"replaying the journal ({percent} %, 5 entries)" in str(world.progress)
