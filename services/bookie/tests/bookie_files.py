"""Fixtures: the directory of a crashed bookie and its files. A conftest imports those that its tests use."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import bookie_directory
import pytest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.kv import LevelDbKV


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bookie_directory.make(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def bookie(pristine: Path, tmp_path: Path) -> Path:
    """A private copy of the directory of a crashed bookie, which a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "bookie"))


@pytest.fixture
def current(bookie: Path) -> Path:
    return bookie / "ledgers" / "current"


@pytest.fixture
def log(current: Path) -> Path:
    return current / "1.log"


@pytest.fixture
def journal(bookie: Path) -> Path:
    (path,) = (bookie / "journal" / "current").glob("*.txn")
    return path


@pytest.fixture
def index(current: Path) -> Iterator[Index]:
    """The index of the bookie, which a test may damage; close it before the files are read."""
    index = Index(LevelDbKV(str(current / "index")))
    yield index
    index.close()
