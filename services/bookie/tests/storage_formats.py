"""Golden files of the storage formats, and the records that they contain.

There is no option to rewrite the golden files: a new layout is a new version in addition to the old one.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.io.disk import ReadableFile
from bindery_simulation.disk import CrashableDisk

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


def file_of(data: bytes) -> ReadableFile:
    disk = CrashableDisk()
    disk.create("/f").write_at(data, 0)
    return disk.open_read("/f")


def bodies(kit: Any) -> list[bytes]:
    lots = random.Random(7)
    payloads = [b"", b"bindery", bytes(lots.randrange(1, 256) for _ in range(700))]
    return [
        control.pack_master_key(5, kit.KEY),
        *(kit.entry(5, entry_id, payload, lac=entry_id - 1) for entry_id, payload in enumerate(payloads)),
        control.pack_fence(5),
        control.pack_explicit_lac(5, kit.lac_packet(5, 1)),
    ]


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            yield at, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
