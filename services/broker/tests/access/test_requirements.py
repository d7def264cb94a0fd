"""The table of requirements against the routes of the broker."""

import pytest
from bindery_broker.access.decision import Need
from bindery_broker.access.requirements import (
    FIXED_FAMILIES,
    POLICY_FAMILIES,
    REQUIREMENTS,
    check_params,
    has_entry,
    requirement,
)
from bindery_broker.http import admin, v1
from bindery_broker.http.app import BrokerApp

ROUTES = [route for router in (*v1.ROUTERS, *admin.ROUTERS) for route in router.routes]
SAFE = ("GET", "HEAD")
FAMILIES = POLICY_FAMILIES + FIXED_FAMILIES
PREFIXES = ("/v1/", "/admin/v2/", "/admin/v3/", "/lookup/v2/")


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.unique_id)
def test_each_route_has_a_requirement_that_its_path_can_decide(route):
    assert has_entry(route.unique_id), f"add {route.unique_id} to REQUIREMENTS"
    check_params(route.unique_id, route.param_convertors)


def test_the_table_has_no_operation_without_a_route():
    assert REQUIREMENTS.keys() - {route.unique_id for route in ROUTES} == {"docs"}


def test_only_pages_are_served_beside_the_routers(broker):
    known = set(map(id, ROUTES))
    beside = {route.path for route in broker.app.routes if id(route) not in known}
    assert isinstance(broker.app, BrokerApp)
    assert beside == {"/openapi.json", "/docs"}


def test_an_unknown_operation_requires_a_super_user():
    assert requirement("somethingNew") is Need.SUPER_USER


def test_what_anyone_may_call_changes_nothing():
    changing = {
        route.unique_id
        for route in ROUTES
        if requirement(route.unique_id) is Need.ANYONE and not route.methods <= set(SAFE)
    }
    assert all(name.startswith("adminRefuse") for name in changing)


def test_a_path_that_lacks_what_a_requirement_needs_is_reported():
    with pytest.raises(ValueError, match="has no"):
        check_params("produce", ["tenant", "namespace"])
    with pytest.raises(ValueError, match="has no"):
        check_params("putTopicPolicies", [])


def document_table() -> str:
    """Return the table of the document: a row for each requirement, with the operations that have it."""
    lines = ["| requirement | `/v1` | `/admin/v2`, `/lookup/v2` |", "|---|---|---|"]
    for need in Need:
        columns = []
        for is_pulsars in (False, True):
            names = {
                route.unique_id
                for route in ROUTES
                if requirement(route.unique_id) is need and is_pulsars != (route.path.startswith("/v1/"))
            }
            columns.append(", ".join(f"`{name}`" for name in sorted(names & REQUIREMENTS.keys())))
            if is_pulsars and (others := names - REQUIREMENTS.keys()):
                families = sorted({family for family in FAMILIES for name in others if name.startswith(family)})
                columns[-1] += "; all others that begin with " + ", ".join(f"`{family}`" for family in families)
        assert need is Need.ANYONE or columns != ["", ""], need
        assert [route.path for route in ROUTES if not route.path.startswith(PREFIXES)] == []
        lines.append(f"| {need.value} | {columns[0]} | {columns[1].removeprefix('; ')} |")
    return "\n".join(lines)


def test_the_document_has_the_table(check_section):
    check_section("authorization.md", "operations", document_table())
