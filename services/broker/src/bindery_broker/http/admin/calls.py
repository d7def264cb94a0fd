"""Register calls of Pulsar's admin API, read their parameters, and answer their errors as Pulsar does.

| error                        | status | reason                                                             |
|------------------------------|-------:|--------------------------------------------------------------------|
| NoSuchTopic                  |    404 | `Topic persistent://t/n/x not found`                               |
| the same for a new topic     |    412 | that the partitioned topic has fewer partitions                    |
| NoSuchSubscription           |    404 | `Subscription s not found for topic persistent://t/n/x`            |
| BadRequest before the call   |    412 | the text of the error: Pulsar answers 412 to names that are wrong  |
| Refused                      |  its own | its text                                                         |
| any other                    | that of the error | its text                                                |

The body of an error is `{"reason": "..."}`. A call of another broker's topic goes to its owner, which answers; Pulsar
redirects the client instead (here with `?redirect=true`). A POST that changes anything needs the content type of JSON
even without a body, as pulsar-admin sends it, because web pages of other sites cannot send it.
Source: Pulsar PersistentTopicsBase, RestException.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import unquote_plus

import msgspec
from bindery_core.errors import BadRequest, BinderyError, NoSuchSubscription, NoSuchTopic
from bindery_kit.admin.content_types import check_json_type
from bindery_kit.http.problem import RETRY_AFTER_S
from bindery_pulsar.message_id import Position
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter
from starlette.convertors import register_url_convertor
from starlette.requests import Request
from starlette.responses import Response

from bindery_broker.errors import NoSuchNamespace
from bindery_broker.http import paths
from bindery_broker.http.exchange import SCOPE_KEY, Exchange, Reply, json_reply, reason_reply
from bindery_broker.http.paths import SegmentConvertor
from bindery_broker.http.route import Handler, HotRoute
from bindery_broker.namespaces.records import is_deleted
from bindery_broker.topics.topic import Topic

ROOT: Final = "/admin/v2"
TOPIC: Final = ROOT + "/persistent/{tenant:form}/{namespace:form}/{topic:form}"
ANY_TOPIC: Final = ROOT + "/persistent/{tenant:form}/{namespace:form}/{local:form}"
"""A topic whose calls any broker runs, whether the topic is partitioned, and whether it exists. See `named`."""
SUBSCRIPTION: Final = TOPIC + "/subscription/{subscription:subscription}"
CREATES_TOPIC: Final = frozenset(("adminCreateTopic", "adminCreateSubscription"))
"""Names of the calls that create a missing topic."""
READING: Final = frozenset(("adminAnalyzeBacklog",))
"""Names of the calls with POST that change nothing. pulsar-admin sends them without a content type."""
TEXT_TYPE: Final = b"text/plain"
_BOOLEANS: Final = {"true": True, "false": False, "": True}

Call = Callable[[Exchange], Awaitable[Response]]


class FormConvertor(SegmentConvertor):
    """Matches a segment that is encoded like an HTML form value: `+` is a space. Source: Pulsar Codec."""

    def convert(self, value: str) -> str:
        return super().convert(value.replace("+", "%20"))


class SubscriptionConvertor(SegmentConvertor):
    """Matches a segment that may be encoded twice, as pulsar-admin does: it is decoded, and then as a form value."""

    def convert(self, value: str) -> str:
        return unquote_plus(super().convert(value))


register_url_convertor("form", FormConvertor())
register_url_convertor("subscription", SubscriptionConvertor())


class Refused(Exception):
    """A call is refused with a status and a reason of Pulsar's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class AdminRoute(HotRoute):
    """A call of the admin API."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            exchange: Exchange = request.scope[SCOPE_KEY]
            try:
                if exchange.method == "POST" and self.unique_id not in READING:
                    check_json_type(exchange.scope["headers"])
                return await handle(request)
            except (BinderyError, Refused) as error:
                if exchange.is_answered:
                    raise
                return _refusal(error, exchange)

        return handler


def call(router: APIRouter, method: str, path: str, name: str) -> Callable[[Call], Call]:
    """Register a call. `name`: its name in logs and metrics."""

    def register(endpoint: Call) -> Call:
        router.add_api_route(
            path,
            endpoint,
            methods=[method],
            operation_id=name,
            include_in_schema=False,
            response_model=None,
            route_class_override=AdminRoute,
        )
        return endpoint

    return register


def done() -> Response:
    """Return the answer of a call that has no result."""
    return Reply(204, b"")


def answer(value: Any) -> Response:
    return json_reply(value)


def text(value: str) -> Response:
    return Reply(200, value.encode(), TEXT_TYPE)


def param(exchange: Exchange, name: str) -> str:
    """Return a part of the path."""
    value: str = exchange.scope["path_params"][name]
    return value


def flag(exchange: Exchange, name: str, *, default: bool = False) -> bool:
    """Return a boolean of the query. Raises Refused if it is none."""
    value = exchange.query_params.get(name)
    if value is None:
        return default
    found = _BOOLEANS.get(value.lower())
    if found is None:
        raise Refused(400, f"query: {name} must be true or false")
    return found


def number(value: str, what: str, *, least: int, most: int) -> int:
    """Return a whole number. Raises Refused if `value` is none, or out of range."""
    try:
        found = int(value)
    except ValueError:
        raise Refused(400, f"{what} must be a whole number") from None
    if not least <= found <= most:
        raise Refused(412, f"{what} must be from {least} to {most}")
    return found


async def body(exchange: Exchange, cls: Any, *, missing: Any = None) -> Any:
    """Return the body as the type `cls`; `missing` for an empty one. Raises Refused (400) for another one."""
    data = await exchange.body()
    if missing is not None and data.strip() in (b"", b"null", b'""'):
        return missing
    try:
        return msgspec.json.decode(data, type=cls)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"body: {error}") from error


async def topic_of(exchange: Exchange, *, create: bool = False) -> Topic:
    """Return the topic in the path, which this broker owns."""
    return await exchange.broker.topic(exchange.topic, create=create)


def named(exchange: Exchange) -> TopicName:
    """Return the topic in the path ANY_TOPIC. Raises BadRequest."""
    exchange.topic_name = paths.topic_of(*(param(exchange, part) for part in ("tenant", "namespace", "local")))
    return exchange.topic_name


async def check_namespace(exchange: Exchange, *, reason: str) -> None:
    """Raise Refused (404) if the namespace in the path does not exist, or is being deleted."""
    space = (param(exchange, "tenant"), param(exchange, "namespace"))
    try:
        record = await exchange.broker.policies.namespace(*space)
    except BadRequest:  # nothing has a name that is not valid
        record = None
    if record is None or is_deleted(record):
        raise Refused(404, reason)


def id_json(position: Position, name: TopicName) -> dict[str, Any]:
    """Return a message id."""
    return {"ledgerId": position.ledger_id, "entryId": position.entry_id, "partitionIndex": name.partition}


def _refusal(error: BinderyError | Refused, exchange: Exchange) -> Response:
    status, reason = error.status, str(error)
    if isinstance(error, NoSuchTopic) and exchange.operation == "adminCreateTopic":
        name = exchange.topic
        followed = "followed by a number smaller than number of partition of partitioned topic"
        status = 412
        reason = f'Can\'t create topic {name.local} with "-partition-" {followed} {name.partitioned_topic.local}'
    elif isinstance(error, NoSuchTopic):
        reason = f"Topic {exchange.topic.full} not found"
    elif isinstance(error, NoSuchSubscription):
        reason = f"Subscription {param(exchange, 'subscription')} not found for topic {exchange.topic.full}"
    elif isinstance(error, NoSuchNamespace):
        reason = "Namespace does not exist"
    elif type(error) is BadRequest and exchange.topic_name is None:
        status = 412
    retry = ((b"retry-after", b"%d" % RETRY_AFTER_S),) if status in (429, 503) else ()
    reply = reason_reply(status, reason)
    reply.raw_headers.extend(retry)
    return reply
