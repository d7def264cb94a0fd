"""The lease table compared with a simple model, and its limits."""

from bindery_broker.dispatch.leases import LeaseTable
from hypothesis import given, settings
from hypothesis import strategies as st

KEYS = [(0, n, -1) for n in range(6)]


def test_a_grant_ends_at_its_deadline_and_not_before():
    table = LeaseTable()
    table.grant("a", [(KEYS[0], 1), (KEYS[1], 1)], deadline=10, now=0)
    table.grant("b", [(KEYS[2], 1)], deadline=20, now=0)
    assert table.next_deadline() == 10
    assert table.expire(now=9.999) == []
    assert table.expire(now=10) == [KEYS[0], KEYS[1]]
    assert table.next_deadline() == 20
    assert list(table) == [KEYS[2]]


def test_ended_grants_are_removed_before_their_deadlines():
    table = LeaseTable()
    for n in range(10_000):
        table.grant("a", [((0, n, -1), 1)], deadline=1e9, now=0)
        table.drop([(0, n, -1)])
    assert len(table._heap) < 200
    assert table.next_deadline() is None


def test_deadlines_keep_their_order_when_ended_grants_are_removed():
    table = LeaseTable()
    for n, deadline in enumerate([1, 2, 10, 3]):
        table.grant("a", [(KEYS[n], 1)], deadline=deadline, now=0)
    table.drop(KEYS[:2])
    for n in range(100):
        table.grant("a", [((1, n, -1), 1)], deadline=100, now=0)
        table.drop([(1, n, -1)])
    assert table.next_deadline() == 3
    assert table.expire(now=3) == [KEYS[3]]


def test_release_returns_keys_in_the_order_of_delivery():
    table = LeaseTable()
    table.grant("a", [(KEYS[3], 1)], deadline=10, now=0)
    table.grant("a", [(KEYS[0], 1), (KEYS[1], 1)], deadline=5, now=0)
    assert table.release("a") == [KEYS[3], KEYS[0], KEYS[1]]
    assert table.release("a") == []


def test_renewing_restarts_only_the_leases_that_the_consumer_holds():
    table = LeaseTable()
    old = table.grant("a", [(KEYS[0], 7), (KEYS[1], 8)], deadline=10, now=0)
    table.grant("b", [(KEYS[2], 9)], deadline=10, now=0)
    grant, kept = table.renew("a", [KEYS[1], KEYS[2], KEYS[3]], deadline=30, now=5)
    assert grant is not None
    assert kept == [KEYS[1]]
    assert (grant.serial > old.serial, grant.granted_at, grant.sizes) == (True, 5, {KEYS[1]: 8})
    assert table.expire(now=10) == [KEYS[0], KEYS[2]]
    assert (len(table), table.bytes_held) == (1, 8)
    assert table.renew("b", KEYS, deadline=30, now=10) == (None, [])
    assert table.next_deadline() == 30
    table.clear()
    assert (len(table), table.bytes_held, KEYS[1] in table) == (0, 0, False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("grant"), st.sampled_from("ab"), st.sets(st.sampled_from(KEYS), min_size=1)),
            st.tuples(st.just("drop"), st.just(""), st.sets(st.sampled_from(KEYS))),
            st.tuples(st.just("release"), st.sampled_from("ab"), st.just(set())),
            st.tuples(st.just("wait"), st.just(""), st.just(set())),
        ),
        max_size=40,
    )
)
def test_counts_and_bytes_are_those_of_the_held_messages(steps):
    table, held, now = LeaseTable(), {}, 0.0
    for kind, consumer, keys in steps:
        if kind == "grant":
            free = [key for key in sorted(keys) if key not in held]
            if free:
                table.grant(consumer, [(key, 10) for key in free], deadline=now + 2, now=now)
                held.update(dict.fromkeys(free, (consumer, now + 2)))
        elif kind == "drop":
            assert sorted(table.drop(keys)) == sorted(keys & held.keys())
            held = {key: value for key, value in held.items() if key not in keys}
        elif kind == "release":
            assert sorted(table.release(consumer)) == sorted(k for k, v in held.items() if v[0] == consumer)
            held = {key: value for key, value in held.items() if value[0] != consumer}
        else:
            now += 1
            assert sorted(table.expire(now=now)) == sorted(k for k, v in held.items() if v[1] <= now)
            held = {key: value for key, value in held.items() if value[1] > now}
        assert {key: table.holder(key) for key in table} == {key: value[0] for key, value in held.items()}
        assert table.bytes_held == 10 * len(held)
        for name in "ab":
            assert table.count_of(name) == sum(value[0] == name for value in held.values())
            deadlines = [value[1] for value in held.values() if value[0] == name]
            assert table.last_deadline_of(name) == (max(deadlines) if deadlines else None)
