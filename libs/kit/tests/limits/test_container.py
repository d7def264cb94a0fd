"""The memory limit of a container is read from the files of either version of cgroups."""

from pathlib import Path

import pytest
from bindery_kit.limits.container import CGROUPS, memory_limit


def limit_of(root: Path, *, v2: bytes | None = None, v1: bytes | None = None) -> int | None:
    (root / "memory").mkdir()
    for name, content in (("memory.max", v2), ("memory/memory.limit_in_bytes", v1)):
        if content is not None:
            (root / name).write_bytes(content)
    return memory_limit(root)


@pytest.mark.parametrize(
    ("v2", "v1", "expected"),
    [
        (b"1073741824\n", None, 1_073_741_824),
        (None, b"2147483648\n", 2_147_483_648),
        (b"5\n", b"7\n", 5),
        (b"max\n", None, None),
        (b"max\n", b"7\n", 7),
        (None, b"9223372036854771712\n", None),  # what version 1 shows without a limit
        (str(2**60).encode(), None, None),
        (str(2**60 - 1).encode(), None, 2**60 - 1),
        (b"\xff\xfe", b"7\n", 7),
        (b"-5\n", b"", None),
        (None, None, None),
    ],
)
def test_the_limit_is_the_first_readable_number(
    tmp_path: Path, v2: bytes | None, v1: bytes | None, expected: int | None
) -> None:
    assert limit_of(tmp_path, v2=v2, v1=v1) == expected


def test_a_directory_in_place_of_the_file_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory.max").mkdir()
    assert memory_limit(tmp_path) is None


def test_the_kernel_shows_the_groups_below_sys() -> None:
    assert Path("/sys/fs/cgroup") == CGROUPS
