"""`bindery ledger`: show ledgers as the metadata and the bookies have them.

No command recovers, fences or changes a ledger.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bindery.common.cluster_command import cluster_command
from bindery.common.options import (
    AsJson,
    LedgerArgument,
    group,
)
from bindery.common.output import emit, print_json

if TYPE_CHECKING:
    from bindery_core.formats.ledger_metadata import LedgerMetadata
    from bindery_metadata.stores.versioned import Versioned

    from bindery.common.operator import Cluster

app = group("List, read and compare ledgers.")


@cluster_command(app, "list")
async def list_ledgers(cluster: "Cluster", as_json: AsJson = False) -> None:
    """List all ledgers with state, quorums, size and bookies.

    E/Qw/Qa is ensemble size, write quorum and ack quorum. The size of a ledger is known once it is closed.

    Example: bindery ledger list --json | jq .ledger_id
    """
    import sys

    from bindery_core.errors import NoSuchLedger

    count = 0
    async for ledger_id in cluster.client.list_ledgers():
        try:
            found = await cluster.client.metadata_versioned(ledger_id)
        except NoSuchLedger:
            continue  # deleted since it was listed
        count += 1
        if as_json:
            print_json(describe(ledger_id, found))
            continue
        if count == 1:
            print(f"{'ledger':>10}  {'state':<11} {'E/Qw/Qa':<8} {'last':>8} {'bytes':>12}  bookies")
        print(_list_line(ledger_id, found.value))
    if not count and not as_json:
        print("no ledgers", file=sys.stderr)


def _list_line(ledger_id: int, metadata: "LedgerMetadata") -> str:
    quorums = f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}"
    is_closed = metadata.state.name == "CLOSED"
    last = str(metadata.last_entry_id) if is_closed else "-"
    length = str(metadata.length) if is_closed else "-"
    ensemble = ",".join(metadata.last_segment.ensemble)
    return f"{ledger_id:>10}  {metadata.state.name.lower():<11} {quorums:<8} {last:>8} {length:>12}  {ensemble}"


@cluster_command(app, "show")
async def show(
    cluster: "Cluster",
    ledger: LedgerArgument,
    as_json: AsJson = False,
) -> None:
    """Show the metadata of a ledger: state, quorums, and the bookies of each range of entries.

    Example: bindery ledger show 7
    """
    from bindery_core.ids import LedgerId

    facts = describe(ledger, await cluster.client.metadata_versioned(LedgerId(ledger)))
    emit(facts, _show_lines(facts), as_json=as_json)


First = Annotated[int, typer.Option("--first", metavar="ENTRY", min=0, show_default=True, help="First entry.")]
Last = Annotated[
    int | None,
    typer.Option("--last", metavar="ENTRY", min=0, help="Last entry; default: the last confirmed entry."),
]
Rate = Annotated[
    float, typer.Option("--rate", metavar="N", min=0, help="Maximum entries read per second; default: 0, no limit.")
]


@cluster_command(app, "read")
async def read(
    cluster: "Cluster",
    ledger: LedgerArgument,
    first: First = 0,
    last: Last = None,
    from_bookie: Annotated[
        str | None,
        typer.Option(metavar="BOOKIE", help="Read from this bookie only, and report the state of each of its copies."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option("--raw", help="Show header, digest and payload of every copy on every bookie, damaged or not."),
    ] = False,
    payload: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Form of payloads: hex, escaped, base64, none; default: a preview, with --raw hex."
        ),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Decode payloads as messages of a topic.")] = False,
    as_bytes: Annotated[bool, typer.Option("--bytes", help="Write the payloads only, without separators.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read entries and verify each against its digest. An open ledger is read up to its last confirmed entry.

    With --from-bookie or --raw, each copy is shown as the bookie has it: good, absent, corrupt (its bytes contradict
    its digest) or error (the bookie did not return it). --last may then exceed the last confirmed entry.

    Examples:

      bindery ledger read 7 --first 100 --last 110 --decode

      bindery ledger read 7 --raw --from-bookie 10.0.0.7:3181

    Exit codes: 0 all entries are good, 1 an entry cannot be read, 3 a copy is corrupt or an entry has no good copy.
    """
    from bindery_core.ids import LedgerId

    from bindery.ledger import ledger_read

    client, ledger_id = cluster.client, LedgerId(ledger)
    out = ledger_read.output(as_json=as_json, as_bytes=as_bytes, form=payload, decode=decode, raw=raw)
    if raw or from_bookie is not None:
        await ledger_read.read_copies(client, ledger_id, first=first, last=last, bookie=from_bookie, raw=raw, out=out)
    else:
        await ledger_read.read_verified(client, ledger_id, first=first, last=last, out=out)


