"""Generate message payloads: chunks of real files, from 0 bytes to 100 KiB.

The sizes follow a rough mixture (`SIZES`): most messages are small, some would fill a batch alone. Each chunk begins
where the previous one ended, so that a file is sent completely before the next one begins.
"""

import hashlib
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

KIB: Final = 1024
SIZE_MAX: Final = 100 * KIB
SIZES: Final = (
    (0.02, 0, 0),
    (0.58, 1, KIB),
    (0.28, KIB, 8 * KIB),
    (0.10, 8 * KIB, 32 * KIB),
    (0.02, 32 * KIB, SIZE_MAX),
)
"""(share, smallest, largest) in bytes; about 3 KiB on average."""
SKIPPED: Final = frozenset(
    (".git", ".venv", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".hypothesis")
)

assert abs(sum(share for share, _, _ in SIZES) - 1) < 1e-9


def digest_of(payload: bytes) -> str:
    """Digest of a payload, 16 hexadecimal digits. It detects accidental changes, not deliberate ones."""
    return hashlib.blake2b(payload, digest_size=8).hexdigest()


def find_files(roots: Iterable[Path], *, count_max: int = 5000) -> list[Path]:
    """Regular, non-empty files below `roots` (a root may be a file), sorted, without caches and version control.

    Raises FileNotFoundError if there are none.
    """
    found: list[Path] = []
    for root in roots:
        if root.is_file():
            found.append(root)
            continue
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in SKIPPED)
            paths = (Path(folder, name) for name in sorted(names))
            found += [path for path in paths if path.is_file() and not path.is_symlink() and path.stat().st_size]
            if len(found) >= count_max:
                return found[:count_max]
    if not found:
        raise FileNotFoundError(f"no file with anything in it below {', '.join(map(str, roots))}")
    return found


class Payloads:
    """An endless series of chunks; the same for the same files and seed."""

    def __init__(self, files: Sequence[Path], *, seed: int) -> None:
        assert files
        self._rng = random.Random(seed)
        self._files = list(files)
        self._rng.shuffle(self._files)
        self._index = 0
        self._offset = 0

    def next(self) -> bytes:
        """The next chunk. The last chunk of a file may be shorter than drawn, also if the file was deleted."""
        size = self._draw_size()
        if size == 0:
            return b""
        for _ in range(len(self._files)):
            chunk = self._read(size)
            if chunk:
                self._offset += len(chunk)
                return chunk
            self._index = (self._index + 1) % len(self._files)
            self._offset = 0
        raise FileNotFoundError("every file of the payloads has gone or is empty")

    def _draw_size(self) -> int:
        draw = self._rng.random()
        for share, smallest, largest in SIZES:
            draw -= share
            if draw < 0:
                return self._rng.randint(smallest, largest)
        return SIZE_MAX

    def _read(self, size: int) -> bytes:
        try:
            with self._files[self._index].open("rb") as file:
                file.seek(self._offset)
                return file.read(size)
        except OSError:
            return b""
