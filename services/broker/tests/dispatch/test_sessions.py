"""Consumer sessions, which last longer than single calls."""

import random

import pytest
from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import MessageRef
from bindery_broker.dispatch.sessions import REQUESTS_REMEMBERED_MAX, Session, Sessions
from bindery_core.errors import TooManyRequests
from bindery_pulsar.message_id import Position


def no_leases(_consumer: Consumer) -> None:
    return None


def names(ended: list[Session]) -> list[str]:
    return [session.consumer.name for session in ended]


def test_a_session_ends_its_ttl_after_the_end_of_its_last_call():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=60, now=0)
    assert sessions.expire(now=1_000, leases_end_at=no_leases) == []  # a call is in progress
    sessions.end_call(session, now=1_000)
    assert sessions.expire(now=1_059.9, leases_end_at=no_leases) == []
    assert names(sessions.expire(now=1_060, leases_end_at=no_leases)) == ["c"]
    assert sessions.get("c") is None


def test_another_call_continues_the_session():
    sessions = Sessions()
    sessions.end_call(sessions.begin_call("c", ttl_s=60, now=0), now=0)
    sessions.end_call(sessions.begin_call("c", ttl_s=60, now=50), now=50)
    assert sessions.expire(now=109, leases_end_at=no_leases) == []
    session = sessions.get("c")
    assert session is not None
    assert (session.joined_at, session.call_count) == (0, 2)


def test_a_lease_is_not_cut_short_by_a_shorter_session():
    sessions = Sessions()
    sessions.end_call(sessions.begin_call("c", ttl_s=10, now=0), now=0)
    assert sessions.expire(now=50, leases_end_at=lambda _: 100.0) == []
    assert names(sessions.expire(now=100, leases_end_at=lambda _: 100.0)) == ["c"]


def test_an_acknowledgement_extends_a_session_but_creates_none():
    sessions = Sessions()
    sessions.touch("nobody", now=0)
    assert len(sessions) == 0
    sessions.end_call(sessions.begin_call("c", ttl_s=60, now=0), now=0)
    sessions.touch("c", now=59)
    assert sessions.expire(now=100, leases_end_at=no_leases) == []


def test_the_limit_of_sessions_does_not_refuse_calls_of_existing_sessions():
    sessions = Sessions(sessions_max=1)
    sessions.begin_call("a", ttl_s=60, now=0)
    with pytest.raises(TooManyRequests):
        sessions.begin_call("b", ttl_s=60, now=0)
    sessions.begin_call("a", ttl_s=60, now=0)


def test_only_the_latest_answers_are_remembered():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=60, now=0)
    for number in range(REQUESTS_REMEMBERED_MAX + 2):
        session.remember(f"r{number}", (MessageRef(Position(0, number), 1),))
    assert list(session.remembered) == [f"r{n}" for n in range(2, REQUESTS_REMEMBERED_MAX + 2)]


def test_the_latest_call_sets_the_ttl():
    sessions = Sessions()
    sessions.end_call(sessions.begin_call("c", ttl_s=60, now=0), now=0)
    sessions.end_call(sessions.begin_call("c", ttl_s=10, now=5), now=5)
    assert names(sessions.expire(now=15, leases_end_at=no_leases)) == ["c"]


def test_a_session_lasts_until_all_its_calls_have_ended():
    sessions = Sessions()
    first = sessions.begin_call("c", ttl_s=10, now=0)
    second = sessions.begin_call("c", ttl_s=10, now=0)
    sessions.end_call(first, now=0)
    assert sessions.expire(now=100, leases_end_at=no_leases) == []
    assert sessions.ends_at(second, leases_end=None) is None
    sessions.end_call(second, now=100)
    assert names(sessions.expire(now=110, leases_end_at=no_leases)) == ["c"]


def test_a_session_ends_with_its_ttl_or_its_last_lease():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=10, now=5)
    sessions.end_call(session, now=5)
    assert sessions.ends_at(session, leases_end=None) == 15
    assert sessions.ends_at(session, leases_end=12) == 15
    assert sessions.ends_at(session, leases_end=20) == 20


def test_a_repeated_answer_counts_as_the_latest_one():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=60, now=0)
    for number in range(REQUESTS_REMEMBERED_MAX):
        session.remember(f"r{number}", ())
    session.remember("r0", (MessageRef(Position(0, 0), 1),))
    session.remember("new", ())
    assert "r0" in session.remembered
    assert "r1" not in session.remembered


def test_a_removed_consumer_is_a_new_one_with_its_next_call():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=60, now=0)
    assert sessions.remove("c") is session
    assert sessions.remove("c") is None
    again = sessions.begin_call("c", ttl_s=60, now=9)
    assert (again.joined_at, again.call_count, again.statistics.delivered.messages) == (9, 1, 0)


def test_the_calls_of_a_session_are_of_one_consumer_until_it_is_removed():
    sessions = Sessions()
    consumer = sessions.begin_call("c", ttl_s=60, now=0).consumer
    assert (consumer.name, consumer.held) == ("c", 0)
    assert sessions.begin_call("c", ttl_s=60, now=1).consumer is consumer
    sessions.remove("c")
    assert sessions.begin_call("c", ttl_s=60, now=2).consumer is not consumer


def test_the_leases_of_each_consumer_are_looked_up_for_its_own_session():
    sessions = Sessions()
    first, second = (sessions.begin_call(name, ttl_s=10, now=0) for name in "ab")
    for session in (first, second):
        sessions.end_call(session, now=0)
    ends = {first.consumer: 100.0, second.consumer: None}
    assert sessions.expire(now=50, leases_end_at=ends.__getitem__) == [second]
    assert list(sessions) == [first]


@pytest.mark.parametrize("seed", range(20))
def test_each_session_ends_at_the_first_search_after_its_time(seed: int) -> None:
    rng = random.Random(seed)
    sessions = Sessions()
    leases: dict[str, float] = {}
    open_calls: list[Session] = []
    now = 0.0
    for _ in range(400):
        now += rng.choice((0.0, 0.5, 3.0))
        name = rng.choice("abcdef")
        action = rng.randrange(5)
        if action == 0:
            open_calls.append(sessions.begin_call(name, ttl_s=rng.choice((1.0, 5.0, 20.0)), now=now))
        elif action == 1 and open_calls:
            sessions.end_call(open_calls.pop(rng.randrange(len(open_calls))), now=now)
        elif action == 2:
            sessions.touch(name, now=now)
        elif action == 3:
            leases[name] = now + rng.choice((0.5, 2.0, 10.0))
        else:
            leases.pop(name, None)  # acknowledged
        want = {
            session.consumer.name
            for session in sessions
            if not session.calls_open
            and session.last_call_at + session.ttl_s <= now
            and leases.get(session.consumer.name, 0.0) <= now
        }
        ended = sessions.expire(now=now, leases_end_at=lambda consumer: leases.get(consumer.name))
        assert set(names(ended)) == want
