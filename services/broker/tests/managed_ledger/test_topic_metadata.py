"""Writes to a topic's znodes: only the owner's succeed, and an unknown outcome is resolved."""

import asyncio
from collections.abc import Sequence

import pytest
from bindery_broker.managed_ledger.topic_metadata import OwnedNode, TopicMetadata, limited
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable, NoSuchTopic, TopicFenced, TryAgain
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import Op, Stat

NAME = "t/n/persistent/x"
PATH = f"/managed-ledgers/{NAME}"


async def owned(store: MemoryStore, *, timeout_s: float = 1) -> TopicMetadata:
    metadata = TopicMetadata(store, NAME, timeout_s=timeout_s, pause_s=0.001)
    await metadata.load(create=True)
    return metadata


async def test_a_missing_topic_is_created_once_and_only_on_request() -> None:
    tree = MemoryTree()
    with pytest.raises(NoSuchTopic):
        await TopicMetadata(tree.connect(), NAME, timeout_s=1, pause_s=0.001).load(create=False)
    first, second = await owned(tree.connect()), await owned(tree.connect())
    assert first.node.version == second.node.version == 0


async def test_a_write_of_the_second_owner_fences_the_first_permanently() -> None:
    tree = MemoryTree()
    first, second = await owned(tree.connect()), await owned(tree.connect())
    await second.write_topic(b"second")
    cursor = OwnedNode(first.cursor_path("s"), None)
    for _ in range(2):
        for write in (
            first.write_topic(b"first"),
            first.write_cursor(cursor, b"cursor"),
            first.delete_topic([cursor]),
        ):
            with pytest.raises(TopicFenced):
                await write
    assert (await tree.connect().get(PATH)).data == b"second"
    assert await tree.connect().children(PATH) == []


async def test_a_cursor_is_written_only_at_the_topics_version() -> None:
    tree = MemoryTree()
    first = await owned(tree.connect())
    cursor = OwnedNode(first.cursor_path("s"), None)
    await first.write_cursor(cursor, b"1")
    await first.write_topic(b"own writes do not stop ourselves")
    await first.write_cursor(cursor, b"2")
    second = await owned(tree.connect())
    await second.write_topic(b"second")
    with pytest.raises(TopicFenced):
        await first.write_cursor(cursor, b"3")
    with pytest.raises(TopicFenced):
        await first.delete_cursor(cursor)
    ((name, (node, data)),) = (await second.load_cursors()).items()
    assert (name, node.version, data) == ("s", 1, b"2")


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("kind", ["topic", "new cursor", "cursor", "delete cursor", "delete topic"])
async def test_a_write_with_a_lost_answer_is_resolved_and_applied_once(kind: str, applied: bool) -> None:
    tree = MemoryTree()
    store = tree.connect()
    metadata = await owned(store)
    cursor = OwnedNode(metadata.cursor_path("s"), None)
    if "cursor" in kind and kind != "new cursor":
        await metadata.write_cursor(cursor, b"old")
    store.lose_next_write(applied=applied)
    if kind == "topic":
        await metadata.write_topic(b"new")
        assert (metadata.node.version, (await store.get(PATH)).stat.version) == (1, 1)
    elif kind in ("new cursor", "cursor"):
        await metadata.write_cursor(cursor, b"new")
        node = await store.get(cursor.path)
        assert (node.data, node.stat.version) == (b"new", cursor.version)
        assert cursor.version == (0 if kind == "new cursor" else 1)
    elif kind == "delete cursor":
        await metadata.delete_cursor(cursor)
        assert await store.exists(cursor.path) is None
    else:
        await metadata.delete_topic([cursor])
        assert await store.exists(PATH) is None


@pytest.mark.parametrize("applied", [False, True])
async def test_an_unknown_outcome_is_resolved_by_the_next_write(applied: bool) -> None:
    store = MemoryTree().connect()
    metadata = await owned(store, timeout_s=0.05)
    store.lose_next_write(applied=applied)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await metadata.write_topic(b"first")
    store._faults.clear()
    await metadata.write_topic(b"second")
    node = await store.get(PATH)
    assert (node.data, node.stat.version) == (b"second", 2 if applied else 1)
    assert metadata.node.version == node.stat.version


@pytest.mark.parametrize("is_same", [False, True])
async def test_a_value_that_another_broker_may_have_written_does_not_prove_a_write(is_same: bool) -> None:
    """Brokers that open a topic without an open ledger write the same list: one of them would believe the other's."""
    tree = MemoryTree()
    store = tree.connect()
    first, second = await owned(store, timeout_s=0.05), await owned(tree.connect())
    store.lose_next_write(applied=False)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await first.write_topic(b"closed", is_unique=False)
    store._faults.clear()
    await second.write_topic(b"closed" if is_same else b"other", is_unique=False)
    for _ in range(2):
        with pytest.raises(TopicFenced):
            await first.write_topic(b"mine")
    assert (await store.get(PATH)).data == (b"closed" if is_same else b"other")
    await second.write_topic(b"still the owner's")


