"""Show the brokers of the cluster with their load, and the bundles of each. Give a bundle to this broker."""

import asyncio
from contextlib import suppress
from typing import Annotated, Final

from bindery_core.errors import BadRequest, Corrupt, NoSuchNode
from bindery_pulsar import znode_layout
from fastapi import APIRouter, Path, Query
from pydantic import Field

from bindery_broker.balancing.weights import weight, weight_of
from bindery_broker.errors import NoSuchBroker, NotOwner, OwnedByPulsar
from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models
from bindery_broker.http.v1.namespaces.models import NAMESPACE, Namespace, NoQuery, Tenant
from bindery_broker.ownership.bundles import bundle_named, bundles_of
from bindery_broker.ownership.records import BrokerRecord, BundleLoad, decode_broker, decode_leader

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine)

TAKE_S: Final = 2.0
"""Maximum seconds that a broker that is asked to take a bundle waits until its former owner is gone: the servers of the
metadata store may be a moment behind."""
TAKE_PAUSE_S: Final = 0.02
BrokerName = Annotated[str, Path(min_length=1, max_length=256, pattern=r"^[-=:.\w]+$")]
"""`host:port`."""


class Load(models.Answer):
    """Rates per second over the last ten seconds, and numbers of what is loaded."""

    messages_in_rate: float
    messages_out_rate: float
    bytes_in_rate: float
    bytes_out_rate: float
    topics: int
    consumers: int
    producers: int


class OneBroker(models.Answer):
    broker: str
    """`host:port`, the name of the broker."""
    url: str
    kind: str
    """`bindery` or `pulsar`."""
    version: str
    leader: bool
    draining: bool
    """It gives its bundles up, and gets no others."""
    weight: float
    """Load in units, by which brokers are compared; docs/brokers.md."""
    cpu_percent: float
    """Of one core."""
    memory_mib: float
    memory_limit_mib: float
    bundles: int
    load: Load
    reported_at: int
    """Milliseconds since 1970."""


class BrokerList(models.Answer):
    leader: str | None
    """The broker that moves bundles, or the leader of the brokers of Pulsar; null: none."""
    brokers: list[OneBroker]


class BrokerBundle(models.Answer):
    bundle: str
    """`tenant/namespace/0x..._0x...`."""
    weight: float
    load: Load


class BrokerBundles(models.Answer):
    broker: str
    count: int
    """Number of bundles of the broker."""
    bundles: list[BrokerBundle]
    """Those with the most load first; 1000 at most."""


class TakeBody(models.Body):
    bundle: Annotated[str, Field(max_length=64)]
    """For example `0x40000000_0x80000000`."""
    topics: Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=1000)] = Field(
        default_factory=list
    )
    """Local names of topics of the bundle, which are opened at once: of a bundle that is handed over."""


class TakenBundle(models.Answer):
    namespace: str
    bundle: str
    owner: str
    """Address of the broker that owns the bundle now: this one, unless another one did."""


@router.get(
    "/v1/brokers",
    operation_id="listBrokers",
    summary="List the live brokers with their load",
    tags=["brokers"],
    response_description=openapi.TITLES[200],
    responses=openapi.problems(),
)
async def list_brokers(exchange: Exchange, _query: Annotated[NoQuery, Query()]) -> BrokerList:
    """From the load reports in the metadata, which are some seconds old. Brokers of Pulsar report no weight."""
    store = exchange.broker.store
    leader = None
    with suppress(NoSuchNode, Corrupt):
        leader = decode_leader((await store.get(znode_layout.LEADER)).data, path=znode_layout.LEADER).name
    try:
        names = await store.children(znode_layout.BROKERS_ROOT)
    except NoSuchNode:
        names = []
    found = []
    for name in names:
        try:
            record = await _record(exchange, name)
        except NoSuchBroker:  # it has gone meanwhile
            continue
        found.append(_broker(name, record, leader))
    return BrokerList(leader=leader, brokers=found)


@router.get(
    "/v1/brokers/{broker:segment}/bundles",
    operation_id="listBrokerBundles",
    summary="List the bundles of a broker with their load",
    tags=["brokers"],
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def list_broker_bundles(
    exchange: Exchange, broker: BrokerName, _query: Annotated[NoQuery, Query()]
) -> BrokerBundles:
    """From its load report in the metadata, which is some seconds old. 404: no such broker is live."""
    record = await _record(exchange, broker)
    loads = sorted(((weight(load), name, load) for name, load in record.bindery_bundles.items()), reverse=True)
    return BrokerBundles(
        broker=broker,
        count=record.num_bundles,
        bundles=[BrokerBundle(bundle=name, weight=round(units, 3), load=_load(load)) for units, name, load in loads],
    )


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
    """The broker that gets the request takes the bundle if no broker owns it. 503: it is draining, or the owner is
    changing."""
    broker = exchange.broker
    await broker.policies.read_namespace(tenant, namespace)
    divisions = broker.ownership.divisions
    bundle = bundle_named(await divisions.bundles(tenant, namespace), body.bundle)
    if bundle is None:  # it may have been split a moment ago
        bundle = bundle_named(bundles_of(tenant, namespace, await divisions.stored(tenant, namespace)), body.bundle)
    if bundle is None:
        raise BadRequest("the namespace has no such bundle", bundle=body.bundle)
    if broker.balancing.draining and not broker.ownership.is_mine(bundle):
        raise NotOwner("this broker is draining and takes no bundles; ask another one", bundle=str(bundle))
    ends_at = asyncio.get_running_loop().time() + TAKE_S
    while True:
        try:
            remote = await broker.ownership.locate(bundle, take=True)
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


async def _record(exchange: Exchange, name: str) -> BrokerRecord:
    try:
        return decode_broker((await exchange.broker.store.get(znode_layout.broker(name))).data)
    except NoSuchNode:
        raise NoSuchBroker("no such broker is live", broker=name) from None


def _broker(name: str, record: BrokerRecord, leader: str | None) -> OneBroker:
    return OneBroker(
        broker=name,
        url=record.url,
        kind="bindery" if record.bindery else "pulsar",
        version=record.broker_version_string or "",
        leader=name == leader,
        draining=record.draining,
        weight=round(weight_of(record), 3),
        cpu_percent=round(record.cpu.percent, 1),
        memory_mib=record.memory.usage,
        memory_limit_mib=record.memory.limit,
        bundles=record.num_bundles,
        load=_load(
            BundleLoad(
                record.msg_rate_in,
                record.msg_rate_out,
                record.msg_throughput_in,
                record.msg_throughput_out,
                record.num_topics,
                record.num_consumers,
                record.num_producers,
            )
        ),
        reported_at=record.last_update,
    )


def _load(load: BundleLoad) -> Load:
    return Load(
        messages_in_rate=load.msg_rate_in,
        messages_out_rate=load.msg_rate_out,
        bytes_in_rate=load.msg_throughput_in,
        bytes_out_rate=load.msg_throughput_out,
        topics=load.topics,
        consumers=load.consumers,
        producers=load.producers,
    )
