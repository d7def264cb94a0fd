"""`bindery wire decode`: one line per frame, and the offset and reason at which decoding stops."""

import io
import json
import sys
from pathlib import Path

import pytest
from bindery.common.entry_facts import candidates
from bindery.main import app
from bindery.wire.wire_stream import UNDECIDED_FRAMES_MAX, Frame, StreamDecoder, StreamEnds
from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.formats.availability import encode as encode_availability
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import (
    AddRequest,
    AddResponse,
    AuthRequest,
    AuthResponse,
    BatchReadRequest,
    BatchReadResponse,
    BookieInfoRequest,
    BookieInfoResponse,
    ErrorResponse,
    ForceLedgerRequest,
    ForceLedgerResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    Operation,
    ReadFlag,
    ReadLacRequest,
    ReadLacResponse,
    ReadRequest,
    ReadResponse,
    Request,
    Response,
    StartTlsRequest,
    StartTlsResponse,
    Status,
    WriteLacRequest,
    WriteLacResponse,
)
from typer.testing import CliRunner, Result

CRC32C = Digester(DigestType.CRC32C)
KEY = CRC32C.master_key


def body(digester: Digester = CRC32C, *, entry_id: int = 5, payload: bytes = b"hello") -> bytes:
    return pack(digester, ledger_id=7, entry_id=entry_id, lac=entry_id - 1, length=10**8, payload=payload)


REQUESTS: list[Request] = [
    AuthRequest(1, "token", b"secret-token"),
    StartTlsRequest(2),
    AddRequest(3, 7, 5, KEY, body(), recovery=True, write_flags=1, priority=100),
    ReadRequest(4, 7, 5, flag=ReadFlag.FENCE_LEDGER, master_key=KEY),
    ReadRequest(5, 7, -1, flag=ReadFlag.ENTRY_PIGGYBACK, previous_lac=4, timeout_ms=1000),
    WriteLacRequest(6, 7, 5, KEY, pack_lac(CRC32C, ledger_id=7, lac=5)),
    ReadLacRequest(7, 7),
    BookieInfoRequest(8, 3),
    ForceLedgerRequest(9, 7),
    ListEntriesRequest(10, 7),
]
RESPONSES: list[Response] = [
    AuthResponse(1, 0, "token", b"x"),
    StartTlsResponse(2, 0),
    AddResponse(3, 0, 7, 5),
    ReadResponse(4, 0, 7, 5, body(), 5),
    ReadResponse(5, int(Status.NO_ENTRY), 7, 6),
    WriteLacResponse(6, 0, 7),
    ReadLacResponse(7, 0, 7, pack_lac(CRC32C, ledger_id=7, lac=5), body()),
    BookieInfoResponse(8, 0, 1000, 10),
    ForceLedgerResponse(9, 0, 7),
    ListEntriesResponse(10, 0, 7, encode_availability([(0, 3), (5, 1)])),
    ErrorResponse(11, int(Operation.RANGE_READ_ENTRY), int(Status.BAD_REQUEST)),
]
REQUESTS_V2: list[Request] = [
    AddRequest(2, 7, 5, KEY, body(), recovery=True),
    ReadRequest(2, 7, 5),
    ReadRequest(2, 7, 5, flag=ReadFlag.FENCE_LEDGER, master_key=KEY, priority=1),
    BatchReadRequest(2, 7, 0, 99, 10, 1000),
]
RESPONSES_V2: list[Response] = [
    AddResponse(2, 0, 7, 5),
    ReadResponse(2, 0, 7, 5, body()),
    ReadResponse(2, int(Status.NO_LEDGER), 7, 5),
    BatchReadResponse(2, 0, 7, 0, 99, (body(entry_id=0), body(entry_id=1))),
]
STREAMS = [
    pytest.param(v3.encode_requests(REQUESTS), REQUESTS, 3, "request", id="v3 requests"),
    pytest.param(v3.encode_responses(RESPONSES), RESPONSES, 3, "response", id="v3 responses"),
    pytest.param(v2.encode_requests(REQUESTS_V2), REQUESTS_V2, 2, "request", id="v2 requests"),
    pytest.param(v2.encode_responses(RESPONSES_V2), RESPONSES_V2, 2, "response", id="v2 responses"),
]


