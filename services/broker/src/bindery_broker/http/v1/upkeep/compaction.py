"""Compaction of a topic: start it, and show what it did. `GET .../messages?compacted=true` reads the result."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models, paths
from bindery_broker.topics.topic import Topic

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["compaction"])


class CompactionAnswer(models.Answer):
    status: Literal["NOT_RUN", "RUNNING", "SUCCESS", "ERROR"]
    """Of the last compaction since the topic was loaded. Values as in Pulsar."""
    last_error: str = ""
    started_at: int | None = None
    """Milliseconds since 1970."""
    ended_at: int | None = None
    entries_read: int
    """Entries that the last compaction has read in its first pass."""
    keys: int
    """Keys with a message that it has found."""
    entries_written: int
    horizon: str | None = None
    """Last entry that was compacted; null: the topic was never compacted."""
    ledger_id: int | None = None
    """The compacted ledger."""
    bytes_not_compacted: int
    """Payload bytes of the entries after the horizon; an estimate."""


Routing = Annotated[models.RoutingQuery, Query()]


@router.put(
    paths.TOPIC + "/compaction",
    operation_id="compact",
    summary="Start to compact a topic: keep only the last message of each key",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def compact(exchange: Exchange, name: paths.Topic, _query: Routing) -> CompactionAnswer:
    """409: the topic is being compacted."""
    topic = await exchange.broker.topic(name)
    topic.compaction.start()
    return _answer(topic)


@router.get(
    paths.TOPIC + "/compaction",
    operation_id="compactionStatus",
    summary="Show the compaction that runs, or the last one",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, 409),
)
async def compaction_status(exchange: Exchange, name: paths.Topic, _query: Routing) -> CompactionAnswer:
    return _answer(await exchange.broker.topic(name))


def _answer(topic: Topic) -> CompactionAnswer:
    compaction = topic.compaction
    run, progress, state = compaction.last_run, compaction.progress, compaction.current()
    return CompactionAnswer(
        status=run.status.value,
        last_error="" if run.error is None else str(run.error),
        started_at=run.started_ms,
        ended_at=run.ended_ms,
        entries_read=progress.entries_read,
        keys=progress.keys,
        entries_written=progress.entries_written,
        horizon=None if state is None else str(state.horizon),
        ledger_id=None if state is None else state.ledger.ledger_id,
        bytes_not_compacted=compaction.size_not_compacted,
    )
