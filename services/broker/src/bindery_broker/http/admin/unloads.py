"""Calls that unload namespaces and bundles: their owners close the topics, and another broker can take them."""

from typing import Final

from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import NoSuchNamespace
from bindery_broker.http.admin.calls import Refused, call, done, param
from bindery_broker.http.admin.namespaces import NAMESPACE
from bindery_broker.http.exchange import Exchange

router: Final = APIRouter()


@call(router, "PUT", NAMESPACE + "/unload", "adminUnloadNamespace")
async def unload_namespace(exchange: Exchange) -> Response:
    """Unload all bundles at their owners."""
    space = await _space(exchange)
    await exchange.at_owner.unload(await exchange.broker.ownership.divisions.bundles(*space), hold_s=None)
    return done()


@call(router, "PUT", NAMESPACE + "/{bundle:form}/unload", "adminUnloadBundle")
async def unload_bundle(exchange: Exchange) -> Response:
    """Unload a bundle at its owner. It cannot be sent to a certain broker: the first that is asked takes it."""
    space = await _space(exchange)
    if exchange.query_params.get("destinationBroker"):
        raise Refused(412, "destinationBroker is not supported: the first broker that is asked takes the bundle")
    name = param(exchange, "bundle")
    bundles = await exchange.broker.ownership.divisions.bundles(*space)
    wanted = [bundle for bundle in bundles if bundle.name == name]
    if not wanted:
        lower, separator, _ = name.partition("_")
        if not separator:
            raise Refused(412, f"Invalid bundle range: {name}")
        full = f"{'/'.join(space)}/{name}"
        begins = next((bundle for bundle in bundles if bundle.name.startswith(f"{lower}_")), None)
        if begins is None:
            raise Refused(412, f"Cannot find bundle {full} in the bundles list")
        raise Refused(412, f"Invalid upper boundary for bundle {full}. Expected upper boundary of {begins}")
    await exchange.at_owner.unload(wanted, hold_s=None)
    return done()


async def _space(exchange: Exchange) -> tuple[str, str]:
    """Return tenant and namespace. Raises NoSuchNamespace."""
    tenant, namespace = param(exchange, "tenant"), param(exchange, "namespace")
    if not all(name and "/" not in name and "\0" not in name for name in (tenant, namespace)):
        raise Refused(404, "Namespace not found")
    try:
        await exchange.broker.policies.read_namespace(tenant, namespace)
    except NoSuchNamespace:
        raise Refused(404, "Namespace not found") from None
    return tenant, namespace