def decoder(direction: str = "auto", **more: int) -> StreamDecoder:
    return StreamDecoder(direction=direction, digesters=candidates(b""), **more)


def frames(stream: StreamDecoder, *pieces: bytes) -> list[Frame]:
    found = [frame for piece in pieces for frame in stream.feed(piece)]
    return found + list(stream.end())


def until_it_ends(stream: StreamDecoder, data: bytes) -> tuple[list[Frame], StreamEnds | None]:
    found: list[Frame] = []
    try:
        found.extend(stream.feed(data))
        found.extend(stream.end())
    except StreamEnds as error:
        return found, error
    return found, None


@pytest.mark.parametrize(("data", "messages", "protocol", "direction"), STREAMS)
def test_every_frame_of_a_stream_is_shown_with_its_offset(
    data: bytes, messages: list[object], protocol: int, direction: str
) -> None:
    found = frames(decoder(), data)
    assert len(found) == len(messages)
    assert {(frame.protocol, frame.direction) for frame in found} == {(protocol, direction)}
    assert not any(frame.is_damaged for frame in found)
    ends = [frame.offset + frame.size for frame in found]
    assert [frame.offset for frame in found] == [0, *ends[:-1]]
    assert ends[-1] == len(data)
    for frame in found:
        assert json.loads(json.dumps(frame.as_json()))["offset"] == frame.offset
        assert "\n" not in frame.line()


@pytest.mark.parametrize(("data", "messages", "protocol", "direction"), STREAMS)
def test_pieces_of_any_size_give_the_same_frames(
    data: bytes, messages: list[object], protocol: int, direction: str
) -> None:
    whole = frames(decoder(), data)
    for size in (1, 3, 7, 64):
        assert frames(decoder(), *(data[at : at + size] for at in range(0, len(data), size))) == whole


@pytest.mark.parametrize(("data", "messages", "protocol", "direction"), STREAMS)
def test_a_truncated_stream_gives_its_complete_frames_and_the_end(
    data: bytes, messages: list[object], protocol: int, direction: str
) -> None:
    whole = frames(decoder(direction), data)
    ends = [0, *(frame.offset + frame.size for frame in whole)]
    for cut in range(len(data)):
        stream = decoder(direction)
        found = list(stream.feed(data[:cut]))
        assert found == [frame for frame in whole if frame.offset + frame.size <= cut]
        if cut in ends:
            assert list(stream.end()) == []
            continue
        with pytest.raises(StreamEnds, match="the stream ends within a frame") as ended:
            list(stream.end())
        assert ended.value.offset == max(end for end in ends if end <= cut)


@pytest.mark.parametrize(("data", "messages", "protocol", "direction"), STREAMS)
def test_no_flipped_byte_crashes_the_decoder(
    data: bytes, messages: list[object], protocol: int, direction: str
) -> None:
    for at in range(len(data)):
        for bit in (1, 0x80):
            damaged = bytearray(data)
            damaged[at] ^= bit
            found, ended = until_it_ends(decoder(direction), bytes(damaged))
            assert all(frame.line() and json.dumps(frame.as_json()) for frame in found)
            read = sum(frame.size for frame in found)
            assert read == (len(data) if ended is None else ended.offset)


def test_a_line_shows_ids_flags_and_the_entry_but_no_secrets() -> None:
    lines = [frame.line() for frame in frames(decoder(), v3.encode_requests(REQUESTS))]
    add = lines[2]
    for words in (
        "v3 request  ADD_ENTRY txn_id=3 ledger_id=7 entry_id=5",
        "flags=RECOVERY_ADD|DEFERRED_SYNC",
        "priority=100",
        f"master_key={KEY[:4].hex()}..(20 bytes)",
        "[ledger_id=7 entry_id=5 lac=4 length=100000000 digest: crc32c",
        " good; payload 5 bytes]",
    ):
        assert words in add
    assert "flags=FENCE_LEDGER" in lines[3]
    assert "previous_lac=4 timeout_ms=1000" in lines[4]
    assert "lac_packet=ledger_id=7,lac=5 lac_digest=crc32c:good" in lines[5]
    assert "plugin=token payload_size=12" in lines[0]
    everything = "".join(lines)
    assert "secret-token" not in everything
    assert KEY.hex() not in everything


