"""Consumer sessions: membership of a subscription that survives the gaps between HTTP calls.

A session begins with a consumer's first call and ends `ttl_s` after the end of its last one, but not while a call is in
progress or while the consumer holds leases: a short session never shortens a lease. Times are monotonic seconds, passed
by the caller.

Invariants: no session with an open call ends; at most `sessions_max` exist; none without an open call ends before
`_next_end`, so that most searches for sessions that are over need not look at each.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bindery_core.errors import TooManyRequests

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import MessageRef
from bindery_broker.statistics.delivery import ConsumerStatistics

REQUESTS_REMEMBERED_MAX = 8
"""Maximum number of answers that one session can repeat. A client has one call in progress, or a few."""


@dataclass(slots=True, eq=False)
class Session:
    consumer: Consumer
    joined_at: float
    ttl_s: float
    last_call_at: float
    calls_open: int = 0
    call_count: int = 0
    statistics: ConsumerStatistics = field(default_factory=ConsumerStatistics)
    remembered: dict[str, tuple[MessageRef, ...]] = field(default_factory=dict)
    """Messages of an answer by request id, oldest answer first."""

    def remember(self, request_id: str, refs: tuple[MessageRef, ...]) -> None:
        self.remembered.pop(request_id, None)
        self.remembered[request_id] = refs
        while len(self.remembered) > REQUESTS_REMEMBERED_MAX:
            del self.remembered[next(iter(self.remembered))]


class Sessions:
    def __init__(self, *, sessions_max: int = 1000) -> None:
        self._sessions: dict[str, Session] = {}
        self._sessions_max = sessions_max
        self._next_end = math.inf
        """No session ends before this time, in monotonic seconds."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, consumer: str) -> Session | None:
        return self._sessions.get(consumer)

    def begin_call(self, consumer: str, *, ttl_s: float, now: float) -> Session:
        """Create or continue a session. Raises TooManyRequests at the maximum number of consumers."""
        session = self._sessions.get(consumer)
        if session is None:
            if len(self._sessions) >= self._sessions_max:
                raise TooManyRequests("too many consumers", consumers=len(self._sessions), limit=self._sessions_max)
            session = Session(consumer=Consumer(consumer), joined_at=now, ttl_s=ttl_s, last_call_at=now)
            self._sessions[consumer] = session
        session.ttl_s = ttl_s
        session.last_call_at = now
        session.calls_open += 1
        session.call_count += 1
        return session

    def end_call(self, session: Session, *, now: float) -> None:
        assert session.calls_open > 0
        session.calls_open -= 1
        session.last_call_at = now
        self._next_end = min(self._next_end, now + session.ttl_s)

    def touch(self, consumer: str, *, now: float) -> None:
        """Record a call that needs no session, such as an acknowledgement. It extends the session if there is one."""
        session = self._sessions.get(consumer)
        if session is not None:
            session.last_call_at = now

    def remove(self, consumer: str) -> Session | None:
        return self._sessions.pop(consumer, None)

    def expire(self, *, now: float, leases_end_at: Callable[[Consumer], float | None]) -> list[Session]:
        """Remove and return the sessions that are over. `leases_end_at`: the deadline of a consumer's last lease."""
        if now < self._next_end:
            return []
        over = []
        self._next_end = math.inf
        for session in self._sessions.values():
            if session.calls_open:
                continue
            ends_at = session.last_call_at + session.ttl_s
            if ends_at <= now:
                leases_end = leases_end_at(session.consumer)
                if leases_end is None or leases_end <= now:
                    over.append(session)
                    continue
            self._next_end = min(self._next_end, ends_at)  # its leases may end before their time
        for session in over:
            del self._sessions[session.consumer.name]
        return over

    def ends_at(self, session: Session, *, leases_end: float | None) -> float | None:
        """Return when the session ends unless the consumer calls again; None while a call is in progress."""
        if session.calls_open:
            return None
        return max(session.last_call_at + session.ttl_s, leases_end or 0.0)
