"""The lease table compared with a simple model, and its limits."""

import math

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import Item
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import Portion, State
from bindery_pulsar.message_id import Position
from hypothesis import given, settings
from hypothesis import strategies as st


def portion(n: int, size: int = 1, bits: int = 1) -> Portion[str]:
    one: Portion[str] = Portion(Position(0, n), bits, State.READY)
    one.size = size
    return one


def test_a_grant_ends_at_its_deadline_and_not_before():
    table, a, b = LeaseTable(), Consumer("a"), Consumer("b")
    p = [portion(n) for n in range(3)]
    table.grant(a, p[:2], deadline=10, now=0)
    table.grant(b, p[2:], deadline=20, now=0)
    assert table.next_deadline() == 10
    assert table.expire(now=9.999) == []
    assert table.expire(now=10) == p[:2]
    assert table.next_deadline() == 20
    assert list(table) == p[2:]


def test_ended_grants_are_removed_before_their_deadlines():
    table, a = LeaseTable(), Consumer("a")
    for n in range(10_000):
        one = portion(n)
        table.grant(a, [one], deadline=1e9, now=0)
        table.drop([one])
    assert len(table._heap) < 200
    assert table.next_deadline() is None
    assert (a.grants, a.held) == ({}, 0)


def test_deadlines_keep_their_order_when_ended_grants_are_removed():
    table, a = LeaseTable(), Consumer("a")
    p = [portion(n) for n in range(4)]
    for one, deadline in zip(p, [1, 2, 10, 3], strict=True):
        table.grant(a, [one], deadline=deadline, now=0)
    table.drop(p[:2])
    for n in range(100):
        one = portion(n)
        table.grant(a, [one], deadline=100, now=0)
        table.drop([one])
    assert table.next_deadline() == 3
    assert table.expire(now=3) == [p[3]]


def test_a_lease_without_an_end_lasts_until_it_is_dropped():
    table, a = LeaseTable(), Consumer("a")
    one = portion(0)
    table.grant(a, [one], deadline=math.inf, now=0)
    assert table.next_deadline() is None
    assert table.expire(now=1e12) == []
    assert table.last_deadline_of(a) == math.inf
    assert table.release(a) == [one]
    assert table.last_deadline_of(a) is None


def test_release_returns_portions_in_the_order_of_delivery():
    table, a, b = LeaseTable(), Consumer("a"), Consumer("a")
    p = [portion(n) for n in range(4)]
    table.grant(a, [p[3]], deadline=10, now=0)
    table.grant(b, [p[2]], deadline=10, now=0)
    table.grant(a, p[:2], deadline=5, now=0)
    assert table.release(a) == [p[3], p[0], p[1]]
    assert table.release(a) == []
    assert list(table) == [p[2]], "a consumer is not its name"


def test_renewing_restarts_only_the_leases_that_the_consumer_holds():
    table, a, b = LeaseTable(), Consumer("a"), Consumer("b")
    p = [portion(0, 7), portion(1, 8), portion(2, 9), portion(3, 10)]
    old = table.grant(a, p[:2], deadline=10, now=0)
    table.grant(b, [p[2]], deadline=10, now=0)
    lease, kept = table.renew(a, p[1:], lease_s=25, now=5)
    assert kept == [p[1]]
    assert p[1].grant is not None
    assert lease == str(p[1].grant.serial)
    assert (p[1].grant.serial > old.serial, p[1].grant.granted_at, p[1].grant.deadline) == (True, 5, 30)
    assert table.expire(now=10) == [p[0], p[2]]
    assert (len(table), table.bytes_held) == (1, 8)
    assert table.renew(b, p, lease_s=30, now=10) == ("", [])
    assert table.next_deadline() == 30
    table.clear()
    assert (len(table), table.bytes_held, p[1].grant, a.held) == (0, 0, None, 0)


def test_a_delivery_has_one_lease_for_all_its_portions():
    table, a = LeaseTable(), Consumer("a")
    p = [portion(0), portion(1, bits=0b110)]
    p[1].redelivery_count = 2
    items = [Item(one.position, size=1, body=body) for one, body in zip(p, "xy", strict=True)]
    first, second = table.deliver(a, list(zip(p, items, strict=True)), lease_s=30, now=1)
    assert first.lease == second.lease != ""
    assert first[:3] + first[4:] == (Position(0, 0), 1, "x", 0)
    assert second[:3] + second[4:] == (Position(0, 1), 0b110, "y", 2)
    assert (table.next_deadline(), len(table), a.held) == (31, 3, 3)
    assert [one.state for one in p] == [State.LEASED] * 2
    assert table.deliver(a, [], lease_s=30, now=1) == []


N = 6
COUNTS = [1, 3, 1, 2, 1, 4]
numbers = st.sets(st.integers(0, N - 1))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("grant"), st.integers(0, 1), numbers),
            st.tuples(st.just("drop"), st.just(0), numbers),
            st.tuples(st.just("release"), st.integers(0, 1), st.just(set())),
            st.tuples(st.just("renew"), st.integers(0, 1), numbers),
            st.tuples(st.just("wait"), st.just(0), st.just(set())),
        ),
        max_size=40,
    )
)
def test_counts_and_bytes_are_those_of_the_held_messages(steps):
    """Both consumers have the same name: they must not be confused."""
    table, consumers, now = LeaseTable(), [Consumer("a"), Consumer("a")], 0.0
    held: dict[int, tuple[int, float]] = {}
    portions = [portion(n, size=10 * COUNTS[n], bits=(1 << COUNTS[n]) - 1) for n in range(N)]
    for kind, who, chosen in steps:
        if kind == "grant":
            free = [n for n in sorted(chosen) if n not in held]
            if free:
                table.grant(consumers[who], [portions[n] for n in free], deadline=now + 2, now=now)
                held.update(dict.fromkeys(free, (who, now + 2)))
        elif kind == "drop":
            table.drop([portions[n] for n in chosen])
            held = {n: value for n, value in held.items() if n not in chosen}
        elif kind == "release":
            released = {one.position.entry_id for one in table.release(consumers[who])}
            assert released == {n for n, value in held.items() if value[0] == who}
            held = {n: value for n, value in held.items() if value[0] != who}
        elif kind == "renew":
            _, kept = table.renew(consumers[who], [portions[n] for n in sorted(chosen)], lease_s=3, now=now)
            mine = {n for n in chosen if n in held and held[n][0] == who}
            assert {one.position.entry_id for one in kept} == mine
            held.update(dict.fromkeys(mine, (who, now + 3)))
        else:
            now += 1
            expired = {one.position.entry_id for one in table.expire(now=now)}
            assert expired == {n for n, value in held.items() if value[1] <= now}
            held = {n: value for n, value in held.items() if value[1] > now}
        holders = {one.position.entry_id: one.grant and one.grant.consumer for one in table}
        assert holders == {n: consumers[value[0]] for n, value in held.items()}
        assert {n for n in range(N) if portions[n].grant is not None} == set(held)
        assert table.bytes_held == 10 * len(table) == 10 * sum(COUNTS[n] for n in held)
        for who, consumer in enumerate(consumers):
            assert consumer.held == sum(COUNTS[n] for n, value in held.items() if value[0] == who)
            deadlines = [value[1] for value in held.values() if value[0] == who]
            assert table.last_deadline_of(consumer) == (max(deadlines) if deadlines else None)
        assert table.next_deadline() == min((value[1] for value in held.values()), default=None)
