"""`bindery limits`: show the limits of the caller, a tenant or a namespace on a broker."""

from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from bindery.common.options import AsJson
from bindery.common.output import print_json, print_lines
from bindery.topics.options import Url

_UNITS: Final = {
    "requests": "requests/s",
    "bytes_in": "bytes/s of requests",
    "bytes_out": "bytes/s of responses",
    "connections": "connections",
    "topics": "topics/min",
}


def limits(
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Also show those of this tenant.")] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="TENANT/NAMESPACE", help="Also show those of this namespace and its tenant.")
    ] = None,
    url: Url = None,
    as_json: AsJson = False,
) -> None:
    """Show the limits of rates that a broker applies to the caller, and what is left of them.

    Each broker counts for itself. An operator sets the limits with the broker's settings limits.*.

    Example: bindery limits --namespace public/default
    """
    from bindery.topics.broker_api import Broker

    with Broker(url) as broker:
        answer = broker.get("/v1/limits", tenant=tenant, namespace=namespace)
    if as_json:
        print_json(answer)
        return
    print_lines(_lines(answer))


def _lines(answer: dict[str, Any]) -> Iterator[str]:
    if not answer["owners"]:
        yield "clients without a role have no limits"
    for owner in answer["owners"]:
        if not owner["limits"]:
            yield f"{owner['kind']} {owner['name']}: no limits"
            continue
        yield f"{owner['kind']} {owner['name']}:"
        for use in owner["limits"]:
            wait = f", retry after {use['retry_after_s']:.3g} s" if use["retry_after_s"] else ""
            left = f"{use['available']:.6g} of {use['burst']:g} available"
            yield f"  {use['rate']:g} {_UNITS[use['limit']]}, {left}{wait}"
