"""Brokers whose clients have roles: the header `x-role` (and `x-original-role`) becomes the principal of a request."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
from bindery_broker.namespaces.records import encode, new_tenant
from bindery_client.memory.memory import MemoryLedgers
from bindery_identity.principal import Method, Principal
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import Create
from broker_harness import CLUSTER, Clock, Harness, make_namespaces
from starlette.types import ASGIApp, Receive, Scope, Send

SETTINGS: dict[str, Any] = {
    "authorization": {"enabled": True, "super_user_roles": "super, proxy"},
    "auth": {  # not read: WithRoles authenticates
        "tokens_keys_file": "/keys",
        "broker_token_file": "/token",
        "proxy_roles": "proxy",
    },
}
ROOT = "/v1/topics/acme/shop"
PERMISSIONS = {
    "auth_policies": {
        "namespace_auth": {"producer": ["produce"], "consumer": ["consume"]},
        "destination_auth": {"persistent://acme/shop/t": {"topic-consumer": ["consume"]}},
        "subscription_auth_roles": {"private": ["consumer-2"]},
    }
}


class WithRoles:
    """Puts the principal into the scope, as the authentication in front of a broker does.

    A request of another broker without a role is the broker's own.
    """

    def __init__(self, app: ASGIApp, *, brokers_role: str = "super") -> None:
        self._app = app
        self._brokers_role = brokers_role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        role = headers.get(b"x-role", b"").decode()
        if not role and b"bindery-proxied" in headers:
            role = self._brokers_role
        if role:
            original = headers.get(b"x-original-role", b"").decode() or None
            principal = Principal(role=role, method=Method.TOKEN, original_role=original)
            scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def with_roles(broker: Harness) -> Harness:
    """Give the clients of a broker roles."""
    broker.client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=WithRoles(broker.app)), base_url=str(broker.client.base_url)
    )
    return broker


def headers(role: str, *, original: str = "") -> dict[str, str]:
    found = {"x-role": role} if role else {}
    return {**found, **({"x-original-role": original} if original else {})}


def make_acme(tree: MemoryTree) -> None:
    """Create acme/shop, whose tenant `admin` administers, with PERMISSIONS, and other/space."""
    make_namespaces(tree, "public/default")
    data = encode(new_tenant(admin_roles=["admin"], allowed_clusters=[CLUSTER]))
    tree.znodes.apply([Create("/admin/policies/acme", data)], owner=0, now_ms=0)
    data = encode(new_tenant(admin_roles=["other-admin"], allowed_clusters=[CLUSTER]))
    tree.znodes.apply([Create("/admin/policies/other", data)], owner=0, now_ms=0)
    make_namespaces(tree, "acme/shop", **PERMISSIONS)
    make_namespaces(tree, "other/space", "acme/empty")


@contextlib.asynccontextmanager
async def brokers(count: int = 1, **settings: Any) -> AsyncIterator[list[Harness]]:
    """Yield brokers that check roles, on the same ledgers and metadata."""
    tree, ledgers, clock = MemoryTree(), MemoryLedgers(), Clock()
    make_acme(tree)
    made = [
        Harness(tree=tree, ledgers=ledgers, clock=clock, url=f"http://b{index}:8080", **{**SETTINGS, **settings})
        for index in range(count)
    ]
    for one in made:
        for other in made:
            one.peers[f"b{made.index(other)}"] = httpx.ASGITransport(app=WithRoles(other.app))
        with_roles(one)
    try:
        yield made
    finally:
        for one in made:
            await one.close()
