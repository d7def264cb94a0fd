"""Hand-written coding of the frames that make up nearly all traffic: adds and plain reads, and their responses.

An encoder writes the bytes that the generated code would write. A decoder accepts exactly the shape that clients send
(each field once, ascending, no unknown field) and returns None for anything else, valid or not, so that `v3` passes the
frame to the generated code: unusual frames are decoded in one place only. Tests compare both on random messages.

Layout of every message: field 1 header {1: version = 3, 2: operation, 3: txn id[, 4: priority]}; in a response field
2: status; then one sub-message, whose field number is 100 (read) or 101 (add). Tags are field << 3 | wire type.
"""

import struct
from collections.abc import Sequence

from bindery_core.varint import ONE_BYTE, NotAVarint, decode, to_signed
from bindery_core.varint import encode as varint
from bindery_core.wire.messages import AddRequest, AddResponse, ReadRequest, ReadResponse

_LENGTH = struct.Struct(">i")

# Header of an operation up to and including the tag of the transaction id; the header's tag and size precede it.
_HEADER_START = b"\x08\x03\x10"
_READ = 1
_ADD = 2
_READ_HEADER = b"\x08\x03\x10\x01\x18"
_ADD_HEADER = b"\x08\x03\x10\x02\x18"
_PRIORITY_TAG = 0x20
_READ_TAG = b"\xa2\x06"  # field 100, length-delimited
_ADD_TAG = b"\xaa\x06"  # field 101, length-delimited
_FLAG_TAG = b"\xa0\x06"  # field 100 of the sub-message, varint
_RECOVERY = _FLAG_TAG + b"\x01"
_STATUS_OK_THEN_ADD = b"\x10\x00" + _ADD_TAG
_STATUS_OK_THEN_READ = b"\x10\x00" + _READ_TAG
_MORE = tuple(bytes((value | 0x80,)) for value in range(128))
"""Varint bytes for each value of seven bits, if another byte follows."""

# --- requests -------------------------------------------------------------------------------------------------------


def add_request_parts(request: AddRequest) -> tuple[bytes, ...]:
    """Return the pieces of the frame, length included; the body is not copied, so that a batch is copied once."""
    txn = varint(request.txn_id)
    priority = b"\x20" + varint(request.priority) if request.priority else b""
    key = request.master_key
    body = request.body
    head = b"".join(
        (b"\x08", varint(request.ledger_id), b"\x10", varint(request.entry_id), b"\x1a", varint(len(key)), key,
         b"\x22", varint(len(body)))
    )  # fmt: skip
    tail = b"\x28" + varint(request.write_flags) if request.write_flags else b""
    if request.recovery:
        tail += _RECOVERY
    sub_size = varint(len(head) + len(body) + len(tail))
    header_size = 5 + len(txn) + len(priority)
    size = 2 + header_size + 2 + len(sub_size) + len(head) + len(body) + len(tail)
    return (
        _LENGTH.pack(size), b"\x0a", ONE_BYTE[header_size], _ADD_HEADER, txn, priority, _ADD_TAG, sub_size, head, body,
        tail,
    )  # fmt: skip


def encode_read_request(request: ReadRequest) -> bytes:
    """Return the frame, length included."""
    txn = varint(request.txn_id)
    priority = b"\x20" + varint(request.priority) if request.priority else b""
    sub = b"\x08" + varint(request.ledger_id) + b"\x10" + varint(request.entry_id)
    if request.master_key is not None:
        sub += b"\x1a" + varint(len(request.master_key)) + request.master_key
    if request.previous_lac is not None:
        sub += b"\x20" + varint(request.previous_lac)
    if request.timeout_ms is not None:
        sub += b"\x28" + varint(request.timeout_ms)
    if request.flag:
        sub += _FLAG_TAG + varint(request.flag)
    sub_size = varint(len(sub))
    header_size = 5 + len(txn) + len(priority)
    return b"".join(
        (_LENGTH.pack(2 + header_size + 2 + len(sub_size) + len(sub)), b"\x0a", ONE_BYTE[header_size], _READ_HEADER,
         txn, priority, _READ_TAG, sub_size, sub)
    )  # fmt: skip


def decode_request(message: bytes) -> AddRequest | ReadRequest | None:
    """Decode an add or a plain read of the usual shape; None for everything else."""
    try:
        if message[0] != 0x0A or message[2:5] != _HEADER_START or message[6] != 0x18:
            return None
        operation = message[5]
        txn_id, at = decode(message, 7)
        priority = 0
        if at != 2 + message[1]:
            if message[at] != _PRIORITY_TAG:
                return None
            priority = message[at + 1]
            at += 2
            if at != 2 + message[1] or priority > 0x7F:
                return None
        if operation == _ADD:
            return _decode_add(message, at, txn_id, priority)
        if operation == _READ:
            return _decode_read(message, at, txn_id, priority)
    except (IndexError, NotAVarint):
        pass
    return None


