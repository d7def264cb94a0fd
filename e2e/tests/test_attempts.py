"""What hostile pages try: every route, each with a request that would have an effect."""

import json

import pytest
from bindery_e2e.attacks.http_routes import http_routes
from bindery_e2e.browser.attempts import EFFECTIVE, KINDS, LOADING, WITHOUT_HTTP, attempts, calls
from bindery_e2e.browser.hostile_site import REBOUND, SCRIPT

PORTS = {"broker": 1, "bookie": 2, "auditor": 3}


def test_every_route_is_called_with_values_for_its_names() -> None:
    for service, routes in http_routes().items():
        found = [call for call in calls() if call.service == service]
        assert len(found) >= len(routes)
        assert {method for method, _ in routes} == {call.method for call in found}
    assert not [call.path for call in calls() if "{" in call.path]


def test_what_makes_a_route_effective_belongs_to_a_route() -> None:
    """A renamed route would be called with an empty object, which changes nothing."""
    for service, effects in EFFECTIVE.items():
        assert set(effects) <= set(http_routes()[service])


@pytest.mark.parametrize("kind", KINDS)
def test_every_changing_route_is_tried_by_every_kind_of_page(kind: str) -> None:
    found = attempts(kind, PORTS)
    served = {service for service, name in REBOUND.items() if kind == f"rebound {name}"} or set(PORTS)
    tried = {(one.service, one.method, one.url.split("/", 3)[3]) for one in found}
    changing = [call for call in calls() if call.service in served and call.method != "GET"]
    assert {(call.service, call.method, call.path[1:]) for call in changing} <= tried
    assert len({one.id for one in found}) == len(found)
    assert {one.service for one in found} == served


def test_ports_without_http_are_tried_if_they_are_known() -> None:
    found = attempts("name", {**PORTS, "ledgers": 4, "zookeeper": 5})
    urls = {one.url for one in found if one.service in WITHOUT_HTTP}
    assert urls == {"http://127.0.0.1:4/", "http://127.0.0.1:5/"}


def test_ids_are_in_urls_only_if_they_are_marked() -> None:
    plain, marked = attempts("name", PORTS), attempts("name", PORTS, is_marked=True)
    assert not [one for one in plain if "attack=" in one.url]
    assert all(one.url.endswith(("?", "&")[("?" in other.url)] + f"attack={one.id}")
               for one, other in zip(marked, plain, strict=True))  # fmt: skip
    assert [one.id for one in plain] == [one.id for one in marked]
    bodies = [one.body for one in plain if one.body.startswith("by attempt")]
    assert len(bodies) == len(set(bodies)) > 10


def test_the_script_has_every_means() -> None:
    script = SCRIPT.read_text()
    for how in {one.how for kind in KINDS for one in attempts(kind, PORTS)} | set(LOADING):
        assert f"\n  {how}: " in script or f"\n  {json.dumps(how)}: " in script, how
