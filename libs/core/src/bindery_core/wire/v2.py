"""Protocol version 2: fixed layouts, one packet per frame, as the structs of `messages`.

Integers are big-endian; offsets follow the frame's length word.

Header, u32: version << 24 | opcode << 16 | flags. With version 0 the lowest byte of the word is the opcode, and there
are no flags (the oldest clients sent just a number). Responses repeat version and opcode, their flags are 0.

| opcode | packet     | request, after the header                                                             | size   |
|-------:|------------|---------------------------------------------------------------------------------------|-------:|
|      1 | ADD        | master key (20), entry frame: its own first 16 bytes are the ids                      | 40 + n |
|      2 | READ       | ledger_id i64, entry_id i64 [, master key (20)]                                       | 20, 40 |
|      3 | AUTH       | AuthMessage (bookkeeper.proto)                                                        |  4 + n |
|      7 | BATCH_READ | ledger_id i64, entry_id i64, request_id i64, count_max i32, size_max i64 [, key (20)] | 40, 60 |

| opcode | response, after the header                                                             | size         |
|-------:|----------------------------------------------------------------------------------------|-------------:|
|   1, 2 | rc i32, ledger_id i64, entry_id i64 [, entry frame]; entry_id is that of the request   | 24, 24 + n   |
|      3 | AuthMessage; there is no rc                                                            | 4 + n        |
|      7 | rc i32, ledger_id i64, entry_id i64, request_id i64, then (size i32, entry frame)...   | 32 + 4k + n  |

| flag          | value | of   | effect                                                                                |
|---------------|------:|------|---------------------------------------------------------------------------------------|
| FENCE         |     1 | READ | fence first; from version 2 on, the master key follows                                |
| RECOVERY      |     2 | ADD  | accepted by a fenced ledger                                                           |
| HIGH_PRIORITY |     4 | all  | served before others; a read-only bookie may accept such an ADD                       |

How a bookie decodes requests that it cannot serve (source: BookKeeper's decoder, observed on 4.17):
- a version outside 0 .. 2: OtherRequest; the response is BAD_VERSION and repeats that version byte;
- another opcode, including 4 .. 6, or a packet too short for its opcode: BadRequest, and the connection is closed;
- bytes after a packet and unknown flags are ignored.

There are no transaction ids: a response is matched by opcode and ids (`key_of`), a batch read by its request_id.
Source: BookieProtocol, BookieProtoEncoding.
"""

import struct
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from bindery_core.digest import MASTER_KEY_SIZE
from bindery_core.errors import BadRequest
from bindery_core.wire.auth_name import plugin_name
from bindery_core.wire.messages import (
    AddRequest,
    AddResponse,
    AuthRequest,
    AuthResponse,
    BatchReadRequest,
    BatchReadResponse,
    Operation,
    OtherRequest,
    ReadFlag,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    Status,
)
from bindery_core.wire.status import of_v2, v2_answer

VERSION: Final = 2
VERSION_MAX: Final = 2
"""Greatest version byte that this module serves."""

ADD: Final = 1
READ: Final = 2
AUTH: Final = 3
BATCH_READ: Final = 7

FLAG_FENCE: Final = 1
FLAG_RECOVERY: Final = 2
FLAG_HIGH_PRIORITY: Final = 4

HIGH_PRIORITY_ON: Final = 1
"""Priority of a request with FLAG_HIGH_PRIORITY; any number above 0 is high."""

_LENGTH = struct.Struct(">i")
_HEADER = struct.Struct(">I")
_ADD = struct.Struct(f">I{MASTER_KEY_SIZE}sqq")
_READ = struct.Struct(">Iqq")
_BATCH_READ = struct.Struct(">Iqqqiq")
_ANSWER = struct.Struct(">Iiqq")
_BATCH_ANSWER = struct.Struct(">Iiqqq")
_FRAMED_ANSWER = struct.Struct(">iIiqq")
_FRAMED_BATCH_ANSWER = struct.Struct(">iIiqqq")

BODY_OFFSET: Final = 24
"""Offset of the entry frame in an ADD and in the response to a READ."""
BATCH_OVERHEAD: Final = 24 + 8 + 4
"""Bytes of a batch beside its entries, as the size limit of a batch counts them.

24 bytes of a response without request id, 8 of the request id, and 4 of the frame length, which BookKeeper counts too
although the packet does not contain it.
"""
BATCH_ENTRY_OVERHEAD: Final = 4
"""Bytes of the size word of each entry in a batch."""

