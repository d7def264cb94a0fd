"""`bindery wire`: captured bytes of the BookKeeper protocol in words."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest, Corrupt

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The BookKeeper protocol: captured bytes in words.")

CHUNK_SIZE: Final = 256 * 1024
DIRECTIONS: Final = ("auto", "request", "response")
DIGESTS: Final = ("auto", "crc32c", "crc32", "mac", "dummy")
_BETWEEN_HEX: Final = b" \t\r\n:"


@app.callback()
def wire() -> None:
    """The BookKeeper protocol: captured bytes in words."""


@app.command("decode")
def decode(
    file: Annotated[str, typer.Argument(metavar="[FILE]", help="One direction of a connection; - is stdin.")] = "-",
    as_hex: Annotated[bool, typer.Option("--hex", help="The input is hex text, as `xxd -p` writes it.")] = False,
    direction: Annotated[
        str, typer.Option(metavar="|".join(DIRECTIONS), help="Who sent it: request from a client, response a bookie.")
    ] = "auto",
    digest: Annotated[
        str, typer.Option(metavar="|".join(DIGESTS), help="The ledgers' digest type; auto: whichever fits.")
    ] = "auto",
    password: Annotated[
        str, typer.Option(metavar="TEXT", envvar="BINDERY_LEDGER_PASSWORD", help="The ledgers' password, for mac.")
    ] = "",
    frame_size_max: Annotated[
        int | None, typer.Option(metavar="BYTES", min=5, help="Longest frame; default: 5253120, Pulsar's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """Print each frame of a captured byte stream: offset, size, version, operation, ids, flags, status, entry header.

    Versions 3 and 2 are told apart as a bookie does. Digests are checked as far as --digest and --password allow.
    Master keys and authentication are not shown in full. Where the stream is damaged or ends within a frame, what could
    be read was printed, and the last line on stderr says where and why it stopped (with --json the last line of stdout
    too); the exit code is then 1, as when a digest is wrong.
    """
    from bindery_core.digest import Digester
    from bindery_core.formats.ledger_metadata import DigestType

    from bindery.common.entry_facts import candidates
    from bindery.wire.wire_stream import FRAME_SIZE_MAX, StreamDecoder, StreamEnds

    for given, allowed, name in ((direction, DIRECTIONS, "--direction"), (digest, DIGESTS, "--digest")):
        if given not in allowed:
            raise BadRequest(f"{name} takes {'|'.join(allowed)}", given=given)
    secret = password.encode()
    decoder = StreamDecoder(
        direction=direction,
        digesters=candidates(secret) if digest == "auto" else (Digester(DigestType[digest.upper()], secret),),
        frame_size_max=frame_size_max or FRAME_SIZE_MAX,
    )
    count = damaged = 0
    ended: StreamEnds | None = None
    try:
        for frame in _frames(decoder, _chunks(file, as_hex=as_hex)):
            count += 1
            damaged += frame.is_damaged
            print(json.dumps(frame.as_json()) if as_json else frame.line())
    except StreamEnds as error:
        ended = error
    if as_json:
        facts: dict[str, Any] = {"frames": count, "damaged": damaged}
        print(json.dumps(facts | ({"stopped_at": ended.offset, "reason": ended.reason} if ended else {})))
    sys.stdout.flush()
    if damaged:
        print(f"bindery: {damaged} of {count} frames hold a wrong digest", file=sys.stderr)
    if ended is not None:
        raise ended
    if not count and not as_json:
        print("the stream is empty", file=sys.stderr)
    if damaged:
        raise typer.Exit(1)


def _frames(decoder: Any, chunks: Iterator[bytes]) -> Iterator[Any]:
    for chunk in chunks:
        yield from decoder.feed(chunk)
        sys.stdout.flush()  # a live capture is read as it comes
    yield from decoder.end()


def _chunks(file: str, *, as_hex: bool) -> Iterator[bytes]:
    try:
        if file == "-":
            yield from _read(sys.stdin.buffer, as_hex=as_hex)
            return
        with Path(file).open("rb") as stream:
            yield from _read(stream, as_hex=as_hex)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise  # not ours: whoever reads our output went away
        raise BadRequest(f"cannot read {file}: {error.strerror}") from error


def _read(stream: IO[bytes], *, as_hex: bool) -> Iterator[bytes]:
    read = getattr(stream, "read1", stream.read)
    digits = b""
    at = 0
    while chunk := read(CHUNK_SIZE):
        if not as_hex:
            yield chunk
            continue
        digits += chunk.translate(None, _BETWEEN_HEX)
        whole = len(digits) // 2 * 2
        try:
            yield bytes.fromhex(digits[:whole].decode("latin-1"))
        except ValueError as error:
            raise BadRequest(
                f"not hex, somewhere in characters {at} to {at + len(chunk)}: --hex reads digits and white space "
                "alone, as `xxd -p` writes them; leave it out for raw bytes"
            ) from error
        digits = digits[whole:]
        at += len(chunk)
    if digits:
        raise Corrupt("the hex text ends within a byte: an odd number of digits")
