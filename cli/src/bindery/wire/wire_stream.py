"""Decode a captured byte stream of the BookKeeper port, one direction of one connection, and describe its frames.

The stream is split into frames as a bookie splits it (`framing`). Each message is decoded in the protocol version that
a bookie would detect: version 3, and version 2 from the first message that is not version 3. The decoder buffers one
incomplete frame and, until the direction of the stream is known, UNDECIDED_FRAMES_MAX frames.

A frame that cannot be decoded ends the stream, as it ends a connection, because the bytes behind it may not start a
frame. Secrets are not shown: only the first bytes of master keys, and the size of authentication data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bindery_core.digest import Digester
from bindery_core.errors import BadRequest, BinderyError, Corrupt
from bindery_core.formats.availability import decode as decode_availability
from bindery_core.wire import v2, v3
from bindery_core.wire.framing import LENGTH_SIZE, FrameDecoder
from bindery_core.wire.messages import (
    OPERATION_OF,
    AddRequest,
    AuthRequest,
    AuthResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    ErrorResponse,
    ListEntriesResponse,
    Operation,
    OtherRequest,
    ReadFlag,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
    WriteLacRequest,
)

from bindery.common.entry_facts import WRONG, EntryFacts, escaped, examine, examine_lac

FRAME_SIZE_MAX: Final = 5_253_120
"""Maximum size of a frame in bytes, as in Pulsar's bookies. BookKeeper's default is 5 MiB."""
UNDECIDED_FRAMES_MAX: Final = 16
"""Maximum number of frames buffered to detect the direction of the stream."""
KEY_BYTES_SHOWN: Final = 4
"""Number of bytes of a master key that are shown."""
_RUNS_SHOWN: Final = 10
_TLS_RECORDS: Final = (b"\x14\x03", b"\x15\x03", b"\x16\x03", b"\x17\x03")
_CAPTURE_FILES: Final = (b"\xd4\xc3\xb2\xa1", b"\xa1\xb2\xc3\xd4", b"\x4d\x3c\xb2\xa1", b"\x0a\x0d\x0d\x0a")
_PROTOBUF_START: Final = 0x0A


class StreamEnds(Corrupt):
    """A frame cannot be decoded, or the stream ends within a frame. `offset`: offset of that frame."""

    code = "stream_ends"

    def __init__(self, reason: str, *, offset: int) -> None:
        super().__init__(f"stopped at offset {offset}: {reason}")
        self.offset = offset
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Frame:
    """The description of one frame."""

    offset: int
    """Offset of its length field in the stream, in bytes."""
    size: int
    """Size in bytes, with the length field."""
    protocol: int
    direction: str
    """`request` or `response`."""
    operation: str
    facts: dict[str, Any] = field(default_factory=dict)
    """Ids, flags and status, in the order in which they are printed."""
    bodies: tuple[EntryFacts, ...] = ()
    is_damaged: bool = False
    """A digest is wrong."""

    def line(self) -> str:
        parts = [f"{self.offset:>10} {self.size:>8} v{self.protocol} {self.direction:<8} {self.operation}"]
        parts += [f"{name}={value}" for name, value in self.facts.items()]
        parts += [_body_words(body) for body in self.bodies]
        return " ".join(parts)

    def as_json(self) -> dict[str, Any]:
        facts = {
            "offset": self.offset,
            "size": self.size,
            "protocol": self.protocol,
            "direction": self.direction,
            "operation": self.operation,
            **self.facts,
        }
        if self.bodies:
            facts["bodies"] = [body.as_json() for body in self.bodies]
        return facts


class StreamDecoder:
    """Decode bytes to frames. No bytes may be fed after StreamEnds."""

    def __init__(
        self, *, direction: str = "auto", digesters: Sequence[Digester], frame_size_max: int = FRAME_SIZE_MAX
    ) -> None:
        assert direction in ("auto", "request", "response")
        self._direction = direction
        self._digesters = digesters
        self._cutter = FrameDecoder(frame_size_max=frame_size_max)
        self._held = bytearray()
        """Bytes not yet passed to the frame decoder, which receives a length, then a message, in separate calls."""
        self._needed = LENGTH_SIZE
        self._is_length = True
        self._offset = 0
        """Offset of the current frame."""
        self._is_v2 = False
        self._undecided: list[tuple[int, bytes]] = []

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are now complete. Raises StreamEnds after them if the next frame cannot be decoded."""
        self._held += data
        at = 0
        while len(self._held) - at >= self._needed:
            piece = bytes(self._held[at : at + self._needed])
            at += self._needed
            if self._is_length:
                try:
                    self._take_length(piece)
                except StreamEnds:
                    yield from self._decide("request")
                    raise
                continue
            (message,) = self._cutter.feed(piece)
            offset = self._offset
            self._is_length, self._needed = True, LENGTH_SIZE
            self._offset += LENGTH_SIZE + len(message)
            yield from self._decode(offset, message)
        del self._held[:at]

    def end(self) -> Iterator[Frame]:
        """Yield the frames still buffered at the end of the stream. Raises StreamEnds if a frame is incomplete."""
        yield from self._decide("request")
        found = len(self._held) + (0 if self._is_length else LENGTH_SIZE)
        if not found:
            return
        if self._is_length:
            raise StreamEnds(f"the stream ends within a frame's length, after {found} bytes of it", offset=self._offset)
        whole = LENGTH_SIZE + self._needed
        raise StreamEnds(f"the stream ends within a frame: {found} of {whole} bytes", offset=self._offset)

    def _take_length(self, piece: bytes) -> None:
        try:
            self._cutter.feed(piece)
        except BinderyError as error:
            raise StreamEnds(f"{error}. {_hint(piece, at_start=self._offset == 0)}", offset=self._offset) from error
        self._is_length, self._needed = False, int.from_bytes(piece, "big")

    def _decode(self, offset: int, message: bytes) -> Iterator[Frame]:
        if self._direction != "auto":
            yield self._frame(offset, message)
            return
        self._undecided.append((offset, message))
        direction = direction_of(message)
        if direction is not None:
            yield from self._decide(direction)
        elif len(self._undecided) == UNDECIDED_FRAMES_MAX:
            yield from self._decide("request")

    def _decide(self, direction: str) -> Iterator[Frame]:
        if self._direction == "auto":
            self._direction = direction
        undecided, self._undecided = self._undecided, []
        for offset, message in undecided:
            yield self._frame(offset, message)

    def _frame(self, offset: int, message: bytes) -> Frame:
        is_request = self._direction == "request"
        if not self._is_v2:
            try:
                found = v3.decode_request(message) if is_request else v3.decode_response(message)
            except BadRequest as error:
                if message[0] == _PROTOBUF_START:  # not version 2 either: a bookie would close the connection
                    raise self._unreadable(offset, message, f"version 3: {error}") from error
                self._is_v2 = True
            else:
                return describe(found, offset=offset, message=message, protocol=3, digesters=self._digesters)
        try:
            found = v2.decode_request(message) if is_request else v2.decode_response(message)
        except BadRequest as error:
            raise self._unreadable(offset, message, f"version 2: {error}") from error
        return describe(found, offset=offset, message=message, protocol=2, digesters=self._digesters)

    def _unreadable(self, offset: int, message: bytes, reason: str) -> StreamEnds:
        return StreamEnds(
            f"a frame of {LENGTH_SIZE + len(message)} bytes is no {self._direction} of {reason}; it begins with "
            f"{message[:16].hex()}. If the stream has the other direction, pass --direction",
            offset=offset,
        )