assert _HEADER.size + MASTER_KEY_SIZE == BODY_OFFSET == _ANSWER.size
assert _ADD.size == 40
assert _READ.size == 20
assert _BATCH_READ.size == 40
assert _BATCH_ANSWER.size == 32

_OPERATION_OF: Final = {ADD: Operation.ADD_ENTRY, READ: Operation.READ_ENTRY, BATCH_READ: Operation.BATCH_READ_ENTRY}


def header(opcode: int, *, version: int = VERSION, flags: int = 0) -> int:
    """Return the first word of a packet. `version`: 0 .. 255, the byte in the packet."""
    return version << 24 | opcode << 16 | flags if version else opcode


_ADD_WORDS: Final = tuple(header(ADD, version=version) for version in range(VERSION_MAX + 1))


# --- requests: a bookie's side ----------------------------------------------------------------------------------------


def decode_request(message: bytes) -> Request:
    """Decode one request; its `txn_id` is the version byte. Raises BadRequest if the connection must be closed."""
    try:
        (word,) = _HEADER.unpack_from(message)
        version = word >> 24
        if version:
            opcode = word >> 16 & 0xFF
            flags = word & 0xFFFF
        else:
            opcode = word & 0xFF
            flags = 0
        if opcode == ADD:
            _, key, ledger_id, entry_id = _ADD.unpack_from(message)
            if version > VERSION_MAX:
                return _of_bad_version(version, opcode, ledger_id, entry_id)
            priority = HIGH_PRIORITY_ON if flags & FLAG_HIGH_PRIORITY else 0
            return AddRequest(
                version, ledger_id, entry_id, key, message[BODY_OFFSET:], bool(flags & FLAG_RECOVERY), 0, priority
            )
        if opcode == READ:
            _, ledger_id, entry_id = _READ.unpack_from(message)
            if not flags and version <= VERSION_MAX:
                return ReadRequest(version, ledger_id, entry_id)
            flag, key, priority = _read_flags(message, flags, version, _READ.size)
            if version > VERSION_MAX:
                return _of_bad_version(version, opcode, ledger_id, entry_id)
            return ReadRequest(version, ledger_id, entry_id, flag, key, priority=priority)
        if opcode == BATCH_READ:
            _, ledger_id, entry_id, request_id, count_max, size_max = _BATCH_READ.unpack_from(message)
            flag, key, priority = _read_flags(message, flags, version, _BATCH_READ.size)
            if version > VERSION_MAX:
                return _of_bad_version(version, opcode, ledger_id, entry_id, request_id)
            return BatchReadRequest(version, ledger_id, entry_id, request_id, count_max, size_max, flag, key, priority)
    except struct.error as error:
        raise BadRequest("packet is too short for its opcode", size=len(message)) from error
    if opcode == AUTH:
        plugin, payload = _decode_auth(message)
        return AuthRequest(version, plugin, payload)
    raise BadRequest("unknown opcode of protocol version 2", opcode=opcode, version=version)


def decode_requests(messages: Sequence[bytes]) -> list[Request]:
    """Decode many requests, in order. Raises BadRequest at the first unreadable one."""
    return [decode_request(message) for message in messages]


def _read_flags(message: bytes, flags: int, version: int, key_offset: int) -> tuple[int, bytes | None, int]:
    """Return (ReadFlag, master key, priority). Raises struct.error if the key is truncated."""
    flag, key = int(ReadFlag.NONE), None
    if flags & FLAG_FENCE:
        flag = int(ReadFlag.FENCE_LEDGER)
        if VERSION <= version < 0x80:  # BookKeeper compares a signed byte
            key = message[key_offset : key_offset + MASTER_KEY_SIZE]
            if len(key) < MASTER_KEY_SIZE:
                raise struct.error("master key is cut off")
    return flag, key, HIGH_PRIORITY_ON if flags & FLAG_HIGH_PRIORITY else 0


def _of_bad_version(version: int, opcode: int, ledger_id: int, entry_id: int, request_id: int = 0) -> OtherRequest:
    return OtherRequest(version, _OPERATION_OF[opcode], version, ledger_id, entry_id, request_id)


