"""Pulsar's admin REST API: the calls of `/admin/v2` and `/lookup/v2` that pulsar-admin and dashboards use.

`calls` registers a call and turns errors into Pulsar's. `topics`, `subscriptions`, `namespaces`, `unloads` and
`cluster` are the calls, `topic_json` and `stored_entry` what they answer. They are not in the OpenAPI document, because
Pulsar defines them.
"""

from typing import Final

from bindery_broker.http.admin import cluster, namespaces, subscriptions, topics, unloads
from bindery_broker.http.admin.calls import CREATES_TOPIC

ROUTERS: Final = (topics.router, subscriptions.router, cluster.router, namespaces.router, unloads.router)

__all__ = ["CREATES_TOPIC", "ROUTERS"]
