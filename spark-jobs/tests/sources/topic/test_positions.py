"""Positions of a topic: bounds, slices, tasks, and offsets of a stream, without a cluster."""

import random
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from bindery_core.errors import BadRequest, NoSuchEntry
from bindery_core.ids import ID_MAX
from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.message_id import EARLIEST, LATEST
from bindery_pulsar.topic_name import TopicName
from bindery_spark.sources.topic.options import TopicOptions
from bindery_spark.sources.topic.positions import (
    ALL,
    CLOCK_SLACK_MS,
    Bounds,
    Extent,
    Slice,
    advance,
    check_not_trimmed,
    from_offset,
    initial,
    parse_bounds,
    settled,
    slices_of,
    tasks_of,
    to_ms,
    to_offset,
)
from topic_extents import HOUR_MS, entries_of, extents

T = "public/default/t"


def test_bounds_are_positions_or_times() -> None:
    assert parse_bounds("earliest", "latest") == ALL
    assert parse_bounds("7:3", "9:0") == Bounds(after=Position(7, 2), upto=Position(9, 0))
    assert parse_bounds("7:3", "7:3").has_positions
    assert parse_bounds("latest", "latest").after == LATEST
    assert not parse_bounds("latest", "latest").has_positions
    day = parse_bounds("1970-01-02", "1970-01-03")
    assert (day.from_ms, day.to_ms) == (24 * HOUR_MS, 48 * HOUR_MS)
    assert parse_bounds("1970-01-01T02:00:00+01:00", "latest").from_ms == HOUR_MS
    assert day.has_time(24 * HOUR_MS)
    assert not day.has_time(48 * HOUR_MS)


def test_times_finer_than_a_ms_are_rounded_up() -> None:
    bounds = parse_bounds("1970-01-01T01:00:00.000500Z", "1970-01-01T02:00:00.000500Z")
    assert (bounds.from_ms, bounds.to_ms) == (HOUR_MS + 1, 2 * HOUR_MS + 1)
    assert not bounds.has_time(HOUR_MS), "half a ms before the beginning"
    assert bounds.has_time(2 * HOUR_MS), "half a ms before the end"
    assert parse_bounds("1970-01-01T01:00:00.001Z", "latest").from_ms == HOUR_MS + 1


