"""Routes about the cluster have BookKeeper's responses."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from bindery_bookie.admin.cluster_routes import ROUTES
from bindery_core.formats import bookie_service_info
from bindery_core.formats.replication_formats import encode_vote
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

API = "/api/v1/bookie"
LAYOUT = LedgersLayout()


async def register(store: MetadataStore, name: str, *, host: str | None = None, read_only: bool = False) -> None:
    """Register a bookie with its service info; `host`: None publishes only the admin port."""
    info = bookie_service_info.of_bookie(host=host or "", port=3181, http_port=8080)
    if host is None:
        info = bookie_service_info.BookieServiceInfo(info.endpoints[1:])
    path = LAYOUT.bookie(BookieId(name), read_only=read_only)
    await store.create(path, bookie_service_info.encode(info), make_parents=True)


async def test_bookies_are_listed_by_kind_in_order(admin) -> None:
    await register(admin.metadata, "b-2", host="two")
    await register(admin.metadata, "b-1", host="one")
    await register(admin.metadata, "b-3", host="three", read_only=True)
    listed = await admin.http.get(f"{API}/list_bookies")
    assert listed.json() == {"b-1": None, "b-2": None}
    assert list(listed.json()) == ["b-1", "b-2"]
    assert (await admin.http.get(f"{API}/list_bookies?type=rw")).json() == {"b-1": None, "b-2": None}
    assert (await admin.http.get(f"{API}/list_bookies?type=ro")).json() == {"b-3": None}


async def test_bookies_are_listed_with_their_hosts(admin) -> None:
    await register(admin.metadata, "b-1", host="one")
    await register(admin.metadata, "b-2")
    await register(admin.metadata, "b-3", host="three", read_only=True)
    path = f"{API}/list_bookies?print_hostnames=true"
    assert (await admin.http.get(path)).json() == {"b-1": "one", "b-2": None}
    assert (await admin.http.get(f"{path}&type=ro")).json() == {"b-3": "three"}


async def test_a_bookie_whose_service_info_cannot_be_read_has_no_host(admin) -> None:
    await register(admin.metadata, "b-1", host="one")
    await admin.metadata.create(LAYOUT.bookie(BookieId("b-2"), read_only=False), b"")
    await admin.metadata.create(LAYOUT.bookie(BookieId("b-3"), read_only=False), b"\xff")
    found = (await admin.http.get(f"{API}/list_bookies?print_hostnames=true")).json()
    assert found == {"b-1": "one", "b-2": None, "b-3": None}


async def test_a_bookie_that_leaves_meanwhile_has_no_host(make_admin: Callable[..., Any]) -> None:
    made = make_admin()
    await made.initialize()
    await register(made.metadata, "b-1", host="one")

    class Leaving:
        """A store in which a bookie ends its session after it was listed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(made.metadata, name)

        async def get(self, path: str, **options: Any) -> Any:
            if path == LAYOUT.bookie(BookieId("b-1"), read_only=False):
                await made.metadata.delete(path, version=None)
            return await made.metadata.get(path, **options)

    leaving = make_admin(metadata=lambda: Leaving())
    assert (await leaving.http.get(f"{API}/list_bookies?print_hostnames=true")).json() == {"b-1": None}


async def test_another_kind_of_bookies_is_a_bad_request(admin) -> None:
    answer = await admin.http.get(f"{API}/list_bookies", params={"type": "x" * 200})
    assert (answer.status_code, answer.json()["facts"]) == (400, {"found": "x" * 100})
    assert "type must be rw or ro" in answer.json()["detail"]


class Client:
    def __init__(self, spaces: dict[str, tuple[int, int]]) -> None:
        self.spaces = spaces

    async def disk_spaces(self) -> dict[str, tuple[int, int]]:
        return self.spaces


def with_spaces(make_admin: Callable[..., Any], spaces: dict[str, tuple[int, int]]) -> Any:
    async def client() -> Any:
        return Client(spaces)

    return make_admin(ledger_client=client).http


