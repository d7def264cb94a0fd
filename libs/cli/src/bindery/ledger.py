"""`bindery ledger`: look at ledgers as they are in metadata and on the bookies. Nothing is changed: no recovery, no
fence."""

import base64
import json
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer
from bindery_core.errors import BadRequest

from bindery.cluster import DEFAULT_ZOOKEEPER

if TYPE_CHECKING:
    from bindery_client.client import LedgerClient
    from bindery_core.ids import LedgerId
    from bindery_core.ledger_metadata import LedgerMetadata

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at ledgers: metadata, entries, replicas.")

READ_BATCH: Final = 100
PREVIEW_SIZE: Final = 60
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
                metadata = await client.metadata(ledger_id)
            except NoSuchLedger:
                continue  # deleted since it was listed
            count += 1
            if as_json:
                print(json.dumps(describe(ledger_id, metadata)))
                continue
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

        facts = describe(ledger, await client.metadata(LedgerId(ledger)))
        if as_json:
            print(json.dumps(facts, indent=2))
            return
        segments = facts.pop("segments")
        for name, value in facts.items():
            print(f"{name:<16} {value}")
        for segment in segments:
            print(f"from entry {segment['first_entry_id']:<5} {', '.join(segment['ensemble'])}")

    _with_client(zookeeper, run)


@app.command("read")
def read(
    ledger: LedgerArgument,
    first: Annotated[int, typer.Option(metavar="ENTRY", min=0, help="First entry.")] = 0,
    last: Annotated[int | None, typer.Option(metavar="ENTRY", min=0, help="Last entry; default: all readable.")] = None,
    from_bookie: Annotated[
        str | None, typer.Option(metavar="BOOKIE", help="Ask this bookie alone, and say what it has of each entry.")
    ] = None,
    zookeeper: ZooKeeper = DEFAULT_ZOOKEEPER,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the payloads as they are, one after the other.")] = False,
) -> None:
    """Read entries, each verified against its digest. An open ledger is read up to its last confirmed entry."""

    async def run(client: "LedgerClient") -> None:
        from bindery_core.ids import EntryId, LedgerId

        ledger_id = LedgerId(ledger)
        metadata = await client.metadata(ledger_id)
        handle = await client.open(ledger_id, password=metadata.password or b"", recover=False)
        try:
            end = handle.last_add_confirmed if last is None else last
            if end > handle.last_add_confirmed:
                raise BadRequest("the ledger ends before that", last_entry=handle.last_add_confirmed, asked=end)
            if from_bookie is not None:
                await _read_replicas(client, ledger_id, range(first, end + 1), from_bookie, as_json=as_json, raw=raw)
                return
            for start in range(first, end + 1, READ_BATCH):
                for entry in await handle.read(EntryId(start), EntryId(min(start + READ_BATCH - 1, end))):
                    _print_entry(entry.entry_id, entry.payload, as_json=as_json, raw=raw)
        finally:
            await handle.release()

    _with_client(zookeeper, run)


async def _read_replicas(
    client: "LedgerClient", ledger_id: "LedgerId", entries: range, bookie: str, *, as_json: bool, raw: bool
) -> None:
    """What `bookie` itself has: good, absent, corrupt or an error, for each entry; absent is right outside its write
    sets."""
    from bindery_core.ids import EntryId, validate_bookie_id

    bookie_id = validate_bookie_id(bookie)
    bad = 0
    for number in entries:
        replica = await client.read_from_bookie(ledger_id, EntryId(number), bookie_id)
        verdict = replica.verdict.value
        bad += verdict in ("corrupt", "error")
        if replica.payload is not None:
            _print_entry(number, replica.payload, as_json=as_json, raw=raw, bookie=bookie, verdict=verdict)
        elif as_json:
            print(json.dumps({"entry_id": number, "bookie": bookie, "verdict": verdict, "status": replica.status}))
        elif not raw:
            print(f"{number:>8}  {verdict}{f' (status {replica.status})' if verdict == 'error' else ''}")
    if bad:
        raise typer.Exit(1)


def describe(ledger_id: int, metadata: "LedgerMetadata") -> dict[str, Any]:
    """A ledger's metadata as JSON; the password stays out."""
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
        "ctime_ms": metadata.ctime_ms,
        "custom": {name: value.decode(errors="replace") for name, value in metadata.custom.items()},
        "segments": [
            {"first_entry_id": int(segment.first_entry_id), "ensemble": list(segment.ensemble)}
            for segment in metadata.segments
        ],
    }


def _print_entry(entry_id: int, payload: bytes, *, as_json: bool, raw: bool, **more: str) -> None:
    if raw:
        sys.stdout.buffer.write(payload)
    elif as_json:
        encoded = base64.b64encode(payload).decode()
        print(json.dumps({"entry_id": int(entry_id), **more, "size": len(payload), "payload_base64": encoded}))
    else:
        preview = "".join(c if c.isprintable() else "." for c in payload[:PREVIEW_SIZE].decode("latin-1"))
        cut = "..." if len(payload) > PREVIEW_SIZE else ""
        print(f"{entry_id:>8}  {len(payload):>9} bytes  {preview}{cut}")


def _with_client(zookeeper: str, run: "Callable[[LedgerClient], Awaitable[T]]") -> T:

    import asyncio

    from bindery.ledger_client import connected

    async def main() -> T:
        async with connected(zookeeper) as client:
            return await run(client)

    return asyncio.run(main())
