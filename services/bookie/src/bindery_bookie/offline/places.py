"""Find a bookie's directories by their content, and open their index without changing a byte.

A *place* is a directory with data of one shard: `<dir>/current`, or `<dir>/shard-<i>/current` if several shards share a
directory. A place contains a journal, or ledgers (entry logs, index, LastLogMark), or both.

LevelDB writes to an index that it opens, so a copy is opened: a temporary directory with links to the tables, which
never change, and copies of the few small other files. A link has the older suffix of tables, which LevelDB reads and
never writes. With the newer suffix, LevelDB could overwrite a table: if the MANIFEST is damaged, LevelDB numbers new
tables from an older state.
"""

import contextlib
import fcntl
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from bindery_core.errors import BadRequest, BinderyError, Conflict, DamagedStorage
from bindery_core.formats import cookie

from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import RealDisk, WritableFile
from bindery_bookie.storage.io.kv import LevelDbKV
from bindery_bookie.storage.io.leveldb_check import check_files
from bindery_bookie.storage.journal import journal_format, mark

INDEX: Final = "index"
"""Name of the directory of the index in a place."""
_COPY_ATTEMPTS: Final = 5
"""Attempts to copy the index of a running bookie, whose files change meanwhile."""
_TABLE_SUFFIXES: Final = (".ldb", ".sst")
_LINK_SUFFIX: Final = ".sst"
"""Source: LevelDB, SSTTableFileName in db/filename.h, and TableCache::FindTable."""
_SHARD: Final = re.compile(r"shard-(\d+)")
_FLOCK: Final = struct.Struct("@hhqqi4x")
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""


class BookieMayRun(Conflict):
    """A process, probably the bookie, has locked the index."""

    code = "bookie_runs"


class ReadOnlyDisk(RealDisk):
    """The operating system's files, read-only: each operation that changes one fails."""

    def create(self, path: str, *, allocate: int = 0) -> WritableFile:
        self._refuse(path)

    def truncate(self, path: str, size: int) -> None:
        self._refuse(path)

    def rename(self, source: str, target: str) -> None:
        self._refuse(source)

    def remove(self, path: str, *, is_unread: bool = False) -> None:
        self._refuse(path)

    def make_directories(self, path: str) -> None:
        self._refuse(path)

    def sync_directory(self, path: str) -> None:
        self._refuse(path)

    def _refuse(self, path: str) -> NoReturn:
        raise AssertionError(f"a read-only tool tried to change {path}")


@dataclass(frozen=True, slots=True)
class Place:
    """A directory with data of one shard."""

    path: str
    """Path of the directory. It ends in `current`, unless the directory is a copy with another name."""
    shard: int | None
    """Number of the shard by the path; None if the shard does not share its directory."""
    has_journal: bool
    has_ledgers: bool

    @property
    def directory(self) -> str:
        """The configured directory of this place."""
        own = Path(self.own_directory)
        return str(own if self.shard is None else own.parent)

    @property
    def own_directory(self) -> str:
        """The directory that selects this place alone, without the other shards of a shared directory."""
        path = Path(self.path)
        return str(path.parent if path.name == "current" else path)


@dataclass(frozen=True, slots=True)
class ShardPlaces:
    """The places of one shard. One of the two may be missing."""

    ledgers: Place | None
    journal: Place | None


def find_places(directories: Sequence[str]) -> list[Place]:
    """Return all places in the given directories, up to three levels below. Raises BadRequest if there is none.

    A directory may be a configured directory, its `current`, a copy of either, or the parent of several.
    """
    found: dict[str, Place] = {}
    for directory in directories:
        if not Path(directory).is_dir():
            raise BadRequest("no such file or directory", path=directory)
        before = len(found)
        for path in _candidates(Path(directory)):
            place = _classify(path)
            if place is not None:
                found.setdefault(os.path.realpath(path), place)
        if len(found) == before and not any(_is_below(known, directory) for known in found):
            raise BadRequest("not a bookie's directory: it has no journals, no entry logs and no index", path=directory)
    return list(found.values())


