"""Visit many ledgers in order, with bounded concurrency and rate, and with one rule for the errors of a single visit.

All checks that go over the ledgers use `LedgerWalk`: the full check, the replica check, the placement check, the check
of recently closed ledgers, the index of ledgers by bookie, and the wait for a drain. A walk yields one result for each
ledger, in the order of the ledger ids, while up to `in_flight` visits run at the same time.

| a visit                                           | result                                                   |
|---------------------------------------------------|----------------------------------------------------------|
| returns                                           | its result                                               |
| raises NoSuchLedger                               | Skip.DELETED                                             |
| raises Corrupt or BadVersion                      | Skip.UNREADABLE, logged                                  |
| takes longer than `timeout_s`                     | Skip.HUNG, logged                                        |
| raises NotLeader, MetadataUnavailable or          | the walk ends with the error; it may be resumed later    |
| MetadataOutcomeUnknown                            |                                                          |
| raises anything else                              | Skip.FAILED, logged, if `failed_event` is set; otherwise |
|                                                   | the walk ends with the error                             |
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar

from bindery_core.errors import BadVersion, Corrupt, MetadataOutcomeUnknown, MetadataUnavailable, NoSuchLedger
from bindery_core.ids import LedgerId
from bindery_kit.observability.logs import get_logger
from bindery_metadata.coordination.election import NotLeader

CATCH_UP_S: Final = 1.0
"""Seconds of delay for which a paced walk may make up by going faster."""

T = TypeVar("T")
R = TypeVar("R")

log = get_logger(__name__)


class Skip(StrEnum):
    """Why a visit has no result."""

    DELETED = "deleted"
    UNREADABLE = "unreadable"
    HUNG = "hung"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LedgerWalk:
    """Limits and log events of a walk. `run` may be called any number of times."""

    in_flight: int
    """Maximum number of visits at the same time."""
    rate: float | None = None
    """Maximum number of ledgers per second; None: no limit."""
    may_go_on: Callable[[], Awaitable[None]] | None = None
    """Returns when the next ledger may be visited; None: visits never wait."""
    timeout_s: float | None = None
    """Maximum duration of one visit in seconds; None: no limit."""
    hung_event: str = ""
    """Log event of a visit that reached the timeout."""
    unreadable_event: str = "ledger_metadata_unreadable"
    """Log event of metadata that cannot be parsed; empty: not logged."""
    failed_event: str = ""
    """Log event of a visit with an unexpected error; empty: such an error ends the walk."""

    def run(
        self, ledgers: AsyncIterator[LedgerId], visit: Callable[[LedgerId], Awaitable[R]], *, start_at: int = 0
    ) -> "contextlib.aclosing[AsyncGenerator[tuple[LedgerId, R | Skip], None]]":
        """Return the results as a context manager: leaving it cancels the visits that are still running.

        `ledgers`: ids, ascending. `start_at`: the lowest id to visit; smaller ids are skipped.
        """

        async def result(ledger_id: LedgerId) -> tuple[LedgerId, R | Skip]:
            return ledger_id, await self._visit(ledger_id, visit)

        return contextlib.aclosing(in_order(self._paced(ledgers, start_at), result, limit=self.in_flight))

    async def _paced(self, ledgers: AsyncIterator[LedgerId], start_at: int) -> AsyncIterator[LedgerId]:
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        async for ledger_id in ledgers:
            if ledger_id < start_at:
                continue
            if self.may_go_on is not None:
                await self.may_go_on()
            if self.rate is not None:
                now = loop.time()
                next_at = max(next_at, now - CATCH_UP_S)
                if next_at > now:
                    await asyncio.sleep(next_at - now)
                next_at += 1 / self.rate
            yield ledger_id

    async def _visit(self, ledger_id: LedgerId, visit: Callable[[LedgerId], Awaitable[R]]) -> R | Skip:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await visit(ledger_id)
        except (NotLeader, MetadataUnavailable, MetadataOutcomeUnknown):
            raise
        except NoSuchLedger:
            return Skip.DELETED
        except (Corrupt, BadVersion) as error:
            if self.unreadable_event:
                log.error(self.unreadable_event, ledger_id=ledger_id, error=str(error))
            return Skip.UNREADABLE
        except TimeoutError:
            if self.timeout_s is None:  # the timeout is the visitor's own: an incomplete walk must not appear complete
                raise
            log.warning(self.hung_event, ledger_id=ledger_id, waited_s=self.timeout_s)
            return Skip.HUNG
        except Exception:
            if not self.failed_event:
                raise
            log.exception(self.failed_event, ledger_id=ledger_id)
            return Skip.FAILED


async def each(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over a collection where an asynchronous iterator is expected."""
    for item in items:
        yield item


async def in_order(
    source: AsyncIterator[T], work: Callable[[T], Awaitable[R]], *, limit: int
) -> AsyncGenerator[R, None]:
    """Yield the result of `work` for each item of `source`, in its order, with at most `limit` of them in progress.

    An error of `source` or `work` ends the iteration, after the results before it. To stop early, close the generator
    (`contextlib.aclosing`): this cancels the work in progress.
    """
    assert limit >= 1
    waiting: deque[asyncio.Task[R]] = deque()
    try:
        async for item in source:
            if len(waiting) == limit:
                yield await waiting.popleft()
            waiting.append(asyncio.ensure_future(work(item)))
        while waiting:
            yield await waiting.popleft()
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
