"""Cookies identify a bookie, its disks and its cluster. `cookies/<bookie id>` and each disk hold the same text.

| layout | text                                                                                                       |
|-------:|------------------------------------------------------------------------------------------------------------|
|      5 | "5", LF, CookieFormat (cookie.proto) in protobuf's text form; the layout that we write                     |
|      4 | "4", LF, the same without indexDirs                                                                        |
|      3 | four lines: "3", bookie id, journal directories, ledger directories                                        |

Journal directories are joined by ','; ledger and index directories are their count, TAB, and the directories joined by
TAB. Directories are the configured ones, without the `current` below them. Layouts below 3 are too old to compare.
Source: BookKeeper Cookie.

The plain form of the text, one field per line as BookKeeper and we write it, is coded by hand: a bookie reads and
writes it when it starts, and importing protobuf would take a sixth of the start time. Any other form is decoded by
protobuf's parser.
"""

import re
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import BadRequest, BadVersion, Corrupt

LAYOUT_VERSION: Final = 5
"""Layout that is written."""
LAYOUT_VERSION_MIN: Final = 3
"""Oldest layout that is read."""
FILE_NAME: Final = "VERSION"
"""Name of the cookie's file in the `current` folder of each directory."""
TEXT_SIZE_MAX: Final = 1024 * 1024
"""Maximum bytes of a text that are parsed; the rest is ignored."""


