"""`bindery brokers`: list the brokers of the cluster with their load, and the bundles of a broker."""

from typing import Annotated, Any, Final

import typer

from bindery.brokers import draining
from bindery.common.options import AsJson, group
from bindery.common.output import print_json, print_lines, print_table
from bindery.common.tables import size_text
from bindery.topics.options import Url

app = group("List the brokers with their load, and the bundles of a broker; drain brokers.")
draining.add_to(app)

COLUMNS: Final = ("broker", "kind", "role", "bundles", "topics", "messages", "bytes", "cpu", "memory", "weight")


@app.command("list")
def list_brokers(url: Url = None, as_json: AsJson = False) -> None:
    """List the live brokers with their load: messages and bytes per second, in and out.

    Example: bindery brokers list
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get("/v1/brokers")
    if as_json:
        print_json(found)
        return
    print_table([_row(one) for one in found["brokers"]], columns=COLUMNS)


@app.command("bundles")
def bundles(
    name: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The broker, as `bindery brokers list` shows it.")],
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the bundles of a broker, those with the most load first.

    Example: bindery brokers bundles 127.0.0.1:8080
    """
    from urllib.parse import quote

    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        found = broker.get(f"/v1/brokers/{quote(name, safe=':')}/bundles")
    if as_json:
        print_json(found)
        return
    print_table(
        [{"bundle": one["bundle"], **_load(one["load"]), "weight": f"{one['weight']:.0f}"} for one in found["bundles"]]
    )
    left = found["count"] - len(found["bundles"])
    if left > 0:
        print_lines([f"and {left} with less load"])


def _row(one: dict[str, Any]) -> dict[str, Any]:
    role = "leader" if one["leader"] else ""
    if one["draining"]:
        role = "draining"
    return {
        "broker": one["broker"],
        "kind": one["kind"],
        "role": role,
        "bundles": one["bundles"],
        **_load(one["load"]),
        "cpu": f"{one['cpu_percent']:.0f} %",
        "memory": size_text(one["memory_mib"] * 2**20),
        "weight": f"{one['weight']:.0f}",
    }


def _load(load: dict[str, Any]) -> dict[str, Any]:
    return {
        "topics": load["topics"],
        "messages": f"{load['messages_in_rate'] + load['messages_out_rate']:.0f}/s",
        "bytes": f"{size_text(load['bytes_in_rate'] + load['bytes_out_rate'])}/s",
    }
