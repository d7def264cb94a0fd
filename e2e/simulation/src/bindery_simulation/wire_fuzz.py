"""Plan malicious clients of the ledger port by seed: the frames of each connection, and the pieces of its writes.

A plan depends only on (seed, number), so that one connection can be repeated alone. The share of damaged frames differs
by connection, from none, so that later states of the protocol are reached, to all. Frames are

- valid requests of version 3 or 2, for a few ledgers, keys and ids, including boundary values (-1, 0, 2^63 - 1);
- such requests with flipped bits, or with removed, inserted or repeated bytes;
- valid requests with a wrong length, and random bytes with a correct length, a wrong length, or none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire import messages as m
from bindery_core.wire import v2, v3
from bindery_core.wire.framing import FRAME_SIZE_MAX

LEDGERS: Final = 40
"""Number of ledgers. Most valid requests use the ledger ids 0 .. LEDGERS - 1."""
PASSWORDS: Final = (b"", b"fuzz")
"""Passwords of the digests. Most requests use the first."""
DAMAGED_SHARES: Final = (0.0, 0.0, 0.01, 0.05, 0.2, 0.6, 1.0)
"""Values for the share of damaged frames. Each connection uses one of them at random."""
FRAMES_MAX: Final = 60
"""Upper bound (exclusive) of the frames of a connection with damaged frames. For others it is four times as high."""
BOUNDARY_VALUES: Final = (-1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63))

_DIGESTERS = [Digester(kind, password) for kind in DigestType for password in PASSWORDS]


@dataclass(frozen=True, slots=True)
class Plan:
    """One connection and its frames."""

    number: int
    tls: bool
    token: bool
    """Whether the client authenticates first, if the bookie requires authentication."""
    frames: tuple[bytes, ...]
    damaged_share: float

    def pieces(self, seed: int) -> Iterator[tuple[bytes, int]]:
        """Yield (bytes of one write, number of frames that the write completes).

        By seed, a connection sends all frames in one write, one frame per write, or frames in pieces of random size.
        """
        random = Random(f"{seed}:{self.number}:pieces")
        style = random.random()
        if style < 0.4:
            yield b"".join(self.frames), len(self.frames)
            return
        for frame in self.frames:
            if style < 0.7 or len(frame) > 5000:
                yield frame, 1
                continue
            at = 0
            while at < len(frame):
                size = random.choice((1, 2, 3, 5, 50, 1000))
                at += size
                yield frame[at - size : at], int(at >= len(frame))


def plan(seed: int, number: int) -> Plan:
    """Plan the connection `number` of the run `seed`."""
    random = Random(f"{seed}:{number}")
    damaged_share = random.choice(DAMAGED_SHARES)
    in_v2 = random.random() < 0.5
    count = random.randrange(1, FRAMES_MAX) if damaged_share else random.randrange(FRAMES_MAX // 2, FRAMES_MAX * 4)
    frames = []
    for _ in range(count):
        if damaged_share and not in_v2 and random.random() < 0.02:
            in_v2 = True
        frame = valid_frame(random, in_v2=in_v2)
        frames.append(damaged(random, frame) if random.random() < damaged_share else frame)
    return Plan(number, random.random() < 0.2, random.random() < 0.7, tuple(frames), damaged_share)


def valid_frame(random: Random, *, in_v2: bool) -> bytes:
    """Return a valid request with its length."""
    if in_v2:
        return v2.encode_request(random.choice(_V2)(random))
    return v3.encode_request(random.choice(_V3)(random))


def damaged(random: Random, frame: bytes) -> bytes:
    """Return `frame` with damage, which may affect its length."""
    data = bytearray(frame)
    kind = random.randrange(10)
    if kind < 4:  # flipped bits, not in the length
        for _ in range(random.choice((1, 1, 2, 8))):
            data[random.randrange(4, len(data))] ^= 1 << random.randrange(8)
        return bytes(data)
    if kind == 4:  # flipped bit in the length
        data[random.randrange(4)] ^= 1 << random.randrange(8)
        return bytes(data)
    if kind == 5:  # removed bytes
        at = random.randrange(4, len(data))
        return _framed(bytes(data[4:at] + data[at + random.randrange(1, 9) :]))
    if kind == 6:  # inserted bytes
        at = random.randrange(4, len(data))
        return _framed(bytes(data[4:at]) + random.randbytes(random.randrange(1, 9)) + bytes(data[at:]))
    if kind == 7:  # repeated message, which is valid protobuf
        return _framed(bytes(data[4:]) * random.randrange(2, 4))
    if kind == 8:  # random bytes in a frame
        return _framed(random.randbytes(random.choice((1, 4, 20, 24, 40, 300))))
    if random.random() < 0.5:  # random bytes, or a length above the limit
        return random.randbytes(random.randrange(1, 40))
    return random.choice((FRAME_SIZE_MAX - 3, -1, 0, 2**31 - 1)).to_bytes(4, "big", signed=True) + b"\n\x06"


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


def _ledger_id(random: Random) -> int:
    return random.randrange(LEDGERS) if random.random() < 0.98 else random.choice(BOUNDARY_VALUES)


def _entry_id(random: Random) -> int:
    return random.randrange(200) if random.random() < 0.9 else random.choice(BOUNDARY_VALUES)


def _body(random: Random, ledger_id: int, entry_id: int) -> bytes:
    size = random.choice((0, 1, 10, 100, 1000)) if random.random() < 0.995 else 100_000
    if ledger_id < 0 or entry_id < 0:
        ids = ledger_id.to_bytes(8, "big", signed=True) + entry_id.to_bytes(8, "big", signed=True)
        return ids + random.randbytes(min(size, 100))
    lac = min(entry_id - 1, random.choice((-1, entry_id - 1)))
    return pack(
        random.choice(_DIGESTERS), ledger_id=ledger_id, entry_id=entry_id, lac=lac, length=2**40, payload=bytes(size)
    )


def _key(random: Random) -> bytes:
    return _DIGESTERS[0].master_key if random.random() < 0.9 else _DIGESTERS[1].master_key


def _txn_id(random: Random) -> int:
    return random.randrange(1, 1000) if random.random() < 0.99 else 2**64 - 1


def _add(random: Random) -> m.AddRequest:
    ledger_id, entry_id = _ledger_id(random), _entry_id(random)
    return m.AddRequest(
        _txn_id(random),
        ledger_id,
        entry_id,
        _key(random),
        _body(random, ledger_id, entry_id),
        recovery=random.random() < 0.1,
        priority=random.choice((0, 0, 1, 100)),
    )


def _deferred_add(random: Random) -> m.AddRequest:
    add = _add(random)
    add.write_flags = random.choice((1, 1, 2, 3, -1))
    return add


def _read(random: Random) -> m.ReadRequest:
    return m.ReadRequest(_txn_id(random), _ledger_id(random), _entry_id(random))


def _fence(random: Random) -> m.ReadRequest:
    read = _read(random)
    read.flag, read.master_key = int(m.ReadFlag.FENCE_LEDGER), _key(random)
    return read


def _long_poll(random: Random) -> m.ReadRequest:
    read = _read(random)
    read.entry_id = -1 if random.random() < 0.9 else read.entry_id
    read.flag = random.choice((0, 2, 2, 2))
    read.previous_lac = _entry_id(random)
    read.timeout_ms = random.choice((None, 0, 1, 20, 500))
    return read


def _batch_read(random: Random) -> m.BatchReadRequest:
    fence = (int(m.ReadFlag.FENCE_LEDGER), _key(random)) if random.random() < 0.02 else (0, None)
    return m.BatchReadRequest(
        2,
        _ledger_id(random),
        _entry_id(random),
        _txn_id(random) % 2**63,
        random.choice((-1, 0, 1, 10, 2**31 - 1)),
        random.choice((-1, 0, 100, 5000, FRAME_SIZE_MAX, 2**63 - 1)),
        *fence,
    )


def _write_lac(random: Random) -> m.WriteLacRequest:
    ledger_id, lac = _ledger_id(random), _entry_id(random)
    packet = pack_lac(_DIGESTERS[0], ledger_id=abs(ledger_id) % 2**63, lac=max(lac, -1))
    return m.WriteLacRequest(_txn_id(random), ledger_id, lac, _key(random), packet)


def _other_v3(random: Random) -> m.Request:
    txn_id, ledger_id = _txn_id(random), _ledger_id(random)
    kinds: tuple[Callable[[], m.Request], ...] = (
        lambda: m.ReadLacRequest(txn_id, ledger_id),
        lambda: m.ForceLedgerRequest(txn_id, ledger_id),
        lambda: m.ListEntriesRequest(txn_id, ledger_id),
        lambda: m.BookieInfoRequest(txn_id, random.choice((0, 1, 2, 3, -1))),
        lambda: m.AuthRequest(txn_id, "bindery", random.randbytes(random.randrange(40))),
        lambda: m.OtherRequest(txn_id, random.choice((3, 4, 12)), random.choice((1, 2, 3))),
        lambda: m.StartTlsRequest(txn_id),
    )
    return random.choice(kinds[: len(kinds) if random.random() < 0.1 else 4])()


def _auth_v2(random: Random) -> m.AuthRequest:
    return m.AuthRequest(2, "bindery", random.randbytes(random.randrange(40)))


_V3: Final[tuple[Callable[[Random], m.Request], ...]] = (
    *[_add] * 20,
    *[_read] * 20,
    *[_other_v3] * 5,
    *[_write_lac] * 2,
    *[_long_poll] * 2,
    _deferred_add,
    _fence,
)
_V2: Final[tuple[Callable[[Random], m.Request], ...]] = (
    *[_add] * 20,
    *[_read] * 20,
    *[_batch_read] * 5,
    _fence,
    _auth_v2,
)
