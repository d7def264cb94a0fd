"""Only what is durable counts as a duplicate, and the table stays small."""

import random
import tracemalloc

import pytest
from bindery_broker.producers.sequences import IDLE_MS_MAX, KEPT_MS, Place, SequenceTable, Verdict
from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_id import MessageId, Position

NOW = 1_700_000_000_000


def place(first: int, last: int | None = None, *, entry: int = 0, size: int = 1) -> Place:
    return Place(first, first if last is None else last, Position(1, entry), size)


def transcript(text: str) -> None:
    """Run commands and compare the verdicts: `push 3`, `persist 3`, `reset`, `3 NEW`."""
    table = SequenceTable()
    for line in filter(None, map(str.strip, text.splitlines())):
        match line.split():
            case ["push", number]:
                table.push("p", int(number), now_ms=NOW)
            case ["persist", number]:
                table.persist("p", place(int(number)), now_ms=NOW)
            case ["reset"]:
                table.reset("p")
            case [number, verdict]:
                assert table.verdict("p", int(number)).name == verdict, line
            case _:
                raise AssertionError(line)


def test_a_message_that_is_being_stored_is_undetermined() -> None:
    transcript("""
        0 NEW
        push 0
        0 UNDETERMINED
        1 NEW
        push 1
        persist 0
        0 DUPLICATE
        1 UNDETERMINED
        persist 1
        1 DUPLICATE
        2 NEW
    """)


def test_a_failed_write_is_new_again() -> None:
    """Pulsar lost messages here: the retry after a failed write counted as a duplicate."""
    transcript("""
        push 4
        persist 4
        push 5
        push 6
        reset
        4 DUPLICATE
        5 NEW
        6 NEW
    """)


def test_the_highest_sequence_id_of_a_batch_counts() -> None:
    table = SequenceTable()
    table.persist("p", place(3, 7, size=5), now_ms=NOW)
    assert table.verdict("p", 7) is Verdict.DUPLICATE
    assert table.last_persisted("p") == 7
    assert table.last_persisted("q") == table.last_pushed("q") == -1


def test_ids_of_the_last_entries_are_known() -> None:
    table = SequenceTable()
    table.persist("p", place(0, entry=4), now_ms=NOW)
    table.persist("p", place(1, 3, entry=5, size=3), now_ms=NOW)
    table.persist("p", place(10, 30, entry=6, size=2), now_ms=NOW)
    assert table.message_id("p", 0, partition=2) == MessageId(1, 4, -1, 2)
    assert table.message_id("p", 2, partition=-1) == MessageId(1, 5, 1, -1)
    assert table.message_id("p", 20, partition=-1) is None  # which of the two has this number is not known
    assert table.message_id("p", 9, partition=-1) is None
    assert table.message_id("q", 0, partition=-1) is None


def test_a_producer_without_a_stored_message_leaves_nothing() -> None:
    table = SequenceTable()
    table.push("p", 0, now_ms=NOW)
    table.reset("p")
    assert len(table) == 0


def test_idle_producers_are_forgotten() -> None:
    table = SequenceTable()
    for name, at in (("a", NOW), ("b", NOW + 1), ("c", NOW + 2)):
        table.persist(name, place(0), now_ms=at)
    table.push("a", 1, now_ms=NOW + 3)
    table.persist("a", place(1), now_ms=NOW + 3)
    assert table.expire(NOW + IDLE_MS_MAX) == 0
    assert table.expire(NOW + IDLE_MS_MAX + 2) == 2
    assert table.persisted() == {"a": 1}


def test_a_new_producer_replaces_the_one_that_was_idle_longest_but_not_soon() -> None:
    table = SequenceTable(producers_max=2)
    table.push("a", 0, now_ms=NOW)
    table.persist("a", place(0), now_ms=NOW)
    table.push("b", 0, now_ms=NOW + 10)
    with pytest.raises(TooManyRequests):
        table.push("c", 0, now_ms=NOW + KEPT_MS - 1)
    assert len(table) == 2
    table.push("c", 0, now_ms=NOW + KEPT_MS)
    assert table.verdict("a", 0) is Verdict.NEW
    assert table.verdict("b", 0) is Verdict.UNDETERMINED


def test_a_snapshot_restores_numbers_and_ages() -> None:
    table = SequenceTable()
    for number, name in enumerate("cab"):
        table.persist(name, place(number), now_ms=NOW + number * 1000)
    again = SequenceTable()
    again.load(table.persisted(), {name: table.active_ms(name) for name in "abc"}, now_ms=NOW + 5000)
    assert again.persisted() == {"c": 0, "a": 1, "b": 2}
    assert again.expire(NOW + IDLE_MS_MAX + 1000) == 2
    assert again.persisted() == {"b": 2}


def test_a_hundred_thousand_producers_take_less_than_32_mib() -> None:
    table = SequenceTable()
    tracemalloc.start()
    try:
        for number in range(100_000):
            now_ms = NOW + number * 40  # more than an hour
            name = f"short-lived-{number}"
            table.push(name, number, now_ms=now_ms)
            table.persist(name, place(number, entry=number), now_ms=now_ms)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == 10_000
    assert size < 32 * 2**20


@pytest.mark.parametrize("seed", range(20))
def test_what_is_stored_is_what_counts(seed: int) -> None:
    """A producer that repeats each message until it is a duplicate stores each once, whatever fails."""
    chance = random.Random(seed)
    table = SequenceTable()
    log: list[int] = []
    for number in range(50):
        while table.verdict("p", number) is not Verdict.DUPLICATE:
            table.push("p", number, now_ms=NOW)
            assert table.verdict("p", number) is Verdict.UNDETERMINED
            if chance.random() < 0.5:
                log.append(number)
                table.persist("p", place(number, entry=len(log)), now_ms=NOW)
            table.reset("p")
    assert log == list(range(50))
