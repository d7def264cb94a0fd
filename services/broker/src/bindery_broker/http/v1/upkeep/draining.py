"""Drain a broker, cancel that, and show how far it is."""

from typing import Annotated, Final

from bindery_kit.admin.content_types import JSON_TYPE
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from bindery_broker.http import openapi
from bindery_broker.http.exchange import PROXIED_HEADER, Exchange, Reply, json_reply
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models
from bindery_broker.http.v1.namespaces.models import NoQuery

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine)

DRAIN: Final = "/v1/brokers/{broker:segment}/drain"
BrokerName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[-=:.\w\[\]]+$")]
"""`host:port`, or `local` for the broker that gets the request."""


class DrainBody(models.Body):
    """No members. The body makes sure that no web page of another site can send the request."""


class DrainState(models.Answer):
    broker: str
    state: str
    """`active`: no drain; `draining`; `drained`: it has no bundles left, and gets no others."""
    moved: int
    """Number of bundles that were handed over since the drain began."""
    left: int
    """Number of bundles that it owns."""
    rate: float
    """Bundles per second."""
    seconds: float
    """Duration of the drain."""
    eta_s: float | None
    """Seconds until it is drained, at this rate; null: unknown."""
    blocked: bool
    """No other broker can take the bundles that are left: start one, or cancel the drain."""


@router.post(
    DRAIN,
    operation_id="drainBroker",
    summary="Hand over all bundles of a broker to others, and give it no more",
    tags=["brokers"],
    response_description=openapi.TITLES[200],
    responses={200: {"model": DrainState}, **openapi.problems(*openapi.BODY_ERRORS, 404, 504)},
)
async def drain_broker(
    exchange: Exchange, broker: BrokerName, _query: Annotated[NoQuery, Query()], _body: DrainBody
) -> Response:
    """Returns at once; GET shows the progress. The broker goes on answering requests: it passes on those for topics
    that it no longer has. /readyz answers 503 until the drain is cancelled."""
    if (answer := await _elsewhere(exchange, broker)) is not None:
        return answer
    await exchange.at_owner.drain.start()
    return _state(exchange)


@router.post(
    "/v1/brokers/{broker:segment}/undrain",
    operation_id="undrainBroker",
    summary="Cancel the drain of a broker, so that it gets bundles again",
    tags=["brokers"],
    response_description=openapi.TITLES[200],
    responses={200: {"model": DrainState}, **openapi.problems(*openapi.BODY_ERRORS, 404, 504)},
)
async def undrain_broker(
    exchange: Exchange, broker: BrokerName, _query: Annotated[NoQuery, Query()], _body: DrainBody
) -> Response:
    """Bundles that have moved stay where they are."""
    if (answer := await _elsewhere(exchange, broker)) is not None:
        return answer
    if not exchange.broker.stopping:
        await exchange.at_owner.drain.cancel()
    return _state(exchange)


@router.get(
    DRAIN,
    operation_id="drainStatus",
    summary="Show the drain of a broker",
    tags=["brokers"],
    response_description=openapi.TITLES[200],
    responses={200: {"model": DrainState}, **openapi.problems(404, 504)},
)
async def drain_status(exchange: Exchange, broker: BrokerName, _query: Annotated[NoQuery, Query()]) -> Response:
    return await _elsewhere(exchange, broker) or _state(exchange)


def _state(exchange: Exchange) -> Response:
    drain = exchange.at_owner.drain
    status = drain.status
    return json_reply(
        {
            "broker": drain.name,
            "state": status.state,
            "moved": status.moved,
            "left": status.left,
            "rate": status.rate,
            "seconds": status.seconds,
            "eta_s": status.eta_s,
            "blocked": status.blocked,
        }
    )


async def _elsewhere(exchange: Exchange, broker: str) -> Response | None:
    """Return the answer of the broker that the request is for; None: it is this one."""
    drain = exchange.at_owner.drain
    if broker in ("local", drain.name) or exchange.header(PROXIED_HEADER):
        return None
    status, answer = await drain.ask(exchange, broker)
    return Reply(status, answer, JSON_TYPE if status < 400 else PROBLEM_TYPE.encode())