def _decode_add(message: bytes, at: int, txn_id: int, priority: int) -> AddRequest | None:
    if message[at] != 0xAA or message[at + 1] != 0x06:
        return None
    sub_size, at = decode(message, at + 2)
    end = at + sub_size
    if end != len(message) or message[at] != 0x08:
        return None
    ledger_id = message[at + 1]
    at += 2
    if ledger_id > 0x7F:
        ledger_id, at = decode(message, at - 1)
    if message[at] != 0x10:
        return None
    entry_id = message[at + 1]
    at += 2
    if entry_id > 0x7F:
        entry_id, at = decode(message, at - 1)
    if message[at] != 0x1A:
        return None
    key_size = message[at + 1]
    if key_size > 0x7F:
        return None
    key_at = at + 2
    at = key_at + key_size
    if message[at] != 0x22:
        return None
    body_size, body_at = decode(message, at + 1)
    at = body_at + body_size
    recovery = False
    if at != end:
        if message[at:] != _RECOVERY:
            return None
        recovery = True
    if ledger_id > 0x7FFF_FFFF_FFFF_FFFF or entry_id > 0x7FFF_FFFF_FFFF_FFFF:
        return None
    return AddRequest(
        txn_id, ledger_id, entry_id, message[key_at : key_at + key_size], message[body_at:at], recovery, 0, priority
    )


def _decode_read(message: bytes, at: int, txn_id: int, priority: int) -> ReadRequest | None:
    if message[at] != 0xA2 or message[at + 1] != 0x06:
        return None
    sub_size, at = decode(message, at + 2)
    end = at + sub_size
    if end != len(message) or message[at] != 0x08:
        return None
    ledger_id, at = decode(message, at + 1)
    if message[at] != 0x10:
        return None
    entry_id, at = decode(message, at + 1)
    if at != end:
        return None
    return ReadRequest(txn_id, to_signed(ledger_id), to_signed(entry_id), priority=priority)


class _Pattern:
    """The bytes of one usual request as a template with two variable bytes.

    The variable bytes are the lowest byte of the transaction id and that of the entry id. Up to 128 consecutive
    requests about one ledger from one client differ only in these two bytes and in an add's body. If all other bytes
    of a message equal the template, the generated code would decode it in the same way, because these bytes include
    every tag and every size.
    """

    __slots__ = ("entry_base", "ledger_id", "shown", "size", "txn_base", "unpack")

    def __init__(self, message: bytes, request: AddRequest | ReadRequest, *, entry_at: int, body_at: int) -> None:
        """`message`: the bytes that were decoded to `request`.

        `entry_at`, `body_at`: offsets of its entry id and of its body, which is the last field.
        """
        assert request.txn_id >= 0x80
        assert request.entry_id >= 0x80
        unpack = struct.Struct(f"7sB{entry_at - 8}sB{body_at - entry_at - 1}s").unpack_from
        head, _, middle, _, tail = unpack(message)
        self.unpack = unpack
        self.shown = (head, middle, tail)
        self.size = len(message)
        self.txn_base = request.txn_id & ~0x7F
        self.entry_base = request.entry_id & ~0x7F
        self.ledger_id = request.ledger_id


class AddPattern(_Pattern):
    """A pattern of adds."""

    __slots__ = ("body_at", "key")

    def __init__(self, message: bytes, request: AddRequest) -> None:
        """See `pattern_of`."""
        self.body_at = len(message) - len(request.body)
        self.key = request.master_key
        entry_size = len(varint(request.entry_id))
        entry_at = self.body_at - len(varint(len(request.body))) - len(request.master_key) - 3 - entry_size
        super().__init__(message, request, entry_at=entry_at, body_at=self.body_at)

    def decode(self, message: bytes) -> AddRequest | None:
        """Decode the message; None if it does not match."""
        if len(message) != self.size:
            return None
        head, txn, middle, entry, tail = self.unpack(message)
        if (head, middle, tail) != self.shown or txn < 0x80 or entry < 0x80:
            return None
        return AddRequest(
            self.txn_base | txn & 0x7F,
            self.ledger_id,
            self.entry_base | entry & 0x7F,
            self.key,
            message[self.body_at :],
        )


class ReadPattern(_Pattern):
    """A pattern of plain reads, which end with the entry id."""

    __slots__ = ()

    def __init__(self, message: bytes, request: ReadRequest) -> None:
        """See `pattern_of`."""
        entry_at = len(message) - len(varint(request.entry_id))
        super().__init__(message, request, entry_at=entry_at, body_at=len(message))

    def decode(self, message: bytes) -> ReadRequest | None:
        """Decode the message; None if it does not match."""
        if len(message) != self.size:
            return None
        head, txn, middle, entry, tail = self.unpack(message)
        if (head, middle, tail) != self.shown or txn < 0x80 or entry < 0x80:
            return None
        return ReadRequest(self.txn_base | txn & 0x7F, self.ledger_id, self.entry_base | entry & 0x7F)


