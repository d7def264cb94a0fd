"""The prestop hook sets a maintenance and never fails a stop."""

import os
import random
import subprocess
import sys
import time

import pytest
from bindery_bookie.prestop import LIMIT_S, bookie_id_of
from bindery_bookie.prestop import begin_maintenance as begin
from bindery_bookie.settings import BookieSettings
from bindery_core.errors import BadRequest
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import ABSENT, Intent, Membership, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

ID = BookieId("bindery-bookie-0.bindery-bookie")
LAYOUT = LedgersLayout()
NOW_MS = 1_000_000


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryTree().connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    await CookieStore(store, LAYOUT).write(ID, b"cookie", version=None)
    return store


def memberships(store: MemoryStore) -> MembershipStore:
    return MembershipStore(store, clock_ms=lambda: NOW_MS)


async def begin_maintenance(store: MemoryStore, bookie_id: BookieId = ID, seconds: float = 600) -> str:
    return await begin(store, LAYOUT, bookie_id, now_ms=NOW_MS, maintenance_s=seconds)


async def test_the_maintenance_lasts_as_long_as_the_setting(store: MemoryStore) -> None:
    assert "in maintenance for 600 s" in await begin_maintenance(store)
    found = await memberships(store).get(ID)
    assert (found.intent, found.until_ms) == (Intent.MAINTENANCE, NOW_MS + 600_000)
    assert (found.by, found.reason) == (ID, "stopped in order")


@pytest.mark.parametrize(
    ("intent", "until_ms"),
    [
        (Intent.JOINING, None),
        (Intent.DRAINING, None),
        (Intent.REMOVED, None),
        (Intent.MAINTENANCE, None),
        (Intent.MAINTENANCE, NOW_MS + 600_001),
    ],
)
async def test_a_state_that_takes_precedence_is_kept(store: MemoryStore, intent: Intent, until_ms: int | None) -> None:
    said = await memberships(store).set(ID, intent, until_ms=until_ms, by="ann")
    await begin_maintenance(store)
    assert await memberships(store).get(ID) == said


@pytest.mark.parametrize("until_ms", [NOW_MS - 1, NOW_MS + 599_999])
async def test_a_maintenance_that_ends_earlier_is_extended(store: MemoryStore, until_ms: int) -> None:
    await memberships(store).set(ID, Intent.MAINTENANCE, until_ms=until_ms, by="ann")
    await begin_maintenance(store)
    assert (await memberships(store).get(ID)).until_ms == NOW_MS + 600_000


@pytest.mark.parametrize("later_ms", [1_000, 599_999, 600_000, 9_000_000])
async def test_a_bookie_that_is_stopped_again_before_it_served_gets_no_new_maintenance(
    store: MemoryStore, later_ms: int
) -> None:
    """Failing probes stop a container repeatedly."""
    await begin_maintenance(store)
    said = await begin(store, LAYOUT, ID, now_ms=NOW_MS + later_ms, maintenance_s=600)
    assert "has not served since its last stop" in said
    assert (await memberships(store).get(ID)).until_ms == NOW_MS + 600_000


@pytest.mark.parametrize("read_only", [False, True])
async def test_a_registered_bookie_gets_a_new_maintenance(store: MemoryStore, read_only: bool) -> None:
    await begin_maintenance(store)
    await store.create(LAYOUT.bookie(ID, read_only=read_only), make_parents=True)
    await begin(store, LAYOUT, ID, now_ms=NOW_MS + 5_000, maintenance_s=600)
    assert (await memberships(store).get(ID)).until_ms == NOW_MS + 605_000


async def test_a_concurrent_change_of_an_operator_is_kept(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, really_get = memberships(store), MembershipStore.get
    longer_ms = NOW_MS + 3_600_000

    async def get_then_ann(self: MembershipStore, bookie_id: BookieId) -> Membership:
        found = await really_get(self, bookie_id)
        monkeypatch.setattr(MembershipStore, "get", really_get)
        await operator.set(ID, Intent.MAINTENANCE, until_ms=longer_ms, by="ann")
        return found

    monkeypatch.setattr(MembershipStore, "get", get_then_ann)
    assert "already in maintenance that ends later" in await begin_maintenance(store)
    assert (await operator.get(ID)).until_ms == longer_ms


async def test_a_bookie_without_cookie_gets_no_maintenance(store: MemoryStore) -> None:
    assert "never served" in await begin_maintenance(store, BookieId("other"))
    assert (await memberships(store).get(BookieId("other"))).version == ABSENT


async def test_a_setting_of_zero_seconds_sets_no_maintenance(store: MemoryStore) -> None:
    assert "BOOKIE_MAINTENANCE_S is 0" in await begin_maintenance(store, seconds=0)
    assert (await memberships(store).get(ID)).version == ABSENT


def test_the_hook_derives_the_same_id_as_the_bookie() -> None:
    assert bookie_id_of(BookieSettings(bookie_id=ID)) == ID
    assert bookie_id_of(BookieSettings(port=3181, advertised_host="b0")) == "b0:3181"
    with pytest.raises(BadRequest, match="BOOKIE_BOOKIE_ID"):
        bookie_id_of(BookieSettings(port=0, bookie_id=""))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"BOOKIE_ZOOKEEPER": "127.0.0.1:1"}, "no zookeeper server responds"),
        ({"BOOKIE_ZOOKEEPER": "no-such-host.invalid:2181"}, "no zookeeper server responds"),
        ({"BOOKIE_ZOOKEEPER": "nonsense"}, "not a list of zookeeper servers"),
        ({"BOOKIE_PORT": "many"}, "port: must be a whole number"),
    ],
)
def test_no_error_delays_the_stop(environment: dict[str, str], said: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "bindery_bookie.prestop"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert time.monotonic() - began < LIMIT_S + 15, "the limit, and the start of an interpreter on a busy machine"
