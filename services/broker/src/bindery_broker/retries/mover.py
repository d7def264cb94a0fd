"""Move messages of one subscription to another topic, so that each has exactly one copy and is then acknowledged.

| step                                                 | after a crash at its end                                 |
|------------------------------------------------------|----------------------------------------------------------|
| 1 hold the messages, so that nobody gets them        | they are delivered again                                 |
| 2 store an intent in the cursor                      | the target has no copy: they are delivered again         |
| 3 write the copies, in order                         | those that are stored are acknowledged, the others are   |
|                                                      | delivered again                                          |
| 4 acknowledge, and remove the intent, in one record  | the move is complete                                     |

An intent that is stored is **settled** before its messages may be delivered: the entries of the target after the
position in the intent are searched for the copies by their identity (`copies`). What is found is acknowledged, what is
missing is released, then the intent is removed. That is done before the first read of a subscription that was loaded,
before each move, and, if the outcome of a write is unknown, in the background with growing delays. If the target cannot
be read, nothing is assumed: the messages stay held, and the read or move fails with the reason.

A target that refuses a copy has stored nothing: the message is released with a delay that grows with each refusal.
One move is in progress at a time, the others wait: so at most one intent is stored.

A seek waits for the move in progress, then forgets what is held, and the stored intents with all acknowledgements: what
was sought back to is delivered again, even if it has a copy, like each message that was acknowledged.

Limits: if the target has trimmed a copy before the intent is settled, or if it was deleted, the message is delivered
again although it had been moved: at least once.
Invariants: at most one intent is stored when a move begins to write its own; a message of a stored intent is held, or
nothing was read since the dispatcher was replaced.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

import structlog
from bindery_core.backoff import Backoff
from bindery_core.errors import BadRequest, BinderyError, Conflict, NoSuchTopic, NotThere, OutcomeUnknown, TryAgain
from bindery_pulsar.message_codec import check_size
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.item import MessageRef
from bindery_broker.managed_ledger import BatchAck, ManagedCursor
from bindery_broker.retries.copies import Copy, Identity
from bindery_broker.retries.intents import (
    MESSAGES_MAX,
    Intent,
    Planned,
    acks_of,
    decode_intent,
    encode_intent,
    names_of_intents,
    next_name,
    plan,
)
from bindery_broker.retries.targets import Destination, Target, Targets

REFUSED_S: Final = Backoff(1.0, 300.0)
"""Delay of the delivery of a message that a target refused, by the number of refusals."""
REFUSED_MAX: Final = 10_000
"""Maximum number of messages whose refusals are counted."""
SETTLE_FIRST_S: Final = 0.2
SETTLE_MAX_S: Final = 10.0
"""First and largest delay in seconds between attempts to settle a move whose outcome is unknown."""
REFUSALS: Final = (TryAgain, BadRequest, Conflict, NotThere)
"""Errors of a write that stored nothing."""

Outcome = MessageId | BinderyError | None
"""Id of the copy, or why there is none; None: the message was acknowledged before."""

log = structlog.get_logger()


class Hold(Protocol):
    """Messages that the dispatcher gives to nobody until `finish` or `release`."""

    def renew(self) -> bool:
        """Hold also the messages that another one held when this began, and those of a dispatcher that was replaced.

        Returns False if the position of the subscription was changed: nothing is held then.
        """
        ...

    def finish(self, refs: Sequence[MessageRef]) -> None:
        """Forget messages: they are acknowledged."""
        ...

    def release(self, refs: Sequence[MessageRef], *, delay_s: float = 0.0) -> None:
        """Let messages be delivered again. What is not held any more is left as it is."""
        ...


class Source(Protocol):
    """The subscription whose messages are moved."""

    @property
    def cursor(self) -> ManagedCursor: ...

    @property
    def full_name(self) -> str:
        """The full name of the topic, and the name of the subscription."""
        ...

    def check_open(self) -> None:
        """Raise the reason if the subscription is closed."""
        ...

    def hold(self, refs: Sequence[MessageRef]) -> Hold:
        """Withdraw messages from whoever holds them. Also messages that were not read yet are not delivered."""
        ...

    def acked(self, positions: Sequence[Position], batches: Sequence[BatchAck], completed: Sequence[Position]) -> None:
        """The cursor has acknowledged these; `completed`: entries that are completely acknowledged by that."""
        ...


class Mover:
    """Moves messages of one subscription. Every operation fails once the subscription is closed."""

    def __init__(self, source: Source, targets: Targets) -> None:
        self._source = source
        self._cursor = source.cursor
        self._targets = targets
        self._lock = asyncio.Lock()
        """Held during a move, while intents are settled, and while the cursor is moved. Taken after the read lock of
        the dispatch loop, never before it."""
        self._holds: dict[str, Hold] = {}
        """What is held for intents whose outcome is unknown, by the name of the intent."""
        self._must_settle = bool(names_of_intents(self._cursor.blobs))
        """Whether messages of stored intents are not held."""
        self._refusals: dict[MessageRef, int] = {}
        """Number of refusals by message, of the last REFUSED_MAX that were refused."""
        self._tasks: dict[asyncio.Task[list[Outcome]], None] = {}
        self._settling: asyncio.Task[None] | None = None
        """Settles in the background."""
        self._is_closed = False

    @property
    def must_settle(self) -> bool:
        """Whether `before_read` must be called before messages are read."""
        return self._must_settle

    async def move(self, copies: Sequence[Copy], to: Destination) -> list[Outcome]:
        """Move messages, at most MESSAGES_MAX, in their order. Returns the outcome of each.

        The move continues if the caller is cancelled. An error that is raised applies to all messages, and nothing was
        written: they are delivered again later. A message with the outcome OutcomeUnknown is held until that is known.
        """
        return await asyncio.shield(self.begin(copies, to))

    def begin(self, copies: Sequence[Copy], to: Destination) -> "asyncio.Task[list[Outcome]]":
        """Hold the messages at once, and begin to move them. The task returns what `move` returns."""
        assert 0 < len(copies) <= MESSAGES_MAX
        self._source.check_open()
        hold = self._source.hold([copy.ref for copy in copies])
        task = asyncio.get_running_loop().create_task(self._run(copies, to, hold))
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[list[Outcome]]") -> None:
        self._tasks.pop(task, None)
        if not task.cancelled():
            task.exception()  # reported to the caller, unless it was cancelled

    def before_read(self) -> Awaitable[None] | None:
        """Settle the stored intents whose messages are not held; None: there are none, as before most reads.

        Raises TryAgain if that is not possible now.
        """
        return self._settle_before_read() if self._must_settle else None

    async def _settle_before_read(self) -> None:
        async with self._lock:
            await self._settle_all()
            self._must_settle = False

    def dispatcher_replaced(self) -> None:
        """Nothing is held any more: settle before the next read."""
        self._must_settle = self._lock.locked() or bool(names_of_intents(self._cursor.blobs))

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Let no move be in progress while the cursor is moved. Afterwards nothing is held."""
        async with self._lock:
            try:
                yield
            finally:
                self._holds.clear()
                self._refusals.clear()
                self._must_settle = bool(names_of_intents(self._cursor.blobs))

    def close(self) -> None:
        """End the settling in the background. Moves in progress end with the errors of the closed subscription."""
        self._is_closed = True
        if self._settling is not None:
            self._settling.cancel()
            self._settling = None

    # -- moving --------------------------------------------------------------------------------------------------

    async def _run(self, copies: Sequence[Copy], to: Destination, hold: Hold) -> list[Outcome]:
        async with self._lock:
            try:
                self._source.check_open()
                await self._settle_all()
                if not hold.renew():  # also holds what the settling has released: nobody got it since
                    raise TryAgain(
                        "the subscription's position was changed before the messages were moved; receive them again",
                        subscription=self._cursor.name,
                    )
                async with self._targets.open(to, create=True, source=self._source.full_name) as target:
                    return await self._move(copies, to, hold, target)
            except Exception as error:  # nothing was written
                self._refuse(copies, hold, error)
                raise

    async def _move(self, copies: Sequence[Copy], to: Destination, hold: Hold, target: Target) -> list[Outcome]:
        """Return the outcomes. Raises an error only if nothing was written to the target."""
        outcomes: dict[int, Outcome] = {}
        left: list[int] = []
        for number, copy in enumerate(copies):
            if self._is_acked(copy):
                outcomes[number] = None
                hold.finish([copy.ref])
                continue
            try:
                check_size(copy.message)
            except BinderyError as error:
                outcomes[number] = error
            else:
                left.append(number)
        if left:
            chosen = [copies[number] for number in left]
            outcomes |= zip(left, await self._write(chosen, to, hold, target), strict=True)
        refused = [number for number, outcome in outcomes.items() if isinstance(outcome, REFUSALS)]
        if refused:
            why = outcomes[refused[0]]
            assert isinstance(why, BinderyError)
            self._refuse([copies[number] for number in refused], hold, why)
        return [outcomes[number] for number in range(len(copies))]

    async def _write(self, copies: Sequence[Copy], to: Destination, hold: Hold, target: Target) -> list[Outcome]:
        """Store the intent, write the copies, acknowledge what was stored. Errors as `_move`."""
        name = next_name(self._cursor.blobs)
        intent = Intent(to, target.end, plan(copies))
        try:
            await self._cursor.put_blobs({name: encode_intent(intent)})
            self._source.check_open()
        except BinderyError:
            with suppress(BinderyError):  # if it is stored, it is settled later: the target has no copy
                await self._cursor.put_blobs({}, [name])
            raise
        outcomes: list[Outcome]
        try:
            outcomes = list(await target.publish([copy.message for copy in copies]))
        except BinderyError as error:
            outcomes = [error] * len(copies)
        except Exception as error:
            log.exception("move_failed", cursor=self._cursor.name, topic=to.topic.short)
            outcomes = [OutcomeUnknown("the messages may have been moved", cause=repr(error))] * len(copies)
        stored = [copy for copy, outcome in zip(copies, outcomes, strict=True) if isinstance(outcome, MessageId)]
        unknown = [one for one in outcomes if isinstance(one, BinderyError) and not isinstance(one, REFUSALS)]
        if unknown:
            self._holds[name] = hold
            self._settle_later(name, unknown[0])
        try:
            await self._acknowledge(stored, hold, remove=() if unknown else (name,))
        except BinderyError as error:  # the copies are stored, and the cursor has the acknowledgements in memory
            failed = OutcomeUnknown(
                "the messages were moved, but it is not known whether that is stored; they are not moved again",
                subscription=self._cursor.name,
                cause=str(error),
            )
            outcomes = [failed if isinstance(outcome, MessageId) else outcome for outcome in outcomes]
        return outcomes

    async def _acknowledge(
        self, messages: Sequence[Copy | Planned], hold: Hold | None, *, remove: Sequence[str]
    ) -> None:
        """Acknowledge messages and remove intents, in this order, usually with one record.

        If that fails, the cursor has both in memory, and the next record includes them.
        """
        positions, batches = acks_of(messages)
        refs = [message.ref for message in messages]
        try:
            completed, _ = await asyncio.gather(
                self._cursor.ack_many(positions, batches=batches), self._cursor.put_blobs({}, remove)
            )
        finally:
            if hold is not None:
                hold.finish(refs)
        for ref in refs:
            self._refusals.pop(ref, None)
        self._source.acked(positions, batches, completed)

    def _refuse(self, copies: Sequence[Copy], hold: Hold, error: Exception) -> None:
        """Release messages with the delays that follow a refusal."""
        by_delay: dict[float, list[MessageRef]] = {}
        for copy in copies:
            failures = self._refusals.pop(copy.ref, 0) + 1
            if len(self._refusals) >= REFUSED_MAX:
                del self._refusals[next(iter(self._refusals))]
            self._refusals[copy.ref] = failures
            by_delay.setdefault(REFUSED_S.delay_s(failures), []).append(copy.ref)
        for delay_s, refs in by_delay.items():
            hold.release(refs, delay_s=delay_s)
        log.warning(
            "messages_not_moved",
            cursor=self._cursor.name,
            messages=len(copies),
            retry_in_s=max(by_delay, default=0.0),
            error=str(error),
        )

    def _is_acked(self, message: Copy | Planned) -> bool:
        if self._cursor.is_acked(message.position):
            return True
        remaining = self._cursor.remaining(message.position)
        return remaining is not None and not remaining & message.ref.bits

    # -- settling ------------------------------------------------------------------------------------------------

    async def _settle_all(self) -> None:
        """Settle all stored intents. Raises TryAgain, or Corrupt, if one cannot be settled now."""
        for name in names_of_intents(self._cursor.blobs):
            await self._settle(name)

    async def _settle(self, name: str) -> None:
        intent = decode_intent(self._cursor.blobs[name])
        try:
            found = await self._find(intent)
        except TryAgain:
            raise
        except BinderyError as error:
            raise TryAgain(
                "whether messages were moved to another topic is not known, because it cannot be read; retry",
                topic=intent.to.topic.short,
                cause=str(error),
            ) from error
        stored = [message for message, is_stored in zip(intent.messages, found, strict=True) if is_stored]
        missing = [message for message, is_stored in zip(intent.messages, found, strict=True) if not is_stored]
        hold = self._holds.pop(name, None)
        try:
            await self._acknowledge(stored, hold, remove=(name,))
        finally:  # if that is not stored, the cursor has it in memory, and the next owner settles the intent again
            if hold is not None:
                hold.release([message.ref for message in missing])
        log.info(
            "move_settled",
            cursor=self._cursor.name,
            topic=intent.to.topic.short,
            found=len(stored),
            delivered_again=len(missing),
        )

    async def _find(self, intent: Intent) -> list[bool]:
        """Return for each message of the intent whether the target has its copy."""
        wanted = Counter(message.identity for message in intent.messages)
        stored: Counter[Identity] = Counter()
        try:
            async with self._targets.open(intent.to, create=False, source=self._source.full_name) as target:
                await target.decided()
                async for _, identity in target.scan(intent.after):
                    if stored[identity] < wanted[identity]:
                        stored[identity] += 1
                        if stored == wanted:
                            break
        except NoSuchTopic:
            log.warning("target_of_move_is_gone", cursor=self._cursor.name, topic=intent.to.topic.short)
        found: list[bool] = []
        for message in intent.messages:  # of equal ones, the first were stored
            found.append(stored[message.identity] > 0)
            stored[message.identity] -= 1
        return found

    def _settle_later(self, name: str, error: BinderyError) -> None:
        log.warning("outcome_of_move_unknown", cursor=self._cursor.name, intent=name, error=str(error))
        if self._settling is None and not self._is_closed:
            self._settling = asyncio.get_running_loop().create_task(self._settle_in_background())

    async def _settle_in_background(self) -> None:
        backoff = Backoff(SETTLE_FIRST_S, SETTLE_MAX_S)
        try:
            while self._holds and not self._is_closed:
                await asyncio.sleep(backoff.next_delay_s())
                try:
                    async with self._lock:
                        self._source.check_open()
                        await self._settle_all()
                except BinderyError as error:
                    log.warning("move_not_settled", cursor=self._cursor.name, error=str(error))
        finally:
            if self._settling is asyncio.current_task():
                self._settling = None
