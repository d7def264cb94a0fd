"""`bindery bookie rack list|set|unset`: the racks of bookies, in the record that Pulsar's brokers use too."""

from typing import TYPE_CHECKING, Annotated

import typer

from bindery.common import exit_codes
from bindery.common.cluster_command import cluster_command
from bindery.common.options import AsJson, group
from bindery.common.output import emit
from bindery.common.tables import table

if TYPE_CHECKING:
    from bindery.common.operator import Cluster

app = group("Show and change the racks of bookies.")

BookieArgument = Annotated[
    str, typer.Argument(metavar="BOOKIE", show_default=False, help="Bookie id, as listed by `bindery bookie members`.")
]


@cluster_command(app, "list")
async def list_racks(cluster: "Cluster", as_json: AsJson = False) -> None:
    """List the rack of each bookie: of all that are registered, and of all that the record names.

    Ledgers are stored in as many racks as possible. Bookies without a rack are in /default-rack, which counts as one
    rack. `pulsar-admin bookies racks-placement` shows the same record.

    Example: bindery bookie rack list
    """
    from bindery_core.ids import BookieId
    from bindery_metadata.bookies.racks import RackStore

    record = await RackStore(cluster.store).get()
    registered, racks = await cluster.client.list_bookies(), cluster.client.racks()
    names = sorted({*registered, *(BookieId(name) for bookies in record.groups.values() for name in bookies)})
    rows = [
        {
            "bookie": name,
            "rack": racks.get(name) or record.rack_of(name),
            "group": record.group(name),
            "hostname": (record.info(name) or {}).get("hostname"),
            "state": _state(registered.get(name)),
        }
        for name in names
    ]
    emit({"bookies": rows}, table(rows) if rows else "no bookie is registered or has a rack", as_json=as_json)


@cluster_command(app, "set")
async def set_rack(
    cluster: "Cluster",
    bookie: BookieArgument,
    rack: Annotated[
        str,
        typer.Argument(metavar="RACK", show_default=False, help="One or two levels: /zone-a, or /region/zone-a."),
    ],
    pulsar_group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="GROUP", help="Pulsar's isolation group; default: the present one, or default."
        ),
    ] = None,
    hostname: Annotated[
        str | None, typer.Option("--hostname", metavar="HOST", help="Host name in the record, for people.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set the rack of a bookie. Clients use it at once; nothing needs to be restarted.

    A bookie with a rack in its own settings (BOOKIE_RACK, BOOKIE_RACK_FILE) writes that again at its next start. The
    auditor then moves replicas of ledgers that can be on more racks; `bindery recovery status` shows how far it is.

    Example: bindery bookie rack set 10.0.0.7:3181 /zone-a
    """
    from bindery_core.ids import validate_bookie_id
    from bindery_metadata.bookies.racks import RackStore, parse_rack

    bookie_id, new = validate_bookie_id(bookie), parse_rack(rack)
    is_new = await RackStore(cluster.store).set_rack(bookie_id, new, hostname=hostname, group=pulsar_group or None)
    text = f"{bookie_id} is in rack {new}" if is_new else f"{bookie_id} was in rack {new} already"
    emit({"bookie": bookie_id, "rack": new, "changed": is_new}, text, as_json=as_json)


@cluster_command(app, "unset")
async def unset_rack(cluster: "Cluster", bookie: BookieArgument, as_json: AsJson = False) -> int:
    """Remove a bookie from the record of racks. Use this after the removal of a bookie.

    Example: bindery bookie rack unset 10.0.0.7:3181

    Exit codes: 0 removed, 1 the record does not name the bookie.
    """
    from bindery_core.ids import validate_bookie_id
    from bindery_metadata.bookies.racks import RackStore

    bookie_id = validate_bookie_id(bookie)
    was_there = await RackStore(cluster.store).unset_rack(bookie_id)
    text = f"{bookie_id} has no rack any more" if was_there else f"the record of racks does not name {bookie_id}"
    emit({"bookie": bookie_id, "changed": was_there}, text, as_json=as_json)
    return exit_codes.OK if was_there else exit_codes.FAILURE


def _state(is_writable: bool | None) -> str:
    if is_writable is None:
        return "not registered"
    return "writable" if is_writable else "read-only"
