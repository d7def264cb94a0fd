"""MemoryStore: the metadata store in memory, a real implementation for tests and simulations.

`MemoryTree` is the server; each `connect()` returns a session on it. Requests of a session are applied in order. Half
of the session's latency passes in each direction. Responses and watch events arrive in the order in which the tree sent
them. Time comes only from the event loop.

Faults for tests:

- `tree.suspend(store)`: the connection breaks. Requests not yet applied and responses in transit are lost (reads raise
  MetadataUnavailable, writes MetadataOutcomeUnknown). Later ones wait `operation_timeout_s` for `tree.resume(store)`.
- `tree.expire(store)`: the server ends the session and deletes its ephemeral nodes. A connected store is notified at
  once (SUSPENDED, LOST, CONNECTED with a new id), a suspended one when it is resumed, as with a real server.
- `store.fail_next(error)`, `store.lose_next_write(applied=...)`: one fault for one operation.

As with the real store, watches of a broken connection fire once it is CONNECTED again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar, cast

from bindery_core.errors import BinderyError, MetadataOutcomeUnknown, MetadataUnavailable

from bindery_metadata.layout.znode_path import validate_path, validate_size
from bindery_metadata.stores.memory_tree import Event, Kind, OpResult, Znodes
from bindery_metadata.stores.parents import create_with_parents
from bindery_metadata.stores.store import Create, Delete, Node, Op, SessionState, Set, Stat, Watch

T = TypeVar("T")

FIRST_SESSION_ID: Final = 0x1000_0000_0000_0001
"""Id of the first session of a tree. Later sessions count up."""
Matching = Callable[[str, str], bool]
"""Return whether a fault applies to (operation, path). Operations are named like the methods."""


@dataclass(slots=True)
class _Fault:
    matching: Matching
    error: BinderyError | None
    """Raised instead of applying the operation; None: the response is lost."""
    applied: bool
    writes_only: bool


@dataclass(slots=True)
class _Request:
    carry_out: Callable[[], tuple[object, list[Event]]]
    answer: "asyncio.Future[object]"
    write: bool
    path: str
    reply_lost: bool = False


class MemoryTree:
    """One shared tree. `now_ms`: the server's wall clock for ctime and mtime; None: the time of the event loop."""

    def __init__(self, *, now_ms: Callable[[], int] | None = None) -> None:
        self.znodes = Znodes()
        self._now_ms = now_ms
        self._sessions: list[MemoryStore] = []
        self._next_session_id = FIRST_SESSION_ID

    def connect(self, *, latency_s: float = 0.0, operation_timeout_s: float = 10.0) -> "MemoryStore":
        """Return a new session in the state CONNECTED. `latency_s`: round-trip time of a request."""
        store = MemoryStore(self, latency_s=latency_s, operation_timeout_s=operation_timeout_s)
        self._sessions.append(store)
        return store

    def suspend(self, store: "MemoryStore") -> None:
        """Break the connection of `store`."""
        store._disconnected()

    def resume(self, store: "MemoryStore") -> None:
        """Reconnect `store`: to its session, or to a new one if its session expired meanwhile."""
        store._connected_again()

    def expire(self, store: "MemoryStore") -> None:
        """End the session of `store`, as a server does after the session timeout."""
        connected = store.session_state is SessionState.CONNECTED
        if connected:
            store._disconnected()
        self._end_session(store)
        if connected:
            store._connected_again()

    def now_ms(self) -> int:
        return self._now_ms() if self._now_ms else int(asyncio.get_running_loop().time() * 1000)

    def _new_session_id(self) -> int:
        self._next_session_id += 1
        return self._next_session_id - 1

    def _end_session(self, store: "MemoryStore") -> None:
        owner, store._server_session = store._server_session, 0
        for path in self.znodes.owned_by(owner):
            _, events = self.znodes.apply([Delete(path, None)], owner=owner, now_ms=self.now_ms())
            self._fire(events)

    def _forget(self, store: "MemoryStore") -> None:
        self._end_session(store)
        self._sessions.remove(store)

    def _fire(self, events: Sequence[Event]) -> None:
        for event in events:
            for session in self._sessions:
                session._fire(event)


