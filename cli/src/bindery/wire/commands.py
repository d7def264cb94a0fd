"""`bindery wire`: decode captured bytes of the BookKeeper protocol."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer
from bindery_core.errors import BadRequest, Corrupt

from bindery.common import exit_codes
from bindery.common.credentials import PasswordFile, read_password
from bindery.common.options import AsJson, group
from bindery.common.output import print_json, report_error

app = group("Decode captured bytes of the BookKeeper protocol.")

CHUNK_SIZE: Final = 256 * 1024
DIRECTIONS: Final = ("auto", "request", "response")
DIGESTS: Final = ("auto", "crc32c", "crc32", "mac", "dummy")
_BETWEEN_HEX: Final = b" \t\r\n:"


@app.callback()
def wire() -> None:
    """Decode captured bytes of the BookKeeper protocol."""


@app.command("decode")
def decode(
    file: Annotated[
        str,
        typer.Argument(metavar="[FILE]", show_default=True, help="Bytes of one direction of a connection; - is stdin."),
    ] = "-",
    as_hex: Annotated[bool, typer.Option("--hex", help="Read hex text, as written by `xxd -p`.")] = False,
    direction: Annotated[
        str,
        typer.Option(
            metavar="|".join(DIRECTIONS),
            show_default=True,
            help="Sender: request from a client, response from a bookie.",
        ),
    ] = "auto",
    digest: Annotated[
        str,
        typer.Option(
            metavar="|".join(DIGESTS),
            show_default=True,
            help="Digest type of the ledgers; auto: the type that verifies.",
        ),
    ] = "auto",
    password_file: PasswordFile = None,
    frame_size_max: Annotated[
        int | None,
        typer.Option(metavar="BYTES", min=5, help="Maximum size of a frame in bytes; default: 5253120, as in Pulsar."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print each frame of a captured byte stream: offset, size, version, operation, ids, flags, status, entry header.

    Versions 2 and 3 of the protocol are recognized. Digests are verified as far as --digest and --password-file allow.
    Master keys and credentials are not shown in full. If the stream is damaged or ends within a frame, the last line on
    stderr reports the offset and the reason; with --json the last line of stdout does, too.

    Example: xxd -p capture.bin | bindery wire decode --hex

    Exit codes: 0 success, 2 the input is not hex text, 3 a wrong digest, or a stream that is damaged or incomplete.
    """
    from bindery_core.digest import Digester
    from bindery_core.formats.ledger_metadata import DigestType

    from bindery.common.entry_facts import candidates
    from bindery.wire.wire_stream import FRAME_SIZE_MAX, StreamDecoder, StreamEnds

    for given, allowed, name in ((direction, DIRECTIONS, "--direction"), (digest, DIGESTS, "--digest")):
        if given not in allowed:
            raise BadRequest(f"{name} must be one of {'|'.join(allowed)}", given=given)
    secret = read_password(password_file)
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
            if as_json:
                print_json(frame.as_json())
            else:
                print(frame.line())
    except StreamEnds as error:
        ended = error
    if as_json:
        facts: dict[str, Any] = {"frames": count, "damaged": damaged}
        print_json(facts | ({"stopped_at": ended.offset, "reason": ended.reason} if ended else {}))
    sys.stdout.flush()
    if damaged:
        report_error(
            f"{damaged} of {count} frames have a wrong digest",
            code="damaged",
            exit_code=exit_codes.DAMAGE,
            as_json=as_json,
        )
    if ended is not None:
        raise ended
    if not count and not as_json:
        print("the stream is empty", file=sys.stderr)
    if damaged:
        raise typer.Exit(exit_codes.DAMAGE)


def _frames(decoder: Any, chunks: Iterator[bytes]) -> Iterator[Any]:
    for chunk in chunks:
        yield from decoder.feed(chunk)
        sys.stdout.flush()  # show the frames of a live capture at once
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
            raise  # the reader of stdout is gone
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
                "only, as `xxd -p` writes them; omit it for raw bytes"
            ) from error
        digits = digits[whole:]
        at += len(chunk)
    if digits:
        raise Corrupt("the hex text ends within a byte: an odd number of digits")
