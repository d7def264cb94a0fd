"""Simulate the metadata store of a cluster. Sessions fail, but ZooKeeper as a whole does not fail.

Requests are executed outside all processes, so that a request of a killed process may still arrive. Answers and watches
run in the process of their session. `on_ledger` is called with every change of a ledger's metadata.
"""

import random
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any

from bindery_core.errors import NoSuchNode
from bindery_core.formats import ledger_metadata_codec
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.memory_tree import Event, Kind, OpResult, Znodes
from bindery_metadata.stores.store import Op, SessionState

from bindery_simulation.loop import Process

LATENCIES_S = ((0.001, 0.006), (0.001, 0.006), (0.02, 0.2))
"""(minimum, maximum) time in seconds of a request and its answer. Each run uses one pair at random."""
OPERATION_TIMEOUT_S = 4.0
"""Maximum time in seconds that a request waits for a connection."""
OnLedger = Callable[[int, LedgerMetadata | None], None]
"""Called with the ledger id and the new metadata; None: the ledger was deleted."""
Sees = Callable[[Sequence[Op], int], Sequence[Callable[[], None]]]
"""Called before a transaction with its operations and the id of its session. The returned functions are called if the
transaction succeeds."""


class SimStore(MemoryStore):
    """The session of one process."""

    def __init__(self, tree: "SimTree", process: Process) -> None:
        self.process = process
        self._rng = tree.rng
        self._tree_latency_s = tree.latency_s
        self._server_context = Context()
        super().__init__(tree, latency_s=0.0, operation_timeout_s=OPERATION_TIMEOUT_S)

    @property
    def _half_latency_s(self) -> float:
        return self._rng.uniform(*self._tree_latency_s) / 2

    @_half_latency_s.setter
    def _half_latency_s(self, _: float) -> None:
        pass

    def simulated_context(self, callback: Callable[..., Any]) -> Context:
        """Return the context in which the loop runs a timer of this store."""
        return self._server_context if callback.__name__ == "_arrive" else self.process.context


class WatchedZnodes(Znodes):
    """Znodes whose transactions are observed."""

    def __init__(self) -> None:
        super().__init__()
        self.sees: Sees = lambda ops, owner: ()

    def apply(self, ops: Sequence[Op], *, owner: int, now_ms: int) -> tuple[list[OpResult], list[Event]]:
        seen = self.sees(ops, owner)
        done = super().apply(ops, owner=owner, now_ms=now_ms)
        for report in seen:
            report()
        return done


class SimTree(MemoryTree):
    """The simulated ZooKeeper."""

    def __init__(self, layout: LedgersLayout, rng: random.Random, on_ledger: OnLedger) -> None:
        super().__init__()
        self.znodes = self._watched = WatchedZnodes()
        self.rng = rng
        self.latency_s = rng.choice(LATENCIES_S)
        self.layout = layout
        self._on_ledger = on_ledger
        self._ids: dict[str, int] = {}

    def watch(self, sees: Sees) -> None:
        """Call `sees` before each transaction."""
        self._watched.sees = sees

    def open_session(self, process: Process) -> SimStore:
        store = SimStore(self, process)
        self._sessions.append(store)
        return store

    def process_of(self, session: int) -> Process | None:
        """Return the process of a session."""
        found = (s for s in self._sessions if isinstance(s, SimStore) and s._server_session == session != 0)
        store = next(found, None)
        return None if store is None else store.process

    # --- faults; to be called in the process of the store ----------------------------------------------

    def suspend_if_open(self, store: SimStore) -> None:
        if store in self._sessions:
            self.suspend(store)

    def expire_if_open(self, store: SimStore) -> None:
        if store in self._sessions:
            self.expire(store)

    def time_out_if_away(self, store: SimStore) -> None:
        if store.session_state is not SessionState.CONNECTED:
            self.time_out(store)

    def time_out(self, store: SimStore) -> None:
        """End the session at the server. The store learns this when it connects again."""
        if store in self._sessions:
            self._end_session(store)

    def end(self, process: Process) -> None:
        """Time out the sessions of a process that has ended."""
        for store in [s for s in self._sessions if isinstance(s, SimStore) and s.process is process]:
            self._forget(store)

    def catch_up(self, store: SimStore) -> None:
        """Report the loss of a session that timed out while its process was paused. Must run in that process."""
        if store._server_session == 0 and store.session_state is SessionState.CONNECTED:
            self.suspend(store)
            self.resume(store)

    # --- changes of ledgers -------------------------------------------------------------------------------------------

    def _fire(self, events: Sequence[Event]) -> None:
        for kind, path in events:
            if kind is Kind.DATA:
                self._report(path)
        super()._fire(events)

    def _report(self, path: str) -> None:
        ledger_id = self._ids.get(path)
        if ledger_id is None:
            found = self.layout.ledger_id(path)
            if found is None:
                return
            ledger_id = self._ids[path] = found
        try:
            data = self.znodes.get(path).data
        except NoSuchNode:
            self._on_ledger(ledger_id, None)
        else:
            self._on_ledger(ledger_id, ledger_metadata_codec.decode(data))