def _hint(piece: bytes, *, at_start: bool) -> str:
    """Return what the stream may contain where `piece` is not a valid length."""
    if piece[:2] in _TLS_RECORDS:
        return "This is a TLS record: from here on the stream is encrypted"
    if at_start and piece in _CAPTURE_FILES:
        return "This is a packet capture: write out one direction of the TCP stream alone, and decode that"
    if at_start and all(byte in b"0123456789abcdefABCDEF \t\r\n:" for byte in piece):
        return "This may be hex text: --hex reads it"
    return "Damage in front of it, or a capture that does not begin at a frame"


def direction_of(message: bytes) -> str | None:
    """Return `request` or `response`; None if the message may be either."""
    if message[0] == _PROTOBUF_START:
        try:
            v3.decode_response(message)
        except BadRequest:
            return "request"
        return "response"  # only a response has a status in front of its fields
    return _direction_of_v2(message)


def _direction_of_v2(message: bytes) -> str | None:
    """Detect the direction by size: a response has 24 bytes and an entry; a request has ids, perhaps a master key."""
    size = len(message)
    if size < 4:
        return "request"
    opcode = message[1] if message[0] else message[3]
    flags = int.from_bytes(message[2:4], "big") if message[0] else 0
    if opcode == v2.ADD:
        return "response" if size == v2.BODY_OFFSET else "request"
    if opcode == v2.READ:
        return "request" if size == 20 or flags else "response"
    if opcode == v2.BATCH_READ:
        return "request" if size == 40 or flags else "response"
    return None if opcode == v2.AUTH else "request"


# --- descriptions -----------------------------------------------------------------------------------------------------