def pattern_of(message: bytes, request: AddRequest | ReadRequest) -> AddPattern | ReadPattern | None:
    """Return the pattern of `message`, which was decoded to `request`; None if it is unusual or too short."""
    if request.txn_id < 0x80 or request.entry_id < 0x80 or request.priority:
        return None
    if type(request) is ReadRequest:
        usual = ReadRequest(request.txn_id, request.ledger_id, request.entry_id)
        return ReadPattern(message, request) if encode_read_request(usual)[4:] == message else None
    assert type(request) is AddRequest
    if request.recovery or request.write_flags or b"".join(add_request_parts(request)[1:]) != message:
        return None
    return AddPattern(message, request)


# --- responses ------------------------------------------------------------------------------------------------------


def encode_add_responses(requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes:
    """Return the frames of the responses to a group of adds, lengths included. The ids are those of the requests.

    Consecutive ids differ in their last seven bits, so the rest of each frame is built once for up to 128 frames.
    """
    if len(requests) == 1 == len(statuses):
        request = requests[0]
        return encode_add_response(AddResponse(request.txn_id, statuses[0], request.ledger_id, request.entry_id))
    parts: list[bytes] = []
    ledger_before = -1
    shape_before = (-1, -1)
    txn_high = entry_high = -1
    txn_rest = entry_rest = start = middle = b""
    for request, status in zip(requests, statuses, strict=True):
        txn_id, ledger_id, entry_id = request.txn_id, request.ledger_id, request.entry_id
        if status or txn_id < 0x80 or entry_id < 0x80:
            parts.append(encode_add_response(AddResponse(txn_id, status, ledger_id, entry_id)))
            continue
        if txn_id >> 7 != txn_high or entry_id >> 7 != entry_high or ledger_id != ledger_before:
            if txn_id >> 7 != txn_high:
                txn_high = txn_id >> 7
                txn_rest = varint(txn_high)
            if entry_id >> 7 != entry_high:
                entry_high = entry_id >> 7
                entry_rest = varint(entry_high)
            shape = (len(txn_rest), len(entry_rest))
            if shape != shape_before or ledger_id != ledger_before:
                shape_before, ledger_before = shape, ledger_id
                ledger = varint(ledger_id)
                header_size = 6 + len(txn_rest)
                sub_size = 5 + len(ledger) + len(entry_rest)
                start = b"".join(
                    (
                        b"\x00\x00\x00",
                        ONE_BYTE[2 + header_size + 5 + sub_size],
                        b"\x0a",
                        ONE_BYTE[header_size],
                        _ADD_HEADER,
                    )
                )
                middle = b"".join((_STATUS_OK_THEN_ADD, ONE_BYTE[sub_size], b"\x08\x00\x10", ledger, b"\x18"))
        parts += (start, _MORE[txn_id & 0x7F], txn_rest, middle, _MORE[entry_id & 0x7F], entry_rest)
    return b"".join(parts)


def encode_add_response(response: AddResponse) -> bytes:
    """Return the frame, length included."""
    txn = varint(response.txn_id)
    ledger_id = varint(response.ledger_id)
    entry_id = varint(response.entry_id)
    if response.status == 0:
        sub_size = 4 + len(ledger_id) + len(entry_id)
        header_size = 5 + len(txn)
        return b"".join(
            (b"\x00\x00\x00", ONE_BYTE[2 + header_size + 5 + sub_size], b"\x0a", ONE_BYTE[header_size], _ADD_HEADER,
             txn, _STATUS_OK_THEN_ADD, ONE_BYTE[sub_size], b"\x08\x00\x10", ledger_id, b"\x18", entry_id)
        )  # fmt: skip
    status = varint(response.status)
    sub = [b"\x08", status, b"\x10", ledger_id, b"\x18", entry_id]
    return b"".join(_frame_response(_ADD_HEADER, txn, status, _ADD_TAG, sub))


def read_response_parts(response: ReadResponse) -> list[bytes]:
    """Return the pieces of the frame, length included; the body is not copied, so that a batch is copied once."""
    status = varint(response.status)
    sub = [b"\x08", status, b"\x10", varint(response.ledger_id), b"\x18", varint(response.entry_id)]
    if response.body is not None:
        sub += (b"\x22", varint(len(response.body)), response.body)
    if response.max_lac is not None:
        sub += (b"\x28", varint(response.max_lac))
    if response.lac_update_timestamp_ms is not None:
        sub += (b"\x30", varint(response.lac_update_timestamp_ms))
    return _frame_response(_READ_HEADER, varint(response.txn_id), status, _READ_TAG, sub)


def encode_read_responses(responses: Sequence[ReadResponse]) -> bytes:
    """Return the frames of the responses to a group of reads, lengths included, each body copied once.

    As for adds, the bytes that frames with consecutive ids share are built once, for each size of the body.
    """
    if len(responses) == 1:
        return b"".join(read_response_parts(responses[0]))
    parts: list[bytes] = []
    shared_before: tuple[int, int, int, int | None] | None = None
    by_size: dict[int, tuple[bytes, bytes, bytes]] = {}
    lac_tail = b""
    for response in responses:
        txn_id, entry_id, body = response.txn_id, response.entry_id, response.body
        if (
            response.status
            or body is None
            or txn_id < 0x80
            or entry_id < 0x80
            or response.lac_update_timestamp_ms is not None
        ):
            parts += read_response_parts(response)
            continue
        shared = (txn_id >> 7, entry_id >> 7, response.ledger_id, response.max_lac)
        if shared != shared_before:
            shared_before, by_size = shared, {}
            lac_tail = b"" if response.max_lac is None else b"\x28" + varint(response.max_lac)
        pieces = by_size.get(len(body))
        if pieces is None:
            pieces = by_size[len(body)] = _around_body(shared, len(body), lac_tail)
        start, middle, end = pieces
        parts += (start, _MORE[txn_id & 0x7F], middle, _MORE[entry_id & 0x7F], end, body, lac_tail)
    return b"".join(parts)


def _around_body(shared: tuple[int, int, int, int | None], size: int, lac_tail: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the bytes of a response in three parts.

    The parts end at the lowest byte of the transaction id, at the lowest byte of the entry id, and at the body of
    `size` bytes.
    """
    txn_rest, entry_rest = varint(shared[0]), varint(shared[1])
    ledger = b"".join((b"\x08\x00\x10", varint(shared[2]), b"\x18"))
    end = b"".join((entry_rest, b"\x22", varint(size)))
    sub_length = len(ledger) + 1 + len(end) + size + len(lac_tail)
    sub_size = varint(sub_length)
    header_size = 6 + len(txn_rest)
    frame_size = 2 + header_size + len(_STATUS_OK_THEN_READ) + len(sub_size) + sub_length
    start = b"".join((_LENGTH.pack(frame_size), b"\x0a", ONE_BYTE[header_size], _READ_HEADER))
    return start, b"".join((txn_rest, _STATUS_OK_THEN_READ, sub_size, ledger)), end


def _frame_response(header: bytes, txn: bytes, status: bytes, sub_tag: bytes, sub: list[bytes]) -> list[bytes]:
    header_size = len(header) + len(txn)
    sub_length = sum(map(len, sub))
    sub_size = varint(sub_length)
    size = 2 + header_size + 1 + len(status) + len(sub_tag) + len(sub_size) + sub_length
    return [
        _LENGTH.pack(size), b"\x0a", ONE_BYTE[header_size], header, txn, b"\x10", status, sub_tag, sub_size, *sub
    ]  # fmt: skip


def decode_response(message: bytes) -> AddResponse | ReadResponse | None:
    """Decode a successful add or read of the usual shape; None for everything else."""
    try:
        if message[0] != 0x0A or message[2:5] != _HEADER_START or message[6] != 0x18:
            return None
        operation = message[5]
        txn_id, at = decode(message, 7)
        if at != 2 + message[1]:
            return None
        status_and_tag = message[at : at + 4]
        sub_size, at = decode(message, at + 4)
        end = at + sub_size
        if end != len(message) or message[at : at + 3] != b"\x08\x00\x10":
            return None
        ledger_id, at = decode(message, at + 3)
        if message[at] != 0x18:
            return None
        entry_id, at = decode(message, at + 1)
        if operation == _ADD and status_and_tag == _STATUS_OK_THEN_ADD:
            if at != end:
                return None
            return AddResponse(txn_id, 0, to_signed(ledger_id), to_signed(entry_id))
        if operation != _READ or status_and_tag != _STATUS_OK_THEN_READ or message[at] != 0x22:
            return None
        body_size, body_at = decode(message, at + 1)
        at = body_at + body_size
        if at > end:
            return None
        max_lac = None
        if at != end:
            if message[at] != 0x28:
                return None
            value, body_end = decode(message, at + 1)
            if body_end != end:
                return None
            max_lac = to_signed(value)
        return ReadResponse(txn_id, 0, to_signed(ledger_id), to_signed(entry_id), message[body_at:at], max_lac)
    except (IndexError, NotAVarint):
        return None
