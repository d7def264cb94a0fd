"""Pulsar's admin REST API: the calls of `/admin/v2` and `/lookup/v2` that pulsar-admin and dashboards use.

`calls` registers a call and turns errors into Pulsar's. `topics`, `partitioned`, `subscriptions`, `topic_policies`,
`namespaces`, `schemas`, `bundles`, `cluster` and those in `upkeep` are the calls, `on_partitions` what they do on a
partitioned topic, `policy_rules` the checks of policies, `topic_json`, `partition_sums` and `stored_entry` what is
answered, `refused` what is not supported. The calls are not in the OpenAPI document, because Pulsar defines them.
"""

from typing import Final

from bindery_broker.http.admin import (
    bundles,
    cluster,
    namespaces,
    partitioned,
    refused,
    schemas,
    subscriptions,
    topic_policies,
    topics,
)
from bindery_broker.http.admin.calls import CREATES_TOPIC
from bindery_broker.http.admin.on_partitions import ON_PARTITIONED
from bindery_broker.http.admin.upkeep import backlog, permissions, properties, racks, termination, whole_namespace

_PARTS: Final = (
    partitioned, topics, subscriptions, cluster, namespaces, schemas, topic_policies, bundles, properties, termination,
    backlog, permissions, whole_namespace, racks, refused,
)  # fmt: skip
ROUTERS: Final = tuple(part.router for part in _PARTS)

__all__ = ["CREATES_TOPIC", "ON_PARTITIONED", "ROUTERS"]
