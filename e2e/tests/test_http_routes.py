"""Hostile connections by seed cover every route of every service, and each kind of attack."""

import pytest
from bindery_auditor.app import ROUTES as AUDITOR_ROUTES
from bindery_bookie.admin.app import ROUTES as BOOKIE_ROUTES
from bindery_broker.http import admin
from bindery_broker.http.v1 import ROUTERS
from bindery_e2e.attacks.http_routes import http_routes, pulsar_admin_routes
from bindery_simulation.http_fuzz import BODIES, KINDS, UNDAMAGED, UNDONE, needs_token, plan

SERVICES = ("broker", "bookie", "auditor")


def test_every_route_of_every_service_is_known() -> None:
    found = http_routes()
    assert list(found) == list(SERVICES)
    assert len(found["broker"]) == sum(len(route.methods) for router in ROUTERS for route in router.routes)
    assert len(found["bookie"]) == len(BOOKIE_ROUTES)
    assert len(found["auditor"]) == len(AUDITOR_ROUTES)
    assert ("POST", "/v1/recovery/pause") in found["auditor"]
    assert ("GET", "/api/v1/bookie/state") in found["bookie"]


def test_every_call_of_pulsars_admin_api_is_known() -> None:
    found = pulsar_admin_routes()
    assert len(found) == sum(len(getattr(route, "methods", ())) for router in admin.ROUTERS for route in router.routes)
    assert ("PUT", "/admin/v2/tenants/{tenant}") in found


def test_routes_that_are_treated_specially_exist() -> None:
    assert {route for routes in http_routes().values() for route in routes} >= UNDONE | UNDAMAGED | set(BODIES)


def test_plans_know_which_routes_need_a_token() -> None:
    for route in (*BOOKIE_ROUTES, *AUDITOR_ROUTES):
        if route.method != "GET":
            assert needs_token((route.method, route.path)) == route.needs_token
    assert not any(needs_token(route) for route in http_routes()["broker"])


@pytest.mark.parametrize("service", SERVICES)
def test_plans_request_every_route(service: str) -> None:
    routes = http_routes()[service]
    plans = [plan(3, number, routes) for number in range(800)]
    assert {one.kind for one in plans} == {"valid", "damaged", *KINDS}
    valid = [one.data for one in plans if one.kind == "valid"]
    for method, path in routes:
        start = f"{method} {path.partition('{')[0]}".encode()
        assert any(start in data for data in valid), (method, path)
