"""`bindery permissions`: grant, revoke, list and explain what roles may do in namespaces and topics."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from bindery.common.options import AsJson, group
from bindery.common.output import emit, print_json, print_lines, print_table
from bindery.topics.options import Url

app = group("Grant, revoke, list and explain what roles may do.")
Resource = Annotated[
    str,
    typer.Argument(
        metavar="TENANT/NAMESPACE[/TOPIC]", show_default=False, help="For example shop/orders, or shop/orders/new."
    ),
]
Role = Annotated[str, typer.Option("--role", metavar="ROLE", help="The role.")]
Actions = Annotated[
    list[str],
    typer.Option(
        "--action",
        metavar="ACTION",
        help="What the role may do: produce, consume, functions, sources, sinks or packages; repeatable.",
    ),
]


@app.command("grant")
def grant(resource: Resource, role: Role, actions: Actions, url: Url = None, as_json: AsJson = False) -> None:
    """Set what a role may do in a namespace or a topic.

    The actions replace those that the role has there.

    Example: bindery permissions grant shop/orders --role clerk --action produce --action consume
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        done = broker.request("PUT", _path(resource, role), json={"actions": actions})
    emit(done, [f"{done['role']} may {', '.join(done['actions'])} in {resource}"], as_json=as_json)


@app.command("revoke")
def revoke(resource: Resource, role: Role, url: Url = None, as_json: AsJson = False) -> None:
    """Remove everything that a role may do in a namespace or a topic.

    Permissions of a namespace and of its topics are removed separately.

    Example: bindery permissions revoke shop/orders --role clerk
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        done = broker.request("DELETE", _path(resource, role))
    emit(done, [f"{done['role']} has no permissions of {resource} any more"], as_json=as_json)


@app.command("list")
def list_permissions(resource: Resource, url: Url = None, as_json: AsJson = False) -> None:
    """List which roles may do what in a namespace or a topic.

    Example: bindery permissions list shop/orders
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(_path(resource))
    if as_json:
        print_json(found)
        return
    rows = _rows(found, resource)
    if rows:
        print_table(rows)
    else:
        print_lines([f"no permissions: bindery permissions grant {resource} --role ROLE --action produce grants one"])


@app.command("explain")
def explain(
    topic: Annotated[str, typer.Argument(metavar="TENANT/NAMESPACE/TOPIC", show_default=False, help="The topic.")],
    action: Annotated[str, typer.Option("--action", metavar="ACTION", help="Either produce or consume.")],
    role: Annotated[
        str | None, typer.Option("--role", metavar="ROLE", help="The role; default: that of the command's token.")
    ] = None,
    subscription: Annotated[
        str | None, typer.Option("--subscription", metavar="NAME", help="The subscription to consume from.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Explain whether a role may use a topic, which policy decides, and how to change it.

    Example: bindery permissions explain shop/orders/new --role clerk --action produce
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get("/v1/permissions/explain", topic=topic, action=action, role=role, subscription=subscription)
    who = found["role"] or "every client"
    lines = [f"{who} may {'' if found['allowed'] else 'not '}{found['action']}: {found['reason']}"]
    if "path" in found:
        lines.append(f"policy: {found['policy']} of {found['path']}")
    if "fix" in found:
        lines.append(f"to allow it: {found['fix']}")
    emit(found, lines, as_json=as_json)


def _path(resource: str, role: str | None = None) -> str:
    """Return the URL path of the permissions of a namespace or a topic. Raises BadRequest for other names."""
    from bindery.namespaces.names import namespace_path
    from bindery.topics.broker_api import topic_path

    name = resource.removeprefix("persistent://")
    base = namespace_path(name) if name.count("/") < 2 else topic_path(name)
    return f"{base}/permissions" if role is None else f"{base}/permissions/{quote(role, safe='')}"


def _rows(found: dict[str, Any], resource: str) -> list[dict[str, str]]:
    """Return a row for each role and the place of its permission."""
    places: list[tuple[str, dict[str, list[str]]]] = [(resource, found["permissions"])]
    if "topic" in found:
        places.append(("/".join(found["topic"].split("/")[:2]), found["namespace"]))
    else:
        places += list(found["topics"].items())
    rows = [
        {"of": place, "role": role, "may": ", ".join(actions)}
        for place, grants in places
        for role, actions in grants.items()
    ]
    subscriptions = found.get("subscriptions", {})
    rows += [
        {"of": f"subscription {name}", "role": role, "may": "use it"}
        for name, roles in subscriptions.items()
        for role in roles
    ]
    return rows
