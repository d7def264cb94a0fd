"""Acknowledge messages: translate message ids for the cursor, store them durably, then update the dispatcher.

While the cursor is written, the dispatcher does not deliver the messages again (`begin_ack`). Afterwards it removes
them (`finish_ack`), or delivers them again if the write failed (`fail_ack`).
"""

from collections.abc import Sequence

from bindery_core.errors import BadRequest
from bindery_pulsar.message_id import MessageId, Position

from bindery_broker.dispatch.item import NOT_IN_BATCH, WHOLE, MessageRef, bits_of
from bindery_broker.dispatch.portions import Portion
from bindery_broker.errors import UnknownMessages
from bindery_broker.managed_ledger import BatchAck, ManagedCursor, ManagedLedger
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader, Messages


class Acknowledger:
    """Acknowledges messages of one subscription."""

    def __init__(
        self,
        cursor: ManagedCursor,
        ledger: ManagedLedger,
        loop: DispatchLoop,
        reader: MessageReader,
        *,
        partition: int,
    ) -> None:
        self._cursor = cursor
        self._ledger = ledger
        self._loop = loop
        self._batch_sizes = reader.batch_sizes
        self._delays = reader.delays
        self._partition = partition

    async def ack(self, positions: Sequence[Position], batches: Sequence[BatchAck]) -> int:
        """Acknowledge `positions` and `batches`, a result of `resolve`; durable on return.

        Returns how many messages in delivery, or read ahead, that acknowledges.
        """
        dispatcher = self._loop.dispatcher
        generation = dispatcher.generation
        refs = _refs(positions, batches)
        known_before = dispatcher.known_count
        portions = dispatcher.begin_ack(refs)
        unknown = dispatcher.known_count - known_before
        are_known = self._are_known(positions, batches, portions)
        try:
            finished = await self._cursor.ack_many(positions, batches=batches)
        except BaseException:
            if dispatcher is self._loop.dispatcher:
                dispatcher.fail_ack(portions)
            self._loop.wake()
            raise
        dispatcher.finish_ack(portions)
        are_known = are_known and dispatcher is self._loop.dispatcher and dispatcher.generation == generation
        self.acknowledged(positions, batches, finished, are_forgotten=are_known)
        return sum(portion.count for portion in portions) - unknown

    def _are_known(
        self, positions: Sequence[Position], batches: Sequence[BatchAck], portions: Sequence[Portion[Messages]]
    ) -> bool:
        """Whether `portions` are all messages of `positions` and `batches`, so that none can be read any more."""
        if batches or len(portions) != len(positions):
            return False
        return not any(position in self._batch_sizes for position in positions)

    def acknowledged(
        self,
        positions: Sequence[Position],
        batches: Sequence[BatchAck],
        finished: Sequence[Position],
        *,
        are_forgotten: bool = False,
    ) -> None:
        """The cursor has acknowledged these: forget them. `finished`: the entries that are complete by that.

        `are_forgotten`: whether the present dispatcher has already forgotten them.
        """
        if len(self._delays):
            self._delays.forget([*positions, *finished])
        if not are_forgotten:  # the dispatcher may have been replaced, and messages unknown to it may have been read
            present = self._loop.dispatcher
            present.finish_ack(present.begin_ack(_refs(positions, batches)))
        self._batch_sizes.forget(finished)
        # A repeated acknowledgement finishes no entry, but `resolve` looked up the size of its batch again.
        self._batch_sizes.forget(batch.position for batch in batches if self._cursor.is_acked(batch.position))
        self._loop.wake_blocked()

    async def ack_cumulative(self, positions: Sequence[Position], batches: Sequence[BatchAck], last: MessageId) -> int:
        """Acknowledge everything up to and including `last`, durably; `resolve([last])` returned the other arguments.

        Returns what `ack` returns. Raises BadRequest unless the type is exclusive or failover.
        """
        self.check_in_order()
        dispatcher = self._loop.dispatcher
        bits = WHOLE if last.batch_index == NOT_IN_BATCH or not batches else (1 << last.batch_index + 1) - 1
        ref = MessageRef(last.position, bits)
        known_before = dispatcher.known_count
        portions = dispatcher.begin_cumulative_ack(ref)
        unknown = dispatcher.known_count - known_before
        batch = batches[0]._replace(indexes=range(last.batch_index + 1)) if batches else None
        try:
            await self._cursor.ack_cumulative(positions[0] if positions else last.position, batch=batch)
        except BaseException:
            dispatcher.fail_ack(portions)
            self._loop.wake()
            raise
        dispatcher.finish_ack(portions)
        present = self._loop.dispatcher  # as in `acknowledged`
        present.finish_ack(present.begin_cumulative_ack(ref))
        if len(self._delays):
            self._delays.forget_upto(self._cursor.mark_delete)
        self._batch_sizes.forget_acked()
        self._loop.wake_blocked()
        return sum(portion.count for portion in portions) - unknown

    def passed(self) -> None:
        """The cursor has acknowledged everything up to its mark-delete position: forget what is not delivered of it."""
        mark_delete = self._cursor.mark_delete
        self._loop.dispatcher.forget_upto(mark_delete)
        self._delays.forget_upto(mark_delete)
        self._batch_sizes.forget_acked()
        self._loop.wake()

    def check_in_order(self) -> None:
        """Raise BadRequest unless messages are delivered in the topic's order."""
        if not self._loop.dispatcher.in_order:
            raise BadRequest(
                "cumulative acknowledgement needs an exclusive or failover consumer", subscription=self._cursor.name
            )

    async def resolve(self, ids: Sequence[MessageId]) -> tuple[list[Position], list[BatchAck]]:
        """Return `ids` as positions of whole entries and parts of batches, which a cursor accepts.

        Raises UnknownMessages with the ids that name no message of this topic.
        """
        positions, batches, unknown = await self.look_up(ids)
        if unknown:
            raise UnknownMessages.of(unknown, count=len(ids))
        return positions, batches

    async def look_up(self, ids: Sequence[MessageId]) -> tuple[list[Position], list[BatchAck], list[MessageId]]:
        """Return what `resolve` returns, and the ids that name no message of this topic."""
        indexed: dict[Position, set[int]] = {}
        positions: dict[Position, None] = {}
        unknown: list[MessageId] = []
        for message_id in ids:
            position = message_id.position
            if not self._may_exist(position, message_id.partition):
                unknown.append(message_id)
            elif message_id.batch_index == NOT_IN_BATCH:
                positions[position] = None
            else:
                indexed.setdefault(position, set()).add(message_id.batch_index)
        if not indexed and not unknown:  # most calls
            return list(positions), [], []
        sizes: dict[Position, int | None] = {}  # a copy: `batch_sizes` may be cleared while the next size is read
        if not unknown:
            for position, indexes in indexed.items():
                size = sizes[position] = await self._batch_sizes.look_up(position)
                bad = [index for index in indexes if size is not None and index >= size]
                unknown += [MessageId.of(position, batch_index=index, partition=self._partition) for index in bad]
        if unknown:
            return [], [], unknown
        batches = []
        for position, indexes in indexed.items():
            size = sizes[position]
            if size is not None and position not in positions:
                batches.append(BatchAck(position, size, sorted(indexes)))
        return list(positions), batches, []

    def _may_exist(self, position: Position, partition: int) -> bool:
        if partition not in (-1, self._partition):
            return False
        if self._ledger.contains(position):
            return True
        # A trimmed entry was acknowledged before: a late repetition is no error.
        return position < self._ledger.first_position


def _refs(positions: Sequence[Position], batches: Sequence[BatchAck]) -> list[MessageRef]:
    refs = [MessageRef(position, WHOLE) for position in positions]
    return refs + [MessageRef(batch.position, bits_of(batch.indexes)) for batch in batches]
