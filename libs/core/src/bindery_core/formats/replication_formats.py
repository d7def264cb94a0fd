"""Content of the nodes of the under-replication tree: marks, locks, votes, the layout, times of checks.

| node              | form                | message (replication.proto)     | example                            |
|-------------------|---------------------|---------------------------------|------------------------------------|
| LAYOUT            | protobuf text       | LedgerRereplicationLayoutFormat | `type: "BASIC"` LF `version: 1` LF |
| mark, `urL<id>`   | protobuf text       | UnderreplicatedLedgerFormat     | `replica: "h:1"` LF `ctime: 5` LF  |
| lock, `urL<id>`   | protobuf text       | LockDataFormat                  | `bookieId: "host"` LF              |
| vote, `V_<n>`     | protobuf text       | AuditorVoteFormat               | `bookieId: "host:3181"` LF         |
| `*ctime`          | protobuf bytes      | CheckTimeFormat                 | 08, varint of ms since 1970        |

Any client with access to the tree may have written these nodes. Unreadable content raises Corrupt and no other
exception; only `check_layout` raises BadVersion instead.
Source: BookKeeper DataFormats.proto, ZkLedgerUnderreplicationManager, AuditorElector.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from bindery_core.errors import BadRequest, BadVersion, Corrupt
from bindery_core.formats import replication_pb2 as pb

LAYOUT_TYPE: Final = "BASIC"
LAYOUT_VERSION: Final = 1
TEXT_SIZE_MAX: Final = 64 * 1024
"""Maximum bytes of a text that is parsed: some thousand replicas. Parsing is slow and must not block the event loop."""
_NUMBER_SIZE_MAX: Final = 64
"""Maximum bytes of a check time that are parsed."""

M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class MarkText:
    """The content of a mark."""

    replicas: tuple[str, ...] = ()
    """Bookie ids exactly as in ledger metadata; empty: check the whole ledger."""
    ctime_ms: int | None = None
    """Time of the last mark in milliseconds since 1970; None: not recorded."""


def encode_mark(replicas: Iterable[str], ctime_ms: int | None) -> bytes:
    """Encode the content of a mark. Raises BadRequest if it would be longer than TEXT_SIZE_MAX."""
    message = pb.UnderreplicatedLedgerFormat(replica=replicas)
    if ctime_ms is not None:
        message.ctime = ctime_ms
    return _text(message)


def decode_mark(data: bytes) -> MarkText:
    """Decode the content of a mark. Raises Corrupt."""
    message = _parse(data, pb.UnderreplicatedLedgerFormat())
    return MarkText(tuple(message.replica), message.ctime if message.HasField("ctime") else None)


def encode_lock(worker: str) -> bytes:
    """Encode the content of a lock. `worker`: name of its holder."""
    return _text(pb.LockDataFormat(bookieId=worker))


def decode_lock(data: bytes) -> str:
    """Return the holder of the lock; empty: not recorded. Raises Corrupt."""
    return _parse(data, pb.LockDataFormat()).bookieId


def encode_vote(candidate: str) -> bytes:
    """Encode the content of a vote. `candidate`: id of the process that stands for election."""
    return _text(pb.AuditorVoteFormat(bookieId=candidate))


def decode_vote(data: bytes) -> str:
    """Return the candidate of the vote; empty: not recorded. Raises Corrupt."""
    return _parse(data, pb.AuditorVoteFormat()).bookieId


def encode_layout() -> bytes:
    """Return the content of LAYOUT."""
    return _text(pb.LedgerRereplicationLayoutFormat(type=LAYOUT_TYPE, version=LAYOUT_VERSION))


def check_layout(data: bytes) -> None:
    """Check the content of LAYOUT. Raises BadVersion if the layout is another one, or cannot be read."""
    try:
        message = _parse(data, pb.LedgerRereplicationLayoutFormat())
    except Corrupt as error:
        raise BadVersion("the under-replication layout cannot be read", reason=error.facts.get("reason")) from error
    if (message.type, message.version) != (LAYOUT_TYPE, LAYOUT_VERSION):
        raise BadVersion(
            "unsupported layout of the under-replication tree",
            found=f"{message.type[:100]} {message.version}",
            expected=f"{LAYOUT_TYPE} {LAYOUT_VERSION}",
        )


def encode_check_time(at_ms: int) -> bytes:
    """Encode the time of a check. `at_ms`: milliseconds since 1970."""
    return pb.CheckTimeFormat(ctime=at_ms).SerializeToString()


def decode_check_time(data: bytes) -> int | None:
    """Return the time in milliseconds since 1970; None: not recorded. Raises Corrupt."""
    if len(data) > _NUMBER_SIZE_MAX:
        raise Corrupt("not the time of a check", size=len(data))
    message = pb.CheckTimeFormat()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Corrupt("not the time of a check", start=data[:40]) from error
    return message.ctime if message.HasField("ctime") else None


def _text(message: Message) -> bytes:
    data = text_format.MessageToString(message, as_utf8=False).encode("ascii")
    if len(data) > TEXT_SIZE_MAX:
        raise BadRequest("too long for the under-replication tree", size=len(data), size_max=TEXT_SIZE_MAX)
    return data


def _parse(data: bytes, message: M) -> M:
    name = message.DESCRIPTOR.name
    if len(data) > TEXT_SIZE_MAX:
        raise Corrupt(f"not a readable {name}", reason="too long", size=len(data), size_max=TEXT_SIZE_MAX)
    try:
        text_format.Parse(data.decode("utf-8"), message, allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise Corrupt(f"not a readable {name}", reason=str(error)[:200] or type(error).__name__) from error
    if not message.IsInitialized():
        raise Corrupt(f"not a readable {name}", reason="a required field is missing")
    return message
