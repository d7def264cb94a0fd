"""SimTree: the metadata store of a simulated cluster. ZooKeeper never fails as a whole; its sessions do.

Requests run at the server as nobody's code, so that one whose sender was killed may still arrive; answers and watches
run in the process of their session. Every change of a ledger's metadata is told to `on_ledger`.
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
"""Least and longest of a request and its answer; one pair for a whole run."""
OPERATION_TIMEOUT_S = 4.0
OnLedger = Callable[[int, LedgerMetadata | None], None]
Sees = Callable[[Sequence[Op], int], Sequence[Callable[[], None]]]
"""Gets a transaction and the session that sent it; what it returns is called when it was done."""


class SimStore(MemoryStore):
    """One process's session."""

    def __init__(self, tree: "SimTree", process: Process) -> None:
        self.process = process
        self._lots = tree.rng
        self._tree_latency_s = tree.latency_s
        self._server_context = Context()
        super().__init__(tree, latency_s=0.0, operation_timeout_s=OPERATION_TIMEOUT_S)

    @property
    def _half_latency_s(self) -> float:
        return self._lots.uniform(*self._tree_latency_s) / 2

    @_half_latency_s.setter
    def _half_latency_s(self, _: float) -> None:
        pass

    def simulated_context(self, callback: Callable[..., Any]) -> Context:
        """For the loop: where a timer of ours runs."""
        return self._server_context if callback.__name__ == "_arrive" else self.process.context


class WatchedZnodes(Znodes):
    """Znodes at which somebody looks on."""

    def __init__(self, sees: Sees) -> None:
        super().__init__()
        self._sees = sees

    def apply(self, ops: Sequence[Op], *, owner: int, now_ms: int) -> tuple[list[OpResult], list[Event]]:
        seen = self._sees(ops, owner)
        done = super().apply(ops, owner=owner, now_ms=now_ms)
        for tell in seen:
            tell()
        return done


class SimTree(MemoryTree):
    def __init__(
        self, layout: LedgersLayout, rng: random.Random, on_ledger: OnLedger, sees: Sees = lambda ops, owner: ()
    ) -> None:
        super().__init__()
        self.znodes = WatchedZnodes(sees)
        self.rng = rng
        self.latency_s = rng.choice(LATENCIES_S)
        self.layout = layout
        self._on_ledger = on_ledger
        self._ids: dict[str, int] = {}

    def open_session(self, process: Process) -> SimStore:
        store = SimStore(self, process)
        self._sessions.append(store)
        return store

    def process_of(self, session: int) -> Process | None:
        """Whose session that is."""
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
        """The server ends the session; the store hears of it when it is connected the next time."""
        if store in self._sessions:
            self._end_session(store)

    def end(self, process: Process) -> None:
        """The sessions of a process that is no more time out."""
        for store in [s for s in self._sessions if isinstance(s, SimStore) and s.process is process]:
            self._forget(store)

    def catch_up(self, store: SimStore) -> None:
        """In its own process, after a pause: a session that timed out meanwhile is lost now."""
        if store._server_session == 0 and store.session_state is SessionState.CONNECTED:
            self.suspend(store)
            self.resume(store)

    # --- what becomes of ledgers --------------------------------------------------------------------------------------

    def _fire(self, events: Sequence[Event]) -> None:
        for kind, path in events:
            if kind is Kind.DATA:
                self._look(path)
        super()._fire(events)

    def _look(self, path: str) -> None:
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
