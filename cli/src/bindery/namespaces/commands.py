"""`bindery namespaces`: list, show, create, split, unload and delete namespaces, and set their policies."""

import sys
from typing import Annotated, Any

import typer
from bindery_core.errors import BadRequest

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
    bundles: Annotated[
        int | None,
        typer.Option(
            "--bundles", metavar="N", help="Number of bundles, the parts that brokers divide among them; 4 by default."
        ),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a namespace. Its tenant must exist; a namespace that exists is not changed.

    Example: bindery namespaces create shop/orders --bundles 16 --policy message_ttl_s=3600
    """
    from bindery.topics.broker_api import Broker

    body: dict[str, Any] = {"policies": parse_policies(policies)} if policies else {}
    if bundles is not None:
        body["bundles"] = bundles
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
    destination: Annotated[
        str | None,
        typer.Option("--destination-broker", metavar="HOST:PORT", help="Broker of either kind that gets them."),
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Unload the bundles of a namespace: their owners close the topics, and the broker that is asked next takes them.

    Bundles of Pulsar brokers are unloaded as well. Clients wait, and notice nothing else.

    Example: bindery namespaces unload shop/orders
    """
    from bindery.topics.broker_api import Broker

    query = {
        name: str(value)
        for name, value in (("bundle", bundle), ("hold_s", hold), ("destination", destination))
        if value is not None
    }
    with Broker(url) as broker:
        done = broker.request("POST", f"{namespace_path(namespace)}/unload", params=query, json={})
    unloaded = [f"{one['bundle']} unloaded by {one['owner']}" for one in done["bundles"] if one["owner"]]
    emit(done, unloaded or ["no broker owned a bundle: nothing to unload"], as_json=as_json)


@app.command("bundles")
def bundles(namespace: Namespace, url: Url = None, as_json: AsJson = False) -> None:
    """List the bundles of a namespace, the broker that serves each, and the number of its topics.

    Example: bindery namespaces bundles shop/orders
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(f"{namespace_path(namespace)}/bundles")
    lines = [
        f"{one['bundle']}  {counted(one['topics'], 'topic')}  {one['owner'] or 'no owner'}" for one in found["bundles"]
    ]
    emit(found, lines, as_json=as_json)


@app.command("split-bundle")
def split_bundle(
    namespace: Namespace,
    bundle: Annotated[
        str,
        typer.Option(
            "--bundle",
            metavar="BUNDLE",
            show_default=False,
            help="For example 0x40000000_0x80000000, or LARGEST: the one with the most topics.",
        ),
    ],
    algorithm: Annotated[
        str,
        typer.Option(
            "--split-algorithm-name",
            metavar="NAME",
            help="One of range_equally_divide, topic_count_equally_divide and specified_positions_divide.",
        ),
    ] = "range_equally_divide",
    boundaries: Annotated[
        str | None,
        typer.Option(
            "--split-boundaries", metavar="H1,H2", help="Hashes at which specified_positions_divide splits the bundle."
        ),
    ] = None,
    unload_parts: Annotated[
        bool, typer.Option("--unload", help="Unload the parts then, so that other brokers can take them.")
    ] = False,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Split a bundle of a namespace, so that several brokers can serve its topics. The topics stay open.

    Example: bindery namespaces split-bundle shop/orders --bundle LARGEST --unload
    """
    from bindery.topics.broker_api import Broker

    try:
        positions = [int(text, 0) for text in boundaries.split(",")] if boundaries else []
    except ValueError as error:
        raise BadRequest("--split-boundaries takes numbers such as 0x40000000", given=boundaries) from error
    body = {"bundle": bundle, "algorithm": algorithm, "positions": positions, "unload": unload_parts}
    with Broker(url) as broker:
        done = broker.request("POST", f"{namespace_path(namespace)}/split", json=body)
    if done["parts"] == [done["bundle"]]:
        lines = [f"{done['bundle']} has fewer than two topics, or no such boundary: it was not split"]
    else:
        lines = [f"{done['bundle']} was split into {', '.join(done['parts'])}"]
    emit(done, lines, as_json=as_json)


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