def test_without_an_end_all_late_publish_times_are_included() -> None:
    beyond_ms = 1_700_000_000_000_000  # us instead of ms
    assert ALL.has_time(beyond_ms)
    assert parse_bounds("2026-01-01", "latest").has_time(beyond_ms)
    assert not parse_bounds("earliest", "9999-12-31").has_time(beyond_ms)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "topic is missing"),
        ({"topic": "a/b"}, "not a topic name"),
        ({"topic": "t", "start": "yesterday"}, "must be a time like"),
        ({"topic": "t", "end": "earliest"}, "or latest"),
        ({"topic": "t", "start": "7:3", "end": "7:2"}, "range is empty"),
        ({"topic": "t", "start": "2026-01-02", "end": "2026-01-01"}, "range is empty"),
        ({"topic": "t", "start": "9999999999999999999:0"}, "2\\^63"),
        ({"topic": "t", "max_entries_per_trigger": "-1"}, "at least 0"),
        ({"topic": "t", "table": "ledgers"}, "unknown option table"),
    ],
)
def test_errors_of_options_name_valid_values(options: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        TopicOptions.parse({"zookeeper": "h:1", **options})


def test_options_have_the_defaults_in_the_table_of_options() -> None:
    least = {"zookeeper": "h:1", "topic": "t"}
    for options in (
        TopicOptions.parse(least),
        TopicOptions(zookeeper="h:1", topic=TopicName.parse("t")),
    ):
        assert (options.topic.short, options.ledgers_root, options.bounds) == (T, "/ledgers", ALL)
        assert (options.rate, options.timeout_s, options.max_entries_per_trigger) == (0, 10, 0)
        assert (options.partition_bytes, options.partition_entries) == (67_108_864, 50_000)
        assert options.fail_on_data_loss is True
    given = {"partition_bytes": "0", "partition_entries": "1", "max_entries_per_trigger": "3", "rate": "2KiB"}
    options = TopicOptions.parse({**least, **given, "timeout_s": "2", "fail_on_data_loss": "false"})
    assert (options.partition_bytes, options.partition_entries, options.max_entries_per_trigger) == (1, 1, 3)
    assert (options.rate, options.timeout_s, options.fail_on_data_loss) == (2_048, 2, False)
    assert TopicOptions.parse({**least, "partition_bytes": "9"}).partition_bytes == 9


def test_slices_are_within_positions_and_confirmed_entries() -> None:
    ledgers = extents(3, -1, 2)
    assert entries_of(slices_of(T, ledgers, ALL)) == [(10, n) for n in range(4)] + [(30, n) for n in range(3)]
    inside = Bounds(after=Position(10, 1), upto=Position(30, 0))
    assert entries_of(slices_of(T, ledgers, inside)) == [(10, 2), (10, 3), (30, 0)]
    assert slices_of(T, ledgers, Bounds(after=Position(30, 2))) == []


def test_ledgers_outside_of_the_times_are_not_read() -> None:
    ledgers = extents(3, 3, 3)
    late = Bounds(from_ms=HOUR_MS + CLOCK_SLACK_MS + 1)
    assert {each.ledger_id for each in slices_of(T, ledgers, late)} == {20, 30}
    days = [replace(each, created_ms=n * 24 * HOUR_MS + 1) for n, each in enumerate(ledgers)]
    assert {each.ledger_id for each in slices_of(T, days, Bounds(to_ms=24 * HOUR_MS))} == {10, 20}, (
        "publish times may be earlier than the ledger"
    )
    unknown = [Extent(ledger_id=1, last_entry=0, is_closed=True)]
    assert len(slices_of(T, unknown, Bounds(from_ms=1, to_ms=2))) == 1


def test_tasks_have_every_entry_once_and_respect_their_limits() -> None:
    rng = random.Random(8)
    for _ in range(200):
        slices = [
            Slice(T, n, first := rng.randrange(5), first + rng.randrange(300), rng.choice((1, 1000, 10**6)))
            for n in range(rng.randrange(12))
        ]
        entries_max, bytes_max = rng.randrange(1, 200), rng.choice((1, 10**5, 10**7))
        tasks = tasks_of(slices, entries_max=entries_max, bytes_max=bytes_max)
        assert entries_of([each for task in tasks for each in task]) == entries_of(slices)
        for task in tasks:
            count = sum(each.count for each in task)
            assert 1 <= count <= entries_max
            assert count == 1 or sum(each.cost for each in task) <= bytes_max


def test_small_ledgers_share_a_task() -> None:
    slices = slices_of(T, extents(*[4] * 50), ALL)
    assert len(tasks_of(slices, entries_max=50_000, bytes_max=64 * 2**20)) == 1


def test_offsets_are_json_by_topic() -> None:
    positions = {T: Position(7, 41), "public/default/u": EARLIEST}
    assert to_offset(positions)[T] == {"ledger": 7, "entry": 41}
    assert from_offset(to_offset(positions)) == positions
    with pytest.raises(BadRequest, match="another query"):
        from_offset({"offset": 3})


def test_a_stream_reads_every_entry_once_with_any_limit() -> None:
    rng = random.Random(3)
    for _ in range(200):
        ledgers = extents(*(rng.randrange(-1, 9) for _ in range(rng.randrange(1, 7))), is_open=rng.random() < 0.5)
        at, seen, limit = EARLIEST, [], rng.choice((1, 2, 5, None))
        while (end := advance(ledgers, at, limit)) != at:
            batch = entries_of(slices_of(T, ledgers, Bounds(after=at, upto=end)))
            assert limit is None or len(batch) <= limit
            seen += batch
            at = end
        assert seen == entries_of(slices_of(T, ledgers, ALL))


def test_advance_starts_in_the_ledger_of_its_position_and_never_moves_back() -> None:
    assert advance(extents(9, 3), Position(20, 1), None) == Position(20, 3), "ledger 10 is skipped"
    beyond = Position(10, 9)
    assert advance(extents(3), beyond, None) == beyond
    assert advance(extents(3, 9), beyond, 2) == Position(20, 1), "the missing entries do not count"


def test_a_stream_continues_after_the_ledger_is_closed_and_others_are_added() -> None:
    before = extents(3, 1)
    at = advance(before, EARLIEST, None)
    assert at == Position(20, 1)
    after = extents(3, 4, 0)
    end = advance(after, at, None)
    assert entries_of(slices_of(T, after, Bounds(after=at, upto=end))) == [(20, 2), (20, 3), (20, 4), (30, 0)]


def test_a_stream_does_not_pass_an_open_ledger() -> None:
    first, second = extents(3, 1)
    still_open = [Extent(ledger_id=10, last_entry=2, is_closed=False), second]
    assert advance(settled(still_open), EARLIEST, None) == Position(10, 2)
    assert advance(still_open, EARLIEST, None) == Position(10, 2)
    assert advance(settled([first, second]), EARLIEST, None) == Position(20, 1)


def test_a_stream_begins_at_the_requested_position_or_time() -> None:
    ledgers = extents(3, 3, 3)
    assert initial(ledgers, ALL) == Position(10, -1)
    assert initial([], ALL) == EARLIEST
    assert initial(ledgers, parse_bounds("latest", "latest")) == Position(30, 3)
    assert initial(ledgers, parse_bounds("20:2", "latest")) == Position(20, 1)
    assert initial(ledgers, Bounds(from_ms=HOUR_MS + CLOCK_SLACK_MS + 1)) == Position(20, -1)
    assert initial(ledgers, Bounds(from_ms=100 * HOUR_MS)) == Position(30, -1)
    assert initial(extents(3, is_open=False), Bounds(from_ms=100 * HOUR_MS)) == Position(10, 3)


def test_deletion_of_unread_ledgers_by_retention_is_detected() -> None:
    ledgers = extents(3, 3)
    check_not_trimmed(T, ledgers, EARLIEST)
    check_not_trimmed(T, ledgers, Position(10, 1))
    with pytest.raises(NoSuchEntry, match="fail_on_data_loss"):
        check_not_trimmed(T, ledgers[1:], Position(10, 1))
    with pytest.raises(NoSuchEntry, match="fail_on_data_loss"):
        check_not_trimmed(T, ledgers[1:], initial(ledgers, ALL))
    # At the end of a closed ledger the position is already in the next one.
    check_not_trimmed(T, ledgers[1:], advance(ledgers, EARLIEST, 4))


def test_the_average_size_of_an_entry_is_1_kib_if_it_is_unknown() -> None:
    def average(last: int, size: int) -> int:
        return Extent(ledger_id=1, last_entry=last, is_closed=True, size=size).entry_size

    assert [average(0, 700), average(1, 700), average(9, 0), average(-1, 700)] == [700, 350, 1_024, 1_024]
    assert Slice(T, 1, 0, 0).entry_size == 1_024
    least = Extent(ledger_id=1, last_entry=4, is_closed=True)
    assert (least.size, least.created_ms, least.closed_ms) == (0, 0, 0)


def test_opening_a_ledger_costs_as_much_as_64_kib() -> None:
    each = Slice(T, 1, 3, 5, 100)
    assert (each.count, each.cost) == (3, 65_536 + 300)


def test_only_a_given_position_is_a_bound_of_positions() -> None:
    assert not ALL.has_positions
    assert Bounds(after=Position(3, 1)).has_positions
    assert Bounds(upto=Position(3, 1)).has_positions
    assert not Bounds(from_ms=1, to_ms=2).has_positions
    assert (ALL.from_ms, ALL.to_ms) == (0, 253_402_300_800_000)


def test_a_range_of_times_or_positions_has_at_least_one_element() -> None:
    with pytest.raises(BadRequest, match="range is empty"):
        parse_bounds("2026-01-01", "2026-01-01")
    assert parse_bounds("2026-01-01T00:00:00.000Z", "2026-01-01T00:00:00.001Z").from_ms == 1_767_225_600_000
    least = parse_bounds("0:0", "0:0")
    assert (least.after, least.upto) == (Position(0, -1), Position(0, 0))
    with pytest.raises(BadRequest, match="range is empty"):
        parse_bounds("7:3", "6:9")


def test_ids_end_at_2_to_the_63() -> None:
    most = parse_bounds(f"{ID_MAX}:{ID_MAX}", "latest")
    assert most.after == Position(ID_MAX, ID_MAX - 1)
    with pytest.raises(BadRequest, match="2\\^63"):
        parse_bounds(f"{ID_MAX + 1}:0", "latest")
    assert parse_bounds("7:-1", "latest").after == Position(7, -1)


def test_times_are_in_ms_and_rounded_up() -> None:
    assert parse_bounds("1970-01-01T00:00:00.002000Z", "latest").from_ms == 2
    assert parse_bounds("1970-01-01T00:00:00.001001Z", "latest").from_ms == 2
    assert parse_bounds("1970-01-02T00:00:01.005Z", "latest").from_ms == 86_401_005
    assert to_ms(datetime(1970, 1, 2, 0, 0, 1, 5_999, tzinfo=UTC)) == 86_401_005
    assert to_ms(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC).replace(tzinfo=None)) == 1_000


