"""Names, paths and pages that the commands share."""

import json
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from bindery_core.errors import BadRequest

if TYPE_CHECKING:
    from bindery.topics.broker_api import Broker

Namespace = Annotated[
    str, typer.Argument(metavar="TENANT/NAMESPACE", show_default=False, help="For example public/default.")
]
Settings = Annotated[
    list[str],
    typer.Argument(metavar="POLICY=VALUE...", show_default=False, help="VALUE is JSON, as in GET .../policies."),
]


def tenant_path(tenant: str) -> str:
    """Return the URL path of a tenant. Raises BadRequest for a name with a slash."""
    if not tenant or "/" in tenant:
        raise BadRequest("not the name of a tenant; the format is TENANT", tenant=tenant)
    return f"/v1/tenants/{quote(tenant, safe='')}"


def namespace_path(name: str) -> str:
    """Return the URL path of a namespace. Raises BadRequest if the format is not TENANT/NAMESPACE."""
    parts = name.split("/")
    if len(parts) != 2 or not all(parts):
        raise BadRequest("not the name of a namespace; the format is TENANT/NAMESPACE", namespace=name)
    return "/v1/namespaces/" + "/".join(quote(part, safe="") for part in parts)


def all_pages(broker: "Broker", path: str, member: str) -> list[str]:
    """Return the names of all pages of a list."""
    names: list[str] = []
    after: str | None = None
    while True:
        answer = broker.get(path, after=after)
        names += answer[member]
        after = answer.get("next")
        if after is None:
            return names


def parse_policies(settings: list[str]) -> dict[str, Any]:
    """Return the policies of `POLICY=VALUE` words. A value that is not JSON is text."""
    policies: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise BadRequest("not a policy; the format is POLICY=VALUE", policy=setting)
        try:
            policies[name] = json.loads(text)
        except ValueError:
            policies[name] = text
    return policies


def policy_lines(policies: dict[str, Any]) -> list[str]:
    """Return one line for each policy, in the form that `set-policy` takes."""
    return [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in policies.items()]
