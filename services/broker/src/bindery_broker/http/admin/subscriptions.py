"""Calls on subscriptions: create, list and delete them, skip, expire, reset and peek."""

from collections.abc import Awaitable
from typing import Any, Final

from bindery_core.errors import Conflict, Forbidden
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId, Position
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import SUBSCRIPTION, TOPIC, Refused, answer, call, done, number, param, topic_of
from bindery_broker.http.admin.topics import ID_MAX, position_of, reply_with
from bindery_broker.http.authorization import visible_subscriptions
from bindery_broker.http.exchange import Exchange
from bindery_broker.subscriptions.subscription import Subscription

router: Final = APIRouter()
PEEK_MAX: Final = 10_000
"""Maximum number of unacknowledged entries that a peek passes over."""
_PLACES: Final = {"earliest": EARLIEST, "latest": LATEST}


@call(router, "GET", TOPIC + "/subscriptions", "adminListSubscriptions")
async def list_subscriptions(exchange: Exchange) -> Response:
    topic = await topic_of(exchange)
    return answer(await visible_subscriptions(exchange, topic.name, sorted(topic.subscriptions)))


@call(router, "PUT", SUBSCRIPTION, "adminCreateSubscription")
async def create(exchange: Exchange) -> Response:
    """The body is `"earliest"`, `"latest"`, or a message id. A missing topic is created."""
    wanted = await calls.body(exchange, dict[str, Any] | str, missing="latest")
    properties = wanted.get("properties") or {} if isinstance(wanted, dict) else {}
    place = _place(wanted)
    name = param(exchange, "subscription")
    topic = await topic_of(exchange, create=True)
    at_once = place.position in (EARLIEST, LATEST)
    initial = place.position if at_once else EARLIEST
    subscription, created = await topic.subscribe(name, initial=initial, properties=properties)
    if not created:
        raise Refused(409, "Subscription already exists for topic")
    if not at_once:
        await subscription.seek(place)
    return done()


@call(router, "DELETE", SUBSCRIPTION, "adminDeleteSubscription")
async def delete(exchange: Exchange) -> Response:
    force = calls.flag(exchange, "force")
    name = param(exchange, "subscription")
    topic = await topic_of(exchange)
    try:
        await topic.unsubscribe(name, force=force)
    except Conflict as error:
        raise Refused(412, "Subscription has active connected consumers") from error
    return done()


@call(router, "POST", SUBSCRIPTION + "/skip_all", "adminSkipAll")
async def skip_all(exchange: Exchange) -> Response:
    await (await _found(exchange)).clear()
    return done()


@call(router, "POST", SUBSCRIPTION + "/skip/{count:form}", "adminSkip")
async def skip(exchange: Exchange) -> Response:
    """Acknowledge the next entries; a batch is one entry."""
    count = number(param(exchange, "count"), "the number of messages", least=0, most=ID_MAX)
    subscription = await _found(exchange)
    if count:
        await subscription.skip(count)
    return done()


@call(router, "POST", SUBSCRIPTION + "/expireMessages/{seconds:form}", "adminExpire")
async def expire(exchange: Exchange) -> Response:
    """Acknowledge what was published more than a number of seconds ago."""
    before_ms = _before_ms(exchange)
    await (await _found(exchange)).expire(before_ms)
    return done()


@call(router, "POST", TOPIC + "/all_subscription/expireMessages/{seconds:form}", "adminExpireAll")
async def expire_all(exchange: Exchange) -> Response:
    """The role must be allowed to use each subscription of the topic; otherwise nothing is done."""
    before_ms = _before_ms(exchange)
    topic = await topic_of(exchange)
    subscriptions = dict(topic.subscriptions)
    names = [name for name, one in subscriptions.items() if not one.is_system]
    if len(await visible_subscriptions(exchange, topic.name, names)) < len(names):
        raise Forbidden(
            "the role may not use all subscriptions of the topic; expire those that it may use one by one, or ask an "
            "administrator of the tenant",
            topic=topic.name.short,
        )
    for subscription in subscriptions.values():
        await subscription.expire(before_ms)
    return done()


@call(router, "POST", SUBSCRIPTION + "/resetcursor/{timestamp:form}", "adminResetToTime")
async def reset_to_time(exchange: Exchange) -> Response:
    """Move to the first entry that was published at a time (ms since 1970) or later."""
    at_ms = number(param(exchange, "timestamp"), "the time", least=0, most=ID_MAX)
    await _seek((await _found(exchange)).seek(at_ms))
    return done()


@call(router, "POST", SUBSCRIPTION + "/resetcursor", "adminResetToMessage")
async def reset_to_message(exchange: Exchange) -> Response:
    """Move to a message; with `isExcluded`, behind its entry."""
    wanted = await calls.body(exchange, dict[str, Any])
    place = _place(wanted)
    subscription = await _found(exchange)
    topic = await topic_of(exchange)
    if wanted.get("isExcluded") and place.position not in (EARLIEST, LATEST):
        place = MessageId.of(topic.ledger.next_position(place.position), partition=topic.partition)
    await _seek(subscription.seek(place.position if place.position in (EARLIEST, LATEST) else place))
    return done()


@call(router, "GET", SUBSCRIPTION + "/position/{nth:form}", "adminPeek")
async def peek(exchange: Exchange) -> Response:
    """Return the n-th entry that is not acknowledged, from 1, without delivering it."""
    nth = number(param(exchange, "nth"), "the position", least=1, most=PEEK_MAX)
    subscription = await _found(exchange)
    topic = await topic_of(exchange)
    position = subscription.cursor.next_unacked(topic.ledger.next_position(subscription.cursor.mark_delete))
    for _ in range(nth - 1):
        position = subscription.cursor.next_unacked(topic.ledger.next_position(position))
        if not topic.ledger.contains(position):
            break
    return await reply_with(exchange, topic, position, missing="Message not found")


@call(router, "GET", SUBSCRIPTION + "/properties", "adminSubscriptionProperties")
async def properties(exchange: Exchange) -> Response:
    return answer(dict((await _found(exchange)).cursor.properties))


async def _found(exchange: Exchange) -> Subscription:
    return (await topic_of(exchange)).subscription(param(exchange, "subscription"))


async def _seek(seeking: Awaitable[Position]) -> None:
    try:
        await seeking
    except Conflict as error:
        raise Refused(412, str(error)) from error


def _before_ms(exchange: Exchange) -> int:
    seconds = number(param(exchange, "seconds"), "the number of seconds", least=0, most=2**31 - 1)
    return exchange.broker.clock() - seconds * 1000


def _place(wanted: dict[str, Any] | str) -> MessageId:
    """Return the message id of a body. Raises Refused if it is none."""
    if isinstance(wanted, str):
        if wanted not in _PLACES:
            raise Refused(400, "the position must be earliest, latest or a message id")
        return MessageId.of(_PLACES[wanted])
    position = position_of(wanted)
    if position.ledger_id < 0:
        return MessageId.of(EARLIEST)
    if position.ledger_id == ID_MAX:
        return MessageId.of(LATEST)
    index = wanted.get("batchIndex", -1)
    if not isinstance(index, int) or index < -1:
        raise Refused(400, "batchIndex must be a whole number")
    return MessageId.of(position, batch_index=index)
