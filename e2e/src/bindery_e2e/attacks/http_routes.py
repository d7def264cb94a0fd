"""The routes of every HTTP port, from the route tables of the services, so that a new route is attacked by itself."""

from collections.abc import Iterable

from bindery_auditor.app import ROUTES as AUDITOR_ROUTES
from bindery_bookie.admin.app import ROUTES as BOOKIE_ROUTES
from bindery_broker.http import admin
from bindery_broker.http.v1 import ROUTERS
from fastapi import APIRouter
from starlette.routing import Route


def http_routes() -> dict[str, list[tuple[str, str]]]:
    """Service -> method and path of each route, in order; `{name}` in a path stands for one segment."""
    return {
        "broker": _served(ROUTERS),
        "bookie": sorted({(route.method, route.path) for route in BOOKIE_ROUTES}),
        "auditor": sorted({(route.method, route.path) for route in AUDITOR_ROUTES}),
    }


def pulsar_admin_routes() -> list[tuple[str, str]]:
    """Method and path of each call of Pulsar's admin API at a broker, in order."""
    return _served(admin.ROUTERS)


def _served(routers: Iterable[APIRouter]) -> list[tuple[str, str]]:
    served = [route for router in routers for route in router.routes if isinstance(route, Route)]
    return sorted({(method, route.path_format) for route in served for method in route.methods or ()})