_PLAIN_LINE: Final = re.compile(
    r'(bookieHost|journalDir|ledgerDirs|instanceId|indexDirs): "((?:[ !#-\[\]-~]|\\[tnr"\'\\]|\\[0-3][0-7]{2})*)"'
)
_ESCAPE: Final = re.compile(rb"\\(?:([0-7]{3})|(.))")
_ESCAPED: Final = {b"\t": b"t", b"\n": b"n", b"\r": b"r", b'"': b'"', b"'": b"'", b"\\": b"\\"}
_ESCAPES: Final = {letter: byte for byte, letter in _ESCAPED.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie:
    """The identity of a bookie: its id, its directories and its cluster."""

    bookie_id: str
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    index_dirs: tuple[str, ...] | None = None
    """None: the index is in the ledger directories."""
    instance_id: str | None = None
    """The cluster's INSTANCEID."""

    def text(self) -> bytes:
        """Return the cookie in layout 5. Raises BadRequest for a directory whose name the text cannot represent."""
        for directory in (*self.journal_dirs, *self.ledger_dirs, *(self.index_dirs or ())):
            if not directory or "\t" in directory or "\n" in directory:
                raise BadRequest("a cookie cannot contain this directory's name", directory=directory)
        if any("," in directory for directory in self.journal_dirs):
            raise BadRequest("a journal directory's name must not contain a comma", journal_dirs=self.journal_dirs)
        fields = {
            "bookieHost": self.bookie_id,
            "journalDir": ",".join(self.journal_dirs),
            "ledgerDirs": _pack_dirs(self.ledger_dirs),
            "instanceId": self.instance_id,
            "indexDirs": None if self.index_dirs is None else _pack_dirs(self.index_dirs),
        }
        lines = [f"{name}: {_quoted(value)}\n" for name, value in fields.items() if value is not None]
        return "".join((f"{LAYOUT_VERSION}\n", *lines)).encode("ascii")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a cookie differs from the expected one."""

    field: str
    expected: str
    found: str


def parse(text: bytes) -> Cookie:
    """Parse a cookie of layout 3, 4 or 5. Raises BadVersion for another layout, Corrupt for an invalid text."""
    try:
        first, _, rest = text[:TEXT_SIZE_MAX].decode("utf-8").partition("\n")
        layout = int(first.strip())
    except ValueError as error:
        raise Corrupt("not a cookie", start=text[:40]) from error
    if not LAYOUT_VERSION_MIN <= layout <= LAYOUT_VERSION:
        reason = "too old" if layout < LAYOUT_VERSION_MIN else "not understood"
        raise BadVersion(f"a cookie of this layout is {reason}", layout=layout)
    if layout == LAYOUT_VERSION_MIN:
        lines = rest.splitlines()
        if len(lines) < 3:
            raise Corrupt("not a cookie: lines are missing", layout=layout, lines=len(lines))
        return Cookie(bookie_id=lines[0], journal_dirs=tuple(lines[1].split(",")), ledger_dirs=_unpack_dirs(lines[2]))
    fields = _plain_fields(rest) or _any_fields(rest, layout=layout)
    return Cookie(
        bookie_id=fields["bookieHost"],
        journal_dirs=tuple(fields["journalDir"].split(",")),
        ledger_dirs=_unpack_dirs(fields["ledgerDirs"]),
        index_dirs=_unpack_dirs(fields["indexDirs"]) if "indexDirs" in fields else None,
        instance_id=fields.get("instanceId"),
    )


def _plain_fields(text: str) -> dict[str, str] | None:
    """Return the fields of a text in the plain form; None for any other text, and if a field is missing."""
    fields: dict[str, str] = {}
    for line in text.removesuffix("\n").split("\n"):
        match = _PLAIN_LINE.fullmatch(line)
        if match is None or match[1] in fields:
            return None
        try:
            fields[match[1]] = _unquoted(match[2])
        except UnicodeDecodeError:
            return None
    return fields if fields.keys() >= {"bookieHost", "journalDir", "ledgerDirs"} else None


def _any_fields(text: str, *, layout: int) -> dict[str, str]:
    """Return the fields of any text, parsed by protobuf. Raises Corrupt."""
    from google.protobuf import text_format

    from bindery_core.formats import cookie_pb2 as pb

    message = pb.CookieFormat()
    try:
        text_format.Parse(text, message, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise Corrupt("not a cookie", reason=str(error)) from error
    if not message.IsInitialized():
        raise Corrupt("not a cookie: a required field is missing", layout=layout)
    return {field.name: value for field, value in message.ListFields()}


def differences(expected: Cookie, found: Cookie) -> list[Difference]:
    """Return the fields in which `found` differs from `expected`.

    The list is empty if both are cookies of the same bookie with the same disks in the same cluster. If a cookie names
    no index directories, its ledger directories take their place.
    """
    none = "(none)"
    pairs = [
        ("bookie id", expected.bookie_id, found.bookie_id),
        ("journal directories", ",".join(expected.journal_dirs), ",".join(found.journal_dirs)),
        ("ledger directories", ",".join(expected.ledger_dirs), ",".join(found.ledger_dirs)),
        (
            "index directories",
            ",".join(expected.index_dirs or expected.ledger_dirs),
            ",".join(found.index_dirs or found.ledger_dirs),
        ),
        ("instance id", expected.instance_id or none, found.instance_id or none),
    ]
    return [Difference(name, wanted, got) for name, wanted, got in pairs if wanted != got]


def describe(problems: list[Difference]) -> str:
    """Return the differences side by side, one line per field, for an operator."""
    rows = [("field", "expected", "found"), *((d.field, d.expected, d.found) for d in problems)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _pack_dirs(directories: tuple[str, ...]) -> str:
    return "\t".join((str(len(directories)), *directories))


def _unpack_dirs(text: str) -> tuple[str, ...]:
    count, *directories = text.split("\t")
    if not count.isdigit() or int(count) != len(directories):
        raise Corrupt("not a cookie: the number of directories is wrong", directories=text)
    return tuple(directories)


def _quoted(text: str) -> str:
    """Quote as protobuf's text form does: UTF-8, with bytes other than printable ASCII as three octal digits."""
    parts = []
    for code in text.encode():
        letter = _ESCAPED.get(bytes((code,)))
        if letter is not None:
            parts.append("\\" + letter.decode())
        else:
            parts.append(chr(code) if 0x20 <= code < 0x7F else f"\\{code:03o}")
    return '"' + "".join(parts) + '"'


def _unquoted(text: str) -> str:
    """Undo `_quoted` for text that `_PLAIN_LINE` matches. Raises UnicodeDecodeError."""
    return _ESCAPE.sub(lambda m: bytes((int(m[1], 8),)) if m[1] else _ESCAPES[m[2]], text.encode()).decode()