@cluster_command(app, "compare")
async def compare(
    cluster: "Cluster",
    ledger: LedgerArgument,
    first: First = 0,
    last: Last = None,
    only_bad: Annotated[bool, typer.Option("--only-bad", help="Omit entries whose copies agree.")] = False,
    rate: Rate = 0,
    as_json: AsJson = False,
) -> None:
    """Read every copy of every entry and compare the copies. The ledger is neither fenced nor changed.

    Each line shows the copies of one entry (LAC, length, CRC-32C of the payload) and a verdict: agree, missing,
    corrupt, error, diverged, unreadable, or unacknowledged for an entry beyond the last confirmed one, of which copies
    may be missing. Two copies agree if both verify and have the same payload and length; their LACs may differ. With
    --json the last line is the summary.

    Example: bindery ledger compare 7 --only-bad

    Exit codes: 0 all copies agree, 1 a bookie did not answer, 3 differences found.
    """
    from bindery_core.ids import LedgerId

    from bindery.ledger.ledger_compare import run_compare

    await run_compare(
        cluster.client, LedgerId(ledger), first=first, last=last, only_bad=only_bad, rate=rate, as_json=as_json
    )


@cluster_command(app, "check")
async def check(
    cluster: "Cluster",
    ledger: LedgerArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Read every entry of every replica, not only the ends.")] = False,
    rate: Rate = 0,
    as_json: AsJson = False,
) -> None:
    """Check that every bookie holds the replicas that the metadata assigns to it. Prints one line per fragment.

    Without --deep, the first and the last entry of each fragment are read. With --deep, all entries are: digests, equal
    payloads across the replicas, and the length that each entry records. An open ledger is checked up to its last
    confirmed entry. The ledger is neither fenced nor changed. --rate applies to --deep.

    Example: bindery ledger check 7 --deep

    Exit codes: 0 good, 1 a bookie did not answer, 3 a replica is missing, damaged or on an unregistered bookie.
    """
    from bindery_core.ids import LedgerId

    from bindery.ledger.ledger_check import run_check

    await run_check(cluster.client, LedgerId(ledger), deep=deep, rate=rate, as_json=as_json)


def _show_lines(facts: dict[str, Any]) -> list[str]:
    """Return the result of `describe` as text."""
    from datetime import UTC, datetime, timedelta

    until_closed = "unknown until the ledger is closed" if facts["state"] != "closed" else None
    ctime_ms = facts["ctime_ms"]
    created = "unknown"
    if ctime_ms is not None:
        try:
            at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ctime_ms)
            created = f"{at.isoformat(timespec='milliseconds')} ({ctime_ms})"
        except OverflowError:
            created = str(ctime_ms)
    values = {
        "ledger_id": facts["ledger_id"],
        "state": facts["state"],
        "ensemble_size": facts["ensemble_size"],
        "write_quorum": facts["write_quorum"],
        "ack_quorum": facts["ack_quorum"],
        "digest_type": facts["digest_type"] or "not recorded",
        "last_entry_id": until_closed
        or (facts["last_entry_id"] if facts["last_entry_id"] >= 0 else "none (empty ledger)"),
        "length": until_closed or f"{facts['length']} bytes",
        "ctime": created,
        "format_version": facts["format_version"],
        "metadata_version": facts["metadata_version"],
    }
    lines = [f"{name:<16} {value}" for name, value in values.items()]
    lines += [f"{'custom':<16} {name}={value}" for name, value in facts["custom"].items()]
    ends = [segment["first_entry_id"] - 1 for segment in facts["segments"][1:]]
    for segment, end in zip(facts["segments"], [*ends, None], strict=True):
        entries = f"{segment['first_entry_id']}..{'' if end is None else end}"
        lines.append(f"{'entries':<8}{entries:<8} {', '.join(segment['ensemble'])}")
    return lines


def describe(ledger_id: int, found: "Versioned[LedgerMetadata]") -> dict[str, Any]:
    """Return the metadata of a ledger as JSON, without the password.

    `ctime_ms` is the creation time of the znode if the metadata has none.
    """
    metadata = found.value
    is_closed = metadata.state.name == "CLOSED"
    return {
        "ledger_id": ledger_id,
        "state": metadata.state.name.lower(),
        "ensemble_size": metadata.ensemble_size,
        "write_quorum": metadata.write_quorum,
        "ack_quorum": metadata.ack_quorum,
        "last_entry_id": int(metadata.last_entry_id) if is_closed else None,
        "length": metadata.length if is_closed else None,
        "digest_type": metadata.digest_type.name.lower() if metadata.digest_type else None,
        "ctime_ms": metadata.ctime_ms if metadata.ctime_ms is not None else found.created_ms or None,
        "format_version": metadata.format_version,
        "metadata_version": found.version,
        "custom": {name: value.decode(errors="backslashreplace") for name, value in metadata.custom.items()},
        "segments": [
            {"first_entry_id": int(segment.first_entry_id), "ensemble": list(segment.ensemble)}
            for segment in metadata.segments
        ],
    }
