"""Harm: what can happen to the bytes of a file, and to the file."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_BLOCKS: Final = (512, 4096)


@dataclass(frozen=True, slots=True)
class Harm:
    """What was done, to which bytes of the old file."""

    kind: str
    path: str
    start: int
    """The first byte that may differ."""
    stop: int
    told: str


Change = Callable[[bytearray, random.Random], tuple[bytearray, int, int, str]]
"""(new bytes, first changed, end of changed, what was done)."""


def _flip_bit(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    at = lots.randrange(len(data))
    bit = lots.randrange(8)
    data[at] ^= 1 << bit
    return data, at, at + 1, f"bit {bit} of byte {at}"


def _flip_bits(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    at = lots.randrange(len(data))
    end = min(at + lots.choice((2, 8, 64)), len(data))
    for place in range(at, end):
        data[place] ^= lots.randrange(1, 256)
    return data, at, end, f"bits of bytes {at}..{end}"


def _truncate(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    size = lots.choice((0, lots.randrange(len(data)), lots.randrange(len(data)) // 512 * 512, len(data) - 1))
    return data[:size], size, len(data), f"cut to {size} of {len(data)}"


def _zeros(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    block = lots.choice((1, *_BLOCKS))
    at = lots.randrange(len(data)) // block * block
    sizes = (lots.randint(1, 64), 512, 4096, len(data) - at, lots.randint(1, len(data) - at))
    end = min(at + lots.choice(sizes), len(data))
    if lots.random() < 0.05:
        at, end = 0, len(data)
    data[at:end] = bytes(end - at)
    return data, at, end, f"zeros {at}..{end}"


def _noise(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    at = lots.randrange(len(data)) // 512 * 512
    end = min(at + lots.choice(_BLOCKS), len(data))
    data[at:end] = lots.randbytes(end - at)
    return data, at, end, f"noise {at}..{end}"


def _two_blocks(data: bytearray, lots: random.Random) -> tuple[int, int, int]:
    size = min(lots.choice(_BLOCKS), max(len(data) // 2, 1))
    blocks = max(len(data) // size, 1)
    return size, lots.randrange(blocks) * size, lots.randrange(blocks) * size


def _swap(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    size, one, other = _two_blocks(data, lots)
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]
    return data, min(one, other), max(one, other) + size, f"blocks of {size} at {one} and {other} swapped"


def _duplicate(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    size, source, target = _two_blocks(data, lots)
    data[target : target + size] = data[source : source + size]
    return data, target, target + size, f"block of {size} at {source} copied to {target}"


def _append(data: bytearray, lots: random.Random) -> tuple[bytearray, int, int, str]:
    extra = lots.choice((lots.randbytes(lots.randint(1, 600)), bytes(lots.randint(1, 5000)), bytes(data[-512:])))
    return data + extra, len(data), len(data) + len(extra), f"{len(extra)} bytes appended"


CHANGES: Final[dict[str, Change]] = {
    "flipped bit": _flip_bit,
    "flipped bits": _flip_bits,
    "truncated": _truncate,
    "zeros": _zeros,
    "noise": _noise,
    "swapped blocks": _swap,
    "duplicated block": _duplicate,
    "appended": _append,
}
REMOVED: Final = "removed"
_REMOVED_SHARE: Final = 0.08


def do_harm(directory: str, path: str, lots: random.Random, *, kinds: Sequence[str] = ()) -> Harm:
    """Harm the file `path` in `directory`, in one of these ways (any if empty). Same lots and bytes: same harm."""
    whole = os.path.join(directory, path)
    with open(whole, "rb") as file:
        data = bytearray(file.read())
    kind = lots.choice(kinds or sorted(CHANGES))
    if not data or kind == REMOVED or (not kinds and lots.random() < _REMOVED_SHARE):
        os.unlink(whole)
        return Harm(REMOVED, path, 0, len(data), f"{path}: removed, {len(data)} bytes")
    before = bytes(data)
    changed, start, stop, told = CHANGES[kind](data, lots)
    if bytes(changed) == before:  # zeros over zeros, a block on itself
        kind = "unchanged"
    elif kind == "duplicated block" and not any(changed[start:stop]):  # one that was allocated and never written
        kind = "zeros"
    with open(whole, "wb") as file:
        file.write(changed)
    return Harm(kind, path, start, stop, f"{path}: {told}")
