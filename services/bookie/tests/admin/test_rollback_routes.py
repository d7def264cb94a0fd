"""Routes about a suspected rollback of the metadata: the state, the reports, and their acceptance."""

import random
from typing import Any

import pytest
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_core.ids import BookieId
from bindery_kit.observability.health import Health
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import SUSPECTED, KnownLedgersStore, MetadataRollbackSuspected

PATH = "/api/v1/bookie/gc/rollback"
LAYOUT = LedgersLayout()


class Shard:
    def __init__(self, *ledger_ids: int) -> None:
        self.ledger_ids = ledger_ids

    async def list_ledger_ids(self) -> tuple[int, ...]:
        return self.ledger_ids

    active_ledger_ids: Any = None


class Bookie:
    def __init__(self, world: Any, guard: RollbackGuard, instance_id: str) -> None:
        self.http = world.http
        self.guard = guard
        self.known = KnownLedgersStore(world.metadata, instance_id=instance_id)

    async def suspect(self) -> None:
        with pytest.raises(MetadataRollbackSuspected):
            await self.guard.check_all()


@pytest.fixture
async def bookie(make_admin: Any) -> Bookie:
    guards: list[RollbackGuard] = []
    world = make_admin(guard=lambda: guards[0] if guards else None)
    instance_id = (await initialize_cluster(world.metadata, LAYOUT, randomness=random.Random(1))).instance_id
    assert (await world.http.get(PATH)).json()["checkedMs"] == 0
    early = await world.http.put(PATH, json={"accept": True, "version": 0})
    assert early.status_code == 503
    assert "has not joined" in early.json()["detail"]
    guards.append(
        RollbackGuard(
            [Shard(7, 9)],
            world.metadata,
            LAYOUT,
            instance_id=instance_id,
            bookie_id=BookieId("bookie-0"),
            health=Health(),
            wall_clock_ms=lambda: 5000,
        )
    )
    return Bookie(world, guards[0], instance_id)


async def test_the_state_and_all_reports_are_shown(bookie: Bookie) -> None:
    assert (await bookie.http.get(PATH)).json() == {
        "state": "ok",
        "sinceMs": 0,
        "checkedMs": 0,
        "version": None,
        "reports": {},
    }
    await bookie.suspect()
    facts = (await bookie.http.get(PATH)).json()
    version = facts.pop("version")
    assert version == (await bookie.known.read())[1]
    assert facts == {
        "state": SUSPECTED,
        "sinceMs": 5000,
        "checkedMs": 5000,
        "reports": {
            "bookie-0": {
                "foundMs": 5000,
                "unknown": 2,
                "first": 7,
                "last": 9,
                "shortEnd": 10,
                "longEnd": 0,
                "missing": None,
                "idsProtected": True,
            }
        },
    }


async def test_the_metadata_is_accepted_with_the_version_of_the_reports(bookie: Bookie) -> None:
    await bookie.suspect()
    version = (await bookie.http.get(PATH)).json()["version"]
    changed = await bookie.http.put(PATH, json={"accept": True, "version": version - 1})
    assert changed.status_code == 409
    assert "read them again" in changed.json()["detail"]
    assert bookie.guard.state.is_suspected
    done = await bookie.http.put(PATH, json={"accept": True, "version": version})
    assert done.status_code == 200
    assert done.json()["state"] == "ok"
    assert done.json()["accepted"]["bookie-0"]["unknown"] == 2
    known, _ = await bookie.known.read()
    assert (known.reports, known.accepted_by, known.accepted_ms) == ({}, "HTTP API of bookie bookie-0", 5000)
    again = await bookie.http.put(PATH, json={"accept": True, "version": version + 1})
    assert (again.status_code, "nothing to accept" in again.json()["detail"]) == (409, True)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"accept": True},
        {"version": 1},
        {"accept": False, "version": 1},
        {"accept": 1, "version": 1},
        {"accept": "true", "version": 1},
        {"accept": True, "version": None},
        {"accept": True, "version": True},
        {"accept": True, "version": "1"},
        {"accept": True, "version": 1.0},
        {"accept": True, "version": 1, "other": 1},
        [],
    ],
)
async def test_only_an_explicit_acceptance_is_carried_out(bookie: Bookie, body: Any) -> None:
    await bookie.suspect()
    assert (await bookie.http.put(PATH, json=body)).status_code == 400
    assert bookie.guard.state.is_suspected
    assert (await bookie.known.read())[0].reports
