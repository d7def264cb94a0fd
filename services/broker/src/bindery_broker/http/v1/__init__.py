"""The v1 API: JSON over HTTP for topics, messages and subscriptions.

`messages`, `topics`, `consuming`, `subscriptions` and `dead_letters` are the operations, `moves` those that only
brokers call. `upkeep` has the operations of schemas, compaction, bundles and limits, `namespaces` those of tenants,
namespaces and policies. `partitioned` has what these operations do on partitioned topics, and the operations of their
own. Hot operations take msgspec structs (`schemas`), ordinary ones pydantic models (`models`).
`produce_request` parses what producers send; `message_view` and `subscription_view` turn messages and subscriptions
into JSON.
"""

from typing import Final

from bindery_broker.http.v1 import consuming, dead_letters, messages, moves, subscriptions, topics
from bindery_broker.http.v1.namespaces import ROUTERS as NAMESPACE_ROUTERS
from bindery_broker.http.v1.partitioned import endpoints as partitions
from bindery_broker.http.v1.upkeep import (
    brokers,
    bundles,
    client_limits,
    compaction,
    draining,
    schema_registry,
    unloading,
)

ROUTERS: Final = (
    messages.router,
    topics.router,
    consuming.router,
    subscriptions.router,
    dead_letters.router,
    moves.router,
    schema_registry.router,
    partitions.router,
    compaction.router,
    unloading.router,
    bundles.router,
    brokers.router,
    draining.router,
    client_limits.router,
    *NAMESPACE_ROUTERS,
)
STRUCTS: Final = (*messages.STRUCTS, *consuming.STRUCTS)
CREATES_TOPIC: Final = frozenset(("produce", "createTopic", "receive", "subscribe", "beginMove"))
"""Ids of the operations that create a missing topic."""
