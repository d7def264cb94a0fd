"""Damage one file: change its bytes or its size, or remove it."""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

_BLOCKS: Final = (512, 4096)


@dataclass(frozen=True, slots=True)
class Harm:
    """The damage of a file and the range of the file that it changed."""

    kind: str
    path: str
    start: int
    """Offset of the first byte that may be changed."""
    stop: int
    """Offset after the last byte that may be changed."""
    text: str


Change = Callable[[bytearray, random.Random], tuple[bytearray, int, int, str]]
"""Returns (new content, offset of the first changed byte, offset after the last changed byte, description)."""


def _flip_bit(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    at = rng.randrange(len(data))
    bit = rng.randrange(8)
    data[at] ^= 1 << bit
    return data, at, at + 1, f"bit {bit} of byte {at}"


def _flip_bits(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    at = rng.randrange(len(data))
    end = min(at + rng.choice((2, 8, 64)), len(data))
    for place in range(at, end):
        data[place] ^= rng.randrange(1, 256)
    return data, at, end, f"bits of bytes {at}..{end}"


def _truncate(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    size = rng.choice((0, rng.randrange(len(data)), rng.randrange(len(data)) // 512 * 512, len(data) - 1))
    return data[:size], size, len(data), f"cut to {size} of {len(data)}"


def _zeros(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    block = rng.choice((1, *_BLOCKS))
    at = rng.randrange(len(data)) // block * block
    sizes = (rng.randint(1, 64), 512, 4096, len(data) - at, rng.randint(1, len(data) - at))
    end = min(at + rng.choice(sizes), len(data))
    if rng.random() < 0.05:
        at, end = 0, len(data)
    data[at:end] = bytes(end - at)
    return data, at, end, f"zeros {at}..{end}"


def _noise(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    at = rng.randrange(len(data)) // 512 * 512
    end = min(at + rng.choice(_BLOCKS), len(data))
    data[at:end] = rng.randbytes(end - at)
    return data, at, end, f"noise {at}..{end}"


def _two_blocks(data: bytearray, rng: random.Random) -> tuple[int, int, int]:
    size = min(rng.choice(_BLOCKS), max(len(data) // 2, 1))
    blocks = max(len(data) // size, 1)
    return size, rng.randrange(blocks) * size, rng.randrange(blocks) * size


def _swap(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    size, one, other = _two_blocks(data, rng)
    data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]
    return data, min(one, other), max(one, other) + size, f"blocks of {size} at {one} and {other} swapped"


def _duplicate(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    size, source, target = _two_blocks(data, rng)
    data[target : target + size] = data[source : source + size]
    return data, target, target + size, f"block of {size} at {source} copied to {target}"


def _append(data: bytearray, rng: random.Random) -> tuple[bytearray, int, int, str]:
    extra = rng.choice((rng.randbytes(rng.randint(1, 600)), bytes(rng.randint(1, 5000)), bytes(data[-512:])))
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
"""Changes by kind of damage."""
REMOVED: Final = "removed"
"""Kind of damage: the file is removed."""
_REMOVED_SHARE: Final = 0.08


def do_harm(directory: str, path: str, rng: random.Random, *, kinds: Sequence[str] = ()) -> Harm:
    """Damage the file `path` in `directory` by one of `kinds`, or by any kind if `kinds` is empty.

    Equal random numbers and contents give equal damage.
    """
    whole = os.path.join(directory, path)
    with open(whole, "rb") as file:
        data = bytearray(file.read())
    kind = rng.choice(kinds or sorted(CHANGES))
    if not data or kind == REMOVED or (not kinds and rng.random() < _REMOVED_SHARE):
        os.unlink(whole)
        return Harm(REMOVED, path, 0, len(data), f"{path}: removed, {len(data)} bytes")
    before = bytes(data)
    changed, start, stop, text = CHANGES[kind](data, rng)
    if bytes(changed) == before:  # zeros over zeros, a block on itself
        kind = "unchanged"
    elif kind == "duplicated block" and not any(changed[start:stop]):  # a block that was allocated and never written
        kind = "zeros"
    with open(whole, "wb") as file:
        file.write(changed)
    return Harm(kind, path, start, stop, f"{path}: {text}")
