"""Policies of namespaces and of topics: show, set and remove them."""

from typing import Annotated

from bindery_core.errors import NoSuchTopic
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter, Depends, Query

from bindery_broker.broker import Broker
from bindery_broker.errors import NamespaceDeleted
from bindery_broker.http import openapi
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.paths import topic_of
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1.namespaces import models
from bindery_broker.namespaces import policy_values, records
from bindery_broker.namespaces.policy_codec import (
    NAMESPACE_POLICIES,
    TOPIC_POLICIES,
    UNSET,
    PolicySet,
    change_namespace,
    change_topic,
    set_in_namespace,
    set_in_topic,
)
from bindery_broker.namespaces.records import Json

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["policies"])
NoQuery = Annotated[models.NoQuery, Query()]
PutQuery = Annotated[models.PutPoliciesQuery, Query()]


async def _topic_name(tenant: models.Tenant, namespace: models.Namespace, local: models.LocalName) -> TopicName:
    return topic_of(tenant, namespace, local).partitioned_topic


Topic = Annotated[TopicName, Depends(_topic_name)]


@router.get(
    models.POLICIES,
    operation_id="getNamespacePolicies",
    summary="Show the policies that a namespace sets",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def get_namespace_policies(
    exchange: Exchange, tenant: models.Tenant, namespace: models.Namespace, _query: NoQuery
) -> models.PoliciesAnswer:
    broker = exchange.broker
    record = await broker.policies.read_namespace(tenant, namespace)
    return _answer(set_in_namespace(record, cluster=broker.settings.cluster_name))


@router.put(
    models.POLICIES,
    operation_id="putNamespacePolicies",
    summary="Set policies of a namespace; null removes one",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, *models.ERRORS),
)
async def put_namespace_policies(
    exchange: Exchange, tenant: models.Tenant, namespace: models.Namespace, body: models.Policies, query: PutQuery
) -> models.PoliciesAnswer:
    changes = policy_values.parse(body, allowed=NAMESPACE_POLICIES, level="namespace")
    if query.mode == "replace":
        changes = {**dict.fromkeys(NAMESPACE_POLICIES, UNSET), **changes}
    return await _change_namespace(exchange.broker, tenant, namespace, changes)


@router.delete(
    models.POLICY,
    operation_id="deleteNamespacePolicy",
    summary="Remove a policy from a namespace, so that the setting of the broker applies",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS),
)
async def delete_namespace_policy(
    exchange: Exchange,
    tenant: models.Tenant,
    namespace: models.Namespace,
    policy: models.PolicyName,
    _query: NoQuery,
) -> models.PoliciesAnswer:
    policy_values.check_field(policy, allowed=NAMESPACE_POLICIES, level="namespace")
    return await _change_namespace(exchange.broker, tenant, namespace, {policy: UNSET})


@router.get(
    models.TOPIC_POLICIES,
    operation_id="getTopicPolicies",
    summary="Show the policies that a topic sets, or all that are in force for it",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404, 413),
)
async def get_topic_policies(
    exchange: Exchange, name: Topic, query: Annotated[models.TopicPoliciesQuery, Query()]
) -> models.PoliciesAnswer | models.EffectiveAnswer:
    broker = exchange.broker
    await _check_exists(broker, name)
    if not query.effective:
        return _answer(set_in_topic(await broker.policies.read_topic(name)))
    resolved = await broker.policies.resolve(name)
    return models.EffectiveAnswer(
        topic=name.short,
        effective={
            field: models.EffectivePolicy(value=policy_values.render(found.value), source=found.source.value)
            for field, found in resolved.items()
        },
    )


@router.put(
    models.TOPIC_POLICIES,
    operation_id="putTopicPolicies",
    summary="Set policies of a topic and of its partitions; null removes one",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, *models.ERRORS),
)
async def put_topic_policies(
    exchange: Exchange, name: Topic, body: models.Policies, query: PutQuery
) -> models.PoliciesAnswer:
    changes = policy_values.parse(body, allowed=TOPIC_POLICIES, level="topic")
    if query.mode == "replace":
        changes = {**dict.fromkeys(TOPIC_POLICIES, UNSET), **changes}
    return await _change_topic(exchange.broker, name, changes)


@router.delete(
    models.TOPIC_POLICY,
    operation_id="deleteTopicPolicy",
    summary="Remove a policy from a topic, so that the one of its namespace applies",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS, 413),
)
async def delete_topic_policy(
    exchange: Exchange, name: Topic, policy: models.PolicyName, _query: NoQuery
) -> models.PoliciesAnswer:
    policy_values.check_field(policy, allowed=TOPIC_POLICIES, level="topic")
    return await _change_topic(exchange.broker, name, {policy: UNSET})


async def _change_namespace(broker: Broker, tenant: str, namespace: str, changes: PolicySet) -> models.PoliciesAnswer:
    cluster = broker.settings.cluster_name

    def change(record: Json) -> Json:
        if records.is_deleted(record):
            raise NamespaceDeleted("the namespace is being deleted", namespace=f"{tenant}/{namespace}")
        changed = change_namespace(record, changes, cluster=cluster)
        policy_values.check_level(set_in_namespace(changed, cluster=cluster))
        return changed

    stored = await broker.policies.update_namespace(tenant, namespace, change)
    return _answer(set_in_namespace(stored, cluster=cluster))


async def _change_topic(broker: Broker, name: TopicName, changes: PolicySet) -> models.PoliciesAnswer:
    await _check_exists(broker, name)

    def change(record: Json) -> Json:
        changed = change_topic(record, changes)
        policy_values.check_level(set_in_topic(changed))
        return changed

    return _answer(set_in_topic(await broker.policies.update_topic(name, change)))


async def _check_exists(broker: Broker, name: TopicName) -> None:
    partitioned = znode_layout.partitioned_topic(tenant=name.tenant, namespace=name.namespace, topic=name.local)
    if not await broker.topics.exists(name) and await broker.store.exists(partitioned) is None:
        raise NoSuchTopic("no such topic", topic=name.short)


def _answer(policies: PolicySet) -> models.PoliciesAnswer:
    return models.PoliciesAnswer(policies=policy_values.render_set(policies))
