"""Cookies: which bookie, which disks, which cluster. The same text stands in `cookies/<bookie id>` and on each disk.

| layout | text                                                                                                       |
|-------:|------------------------------------------------------------------------------------------------------------|
|      5 | "5", LF, CookieFormat (cookie.proto) in protobuf's text form; what we write                                |
|      4 | "4", LF, the same without indexDirs                                                                        |
|      3 | four lines: "3", bookie id, journal directories, ledger directories                                        |

Journal directories are joined by ','; ledger and index directories are their count, TAB, and the directories joined by
TAB. Directories are those configured, without the `current` below them. Layouts below 3 are too old to be compared.
Source: BookKeeper Cookie.
"""

from dataclasses import dataclass
from typing import Final

from google.protobuf import text_format

from bindery_core import cookie_pb2 as pb
from bindery_core.errors import BadRequest, BadVersion, Corrupt

LAYOUT_VERSION: Final = 5
LAYOUT_VERSION_MIN: Final = 3
FILE_NAME: Final = "VERSION"
"""Name of the copy in each directory's `current`."""
TEXT_SIZE_MAX: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Cookie:
    bookie_id: str
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    index_dirs: tuple[str, ...] | None = None
    """None: the index stands in the ledger directories."""
    instance_id: str | None = None
    """The cluster's INSTANCEID."""

    def text(self) -> bytes:
        """The cookie in layout 5. Raises BadRequest for a directory whose name the text could not give back."""
        for directory in (*self.journal_dirs, *self.ledger_dirs, *(self.index_dirs or ())):
            if not directory or "\t" in directory or "\n" in directory:
                raise BadRequest("a cookie cannot hold this directory's name", directory=directory)
        if any("," in directory for directory in self.journal_dirs):
            raise BadRequest("a journal directory's name must not hold a comma", journal_dirs=self.journal_dirs)
        message = pb.CookieFormat(
            bookieHost=self.bookie_id, journalDir=",".join(self.journal_dirs), ledgerDirs=_pack_dirs(self.ledger_dirs)
        )
        if self.instance_id is not None:
            message.instanceId = self.instance_id
        if self.index_dirs is not None:
            message.indexDirs = _pack_dirs(self.index_dirs)
        return f"{LAYOUT_VERSION}\n{text_format.MessageToString(message, as_utf8=False)}".encode("ascii")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a cookie is not what it should be."""

    field: str
    expected: str
    found: str


def parse(text: bytes) -> Cookie:
    """A cookie of layout 3, 4 or 5. Raises BadVersion for another layout, Corrupt for a text that is no cookie."""
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
    message = pb.CookieFormat()
    try:
        text_format.Parse(rest, message, allow_unknown_field=True)
    except text_format.ParseError as error:
        raise Corrupt("not a cookie", reason=str(error)) from error
    if not message.IsInitialized():
        raise Corrupt("not a cookie: a required field is missing", layout=layout)
    return Cookie(
        bookie_id=message.bookieHost,
        journal_dirs=tuple(message.journalDir.split(",")),
        ledger_dirs=_unpack_dirs(message.ledgerDirs),
        index_dirs=_unpack_dirs(message.indexDirs) if message.HasField("indexDirs") else None,
        instance_id=message.instanceId if message.HasField("instanceId") else None,
    )


def differences(expected: Cookie, found: Cookie) -> list[Difference]:
    """Field by field what is wrong with `found`; empty: it is the same bookie with the same disks in the same cluster.

    Index directories that are not named are the ledger directories.
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
    """The differences side by side, one line a field, for an operator's eyes."""
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
        raise Corrupt("not a cookie: directories are miscounted", directories=text)
    return tuple(directories)