class MemoryStore:
    """A `MetadataStore`: one session on a MemoryTree. The module docstring lists the faults for tests."""

    def __init__(self, tree: MemoryTree, *, latency_s: float, operation_timeout_s: float) -> None:
        self._tree = tree
        self._half_latency_s = latency_s / 2
        self._operation_timeout_s = operation_timeout_s
        self._server_session = self._session_id = tree._new_session_id()
        self._state = SessionState.CONNECTED
        self._connected = asyncio.Event()
        self._connected.set()
        self._closed = False
        self._listeners: list[Callable[[SessionState], None]] = []
        self._watches: dict[Event, dict[Watch, None]] = {}
        self._dropped_watches: list[Watch] = []
        self._requests: deque[_Request] = deque()
        self._inbound: deque[_Request | Watch] = deque()
        self._results: dict[int, object] = {}
        self._faults: list[_Fault] = []

    # --- faults ---------------------------------------------------------------------------------------------------

    def fail_next(self, error: BinderyError, *, matching: Matching | None = None) -> None:
        """Make the next operation, or the next one that `matching` accepts, raise `error` without being applied."""
        self._faults.append(_Fault(matching or _any, error, applied=False, writes_only=False))

    def lose_next_write(self, *, applied: bool, matching: Matching | None = None) -> None:
        """Make the next write raise MetadataOutcomeUnknown. `applied`: whether the write is applied.

        `matching`: the next write that it accepts; None: any.
        """
        self._faults.append(_Fault(matching or _any, None, applied=applied, writes_only=True))

    # --- MetadataStore --------------------------------------------------------------------------------------------

    async def get(self, path: str, *, watch: Watch | None = None) -> Node:
        def carry_out() -> Node:
            node = self._tree.znodes.get(path)
            self._watch((Kind.DATA, path), watch)
            return node

        return await self._read("get", path, carry_out)

    async def exists(self, path: str, *, watch: Watch | None = None) -> Stat | None:
        def carry_out() -> Stat | None:
            self._watch((Kind.DATA, path), watch)
            return self._tree.znodes.exists(path)

        return await self._read("exists", path, carry_out)

    async def children(self, path: str, *, watch: Watch | None = None) -> list[str]:
        def carry_out() -> list[str]:
            names = self._tree.znodes.children(path)
            self._watch((Kind.CHILDREN, path), watch)
            return names

        return await self._read("children", path, carry_out)

    async def create(
        self,
        path: str,
        data: bytes = b"",
        *,
        ephemeral: bool = False,
        sequential: bool = False,
        make_parents: bool = False,
    ) -> str:
        if make_parents:
            return await create_with_parents(self, path, data, ephemeral=ephemeral, sequential=sequential)
        validate_path(path)
        validate_size(len(data), path)
        [created] = await self._write("create", path, [Create(path, data, ephemeral, sequential)])
        assert isinstance(created, str)
        return created

    async def set(self, path: str, data: bytes, *, version: int | None) -> Stat:
        validate_path(path)
        validate_size(len(data), path)
        [stat] = await self._write("set", path, [Set(path, data, version)])
        assert isinstance(stat, Stat)
        return stat

    async def delete(self, path: str, *, version: int | None) -> None:
        validate_path(path)
        await self._write("delete", path, [Delete(path, version)])

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        if not ops:
            return []
        for op in ops:
            validate_path(op.path)
        validate_size(sum(len(op.data) for op in ops if isinstance(op, Create | Set)), ops[0].path)
        return await self._write("multi", ops[0].path, list(ops))

    async def sync(self, path: str) -> None:
        await self._read("sync", path, lambda: None)

    @property
    def session_state(self) -> SessionState:
        return self._state

    @property
    def session_id(self) -> int:
        return self._session_id

    def on_session_change(self, listener: Callable[[SessionState], None]) -> Callable[[], None]:
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._lose_connection()
        self._connected.set()  # requests that wait for a connection must fail now
        self._watches.clear()
        self._dropped_watches.clear()
        self._tree._forget(self)
        self._state, self._session_id = SessionState.LOST, 0

    # --- path of a request ----------------------------------------------------------------------------------------

    async def _read(self, operation: str, path: str, carry_out: Callable[[], T]) -> T:
        validate_path(path)
        return cast(T, await self._send(operation, path, lambda: (carry_out(), []), write=False))

    async def _write(self, operation: str, path: str, ops: list[Op]) -> list[OpResult]:
        def carry_out() -> tuple[object, list[Event]]:
            return self._tree.znodes.apply(ops, owner=self._server_session, now_ms=self._tree.now_ms())

        result = await self._send(operation, path, carry_out, write=True)
        assert isinstance(result, list)
        return result

    async def _send(
        self, operation: str, path: str, carry_out: Callable[[], tuple[object, list[Event]]], *, write: bool
    ) -> object:
        await self._wait_until_connected(path)
        fault = self._take_fault(operation, path, write=write)
        if fault and fault.error:
            raise fault.error
        loop = asyncio.get_running_loop()
        request = _Request(carry_out, loop.create_future(), write, path)
        if fault:
            request.reply_lost = True
            if not fault.applied:
                request.carry_out = lambda: (None, [])
        self._requests.append(request)
        loop.call_later(self._half_latency_s, self._arrive)
        return await request.answer

    async def _wait_until_connected(self, path: str) -> None:
        if not self._connected.is_set() and not self._closed:
            try:
                async with asyncio.timeout(self._operation_timeout_s):
                    await self._connected.wait()
            except TimeoutError:
                raise MetadataUnavailable("no connection to the metadata store", path=path) from None
        if self._closed:
            raise MetadataUnavailable("the metadata store was closed", path=path)

    def _arrive(self) -> None:
        """Server side: apply the oldest request and send its response after the events of earlier writes."""
        if not self._requests:
            return
        request = self._requests.popleft()
        try:
            result, events = request.carry_out()
        except BinderyError as error:
            self._results[id(request)] = error
        else:
            self._results[id(request)] = result
            self._tree._fire(events)
        self._send_back(request)

    def _send_back(self, item: "_Request | Watch") -> None:
        self._inbound.append(item)
        asyncio.get_running_loop().call_later(self._half_latency_s, self._receive)

    def _receive(self) -> None:
        """Client side: process the oldest response or watch event."""
        if not self._inbound:
            return
        item = self._inbound.popleft()
        if not isinstance(item, _Request):
            item()
            return
        result = self._results.pop(id(item))
        if item.answer.done():
            return
        if item.reply_lost:
            item.answer.set_exception(_lost(item))
        elif isinstance(result, BinderyError):
            item.answer.set_exception(result)
        else:
            item.answer.set_result(result)

    def _take_fault(self, operation: str, path: str, *, write: bool) -> _Fault | None:
        for fault in self._faults:
            if (write or not fault.writes_only) and fault.matching(operation, path):
                self._faults.remove(fault)
                return fault
        return None

    # --- session and watches --------------------------------------------------------------------------------------

    def _watch(self, event: Event, watch: Watch | None) -> None:
        if watch is not None:
            self._watches.setdefault(event, {})[watch] = None

    def _fire(self, event: Event) -> None:
        for watch in self._watches.pop(event, {}):
            self._send_back(watch)

    def _lose_connection(self) -> None:
        self._connected.clear()
        lost = [*self._inbound, *self._requests]
        self._inbound.clear()
        self._requests.clear()
        self._results.clear()
        for watches in self._watches.values():
            self._dropped_watches.extend(watches)
        self._watches.clear()
        for item in lost:
            if not isinstance(item, _Request):
                self._dropped_watches.append(item)
            elif not item.answer.done():
                item.answer.set_exception(_lost(item))

    def _disconnected(self) -> None:
        assert not self._closed
        if self._state is SessionState.CONNECTED:
            self._lose_connection()
            self._change_state(SessionState.SUSPENDED)

    def _connected_again(self) -> None:
        if self._closed or self._state is SessionState.CONNECTED:
            return
        if self._server_session == 0:
            self._session_id = 0
            self._change_state(SessionState.LOST)
            self._server_session = self._session_id = self._tree._new_session_id()
        self._connected.set()
        self._change_state(SessionState.CONNECTED)
        dropped, self._dropped_watches = self._dropped_watches, []
        for watch in dropped:
            self._send_back(watch)

    def _change_state(self, state: SessionState) -> None:
        self._state = state
        if state is SessionState.LOST:
            self._session_id = 0
        for listener in list(self._listeners):
            listener(state)


def _lost(request: _Request) -> BinderyError:
    if request.write:
        return MetadataOutcomeUnknown("connection lost before the answer", path=request.path)
    return MetadataUnavailable("connection lost before the answer", path=request.path)


def _any(_operation: str, _path: str) -> bool:
    return True
