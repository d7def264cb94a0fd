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
    words = ("namespaces", "create", "t/n", "--policy", "message_ttl_s=5", "--bundles", "8")
    assert run(*words).stdout == "created t/n\n"
    assert run("namespaces", "delete", "t/n", "--force", "--yes").stdout == "deleted t/n with 1 topic\n"
    assert admin.calls == [
        ("GET", "/v1/namespaces/t", {}),
        ("GET", "/v1/namespaces/t/n", {}),
        ("PUT", "/v1/namespaces/t/n", {"policies": {"message_ttl_s": 5}, "bundles": 8}),
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
    found = run("namespaces", "unload", "t/n", "--destination-broker", "b:2").stdout
    assert found == "no broker owned a bundle: nothing to unload\n"
    assert run("topics", "unload", "t/n/x").stdout == "t/n/x is unloaded\n"
    assert admin.calls == [
        ("POST", "/v1/namespaces/t/n/unload", {}),
        ("POST", "/v1/namespaces/t/n/unload", {}),
        ("POST", "/v1/topics/t/n/x/unload", {}),
    ]
    assert admin.queries == [{"bundle": "0x0", "hold_s": "7.0"}, {"destination": "b:2"}, {}]


def test_bundles_are_listed_and_split(serve: Serve) -> None:
    name = "0x00000000_0x40000000"
    parts = ["0x00000000_0x20000000", "0x20000000_0x40000000"]
    serve(
        admin := Admin(
            {
                "namespace": "t/n",
                "bundles": [
                    {"bundle": name, "owner": "http://b:1", "topics": 2},
                    {"bundle": "0x4", "owner": None, "topics": 1},
                ],
            },
            {"namespace": "t/n", "bundle": name, "parts": parts},
            {"namespace": "t/n", "bundle": name, "parts": [name]},
        )
    )
    assert run("namespaces", "bundles", "t/n").stdout == f"{name}  2 topics  http://b:1\n0x4  1 topic  no owner\n"
    words = ("namespaces", "split-bundle", "t/n", "--bundle")
    assert run(*words, "LARGEST", "--unload").stdout == f"{name} was split into {', '.join(parts)}\n"
    more = ("--split-algorithm-name", "specified_positions_divide", "--split-boundaries", "0x10,32")
    assert "was not split" in run(*words, name, *more).stdout
    assert [call[2] for call in admin.calls[1:]] == [
        {"bundle": "LARGEST", "algorithm": "range_equally_divide", "positions": [], "unload": True},
        {"bundle": name, "algorithm": "specified_positions_divide", "positions": [16, 32], "unload": False},
    ]
    assert [call[1] for call in admin.calls] == ["/v1/namespaces/t/n/bundles", *["/v1/namespaces/t/n/split"] * 2]
    assert isinstance(run(*words, name, "--split-boundaries", "x").exception, BadRequest)
    assert len(admin.calls) == 3


def test_permissions_are_granted_and_revoked(serve: Serve) -> None:
    done = {"role": "clerk", "actions": ["produce", "consume"]}
    serve(admin := Admin(done, done, {"role": "clerk", "actions": []}))
    words = ("--role", "clerk", "--action", "consume", "--action", "produce")
    assert run("permissions", "grant", "t/n", *words).stdout == "clerk may produce, consume in t/n\n"
    assert json.loads(run("permissions", "grant", "t/n/x", *words, "--json").stdout) == done
    assert "no permissions of t/n any more" in run("permissions", "revoke", "t/n", "--role", "clerk").stdout
    assert admin.calls == [
        ("PUT", "/v1/namespaces/t/n/permissions/clerk", {"actions": ["consume", "produce"]}),
        ("PUT", "/v1/topics/t/n/x/permissions/clerk", {"actions": ["consume", "produce"]}),
        ("DELETE", "/v1/namespaces/t/n/permissions/clerk", {}),
    ]
    assert isinstance(run("permissions", "revoke", "t/n/x/y", "--role", "clerk").exception, BadRequest)


def test_permissions_are_listed(serve: Serve) -> None:
    grants = {"clerk": ["produce"]}
    space = {"permissions": grants, "topics": {"t/n/x": {"packer": ["consume"]}}, "subscriptions": {"s": ["packer"]}}
    topic = {"topic": "t/n/x", "permissions": {"packer": ["consume"]}, "namespace": grants}
    serve(Admin(space, topic, {"permissions": {}, "topics": {}, "subscriptions": {}}, topic))
    rows = [line.split() for line in run("permissions", "list", "t/n").stdout.splitlines()[1:]]
    assert rows == [
        ["t/n", "clerk", "produce"],
        ["t/n/x", "packer", "consume"],
        ["subscription", "s", "packer", "use", "it"],
    ]
    rows = [line.split() for line in run("permissions", "list", "t/n/x").stdout.splitlines()[1:]]
    assert rows == [["t/n/x", "packer", "consume"], ["t/n", "clerk", "produce"]]
    assert "bindery permissions grant t/n" in run("permissions", "list", "t/n").stdout
    assert json.loads(run("permissions", "list", "t/n/x", "--json").stdout) == topic


def test_permissions_are_explained(serve: Serve) -> None:
    answer = {
        "role": "clerk",
        "action": "consume",
        "allowed": False,
        "reason": "nothing grants it",
        "policy": "auth_policies",
        "path": "/admin/policies/t/n",
        "fix": "bindery permissions grant t/n/x --role clerk --action consume",
    }
    serve(admin := Admin(answer))
    words = ("t/n/x", "--action", "consume", "--role", "clerk", "--subscription", "s")
    assert run("permissions", "explain", *words).stdout.splitlines() == [
        "clerk may not consume: nothing grants it",
        "policy: auth_policies of /admin/policies/t/n",
        "to allow it: bindery permissions grant t/n/x --role clerk --action consume",
    ]
    query = {"topic": "t/n/x", "action": "consume", "role": "clerk", "subscription": "s"}
    assert admin.calls == [("GET", "/v1/permissions/explain", query)]
