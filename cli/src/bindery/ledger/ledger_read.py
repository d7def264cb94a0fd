"""Implement `bindery ledger read`: print verified entries, or the copies on the bookies, damaged ones included."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import typer
from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_client.ledger.api import ReadHandle
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.digest import Digester
from bindery_core.errors import BadRequest, BookieUnavailable, Corrupt, NoSuchEntry
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId, validate_bookie_id

from bindery.common import exit_codes
from bindery.common.entry_facts import PAYLOAD_FORMS, examine, payload_text
from bindery.common.output import print_json, report_error
from bindery.common.pulsar_entry import describe_messages, message_lines
from bindery.ledger.ledger_compare import CompareClient, last_confirmed
from bindery.ledger.replicas import holders, walk

READ_BATCH_ENTRIES_MAX: Final = 500
READ_BATCH_BYTES: Final = 4 * 1024 * 1024
"""Target size in bytes of one batch, computed from the largest entry of the previous batch."""
PREVIEW_SIZE: Final = 60
"""Maximum number of payload bytes shown as text."""


@dataclass(frozen=True, slots=True)
class Output:
    """Form in which entries are printed."""

    as_json: bool
    as_bytes: bool
    """Write payloads only, without separators."""
    form: str | None
    """One of PAYLOAD_FORMS. None: base64 in JSON, hex with --raw, otherwise a preview."""
    decode: bool
    """Decode payloads as messages of a topic."""

    def payload(self, payload: bytes) -> dict[str, str]:
        """Return the payload as a field of a JSON object."""
        form = self.form or "base64"
        return {} if form == "none" else {f"payload_{form}": payload_text(payload, form)}


class ReadClient(CompareClient, Protocol):
    """The part of the ledger client that this module uses."""

    async def list_bookies(self) -> Mapping[BookieId, bool]: ...


def output(*, as_json: bool, as_bytes: bool, form: str | None, decode: bool, raw: bool) -> Output:
    """Return the form that the options request. Raises BadRequest for options that exclude each other."""
    if form is not None and form not in PAYLOAD_FORMS:
        raise BadRequest("--payload must be one of " + "|".join(PAYLOAD_FORMS), given=form)
    if as_bytes and (as_json or raw or decode or form is not None):
        raise BadRequest("--bytes writes payloads only: omit --json, --raw, --decode and --payload")
    return Output(as_json, as_bytes, form, decode)


async def read_verified(client: ReadClient, ledger_id: LedgerId, *, first: int, last: int | None, out: Output) -> None:
    """Print entries as a client reads them: each from any bookie with a good copy. Raises Corrupt, NoSuchEntry."""
    metadata = await client.metadata(ledger_id)
    handle = await client.open(ledger_id, password=metadata.password or b"", recover=False)
    try:
        confirmed = handle.last_add_confirmed
        end = confirmed if last is None else last
        if end > confirmed:
            raise BadRequest(
                f"the last confirmed entry is {confirmed}; --raw or --from-bookie read entries beyond it", last=end
            )
        _check_range(first, end, last)
        await _read_batches(handle, first, end, out)
    except (NoSuchEntry, Corrupt, BookieUnavailable):
        print(f"`bindery ledger compare {ledger_id}` shows the state of every copy", file=sys.stderr)
        raise
    finally:
        await handle.release()


async def _read_batches(handle: ReadHandle, first: int, end: int, out: Output) -> None:
    count = 8
    while first <= end:
        entries = await handle.read(EntryId(first), EntryId(min(first + count - 1, end)))
        for entry in entries:
            if out.as_json:
                facts = {"entry_id": int(entry.entry_id), "size": len(entry.payload), "length": entry.length}
                print_json(facts | out.payload(entry.payload) | _messages(entry.payload, out))
            else:
                _print_payload(f"{entry.entry_id:>8}", entry.payload, out)
        first += len(entries)
        largest = max(1, *(len(entry.payload) for entry in entries))
        count = max(1, min(2 * count, READ_BATCH_ENTRIES_MAX, READ_BATCH_BYTES // largest))


async def read_copies(
    client: ReadClient, ledger_id: LedgerId, *, first: int, last: int | None, bookie: str | None, raw: bool, out: Output
) -> None:
    """Print copies as the bookies have them: from `bookie` only, or from every bookie of the write set.

    Raises typer.Exit at the end: DAMAGE if a copy is corrupt or an entry has no good copy, FAILURE if a bookie returned
    an error.
    """
    metadata = await client.metadata(ledger_id)
    only = None if bookie is None else await _known(client, bookie)
    if last is None:
        last_known = await last_confirmed(client, ledger_id, metadata)
        _check_range(first, last_known, None)
        end = last_known
    else:
        _check_range(first, last, last)
        end = last
    printer = CopyPrinter(metadata, raw=raw, out=out)
    async for batch in walk(
        client, ledger_id, metadata, first=first, last=end, only=only, take=lambda replica: replica
    ):
        for entry_id, copies in batch:
            printer.entry(entry_id, list(copies.values()))
        sys.stdout.flush()
    _end(printer, as_json=out.as_json)


def _end(printer: "CopyPrinter", *, as_json: bool) -> None:
    """Report damage and errors. Raises typer.Exit if there were any."""
    if not printer.damaged_count and not printer.error_count:
        return
    exit_code = exit_codes.DAMAGE if printer.damaged_count else exit_codes.FAILURE
    report_error(
        f"{printer.damaged_count} entries with corrupt or without good copies, {printer.error_count} entries for which "
        "a bookie returned an error",
        code="damaged" if printer.damaged_count else "incomplete",
        exit_code=exit_code,
        as_json=as_json,
    )
    raise typer.Exit(exit_code)


async def _known(client: ReadClient, bookie: str) -> BookieId:
    bookie_id = validate_bookie_id(bookie)
    known = await client.list_bookies()
    if bookie_id not in known:
        names = ", ".join(sorted(known)) or "none"
        raise BookieUnavailable(f"bookie {bookie_id} is not registered; registered bookies: {names}")
    return bookie_id


def _check_range(first: int, end: int, last: int | None) -> None:
    if last is not None and first > last:
        raise BadRequest("the range is empty: --last is before --first", first=first, last=last)
    if end < 0:
        print("no confirmed entries", file=sys.stderr)
    elif first > end:
        raise BadRequest(f"the ledger's last confirmed entry is {end}", first=first)


class CopyPrinter:
    """Print copies of entries, and count the entries that are damaged or could not be read."""

    def __init__(self, metadata: LedgerMetadata, *, raw: bool, out: Output) -> None:
        self._metadata = metadata
        self._digester = Digester(metadata.digest_type or DIGEST_TYPE_UNTOLD, metadata.password or b"")
        self._raw = raw
        self._out = out
        self.damaged_count = 0
        """Number of entries with a corrupt copy, or with several copies read, no error, and no good copy."""
        self.error_count = 0
        """Number of other entries for which a bookie returned an error."""

    def entry(self, entry_id: EntryId, copies: Sequence[ReplicaRead]) -> None:
        verdicts = {copy.verdict for copy in copies}
        has_error = Verdict.ERROR in verdicts
        is_lost = len(copies) > 1 and Verdict.GOOD not in verdicts and not has_error
        is_damaged = Verdict.CORRUPT in verdicts or is_lost
        self.damaged_count += is_damaged
        self.error_count += has_error and not is_damaged
        shown: dict[bytes, BookieId] = {}
        for copy in copies:
            if self._out.as_json:
                print_json(self._as_json(copy))
            elif self._out.as_bytes:
                if copy.payload is not None:
                    sys.stdout.buffer.write(copy.payload)
            elif self._raw:
                twin = shown.get(copy.frame) if copy.frame is not None else None
                print(
                    f"entry {entry_id} of {copy.bookie_id}: {self._verdict(copy)}"
                    + (f", identical to {twin}" if twin else "")
                )
                if copy.frame is not None and twin is None:
                    shown[copy.frame] = copy.bookie_id
                    self._print_frame(copy.frame)
            elif copy.payload is not None:
                _print_payload(f"{entry_id:>8}", copy.payload, self._out)
            else:
                print(f"{entry_id:>8}  {self._verdict(copy)}")

    def _verdict(self, copy: ReplicaRead) -> str:
        if copy.verdict is Verdict.ABSENT and not self._should_hold(copy):
            return "absent, as expected: not in the write set"
        return copy.verdict.value + (f" ({copy.reason})" if copy.reason else "")

    def _should_hold(self, copy: ReplicaRead) -> bool:
        segment = self._metadata.segment_of(copy.entry_id)
        return copy.bookie_id in holders(self._metadata, segment, copy.entry_id)

    def _as_json(self, copy: ReplicaRead) -> dict[str, Any]:
        facts: dict[str, Any] = {"entry_id": int(copy.entry_id), "bookie": copy.bookie_id}
        facts |= {"verdict": copy.verdict.value, "in_write_set": self._should_hold(copy), "status": copy.status}
        if copy.reason:
            facts["reason"] = copy.reason
        if copy.frame is not None and (self._raw or copy.payload is None):
            found = examine(copy.frame, (self._digester,))
            return (
                facts
                | {"header": found.as_json()}
                | self._out.payload(found.payload)
                | _messages(found.payload, self._out)
            )
        if copy.payload is None:
            return facts
        return (
            facts | {"size": len(copy.payload)} | self._out.payload(copy.payload) | _messages(copy.payload, self._out)
        )

    def _print_frame(self, frame: bytes) -> None:
        found = examine(frame, (self._digester,))
        if found.header is None:
            print(f"  only {len(frame)} bytes, too short for a header")
        else:
            header = found.header
            for name in ("ledger_id", "entry_id", "lac", "length"):
                print(f"  {name:<10} {getattr(header, name)}")
            print(f"  {'digest':<10} {found.digest or self._digester.digest_type.name.lower() + ' cut off'}")
        print(f"  {'payload':<10} {len(found.payload)} bytes")
        form = self._out.form or "hex"
        if form != "none" and found.payload:
            print(f"  {payload_text(found.payload, form)}")
        if self._out.decode:
            for line in message_lines(found.payload):
                print("  " + line)


def _messages(payload: bytes, out: Output) -> dict[str, Any]:
    return {"messages": describe_messages(payload)} if out.decode else {}


def _print_payload(label: str, payload: bytes, out: Output) -> None:
    if out.as_bytes:
        sys.stdout.buffer.write(payload)
        return
    if out.decode:
        print(f"{label}  {len(payload):>9} bytes")
        for line in message_lines(payload):
            print(" " * len(label) + "  " + line)
        return
    if out.form is None:
        text = "".join(c if c.isprintable() else "." for c in payload[:PREVIEW_SIZE].decode("latin-1"))
        text += "..." if len(payload) > PREVIEW_SIZE else ""
    else:
        text = payload_text(payload, out.form)
    print(f"{label}  {len(payload):>9} bytes  {text}".rstrip())
