"""Let a broker stop, or a request fail, at any step; a seed chooses the steps.

`FaultyClient` and `FaultyStore` stand between a managed ledger and the cluster. `Plan` decides for each call: let it
pass; fail it (done or not done, as an unknown outcome may be); or, at the chosen step, *die*: nothing the broker does
reaches the cluster any more, and no answer reaches the broker.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import (
    AddTimeout,
    BinderyError,
    BookieUnavailable,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NotEnoughBookies,
)
from bindery_metadata.stores.memory import MemoryStore

T = TypeVar("T")


class Plan:
    """What happens at each step. `steps` counts them, so that a first run finds the number of possible steps."""

    def __init__(self, seed: int, *, die_at: int | None, fault_rate: float) -> None:
        self.random = random.Random(seed)
        self.steps = 0
        self.died = asyncio.Event()
        self._die_at = die_at
        self._fault_rate = fault_rate

    async def run(self, work: Callable[[], Awaitable[T]], errors: Sequence[Callable[[], BinderyError]]) -> T:
        """Run `work` as one step. `errors`: first one that means "not done", then, if any, one that means "unknown"."""
        await self._stay_dead()
        self.steps += 1
        if self.steps == self._die_at:
            try:
                if self.random.random() < 0.5:
                    await work()
            finally:  # also if the work fails or is cancelled
                self.died.set()
        await self._stay_dead()
        if errors and self.random.random() < self._fault_rate:
            kind = self.random.randrange(len(errors))
            if kind == 1 and self.random.random() < 0.5:
                await work()
            raise errors[kind]()
        answer = await work()
        await self._stay_dead()
        return answer

    async def _stay_dead(self) -> None:
        if self.died.is_set():
            await asyncio.get_running_loop().create_future()


class FaultyHandle:
    """A write handle. A failing add may have stored any number of its first entries."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan
        self._broken: BinderyError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def add_many(self, payloads: Sequence[bytes]) -> int:
        # Passed on without a wait, as in the real handle, so that entries keep the order of the calls.
        if self._broken is not None:
            raise self._broken
        plan = self._plan
        plan.steps += 1
        dies = plan.steps == plan._die_at
        fails = plan.random.random() < plan._fault_rate
        if plan.died.is_set() or dies or fails:
            part = 0 if plan.died.is_set() else plan.random.randint(0, len(payloads))
            if not plan.died.is_set():
                self._broken = AddTimeout("made up")
            try:
                if part:
                    await self._inner.add_many(payloads[:part])
            finally:
                if dies:
                    plan.died.set()
            await plan._stay_dead()
            raise AddTimeout("made up")
        answer = await self._inner.add_many(payloads)
        await plan._stay_dead()
        if self._broken is not None:
            raise self._broken
        return int(answer)

    async def add(self, payload: bytes) -> int:
        return await self.add_many([payload])

    async def read(self, first: int, last: int) -> Any:
        return await self._plan.run(lambda: self._inner.read(first, last), [lambda: BookieUnavailable("made up")])

    async def close(self) -> Any:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        return await self._plan.run(self._inner.close, errors)

    async def abandon(self) -> None:
        if not self._plan.died.is_set():
            await self._inner.abandon()


class FaultyClient:
    def __init__(self, ledgers: MemoryLedgers, plan: Plan) -> None:
        self._inner = MemoryLedgerClient(ledgers)
        self._plan = plan

    async def create(self, **options: Any) -> FaultyHandle:
        errors = [lambda: NotEnoughBookies("made up"), lambda: MetadataOutcomeUnknown("made up")]
        return FaultyHandle(await self._plan.run(lambda: self._inner.create(**options), errors), self._plan)

    async def open(self, ledger_id: int, *, recover: bool = True) -> Any:
        return await self._plan.run(
            lambda: self._inner.open(ledger_id, recover=recover), [lambda: BookieUnavailable("made up")]
        )

    async def delete(self, ledger_id: int) -> None:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        await self._plan.run(lambda: self._inner.delete(ledger_id), errors)


class FaultyStore:
    """A store with the operations that topics use.

    Reads with a watch do not fail and are not counted: only policies are watched, and tasks of their own read them.
    """

    def __init__(self, inner: MemoryStore, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    async def get(self, path: str, *, watch: Any = None) -> Any:
        if watch is not None:
            return await self._inner.get(path, watch=watch)
        return await self._plan.run(lambda: self._inner.get(path), [lambda: MetadataUnavailable("made up")])

    async def exists(self, path: str, *, watch: Any = None) -> Any:
        if watch is not None:
            return await self._inner.exists(path, watch=watch)
        return await self._plan.run(lambda: self._inner.exists(path), [lambda: MetadataUnavailable("made up")])

    async def children(self, path: str, *, watch: Any = None) -> Any:
        if watch is not None:
            return await self._inner.children(path, watch=watch)
        return await self._plan.run(lambda: self._inner.children(path), [lambda: MetadataUnavailable("made up")])

    async def sync(self, path: str) -> None:
        await self._plan.run(lambda: self._inner.sync(path), [lambda: MetadataUnavailable("made up")])

    async def create(self, path: str, data: bytes = b"", **options: Any) -> Any:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        return await self._plan.run(lambda: self._inner.create(path, data, **options), errors)

    async def set(self, path: str, data: bytes, *, version: int | None) -> Any:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        return await self._plan.run(lambda: self._inner.set(path, data, version=version), errors)

    async def delete(self, path: str, *, version: int | None) -> None:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        await self._plan.run(lambda: self._inner.delete(path, version=version), errors)

    async def multi(self, ops: Sequence[Any]) -> Any:
        errors = [lambda: MetadataUnavailable("made up"), lambda: MetadataOutcomeUnknown("made up")]
        return await self._plan.run(lambda: self._inner.multi(ops), errors)
