"""`bindery bookie rack list|set|unset` over metadata in memory."""

import json
from typing import Any

import pytest
from bindery_core.ids import BookieId
from bindery_metadata.bookies.racks import RackStore
from memory_cluster import MemoryCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    cluster = MemoryCluster(monkeypatch)
    cluster.register("b0", "b1")
    return cluster


def run(cluster: MemoryCluster, *words: str) -> Any:
    return cluster.invoke("bookie", "rack", *words)


def groups(cluster: MemoryCluster) -> Any:
    return cluster.do(lambda store: RackStore(store).get()).groups


def test_a_rack_is_set_shown_and_removed(cluster: MemoryCluster) -> None:
    assert run(cluster, "set", "b0", "zone-a", "--hostname", "host-0").output == "b0 is in rack /zone-a\n"
    assert groups(cluster) == {"default": {"b0": {"rack": "/zone-a", "hostname": "host-0"}}}
    assert "b0 was in rack /zone-a already" in run(cluster, "set", "b0", "/zone-a").output
    shown = json.loads(run(cluster, "list", "--json").output)["bookies"]
    assert [(row["bookie"], row["rack"], row["group"], row["state"]) for row in shown] == [
        ("b0", "/zone-a", "default", "writable"),
        ("b1", "/default-rack", None, "writable"),
    ]
    assert run(cluster, "unset", "b0").exit_code == 0
    assert groups(cluster) == {}
    again = run(cluster, "unset", "b0")
    assert (again.exit_code, again.output) == (1, "the record of racks does not name b0\n")


def test_entries_of_bookies_that_are_not_registered_are_shown(cluster: MemoryCluster) -> None:
    cluster.do(lambda store: RackStore(store).set_rack(BookieId("old:3181"), "/zone-b", group="gold"))
    lines = run(cluster, "list").output.splitlines()
    assert any(all(word in line for word in ("old:3181", "/zone-b", "gold", "not registered")) for line in lines)


def test_a_bookie_keeps_its_group_unless_another_one_is_named(cluster: MemoryCluster) -> None:
    run(cluster, "set", "b0", "/a", "--group", "gold")
    run(cluster, "set", "b0", "/b")
    assert groups(cluster) == {"gold": {"b0": {"rack": "/b"}}}
    run(cluster, "set", "b0", "/b", "--group", "silver")
    assert groups(cluster) == {"silver": {"b0": {"rack": "/b"}}}


def test_a_rack_that_is_none_is_refused(cluster: MemoryCluster) -> None:
    result = run(cluster, "set", "b0", "/a/b/c")
    assert result.exit_code != 0
    assert "not a rack" in result.output + str(result.exception)
    assert groups(cluster) == {}
