"""Digests of entries and LAC packets, and the keys that are derived from a ledger's password.

| type   | size | bytes                                                          | detects                   |
|--------|-----:|----------------------------------------------------------------|---------------------------|
| CRC32C |    4 | u32 CRC-32C (Castagnoli)                                       | accidental corruption     |
| CRC32  |    8 | u64 holding zlib's CRC-32: the upper four bytes are zero       | accidental corruption     |
| MAC    |   20 | HMAC-SHA1 keyed with the mac key                               | tampering without the key |
| DUMMY  |    0 | nothing                                                        | nothing                   |

A digest covers the header (32 bytes of an entry, 16 bytes of a LAC packet) and the payload, but not itself. Integers
are big-endian.
master key = SHA-1("ledger" + password), mac key = SHA-1("mac" + password): 20 bytes also for an empty password.
Source: BookKeeper DigestManager and its subclasses.
"""

import hmac
import struct
import zlib
from collections.abc import Callable
from hashlib import sha1
from typing import Final

from crc32c import crc32c

from bindery_core.formats.ledger_metadata import DigestType

MASTER_KEY_SIZE: Final = 20
"""Bytes of a master key."""
SIZE_OF: Final = {DigestType.CRC32: 8, DigestType.MAC: 20, DigestType.CRC32C: 4, DigestType.DUMMY: 0}
"""Bytes of each digest."""

Buffer = bytes | bytearray | memoryview

_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")

assert _U32.size == SIZE_OF[DigestType.CRC32C]
assert _U64.size == SIZE_OF[DigestType.CRC32]


def master_key(password: bytes) -> bytes:
    """Return the key (20 bytes) that a client sends to a bookie with adds, fencing reads and explicit LACs."""
    return sha1(b"ledger" + password, usedforsecurity=False).digest()


def mac_key(password: bytes) -> bytes:
    """Return the key of the MAC digest: 20 bytes."""
    return sha1(b"mac" + password, usedforsecurity=False).digest()


class Digester:
    """Computes digests of one type under one password. Immutable, so all handles of a ledger may share one object."""

    __slots__ = ("digest", "digest_type", "master_key", "size")

    digest: Callable[[Buffer, Buffer], bytes]
    """`digest(header, payload)` -> `size` bytes. Neither argument is copied."""

    def __init__(self, digest_type: DigestType, password: bytes = b"") -> None:
        self.digest_type: Final = digest_type
        self.size: Final = SIZE_OF[digest_type]
        self.master_key: Final = master_key(password)
        match digest_type:
            case DigestType.CRC32C:
                self.digest = _digest_crc32c
            case DigestType.CRC32:
                self.digest = _digest_crc32
            case DigestType.MAC:
                self.digest = _digest_mac(mac_key(password))
            case DigestType.DUMMY:
                self.digest = _digest_dummy

    def verify(self, header: Buffer, digest: Buffer, payload: Buffer) -> bool:
        """Return whether `digest` is the digest of `header` and `payload`; False for a digest of another size."""
        if self.digest_type is DigestType.MAC:
            return hmac.compare_digest(self.digest(header, payload), bytes(digest))
        return self.digest(header, payload) == digest

    def __repr__(self) -> str:
        return f"Digester({self.digest_type.name})"  # never the keys


def _digest_crc32c(header: Buffer, payload: Buffer) -> bytes:
    return _U32.pack(crc32c(payload, crc32c(header)))


def _digest_crc32(header: Buffer, payload: Buffer) -> bytes:
    return _U64.pack(zlib.crc32(payload, zlib.crc32(header)))


def _digest_mac(key: bytes) -> Callable[[Buffer, Buffer], bytes]:
    keyed = hmac.new(key, digestmod="sha1")

    def digest(header: Buffer, payload: Buffer) -> bytes:
        mac = keyed.copy()
        mac.update(header)
        mac.update(payload)
        return mac.digest()

    return digest


def _digest_dummy(header: Buffer, payload: Buffer) -> bytes:
    return b""