def describe(
    found: Request | Response, *, offset: int, message: bytes, protocol: int, digesters: Sequence[Digester]
) -> Frame:
    """Return the description of one decoded frame."""
    direction = "response" if isinstance(found, Response) else "request"
    facts: dict[str, Any] = {}
    if protocol == 3:
        facts["txn_id"] = found.txn_id
    elif found.txn_id != v2.VERSION:
        facts["version"] = found.txn_id
    if isinstance(found, OtherRequest | ErrorResponse):
        operation = _operation_name(found.operation)
    else:
        operation = OPERATION_OF[type(found)].name
    for name in ("ledger_id", "entry_id", "lac", "request_id", "count_max", "size_max"):
        value = getattr(found, name, None)
        if value is not None:
            facts[name] = value
    facts |= _request_facts(found) if direction == "request" else _response_facts(found)
    bodies = _bodies(found, digesters)
    is_damaged = any(body.digest is None or body.digest.verdict == WRONG for body in bodies)
    packet = found.body if isinstance(found, WriteLacRequest) else getattr(found, "lac_body", None)
    if packet is not None:
        lac_facts, is_lac_damaged = _lac_facts(packet, digesters)
        facts |= lac_facts
        is_damaged |= is_lac_damaged
    return Frame(offset, 4 + len(message), protocol, direction, operation, facts, bodies, is_damaged)


def _request_facts(found: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if isinstance(found, OtherRequest):
        facts["not_served"] = True
        facts["version"] = found.version
    flags = []
    if isinstance(found, AddRequest):
        flags += ["RECOVERY_ADD"] if found.recovery else []
        flags += ["DEFERRED_SYNC"] if found.write_flags & 1 else []
        if found.write_flags & ~1:
            flags.append(f"write_flags:{found.write_flags:#x}")
    if isinstance(found, ReadRequest | BatchReadRequest) and found.flag:
        flags.append(ReadFlag(found.flag).name if found.flag in set(ReadFlag) else str(found.flag))
    if flags:
        facts["flags"] = "|".join(flags)
    if getattr(found, "priority", 0):
        facts["priority"] = found.priority
    key = getattr(found, "master_key", None)
    if key is not None:
        facts["master_key"] = f"{key[:KEY_BYTES_SHOWN].hex()}..({len(key)} bytes)" if key else "empty"
    for name in ("previous_lac", "timeout_ms"):
        value = getattr(found, name, None)
        if value is not None:
            facts[name] = value
    if isinstance(found, BookieInfoRequest):
        facts["requested"] = found.requested
    return facts | _auth_facts(found)


def _response_facts(found: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"status": _status_name(found.status)}
    for name in ("max_lac", "lac_update_timestamp_ms", "total_disk_capacity", "free_disk_space"):
        value = getattr(found, name, None)
        if value is not None:
            facts[name] = value
    if isinstance(found, BatchReadResponse):
        facts["entries"] = len(found.bodies)
    if isinstance(found, ListEntriesResponse) and found.availability is not None:
        facts["available"] = _availability_words(found.availability)
    return facts | _auth_facts(found)


def _auth_facts(found: Any) -> dict[str, Any]:
    if not isinstance(found, AuthRequest | AuthResponse):
        return {}
    name: str | bytes = found.plugin  # protobuf returns a name that is not UTF-8 as bytes
    return {"plugin": escaped(name if isinstance(name, bytes) else name.encode()), "payload_size": len(found.payload)}


def _availability_words(packed: bytes) -> str:
    try:
        runs = decode_availability(packed)
    except BinderyError as error:
        return f"unreadable:{error.code}"
    words = [str(start) if count == 1 else f"{start}-{start + count - 1}" for start, count in runs[:_RUNS_SHOWN]]
    more = f",..{len(runs) - _RUNS_SHOWN} more runs" if len(runs) > _RUNS_SHOWN else ""
    return ",".join(words) + more or "none"


def _lac_facts(packet: bytes, digesters: Sequence[Digester]) -> tuple[dict[str, Any], bool]:
    found = examine_lac(packet, digesters)
    if found is None:
        return {"lac_packet": f"cut off after {len(packet)} bytes"}, True
    ledger_id, lac, digest = found
    facts = {"lac_packet": f"ledger_id={ledger_id},lac={lac}", "lac_digest": "cut off"}
    if digest is not None:
        facts["lac_digest"] = f"{digest.digest_type}:{digest.verdict}".removeprefix(":")
    return facts, digest is None or digest.verdict == WRONG


def _bodies(found: Any, digesters: Sequence[Digester]) -> tuple[EntryFacts, ...]:
    frames: Sequence[bytes] = ()
    match found:
        case AddRequest():
            frames = (found.body,)
        case ReadResponse() if found.body is not None:
            frames = (found.body,)
        case ReadLacResponse() if found.last_entry_body is not None:
            frames = (found.last_entry_body,)
        case BatchReadResponse():
            frames = found.bodies
    return tuple(examine(frame, digesters) for frame in frames)


def _body_words(body: EntryFacts) -> str:
    if body.header is None:
        return f"[body of {len(body.payload)} bytes, too short for a header]"
    header = body.header
    ids = f"ledger_id={header.ledger_id} entry_id={header.entry_id} lac={header.lac} length={header.length}"
    return f"[{ids} digest: {body.digest or 'cut off'}; payload {len(body.payload)} bytes]"


def _status_name(status: int) -> str:
    return Status(status).name if status in set(Status) else str(status)


def _operation_name(operation: int) -> str:
    return Operation(operation).name if operation in set(Operation) else str(operation)
