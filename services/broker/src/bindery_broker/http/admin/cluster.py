"""Calls on brokers and clusters: which brokers serve, whether this one is healthy, what it loads."""

from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from bindery_core.errors import Corrupt, NoSuchNode
from bindery_core.version import VERSION
from bindery_kit.admin.content_types import JSON_TYPE
from bindery_metadata.layout.layout import READONLY, LedgersLayout
from bindery_pulsar import znode_layout
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import NoSuchBroker
from bindery_broker.http.admin.calls import ROOT, Refused, answer, call, done, param, text
from bindery_broker.http.admin.topic_json import topic_stats
from bindery_broker.http.exchange import PROXIED_HEADER, Exchange, Reply
from bindery_broker.http.peers.redirects import redirect
from bindery_broker.ownership.records import decode_leader, pulsar_load

router: Final = APIRouter()


@call(router, "GET", ROOT + "/brokers", "adminListBrokers")
async def list_brokers(exchange: Exchange) -> Response:
    return answer(await _live(exchange))


@call(router, "GET", ROOT + "/brokers/ready", "adminBrokerReady")
async def ready(_exchange: Exchange) -> Response:
    return text("ok")


@call(router, "GET", ROOT + "/brokers/health", "adminBrokerHealth")
async def health(exchange: Exchange) -> Response:
    """`ok` if the metadata store answers and knows this broker. Unlike Pulsar's check, it stores no message."""
    if exchange.broker.draining or exchange.broker.stopping:
        raise Refused(500, "the broker is stopping")
    if _host_port(exchange) not in await _live(exchange):
        raise Refused(500, "the broker is not registered in the metadata store")
    return text("ok")


@call(router, "GET", ROOT + "/brokers/version", "adminBrokerVersion")
async def version(_exchange: Exchange) -> Response:
    """The version of Bindery."""
    return text(VERSION)


@call(router, "GET", ROOT + "/brokers/configuration/runtime", "adminRuntimeConfiguration")
async def runtime_configuration(exchange: Exchange) -> Response:
    """The name of the cluster, which pulsar-admin asks for. Pulsar answers all settings; Bindery's have other names."""
    return answer({"clusterName": exchange.broker.settings.cluster_name})


@call(router, "GET", ROOT + "/brokers/configuration", "adminDynamicSettings")
async def dynamic_settings(_exchange: Exchange) -> Response:
    """The names of the settings that can be changed while a broker runs: there are none."""
    return answer([])


@call(router, "GET", ROOT + "/brokers/configuration/values", "adminDynamicValues")
async def dynamic_values(_exchange: Exchange) -> Response:
    """The settings that were changed while brokers run: there are none."""
    return answer({})


@call(router, "POST", ROOT + "/brokers/configuration/{setting:form}/{value:form}", "adminSetDynamicSetting")
async def set_dynamic(_exchange: Exchange) -> Response:
    raise Refused(412, "Can't update non-dynamic configuration")


@call(router, "DELETE", ROOT + "/brokers/configuration/{setting:form}", "adminRemoveDynamicSetting")
async def remove_dynamic(_exchange: Exchange) -> Response:
    raise Refused(412, "Can't delete non-dynamic configuration")


@call(router, "GET", ROOT + "/brokers/internal-configuration", "adminInternalConfiguration")
async def internal_configuration(exchange: Exchange) -> Response:
    """Where the metadata is stored."""
    settings = exchange.broker.settings
    store = f"zk:{settings.zookeeper}"
    return answer(
        {
            "zookeeperServers": settings.zookeeper,
            "configurationStoreServers": settings.zookeeper,
            "metadataStoreUrl": store,
            "configurationMetadataStoreUrl": store,
            "ledgersRootPath": settings.ledgers_root,
        }
    )


@call(router, "GET", ROOT + "/brokers/leaderBroker", "adminLeaderBroker")
async def leader(exchange: Exchange) -> Response:
    """The leader: a broker of Pulsar if there is one, otherwise the broker of Bindery that moves bundles.

    Raises Refused (404) if there is no leader.
    """
    try:
        node = await exchange.broker.store.get(znode_layout.LEADER)
        found = decode_leader(node.data, path=znode_layout.LEADER)
    except (NoSuchNode, Corrupt):
        raise Refused(404, "Couldn't find leader broker") from None
    if not found.name:
        raise Refused(404, "Couldn't find leader broker")
    return answer({"brokerId": found.name, "serviceUrl": found.service_url})