@pytest.mark.parametrize("then", ["delete", "write", "delete topic"])
@pytest.mark.parametrize("applied", [False, True])
async def test_a_deletion_of_unknown_outcome_is_resolved_by_the_next_operation(applied: bool, then: str) -> None:
    store = MemoryTree().connect()
    metadata = await owned(store, timeout_s=0.05)
    cursor = OwnedNode(metadata.cursor_path("s"), None)
    await metadata.write_cursor(cursor, b"1")
    store.lose_next_write(applied=applied)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await metadata.delete_cursor(cursor)
    store._faults.clear()
    if then == "delete":
        await metadata.delete_cursor(cursor)
        assert await store.exists(cursor.path) is None
        await metadata.write_topic(b"still ours")
    elif then == "write":
        await metadata.write_cursor(cursor, b"2")
        node = await store.get(cursor.path)
        assert (node.data, node.stat.version) == (b"2", 0 if applied else 1)
    else:
        await metadata.delete_topic([cursor])
        assert await store.exists(PATH) is None


async def test_a_deletion_without_an_answer_has_an_unknown_outcome() -> None:
    tree = MemoryTree()
    store = tree.connect()
    metadata = await owned(store, timeout_s=0.05)
    cursor = OwnedNode(metadata.cursor_path("s"), None)
    await metadata.write_cursor(cursor, b"1")
    multi = store.multi

    async def silent(ops: Sequence[Op]) -> list[str | Stat | None]:
        await multi(ops)
        return await asyncio.get_running_loop().create_future()

    store.multi = silent  # type: ignore[method-assign]
    with pytest.raises(MetadataOutcomeUnknown):
        await metadata.delete_cursor(cursor)
    store.multi = multi  # type: ignore[method-assign]
    await metadata.delete_cursor(cursor)
    assert cursor.version is None


async def test_a_foreign_write_after_a_deletion_of_unknown_outcome_fences() -> None:
    tree = MemoryTree()
    store = tree.connect()
    metadata = await owned(store, timeout_s=0.05)
    cursor = OwnedNode(metadata.cursor_path("s"), None)
    await metadata.write_cursor(cursor, b"1")
    store.lose_next_write(applied=False)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await metadata.delete_cursor(cursor)
    store._faults.clear()
    await tree.connect().set(cursor.path, b"theirs", version=None)
    with pytest.raises(TopicFenced):
        await metadata.delete_cursor(cursor)
    assert (await tree.connect().get(cursor.path)).data == b"theirs"


async def test_a_foreign_write_while_the_outcome_was_unknown_fences() -> None:
    tree = MemoryTree()
    store = tree.connect()
    metadata = await owned(store)
    store.lose_next_write(applied=False)
    store.fail_next(MetadataUnavailable("made up"), matching=lambda operation, path: operation == "sync")
    writing = asyncio.ensure_future(metadata.write_topic(b"ours"))
    await asyncio.sleep(0)
    await tree.connect().set(PATH, b"theirs", version=None)
    with pytest.raises(TopicFenced):
        await writing
    assert (await tree.connect().get(PATH)).data == b"theirs"


async def test_a_topic_that_was_removed_is_lost() -> None:
    tree = MemoryTree()
    metadata = await owned(tree.connect())
    await tree.connect().delete(PATH, version=None)
    with pytest.raises(TopicFenced):
        await metadata.write_topic(b"x")


async def test_a_write_without_a_connection_fails_as_not_applied() -> None:
    tree = MemoryTree()
    store = tree.connect(operation_timeout_s=0.01)
    metadata = await owned(store, timeout_s=0.05)
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await metadata.write_topic(b"x")
    store._faults.clear()
    assert (await store.get(PATH)).stat.version == 0


async def test_concurrent_writes_do_not_make_one_another_stale() -> None:
    store = MemoryTree().connect()
    metadata = await owned(store)
    cursors = [OwnedNode(metadata.cursor_path(f"s{i}"), None) for i in range(5)]
    await asyncio.gather(
        *(metadata.write_cursor(cursor, b"x") for cursor in cursors),
        *(metadata.write_topic(b"%d" % i) for i in range(5)),
        *(metadata.write_cursor(cursor, b"y") for cursor in cursors),
    )
    assert (await store.get(PATH)).stat.version == 5
    await metadata.delete_topic(cursors)
    assert await store.exists(PATH) is None


@pytest.mark.parametrize("kind", ["cursor", "topic"])
async def test_a_deletion_without_a_connection_fails_as_not_applied(kind: str) -> None:
    store = MemoryTree().connect(operation_timeout_s=0.01)
    metadata = await owned(store, timeout_s=0.05)
    cursor = OwnedNode(metadata.cursor_path("s"), None)
    await metadata.write_cursor(cursor, b"1")
    for _ in range(1000):
        store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await (metadata.delete_cursor(cursor) if kind == "cursor" else metadata.delete_topic([cursor]))
    store._faults.clear()
    await metadata.write_cursor(cursor, b"2")
    assert (await store.get(cursor.path)).data == b"2"


async def test_an_operation_that_takes_too_long_may_be_tried_again() -> None:
    with pytest.raises(TryAgain, match=r"^could not write a record in time") as caught:
        async with limited(0.01, "write a record"):
            await asyncio.sleep(60)
    assert caught.value.facts == {"timeout_s": 0.01}
    with pytest.raises(TryAgain, match="could not write a record in time"):
        async with limited(60, "write a record"):
            raise TimeoutError


async def test_a_limit_changes_no_other_error_and_no_cancellation() -> None:
    with pytest.raises(NoSuchTopic):
        async with limited(60, "read"):
            raise NoSuchTopic("none")
    entered = asyncio.Event()

    async def wait() -> None:
        async with limited(60, "read"):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with limited(60, "read"):
        pass
