"""Show the limits of the caller, a tenant and a namespace on this broker, and what is used of them."""

from typing import Annotated, Literal

from bindery_core.errors import BadRequest, Forbidden
from fastapi import APIRouter, Query
from pydantic import Field

from bindery_broker.http import openapi
from bindery_broker.http.authorization import may_administer, may_see_namespace
from bindery_broker.http.charging.allowance import client_of
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1 import models
from bindery_broker.limits.accounts import Owner

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["limits"])


class LimitsQuery(models.Query):
    tenant: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Also show the limits of this tenant."""
    namespace: Annotated[str, Field(max_length=257, pattern=models.NAMESPACE_PATTERN)] | None = None
    """Also show the limits of this namespace, `tenant/namespace`, and of its tenant."""


class LimitUse(models.Answer):
    limit: Literal["requests", "bytes_in", "bytes_out", "connections", "topics"]
    rate: float
    """What passes per second; of topics per minute; of connections their maximum number."""
    burst: float
    """What may pass at once after a pause."""
    available: float
    """What may pass now; below 0: what must be waited for first."""
    retry_after_s: float
    """Seconds until something may pass."""


class OwnerUse(models.Answer):
    kind: Literal["role", "address", "tenant", "namespace"]
    name: str
    limits: list[LimitUse]
    """The limits in force; empty: none."""


class LimitsAnswer(models.Answer):
    owners: list[OwnerUse]
    """The caller first; without it, if clients without a role are not limited."""


@router.get(
    "/v1/limits",
    operation_id="showLimits",
    summary="Show the caller's limits on this broker, and their use; also those of a tenant or a namespace",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(403, 429),
)
async def show_limits(exchange: Exchange, query: Annotated[LimitsQuery, Query()]) -> LimitsAnswer:
    broker = exchange.broker
    client = client_of(exchange.scope, by_address=broker.settings.limits.by_address)
    owners = [] if client is None else [client]
    tenant = query.tenant
    if query.namespace is not None:
        of_namespace = query.namespace.partition("/")[0]
        if tenant not in (None, of_namespace):
            raise BadRequest("the namespace belongs to another tenant", tenant=tenant, namespace=query.namespace)
        tenant = of_namespace
    await _check_visible(exchange, tenant, query.namespace)
    if tenant is not None:
        owners.append((Owner.TENANT, tenant))
    if query.namespace is not None:
        owners.append((Owner.NAMESPACE, query.namespace))
    now = broker.now()
    shown = []
    for owner, name in owners:
        account = broker.accounts.account(owner, name, now)
        limits = [] if account is None else [LimitUse(**use._asdict()) for use in account.usage(now)]
        shown.append(OwnerUse(kind=owner.value, name=name, limits=limits))
    return LimitsAnswer(owners=shown)


async def _check_visible(exchange: Exchange, tenant: str | None, namespace: str | None) -> None:
    """Raise Forbidden unless the request may see what others use: administrators of the tenant may, and of a namespace
    also those who may use it."""
    if tenant is None or await may_administer(exchange, tenant):
        return
    if namespace is None or not await may_see_namespace(exchange, namespace):
        raise Forbidden(
            "your role may not see the limits of this tenant or namespace; leave them out to see your own",
            **({"tenant": tenant} if namespace is None else {"namespace": namespace}),
        )
