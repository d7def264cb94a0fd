"""What a time to live acknowledges, and when it is looked for again."""

from bindery_broker.limits.expiry import RETRY_MS, Expirable, Expired, ExpiryScan
from bindery_pulsar.message_id import Position
from hypothesis import given
from hypothesis import strategies as st

START = Position(1, -1)
TTL = 10_000


def at(entry: int) -> Position:
    return Position(1, entry)


def entries(*rows: tuple[int, int], first: int = 0) -> list[Expirable]:
    """Return entries with these publish and delivery times."""
    return [Expirable(at(first + i), publish, deliver) for i, (publish, deliver) in enumerate(rows)]


def scan(
    some: list[Expirable], now_ms: int, *, ttl_ms: int = TTL, machine: ExpiryScan | None = None
) -> tuple[Expired, bool]:
    machine = machine or ExpiryScan()
    begun = machine.begin(ttl_ms=ttl_ms, mark_delete=START, seeks=0, now_ms=now_ms)
    assert begun == START
    return machine.take(some, at(len(some)), now_ms=now_ms)


def test_entries_expire_when_their_time_is_over_and_not_before() -> None:
    some = entries((0, 0), (5, 0), (6, 0))
    assert scan(some, TTL - 1) == (Expired(None, []), False)
    assert scan(some, TTL + 5) == (Expired(at(1), []), False)
    assert scan(some, TTL + 6) == (Expired(at(2), []), True)


def test_the_time_of_a_delayed_entry_begins_when_it_is_due() -> None:
    some = entries((0, 50_000))
    assert scan(some, 50_000 + TTL - 1) == (Expired(None, []), True)
    assert scan(some, 50_000 + TTL) == (Expired(at(0), []), True)


def test_a_delivery_time_before_the_publishing_is_no_delay() -> None:
    assert scan(entries((5_000, 1)), TTL) == (Expired(None, []), False)


def test_a_delayed_entry_does_not_hold_up_those_after_it() -> None:
    machine = ExpiryScan()
    some = entries((0, 0), (1, 50_000), (2, 0), (3, 0))
    assert scan(some, TTL + 3, machine=machine) == (Expired(at(0), [at(2), at(3)]), True)
    assert machine.next_ms == 50_000 + TTL
    # The scan continues after them, and begins again when the delayed entry expires.
    assert machine.begin(ttl_ms=TTL, mark_delete=at(0), seeks=0, now_ms=30_000) == at(4)
    assert machine.take([], at(4), now_ms=30_000) == (Expired(None, []), False)
    assert machine.begin(ttl_ms=TTL, mark_delete=at(0), seeks=0, now_ms=50_000 + TTL) == at(0)


def test_a_scan_pauses_until_the_next_entry_expires() -> None:
    machine = ExpiryScan()
    assert scan(entries((0, 0), (500, 0)), TTL, machine=machine) == (Expired(at(0), []), False)
    assert machine.begin(ttl_ms=TTL, mark_delete=at(0), seeks=0, now_ms=TTL + 499) is None
    assert machine.begin(ttl_ms=TTL, mark_delete=at(0), seeks=0, now_ms=TTL + 500) == at(1)


def test_another_time_to_live_or_a_seek_begins_again() -> None:
    machine = ExpiryScan()
    scan(entries((0, 0), (500, 0)), TTL, machine=machine)
    assert machine.begin(ttl_ms=100, mark_delete=at(0), seeks=0, now_ms=TTL) == at(0)
    scan(entries((0, 0), (500, 0)), TTL, machine=ExpiryScan())
    machine = ExpiryScan()
    machine.begin(ttl_ms=TTL, mark_delete=at(7), seeks=0, now_ms=TTL)
    machine.take(entries((TTL, 0), first=8), at(9), now_ms=TTL)
    assert machine.begin(ttl_ms=TTL, mark_delete=at(7), seeks=0, now_ms=TTL) is None
    assert machine.begin(ttl_ms=TTL, mark_delete=at(2), seeks=1, now_ms=TTL) == at(2)


