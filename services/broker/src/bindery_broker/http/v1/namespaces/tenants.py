"""Tenants: list, show, create, change and delete them."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from bindery_broker.http import openapi
from bindery_broker.http.authorization import visible_page, visible_tenants
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1.models import Deleted
from bindery_broker.http.v1.namespaces import models
from bindery_broker.namespaces import records
from bindery_broker.namespaces.names import Page
from bindery_broker.namespaces.records import Json

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["tenants"])
NoQuery = Annotated[models.NoQuery, Query()]


@router.get(
    models.TENANTS,
    operation_id="listTenants",
    summary="List the tenants, sorted by name",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(413, 429),
)
async def list_tenants(exchange: Exchange, query: Annotated[models.ListQuery, Query()]) -> models.TenantList:
    tenants = await exchange.broker.directory.tenants()

    async def fetch(after: str | None, limit: int) -> Page:
        names = [name for name in tenants if after is None or name > after]
        return Page(names[:limit], names[limit - 1] if len(names) > limit else None)

    page = await visible_page(exchange, fetch, visible_tenants, after=query.after, limit=query.max)
    answer = models.TenantList(tenants=page.names)
    if page.next is not None:
        answer.next = page.next
    return answer


@router.get(
    models.TENANT,
    operation_id="getTenant",
    summary="Show a tenant",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def get_tenant(exchange: Exchange, tenant: models.Tenant, _query: NoQuery) -> models.TenantAnswer:
    return _answer(tenant, await exchange.broker.directory.tenant(tenant))


@router.put(
    models.TENANT,
    operation_id="putTenant",
    summary="Create a tenant, or change the fields in the body",
    response_description=openapi.TITLES[200],
    responses={
        201: {"model": models.TenantAnswer, "description": openapi.TITLES[201]},
        **openapi.problems(*openapi.BODY_ERRORS, 404, 504),
    },
)
async def put_tenant(
    exchange: Exchange, tenant: models.Tenant, body: models.TenantBody, _query: NoQuery, response: Response
) -> models.TenantAnswer:
    directory = exchange.broker.directory
    clusters = body.allowed_clusters or [exchange.broker.settings.cluster_name]
    info = records.new_tenant(admin_roles=body.admin_roles or [], allowed_clusters=clusters)
    if await directory.create_tenant(tenant, info):
        response.status_code = 201
        return _answer(tenant, info)

    def change(stored: Json) -> Json:
        if body.admin_roles is not None:
            stored["adminRoles"] = sorted(body.admin_roles)
        if body.allowed_clusters is not None:
            stored["allowedClusters"] = sorted(body.allowed_clusters)
        return stored

    return _answer(tenant, await directory.update_tenant(tenant, change))


@router.delete(
    models.TENANT,
    operation_id="deleteTenant",
    summary="Delete a tenant that has no namespaces",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS),
)
async def delete_tenant(exchange: Exchange, tenant: models.Tenant, _query: NoQuery) -> Deleted:
    await exchange.broker.directory.delete_tenant(tenant)
    return Deleted(deleted=tenant)


def _answer(tenant: str, info: Json) -> models.TenantAnswer:
    return models.TenantAnswer(
        tenant=tenant,
        admin_roles=_names(info.get("adminRoles")),
        allowed_clusters=_names(info.get("allowedClusters")),
    )


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []
