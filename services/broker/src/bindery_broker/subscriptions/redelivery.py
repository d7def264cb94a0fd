"""Deliver messages again: to a repeated request the messages of its first answer, and returned messages.

The dispatch loop returns the messages of expired leases.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

from bindery_core.sources import MonotonicClock
from bindery_pulsar.entry_size import ENTRY_SIZE_MAX
from bindery_pulsar.message_id import MessageId

from bindery_broker.dispatch.consumers import Consumer
from bindery_broker.dispatch.item import Delivery, MessageRef, refs_of
from bindery_broker.subscriptions.consumer import ReceiveCall
from bindery_broker.subscriptions.decoding import RoomNeeded
from bindery_broker.subscriptions.dispatch_loop import Deliveries, DispatchLoop
from bindery_broker.subscriptions.reading import MessageReader, bits_of_messages

GIVEN_UP_MAX: Final = 1_000
GIVEN_UP_S: Final = 60.0
"""Maximum number of calls that are given up before they have messages, and seconds for which that is remembered."""


class Redelivery:
    """Owns the calls in progress that have a request id."""

    def __init__(self, loop: DispatchLoop, reader: MessageReader, *, now: MonotonicClock) -> None:
        self._loop = loop
        self._reader = reader
        self._now = now
        self._in_progress: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._given_up: dict[tuple[str, str], float] = {}
        """Calls by consumer and request id whose messages nobody gets, and until when that is remembered (monotonic
        seconds): the message that says so came before the call had any."""

    async def take(self, call: ReceiveCall, request_id: str) -> Deliveries:
        """Return the messages of an earlier answer to `request_id` that the consumer still holds, else new messages.

        Waits for an earlier call with the same id that is still in progress.
        """
        key = (call.request.consumer, request_id)
        while True:
            while (running := self._in_progress.get(key)) is not None:
                timeout = call.deadline - self._now()
                if timeout <= 0:
                    return []
                await asyncio.wait({running}, timeout=timeout)
            remembered = call.session.remembered.get(request_id)
            if remembered is None:
                break
            repeated = await self._repeat(call, remembered)
            if repeated:
                return repeated
            if key not in self._in_progress:  # another call may have begun meanwhile
                break
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_progress[key] = done
        try:
            deliveries = await self._loop.take(call)
            if self._given_up and self._given_up.pop(key, 0.0) > self._now():
                self._loop.hand_back(call.session.consumer, deliveries)
                call.charge.release()
                return []
            if deliveries:
                call.session.remember(request_id, tuple(MessageRef(one.position, one.bits) for one in deliveries))
            return deliveries
        finally:
            del self._in_progress[key]
            done.set_result(None)

    def give_up(self, consumer: str, request_id: str) -> None:
        """Let the call with this request id, which is in progress or still to come, get no messages."""
        self._given_up.pop((consumer, request_id), None)
        if len(self._given_up) >= GIVEN_UP_MAX:
            del self._given_up[next(iter(self._given_up))]
        self._given_up[consumer, request_id] = self._now() + GIVEN_UP_S

    async def _repeat(self, call: ReceiveCall, refs: Sequence[MessageRef]) -> Deliveries:
        """Return those messages of `refs` that the consumer still holds, and restart their leases."""
        request, consumer = call.request, call.session.consumer
        held = self._loop.dispatcher.held(consumer, refs)
        size = sum(portion.size for portion in held)
        if not size:
            return []
        wanted = [portion.ref for portion in held]
        decoded_max = max(size, ENTRY_SIZE_MAX)
        while True:
            while not call.charge.take(least=decoded_max, most=decoded_max):
                await self._loop.wait_for_room(call, least=decoded_max)
                self._loop.check_open()
                if call.client is not None and call.client.is_gone:
                    return []
            try:
                found, _ = await self._reader.load(wanted, size_max=size, decoded_max=decoded_max)
                break
            except RoomNeeded as needed:
                decoded_max = needed.size
        bodies = {position: messages for position, _, messages in found}
        lease, kept = self._loop.dispatcher.renew(
            consumer,
            [MessageRef(position, bits_of_messages(messages)) for position, messages in bodies.items()],
            lease_s=request.ack_timeout_s,
            now=self._now(),
        )
        call.charge.keep(sum(portion.size for portion in kept))
        self._loop.wake()  # those who wait may get these messages earlier than before
        return [
            Delivery(portion.position, portion.bits, bodies[portion.position], lease, portion.redelivery_count)
            for portion in kept
        ]

    def nack(self, ids: Sequence[MessageId], *, delay_s: float, consumer: Consumer | None) -> list[MessageId]:
        """Return held messages for delivery after `delay_s`. Returns those that were held (by `consumer`, if given)."""
        dispatcher = self._loop.dispatcher
        refs = refs_of(ids, dispatcher.known_bits)
        returned = dispatcher.nack(refs, delay_s=delay_s, now=self._now(), consumer=consumer)
        if returned:
            self._loop.wake()
        return [message_id for ref in returned for message_id in self._reader.ids_of(ref)]

    def release(self, consumer: Consumer) -> bool:
        """Return everything that the consumer holds. Returns whether it held anything."""
        if not self._loop.dispatcher.release(consumer):
            return False
        self._loop.wake()
        return True