def encode_response(response: Response) -> bytes:
    """Return the frame of one response, length included; `txn_id` is the version byte to repeat."""
    match response:
        case ReadResponse() | BatchReadResponse():
            return b"".join(_parts(response))
        case AddResponse():
            return _FRAMED_ANSWER.pack(
                _ANSWER.size,
                header(ADD, version=response.txn_id),
                v2_answer(response.status),
                response.ledger_id,
                response.entry_id,
            )
        case AuthResponse():
            return _auth_frame(response.txn_id, response.plugin, response.payload)
    raise AssertionError(f"version 2 has no such response: {type(response).__name__}")


def encode_responses(responses: Iterable[Response]) -> bytes:
    """Return the frames of many responses, joined, each body copied once."""
    parts: list[bytes] = []
    for response in responses:
        if type(response) is ReadResponse or type(response) is BatchReadResponse:
            parts += _parts(response)
        else:
            parts.append(encode_response(response))
    return b"".join(parts)


def encode_read_responses(responses: Sequence[ReadResponse]) -> bytes:
    """Return the responses to a group of reads, joined, each body copied once."""
    return encode_responses(responses)


def encode_add_responses(requests: Sequence[AddRequest], statuses: Sequence[int]) -> bytes:
    """Return the responses to a group of adds, joined. The ids are those of the requests."""
    pack = _FRAMED_ANSWER.pack
    size = _ANSWER.size
    words = _ADD_WORDS
    return b"".join(
        [
            pack(size, words[add.txn_id], v2_answer(status) if status else 0, add.ledger_id, add.entry_id)
            for add, status in zip(requests, statuses, strict=True)
        ]
    )


def _parts(response: ReadResponse | BatchReadResponse) -> list[bytes]:
    """Return the pieces of the frame; bodies are not copied."""
    version, rc = response.txn_id, v2_answer(response.status)
    if isinstance(response, ReadResponse):
        body = response.body if rc == 0 and response.body is not None else b""
        word = header(READ, version=version)
        return [_FRAMED_ANSWER.pack(_ANSWER.size + len(body), word, rc, response.ledger_id, response.entry_id), body]
    bodies = response.bodies if rc == 0 else ()
    size = _BATCH_ANSWER.size + sum(map(len, bodies)) + BATCH_ENTRY_OVERHEAD * len(bodies)
    word = header(BATCH_READ, version=version)
    parts = [_FRAMED_BATCH_ANSWER.pack(size, word, rc, response.ledger_id, response.entry_id, response.request_id)]
    for body in bodies:
        parts += (_LENGTH.pack(len(body)), body)
    return parts


# --- requests: a client's side ----------------------------------------------------------------------------------------


def encode_request(request: Request) -> bytes:
    """Return the frame of one request, length included, in version 2. Master keys must have 20 bytes."""
    return b"".join(_request_parts(request))


def encode_requests(requests: Iterable[Request]) -> bytes:
    """Return the frames of many requests, joined, each body copied once."""
    parts: list[bytes] = []
    for request in requests:
        parts += _request_parts(request)
    return b"".join(parts)


def _request_parts(request: Request) -> tuple[bytes, ...]:
    flags = FLAG_HIGH_PRIORITY if getattr(request, "priority", 0) else 0
    match request:
        case AddRequest():
            assert len(request.master_key) == MASTER_KEY_SIZE
            assert not request.write_flags, "version 2 has no deferred sync"
            if request.recovery:
                flags |= FLAG_RECOVERY
            head = _HEADER.pack(header(ADD, flags=flags)) + request.master_key
            return _LENGTH.pack(len(head) + len(request.body)), head, request.body
        case ReadRequest():
            assert request.previous_lac is None, "version 2 has no long poll"
            flags, key = _fence_flags(flags, request.flag, request.master_key)
            packet = _READ.pack(header(READ, flags=flags), request.ledger_id, request.entry_id)
            return _LENGTH.pack(len(packet) + len(key)), packet, key
        case BatchReadRequest():
            flags, key = _fence_flags(flags, request.flag, request.master_key)
            packet = _BATCH_READ.pack(
                header(BATCH_READ, flags=flags),
                request.ledger_id,
                request.entry_id,
                request.request_id,
                request.count_max,
                request.size_max,
            )
            return _LENGTH.pack(len(packet) + len(key)), packet, key
        case AuthRequest():
            return (_auth_frame(VERSION, request.plugin, request.payload),)
    raise AssertionError(f"version 2 has no such request: {type(request).__name__}")