def held(bounds: Bounds, **times: int) -> bool:
    extent = Extent(ledger_id=1, last_entry=0, is_closed=True, **times)
    return bool(slices_of(T, [extent], bounds))


def test_clocks_may_differ_by_ten_minutes() -> None:
    closed = 1_000_000_000
    assert held(Bounds(from_ms=closed + 600_000), closed_ms=closed)
    assert not held(Bounds(from_ms=closed + 600_001), closed_ms=closed)


def test_a_message_may_be_a_day_older_than_its_ledger() -> None:
    created = 1_000_000_000
    assert held(Bounds(to_ms=created - 86_400_000 + 1), created_ms=created)
    assert not held(Bounds(to_ms=created - 86_400_000), created_ms=created)


def test_a_task_is_filled_up_to_its_limits() -> None:
    def tasks(
        slices: list[Slice], entries_max: int = 10**6, bytes_max: int = 10**9
    ) -> list[list[tuple[int, int, int]]]:
        found = tasks_of(slices, entries_max=entries_max, bytes_max=bytes_max)
        return [[(each.ledger_id, each.first, each.last) for each in task] for task in found]

    ten = [Slice(T, 1, 0, 9, 100)]
    assert tasks(ten, entries_max=10) == [[(1, 0, 9)]]
    assert tasks(ten, entries_max=9) == [[(1, 0, 8)], [(1, 9, 9)]]
    assert tasks(ten, entries_max=4) == [[(1, 0, 3)], [(1, 4, 7)], [(1, 8, 9)]]
    assert tasks(ten, entries_max=1) == [[(1, n, n)] for n in range(10)]
    assert tasks(ten, bytes_max=65_536 + 1_000) == [[(1, 0, 9)]]
    assert tasks(ten, bytes_max=65_536 + 999) == [[(1, 0, 8)], [(1, 9, 9)]]
    assert tasks(ten, bytes_max=1) == [[(1, n, n)] for n in range(10)]
    two = [Slice(T, 1, 0, 3, 100), Slice(T, 2, 0, 3, 100)]
    assert tasks(two, entries_max=5) == [[(1, 0, 3), (2, 0, 0)], [(2, 1, 3)]]
    assert tasks(two, entries_max=4) == [[(1, 0, 3)], [(2, 0, 3)]]
    assert tasks(two, bytes_max=2 * 65_536 + 500) == [[(1, 0, 3), (2, 0, 0)], [(2, 1, 3)]]
    assert tasks(two, bytes_max=2 * 65_536 + 499) == [[(1, 0, 3)], [(2, 0, 3)]]
    assert tasks([Slice(T, 1, 0, 3, 0)], entries_max=4) == [[(1, 0, 3)]], "the size may be unknown"
    assert tasks([]) == []


