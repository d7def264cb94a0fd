"""Subscriptions: list, create, delete and seek them, and explain why messages are not delivered."""

import contextlib
from typing import Annotated

from bindery_core.errors import BadRequest, BinderyError
from bindery_pulsar.message_id import EARLIEST, LATEST, MessageId
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter, Query
from fastapi import Response as Status

from bindery_broker.http import openapi
from bindery_broker.http.authorization import may_use_derived, may_use_retries, visible_subscriptions
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.message_view import parse_place
from bindery_broker.http.v1.models import (
    ClearBody,
    Created,
    Deleted,
    ExpireBody,
    ExplainQuery,
    Explanation,
    ForceQuery,
    MessageExplanation,
    ResetBody,
    RoutingQuery,
    SeekBody,
    SkipBody,
    Sought,
    SubscribeBody,
    SubscriptionList,
    SubscriptionListQuery,
)
from bindery_broker.http.v1.policies_view import policies_of
from bindery_broker.http.v1.produce_request import split_tags
from bindery_broker.http.v1.statistics_view import Times, read_oldest
from bindery_broker.http.v1.subscription_view import dead_letters_lost, explain, info, size_of
from bindery_broker.retries.names import dead_letter_topic, retry_topic
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.retried import RetriedSubscription
from bindery_broker.topics.topic import Topic

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["subscriptions"])
Routing = Annotated[RoutingQuery, Query()]
LISTING_SIZE_MAX = 2**20
"""Approximate maximum bytes of a list of subscriptions: each can have a thousand consumers and large properties."""
_ERRORS = (*openapi.OF_TOPICS, 409)
_DONE = openapi.TITLES[200]