def test_a_mark_delete_position_beyond_the_scan_begins_again() -> None:
    machine = ExpiryScan()
    scan(entries((0, 0), (500, 0)), TTL, machine=machine)
    assert machine.begin(ttl_ms=TTL, mark_delete=at(5), seeks=0, now_ms=TTL) == at(5)


def test_an_expired_entry_in_use_is_passed_and_never_acknowledged_by_itself() -> None:
    used = Expirable(at(2), 0, is_in_use=True)
    machine = ExpiryScan()
    some = [*entries((0, 0), (0, 90_000)), used]
    assert scan(some, TTL, machine=machine) == (Expired(at(0), []), True)
    assert machine.next_ms == TTL + RETRY_MS
    assert scan([used._replace(position=at(0))], TTL) == (Expired(at(0), []), True)


def test_an_unreadable_entry_expires_as_if_published_when_its_ledger_was_closed() -> None:
    machine = ExpiryScan()
    some = [Expirable(at(0), None, closed_ms=500), *entries((0, 0), first=1)]
    assert scan(some, TTL + 499, machine=machine) == (Expired(None, [at(1)]), True)
    assert machine.next_ms == TTL + 500
    assert scan(some, TTL + 500) == (Expired(at(1), []), True)


def test_an_unreadable_entry_of_an_open_ledger_is_skipped_and_looked_at_again() -> None:
    machine = ExpiryScan()
    some = [Expirable(at(0), None), *entries((0, 0), first=1)]
    assert scan(some, TTL, machine=machine) == (Expired(None, [at(1)]), True)
    # Closed at 2 * TTL - 1 at the earliest seen now: the scan begins again when it may have expired.
    assert machine.begin(ttl_ms=TTL, mark_delete=START, seeks=0, now_ms=2 * TTL - 1) == at(2)
    assert machine.begin(ttl_ms=TTL, mark_delete=START, seeks=0, now_ms=2 * TTL) == START
    closed = [some[0]._replace(closed_ms=TTL)]
    assert machine.take(closed, at(1), now_ms=2 * TTL) == (Expired(at(0), []), True)


@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), max_size=12),
    ttl_ms=st.integers(1, 60),
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    batch=st.integers(1, 5),
)
def test_any_sequence_of_scans_expires_exactly_what_is_due(
    rows: list[tuple[int, int]], ttl_ms: int, steps: list[int], batch: int
) -> None:
    """Publish times ascend by the first numbers; the second ones are delays."""
    publish = 0
    stored: list[Expirable] = []
    for i, (pause, delay) in enumerate(rows):
        publish += pause
        stored.append(Expirable(at(i), publish, publish + delay if delay > 100 else 0))
    left = {entry.position: entry for entry in stored}
    machine, mark_delete, now_ms = ExpiryScan(), START, 0
    for step in steps:
        now_ms += step
        start = machine.begin(ttl_ms=ttl_ms, mark_delete=mark_delete, seeks=0, now_ms=now_ms)
        while start is not None:
            found = [entry for position, entry in left.items() if position > start or (position == start != START)]
            some = found[:batch]
            following = at(some[-1].position.entry_id + 1) if some else max(start, at(0))
            expired, goes_on = machine.take(some, following, now_ms=now_ms)
            if expired.upto is not None:
                left = {position: entry for position, entry in left.items() if position > expired.upto}
            for position in expired.others:
                del left[position]
            acked = [entry.position for entry in stored if entry.position not in left]
            while at(mark_delete.entry_id + 1) in acked:
                mark_delete = at(mark_delete.entry_id + 1)
            start = following if goes_on else None
        due = {entry.position for entry in stored if max(entry.publish_ms or 0, entry.deliver_at_ms) + ttl_ms <= now_ms}
        assert {entry.position for entry in stored} - set(left) == due
