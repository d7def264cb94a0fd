"""Consumer sessions, which last longer than single calls."""

import pytest
from bindery_broker.dispatch.sessions import REQUESTS_REMEMBERED_MAX, Sessions
from bindery_core.errors import TooManyRequests


def no_leases(_consumer: str) -> None:
    return None


def test_a_session_ends_its_ttl_after_the_end_of_its_last_call():
    sessions = Sessions()
    session = sessions.begin_call("c", ttl_s=60, now=0)
    assert sessions.expire(now=1_000, leases_end_at=no_leases) == []  # a call is in progress
    sessions.end_call(session, now=1_000)
    assert sessions.expire(now=1_059.9, leases_end_at=no_leases) == []
    assert sessions.expire(now=1_060, leases_end_at=no_leases) == ["c"]
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
    assert sessions.expire(now=100, leases_end_at=lambda _: 100.0) == ["c"]


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
        session.remember(f"r{number}", ((0, number, -1),))
    assert list(session.remembered) == [f"r{n}" for n in range(2, REQUESTS_REMEMBERED_MAX + 2)]