def _fence_flags(flags: int, flag: int, master_key: bytes | None) -> tuple[int, bytes]:
    if flag != ReadFlag.FENCE_LEDGER:
        return flags, b""
    assert master_key is not None
    assert len(master_key) == MASTER_KEY_SIZE
    return flags | FLAG_FENCE, master_key


def decode_response(message: bytes) -> Response:
    """Decode one response; its `txn_id` is the version byte. Raises BadRequest if it is unreadable."""
    try:
        (word,) = _HEADER.unpack_from(message)
        version = word >> 24
        opcode = word >> 16 & 0xFF if version else word & 0xFF
        if opcode == ADD:
            _, rc, ledger_id, entry_id = _ANSWER.unpack_from(message)
            return AddResponse(version, of_v2(rc) if rc else 0, ledger_id, entry_id)
        if opcode == READ:
            _, rc, ledger_id, entry_id = _ANSWER.unpack_from(message)
            if rc:
                return ReadResponse(version, of_v2(rc), ledger_id, entry_id)
            return ReadResponse(version, int(Status.OK), ledger_id, entry_id, message[BODY_OFFSET:])
        if opcode == BATCH_READ:
            _, rc, ledger_id, entry_id, request_id = _BATCH_ANSWER.unpack_from(message)
            bodies = () if rc else _decode_bodies(message)
            return BatchReadResponse(version, of_v2(rc), ledger_id, entry_id, request_id, bodies)
    except struct.error as error:
        raise BadRequest("response is too short for its opcode", size=len(message)) from error
    if opcode == AUTH:
        plugin, payload = _decode_auth(message)
        return AuthResponse(version, int(Status.OK), plugin, payload)
    raise BadRequest("unknown opcode of protocol version 2", opcode=opcode, version=version)


def decode_responses(messages: Sequence[bytes]) -> list[Response]:
    """Decode many responses, in order. Raises BadRequest at the first unreadable one."""
    return [decode_response(message) for message in messages]


def _decode_bodies(message: bytes) -> tuple[bytes, ...]:
    bodies = []
    at = _BATCH_ANSWER.size
    while at < len(message):
        (size,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        if size < 0 or at + size > len(message):
            raise BadRequest("entry of a batch is cut off", size=size, found=len(message) - at)
        bodies.append(message[at : at + size])
        at += size
    return tuple(bodies)


def key_of(message: Request | Response) -> Hashable:
    """Return the key that a request and its response share. Equal requests in flight have the same key."""
    match message:
        case AddRequest() | AddResponse():
            return (ADD, message.ledger_id, message.entry_id)
        case ReadRequest() | ReadResponse():
            return (READ, message.ledger_id, message.entry_id)
        case BatchReadRequest() | BatchReadResponse():
            return (BATCH_READ, message.request_id)
        case AuthRequest() | AuthResponse():
            return (AUTH,)
    raise AssertionError(f"not a message of version 2: {type(message).__name__}")


# --- AUTH -------------------------------------------------------------------------------------------------------------
# AUTH uses protobuf, which is imported when needed, because the import would take a sixth of a bookie's start time.


def _auth_frame(version: int, plugin: str, payload: bytes) -> bytes:
    from bindery_core.wire import bookkeeper_pb2 as pb

    message = pb.AuthMessage(plugin=plugin, payload=payload).SerializeToString()
    return _LENGTH.pack(_HEADER.size + len(message)) + _HEADER.pack(header(AUTH, version=version)) + message


def _decode_auth(message: bytes) -> tuple[str, bytes]:
    from google.protobuf.message import DecodeError

    from bindery_core.wire import bookkeeper_pb2 as pb

    try:
        auth = pb.AuthMessage.FromString(message[_HEADER.size :])
        if auth.IsInitialized():
            return plugin_name(auth.plugin), auth.payload
    except DecodeError as error:
        raise BadRequest("not an authentication message", size=len(message)) from error
    raise BadRequest("a required field of the authentication message is missing", size=len(message))