async def test_free_space_is_listed_by_bookie_and_summed(make_admin: Callable[..., Any]) -> None:
    http = with_spaces(make_admin, {"b-2": (2_000_000, 1536), "b-1": (999, 0)})
    listed = (await http.get(f"{API}/list_bookie_info")).json()
    assert list(listed) == ["b-1", "b-2", "ClusterInfo: "]
    assert listed == {
        "b-1": ": {Free: 0, Total: 999},",
        "b-2": ": {Free: 1536(1.536KB), Total: 2000000(2MB)},",
        "ClusterInfo: ": "{Free: 1536(1.536KB), Total: 2000999(2MB)}",
    }


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999, "999"),
        (1000, "1000(1KB)"),
        (1500, "1500(1.5KB)"),
        (999_999, "999999(999.999KB)"),
        (1_999_999, "1999999(1.999MB)"),
        (10**9, "1000000000(1GB)"),
        (123 * 10**12, "123000000000000(123TB)"),
        (10**15, "1000000000000000(1000TB)"),
    ],
)
async def test_sizes_have_units_of_a_thousand_and_are_rounded_down(
    make_admin: Callable[..., Any], number: int, text: str
) -> None:
    http = with_spaces(make_admin, {"b": (number, 0)})
    assert (await http.get(f"{API}/list_bookie_info")).json()["b"] == f": {{Free: 0, Total: {text}}},"


async def test_no_bookie_with_free_space_is_an_error(make_admin: Callable[..., Any]) -> None:
    answer = await with_spaces(make_admin, {}).get(f"{API}/list_bookie_info")
    assert answer.status_code == 404
    assert "no bookie reported its free space" in answer.json()["detail"]


async def test_the_info_of_a_new_cluster_is_empty(admin) -> None:
    assert (await admin.http.get(f"{API}/cluster_info")).json() == {
        "auditorElected": False,
        "auditorId": "",
        "clusterUnderReplicated": False,
        "ledgerReplicationEnabled": True,
        "totalBookiesCount": 0,
        "writableBookiesCount": 0,
        "readonlyBookiesCount": 0,
        "unavailableBookiesCount": 0,
    }


async def test_the_info_of_a_cluster_counts_bookies_by_state(admin) -> None:
    store = admin.metadata
    cookies = CookieStore(store, LAYOUT)
    for at in range(6):
        await cookies.write(BookieId(f"b-{at}"), b"cookie", version=None)
    for at in (0, 1):
        await BookieRegistration(store, LAYOUT, BookieId(f"b-{at}")).register(read_only=False)
    await BookieRegistration(store, LAYOUT, BookieId("b-2")).register(read_only=True)
    await store.create(LAYOUT.replication_disabled, b"", make_parents=True)
    await UnderreplicationManager(store, LAYOUT, randomness=random.Random(1), clock_ms=lambda: 1).mark(
        LedgerId(5), ("b-5",)
    )
    await store.create(f"{LAYOUT.auditor_election}/V_0000000003", encode_vote("a-1"), make_parents=True)
    assert (await admin.http.get(f"{API}/cluster_info")).json() == {
        "auditorElected": True,
        "auditorId": "a-1",
        "clusterUnderReplicated": True,
        "ledgerReplicationEnabled": False,
        "totalBookiesCount": 6,
        "writableBookiesCount": 2,
        "readonlyBookiesCount": 1,
        "unavailableBookiesCount": 3,
    }


async def test_the_cluster_is_not_asked_during_the_start(make_admin: Callable[..., Any]) -> None:
    http = make_admin(is_open=lambda: False, metadata=lambda: None).http
    for route in ROUTES:
        answer = await http.get(route.path)
        assert (answer.status_code, answer.json()["code"]) == (503, "starting"), route.path


def test_routes_that_ask_many_are_limited() -> None:
    assert [route.path for route in ROUTES if route.is_heavy] == [f"{API}/list_bookie_info", f"{API}/cluster_info"]
