"""Unload topics, and bundles of namespaces: their owner closes them, and the next request opens them again."""

from typing import Annotated

from bindery_core.errors import BadRequest
from fastapi import APIRouter, Query
from pydantic import Field

from bindery_broker.http import openapi
from bindery_broker.http.exchange import PROXIED_HEADER, Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models, paths
from bindery_broker.http.v1.namespaces.models import NAMESPACE, Namespace, Tenant
from bindery_broker.ownership.holds import HOLD_S_MAX

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine)

HOST_PORT = r"^[^/\x00-\x1f]+$"


class UnloadQuery(models.Query):
    bundle: Annotated[str, Field(max_length=64)] | None = None
    """Only this bundle, for example `0x40000000_0x80000000`; by default all bundles of the namespace."""
    hold_s: Annotated[float, Field(ge=0, le=HOLD_S_MAX)] | None = None
    """Seconds for which no broker of Bindery takes the bundles again, so that a Pulsar broker can. Requests for their
    topics wait. By default 5 if a Pulsar broker is registered or there is a destination, otherwise 0."""
    destination: Annotated[str, Field(min_length=1, max_length=256, pattern=HOST_PORT)] | None = None
    """Broker that gets the bundles, `host:port`, as `pulsar-admin brokers list` shows it; of Bindery or of Pulsar."""


class UnloadBody(models.Body):
    """No members. The body makes sure that no web page of another site can send the request."""


class UnloadedBundle(models.Answer):
    bundle: str
    owner: str | None
    """Broker that owned the bundle until then; null: none, so that nothing was done."""


class UnloadedNamespace(models.Answer):
    namespace: str
    bundles: list[UnloadedBundle]


class UnloadedTopic(models.Answer):
    unloaded: str


@router.post(
    NAMESPACE + "/unload",
    operation_id="unloadNamespace",
    summary="Unload the bundles of a namespace, or one of them",
    tags=["namespaces"],
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, 404, 504),
)
async def unload_namespace(
    exchange: Exchange,
    tenant: Tenant,
    namespace: Namespace,
    query: Annotated[UnloadQuery, Query()],
    _body: UnloadBody,
) -> UnloadedNamespace:
    """The owner of each bundle closes its topics and stores their state, so that another broker can take the bundle.
    Bundles of Pulsar brokers are unloaded as well. 503: a bundle was not unloaded, or the destination did not take it;
    repeat the request."""
    await exchange.broker.policies.read_namespace(tenant, namespace)
    bundles = await exchange.broker.ownership.divisions.bundles(tenant, namespace)
    if query.bundle is not None:
        bundles = [bundle for bundle in bundles if bundle.name == query.bundle]
        if not bundles:
            raise BadRequest("the namespace has no such bundle", bundle=query.bundle)
    only_here = bool(exchange.header(PROXIED_HEADER))
    done = await exchange.at_owner.unload(
        bundles, hold_s=query.hold_s, only_here=only_here, destination=query.destination or ""
    )
    return UnloadedNamespace(
        namespace=f"{tenant}/{namespace}",
        bundles=[UnloadedBundle(bundle=one.bundle.name, owner=one.owner) for one in done],
    )


@router.post(
    paths.TOPIC + "/unload",
    operation_id="unloadTopic",
    summary="Unload a topic: close it with its consumers' calls; the next request opens it again",
    tags=["topics"],
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.OF_TOPICS, *openapi.BODY_ERRORS, 409),
)
async def unload_topic(
    exchange: Exchange, name: paths.Topic, _query: Annotated[models.RoutingQuery, Query()], _body: UnloadBody
) -> UnloadedTopic:
    """The topic remains at its owner. 409: the topic is partitioned; name a partition."""
    await exchange.broker.topics.unload_topic(name)
    return UnloadedTopic(unloaded=name.short)