def test_a_response_shows_its_status() -> None:
    lines = [frame.line() for frame in frames(decoder(), v3.encode_responses(RESPONSES))]
    assert "ADD_ENTRY txn_id=3 ledger_id=7 entry_id=5 status=OK" in lines[2]
    assert "status=NO_ENTRY" in lines[4]
    assert "max_lac=5" in lines[3]
    assert "total_disk_capacity=1000 free_disk_space=10" in lines[7]
    assert "available=0-2,5" in lines[9]
    assert "RANGE_READ_ENTRY txn_id=11 status=BAD_REQUEST" in lines[10]
    batch = frames(decoder(), v2.encode_responses(RESPONSES_V2))[3]
    assert [one.header.entry_id for one in batch.bodies if one.header is not None] == [0, 1]


@pytest.mark.parametrize("kind", list(DigestType))
def test_a_digest_is_checked_when_its_type_is_known_and_damage_is_shown(kind: DigestType) -> None:
    digester = Digester(kind, b"pw")
    good = body(digester)
    data = v3.encode_request(AddRequest(1, 7, 5, KEY, good)) + v3.encode_request(
        AddRequest(2, 7, 5, KEY, good[:-1] + b"?")
    )
    decoder = StreamDecoder(digesters=(digester,))
    first, second = frames(decoder, data)
    assert (first.is_damaged, second.is_damaged) == (False, kind is not DigestType.DUMMY)
    assert (" WRONG, its bytes give " in second.line()) == (kind is not DigestType.DUMMY)
    first, second = frames(StreamDecoder(digesters=candidates(b"pw")), data)
    assert (f"digest: {kind.name.lower()} " in first.line()) == (kind is not DigestType.DUMMY)
    assert "digest: unknown" in second.line()
    assert not second.is_damaged  # its digest type or password may be unknown


def test_the_protocol_changes_once_from_version_3_to_2_as_in_a_bookie() -> None:
    data = v3.encode_request(REQUESTS[6]) + v2.encode_request(REQUESTS_V2[1])
    assert [frame.protocol for frame in frames(decoder(), data)] == [3, 2]
    with pytest.raises(StreamEnds, match="no request of version 2") as ended:
        frames(decoder(), data + v3.encode_request(REQUESTS[6]))
    assert ended.value.offset == len(data)


def test_the_first_frame_of_known_direction_determines_that_of_the_stream() -> None:
    auth = v2.encode_request(AuthRequest(2, "token", b""))
    found = frames(decoder(), auth + v2.encode_response(RESPONSES_V2[0]))
    assert [frame.direction for frame in found] == ["response", "response"]
    assert [frame.direction for frame in frames(decoder(), auth)] == ["request"]
    stream = decoder()
    assert len(list(stream.feed(auth * UNDECIDED_FRAMES_MAX))) == UNDECIDED_FRAMES_MAX


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes.fromhex("16030102000100"), "TLS record"),
        (b"\xd4\xc3\xb2\xa1\x02\x00", "packet capture"),
        (b"0000001a0a", "--hex reads it"),
        (bytes(8), "not positive"),
        (b"\x7f\xff\xff\xff1234", "exceeds the size limit"),
        (b"\x00\x00\x00\x03\x0a\xff\xff", "no request of version 3"),
        (b"\x00\x00\x00\x04\x02\x09\x00\x00", "no request of version 2: unknown opcode"),
    ],
)
def test_bytes_that_are_no_frame_are_explained(data: bytes, words: str) -> None:
    before = v3.encode_request(REQUESTS[6])
    with pytest.raises(StreamEnds, match="stopped at offset 0: ") as at_once:
        frames(decoder(), data)
    assert words in str(at_once.value)
    found, later = until_it_ends(decoder(), before + data)
    assert later is not None
    assert (len(found), later.offset) == (1, len(before))


