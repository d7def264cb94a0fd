"""Drain a broker, cancel that, and show how far it is. Take a bundle that another broker hands over."""

import asyncio
from typing import Annotated, Final

from bindery_core.errors import BadRequest, TryAgain
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_kit.http.problem import CONTENT_TYPE as PROBLEM_TYPE
from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.responses import Response

from bindery_broker.errors import NotOwner, OwnedByPulsar
from bindery_broker.http import openapi
from bindery_broker.http.exchange import PROXIED_HEADER, Exchange, Reply, json_reply
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models
from bindery_broker.http.v1.namespaces.models import NAMESPACE, Namespace, NoQuery, Tenant
from bindery_broker.ownership.bundles import bundle_named, bundles_of

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine)

DRAIN: Final = "/v1/brokers/{broker:segment}/drain"
TAKE_S: Final = 3.0
"""Maximum seconds that a broker that is asked to take a bundle waits until its former owner is gone: the servers of the
metadata store may be a moment behind."""
TAKE_PAUSE_S: Final = 0.02
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


class TakeBody(models.Body):
    bundle: Annotated[str, Field(max_length=64)]
    """For example `0x40000000_0x80000000`."""
    topics: Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=1000)] = Field(
        default_factory=list
    )
    """Local names of topics of the bundle, which are opened at once."""


class TakenBundle(models.Answer):
    namespace: str
    bundle: str
    owner: str
    """Address of the broker that owns the bundle now: this one, unless another one did."""


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


@router.post(
    NAMESPACE + "/take",
    operation_id="takeBundle",
    summary="Give a bundle without owner to this broker; brokers ask this of one another",
    tags=["namespaces"],
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, 404),
)
async def take_bundle(
    exchange: Exchange, tenant: Tenant, namespace: Namespace, _query: Annotated[NoQuery, Query()], body: TakeBody
) -> TakenBundle:
    """The broker that gets the request takes the bundle if no broker owns it, and opens topics of it. 503: it is
    draining, or the owner is changing."""
    broker = exchange.broker
    await broker.policies.read_namespace(tenant, namespace)
    divisions = broker.ownership.divisions
    bundle = bundle_named(await divisions.bundles(tenant, namespace), body.bundle)
    if bundle is None:  # it may have been split a moment ago
        bundle = bundle_named(bundles_of(tenant, namespace, await divisions.stored(tenant, namespace)), body.bundle)
    if bundle is None:
        raise BadRequest("the namespace has no such bundle", bundle=body.bundle)
    if broker.draining and not broker.ownership.is_mine(bundle):
        raise TryAgain("this broker is draining and takes no bundles; ask another one", bundle=str(bundle))
    ends_at = asyncio.get_running_loop().time() + TAKE_S
    while True:
        try:
            remote = await broker.ownership.locate(bundle)
            owner = broker.url if remote is None else remote.http_url
            break
        except OwnedByPulsar as error:
            owner = error.http_url
            break
        except NotOwner:
            if asyncio.get_running_loop().time() >= ends_at:
                raise
            await asyncio.sleep(TAKE_PAUSE_S)
    if owner == broker.url:
        broker.topics.open_soon(bundle, body.topics)
    return TakenBundle(namespace=f"{tenant}/{namespace}", bundle=bundle.name, owner=owner)


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
