"""AdminApp: the bookie's routes in the application that all services share (`bindery_kit.admin.app`).

`bindery_kit.observability.health.OpsApp` wraps this application and serves the probes and metrics (`/livez`, `/readyz`,
`/startupz`, `/metrics`).
"""

from collections.abc import Sequence
from typing import Final

from bindery_kit.admin import app
from bindery_kit.admin.app import HEAVY_MAX as HEAVY_MAX
from bindery_kit.admin.app import RoleRule
from bindery_kit.admin.http import Route
from bindery_recovery.admin import autorecovery_http

from bindery_bookie.access.roles import ROUTES as ROUTE_ROLES
from bindery_bookie.admin import (
    bookie_routes,
    cluster_routes,
    ledger_routes,
    own_routes,
    rollback_routes,
    storage_routes,
)
from bindery_bookie.admin.context import AdminContext as AdminContext
from bindery_bookie.admin.shard import EngineShard as EngineShard
from bindery_bookie.admin.shared_client import SharedClient as SharedClient
from bindery_bookie.admin.shared_recovery import SharedRecovery as SharedRecovery

ROUTES: Final[tuple[Route[AdminContext], ...]] = (
    *bookie_routes.ROUTES,
    *ledger_routes.ROUTES,
    *cluster_routes.ROUTES,
    *storage_routes.ROUTES,
    *own_routes.ROUTES,
    *rollback_routes.ROUTES,
    *autorecovery_http.ROUTES,
)


class AdminApp(app.AdminApp[AdminContext]):
    """An ASGI application."""

    def __init__(self, context: AdminContext, routes: Sequence[Route[AdminContext]] = ROUTES) -> None:
        super().__init__(
            context,
            routes,
            access=context.access,
            is_open=context.is_open,
            service="bookie",
            rules={
                route: RoleRule(role=role.value, setting=f"auth.{role.value}_roles", allowed=context.roles.of(role))
                for route, role in ROUTE_ROLES.items()
                if role is not None
            },
            confidential=context.roles.recovery,
        )
