"""Ledger metadata as bytes: the content of `/ledgers/.../L<id>`.

| part   | bytes                                                                                                     |
|--------|-----------------------------------------------------------------------------------------------------------|
| header | ASCII "BookieMetadataFormatVersion", TAB, the version in decimal, LF                                       |
| body   | version 3: a varint with the size of what follows, then LedgerMetadataFormat (ledger_metadata.proto)       |
|        | version 2: LedgerMetadataFormat in protobuf's text format                                                  |
|        | version 1: lines (ledger_metadata_v1.py)                                                                   |

BookKeeper has written version 3 since 4.9, and we write it for new ledgers. An update keeps the version that a ledger
has, so that the clients that wrote it can still read it.

Bytes after the message of version 3 are ignored. These fields are written, in the order of their numbers:
- quorumSize, ensembleSize, length, lastEntryId, state, segments and ackQuorumSize always; unless CLOSED, length is 0
  and lastEntryId is -1, and readers ignore both;
- digestType and password together, or neither (metadata of very old clients); a password alone means CRC32;
- ctime only if it was stored: a time taken from the znode is not written back;
- cToken always, 0 when unset; never in version 2.

Source: BookKeeper LedgerMetadataSerDe.
"""

from typing import Final

from google.protobuf import text_format
from google.protobuf.message import DecodeError

from bindery_core import varint
from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats import ledger_metadata_pb2 as pb
from bindery_core.formats import ledger_metadata_v1
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId

_MAGIC: Final = b"BookieMetadataFormatVersion\t"
_VERSION_SIZE_MAX = 10
"""Maximum digits of the version."""
FORMAT_VERSION: Final = 3
"""Format version of new ledgers."""
FORMAT_VERSION_MIN: Final = 1
"""Oldest format version that is supported."""
HEADER: Final = b"%b%d\n" % (_MAGIC, FORMAT_VERSION)
"""Header of metadata in FORMAT_VERSION."""

assert len(HEADER) == 30


def encode(metadata: LedgerMetadata) -> bytes:
    """Encode `metadata` in its own format version.

    Raises BadVersion for an unknown version, and for metadata that its version cannot express: version 1 has neither
    password nor digest type, ack quorum, creation time or custom metadata.
    """
    closed = metadata.state is LedgerState.CLOSED
    assert closed or (metadata.last_entry_id == -1 and metadata.length == 0)
    assert (metadata.digest_type is None) == (metadata.password is None)
    header = b"%b%d\n" % (_MAGIC, metadata.format_version)
    match metadata.format_version:
        case 3:
            message = _to_message(metadata)
            message.cToken = metadata.c_token or 0
            body = message.SerializeToString()
            return b"".join((header, varint.encode(len(body)), body))
        case 2:
            return header + text_format.MessageToString(_to_message(metadata)).encode()
        case 1:
            return header + ledger_metadata_v1.encode(metadata)
    raise BadVersion("ledger metadata of this version cannot be encoded", version=metadata.format_version)


def decode(data: bytes) -> LedgerMetadata:
    """Decode metadata that `encode` or BookKeeper wrote, in any version.

    Raises BadVersion for versions other than 1 to 3. Raises Corrupt, with the reason, for bytes that are not metadata
    or contradict themselves, because partly understood metadata must not be used.
    """
    version, at = _decode_header(data)
    match version:
        case 3:
            return _from_message(_parse_binary(data, at), version)
        case 2:
            return _from_message(_parse_text(data, at), version)
        case 1:
            return _from_v1(ledger_metadata_v1.decode(data[at:]))
    raise BadVersion("unsupported version of ledger metadata", version=version)


def _parse_binary(data: bytes, at: int) -> pb.LedgerMetadataFormat:
    try:
        size, at = varint.decode(data, at)
    except varint.NotAVarint:
        raise Corrupt("the size of the ledger metadata is missing", data_size=len(data)) from None
    if at + size > len(data):
        raise Corrupt("ledger metadata is cut off", size=size, found=len(data) - at)
    try:
        message = pb.LedgerMetadataFormat.FromString(data[at : at + size])
    except DecodeError as error:
        raise Corrupt("ledger metadata cannot be decoded", size=size) from error
    if not message.IsInitialized():
        raise Corrupt("a required field of the ledger metadata is missing")
    return message


