"""Defects of the broker: each function returns the attributes to replace.

They replace whole operations of topics, cursors and dispatchers, not lines of them, so that most of them survive a
change of the code around them.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import MessageRef
from bindery_broker.dispatch.key_shared import AUTO_SPLIT, KeySharedDispatcher, KeySharedMode
from bindery_broker.dispatch.leases import LeaseTable
from bindery_broker.dispatch.portions import State
from bindery_broker.dispatch.shared import SharedDispatcher
from bindery_broker.dispatch.single_active import SingleActiveDispatcher
from bindery_broker.managed_ledger import opening, retention, trimming
from bindery_broker.managed_ledger.cursors.ack_state import AckState
from bindery_broker.managed_ledger.cursors.cursor import ManagedCursor
from bindery_broker.managed_ledger.cursors.cursor_store import CursorStore
from bindery_broker.managed_ledger.ledger_list import LedgerList
from bindery_broker.managed_ledger.topic_metadata import OwnedNode, TopicMetadata
from bindery_broker.managed_ledger.writing.pending_adds import PendingAdds
from bindery_broker.managed_ledger.writing.writer import TopicWriter
from bindery_broker.retries import mover as moving
from bindery_broker.retries.mover import Mover
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.move_targets import Begun, HostedMoves, RemoteTarget, TopicTarget
from bindery_client.ledger.api import LedgerClient, WriteHandle
from bindery_core.errors import BinderyError, OutcomeUnknown, TryAgain
from bindery_core.ids import LedgerId
from bindery_metadata.stores.store import Check, Create, Op, Set, Stat
from bindery_pulsar.managed_ledger_codec import CursorState, decode_cursor
from bindery_pulsar.message_id import Position

from bindery_simulation.mutant import Replacement

BEFORE_S: Final = 0.0
"""Time in seconds that an early answer takes."""


# --- acknowledgements -------------------------------------------------------------------------------------------------


def ack_before_durable() -> list[Replacement]:
    """An acknowledgement is answered when it is in memory."""
    original = ManagedCursor._make_durable

    async def make_durable(self: Any, changed: bool) -> None:
        task = asyncio.ensure_future(original(self, changed))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(BEFORE_S)

    return [(ManagedCursor, "_make_durable", make_durable)]


def group_commit_answers_all() -> list[Replacement]:
    """A record that is written answers the acknowledgements that arrived during the write, too."""
    original = ManagedCursor._answer

    def answer(self: Any, version: int, error: BinderyError | None) -> None:
        original(self, self._version if error is None else version, error)

    return [(ManagedCursor, "_answer", answer)]


def znode_instead_of_record() -> list[Replacement]:
    """The state of a cursor is read from its znode, although a cursor ledger has a newer one."""
    original = CursorStore.load

    async def load(self: Any, data: bytes) -> CursorState | None:
        found = await original(self, data)
        older = decode_cursor(data).state
        return found if older is None else older

    return [(CursorStore, "load", load)]


def batch_index_off_by_one() -> list[Replacement]:
    """The message after the acknowledged one of a batch is acknowledged."""
    original = ManagedCursor.ack_many

    async def ack_many(self: Any, positions: Sequence[Position], *, batches: Sequence[Any] = ()) -> Any:
        moved = [one._replace(indexes=[(index + 1) % one.batch_size for index in one.indexes]) for one in batches]
        return await original(self, positions, batches=moved)

    return [(ManagedCursor, "ack_many", ack_many)]


def whole_batch_acknowledged() -> list[Replacement]:
    """The acknowledgement of one message of a batch acknowledges the batch."""
    original = ManagedCursor.ack_many

    async def ack_many(self: Any, positions: Sequence[Position], *, batches: Sequence[Any] = ()) -> Any:
        return await original(self, [*positions, *(one.position for one in batches)])

    return [(ManagedCursor, "ack_many", ack_many)]


def cumulative_one_too_far() -> list[Replacement]:
    """A cumulative acknowledgement includes the next entry."""
    original = ManagedCursor.ack_cumulative

    async def ack_cumulative(self: Any, position: Position, *, batch: Any = None) -> None:
        following = self._ledgers.next(position)
        if batch is None and self._ledgers.contains(following):
            position = following
        await original(self, position, batch=batch)

    return [(ManagedCursor, "ack_cumulative", ack_cumulative)]


def seek_keeps_acks() -> list[Replacement]:
    """A seek moves the mark-delete position and keeps single acknowledgements."""

    def seek(self: Any, position: Position) -> None:
        self.mark_delete = self._ledgers.previous(position)
        self._advance()

    return [(AckState, "seek", seek)]


def seek_not_stored() -> list[Replacement]:
    """A seek is answered when it is in memory, and is stored with the next acknowledgement."""
    original = ManagedCursor.seek

    async def seek(self: Any, position: Position, **others: Any) -> Any:
        task = asyncio.ensure_future(original(self, position, **others))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.sleep(BEFORE_S)
        return self._ledgers.clamp(position)

    return [(ManagedCursor, "seek", seek)]


# --- owners -----------------------------------------------------------------------------------------------------------


def last_ledger_not_fenced() -> list[Replacement]:
    """A topic is opened without fencing and recovering its last ledger."""

    async def recover(client: LedgerClient, ledger_id: int, *, timeout_s: float) -> Any:
        return await client.open(LedgerId(ledger_id), recover=False)

    return [(opening, "_recover", recover)]


def cursor_ledger_not_fenced() -> list[Replacement]:
    """The ledger of a cursor is read without fencing it."""
    original = CursorStore.load

    async def load(self: Any, data: bytes) -> CursorState | None:
        client = self._client

        class Unfenced:
            async def open(self, ledger_id: LedgerId, **_: Any) -> Any:
                reader = await client.open(ledger_id, recover=False)
                await reader.read_last_confirmed()
                return reader

        self._client = Unfenced()
        try:
            return await original(self, data)
        finally:
            self._client = client

    return [(CursorStore, "load", load)]


def znodes_without_versions() -> list[Replacement]:
    """The znodes of a topic and its cursors are written whatever their versions are."""

    async def attempt(self: Any, node: OwnedNode, data: bytes, **_: Any) -> None:
        op: Op = Create(node.path, data) if node.version is None else Set(node.path, data, None)
        results = await self._store.multi([op])
        node.attempted = None
        result = results[-1]
        node.version = result.version if isinstance(result, Stat) else 0

    return [(TopicMetadata, "_attempt", attempt)]


def cursors_without_check() -> list[Replacement]:
    """The znodes of cursors are written without a check that this broker still owns the topic."""

    def check(self: Any) -> Check:
        return Check(self.node.path, None)  # type: ignore[arg-type]  # any version

    return [(TopicMetadata, "_check", check)]


# --- ledgers ----------------------------------------------------------------------------------------------------------


def trimmed_too_far() -> list[Replacement]:
    """One more ledger is deleted than the cursors have acknowledged."""
    original = retention.trimmable

    def trimmable(ledgers: LedgerList, positions: Mapping[str, Position], **others: Any) -> int:
        count = original(ledgers, positions, **others)
        return count + 1 if positions and count < len(list(ledgers)) - 1 else count

    return [(trimming, "trimmable", trimmable)]


def fastest_cursor_trims() -> list[Replacement]:
    """The cursor that is farthest decides what is deleted."""
    original = retention.trimmable

    def trimmable(ledgers: LedgerList, positions: Mapping[str, Position], **others: Any) -> int:
        return original(ledgers, {"": max(positions.values())} if positions else {}, **others)

    return [(trimming, "trimmable", trimmable)]


def settled_too_much() -> list[Replacement]:
    """After a ledger has failed, all entries in flight count as stored in it."""
    original = PendingAdds.settle

    def settle(self: Any, ledger_id: int, entries: int) -> Any:
        return original(self, ledger_id, entries + sum(group.count for group in self._in_flight))

    return [(PendingAdds, "settle", settle)]


def settled_too_little() -> list[Replacement]:
    """After a ledger has failed, its last entry is stored again in the next one."""
    original = PendingAdds.settle

    def settle(self: Any, ledger_id: int, entries: int) -> Any:
        return original(self, ledger_id, max(entries - 1, 0))

    return [(PendingAdds, "settle", settle)]


def published_before_durable() -> list[Replacement]:
    """Messages are acknowledged to their producer when they are sent to the bookies."""
    original = TopicWriter._send

    async def send(self: Any, handle: WriteHandle, group: Any, payloads: list[bytes]) -> None:
        for add in group.adds:
            if not add.future.done() and not add.positions:
                at = self._ledgers.current.ledger_id
                first = group.first + sum(len(one.payloads) for one in group.adds[: group.adds.index(add)])
                add.future.set_result([Position(at, first + number) for number in range(len(add.payloads))])
        await original(self, handle, group, payloads)

    return [(TopicWriter, "_send", send)]


# --- dispatch ---------------------------------------------------------------------------------------------------------


def expired_lease_forgotten() -> list[Replacement]:
    """The messages of an expired lease are not returned."""
    original = LeaseTable.due

    def due(self: Any, *, now: float) -> list[Any]:
        self.drop(original(self, now=now))
        return []

    return [(LeaseTable, "due", due)]


def rewind_forgotten() -> list[Replacement]:
    """After a rewind, an exclusive consumer continues with the next message instead of the first unacknowledged one."""
    original = SingleActiveDispatcher.rewind

    def rewind(self: Any) -> None:
        original(self)
        self.rewind_wanted = False

    return [(SingleActiveDispatcher, "rewind", rewind)]


def leaving_counts() -> list[Replacement]:
    """The messages of a consumer that leaves count as redelivered."""
    original = SharedDispatcher.release

    def release(self: Any, consumer: Consumer) -> int:
        for grant in consumer.grants.values():
            for portion in grant.portions:
                self._count_redelivery(portion)
        return original(self, consumer)

    return [(SharedDispatcher, "release", release)]


def counts_lost() -> list[Replacement]:
    """Reading a returned message again resets its redelivery count."""
    original = SharedDispatcher.offer_again

    def offer_again(self: Any, items: Sequence[Any], *, generation: int) -> None:
        original(self, items, generation=generation)
        for item in items:
            for portion in self._table.of(item.position):
                if portion.state is State.READY:
                    portion.redelivery_count = 0

    return [(SharedDispatcher, "offer_again", offer_again)]


def counts_not_loaded() -> list[Replacement]:
    """A broker that opens a topic begins with redelivery counts of 0."""
    original = CursorStore.load

    async def load(self: Any, data: bytes) -> CursorState | None:
        found = await original(self, data)
        return None if found is None else replace(found, redelivery_counts={})

    return [(CursorStore, "load", load)]


def delivered_before_counted() -> list[Replacement]:
    """A returned message is delivered before its redelivery count is stored."""
    original = DispatchLoop._record_counts

    async def record_counts(self: Any, dispatcher: Any) -> None:
        task = asyncio.ensure_future(original(self, dispatcher))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    return [(DispatchLoop, "_record_counts", record_counts)]


def exclusive_not_checked() -> list[Replacement]:
    """A second consumer may use an exclusive subscription, and takes it over."""

    def join(self: Any, consumer: str, kind: Any, *, key_shared: Any = AUTO_SPLIT) -> None:
        self._loop.tick()
        if kind != self.type:
            self._loop.change_type(kind, key_shared=key_shared)

    def choose(self: Any) -> None:
        chosen = self.consumers[-1] if self.consumers else None
        if chosen is not self.active:
            if self.active is not None and self.active.held:
                self.rewind()
            self.active = chosen

    return [(Subscription, "join", join), (SingleActiveDispatcher, "_choose", choose)]


def active_with_each_call() -> list[Replacement]:
    """Every consumer of a failover subscription gets messages."""
    original = SingleActiveDispatcher.reads_for

    def reads_for(self: Any, waiting: Collection[Consumer]) -> Consumer | None:
        self.active = next((one for one in self.consumers if one in waiting), self.active)
        return original(self, waiting)

    return [(SingleActiveDispatcher, "reads_for", reads_for)]


def kept_by_former_consumer() -> list[Replacement]:
    """If another consumer of a failover subscription becomes active, the former one keeps what it holds."""

    def choose(self: Any) -> None:
        self.active = self._pick_active(self.consumers) if self.consumers else None

    return [(SingleActiveDispatcher, "_choose", choose)]


def taken_from_former_consumer() -> list[Replacement]:
    """A consumer of a failover subscription that becomes active gets at once what the former one holds."""

    def choose(self: Any) -> None:
        chosen = self._pick_active(self.consumers) if self.consumers else None
        if chosen is not self.active and self.active is not None and self.active.held:
            self.rewind()
        self.active = chosen

    return [(SingleActiveDispatcher, "_choose", choose)]


def key_moves_at_once() -> list[Replacement]:
    """A key goes to its new owner while the former one holds messages of it, and returned messages are overtaken."""
    original = KeySharedDispatcher.__init__

    def __init__(self: Any, **others: Any) -> None:
        original(self, **{**others, "mode": KeySharedMode(allow_out_of_order=True)})

    return [(KeySharedDispatcher, "__init__", __init__)]


def key_overtaken() -> list[Replacement]:
    """Later messages of a key are delivered while returned ones wait to be read again."""
    original = KeySharedDispatcher.__init__

    def __init__(self: Any, **others: Any) -> None:
        original(self, **others)
        self._waiting_states = frozenset({State.READY, State.SHELVED})

    return [(KeySharedDispatcher, "__init__", __init__)]


def delay_ignored() -> list[Replacement]:
    """Delayed messages of shared subscriptions are delivered at once."""
    return [(SharedDispatcher, "keeps_delays", False)]


def delivered_while_held() -> list[Replacement]:
    """A returned message stays with its former consumer, and others get it, too."""
    original = SharedDispatcher.take

    def take(self: Any, consumer: Consumer, **others: Any) -> Any:
        taken = original(self, consumer, **others)
        for delivery in taken[:1]:
            portion = self.find(MessageRef(delivery.position, delivery.bits))
            self.leases.drop((portion,))
            self._to_replay(portion)
        return taken

    return [(SharedDispatcher, "take", take)]


# --- moves ------------------------------------------------------------------------------------------------------------


def moved_without_intent() -> list[Replacement]:
    """The intent of a move is not stored."""
    original = ManagedCursor.put_blobs

    async def put_blobs(self: Any, put: Mapping[str, bytes], remove: Collection[str] = ()) -> None:
        await original(self, {name: blob for name, blob in put.items() if not name.startswith("move-")}, remove)

    return [(ManagedCursor, "put_blobs", put_blobs)]


def copies_not_searched() -> list[Replacement]:
    """The messages of an intent are delivered again, whether they have copies or not."""

    async def find(_self: Any, intent: Any) -> list[bool]:
        return [False] * len(intent.messages)

    return [(Mover, "_find", find)]


def copies_assumed() -> list[Replacement]:
    """The messages of an intent are acknowledged, whether they have copies or not."""

    async def find(_self: Any, intent: Any) -> list[bool]:
        return [True] * len(intent.messages)

    return [(Mover, "_find", find)]


def moved_after_ack() -> list[Replacement]:
    """Messages are acknowledged before their copies are written."""
    original = Mover._write

    async def write(self: Any, copies: Any, to: Any, hold: Any, target: Any) -> Any:
        await self._acknowledge(copies, None, remove=())
        return await original(self, copies, to, hold, target)

    return [(Mover, "_write", write)]


def unknown_is_refused() -> list[Replacement]:
    """A copy whose outcome is not known is taken for one that was not stored."""
    return [(moving, "REFUSALS", (BinderyError,))]


def read_before_settled() -> list[Replacement]:
    """The moves of the former owner are settled only before the next move."""

    async def before_read(_self: Any) -> None:
        return

    return [(Mover, "before_read", before_read)]


def copies_reversed() -> list[Replacement]:
    """The copies of a request are written in reverse."""
    original = TopicTarget.publish

    async def publish(self: Any, messages: Sequence[Any]) -> Any:
        return (await original(self, messages[::-1]))[::-1]

    return [(TopicTarget, "publish", publish)]


# --- moves to topics of other brokers ---------------------------------------------------------------------------------


def epoch_not_checked() -> list[Replacement]:
    """Copies of an earlier epoch are stored."""

    async def publish(self: Any, topic: Any, messages: Sequence[Any], **_: Any) -> Any:
        return await TopicTarget(topic, self.writes).publish(messages)

    return [(HostedMoves, "publish", publish)]


def epoch_continued() -> list[Replacement]:
    """A move continues the epoch that its source has already, so that late copies of the one before belong to it."""
    original = HostedMoves.begin

    async def begin(self: Any, topic: Any, *, source: str) -> Begun:
        former = self._epochs.get(topic, {}).get(source)
        begun = await original(self, topic, source=source)
        if former is not None:
            self._epochs[topic][source] = former
            begun = begun._replace(epoch=former)
        return begun

    return [(HostedMoves, "begin", begin)]


def begun_during_writes() -> list[Replacement]:
    """A move begins while copies of the one before are being written."""

    async def begin(self: Any, topic: Any, *, source: str) -> Begun:
        self._begun += 1
        epoch = self._epochs.setdefault(topic, {})[source] = f"{self._prefix}-{self._begun}"
        return Begun(epoch, topic.ledger.last_confirmed)

    return [(HostedMoves, "begin", begin)]


def local_move_keeps_epoch() -> list[Replacement]:
    """A move of the owner itself does not end the epoch that the source began from another broker."""

    def target(self: Any, topic: Any, *, source: str) -> TopicTarget:
        assert source
        return TopicTarget(topic, self.writes)

    return [(HostedMoves, "target", target)]


def unanswered_is_refused() -> list[Replacement]:
    """If the owner of the target does not answer, its copies count as refused."""
    original = RemoteTarget.publish

    async def publish(self: Any, messages: Sequence[Any]) -> Any:
        try:
            return await original(self, messages)
        except OutcomeUnknown as error:
            raise TryAgain("the owner of the topic does not answer") from error

    return [(RemoteTarget, "publish", publish)]


def other_owner_not_searched() -> list[Replacement]:
    """A target that another broker owns counts as empty when a move is settled."""

    async def scan(_self: Any, after: Position) -> AsyncIterator[Any]:
        nothing: tuple[Any, ...] = ()
        for found in nothing:
            yield after, found

    return [(RemoteTarget, "scan", scan)]
