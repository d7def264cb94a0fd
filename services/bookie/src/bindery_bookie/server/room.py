"""Room: decide which connection ends to make room for a new one.

At a limit of connections, one of them makes room; if the limit is that of an address, one of the same address. First
come connections that for UNKNOWN_GRACE_S have not sent a complete request, or have not authenticated, in the order of
their arrival. Then, of the address that has the most, comes the one whose last request, or arrival, is longest ago,
where the time counts

| rank    | connection                                                                            | this many times |
|---------|---------------------------------------------------------------------------------------|-----------------|
| new     | it has not sent a complete request yet                                                | NEW_WEIGHT      |
| IDLE    | no request is in progress                                                             | 1               |
| WAITING | the bookie waits for its client: for the rest of a frame, or until it reads responses | 1/4             |
| POLLING | only long polls are in progress                                                       | 1/16            |
| BUSY    | other requests than adds are in progress                                              | 1/64            |

One with adds in progress does not make room, because their clients would have to store the entries elsewhere. A new
connection does not end one of an address that has as few as its own. So a flood of connections does not end those in
use, which are idle only between two requests, nor a flood from a few addresses those of others, and it does not keep
others out. If nobody makes room, the new connection is refused.

There is one room for all connections, and one for those with TLS, which take more memory.

Invariants: at most `connections_max` connections, and `per_address_max` of one address, are counted.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from bindery_kit.limits.address_counts import AddressCounts

IDLE: Final = 1
WAITING: Final = 2
POLLING: Final = 3
BUSY: Final = 4
_WEIGHTS: Final = {IDLE: 1.0, WAITING: 1 / 4, POLLING: 1 / 16, BUSY: 1 / 64}

CANDIDATES_MAX: Final = 64
"""Number of connections that one scan of all connections selects. A scan takes about a millisecond."""
SCAN_PAUSE_S: Final = 0.05
"""Seconds after a scan without a result until the next."""
NEW_WEIGHT: Final = 100
"""How many times longer a client may be idle than a new one may take for its first request."""
UNKNOWN_GRACE_S: Final = 0.5
"""Seconds that a new client has for its first request before its connection makes room for others; otherwise clients
that only connect, over and over, would keep it out."""


class Occupant(Protocol):
    """A connection, as the room sees it."""

    group: str
    """Its address (`address_counts.group_of`)."""
    last_request_s: float
    """When its last request arrived, or the connection; monotonic."""

    @property
    def rank(self) -> int | None:
        """IDLE, WAITING, POLLING or BUSY; None while adds are in progress."""

    def give_way(self, reason: str) -> None:
        """End, because others need the room. It is no longer counted. `reason`: that of the room."""


class Room:
    """`reason`: why connections give way, in logs and metrics. `clock`: monotonic seconds."""

    def __init__(
        self, *, connections_max: int, per_address_max: int, clock: Callable[[], float], reason: str = "for_others"
    ) -> None:
        self.reason = reason
        self.connections_max = connections_max
        self.per_address_max = per_address_max
        self._clock = clock
        self.connections: dict[Occupant, None] = {}
        """In the order of their arrival."""
        self._addresses = AddressCounts()
        self._unknown: dict[Occupant, float] = {}
        """Connections without a complete request, the oldest first, with their time of arrival."""
        self._unknown_of: dict[str, dict[Occupant, float]] = {}
        """The same by address."""
        self._candidates: dict[str | None, deque[tuple[int, float, Occupant]]] = {}
        """Selected by the last scan, by address; None: of all addresses."""
        self._next_scan_s: dict[str | None, float] = {}

    def __len__(self) -> int:
        return len(self.connections)

    def open(self, new: Occupant) -> bool:
        """Count a connection, after another one gave way if that is necessary. False: there is no room."""
        is_address_full = self._addresses.count(new.group) >= self.per_address_max
        if is_address_full or len(self.connections) >= self.connections_max:
            other = self._choose(new.group, is_address_full=is_address_full)
            if other is None:
                return False
            self.close(other)
            other.give_way(self.reason)
        self.connections[new] = None
        self._addresses.add(new.group)
        now = self._clock()
        self._unknown[new] = now
        self._unknown_of.setdefault(new.group, {})[new] = now
        return True

    def know(self, connection: Occupant) -> None:
        """Record that a connection is of a client: it has sent a request. Idempotent."""
        if connection in self._unknown:
            del self._unknown[connection]
            group = self._unknown_of[connection.group]
            del group[connection]
            if not group:
                del self._unknown_of[connection.group]

    def close(self, connection: Occupant) -> None:
        """Do not count a connection any longer. Idempotent."""
        if connection in self.connections:
            self.know(connection)
            del self.connections[connection]
            self._addresses.remove(connection.group)
            if self._candidates and len(self.connections) < self.connections_max // 2:
                self._candidates.clear()  # each connection that is kept keeps the pages around it

    def _choose(self, group: str, *, is_address_full: bool) -> Occupant | None:
        """Return the connection that makes room for one of `group`; None if there is none."""
        now = self._clock()
        oldest = next(iter(self._unknown), None)
        if is_address_full or (oldest is not None and not self._may_end(oldest, group)):
            oldest = next(iter(self._unknown_of.get(group, ())), None)
        if oldest is not None and now - self._unknown[oldest] >= UNKNOWN_GRACE_S:
            return oldest
        found = None
        for where in (group,) if is_address_full else (self._addresses.largest, group, None):
            found = self._find(where, now)
            if found is not None and self._may_end(found, group):
                break
            found = None
        if found is None or (oldest is not None and NEW_WEIGHT * (now - self._unknown[oldest]) > _age(found, now)):
            return oldest
        return found

    def _may_end(self, one: Occupant, group: str) -> bool:
        """Whether a connection may make room for one of `group`."""
        return one.group == group or self._addresses.count(one.group) > self._addresses.count(group)

    def _find(self, group: str | None, now_s: float) -> Occupant | None:
        """Return the connection of `group` that comes next, other than new ones; None if there is none."""
        found = self._next_candidate(group)
        if found is None and now_s >= self._next_scan_s.get(group, now_s):
            self._scan(group)
            found = self._next_candidate(group)
            if found is None:
                if len(self._next_scan_s) >= CANDIDATES_MAX:
                    self._next_scan_s.clear()
                self._next_scan_s[group] = now_s + SCAN_PAUSE_S
        return found

    def _next_candidate(self, group: str | None) -> Occupant | None:
        """Return the next candidate that has done nothing since the scan. It remains the next one until it ends."""
        candidates = self._candidates.get(group) or deque()
        while candidates:
            rank, last_request_s, one = candidates[0]
            if one in self.connections and (one.rank, one.last_request_s) == (rank, last_request_s):
                return one
            candidates.popleft()
        self._candidates.pop(group, None)
        return None

    def _scan(self, group: str | None) -> None:
        """Select the next candidates, in their order."""
        now = self._clock()
        found = [
            (rank, one.last_request_s, one)
            for one in self.connections
            if (group is None or one.group == group) and one not in self._unknown and (rank := one.rank) is not None
        ]
        if found:
            if len(self._candidates) >= CANDIDATES_MAX:
                self._candidates.clear()  # addresses that are not full any longer
            best = heapq.nlargest(CANDIDATES_MAX, found, key=lambda one: (now - one[1]) * _WEIGHTS[one[0]])
            self._candidates[group] = deque(best)


def _age(one: Occupant, now_s: float) -> float:
    """Return the seconds since its last request, weighted by its rank."""
    rank = one.rank
    return 0.0 if rank is None else (now_s - one.last_request_s) * _WEIGHTS[rank]
