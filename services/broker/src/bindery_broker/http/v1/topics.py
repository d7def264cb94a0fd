"""Topics: list, describe, create and delete them."""

from typing import Annotated, Any

from bindery_core.errors import BadRequest
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter, Query, Response

from bindery_broker.http import openapi
from bindery_broker.http.authorization import (
    of_visible_subscriptions,
    visible_page,
    visible_subscriptions,
    visible_topics,
)
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.models import (
    Created,
    Deleted,
    ForceQuery,
    LedgerRetention,
    PolicyInForce,
    RoutingQuery,
    SubscriptionStats,
    TopicList,
    TopicListQuery,
    TopicRetention,
    TopicStats,
)
from bindery_broker.http.v1.policies_view import policies_of
from bindery_broker.http.v1.statistics_view import Times, delivery_fields, read_oldest, rounded
from bindery_broker.namespaces.names import Page
from bindery_broker.topics.topic import Topic

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["topics"])
Routing = Annotated[RoutingQuery, Query()]
HIDDEN_REASON = "a subscription that the role may not use needs the ledger"


@router.get(
    "/v1/topics",
    operation_id="listTopics",
    summary="List the topics of the cluster or of a namespace, sorted by name",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(413, 429),
)
async def list_topics(exchange: Exchange, query: Annotated[TopicListQuery, Query()]) -> TopicList:
    namespace: tuple[str, str] | None = None
    if query.namespace is not None:
        tenant, _, space = query.namespace.partition("/")
        namespace = (tenant, space)
        if {tenant, space} & {".", ".."}:
            raise BadRequest("not a namespace", namespace=query.namespace)
    names = exchange.broker.names

    async def fetch(after: str | None, limit: int) -> Page:
        return await names.topics(after=after, limit=limit, namespace=namespace)

    page = await visible_page(exchange, fetch, visible_topics, after=query.after, limit=query.max)
    answer = TopicList(topics=page.names)
    if page.next is not None:
        answer.next = page.next
    partitioned = await exchange.broker.partitioned.counts(
        [
            name.partitioned_topic
            for name in map(TopicName.parse, (one for one in answer.topics if "-partition-" in one))
            if name.partition >= 0
        ]
    )
    if partitioned:
        answer.partitioned = partitioned
    return answer


@router.get(
    paths.TOPIC,
    operation_id="topicStats",
    summary="Show what a topic stores and its consumers",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def topic_stats(exchange: Exchange, name: paths.Topic, _query: Routing) -> TopicStats:
    broker = exchange.broker
    topic = await broker.topic(name)
    await read_oldest(list(topic.subscriptions.values()))
    times = Times(broker.now(), broker.clock())
    subscriptions = {}
    for subscription_name, subscription in topic.subscriptions.items():
        subscription.tick()
        subscriptions[subscription_name] = SubscriptionStats(
            type=subscription.type,
            consumers=len(subscription.sessions),
            mark_delete=str(subscription.cursor.mark_delete),
            **delivery_fields(topic, subscription, times),
        )
    policies = policies_of(broker, topic, list(topic.subscriptions.values()))
    answer = _stats_of(topic, subscriptions, policies, owner=broker.url, times=times)
    answer.subscriptions = await of_visible_subscriptions(exchange, name, subscriptions)
    return answer


def _stats_of(
    topic: Topic,
    subscriptions: dict[str, SubscriptionStats],
    policies: list[PolicyInForce],
    *,
    owner: str,
    times: Times,
) -> TopicStats:
    ledger, statistics, volume = topic.ledger, topic.statistics, topic.volume
    ledgers = ledger.internal_stats().get("ledgers")
    came = rounded(statistics.published.rates(times.now))
    ages = [one.oldest_unacked_age_ms for one in subscriptions.values() if one.oldest_unacked_age_ms is not None]
    return TopicStats(
        topic=topic.name.short,
        owner=owner,
        entries=ledger.entries_count,
        size=ledger.size,
        ledgers=len(ledgers) if isinstance(ledgers, list) else 0,
        first=str(ledger.first_position),
        last=str(ledger.last_confirmed),
        terminated=topic.is_terminated,
        messages_in=volume.messages_in,
        bytes_in=volume.bytes_in,
        messages_out=volume.messages_out,
        bytes_out=volume.bytes_out,
        messages_in_per_s=came.messages,
        bytes_in_per_s=came.bytes,
        messages_out_per_s=round(sum(one.messages_out_per_s for one in subscriptions.values()), 3),
        bytes_out_per_s=round(sum(one.bytes_out_per_s for one in subscriptions.values()), 3),
        average_message_size=round(volume.bytes_in / volume.messages_in, 1) if volume.messages_in else None,
        last_published_at=times.wall(statistics.last_published_at),
        producers=topic.producers_count,
        policies=policies,
        backlog_bytes=max((one.backlog_bytes for one in subscriptions.values()), default=0),
        oldest_unacked_age_ms=max(ages, default=None),
        subscriptions=subscriptions,
    )


@router.put(
    paths.TOPIC,
    operation_id="createTopic",
    summary="Create a topic; idempotent",
    response_description=openapi.TITLES[200],
    responses={
        201: {"model": Created, "description": openapi.TITLES[201]},
        **openapi.problems(*openapi.OF_TOPICS, 409, 429),
    },
)
async def create_topic(exchange: Exchange, name: paths.Topic, _query: Routing, response: Response) -> Created:
    broker = exchange.broker
    created = not await broker.topics.exists(name)
    topic = await broker.topic(name, create=True, is_explicit=True)
    response.status_code = 201 if created else 200
    return Created(topic=topic.name.short, created=created)


@router.delete(
    paths.TOPIC,
    operation_id="deleteTopic",
    summary="Delete a topic with its subscriptions and messages",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def delete_topic(exchange: Exchange, name: paths.Topic, query: Annotated[ForceQuery, Query()]) -> Deleted:
    await exchange.broker.topics.delete(name, force=query.force)
    return Deleted(deleted=name.short)


@router.get(
    paths.TOPIC + "/internal",
    operation_id="topicInternalStats",
    summary="Show ledgers and cursors, in the form of Pulsar's internalStats",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def topic_internal_stats(exchange: Exchange, name: paths.Topic, _query: Routing) -> dict[str, Any]:
    topic = await exchange.broker.topic(name)
    found = dict(topic.ledger.internal_stats())
    return {**found, "cursors": await of_visible_subscriptions(exchange, name, found["cursors"])}


@router.get(
    paths.TOPIC + "/retention",
    operation_id="topicRetention",
    summary="Show for each ledger of a topic whether it is kept, and why",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def topic_retention(exchange: Exchange, name: paths.Topic, _query: Routing) -> TopicRetention:
    topic = await exchange.broker.topic(name)
    rule, verdicts = topic.ledger.retention, topic.ledger.explain_retention()
    named = {verdict.subscription for verdict in verdicts if verdict.subscription is not None}
    hidden = named - set(await visible_subscriptions(exchange, name, named))
    return TopicRetention(
        topic=topic.name.short,
        time_s=rule.time_s,
        size_max=rule.size_max,
        is_policy=topic.policies.retention is not None,
        ledgers=[
            LedgerRetention(
                ledger_id=verdict.ledger_id,
                entries=verdict.entries,
                size=verdict.size,
                closed_at=verdict.closed_ms or None,
                code=verdict.code,
                reason=HIDDEN_REASON if verdict.subscription in hidden else verdict.detail,
                until=verdict.until_ms,
                subscription=None if verdict.subscription in hidden else verdict.subscription,
            )
            for verdict in verdicts
        ],
    )
