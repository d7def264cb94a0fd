"""Routes by path shape."""

import pytest
from bindery_broker.http.router import REMEMBERED_MAX, MethodNotAllowed, NotFound, Router
from bindery_broker.http.routes import ROUTES
from bindery_core.errors import BadRequest, TooLarge


@pytest.fixture
def router() -> Router:
    return Router(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation_id)
def test_each_route_is_found_by_its_template(router, route):
    path = route.template.format(
        tenant="t", namespace="n", topic="x%20y", subscription="s%2Fu", consumer="c", message_id="1%3A2"
    )
    for _ in range(2):  # the second time from memory
        found = router.match(route.method, path.encode())
        assert found.route is route
        if route.needs_topic:
            assert found.topic is not None
            assert found.topic.short == "t/n/x y"
        assert found.params.get("subscription", "s/u") == "s/u"
        assert found.params.get("message_id", "1:2") == "1:2"


def test_a_fixed_segment_wins_over_a_parameter(router):
    assert router.match("GET", b"/v1/topics/t/n/x/internal").route.operation_id == "topicInternalStats"


def test_a_trailing_slash_does_not_matter(router):
    assert router.match("GET", b"/v1/topics/").route.operation_id == "listTopics"


def test_what_is_not_served(router):
    with pytest.raises(NotFound):
        router.match("GET", b"/v2/topics")
    with pytest.raises(MethodNotAllowed) as refused:
        router.match("PUT", b"/v1/topics/t/n/x/messages")
    assert refused.value.allowed == "GET, POST"
    with pytest.raises(BadRequest):
        router.match("GET", b"/v1/topics/t/n/%ff")
    with pytest.raises(BadRequest):
        router.match("GET", b"/v1/topics/t/n/\xff")
    with pytest.raises(TooLarge):
        router.match("GET", b"/v1/topics/t/n/" + b"x" * 300)


def test_memory_of_paths_is_bounded(router):
    for number in range(REMEMBERED_MAX + 10):
        router.match("GET", f"/v1/topics/t/n/x{number}".encode())
    assert len(router._known) <= REMEMBERED_MAX
