"""Calls that unload namespaces and bundles, and split bundles, at their owners.

Source: Pulsar NamespacesBase, internalUnloadNamespaceBundleAsync and internalSplitNamespaceBundleAsync.
"""

import re
from typing import Final

from bindery_core.errors import BadRequest
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import NoSuchNamespace
from bindery_broker.http.admin.calls import Refused, body, call, done, flag, param
from bindery_broker.http.admin.namespaces import NAMESPACE
from bindery_broker.http.exchange import Exchange
from bindery_broker.ownership.bundles import Bundle, bundle_named
from bindery_broker.ownership.splits import ALGORITHMS, BY_POSITIONS, BY_RANGE, Split, largest

router: Final = APIRouter()
_DESTINATION: Final = re.compile("^https?://")
_INACTIVE: Final = "Not allowed unload namespace bundle to inactive destination broker"


@call(router, "PUT", NAMESPACE + "/unload", "adminUnloadNamespace")
async def unload_namespace(exchange: Exchange) -> Response:
    """Unload all bundles at their owners."""
    space = await _space(exchange)
    await exchange.at_owner.unload(await exchange.broker.ownership.divisions.bundles(*space), hold_s=None)
    return done()


@call(router, "PUT", NAMESPACE + "/{bundle:form}/unload", "adminUnloadBundle")
async def unload_bundle(exchange: Exchange) -> Response:
    """Unload a bundle at its owner. The broker `destinationBroker` takes it then; without one, that which is asked."""
    space = await _space(exchange)
    destination = _DESTINATION.sub("", exchange.query_params.get("destinationBroker", "")).rstrip("/")
    if "/" in destination or "\0" in destination:
        raise Refused(412, _INACTIVE)
    bundle = await _bundle(exchange, space, param(exchange, "bundle"))
    try:
        await exchange.at_owner.unload([bundle], hold_s=None, destination=destination)
    except BadRequest as error:
        raise Refused(412, _INACTIVE) from error
    return done()


@call(router, "PUT", NAMESPACE + "/{bundle:form}/split", "adminSplitBundle")
async def split_bundle(exchange: Exchange) -> Response:
    """Split a bundle; LARGEST: that with the most topics; HOT: that with the greatest load, as measured last.

    The body has the positions of `specified_positions_divide`, or is empty.
    """
    space = await _space(exchange)
    unload, algorithm = flag(exchange, "unload"), exchange.query_params.get("splitAlgorithmName") or BY_RANGE
    positions: list[int] = await body(exchange, list[int], missing=[])
    if algorithm not in ALGORITHMS:
        supported = f"supported algorithms are [{', '.join(ALGORITHMS)}]"
        raise Refused(412, f"Unsupported namespace bundle split algorithm, {supported}")
    if algorithm == BY_POSITIONS and not positions:
        raise Refused(412, f"With {BY_POSITIONS} split algorithm, splitBoundaries must not be empty")
    name = param(exchange, "bundle")
    if name == "HOT":
        bundle = bundle_named(
            await exchange.broker.ownership.divisions.bundles(*space), exchange.broker.balancing.hottest(*space) or ""
        )
        if bundle is None:
            raise Refused(404, f"Bundle range {name} not found")
    elif name == "LARGEST":
        bundles = await exchange.broker.ownership.divisions.bundles(*space)
        bundle = largest(bundles, await exchange.broker.directory.topics(*space))
        if bundle is None:
            raise Refused(404, f"Bundle range {name} not found")
    else:
        bundle = await _bundle(exchange, space, name)
    try:
        await exchange.at_owner.split(bundle, Split(algorithm, tuple(positions)), unload=unload)
    except BadRequest as error:
        raise Refused(412, f"Split bundle failed due to invalid request: {error}") from error
    return done()


async def _bundle(exchange: Exchange, space: tuple[str, str], name: str) -> Bundle:
    """Return the bundle of this name. Raises Refused (412)."""
    bundles = await exchange.broker.ownership.divisions.bundles(*space)
    found = bundle_named(bundles, name)
    if found is not None:
        return found
    lower, separator, _ = name.partition("_")
    if not separator:
        raise Refused(412, f"Invalid bundle range: {name}")
    full = f"{'/'.join(space)}/{name}"
    begins = next((bundle for bundle in bundles if bundle.name.startswith(f"{lower}_")), None)
    if begins is None:
        raise Refused(412, f"Cannot find bundle {full} in the bundles list")
    raise Refused(412, f"Invalid upper boundary for bundle {full}. Expected upper boundary of {begins}")


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
