"""The routes of every HTTP port, from the route tables of the services, so that a new route is attacked by itself."""

from bindery_auditor.app import ROUTES as AUDITOR_ROUTES
from bindery_bookie.admin.app import ROUTES as BOOKIE_ROUTES
from bindery_broker.http.v1 import ROUTERS
from starlette.routing import Route


def http_routes() -> dict[str, list[tuple[str, str]]]:
    """Service -> method and path of each route, in order; `{name}` in a path stands for one segment."""
    served = [route for router in ROUTERS for route in router.routes if isinstance(route, Route)]
    broker = {(method, route.path_format) for route in served for method in route.methods or ()}
    return {
        "broker": sorted(broker),
        "bookie": sorted({(route.method, route.path) for route in BOOKIE_ROUTES}),
        "auditor": sorted({(route.method, route.path) for route in AUDITOR_ROUTES}),
    }
