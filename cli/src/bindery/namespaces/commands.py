"""`bindery namespaces`: list, show, create, unload and delete namespaces, and set their policies."""

import sys
from typing import Annotated

import typer

from bindery.common.options import AsJson, group
from bindery.common.output import confirm, counted, emit, print_json, print_lines
from bindery.namespaces.names import Namespace, Settings, all_pages, namespace_path, parse_policies, policy_lines
from bindery.topics.options import Url

app = group("List, show, create, unload and delete namespaces, and set their policies.")


@app.command("list")
def list_namespaces(
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Only namespaces of this tenant.")] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the namespaces. --json prints one array of names.

    Example: bindery namespaces list --tenant public
    """
    from urllib.parse import quote

    from bindery.topics.broker_api import Broker

    path = "/v1/namespaces" + (f"/{quote(tenant, safe='')}" if tenant else "")
    with Broker(url) as broker:
        names = all_pages(broker, path, "namespaces")
    if as_json:
        print_json(names)
    elif names:
        print_lines(names)
    else:
        print("no namespaces: bindery namespaces create TENANT/NAMESPACE creates one", file=sys.stderr)


@app.command("show")
def show(namespace: Namespace, url: Url = None, as_json: AsJson = False) -> None:
    """Show a namespace, the number of its topics, and the policies that it sets.

    Example: bindery namespaces show public/default
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(namespace_path(namespace))
    lines = [
        f"namespace: {found['namespace']}{' (is being deleted)' if found['deleted'] else ''}",
        f"topics: {found['topics']}",
        f"bundles: {found['bundles']}",
        *policy_lines(found["policies"]),
    ]
    emit(found, lines, as_json=as_json)


@app.command("create")
def create(
    namespace: Namespace,
    policies: Annotated[
        list[str] | None, typer.Option("--policy", metavar="POLICY=VALUE", help="Policy to set; repeatable.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a namespace. Its tenant must exist; a namespace that exists is not changed.

    Example: bindery namespaces create shop/orders --policy message_ttl_s=3600
    """
    from bindery.topics.broker_api import Broker

    body = {"policies": parse_policies(policies)} if policies else {}
    with Broker(url) as broker:
        done = broker.request("PUT", namespace_path(namespace), json=body)
    emit(done, [f"{'created' if done['created'] else 'existed'} {done['namespace']}"], as_json=as_json)


@app.command("delete")
def delete(
    namespace: Namespace,
    force: Annotated[bool, typer.Option("--force", help="Also delete its topics and their messages.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Delete a namespace. If the command fails, repeat it: it continues where it ended.

    Example: bindery namespaces delete shop/orders --force --yes
    """
    from bindery.topics.broker_api import Broker

    path = namespace_path(namespace)
    if not yes:
        what = f"the namespace {namespace}{' and all its topics' if force else ''}"
        confirm(f"Delete {what}?", unattended=f"{what} would be deleted: pass --yes to confirm", as_json=as_json)
    with Broker(url) as broker:
        done = broker.request("DELETE", path, params={"force": "true"} if force else {})
    topics = f" with {counted(len(done['topics']), 'topic')}" if done["topics"] else ""
    emit(done, [f"deleted {done['deleted']}{topics}"], as_json=as_json)


@app.command("unload")
def unload(
    namespace: Namespace,
    bundle: Annotated[
        str | None, typer.Option("--bundle", metavar="BUNDLE", help="Only this one, for example 0x40000000_0x80000000.")
    ] = None,
    hold: Annotated[
        float | None,
        typer.Option(
            "--hold",
            metavar="SECONDS",
            help="Keep them free for a Pulsar broker, 0 to 60; by default 5 if there is one, otherwise 0.",
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Unload the bundles of a namespace: their owners close the topics, and the broker that is asked next takes them.

    Bundles of Pulsar brokers are unloaded as well. Clients wait, and notice nothing else.

    Example: bindery namespaces unload shop/orders
    """
    from bindery.topics.broker_api import Broker

    query = {name: str(value) for name, value in (("bundle", bundle), ("hold_s", hold)) if value is not None}
    with Broker(url) as broker:
        done = broker.request("POST", f"{namespace_path(namespace)}/unload", params=query, json={})
    unloaded = [f"{one['bundle']} unloaded by {one['owner']}" for one in done["bundles"] if one["owner"]]
    emit(done, unloaded or ["no broker owned a bundle: nothing to unload"], as_json=as_json)


@app.command("policies")
def policies(namespace: Namespace, url: Url = None, as_json: AsJson = False) -> None:
    """Show the policies that a namespace sets; the settings of the broker apply for all others.

    Example: bindery namespaces policies public/default
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(f"{namespace_path(namespace)}/policies")["policies"]
    emit(found, policy_lines(found) or ["no policies are set"], as_json=as_json)


@app.command("set-policy")
def set_policy(namespace: Namespace, settings: Settings, url: Url = None, as_json: AsJson = False) -> None:
    """Set policies of a namespace. They apply to loaded topics at once. The value null removes one.

    Example: bindery namespaces set-policy shop/orders message_ttl_s=3600 'retention={"time_s": 3600, "size_max": null}'
    """
    from bindery.topics.broker_api import Broker

    body = parse_policies(settings)
    with Broker(url) as broker:
        found = broker.request("PUT", f"{namespace_path(namespace)}/policies", json=body)["policies"]
    emit(found, policy_lines(found) or ["no policies are set"], as_json=as_json)


@app.command("remove-policy")
def remove_policy(
    namespace: Namespace,
    policy: Annotated[str, typer.Argument(metavar="POLICY", show_default=False, help="For example message_ttl_s.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Remove a policy from a namespace, so that the setting of the broker applies.

    Example: bindery namespaces remove-policy shop/orders message_ttl_s
    """
    from urllib.parse import quote

    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        path = f"{namespace_path(namespace)}/policies/{quote(policy, safe='')}"
        found = broker.request("DELETE", path)["policies"]
    emit(found, policy_lines(found) or ["no policies are set"], as_json=as_json)
