"""List the bundles of a namespace, and split one of them."""

from typing import Annotated, Literal

from bindery_core.errors import BadRequest, Conflict
from fastapi import APIRouter, Query
from pydantic import Field

from bindery_broker.http import openapi
from bindery_broker.http.exchange import PROXIED_HEADER, Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models
from bindery_broker.http.v1.namespaces.models import NAMESPACE, Namespace, NoQuery, Tenant
from bindery_broker.namespaces.records import HASH_MAX, is_deleted
from bindery_broker.ownership.bundles import bundle_named
from bindery_broker.ownership.splits import BY_RANGE, POSITIONS_MAX, Split, largest

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["namespaces"])


class SplitBody(models.Body):
    bundle: Annotated[str, Field(max_length=64)]
    """For example `0x40000000_0x80000000`, or `LARGEST`: the one with the most topics."""
    algorithm: Literal["range_equally_divide", "topic_count_equally_divide", "specified_positions_divide"] = BY_RANGE
    """In the middle of its hashes; between the two topics in the middle; at `positions`. The last two leave a bundle
    with fewer than two topics as it is."""
    positions: Annotated[list[Annotated[int, Field(ge=0, le=HASH_MAX)]], Field(max_length=POSITIONS_MAX)] | None = None
    """Hashes of `specified_positions_divide`; those outside the bundle have no effect."""
    unload: bool = False
    """Unload the parts then, so that other brokers can take them."""


class SplitBundle(models.Answer):
    namespace: str
    bundle: str
    parts: list[str]
    """Bundles that have its topics now: its own name if it was left as it is."""


class OneBundle(models.Answer):
    bundle: str
    owner: str | None
    """Broker that serves its topics; null: none, so that the broker that is asked next takes it."""
    topics: int
    """Number of topics; each partition counts."""


class BundleList(models.Answer):
    namespace: str
    bundles: list[OneBundle]


@router.get(
    NAMESPACE + "/bundles",
    operation_id="listBundles",
    summary="List the bundles of a namespace with their owners",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def list_bundles(
    exchange: Exchange, tenant: Tenant, namespace: Namespace, _query: Annotated[NoQuery, Query()]
) -> BundleList:
    broker = exchange.broker
    await broker.policies.read_namespace(tenant, namespace)
    topics = await broker.directory.topics(tenant, namespace)
    found = []
    for bundle in await broker.ownership.divisions.bundles(tenant, namespace):
        count = sum(map(bundle.contains, topics))
        found.append(OneBundle(bundle=bundle.name, owner=await broker.owner_url(bundle), topics=count))
    return BundleList(namespace=f"{tenant}/{namespace}", bundles=found)


@router.post(
    NAMESPACE + "/split",
    operation_id="splitBundle",
    summary="Split a bundle of a namespace into several",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, 404, 409, 504),
)
async def split_bundle(
    exchange: Exchange, tenant: Tenant, namespace: Namespace, _query: Annotated[NoQuery, Query()], body: SplitBody
) -> SplitBundle:
    """The owner divides the bundle and keeps serving its topics, which stay open. A Pulsar broker splits its own.
    409: the namespace is being deleted, or the bundle was split by another request."""
    broker = exchange.broker
    how = Split(body.algorithm, tuple(body.positions or ()))
    record = await broker.policies.read_namespace(tenant, namespace)
    if is_deleted(record):
        raise Conflict("the namespace is being deleted", namespace=f"{tenant}/{namespace}")
    bundles = await broker.ownership.divisions.bundles(tenant, namespace)
    if body.bundle == "LARGEST":
        bundle = largest(bundles, await broker.directory.topics(tenant, namespace))
    else:
        bundle = bundle_named(bundles, body.bundle)
    if bundle is None:
        raise BadRequest("the namespace has no such bundle", bundle=body.bundle)
    only_here = bool(exchange.header(PROXIED_HEADER))
    parts = await exchange.at_owner.split(bundle, how, unload=body.unload, only_here=only_here)
    return SplitBundle(namespace=f"{tenant}/{namespace}", bundle=bundle.name, parts=[part.name for part in parts])