@router.get(
    paths.TOPIC + "/subscriptions",
    operation_id="listSubscriptions",
    summary="List the topic's subscriptions",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def list_subscriptions(
    exchange: Exchange, name: paths.Topic, query: Annotated[SubscriptionListQuery, Query()]
) -> SubscriptionList:
    """An answer has at least one subscription, and ends at about LISTING_SIZE_MAX bytes."""
    topic = await exchange.broker.topic(name)
    answer = SubscriptionList(subscriptions=[])
    size = 0
    shown: list[Subscription] = []
    names = set(await visible_subscriptions(exchange, name, list(topic.subscriptions)))
    for subscription_name, subscription in sorted(topic.subscriptions.items()):
        if subscription_name not in names:
            continue
        if query.after is not None and subscription_name <= query.after:
            continue
        if size >= LISTING_SIZE_MAX or len(shown) >= query.max:
            answer.next = shown[-1].name
            break
        size += size_of(subscription)
        shown.append(subscription)
    await read_oldest(shown)
    times = _times(exchange)
    answer.subscriptions = [info(topic, one, await _retried(exchange, topic, one), times) for one in shown]
    if damaged := topic.ledger.damaged_cursors:
        visible = await visible_subscriptions(exchange, name, sorted(damaged))
        answer.damaged = {one: str(damaged[one]) for one in visible}
    return answer


@router.put(
    paths.SUBSCRIPTION,
    operation_id="subscribe",
    summary="Create a subscription without consuming; idempotent",
    response_description=_DONE,
    responses={
        201: {"model": Created, "description": openapi.TITLES[201]},
        **openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
    },
)
async def subscribe(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    _query: Routing,
    body: SubscribeBody,
    status: Status,
) -> Created:
    tags = split_tags(body.tags) if body.tags is not None else []
    topic = await exchange.broker.topic(name, create=True)
    _, created = await topic.subscribe(
        subscription,
        initial=EARLIEST if body.initial == "earliest" else LATEST,
        tags=tags,
        properties=body.subscription_properties or {},
    )
    status.status_code = 201 if created else 200
    return Created(topic=topic.name.short, created=created)


@router.delete(
    paths.SUBSCRIPTION,
    operation_id="unsubscribe",
    summary="Delete a subscription",
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def unsubscribe(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    query: Annotated[ForceQuery, Query()],
) -> Deleted:
    topic = await exchange.broker.topic(name)
    await topic.unsubscribe(subscription, force=query.force)
    return Deleted(deleted=subscription)


@router.post(
    paths.SUBSCRIPTION + "/seek",
    operation_id="seek",
    summary="Move to a message, a time or a percentage; this discards all acknowledgements",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def seek(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: Routing, body: SeekBody
) -> Sought:
    if sum(value is not None for value in (body.message_id, body.timestamp, body.percent)) != 1:
        raise BadRequest("exactly one of message_id, timestamp and percent is required")
    if body.timestamp is not None:
        following = await (await _find(exchange, name, subscription)).seek(body.timestamp)
    elif body.percent is not None:
        following = await (await _find(exchange, name, subscription)).seek_percent(body.percent)
    else:
        assert body.message_id is not None
        place = parse_place(body.message_id)
        following = await (await _find(exchange, name, subscription)).seek(place)
    return Sought(next=str(following))


@router.post(
    paths.SUBSCRIPTION + "/skip",
    operation_id="skip",
    summary="Acknowledge the next entries without delivering them",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def skip(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: Routing, body: SkipBody
) -> Sought:
    """Messages that consumers hold stay with them until they acknowledge or return them."""
    return Sought(next=str(await (await _find(exchange, name, subscription)).skip(body.entries)))


@router.post(
    paths.SUBSCRIPTION + "/expire",
    operation_id="expire",
    summary="Acknowledge messages that were published before a time",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS, 422),
)
async def expire(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: Routing, body: ExpireBody
) -> Sought:
    """Messages that consumers hold stay with them until they acknowledge or return them."""
    before_ms = exchange.broker.clock() - body.older_than_ms
    return Sought(next=str(await (await _find(exchange, name, subscription)).expire(before_ms)))


@router.post(
    paths.SUBSCRIPTION + "/clear",
    operation_id="clearBacklog",
    summary="Acknowledge everything that is stored now",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def clear(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: Routing, _body: ClearBody
) -> Sought:
    """Messages that consumers hold stay with them until they acknowledge or return them."""
    return Sought(next=str(await (await _find(exchange, name, subscription)).clear()))


@router.post(
    paths.SUBSCRIPTION + "/reset",
    operation_id="resetSubscription",
    summary="Give a damaged subscription a new state; its acknowledgements are lost",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def reset(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: Routing, body: ResetBody
) -> Sought:
    """A subscription is damaged if its cursor ledger is missing or unreadable: every operation on it answers 500.

    No ledger of the topic is deleted until the subscription is reset or deleted. 409: it is not damaged; use seek.
    """
    topic = await exchange.broker.topic(name)
    following = await topic.reset_subscription(subscription, initial=EARLIEST if body.initial == "earliest" else LATEST)
    return Sought(next=str(following))


@router.get(
    paths.SUBSCRIPTION + "/explain",
    operation_id="explainSubscription",
    summary="Show which consumers hold messages, and why messages are not delivered",
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def explain_subscription(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    query: Annotated[ExplainQuery, Query()],
) -> Explanation:
    """With `message_id`, `message` says why that message is not delivered: the codes are `acknowledged`, `leased`,
    `returned`, `delayed`, `filtered`, `unreadable`, `unacked_max`, `dispatch_rate`, `key_held`, `key_of_other`,
    `not_active`, `behind`, `no_consumer` and `next`. `policies` has the policies in force that stop or drop
    something."""
    if query.consumer is not None and query.message_id is None:
        raise BadRequest("consumer needs message_id")
    topic = await exchange.broker.topic(name)
    found = topic.subscription(subscription)
    await read_oldest([found])
    retried = await _retried(exchange, topic, found)
    lost: str | None = None
    if query.message_id is None:
        with contextlib.suppress(BinderyError):  # an explanation that leaves one warning out is better than none
            lost = dead_letters_lost(await retried.find_dead_letters())
    backlog: int | None = None
    with contextlib.suppress(BinderyError):
        backlog = await retried.retry_backlog()
    policies = policies_of(exchange.broker, topic, [found])
    answer = explain(topic, found, retried, _times(exchange), policies=policies, retry_backlog=backlog)
    if lost is not None:
        answer.warnings = [lost]
    if query.message_id is not None:
        reason = await retried.explain(MessageId.parse(query.message_id), consumer=query.consumer)
        answer.message = MessageExplanation(message_id=query.message_id, code=reason.code, detail=reason.detail)
        if reason.until_ms is not None:
            answer.message.ends_in_ms = reason.until_ms
        if reason.consumer is not None:
            answer.message.consumer = reason.consumer
        if reason.policy is not None:
            answer.message.policy = reason.policy
    return answer


@router.delete(
    paths.SUBSCRIPTION + "/consumers/{consumer:segment}",
    operation_id="leave",
    summary="End a consumer's session; its messages go to other consumers at once",
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def leave(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    consumer: paths.Consumer,
    _query: Routing,
) -> Deleted:
    topic = await exchange.broker.topic(name)
    is_alone = not await may_use_retries(exchange)
    found = topic.subscription(subscription)
    await RetriedSubscription(topic, found, exchange.broker.retry_topics, is_alone=is_alone).leave(consumer)
    topic.end_readers()
    return Deleted(deleted=consumer)


def _times(exchange: Exchange) -> Times:
    return Times(exchange.broker.now(), exchange.broker.clock())


async def _retried(exchange: Exchange, topic: Topic, subscription: Subscription) -> RetriedSubscription:
    """Return the subscription with its retry and dead-letter topics, or alone if the request may not use both."""
    derived: list[TopicName] = []
    if exchange.broker.access is not None:
        with contextlib.suppress(BinderyError):  # the subscription can have none
            derived += retry_topic(topic.name, subscription.name), dead_letter_topic(topic.name, subscription.name)
    is_alone = bool(derived) and not await may_use_derived(exchange, subscription.name, *derived)
    return RetriedSubscription(topic, subscription, exchange.broker.retry_topics, is_alone=is_alone)


async def _find(exchange: Exchange, name: TopicName, subscription: str) -> Subscription:
    topic = await exchange.broker.topic(name)
    return topic.subscription(subscription)
