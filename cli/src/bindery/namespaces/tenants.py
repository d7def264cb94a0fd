"""`bindery tenants`: list, show, create and delete tenants."""

import sys
from typing import Annotated

import typer

from bindery.common.options import AsJson, group
from bindery.common.output import emit, print_json, print_lines
from bindery.topics.options import Url

app = group("List, show, create and delete tenants.")
Tenant = Annotated[str, typer.Argument(metavar="TENANT", show_default=False, help="For example public.")]


@app.command("list")
def list_tenants(url: Url = None, as_json: AsJson = False) -> None:
    """List the tenants. --json prints one array of names.

    Example: bindery tenants list
    """
    from bindery.namespaces.names import all_pages
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        names = all_pages(broker, "/v1/tenants", "tenants")
    if as_json:
        print_json(names)
    elif names:
        print_lines(names)
    else:
        print("no tenants: bindery tenants create TENANT creates one", file=sys.stderr)


@app.command("show")
def show(tenant: Tenant, url: Url = None, as_json: AsJson = False) -> None:
    """Show the administrators and the clusters of a tenant.

    Example: bindery tenants show public
    """
    from bindery.namespaces.names import tenant_path
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(tenant_path(tenant))
    lines = [
        f"tenant: {found['tenant']}",
        f"admin roles: {', '.join(found['admin_roles']) or '-'}",
        f"allowed clusters: {', '.join(found['allowed_clusters']) or '-'}",
    ]
    emit(found, lines, as_json=as_json)


@app.command("create")
def create(
    tenant: Tenant,
    admin_roles: Annotated[
        list[str] | None, typer.Option("--admin-role", metavar="ROLE", help="Role that may manage it; repeatable.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Create a tenant, or set the administrators of one that exists.

    Example: bindery tenants create shop
    """
    from bindery.namespaces.names import tenant_path
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        done = broker.request("PUT", tenant_path(tenant), json={"admin_roles": admin_roles} if admin_roles else {})
    emit(done, [f"tenant {done['tenant']}"], as_json=as_json)


@app.command("delete")
def delete(tenant: Tenant, url: Url = None, as_json: AsJson = False) -> None:
    """Delete a tenant that has no namespaces.

    Example: bindery tenants delete shop
    """
    from bindery.namespaces.names import tenant_path
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        done = broker.request("DELETE", tenant_path(tenant))
    emit(done, [f"deleted {done['deleted']}"], as_json=as_json)
