"""Parents are created on demand and deleted when empty, while other clients do the same."""

import pytest
from bindery_core.errors import AlreadyExists, MetadataUnavailable, NoSuchNode
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.parents import ATTEMPTS_MAX, create_with_parents, make_path, prune_empty_parents


@pytest.fixture
async def memory() -> MemoryStore:
    return MemoryTree().connect()


async def test_a_path_is_made_of_empty_persistent_nodes(memory: MemoryStore) -> None:
    await memory.create("/a", b"kept")
    await make_path(memory, "/a/b/c")
    assert (await memory.get("/a")).data == b"kept"
    for path in ("/a/b", "/a/b/c"):
        node = await memory.get(path)
        assert (node.data, node.stat.ephemeral_owner) == (b"", 0)
    await make_path(memory, "/a/b/c")
    assert await memory.children("/a/b") == ["c"]


async def test_a_path_whose_ancestor_is_deleted_meanwhile_is_given_up(memory: MemoryStore) -> None:
    memory.fail_next(NoSuchNode("deleted again"), matching=lambda _, path: path == "/a/b")
    await make_path(memory, "/a/b/c")
    assert await memory.children("/a") == []


async def test_a_node_is_created_with_its_parents(memory: MemoryStore) -> None:
    assert await create_with_parents(memory, "/a/b/c", b"x") == "/a/b/c"
    node = await memory.get("/a/b/c")
    assert (node.data, node.stat.ephemeral_owner) == (b"x", 0)
    with pytest.raises(AlreadyExists):
        await create_with_parents(memory, "/a/b/c", b"y")


async def test_a_node_can_be_ephemeral_and_sequential_but_its_parents_are_not(memory: MemoryStore) -> None:
    assert await create_with_parents(memory, "/a/n-", b"x", ephemeral=True, sequential=True) == "/a/n-0000000000"
    assert (await memory.get("/a/n-0000000000")).stat.ephemeral_owner == memory.session_id
    assert (await memory.get("/a")).stat.ephemeral_owner == 0
    assert await create_with_parents(memory, "/a/n-", b"x", sequential=True) == "/a/n-0000000001"
    assert (await memory.get("/a/n-0000000001")).stat.ephemeral_owner == 0


async def test_parents_that_are_deleted_again_are_created_again(memory: MemoryStore) -> None:
    for _ in range(ATTEMPTS_MAX - 1):
        memory.fail_next(NoSuchNode("no parent"), matching=lambda _, path: path == "/a/b")
    assert await create_with_parents(memory, "/a/b", b"x") == "/a/b"


async def test_parents_that_are_always_deleted_end_the_attempts(memory: MemoryStore) -> None:
    assert ATTEMPTS_MAX == 20
    for _ in range(ATTEMPTS_MAX):
        memory.fail_next(NoSuchNode("no parent"), matching=lambda _, path: path == "/a/b")
    with pytest.raises(MetadataUnavailable) as caught:
        await create_with_parents(memory, "/a/b", b"x")
    assert caught.value.facts == {"path": "/a/b", "attempts": 20}


async def test_empty_parents_are_deleted_up_to_an_ancestor(memory: MemoryStore) -> None:
    await make_path(memory, "/top/a/b/c")
    await memory.delete("/top/a/b/c", version=None)
    await prune_empty_parents(memory, "/top/a/b/c", up_to="/top")
    assert await memory.children("/top") == []
    assert await memory.children("/") == ["top"]


async def test_a_parent_with_another_child_stays(memory: MemoryStore) -> None:
    await make_path(memory, "/top/a/b")
    await make_path(memory, "/top/a/other")
    await memory.create("/top/z")
    await prune_empty_parents(memory, "/top/a/b/c", up_to="/top")
    assert await memory.children("/top/a") == ["other"]


async def test_parents_that_are_gone_already_are_passed(memory: MemoryStore) -> None:
    await make_path(memory, "/top/a")
    await prune_empty_parents(memory, "/top/a/b/c/d", up_to="/top/")
    assert await memory.children("/top") == []


async def test_all_parents_can_be_deleted(memory: MemoryStore) -> None:
    await make_path(memory, "/a/b")
    await prune_empty_parents(memory, "/a/b/c", up_to="/")
    assert await memory.children("/") == []


async def test_nodes_outside_the_ancestor_stay(memory: MemoryStore) -> None:
    await make_path(memory, "/topmost/a")
    await prune_empty_parents(memory, "/topmost/a/b", up_to="/top")
    assert await memory.children("/topmost") == ["a"]