def find_ledgers(directories: Sequence[str]) -> list[ShardPlaces]:
    """Return the places with ledgers, each with its journal if it was found. Raises BadRequest without ledgers."""
    pairs = [pair for pair in pair_places(find_places(directories)) if pair.ledgers is not None]
    if not pairs:
        raise BadRequest("only journals here; pass a ledger directory", path=directories[0])
    return pairs


def pair_places(places: Sequence[Place]) -> list[ShardPlaces]:
    """Pair ledgers and journals by shard. Raises BadRequest if the pairs are ambiguous.

    The path or the cookie determines the shard of a place. If neither does, a single place of each kind form a pair;
    equal numbers of both kinds, with none missing, are paired in the given order.
    """
    ledgers = [place for place in places if place.has_ledgers]
    journals = [place for place in places if place.has_journal]
    journal_of = {place: place for place in ledgers if place.has_journal}
    journal_of |= _matched(
        [place for place in ledgers if not place.has_journal], [place for place in journals if not place.has_ledgers]
    )
    paired = set(journal_of.values())
    pairs = [ShardPlaces(place, journal_of.get(place)) for place in ledgers]
    return pairs + [ShardPlaces(None, journal) for journal in journals if journal not in paired]


def _matched(ledgers: Sequence[Place], journals: Sequence[Place]) -> dict[Place, Place]:
    """Return the journal of each of the ledgers for which there is one."""
    if not ledgers or not journals:
        return {}
    ours = [_shard_of(place, is_journal=False) for place in ledgers]
    theirs = [_shard_of(place, is_journal=True) for place in journals]
    if len(ledgers) == len(journals) == 1:
        is_other = None not in (*ours, *theirs) and ours != theirs
        return {} if is_other else {ledgers[0]: journals[0]}
    if len(ledgers) == len(journals):
        in_order: list[int | None] = list(range(len(ledgers)))
        known = [shards for shards in (ours, theirs) if set(shards) != {None}]
        if all(set(shards) == set(in_order) for shards in known):
            ours, theirs = (shards if shards in known else in_order for shards in (ours, theirs))
    if None in (*ours, *theirs) or len(set(ours)) < len(ours) or len(set(theirs)) < len(theirs):
        raise BadRequest(
            "neither paths nor VERSION files show which journal belongs to which ledgers; pass the directories of one "
            f"shard at a time: one journal, such as {journals[-1].own_directory}, and one directory with ledgers",
            ledgers=[place.path for place in ledgers],
            journals=[place.path for place in journals],
        )
    by_shard = dict(zip(theirs, journals, strict=True))
    return {place: by_shard[shard] for place, shard in zip(ledgers, ours, strict=True) if shard in by_shard}


def _shard_of(place: Place, *, is_journal: bool) -> int | None:
    """Return the shard by path or cookie; None if neither determines it."""
    if place.shard is not None:
        return place.shard
    try:
        found = cookie.parse((Path(place.path) / cookie.FILE_NAME).read_bytes())
    except (OSError, BinderyError):
        return None
    # The place is not shared, so there are as many directories of its kind as shards.
    directories = found.journal_dirs if is_journal else found.ledger_dirs
    names = [Path(directory).name for directory in directories]
    name = Path(place.directory).name
    if place.directory in directories:
        return directories.index(place.directory)
    return names.index(name) if names.count(name) == 1 else None


def _candidates(directory: Path) -> Iterator[Path]:
    yield directory
    for pattern in ("current", "shard-*/current", "*/current", "*/shard-*/current"):
        yield from sorted(path for path in directory.glob(pattern) if path.is_dir())