@pytest.mark.parametrize(
    "offset", [{T: 3}, {T: {"ledger": 1}}, {T: {"ledger": "x", "entry": 1}}, {T: {"ledger": None, "entry": 1}}]
)
def test_an_offset_of_another_form_is_rejected(offset: dict) -> None:
    with pytest.raises(BadRequest, match="another query"):
        from_offset(offset)


def test_only_ledgers_up_to_the_first_open_one_are_settled() -> None:
    ledgers = extents(3, 3, 3, is_open=False)
    assert settled(ledgers) == ledgers
    first_open = [replace(ledgers[0], is_closed=False), *ledgers[1:]]
    assert settled(first_open) == first_open[:1]
    second_open = [ledgers[0], replace(ledgers[1], is_closed=False), ledgers[2]]
    assert settled(second_open) == second_open[:2]
    assert settled([first_open[0], *second_open[1:]]) == first_open[:1], "the first of two"


def test_advance_counts_entries_across_ledgers() -> None:
    ledgers = extents(3, 3, 3)
    assert [advance(ledgers, EARLIEST, count) for count in (0, 1, 3, 4, 5, 8, 99)] == [
        Position(10, -1),
        Position(10, 0),
        Position(10, 2),
        Position(20, -1),
        Position(20, 0),
        Position(30, -1),
        Position(30, 3),
    ]
    assert advance(ledgers, Position(10, 2), 2) == Position(20, 0)
    assert advance([], Position(10, 2), 2) == Position(10, 2)


def test_a_position_in_the_first_ledger_of_all_is_checked() -> None:
    with pytest.raises(NoSuchEntry, match="fail_on_data_loss"):
        check_not_trimmed(T, extents(3), Position(0, 1))
    check_not_trimmed(T, [], EARLIEST)