def test_frames_of_unknown_direction_are_shown_before_the_damage() -> None:
    found, ended = until_it_ends(decoder(), v2.encode_request(AuthRequest(2, "token", b"")) + bytes(8))
    assert ended is not None
    assert [frame.operation for frame in found] == ["AUTH"]


def test_the_default_frame_size_limit_is_pulsars() -> None:
    big = v3.encode_request(AddRequest(1, 7, 5, KEY, body(payload=bytes(5 * 1024 * 1024 + 1000))))
    assert frames(decoder(), big)[0].size == len(big)
    with pytest.raises(StreamEnds, match="exceeds the size limit"):
        frames(decoder(frame_size_max=5 * 1024 * 1024), big)


# -- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str, data: bytes = b"") -> Result:
    return CliRunner().invoke(app, ["wire", "decode", *arguments], input=data)


def test_a_file_and_stdin_and_hex_give_the_same_output(tmp_path: Path) -> None:
    data = v3.encode_requests(REQUESTS)
    raw, text = tmp_path / "raw", tmp_path / "hex"
    raw.write_bytes(data)
    text.write_text("\n".join(data.hex(" ")[at : at + 61] for at in range(0, 3 * len(data), 61)))
    results = [run(str(raw)), run(data=data), run("-", data=data), run("--hex", str(text))]
    assert {result.exit_code for result in results} == {0}
    assert len({result.stdout for result in results}) == 1
    assert len(results[0].stdout.splitlines()) == len(REQUESTS)


def test_json_ends_with_the_frame_count_and_the_offset_of_the_error() -> None:
    data = v3.encode_requests(REQUESTS)
    lines = [json.loads(line) for line in run("--json", data=data).stdout.splitlines()]
    assert lines[-1] == {"frames": len(REQUESTS), "damaged": 0}
    result = run("--json", data=data[:-1])
    assert result.exit_code == 1
    last = json.loads(result.stdout.splitlines()[-1])
    assert (last["frames"], last["stopped_at"]) == (len(REQUESTS) - 1, lines[-2]["offset"])
    assert isinstance(result.exception, StreamEnds)


def test_a_wrong_digest_exits_with_3_after_all_frames_were_printed() -> None:
    data = v3.encode_request(AddRequest(1, 7, 5, KEY, body()[:-1] + b"?")) + v3.encode_request(REQUESTS[6])
    result = run("--digest", "crc32c", data=data)
    assert (result.exit_code, len(result.stdout.splitlines())) == (3, 2)
    assert "1 of 2 frames have a wrong digest" in result.stderr
    assert run(data=data).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "data", "words"),
    [
        (["--direction", "up"], b"", "--direction must be one of auto|request|response"),
        (["--digest", "md5"], b"", "--digest must be one of auto|crc32c"),
        (["/nowhere/at/all"], b"", "cannot read /nowhere/at/all"),
        (["--hex"], b"00 xy", "omit it for raw bytes"),
        (["--hex"], b"000", "ends within a byte"),
    ],
)
def test_wrong_use_names_the_fix(arguments: list[str], data: bytes, words: str) -> None:
    result = run(*arguments, data=data)
    assert words in str(result.exception)


def test_a_long_capture_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without an end is decoded as its bytes arrive."""
    one = v3.encode_request(REQUESTS[6])
    pulled = 0

    class Endless(io.RawIOBase):
        def read1(self, size: int) -> bytes:
            nonlocal pulled
            pulled += 1
            return one * 100

    printed: list[int] = []

    class Stop(Exception):
        pass

    def count(line: str) -> None:
        printed.append(pulled)
        if len(printed) == 1000:
            raise Stop

    class Stdin:
        buffer = Endless()

    from bindery.wire import commands as wire

    monkeypatch.setattr(sys, "stdin", Stdin())
    monkeypatch.setattr(wire, "print", count, raising=False)
    with pytest.raises(Stop):
        wire.decode(
            "-", as_hex=False, direction="auto", digest="auto", password_file=None, frame_size_max=None, as_json=False
        )
    assert printed == [at // 100 + 1 for at in range(1000)]