def _classify(path: Path) -> Place | None:
    try:
        names = os.listdir(path)
    except OSError as error:
        raise BadRequest(f"cannot read {path}: {error.strerror}") from error
    has_journal = any(journal_format.parse_file_name(name) for name in names)
    has_ledgers = (
        mark.FILE_NAME in names or INDEX in names or any(entry_log_format.parse_file_name(name) for name in names)
    )
    if not has_journal and not has_ledgers:
        return None
    # A configured directory that has such a name contains a cookie.
    shard = None if cookie.FILE_NAME in names else _SHARD.fullmatch(path.parent.name)
    return Place(str(path), int(shard[1]) if shard else None, has_journal, has_ledgers)


def _is_below(path: str, directory: str) -> bool:
    return Path(path).is_relative_to(os.path.realpath(directory))


# --- a running bookie


def running_pid(place: Place) -> int | None:
    """Return the pid of the process that has the index open, or None. The lock is not taken."""
    try:
        with open(f"{place.path}/{INDEX}/LOCK", "rb") as lock:
            answer = fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    kind, _, _, _, pid = _FLOCK.unpack(answer)
    return None if kind == fcntl.F_UNLCK else int(pid)


def bookie_of(pid: int | None) -> str:
    """Describe the running bookie. The kernel reports pid 0 for a process outside of this container."""
    return f"a bookie (pid {pid})" if pid else "a bookie in another container"


def running_on(places: Sequence[ShardPlaces]) -> str:
    """Describe the running bookie and its directory; empty if no bookie runs on any of them."""
    for pair in places:
        pid = None if pair.ledgers is None else running_pid(pair.ledgers)
        if pid is not None and pair.ledgers is not None:
            return f"{bookie_of(pid)} runs on {pair.ledgers.path}"
    return ""


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Hold LevelDB's own lock, so that no bookie can open the index. Raises BookieMayRun.

    This process must not close another open file of that path meanwhile, because the operating system would then
    release the lock.
    """
    try:
        fd = os.open(f"{place.path}/{INDEX}/LOCK", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield  # no bookie has this index open, because it would have created the file
        return
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BookieMayRun(f"{bookie_of(running_pid(place))} runs on {place.path}: stop it first") from error
        yield
    finally:
        os.close(fd)


# --- the index


@contextmanager
def opened_index(place: Place, *, verify: bool = True) -> Iterator[Index | None]:
    """Open a copy of the place's index; None without one. Raises DamagedStorage, OSError.

    `verify`: refuse, as a start does, an index with missing parts that LevelDB does not detect.
    """
    source = Path(place.path) / INDEX
    if not (source / "CURRENT").exists():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bindery-index-") as temporary:
        attempts = _COPY_ATTEMPTS if running_pid(place) else 1
        try:
            index = _open_copy(source, Path(temporary), attempts=attempts, verify=verify)
            try:
                yield index
            finally:
                index.close()
        except DamagedStorage as error:
            if str(error.facts.get("path", "")).startswith(temporary):
                raise DamagedStorage(error.message, **{**error.facts, "path": str(source)}) from error
            raise


def _open_copy(source: Path, temporary: Path, *, attempts: int, verify: bool) -> Index:
    for attempt in range(attempts):
        target = temporary / str(attempt)
        try:
            if verify:
                check_files(ReadOnlyDisk(), str(source))
            copy_index(source, target)
            index = Index(LevelDbKV(str(target)))
            try:
                if verify:
                    index.check_complete()
            except BaseException:
                index.close()
                raise
            return index
        except (OSError, BinderyError):
            if attempt + 1 == attempts:
                raise
    raise AssertionError


def copy_index(source: Path, target: Path) -> None:
    """Copy the files to which LevelDB may write, and link its tables. `target` must not exist."""
    target.mkdir()
    for path in sorted(source.iterdir(), key=lambda path: path.suffix in _TABLE_SUFFIXES):
        if path.suffix in _TABLE_SUFFIXES:
            (target / path.name).with_suffix(_LINK_SUFFIX).symlink_to(path.resolve())
        elif path.name != "LOCK" and path.is_file():
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(path, target / path.name)
