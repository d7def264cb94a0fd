"""Deliver messages again: to a repeated request the messages of its first answer, and returned messages.

The dispatch loop returns the messages of expired leases.
"""

import asyncio
from collections.abc import Sequence

from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_codec import Message
from bindery_pulsar.message_id import MessageId

from bindery_broker.dispatch.item import Delivery, MessageKey, key_of
from bindery_broker.subscriptions.consumer import ReceiveCall
from bindery_broker.subscriptions.decoding import RoomNeeded
from bindery_broker.subscriptions.dispatch_loop import DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader


class Redelivery:
    """Owns the calls in progress that have a request id."""

    def __init__(self, loop: DispatchLoop, reader: MessageReader, *, now: MonotonicClock) -> None:
        self._loop = loop
        self._reader = reader
        self._now = now
        self._in_progress: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def take(self, call: ReceiveCall, request_id: str) -> list[Delivery[Message]]:
        """Return the messages of an earlier answer to `request_id` that the consumer still holds, else new messages.

        Waits for an earlier call with the same id that is still in progress.
        """
        key = (call.request.consumer, request_id)
        while (running := self._in_progress.get(key)) is not None:
            timeout = call.deadline - self._now()
            if timeout <= 0:
                return []
            await asyncio.wait({running}, timeout=timeout)
        remembered = call.session.remembered.get(request_id)
        if remembered is not None:
            repeated = await self._repeat(call, remembered)
            if repeated:
                return repeated
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_progress[key] = done
        try:
            deliveries = await self._loop.take(call)
            if deliveries:
                call.session.remember(request_id, tuple(delivery.key for delivery in deliveries))
            return deliveries
        finally:
            del self._in_progress[key]
            done.set_result(None)

    async def _repeat(self, call: ReceiveCall, keys: Sequence[MessageKey]) -> list[Delivery[Message]]:
        """Return the messages of those `keys` that the consumer still holds, and restart their leases."""
        request = call.request
        leases = self._loop.dispatcher.leases
        size = sum(grant.sizes[key] for key in keys if (grant := leases.grant_of(key)) is not None)
        if not size:
            return []
        decoded_max = max(size, ENTRY_SIZE_MAX)
        while True:
            while not call.charge.take(least=decoded_max, most=decoded_max):
                await self._loop.wait_for_room(call, least=decoded_max)
                self._loop.check_open()
                if call.client is not None and call.client.is_gone:
                    return []
            try:
                found, _ = await self._reader.load(keys, size_max=size, decoded_max=decoded_max)
                break
            except RoomNeeded as needed:
                decoded_max = needed.size
        call.charge.keep(sum(item.size for item in found))
        items = {item.key: item for item in found}
        dispatcher = self._loop.dispatcher
        lease, held = dispatcher.renew(
            request.consumer,
            [key for key in keys if key in items],
            ack_timeout_s=request.ack_timeout_s,
            now=self._now(),
        )
        return [Delivery(key, items[key].message, lease, dispatcher.redelivery_count(key)) for key in held]

    def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: str | None) -> list[MessageKey]:
        """Return held messages for delivery after `delay_s`. Returns those that were held (by `consumer`, if given)."""
        keys = [key_of(message_id) for message_id in ids]
        returned = self._loop.dispatcher.nack(keys, delay_s=delay_s, now=self._now(), consumer=consumer)
        if returned:
            self._loop.wake()
        return returned

    def release(self, consumer: str) -> bool:
        """Return everything that the consumer holds. Returns whether it held anything."""
        if not self._loop.dispatcher.release(consumer):
            return False
        self._loop.wake()
        return True
