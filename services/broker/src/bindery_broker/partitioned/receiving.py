"""Receive from several topics, called sides, as from one: the partitions of a topic, and its retry topic.

A call first takes what is there at once, in rounds: each round divides what the answer may still hold among the sides
that may have messages. So no partition makes others wait, and the first side changes with each call. If there is
nothing, the call waits at all sides. The first one that has messages ends the waits of the others; what those have got
meanwhile goes into the same answer, or is handed back, which does not count as a redelivery. No message stays leased
by a call that did not return it: also not after an error, a cancellation or a disconnection.

An error of one side does not keep messages of the others back, if it is one that passes (TryAgain, OutcomeUnknown, a
moved topic): it is raised by calls that found no message anywhere. Other errors, such as a subscription of another
type, end the call.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec.structs
from bindery_core.errors import BinderyError, LostOwnership, OutcomeUnknown, TryAgain

from bindery_broker.subscriptions.consumer import ClientWatch, ReceiveRequest, SubscriptionType
from bindery_broker.subscriptions.dispatch_loop import Deliveries
from bindery_broker.subscriptions.reading import messages_of
from bindery_broker.subscriptions.response_budget import Charge
from bindery_broker.topics.retried import Part
from bindery_broker.topics.retry_sides import RetrySide

SIDES_AT_ONCE_MAX: Final = 8
"""Maximum number of sides that a round asks: an answer of another broker takes room for a large message meanwhile."""
ROUNDS_MAX: Final = 3
"""Maximum number of times that a call asks a side that always has more than its share."""
PASSING: Final = (TryAgain, OutcomeUnknown, LostOwnership)
"""Errors of a side that do not concern the others."""


class Got(NamedTuple):
    """What a call has received."""

    parts: list[Part]
    failure: BinderyError | None = None
    """An error of a side that passes, if there was one."""


class _Grant(NamedTuple):
    side: RetrySide
    deliveries: Deliveries
    charge: Charge


async def receive_at_once(
    sides: Sequence[RetrySide],
    request: ReceiveRequest,
    *,
    kind: SubscriptionType,
    charge: Charge,
    client: ClientWatch | None = None,
) -> Got:
    """Return what `sides` have now, within the limits of the request; `charge` then holds its bytes."""
    grants: list[_Grant] = []
    count, size = request.count_max, request.bytes_max
    failure: BinderyError | None = None
    rounds = [0] * len(sides)
    queue = list(range(len(sides)))
    try:
        while queue and count > 0 and size > 0:
            some, queue = queue[: min(SIDES_AT_ONCE_MAX, count)], queue[min(SIDES_AT_ONCE_MAX, count) :]
            waiting = len(some) + len(queue)
            share = max(1, count // waiting)
            asked = {
                index: msgspec.structs.replace(
                    request,
                    wait_s=0.0,
                    count_max=share,
                    bytes_max=max(1, size // waiting),
                    redeliver=request.redeliver and not rounds[index],
                )
                for index in some
            }
            found, errors = await _ask([sides[index] for index in some], list(asked.values()), kind, charge)
            for error in errors.values():
                if not isinstance(error, PASSING):
                    grants += found.values()
                    raise error
                failure = error
            for number, index in enumerate(some):
                rounds[index] += 1
                grant = found.get(number)
                if grant is None:
                    continue
                taken = _count(grant.deliveries)
                if grants and (taken > count or grant.charge.size > size):
                    _give_back(request, grant)
                    count = 0
                    continue
                grants.append(grant)
                count -= taken
                size -= grant.charge.size
                # A repetition of a request id repeats its messages, so each side is asked once.
                if taken >= share and rounds[index] < ROUNDS_MAX and request.request_id is None:
                    queue.append(index)
    except BaseException:
        for grant in grants:
            _give_back(request, grant)
        raise
    if client is not None and client.is_gone:
        for grant in grants:
            _give_back(request, grant)
        return Got([])
    return Got(_joined(grants, charge), failure)


async def wait_for_any(
    sides: Sequence[RetrySide],
    request: ReceiveRequest,
    *,
    kind: SubscriptionType,
    charge: Charge,
    client: ClientWatch,
    on_waiting: Callable[[Callable[[], None]], None],
) -> Got:
    """Wait until one of the sides has messages, the time is over, or the client has gone.

    `on_waiting` gets a function that ends the wait. Without messages, the call may end early: when a side does.
    """
    loop = asyncio.get_running_loop()
    watches = [ClientWatch() for _ in sides]
    extras = [charge.another() for _ in sides]
    tasks = [
        loop.create_task(side.receive(request, kind=kind, charge=extra, client=watch))
        for side, extra, watch in zip(sides, extras, watches, strict=True)
    ]

    def end(*, gone: bool) -> None:
        for watch, task in zip(watches, tasks, strict=True):
            if not task.done():
                watch.set_gone() if gone else watch.end_wait()

    on_waiting(lambda: end(gone=False))
    client.begin_wait(lambda: end(gone=True))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # For those that still wait it is as if their client were gone: what they get now, they hand back themselves.
        end(gone=True)
        await asyncio.wait(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for grant in _grants(sides, tasks, extras):
            _give_back(request, grant)
        raise
    finally:
        client.waited()
    grants = _grants(sides, tasks, extras)
    errors = [error for task in tasks if (error := _error(task)) is not None]
    serious = next((error for error in errors if not isinstance(error, PASSING)), None)
    if client.is_gone or serious is not None:
        for grant in grants:
            _give_back(request, grant)
        if serious is not None and not client.is_gone:
            raise serious
        return Got([])
    kept: list[_Grant] = []
    count, size = request.count_max, request.bytes_max
    for grant in grants:
        taken = _count(grant.deliveries)
        if kept and (taken > count or grant.charge.size > size):
            _give_back(request, grant)
            continue
        kept.append(grant)
        count -= taken
        size -= grant.charge.size
    for extra in extras:
        if not any(extra is grant.charge for grant in kept):
            extra.release()
    passing = next((error for error in errors if isinstance(error, BinderyError)), None)
    return Got(_joined(kept, charge), passing)


async def receive_again(
    sides: Sequence[RetrySide], request: ReceiveRequest, request_id: str, *, kind: SubscriptionType, charge: Charge
) -> list[Part] | None:
    """Return the messages of an earlier answer to the same request id that the consumer still holds; None: there are
    none. A side that does not answer holds none: its messages come again later."""
    answers = await asyncio.gather(
        *(side.still_holds(request.consumer, request_id) for side in sides), return_exceptions=True
    )
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, BinderyError):
            raise answer
    holding = [side for side, answer in zip(sides, answers, strict=True) if answer is True]
    if not holding:
        return None
    at_once = msgspec.structs.replace(request, wait_s=0.0)
    found, errors = await _ask(holding, [at_once] * len(holding), kind, charge)
    if errors and not found:
        raise next(iter(errors.values()))
    return _joined([found[index] for index in sorted(found)], charge)


async def _ask(
    sides: Sequence[RetrySide], requests: Sequence[ReceiveRequest], kind: SubscriptionType, charge: Charge
) -> tuple[dict[int, _Grant], dict[int, BinderyError]]:
    """Ask all sides in parallel. Returns what they grant, and their errors, by index."""
    extras = [charge.another() for _ in sides]
    loop = asyncio.get_running_loop()
    tasks = [
        loop.create_task(side.receive(request, kind=kind, charge=extra))
        for side, request, extra in zip(sides, requests, extras, strict=True)
    ]
    request = requests[0]
    try:
        await asyncio.wait(tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for grant in _grants(sides, tasks, extras):
            _give_back(request, grant)
        raise
    found: dict[int, _Grant] = {}
    errors: dict[int, BinderyError] = {}
    for index, (side, task, extra) in enumerate(zip(sides, tasks, extras, strict=True)):
        error = _error(task)
        if error is None and task.result():
            found[index] = _Grant(side, task.result(), extra)
            continue
        extra.release()
        if isinstance(error, BinderyError):
            errors[index] = error
        elif error is not None:
            for grant in found.values():
                _give_back(request, grant)
            raise error
    return found, errors


def _grants(
    sides: Sequence[RetrySide], tasks: "Sequence[asyncio.Task[Deliveries]]", extras: Sequence[Charge]
) -> list[_Grant]:
    return [
        _Grant(side, task.result(), extra)
        for side, task, extra in zip(sides, tasks, extras, strict=True)
        if task.done() and not task.cancelled() and task.exception() is None and task.result()
    ]


def _error(task: "asyncio.Task[Deliveries]") -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _give_back(request: ReceiveRequest, grant: _Grant) -> None:
    grant.side.hand_back(request.consumer, grant.deliveries)
    grant.charge.release()


def _joined(grants: Sequence[_Grant], charge: Charge) -> list[Part]:
    """Return the grants as parts of an answer, one for each side, whose bytes `charge` then holds."""
    size = charge.size + sum(grant.charge.size for grant in grants)
    by_side: dict[int, Part] = {}
    for grant in grants:
        grant.charge.release()
        part = by_side.setdefault(id(grant.side), Part(grant.side.partition, []))
        part.deliveries.extend(grant.deliveries)
    charge.keep(size)
    return list(by_side.values())


def _count(deliveries: Deliveries) -> int:
    return sum(len(messages_of(delivery)) for delivery in deliveries)
