"""Calls that change the properties of a topic, and the checks of properties.

Those of a topic are in its managed ledger, those of a partitioned topic in the record of its partitions, as in Pulsar.
Properties that brokers use themselves are shown, and cannot be set or removed: a wrong one could let two producers have
a topic exclusively.
"""

from collections.abc import Mapping
from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import TOPIC, Refused, answer, call, done, topic_of
from bindery_broker.http.exchange import Exchange
from bindery_broker.producers.holding import EPOCH_PROPERTY, HOLDER_PROPERTY

router: Final = APIRouter()
SIZE_MAX: Final = 64 * 1024
"""Maximum bytes of all names and values of the properties of a topic, which are written with its list of ledgers."""
OF_BROKERS: Final = frozenset((EPOCH_PROPERTY, HOLDER_PROPERTY))
"""Names of the properties that brokers use."""


@call(router, "GET", TOPIC + "/properties", "adminTopicProperties")
async def properties(exchange: Exchange) -> Response:
    return answer(dict((await topic_of(exchange)).ledger.properties))


@call(router, "PUT", TOPIC + "/properties", "adminSetTopicProperties")
async def set_properties(exchange: Exchange) -> Response:
    """Properties that the body does not name stay."""
    given = await given_properties(exchange)
    topic = await topic_of(exchange)
    check_size({**topic.ledger.properties, **given})
    await topic.ledger.set_properties(given)
    return done()


@call(router, "DELETE", TOPIC + "/properties", "adminRemoveTopicProperty")
async def remove_property(exchange: Exchange) -> Response:
    """Remove the property that the query names. It need not exist."""
    key = given_key(exchange)
    await (await topic_of(exchange)).ledger.set_properties({key: None})
    return done()


async def set_of_partitioned(exchange: Exchange) -> Response:
    """As `set_properties`, for a partitioned topic."""
    given = await given_properties(exchange)

    def change(found: Mapping[str, str]) -> dict[str, str]:
        changed = {**found, **given}
        check_size(changed)
        return changed

    await exchange.broker.partitioned.change_properties(exchange.topic, change)
    return done()


async def remove_of_partitioned(exchange: Exchange) -> Response:
    """As `remove_property`, for a partitioned topic."""
    key = given_key(exchange)

    def change(found: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in found.items() if name != key}

    await exchange.broker.partitioned.change_properties(exchange.topic, change)
    return done()


async def given_properties(exchange: Exchange) -> dict[str, str]:
    """Return the properties in the body. Raises Refused."""
    return checked(await calls.body(exchange, dict[str, str], missing={}))


def given_key(exchange: Exchange) -> str:
    """Return the name of the property in the query. Raises Refused."""
    key = exchange.query_params.get("key", "")
    if not key:
        raise Refused(412, "query: key must name the property")
    return next(iter(checked({key: ""})))


def checked(given: dict[str, str]) -> dict[str, str]:
    """Return the properties. Raises Refused if one of them is not a client's, or if they are too large."""
    if taken := sorted(OF_BROKERS & given.keys()):
        raise Refused(412, f"brokers use the property {taken[0]}: it cannot be changed")
    check_size(given)
    return given


def check_size(properties: Mapping[str, str]) -> None:
    """Raise Refused if the properties of a topic are too large."""
    try:
        size = sum(len(key.encode()) + len(value.encode()) for key, value in properties.items())
    except UnicodeEncodeError as error:
        raise Refused(400, "a property contains an incomplete character") from error
    if size > SIZE_MAX:
        raise Refused(412, f"the properties of the topic would have {size} bytes; at most {SIZE_MAX} are allowed")
