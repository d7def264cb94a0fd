"""Calls on all topics of a namespace, or of one of its bundles: clear backlogs, delete a subscription.

Each topic is called at its owner, as by a client, PARALLEL_MAX at a time. A topic that is deleted meanwhile, or that
has no such subscription, is no error. After another error the call fails when all topics were called, and can be
repeated.
Source: Pulsar NamespacesBase.
"""

from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import quote

from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin.calls import ROOT, Refused, call, done, param
from bindery_broker.http.admin.namespaces import NAMESPACE, namespace_of
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.v1.partitioned.calls import Answer, first_failure, on_each
from bindery_broker.http.v1.partitioned.calls import call as call_topic
from bindery_broker.ownership.bundles import bundle_named

router: Final = APIRouter()
BUNDLE: Final = NAMESPACE + "/{bundle:form}"
_GONE: Final = 404
"""Status of a topic or a subscription that does not exist."""


@call(router, "POST", NAMESPACE + "/clearBacklog", "adminClearNamespace")
@call(router, "POST", BUNDLE + "/clearBacklog", "adminClearBundle")
async def clear(exchange: Exchange) -> Response:
    """Acknowledge everything in all subscriptions."""

    async def one(topic: TopicName) -> Answer:
        found = await _at(exchange, "GET", topic, "/subscriptions")
        names = found.json() if found.is_success else []
        answers = [await _at(exchange, "POST", topic, f"{_subscription(name)}/skip_all") for name in names]
        return first_failure([one for one in (found, *answers) if one.status != _GONE]) or Answer(204, b"")

    return await _on_topics(exchange, one)


@call(router, "POST", NAMESPACE + "/clearBacklog/{name:subscription}", "adminClearNamespaceSubscription")
@call(router, "POST", BUNDLE + "/clearBacklog/{name:subscription}", "adminClearBundleSubscription")
async def clear_subscription(exchange: Exchange) -> Response:
    """Acknowledge everything in the subscriptions of this name."""
    path = f"{_subscription(param(exchange, 'name'))}/skip_all"
    return await _on_topics(exchange, lambda topic: _at(exchange, "POST", topic, path))


@call(router, "POST", NAMESPACE + "/unsubscribe/{name:subscription}", "adminUnsubscribeNamespace")
@call(router, "POST", BUNDLE + "/unsubscribe/{name:subscription}", "adminUnsubscribeBundle")
async def unsubscribe(exchange: Exchange) -> Response:
    """Delete the subscriptions of this name. Raises Refused (412) if one of them has consumers."""
    path = _subscription(param(exchange, "name"))
    return await _on_topics(exchange, lambda topic: _at(exchange, "DELETE", topic, path))


async def _on_topics(exchange: Exchange, one: Callable[[TopicName], Awaitable[Answer]]) -> Response:
    space = namespace_of(exchange)
    await exchange.broker.policies.read_namespace(*space)
    tenant, namespace = space
    names = [
        TopicName.of(tenant=tenant, namespace=namespace, local=local)
        for local in await exchange.broker.names.local_names(*space)
    ]
    if "bundle" in exchange.scope["path_params"]:
        wanted = param(exchange, "bundle")
        bundle = bundle_named(await exchange.broker.ownership.divisions.bundles(*space), wanted)
        if bundle is None:
            raise Refused(412, f"Invalid bundle range: {wanted[:100]}")
        names = [name for name in names if bundle.contains(name)]
    answers = await on_each(names, one)
    failed = first_failure([answer for answer in answers if answer.status != _GONE])
    if failed is not None:
        raise Refused(failed.status, str(failed.json().get("reason")))
    return done()


def _at(exchange: Exchange, method: str, topic: TopicName, path: str) -> Awaitable[Answer]:
    """Return the answer of a topic to a call. `path`: what follows the topic."""
    parts = (topic.tenant, topic.namespace, topic.local)
    root = f"{ROOT}/persistent/" + "/".join(quote(part, safe="") for part in parts)
    body = b"" if method == "POST" else None
    return call_topic(exchange, method, topic, path, body=body, root=root)


def _subscription(name: str) -> str:
    """Return the path of a subscription. It is decoded twice, like pulsar-admin's."""
    return "/subscription/" + quote(quote(name, safe=""), safe="")
