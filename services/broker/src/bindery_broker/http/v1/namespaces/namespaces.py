"""Namespaces: list, show, create and delete them."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from bindery_broker.errors import NoSuchTenant
from bindery_broker.http import openapi
from bindery_broker.http.authorization import is_unlimited, listing, may_administer, visible_namespaces, visible_page
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1.namespaces import models
from bindery_broker.namespaces import policy_values, records
from bindery_broker.namespaces.names import Page
from bindery_broker.namespaces.policy_codec import NAMESPACE_POLICIES, change_namespace, set_in_namespace
from bindery_broker.namespaces.records import Json

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["namespaces"])
NoQuery = Annotated[models.NoQuery, Query()]
ListQuery = Annotated[models.ListQuery, Query()]


@router.get(
    models.NAMESPACES,
    operation_id="listNamespaces",
    summary="List the namespaces of all tenants, sorted by name",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(413, 429),
)
async def list_namespaces(exchange: Exchange, query: ListQuery) -> models.NamespaceList:
    names = exchange.broker.names

    async def fetch(after: str | None, limit: int) -> Page:
        return await names.namespaces(after=after, limit=limit)

    page = await visible_page(exchange, fetch, visible_namespaces, after=query.after, limit=query.max)
    answer = models.NamespaceList(namespaces=page.names)
    if page.next is not None:
        answer.next = page.next
    return answer


@router.get(
    models.OF_TENANT,
    operation_id="listNamespacesOfTenant",
    summary="List the namespaces of a tenant, sorted by name",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404, 429),
)
async def list_namespaces_of_tenant(
    exchange: Exchange, tenant: models.Tenant, query: ListQuery
) -> models.NamespaceList:
    try:
        names = [f"{tenant}/{namespace}" for namespace in await exchange.broker.directory.namespaces(tenant)]
    except NoSuchTenant:
        if not await may_administer(exchange, tenant):
            return models.NamespaceList(namespaces=[])
        raise
    if not is_unlimited(exchange):
        async with listing(exchange):
            names = await visible_namespaces(exchange, names)
    return _page([name for name in names if query.after is None or name > query.after], query)


@router.get(
    models.NAMESPACE,
    operation_id="getNamespace",
    summary="Show a namespace and the policies that it sets",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def get_namespace(
    exchange: Exchange, tenant: models.Tenant, namespace: models.Namespace, _query: NoQuery
) -> models.NamespaceAnswer:
    broker = exchange.broker
    record = await broker.policies.read_namespace(tenant, namespace)
    return models.NamespaceAnswer(
        namespace=f"{tenant}/{namespace}",
        policies=policy_values.render_set(set_in_namespace(record, cluster=broker.settings.cluster_name)),
        bundles=len(await broker.ownership.divisions.bundles(tenant, namespace)),
        topics=len(await broker.directory.topics(tenant, namespace)),
        deleted=records.is_deleted(record),
    )


@router.put(
    models.NAMESPACE,
    operation_id="createNamespace",
    summary="Create a namespace; idempotent",
    response_description=openapi.TITLES[200],
    responses={
        201: {"model": models.NamespaceCreated, "description": openapi.TITLES[201]},
        **openapi.problems(*openapi.BODY_ERRORS, *models.ERRORS),
    },
)
async def create_namespace(
    exchange: Exchange,
    tenant: models.Tenant,
    namespace: models.Namespace,
    body: models.NamespaceBody,
    _query: NoQuery,
    response: Response,
) -> models.NamespaceCreated:
    broker = exchange.broker
    record: Json = {}
    if body.policies:
        changes = policy_values.parse(body.policies, allowed=NAMESPACE_POLICIES, level="namespace")
        record = change_namespace({}, changes, cluster=broker.settings.cluster_name)
        policy_values.check_level(set_in_namespace(record, cluster=broker.settings.cluster_name))
    if body.bundles is not None:
        record["bundles"] = {"numBundles": body.bundles}
    created = await broker.directory.create_namespace(tenant, namespace, record)
    response.status_code = 201 if created else 200
    return models.NamespaceCreated(namespace=f"{tenant}/{namespace}", created=created)


@router.delete(
    models.NAMESPACE,
    operation_id="deleteNamespace",
    summary="Delete a namespace; repeat the request if it fails",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS, 429),
)
async def delete_namespace(
    exchange: Exchange,
    tenant: models.Tenant,
    namespace: models.Namespace,
    query: Annotated[models.DeleteNamespaceQuery, Query()],
) -> models.NamespaceGone:
    topics = await exchange.broker.directory.delete_namespace(
        tenant, namespace, force=query.force, delete_topic=exchange.at_owner.delete_topic
    )
    return models.NamespaceGone(deleted=f"{tenant}/{namespace}", topics=[name.short for name in topics])


def _page(names: list[str], query: models.ListQuery) -> models.NamespaceList:
    answer = models.NamespaceList(namespaces=names[: query.max])
    if len(names) > query.max:
        answer.next = names[query.max - 1]
    return answer
