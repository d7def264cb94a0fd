"""Payloads that Pulsar's clients compressed are decompressed to the claimed size, and nothing else is."""

import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest
from bindery_pulsar.compression import NAMES, decompress, name_of
from bindery_pulsar.message_codec import decode_entry
from bindery_pulsar.pulsar_messages_pb2 import LZ4, NONE, SNAPPY, ZLIB, ZSTD
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

RECORDED = Path(__file__).parent / "golden" / "pulsar"
"""Entries of Pulsar's clients; record.py there has the messages and the versions."""
TEXT = b"".join(b"%d bottles of beer on the wall, " % n for n in range(199, 0, -1))


def unfinished_zlib(data: bytes) -> bytes:
    """Compress as Pulsar's Java client does."""
    compressor = zlib.compressobj()
    return compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH)


COMPRESS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "lz4": (LZ4, lambda data: bytes(cramjam.lz4.compress_block(data, store_size=False))),
    "zlib": (ZLIB, zlib.compress),
    "unfinished zlib": (ZLIB, unfinished_zlib),
    "zstd": (ZSTD, lambda data: bytes(cramjam.zstd.compress(data))),
    "snappy": (SNAPPY, lambda data: bytes(cramjam.snappy.compress_raw(data))),
}


def plain(kind: int, payload: bytes, size: int) -> bytes | None:
    found = decompress(kind, memoryview(payload), size)
    return None if found is None else bytes(found)


@pytest.mark.parametrize("client", ["cpp", "java"])
@pytest.mark.parametrize("name", ["none", "lz4", "zlib", "zstd", "snappy"])
def test_entries_of_pulsars_clients_are_decoded(client: str, name: str) -> None:
    (single,) = decode_entry((RECORDED / f"{client}_single_{name}.bin").read_bytes())
    assert (single.payload, single.key, single.properties) == (TEXT, "k", {"red": "TAGS"})
    assert type(single.payload) is bytes
    (empty,) = decode_entry((RECORDED / f"{client}_empty_{name}.bin").read_bytes())
    assert (empty.payload, empty.properties) == (b"", {"red": "TAGS"})
    batch = decode_entry((RECORDED / f"{client}_batch_{name}.bin").read_bytes())
    assert [message.payload for message in batch] == [TEXT, b"", b"last"]
    assert [message.properties for message in batch] == [{"n": str(n), "red": "TAGS"} for n in range(3)]
    assert {(message.key, message.ordering_key, message.batch_size) for message in batch} == {("k", b"o", 3)}


def test_compressions_have_names() -> None:
    assert NAMES == {NONE: "NONE", LZ4: "LZ4", ZLIB: "ZLIB", ZSTD: "ZSTD", SNAPPY: "SNAPPY"}
    assert (name_of(LZ4), name_of(7)) == ("LZ4", "7")


@pytest.mark.parametrize("name", COMPRESS)
@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=2_000))
def test_what_was_compressed_is_decompressed(name: str, data: bytes) -> None:
    kind, compress = COMPRESS[name]
    assert plain(kind, compress(data), len(data)) == data


@pytest.mark.parametrize("name", COMPRESS)
def test_a_wrong_size_is_refused(name: str) -> None:
    kind, compress = COMPRESS[name]
    payload = compress(TEXT)
    for size in (0, 1, len(TEXT) - 1, len(TEXT) + 1, 2 * len(TEXT), 1_000_000):
        assert plain(kind, payload, size) is None
    assert plain(kind, b"", 1) is None
    assert plain(kind, b"", 0) == b""


@pytest.mark.parametrize("name", COMPRESS)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damage_is_refused_or_yields_the_claimed_size(name: str, data: st.DataObject) -> None:
    kind, compress = COMPRESS[name]
    whole = bytearray(compress(TEXT))
    size = data.draw(st.sampled_from([len(TEXT), len(TEXT) - 1, 0, 1, 100_000]))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for payload in (whole, whole[:cut], whole + bytes(1)):
        found = plain(kind, bytes(payload), size)
        assert found is None or len(found) == size


@pytest.mark.parametrize("name", COMPRESS)
@settings(deadline=None, max_examples=300)
@given(payload=st.binary(max_size=200), size=st.integers(0, 5_000))
def test_random_bytes_are_refused_or_yield_the_claimed_size(name: str, payload: bytes, size: int) -> None:
    found = plain(COMPRESS[name][0], payload, size)
    assert found is None or len(found) == size


@pytest.mark.parametrize(("kind", "payload"), [(LZ4, b"\x00"), (SNAPPY, b"\x05hello"), (SNAPPY, b"\xff" * 9)])
def test_nothing_is_allocated_for_an_impossible_claim(kind: int, payload: bytes) -> None:
    tracemalloc.start()
    try:
        assert plain(kind, payload, 2**30) is None
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_bomb_of_zstd_stops_at_its_claim() -> None:
    """A block that repeats a byte 131,072 times takes four bytes, and this frame has no size of its content."""
    block = (1 << 1 | 2**17 << 3).to_bytes(3, "little") + b"a"
    frame = b"\x28\xb5\x2f\xfd\x00\x88" + 800 * block + b"\x01\x00\x00"  # the window is 128 MiB
    assert plain(ZSTD, frame, 1_000) is None
    assert plain(ZSTD, frame[:6] + 2 * block + b"\x01\x00\x00", 2**18) == b"a" * 2**18
    too_wide = b"\x28\xb5\x2f\xfd\x00\x90" + block + b"\x01\x00\x00"
    assert plain(ZSTD, too_wide, 2**17) is None
