"""Znodes without sessions: versions, sequences, order of events, and transactions that apply all or nothing."""

import pytest
from bindery_core.errors import AlreadyExists, BadRequest, BinderyError, NoSuchNode, NotEmpty, VersionConflict
from bindery_metadata.stores.memory_tree import Event, Kind, OpResult, Znodes
from bindery_metadata.stores.store import Check, Create, Delete, Node, Op, Set, Stat

DATA, CHILDREN = Kind.DATA, Kind.CHILDREN


@pytest.fixture
def nodes() -> Znodes:
    return Znodes()


def apply(nodes: Znodes, *ops: Op, owner: int = 9, now_ms: int = 5) -> tuple[list[OpResult], list[Event]]:
    return nodes.apply(ops, owner=owner, now_ms=now_ms)


def stat(**changes: int) -> Stat:
    plain = {
        "version": 0,
        "children_version": 0,
        "ctime_ms": 5,
        "mtime_ms": 5,
        "ephemeral_owner": 0,
        "children_count": 0,
    }
    return Stat(**plain | changes)


def picture(nodes: Znodes, *paths: str) -> list[object]:
    return [nodes.exists(path) and (nodes.get(path), nodes.children(path)) for path in ("/", *paths)]


def test_a_new_tree_has_the_root_only(nodes: Znodes) -> None:
    assert nodes.get("/") == Node(b"", stat(ctime_ms=0, mtime_ms=0))
    assert nodes.children("/") == []
    assert nodes.owned_by(0) == []
    assert nodes.exists("/a") is None


def test_a_node_is_created(nodes: Znodes) -> None:
    assert apply(nodes, Create("/a", b"x")) == (["/a"], [(DATA, "/a"), (CHILDREN, "/")])
    assert nodes.get("/a") == Node(b"x", stat())
    assert nodes.exists("/a") == stat()
    assert nodes.exists("/") == stat(ctime_ms=0, mtime_ms=0, children_version=1, children_count=1)
    apply(nodes, Create("/a/c"), Create("/a/b"))
    assert nodes.children("/a") == ["b", "c"]


def test_an_ephemeral_node_belongs_to_its_session(nodes: Znodes) -> None:
    apply(nodes, Create("/a"), Create("/a/b", ephemeral=True), owner=9)
    apply(nodes, Create("/a/c", ephemeral=True), owner=8)
    assert nodes.exists("/a/b") == stat(ephemeral_owner=9)
    assert nodes.owned_by(9) == ["/a/b"]
    assert nodes.owned_by(8) == ["/a/c"]
    with pytest.raises(BadRequest, match="an ephemeral node cannot have children") as caught:
        apply(nodes, Create("/a/b/x"))
    assert caught.value.facts == {"path": "/a/b/x"}


def test_a_sequential_name_counts_every_child_ever_created(nodes: Znodes) -> None:
    apply(nodes, Create("/a"), Create("/a/other"))
    assert apply(nodes, Create("/a/n-", sequential=True)) == (
        ["/a/n-0000000001"],
        [(DATA, "/a/n-0000000001"), (CHILDREN, "/a")],
    )
    apply(nodes, Delete("/a/n-0000000001", None))
    assert apply(nodes, Create("/a/n-", sequential=True))[0] == ["/a/n-0000000002"]


def test_data_is_replaced_with_a_new_version(nodes: Znodes) -> None:
    apply(nodes, Create("/a", b"x"), now_ms=5)
    changed = stat(version=1, mtime_ms=6)
    assert apply(nodes, Set("/a", b"y", 0), now_ms=6) == ([changed], [(DATA, "/a")])
    assert nodes.get("/a") == Node(b"y", changed)
    assert apply(nodes, Set("/a", b"z", None), now_ms=7)[0] == [stat(version=2, mtime_ms=7)]


def test_a_node_is_deleted(nodes: Znodes) -> None:
    apply(nodes, Create("/a"), Create("/a/b"))
    assert apply(nodes, Delete("/a/b", 0)) == ([None], [(DATA, "/a/b"), (CHILDREN, "/a/b"), (CHILDREN, "/a")])
    assert nodes.exists("/a/b") is None
    assert nodes.children("/a") == []
    assert nodes.exists("/a") == stat(children_version=2)


def test_a_check_changes_nothing(nodes: Znodes) -> None:
    apply(nodes, Create("/a"))
    assert apply(nodes, Check("/a", 0)) == ([None], [])
    assert nodes.exists("/a") == stat()


@pytest.mark.parametrize(
    ("op", "error", "facts"),
    [
        (Create("/x/y"), NoSuchNode, {"path": "/x/y"}),
        (Create("/a"), AlreadyExists, {"path": "/a"}),
        (Set("/x", b"", None), NoSuchNode, {"path": "/x"}),
        (Set("/a", b"", 1), VersionConflict, {"path": "/a", "expected": 1, "found": 0}),
        (Delete("/x", None), NoSuchNode, {"path": "/x"}),
        (Delete("/a/b", 2), VersionConflict, {"path": "/a/b", "expected": 2, "found": 0}),
        (Delete("/a", 0), NotEmpty, {"path": "/a", "children_count": 1}),
        (Delete("/", None), BadRequest, {"path": "/"}),
        (Check("/x", 0), NoSuchNode, {"path": "/x"}),
        (Check("/a", 1), VersionConflict, {"path": "/a", "expected": 1, "found": 0}),
    ],
    ids=str,
)
def test_a_failed_operation_takes_back_those_before_it(
    nodes: Znodes, op: Op, error: type[BinderyError], facts: dict[str, object]
) -> None:
    apply(nodes, Create("/a", b"x"), Create("/a/b"), Create("/d", b"d"), Create("/s", b"s"))
    paths = ("/a", "/a/b", "/d", "/s", "/n", "/n/m")
    before = picture(nodes, *paths)
    earlier: list[Op] = [
        Create("/n"),
        Create("/n/m"),
        Set("/s", b"t", 0),
        Set("/s", b"u", 1),
        Delete("/d", 0),
        Create("/d", b"new"),
        Delete("/d", 0),
    ]
    with pytest.raises(error) as caught:
        apply(nodes, *earlier, op, now_ms=6)
    assert caught.value.facts == facts
    assert picture(nodes, *paths) == before


def test_what_was_taken_back_leaves_no_gap_in_the_sequence(nodes: Znodes) -> None:
    apply(nodes, Create("/a"))
    with pytest.raises(NoSuchNode):
        apply(nodes, Create("/a/n", sequential=True), Delete("/x", None))
    assert apply(nodes, Create("/a/n", sequential=True))[0] == ["/a/n0000000000"]


def test_operations_see_those_before_them_and_events_keep_their_order(nodes: Znodes) -> None:
    results, events = apply(nodes, Create("/a"), Create("/a/b", b"1"), Set("/a/b", b"2", 0), Delete("/a/b", 1))
    assert results == ["/a", "/a/b", stat(version=1), None]
    assert events == [
        (DATA, "/a"),
        (CHILDREN, "/"),
        (DATA, "/a/b"),
        (CHILDREN, "/a"),
        (DATA, "/a/b"),
        (DATA, "/a/b"),
        (CHILDREN, "/a/b"),
        (CHILDREN, "/a"),
    ]


@pytest.mark.parametrize("read", [Znodes.get, Znodes.children])
def test_a_missing_node_cannot_be_read(nodes: Znodes, read: object) -> None:
    with pytest.raises(NoSuchNode) as caught:
        read(nodes, "/x")  # type: ignore[operator]
    assert caught.value.facts == {"path": "/x"}
