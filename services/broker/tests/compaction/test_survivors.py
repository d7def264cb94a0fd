"""Which messages stay: compared with a table of all messages, and for entries that are not decoded."""

import random
from dataclasses import fields
from typing import Any

import pytest
from bindery_broker.compaction.survivors import ENTRY_SIZE, KEY_SIZE, Survivors
from bindery_broker.errors import NotCompactable
from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_codec import Message, OpaqueMessage
from bindery_pulsar.message_encoding import Chunk, Encoding, OpaqueReason
from bindery_pulsar.message_id import Position

BASE: dict[str, Any] = {"batch_size": 1, "producer_name": "p", "sequence_id": 0, "publish_time_ms": 0}


def message(key: str | bytes | None, payload: bytes = b"x", *, index: int = -1, **more: Any) -> Message:
    return Message(**BASE, payload=payload, key=key, batch_index=index, **more)


def opaque(key: str | None, reason: OpaqueReason, payload: bytes = b"x", **encoding: Any) -> OpaqueMessage:
    found = message(key, payload)
    plain = {field.name: getattr(found, field.name) for field in fields(Message)}
    return OpaqueMessage(**plain, encoding=Encoding(reason=reason, **encoding))


def chunk(key: str, uuid: str, index: int, count: int) -> OpaqueMessage:
    return opaque(key, OpaqueReason.CHUNK, chunk=Chunk(uuid=uuid, index=index, count=count, total_size=9))


def survivors(*entries: list[Message], size_max: int = 10**6) -> Survivors:
    found = Survivors(size_max=size_max)
    for number, messages in enumerate(entries):
        found.add(Position(1, number), messages)
    return found


def kept(*entries: list[Message]) -> dict[int, list[int]]:
    return {position.entry_id: list(indexes) for position, indexes in survivors(*entries).kept().items()}


def test_the_last_message_of_a_key_stays():
    assert kept([message("a")], [message("b")], [message("a")]) == {1: [], 2: []}


def test_a_tombstone_removes_its_key():
    assert kept([message("a")], [message("a", null_value=True)], [message("b")]) == {2: []}
    assert kept([message("a")], [message("a", b"")]) == {}
    assert kept([message("a")], [message("a", b"")], [message("a")]) == {2: []}


def test_messages_without_a_key_are_removed():
    assert kept([message(None)], [message("")], [message(b"a")], [message("a")]) == {1: [], 2: [], 3: []}


def test_messages_of_batches_are_counted_one_by_one():
    first = [message("a", index=0), message("b", index=1), message("a", index=2)]
    second = [message("b", index=0), message("c", index=1), message("c", b"", index=2)]
    assert kept(first, second) == {0: [2], 1: [0]}


def test_an_encrypted_entry_counts_as_one_message():
    one = opaque("a", OpaqueReason.ENCRYPTED, batch_size=5)
    assert kept([one], [message("a")]) == {1: []}
    assert kept([message("a")], [one]) == {1: []}
    assert kept([opaque(None, OpaqueReason.ENCRYPTED)]) == {}
    assert kept([message("a")], [opaque("a", OpaqueReason.COMPRESSION, b"z", uncompressed_size=0)]) == {}
    assert kept([opaque("a", OpaqueReason.SIZE, uncompressed_size=9)]) == {0: []}


@pytest.mark.parametrize("reason", [OpaqueReason.SIZE, OpaqueReason.COMPRESSION])
def test_a_batch_of_unknown_keys_cannot_be_compacted(reason):
    with pytest.raises(NotCompactable):
        survivors([opaque("a", reason, batch_size=2)])


def test_a_message_in_chunks_stays_as_a_whole_once_it_is_complete():
    parts = [[chunk("a", "u", index, 3)] for index in range(3)]
    assert kept([message("a")], *parts) == {1: [], 2: [], 3: []}
    assert kept(*parts, [message("a")]) == {3: []}
    assert kept([message("a")], *parts[:2]) == {0: [], 1: [], 2: []}
    assert kept(parts[0], *parts) == {1: [], 2: [], 3: []}
    other = [[chunk("a", "v", index, 2)] for index in range(2)]
    assert kept(*parts, *other) == {3: [], 4: []}
    assert kept([chunk("a", "u", 0, 1)]) == {0: []}


def test_an_unreadable_entry_stays():
    found = survivors([message("a")])
    found.add_unreadable(Position(1, 1))
    found.add(Position(1, 2), [message("a")])
    assert sorted(found.kept()) == [(1, 1), (1, 2)]


def test_the_memory_is_limited_and_given_back():
    size = KEY_SIZE + 1
    found = survivors([message("a")], [message("a")], [message("b")], size_max=2 * size)
    assert (found.size, found.keys, found.messages) == (2 * size, 2, 3)
    with pytest.raises(TooManyRequests, match="BROKER_COMPACTION_KEYS_BYTES_MAX") as caught:
        found.add(Position(1, 9), [message("c")])
    assert caught.value.facts["keys"] == 2
    found.add(Position(1, 9), [message("a", b"")])
    found.add(Position(1, 10), [message("c")])
    assert found.size == 2 * size
    with pytest.raises(TooManyRequests):
        found.add_unreadable(Position(3, 0))
    found.add(Position(1, 11), [message("b", b"")])
    found.add(Position(1, 12), [chunk("c", "u", 0, 2)])
    found.add(Position(1, 13), [chunk("c", "u", 1, 2)])
    assert found.size == size + ENTRY_SIZE
    found.add(Position(1, 14), [message("c")])
    assert found.size == size


@pytest.mark.parametrize("seed", range(50))
def test_what_stays_is_what_a_table_of_all_messages_has(seed):
    draw = random.Random(seed)
    table: dict[str, tuple[int, int]] = {}
    entries: list[list[Message]] = []
    for number in range(60):
        size = draw.choice([1, 1, 4])
        entry = []
        for index in range(size):
            key, payload = draw.choice("abcdefgh"), draw.choice([b"", b"x", b"x"])
            at = index if size > 1 else -1
            entry.append(message(key, payload, index=at))
            table.pop(key, None)
            if payload:
                table[key] = (number, at)
        entries.append(entry)
    found = survivors(*entries)
    assert found.size == sum(KEY_SIZE + len(key) for key in table)
    places = {(at.entry_id, index) for at, indexes in found.kept().items() for index in (indexes or [-1])}
    assert places == set(table.values())
