"""`bindery ledger`: look at ledgers as they are in metadata and on the bookies. Nothing is changed: no recovery, no
fence."""

import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from bindery.cluster.commands import DEFAULT_ZOOKEEPER

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_core.formats.ledger_metadata import LedgerMetadata
    from bindery_metadata.stores.versioned import Versioned

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at ledgers: metadata, entries, replicas.")

T = TypeVar("T")

ZooKeeper = Annotated[
    str, typer.Option("--zookeeper", metavar="HOST:PORT", envvar="BINDERY_ZOOKEEPER", help="ZooKeeper servers.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
LedgerArgument = Annotated[int, typer.Argument(metavar="LEDGER", min=0, help="Ledger id.")]


@app.command("list")
def list_ledgers(zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, as_json: AsJson = False) -> None:
    """List every ledger with its state, size and bookies."""

    async def run(client: "LedgerClient") -> None:
        from bindery_core.errors import NoSuchLedger

        count = 0
        async for ledger_id in client.list_ledgers():
            try:
                found = await client.metadata_versioned(ledger_id)
            except NoSuchLedger:
                continue  # deleted since it was listed
            count += 1
            if as_json:
                print(json.dumps(describe(ledger_id, found)))
                continue
            metadata = found.value
            if count == 1:
                print(f"{'ledger':>10}  {'state':<11} {'E/Qw/Qa':<8} {'last':>8} {'bytes':>12}  bookies")
            quorums = f"{metadata.ensemble_size}/{metadata.write_quorum}/{metadata.ack_quorum}"
            is_closed = metadata.state.name == "CLOSED"
            last = str(metadata.last_entry_id) if is_closed else "-"
            length = str(metadata.length) if is_closed else "-"
            ensemble = ",".join(metadata.last_segment.ensemble)
            state = metadata.state.name.lower()
            print(f"{ledger_id:>10}  {state:<11} {quorums:<8} {last:>8} {length:>12}  {ensemble}")
        if not count and not as_json:
            print("no ledgers", file=sys.stderr)

    _with_client(zookeeper, run)


@app.command("show")
def show(ledger: LedgerArgument, zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER, as_json: AsJson = False) -> None:
    """Show one ledger's metadata: quorums, state, and which bookies hold what."""

    async def run(client: "LedgerClient") -> None:
        from bindery_core.ids import LedgerId

        facts = describe(ledger, await client.metadata_versioned(LedgerId(ledger)))
        if as_json:
            print(json.dumps(facts, indent=2))
            return
        for line in _show_lines(facts):
            print(line)

    _with_client(zookeeper, run)


First = Annotated[int, typer.Option("--first", metavar="ENTRY", min=0, help="First entry.")]
Last = Annotated[
    int | None, typer.Option("--last", metavar="ENTRY", min=0, help="Last entry; default: the last confirmed one.")
]


@app.command("read")
def read(
    ledger: LedgerArgument,
    first: First = 0,
    last: Last = None,
    from_bookie: Annotated[
        str | None, typer.Option(metavar="BOOKIE", help="Ask this bookie alone, and say what it has of each entry.")
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Every copy's header, digest and payload as they are, damage included; asks all bookies."
        ),
    ] = False,
    payload: Annotated[
        str | None,
        typer.Option(
            metavar="FORM", help="Whole payloads as hex, escaped or base64; or none. Default: a preview; raw: hex."
        ),
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Take payloads apart as messages of a topic.")] = False,
    as_bytes: Annotated[
        bool, typer.Option("--bytes", help="Write the payloads as they are, one after the other.")
    ] = False,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    as_json: AsJson = False,
) -> None:
    """Read entries, each verified against its digest. An open ledger is read up to its last confirmed entry.

    With --from-bookie or --raw, copies are shown as the bookies have them: good, absent, corrupt (the bytes contradict
    their digest) or error (the bookie cannot say). Exit code 1: some copy is corrupt or in error. --last may then lie
    beyond the last confirmed entry.
    """

    async def run(client: "LedgerClient") -> None:
        from bindery_core.ids import LedgerId

        from bindery.ledger import ledger_read

        out = ledger_read.output(as_json=as_json, as_bytes=as_bytes, form=payload, decode=decode, raw=raw)
        if raw or from_bookie is not None:
            await ledger_read.read_copies(
                client, LedgerId(ledger), first=first, last=last, bookie=from_bookie, raw=raw, out=out
            )
        else:
            await ledger_read.read_verified(client, LedgerId(ledger), first=first, last=last, out=out)

    _with_client(zookeeper, run)


@app.command("compare")
def compare(
    ledger: LedgerArgument,
    first: First = 0,
    last: Last = None,
    only_bad: Annotated[bool, typer.Option("--only-bad", help="Leave out entries whose copies agree.")] = False,
    rate: Annotated[
        float, typer.Option(metavar="N", min=0, help="At most N entries a second; 0: a batch after the other.")
    ] = 0,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    as_json: AsJson = False,
) -> None:
    """Read every copy of every entry and compare them; nothing is fenced or changed.

    A line for each entry: its copies (LAC, length, CRC-32C of the payload) and a verdict: agree, missing, corrupt,
    error, diverged, unreadable; beyond the last confirmed entry unacknowledged, where copies may be missing. Two copies
    agree when both verify and payload and length are the same; their LACs may differ. With --json the last line is the
    summary.

    Exit codes: 0 all agree, 1 not done or some bookie could not say, 3 differences found.
    """

    async def run(client: "LedgerClient") -> None:
        from bindery_core.ids import LedgerId

        from bindery.ledger.ledger_compare import run_compare

        await run_compare(
            client, LedgerId(ledger), first=first, last=last, only_bad=only_bad, rate=rate, as_json=as_json
        )

    _with_client(zookeeper, run)


@app.command("check")
def check(
    ledger: LedgerArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Every entry of every replica, not only the ends.")] = False,
    rate: Annotated[
        float, typer.Option(metavar="N", min=0, help="With --deep: at most N entries a second; 0: as fast as it goes.")
    ] = 0,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    as_json: AsJson = False,
) -> None:
    """Check that every replica is where the metadata say, by asking each bookie; a line for each fragment.

    Without --deep the first and the last entry of each fragment are read, with it all of them: digests, equal payloads
    across the replicas, and that the ledger's length grows by each payload. An open ledger is checked up to its last
    confirmed entry. Nothing is fenced or changed.

    Example: bindery ledger check 7 --deep

    Exit codes: 0 good, 1 not done or some bookie could not say, 3 a replica is missing, damaged or on a bookie that is
    not registered.
    """

    async def run(client: "LedgerClient") -> None:
        from bindery_core.ids import LedgerId

        from bindery.ledger.ledger_check import run_check

        await run_check(client, LedgerId(ledger), deep=deep, rate=rate, as_json=as_json)

    _with_client(zookeeper, run)


def _show_lines(facts: dict[str, Any]) -> list[str]:
    """`describe` as text."""
    from datetime import UTC, datetime, timedelta

    until_closed = "unknown until it is closed" if facts["state"] != "closed" else None
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
        "digest_type": facts["digest_type"] or "not told",
        "last_entry_id": until_closed
        or (facts["last_entry_id"] if facts["last_entry_id"] >= 0 else "none, it is empty"),
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
    """A ledger's metadata as JSON; the password stays out. `ctime_ms`: its znode's if it tells none of its own."""
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


def _with_client(zookeeper: str, run: "Callable[[LedgerClient], Awaitable[T]]") -> T:

    import asyncio

    from bindery.ledger.ledger_client import connected

    async def main() -> T:
        async with connected(zookeeper) as client:
            return await run(client)

    return asyncio.run(main())
