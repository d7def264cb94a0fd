"""Dead letters of a subscription: list them, move them back to it, or discard them."""

import base64
from typing import Annotated, Final

from bindery_core.errors import BadRequest, NoSuchSubscription, NoSuchTopic
from bindery_pulsar.message_id import MessageId
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter, Query
from starlette.responses import Response

from bindery_broker.access.decision import Need
from bindery_broker.http import openapi
from bindery_broker.http.authorization import check_derived, check_topic
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import paths
from bindery_broker.http.v1.message_view import parse_ids
from bindery_broker.http.v1.models import (
    DeadLetter,
    DeadLetterList,
    DeadLettersQuery,
    NotRedriven,
    PurgeBody,
    Purged,
    RedriveBody,
    RedrivenLetters,
    RoutingQuery,
)
from bindery_broker.retries.copies import ORIGIN_MESSAGE_ID, REAL_TOPIC, RECONSUMETIMES, reconsume_times
from bindery_broker.retries.names import (
    DEAD_LETTERS,
    chosen_dead_letter_topic,
    dead_letter_topic,
    origin_topic,
    retry_topic,
)
from bindery_broker.retries.targets import Destination
from bindery_broker.topics.dead_letters import DeadLetterTopic, Letter
from bindery_broker.topics.retry_topics import check_receives_retries

_Routing = Annotated[RoutingQuery, Query()]
router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["subscriptions"])
LISTING_SIZE_MAX: Final = 2**20
"""Approximate maximum bytes of a list, unless its first message is larger."""
FAILURES_SHOWN_MAX: Final = 20
_ERRORS = (*openapi.OF_TOPICS, 409, 422, 429)
_DONE = openapi.TITLES[200]


@router.get(
    paths.SUBSCRIPTION + "/dead-letters",
    operation_id="listDeadLetters",
    summary="List the messages of the dead-letter topic that are not acknowledged",
    response_model=DeadLetterList,
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS),
)
async def list_dead_letters(
    exchange: Exchange,
    name: paths.Topic,
    subscription: paths.SubscriptionName,
    query: Annotated[DeadLettersQuery, Query()],
) -> DeadLetterList | Response:
    """The list is empty if there is no dead-letter topic with the default name."""
    named, found = await _find(exchange, name, subscription, query.topic, query.initial_subscription)
    if isinstance(found, Response):
        return found
    answer = DeadLetterList(topic=named.short, messages=[])
    if found is None:
        return answer
    after = None if query.after is None else MessageId.parse(query.after)
    page = await found.page(after, charge=exchange.charge, count_max=query.limit, size_max=LISTING_SIZE_MAX)
    exchange.charge.release()
    answer.messages = [_view(letter) for letter in page.letters]
    if page.last is not None:
        answer.next = str(page.last)
    return answer


