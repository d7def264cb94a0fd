"""What is remembered of requests with idempotency keys."""

import tracemalloc

import pytest
from bindery_broker.errors import IdempotencyKeyReused
from bindery_broker.producers.keys import KeyBudget, KeyTable, RequestKey, Run
from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_id import MessageId

NOW = 1_700_000_000_000
WINDOW = 300_000


def request(number: int = 0, content: bytes = b"c" * 16) -> RequestKey:
    return RequestKey(number.to_bytes(16, "big"), content)


def table(units_max: int = 100) -> tuple[KeyTable, KeyBudget]:
    budget = KeyBudget(units_max)
    return KeyTable(budget, window_ms=WINDOW), budget


def test_entries_of_a_request_are_found_by_its_key() -> None:
    keys, _ = table()
    for number in range(3):
        keys.stored(request(), Run(number * 2, 5, 10 + number, 1, 2), count=7, now_ms=NOW)
    keys.stored(request(), Run(6, 6, 0, 1, 1), count=7, now_ms=NOW)
    record = keys.find(request(), now_ms=NOW)
    assert record is not None
    assert record.runs == [Run(0, 5, 10, 3, 2), Run(6, 6, 0, 1, 1)]
    assert (record.stored, record.count) == (7, 7)
    assert record.ids(-1) == {
        0: MessageId(5, 10, 0), 1: MessageId(5, 10, 1), 2: MessageId(5, 11, 0), 3: MessageId(5, 11, 1),
        4: MessageId(5, 12, 0), 5: MessageId(5, 12, 1), 6: MessageId(6, 0, -1),
    }  # fmt: skip


def test_an_entry_that_is_given_twice_counts_once() -> None:
    keys, _ = table()
    for run in (Run(0, 5, 0, 1, 2), Run(4, 5, 2, 1, 2), Run(0, 5, 0, 1, 2), Run(2, 5, 1, 1, 2), Run(4, 5, 2, 1, 2)):
        keys.stored(request(), run, count=6, now_ms=NOW)
    record = keys.find(request(), now_ms=NOW)
    assert record is not None
    assert record.stored == 6
    assert sorted(record.ids(-1)) == list(range(6))


def test_other_content_is_refused() -> None:
    keys, _ = table()
    keys.stored(request(), Run(0, 5, 0, 1, 1), count=1, now_ms=NOW)
    with pytest.raises(IdempotencyKeyReused):
        keys.find(request(content=b"d" * 16), now_ms=NOW)


def test_records_are_forgotten_after_the_window_and_give_their_room_back() -> None:
    keys, budget = table(units_max=2)
    keys.stored(request(1), Run(0, 5, 0, 1, 1), count=1, now_ms=NOW)
    keys.stored(request(2), Run(0, 5, 1, 1, 1), count=1, now_ms=NOW + 10)
    with pytest.raises(TooManyRequests):
        keys.check_room(now_ms=NOW + WINDOW - 1)
    keys.check_room(now_ms=NOW + WINDOW)
    assert keys.find(request(1), now_ms=NOW + WINDOW) is None
    assert keys.find(request(2), now_ms=NOW + WINDOW) is not None
    assert budget.units == 1
    keys.close()
    assert budget.units == 0


def test_a_request_with_many_entries_takes_more_room() -> None:
    keys, budget = table()
    for number in range(8):
        keys.stored(request(), Run(number, number, 0, 1, 1), count=8, now_ms=NOW)
    assert budget.units == 3


def test_a_hundred_thousand_keys_take_less_than_64_mib() -> None:
    keys, _ = table(units_max=10**6)
    tracemalloc.start()
    try:
        for number in range(100_000):
            keys.stored(request(number), Run(0, 10**6, number, 1, 1), count=1, now_ms=NOW)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(keys) == 100_000
    assert size < 64 * 2**20
