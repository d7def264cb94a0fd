"""The operations of partitioned topics themselves: show, set and delete their partitions."""

from typing import Annotated

from bindery_core.errors import NoSuchTopic
from fastapi import APIRouter, Query, Response
from pydantic import Field

from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.models import Answer, Body, Deleted, ForceQuery, RoutingQuery
from bindery_broker.http.v1.partitioned import lifecycle
from bindery_broker.partitioned.record import STORED_MAX

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["topics"])
PATH = paths.TOPIC + "/partitions"


class PartitionsBody(Body):
    partitions: Annotated[int, Field(ge=1, le=STORED_MAX)]
    """The number of partitions. It can only grow, up to BROKER_PARTITIONS_PER_TOPIC_MAX."""


class Partitions(Answer):
    topic: str
    partitions: int
    deleted: bool = False
    """Whether the topic is being deleted; repeat the deletion to complete it."""


class PartitionsSet(Answer):
    topic: str
    partitions: int
    created: bool


@router.get(
    PATH,
    operation_id="topicPartitions",
    summary="Show the number of partitions of a partitioned topic",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404, 413),
)
async def topic_partitions(
    exchange: Exchange, name: paths.Topic, _query: Annotated[RoutingQuery, Query()]
) -> Partitions:
    """404: there is no such topic, or it is not partitioned."""
    stored = await exchange.broker.partitioned.read(name)
    if stored is None:
        exists = await exchange.broker.topics.exists(name)
        raise NoSuchTopic("the topic is not partitioned" if exists else "no such topic", topic=name.short)
    return Partitions(topic=name.short, partitions=stored.value.partitions, deleted=stored.value.is_deleted)


@router.put(
    PATH,
    operation_id="setPartitions",
    summary="Create a partitioned topic, or add partitions to it; idempotent",
    response_description=openapi.TITLES[200],
    responses={
        201: {"model": PartitionsSet, "description": openapi.TITLES[201]},
        **openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS, 409),
    },
)
async def set_partitions(
    exchange: Exchange,
    name: paths.Topic,
    _query: Annotated[RoutingQuery, Query()],
    body: PartitionsBody,
    status: Response,
) -> PartitionsSet:
    """New partitions get the subscriptions of the topic. Keys are assigned to other partitions then.

    409: the topic has more partitions, it is being deleted, or a topic of this name is not partitioned.
    """
    created = await lifecycle.set_partitions(exchange, name, body.partitions)
    status.status_code = 201 if created else 200
    return PartitionsSet(topic=name.short, partitions=body.partitions, created=created)


@router.delete(
    PATH,
    operation_id="deletePartitions",
    summary="Delete a partitioned topic with its partitions; a repetition completes a deletion that was interrupted",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def delete_partitions(exchange: Exchange, name: paths.Topic, query: Annotated[ForceQuery, Query()]) -> Deleted:
    await lifecycle.delete(exchange, name, force=query.force)
    return Deleted(deleted=name.short)