def _parse_text(data: bytes, at: int) -> pb.LedgerMetadataFormat:
    """Unknown fields are ignored, as in the binary form."""
    message = pb.LedgerMetadataFormat()
    try:
        text_format.Parse(data[at:].decode(), message, allow_unknown_field=True)
    except (text_format.ParseError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Corrupt("ledger metadata cannot be decoded as text", size=len(data) - at) from error
    if not message.IsInitialized():
        raise Corrupt("a required field of the ledger metadata is missing")
    return message


def _to_message(metadata: LedgerMetadata) -> pb.LedgerMetadataFormat:
    """Return the message without the cToken."""
    message = pb.LedgerMetadataFormat()
    message.quorumSize = metadata.write_quorum
    message.ensembleSize = metadata.ensemble_size
    message.length = metadata.length
    message.lastEntryId = metadata.last_entry_id
    message.state = _state(metadata.state)
    for segment in metadata.segments:
        message.segment.add(ensembleMember=segment.ensemble, firstEntryId=segment.first_entry_id)
    if metadata.digest_type is not None and metadata.password is not None:
        message.digestType = _digest_type(metadata.digest_type)
        message.password = metadata.password
    message.ackQuorumSize = metadata.ack_quorum
    if metadata.ctime_ms is not None:
        message.ctime = metadata.ctime_ms
    for key, value in metadata.custom.items():
        message.customMetadata.add(key=key, value=value)
    return message


def _decode_header(data: bytes) -> tuple[int, int]:
    end = data.find(b"\n", 0, len(_MAGIC) + _VERSION_SIZE_MAX + 1)
    digits = data[len(_MAGIC) : end]
    if not data.startswith(_MAGIC) or end < 0 or not digits.isdigit():
        raise Corrupt("the header of the ledger metadata is missing", start=data[: len(_MAGIC) + _VERSION_SIZE_MAX + 1])
    return int(digits), end + 1


def _from_message(message: pb.LedgerMetadataFormat, version: int) -> LedgerMetadata:
    ensemble_size = message.ensembleSize
    write_quorum = message.quorumSize
    ack_quorum = message.ackQuorumSize if message.HasField("ackQuorumSize") else write_quorum
    _check_quorums(ensemble_size, write_quorum, ack_quorum)
    segments = tuple(
        Segment(EntryId(segment.firstEntryId), tuple(BookieId(member) for member in segment.ensembleMember))
        for segment in message.segment
    )
    _check_segments(segments, ensemble_size)
    try:
        custom = {pair.key: pair.value for pair in message.customMetadata}
    except UnicodeDecodeError as error:
        raise Corrupt("ledger metadata contains a key that is not UTF-8") from error
    state = LedgerState(message.state)
    closed = state is LedgerState.CLOSED
    if closed and (not message.HasField("lastEntryId") or message.lastEntryId < -1 or message.length < 0):
        raise Corrupt(
            "the ledger is closed, but its last entry is missing",
            last_entry_id=message.lastEntryId,
            length=message.length,
        )
    has_password = message.HasField("password")
    return LedgerMetadata(
        ensemble_size=ensemble_size,
        write_quorum=write_quorum,
        ack_quorum=ack_quorum,
        segments=segments,
        state=state,
        last_entry_id=EntryId(message.lastEntryId if closed else -1),
        length=message.length if closed else 0,
        digest_type=DigestType(message.digestType) if has_password else None,
        password=message.password if has_password else None,
        ctime_ms=message.ctime if message.HasField("ctime") else None,
        custom=custom,
        c_token=message.cToken if message.HasField("cToken") else None,
        format_version=version,
    )


def _from_v1(found: ledger_metadata_v1.Fields) -> LedgerMetadata:
    _check_quorums(found.ensemble_size, found.write_quorum, found.write_quorum)
    _check_segments(found.segments, found.ensemble_size)
    return LedgerMetadata(
        ensemble_size=found.ensemble_size,
        write_quorum=found.write_quorum,
        ack_quorum=found.write_quorum,
        segments=found.segments,
        state=found.state,
        last_entry_id=found.last_entry_id,
        length=found.length,
        digest_type=None,
        password=None,
        format_version=1,
    )


def _check_quorums(ensemble_size: int, write_quorum: int, ack_quorum: int) -> None:
    if not 1 <= ack_quorum <= write_quorum <= ensemble_size:
        raise Corrupt(
            "ledger metadata contains invalid quorums",
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
        )


def _check_segments(segments: tuple[Segment, ...], ensemble_size: int) -> None:
    if not segments:
        raise Corrupt("ledger metadata contains no segments")
    expected_above = -1
    for index, segment in enumerate(segments):
        if len(segment.ensemble) != ensemble_size:
            raise Corrupt(
                "the size of a segment differs from the ensemble size",
                first_entry_id=segment.first_entry_id,
                bookies=len(segment.ensemble),
                ensemble_size=ensemble_size,
            )
        if segment.first_entry_id <= expected_above or (index == 0 and segment.first_entry_id != 0):
            raise Corrupt("segments do not ascend from entry 0", first_entry_id=segment.first_entry_id, index=index)
        expected_above = segment.first_entry_id


# Enum fields accept plain ints at run time; only the generated stubs require their own classes.


def _state(state: LedgerState) -> pb.LedgerMetadataFormat.State:
    return int(state)  # type: ignore[return-value]


def _digest_type(digest_type: DigestType) -> pb.LedgerMetadataFormat.DigestType:
    return int(digest_type)  # type: ignore[return-value]
