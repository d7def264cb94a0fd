"""`bindery tenants`, `bindery namespaces` and the policies of topics, against a broker in memory."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from bindery.main import app
from bindery_core.errors import BadRequest
from typer.testing import CliRunner, Result

Serve = Callable[[Callable[[httpx.Request], httpx.Response]], None]


class Admin:
    """Answers every request with the next of `answers`, and keeps the requests."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[str, str, Any]] = []
        self.queries: list[dict[str, str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        content = request.read()
        sent = json.loads(content) if content else dict(request.url.params)
        self.queries.append(dict(request.url.params))
        self.calls.append((request.method, request.url.path, sent))
        return httpx.Response(200, json=self.answers.pop(0))


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit | BadRequest), result.exception
    return result


def test_tenants(serve: Serve) -> None:
    shown = {"tenant": "t", "admin_roles": ["a"], "allowed_clusters": []}
    serve(admin := Admin({"tenants": ["a"], "next": "a"}, {"tenants": ["t"]}, shown, shown, shown, {"deleted": "t"}))
    assert json.loads(run("tenants", "list", "--json").stdout) == ["a", "t"]
    assert run("tenants", "show", "t").stdout == "tenant: t\nadmin roles: a\nallowed clusters: -\n"
    assert run("tenants", "create", "t").stdout == "tenant t\n"
    run("tenants", "create", "t", "--admin-role", "a")
    assert run("tenants", "delete", "t").stdout == "deleted t\n"
    assert admin.calls == [
        ("GET", "/v1/tenants", {}),
        ("GET", "/v1/tenants", {"after": "a"}),
        ("GET", "/v1/tenants/t", {}),
        ("PUT", "/v1/tenants/t", {}),
        ("PUT", "/v1/tenants/t", {"admin_roles": ["a"]}),
        ("DELETE", "/v1/tenants/t", {}),
    ]
    assert isinstance(run("tenants", "show", "a/b").exception, BadRequest)


def test_namespaces(serve: Serve) -> None:
    shown = {"namespace": "t/n", "topics": 2, "bundles": 4, "deleted": True, "policies": {"message_ttl_s": 5}}
    serve(
        admin := Admin(
            {"namespaces": ["t/n"]},
            shown,
            {"namespace": "t/n", "created": True},
            {"deleted": "t/n", "topics": ["t/n/x"]},
        )
    )
    assert run("namespaces", "list", "--tenant", "t").stdout == "t/n\n"
    expected = "namespace: t/n (is being deleted)\ntopics: 2\nbundles: 4\nmessage_ttl_s=5\n"
    assert run("namespaces", "show", "t/n").stdout == expected
    assert run("namespaces", "create", "t/n", "--policy", "message_ttl_s=5").stdout == "created t/n\n"
    assert run("namespaces", "delete", "t/n", "--force", "--yes").stdout == "deleted t/n with 1 topic\n"
    assert admin.calls == [
        ("GET", "/v1/namespaces/t", {}),
        ("GET", "/v1/namespaces/t/n", {}),
        ("PUT", "/v1/namespaces/t/n", {"policies": {"message_ttl_s": 5}}),
        ("DELETE", "/v1/namespaces/t/n", {"force": "true"}),
    ]


def test_policies_of_namespaces(serve: Serve) -> None:
    retention = {"time_s": 60, "size_max": None}
    serve(
        admin := Admin(*[{"policies": found} for found in ({}, {"retention": retention, "publish_rate": "none"}, {})])
    )
    assert run("namespaces", "policies", "t/n").stdout == "no policies are set\n"
    words = [f"retention={json.dumps(retention)}", "publish_rate=none", "message_ttl_s=null"]
    assert run("namespaces", "set-policy", "t/n", *words).stdout == (
        'retention={"time_s": 60, "size_max": null}\npublish_rate=none\n'
    )
    run("namespaces", "remove-policy", "t/n", "retention")
    assert admin.calls == [
        ("GET", "/v1/namespaces/t/n/policies", {}),
        (
            "PUT",
            "/v1/namespaces/t/n/policies",
            {"retention": retention, "publish_rate": "none", "message_ttl_s": None},
        ),
        ("DELETE", "/v1/namespaces/t/n/policies/retention", {}),
    ]


def test_policies_of_topics(serve: Serve) -> None:
    effective = {
        "message_ttl_s": {"value": 5, "source": "namespace"},
        "publish_rate": {"value": None, "source": "broker"},
    }
    serve(admin := Admin({"policies": {"message_ttl_s": 1}}, {"effective": effective}, {"policies": {}}))
    assert run("topics", "policies", "x").stdout == "message_ttl_s=1\n"
    assert run("topics", "policies", "x", "--effective").stdout == (
        "message_ttl_s  namespace  5\npublish_rate   broker     null\n"
    )
    assert run("topics", "set-policy", "x", "message_ttl_s=null").stdout == "no policies are set\n"
    assert [(method, sent) for method, _, sent in admin.calls] == [
        ("GET", {}),
        ("GET", {"effective": "true"}),
        ("PUT", {"message_ttl_s": None}),
    ]


@pytest.mark.parametrize(
    "words",
    [
        ["namespaces", "show", "default"],
        ["namespaces", "create", "a/b/c"],
        ["namespaces", "set-policy", "a/b", "message_ttl_s"],
        ["namespaces", "set-policy", "a/b", "=5"],
    ],
)
def test_words_of_the_wrong_form_are_refused_before_a_request(serve: Serve, words: list[str]) -> None:
    serve(admin := Admin())
    assert isinstance(run(*words).exception, BadRequest)
    assert admin.calls == []


def test_unload(serve: Serve) -> None:
    bundles = [{"bundle": "0x00000000_0x40000000", "owner": "http://b:1"}, {"bundle": "0x4", "owner": None}]
    serve(
        admin := Admin(
            {"namespace": "t/n", "bundles": bundles},
            {"namespace": "t/n", "bundles": bundles[1:]},
            {"unloaded": "t/n/x"},
        )
    )
    expected = "0x00000000_0x40000000 unloaded by http://b:1\n"
    assert run("namespaces", "unload", "t/n", "--bundle", "0x0", "--hold", "7").stdout == expected
    assert run("namespaces", "unload", "t/n").stdout == "no broker owned a bundle: nothing to unload\n"
    assert run("topics", "unload", "t/n/x").stdout == "t/n/x is unloaded\n"
    assert admin.calls == [
        ("POST", "/v1/namespaces/t/n/unload", {}),
        ("POST", "/v1/namespaces/t/n/unload", {}),
        ("POST", "/v1/topics/t/n/x/unload", {}),
    ]
    assert admin.queries == [{"bundle": "0x0", "hold_s": "7.0"}, {}, {}]