@router.post(
    paths.SUBSCRIPTION + "/dead-letters/redrive",
    operation_id="redriveDeadLetters",
    summary="Move dead letters back to the subscription, through its retry topic; they are due at once",
    response_model=RedrivenLetters,
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def redrive_dead_letters(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: _Routing, body: RedriveBody
) -> RedrivenLetters | Response:
    """Each is moved exactly once, also if calls are repeated or brokers stop meanwhile. Its number of retries begins
    again. A message that could not be moved stays a dead letter."""
    if body.after is not None and body.message_ids is not None:
        raise BadRequest("after is of no use with message_ids")
    ids = None if body.message_ids is None else parse_ids(body.message_ids)
    after = None if body.after is None else MessageId.parse(body.after)
    target = retry_topic(name, subscription)
    await check_derived(exchange, subscription, target)
    if exchange.routed_by is None:
        check_receives_retries(name, (await exchange.broker.topic(name)).subscription(subscription))
    _, found = await _find(exchange, name, subscription, body.topic, body.initial_subscription)
    if isinstance(found, Response):
        exchange.broker.retry_topics.appeared_elsewhere(target, subscription)
        return found
    answer = RedrivenLetters(topic=target.short, moved=0, skipped=0, failed=0, dry_run=body.dry_run)
    if found is None:
        return answer
    done = await found.redrive(
        Destination(target, subscription),
        charge=exchange.charge,
        count_max=body.max,
        ids=ids,
        after=after,
        dry_run=body.dry_run,
    )
    exchange.charge.release()
    answer.moved, answer.skipped, answer.failed = done.moved, done.skipped, len(done.failed)
    if done.failed:
        answer.failures = [
            NotRedriven(message_id=str(message_id), code=error.code, detail=str(error))
            for message_id, error in done.failed[:FAILURES_SHOWN_MAX]
        ]
    if done.last is not None:
        answer.next = str(done.last)
    return answer


@router.post(
    paths.SUBSCRIPTION + "/dead-letters/purge",
    operation_id="purgeDeadLetters",
    summary="Discard dead letters: acknowledge them in the dead-letter topic",
    response_model=Purged,
    response_model_exclude_unset=True,
    response_description=_DONE,
    responses=openapi.problems(*_ERRORS, *openapi.BODY_ERRORS),
)
async def purge_dead_letters(
    exchange: Exchange, name: paths.Topic, subscription: paths.SubscriptionName, _query: _Routing, body: PurgeBody
) -> Purged | Response:
    """Without `message_ids` and `before`, all of them. Other subscriptions of the dead-letter topic keep theirs."""
    if body.message_ids is not None and (body.before is not None or body.after is not None):
        raise BadRequest("before and after are of no use with message_ids")
    ids = None if body.message_ids is None else parse_ids(body.message_ids)
    after = None if body.after is None else MessageId.parse(body.after)
    named, found = await _find(exchange, name, subscription, body.topic, body.initial_subscription)
    if isinstance(found, Response):
        return found
    answer = Purged(topic=named.short, purged=0)
    if found is None:
        return answer
    answer.purged, last = await found.purge(charge=exchange.charge, ids=ids, before_ms=body.before, after=after)
    if last is not None:
        answer.next = str(last)
    return answer


async def _find(
    exchange: Exchange, name: TopicName, subscription: str, topic: str | None, keeper: str | None
) -> tuple[TopicName, DeadLetterTopic | Response | None]:
    """Return the name of the dead-letter topic, and its messages; None: there is no topic with the default name.

    If another broker owns that topic, it answers the request: returns its answer.

    Raises NoSuchTopic if the request names another topic that does not exist, NoSuchSubscription if that has no keeper,
    or the topic with the default name not the one that the request names,
    BadRequest if it is a topic of the subscription.
    """
    broker = exchange.broker
    default = dead_letter_topic(name, subscription)
    wanted = chosen_dead_letter_topic(topic, name, subscription)
    if wanted == default:
        await check_derived(exchange, subscription, default)
    if exchange.routed_by is None:
        (await broker.topic(name)).subscription(subscription)  # it must exist
    must_exist = wanted != default or keeper is not None
    keeper = keeper or DEAD_LETTERS
    if must_exist:
        await check_topic(exchange, Need.CONSUME, wanted, subscription=keeper)
    try:
        owner = await broker.locate(wanted, create=False)
        if owner is not None:
            return wanted, await exchange.at_owner.pass_on(exchange, owner.http_url, routed_by=wanted)
        found = await broker.topic(wanted)
    except NoSuchTopic as error:
        if wanted != default:
            raise NoSuchTopic(
                f"there is no dead-letter topic {wanted.short}; pass the topic that the consumers' dead_letter.topic "
                f"names, or leave topic out for the default {default.short}",
                topic=wanted.short,
            ) from error
        return wanted, None
    if must_exist:
        try:
            found.subscription(keeper)
        except NoSuchSubscription as error:
            advice = (
                "if the consumers' dead_letter.topic names another topic, pass topic, too"
                if wanted == default
                else "pass initial_subscription: the name of its subscription that keeps the dead letters"
            )
            raise NoSuchSubscription(f"topic {wanted.short} has no subscription {keeper}; {advice}") from error
    letters = DeadLetterTopic(
        found, of=subscription, source=origin_topic(name, subscription), is_default=wanted == default, keeper=keeper
    )
    return wanted, letters


def _view(letter: Letter) -> DeadLetter:
    answer = DeadLetter(
        message_id=str(letter.id),
        publish_time=letter.publish_time_ms,
        redelivery_count=letter.redelivery_count,
        properties=letter.properties,
        size=letter.size,
    )
    if (origin := letter.properties.get(ORIGIN_MESSAGE_ID)) is not None:
        answer.origin_message_id = origin
    if (topic := letter.properties.get(REAL_TOPIC)) is not None:
        answer.origin_topic = topic
    if RECONSUMETIMES in letter.properties:
        answer.reconsume_times = reconsume_times(letter.properties)
    if letter.event_time_ms:
        answer.event_time = letter.event_time_ms
    if isinstance(letter.key, bytes):
        answer.key_base64 = base64.b64encode(letter.key).decode()
    elif letter.key is not None:
        answer.key = letter.key
    return answer
