"""`bindery standalone` refuses clusters that cannot store anything, and warns of a full disk."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from bindery.standalone.commands import disk_warning
from bindery.standalone.options import Options
from bindery_core.errors import BadRequest


def test_brokers_without_bookies_are_refused() -> None:
    with pytest.raises(BadRequest, match="--bookies 0 leaves the brokers without storage"):
        Options(bookies=0)
    Options(bookies=0, brokers=0)
    Options(bookies=0, zookeeper="127.0.0.1:2181")  # that cluster may have bookies


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (20, None),
        (8, "is 92 % full: bookies become read-only at 95 %"),
        (4, "is 96 % full: at 95 % bookies are read-only, and messages are refused. Free space"),
    ],
)
def test_a_full_disk_is_reported_with_its_path_and_the_limit(
    free: int, expected: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100, free=free))
    warning = disk_warning(tmp_path)
    if expected is None:
        assert warning is None
    else:
        assert warning is not None
        assert warning.startswith(f"warning: the disk of {tmp_path} ")
        assert expected in warning