@call(router, "GET", ROOT + "/brokers/backlog-quota-check", "adminCheckQuotas")
async def check_quotas(_exchange: Exchange) -> Response:
    """Quotas are checked with each message and every few seconds anyway."""
    return done()


@call(router, "GET", ROOT + "/broker-stats/load-report", "adminLoadReport")
async def load_report(exchange: Exchange) -> Response:
    """The load of this broker and of its bundles, as measured last, in the form of Pulsar's LocalBrokerData."""
    balancing = exchange.broker.balancing
    found = msgspec.to_builtins(balancing.report_now())
    found["bundles"] = sorted(map(str, exchange.broker.ownership.held))
    found["lastStats"] = {bundle: pulsar_load(load) for bundle, load in balancing.loads().items()}
    del found["binderyBundles"]
    return answer(found)


@call(router, "GET", ROOT + "/bookies/all", "adminListBookies")
async def list_bookies(exchange: Exchange) -> Response:
    """The live bookies, also read-only ones."""
    layout = LedgersLayout(exchange.broker.settings.ledgers_root)
    names: set[str] = set()
    for path in (layout.available, layout.available_readonly):
        with suppress(NoSuchNode):
            names |= set(await exchange.broker.store.children(path))
    return answer({"bookies": [{"bookieId": name} for name in sorted(names - {READONLY})]})


@call(router, "GET", ROOT + "/brokers/{cluster:form}", "adminListBrokersOf")
async def list_brokers_of(exchange: Exchange) -> Response:
    _check_cluster(exchange)
    return answer(await _live(exchange))


@call(router, "GET", ROOT + "/brokers/{cluster:form}/{broker:form}/ownedNamespaces", "adminOwnedNamespaces")
async def owned_namespaces(exchange: Exchange) -> Response:
    """The bundles that a broker owns; another broker is asked. Raises Refused (404) if there is no such broker."""
    _check_cluster(exchange)
    name = param(exchange, "broker")
    if name != _host_port(exchange):
        if exchange.header(PROXIED_HEADER):
            raise Refused(404, f"this broker is {_host_port(exchange)}, not {name[:300]}")
        record = exchange.broker.balancing.brokers.records.get(name)
        if record is not None and record.is_pulsar:
            return redirect(exchange, record.url)
        try:
            status, found = await exchange.at_owner.drain.ask(exchange, name)
        except NoSuchBroker:
            raise Refused(404, f"no broker {name[:300]} is live") from None
        return Reply(status, found, JSON_TYPE)
    state = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    return answer({str(bundle): state for bundle in exchange.broker.ownership.held})


@call(router, "GET", ROOT + "/broker-stats/topics", "adminBrokerTopics")
async def broker_topics(exchange: Exchange) -> Response:
    """The statistics of the loaded topics by namespace and bundle."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    owner = _host_port(exchange)
    for topic in exchange.broker.topics:
        bundle = exchange.broker.ownership.divisions.known(topic.name)
        space = found.setdefault(f"{bundle.tenant}/{bundle.namespace}", {})
        topics = space.setdefault(bundle.name, {}).setdefault("persistent", {})
        topics[topic.name.full] = topic_stats(topic, exchange.broker, owner=owner)
    return answer(found)


@call(router, "GET", ROOT + "/clusters", "adminListClusters")
async def list_clusters(exchange: Exchange) -> Response:
    return answer([exchange.broker.settings.cluster_name])


@call(router, "GET", ROOT + "/clusters/{cluster:form}", "adminCluster")
async def cluster(exchange: Exchange) -> Response:
    _check_cluster(exchange)
    return answer({"serviceUrl": exchange.broker.url, "brokerServiceUrl": ""})


async def _live(exchange: Exchange) -> list[str]:
    """Return `host:port` of each live broker."""
    try:
        return sorted(await exchange.broker.store.children(znode_layout.BROKERS_ROOT))
    except NoSuchNode:
        return []


def _host_port(exchange: Exchange) -> str:
    return urlsplit(exchange.broker.url).netloc


def _check_cluster(exchange: Exchange) -> None:
    if param(exchange, "cluster") != exchange.broker.settings.cluster_name:
        raise Refused(404, "Cluster does not exist")
