"""Identity: check at each start, before anything is opened, that the disks belong to this bookie and this cluster.

The same cookie is stored in ZooKeeper (`cookies/<bookie id>`) and in each directory (`current/VERSION`). The expected
cookie follows from the settings and the cluster's INSTANCEID.

| in ZooKeeper | in the directories           | result                                                                 |
|--------------|------------------------------|------------------------------------------------------------------------|
| another one, or another one in a directory  | refused, with expected and found values side by side                   |
| yes          | in all                       | good; but if the cluster has any ledger, a shard whose journal or      |
|              |                              | ledgers are missing goes into limbo                                    |
| yes          | missing in some, these empty | their content is lost: the shards that use them go into limbo, then    |
|              |                              | get their VERSION; with on_lost_storage=refuse: refused                |
| yes          | missing in some, with data   | refused: the owner of the data is unknown                              |
| no           | none has other files         | a new bookie, or one whose first start was interrupted: the cookie is  |
|              |                              | written, to the directories first                                      |
| no           | some have other files        | refused: the bookie was decommissioned, or this is another ZooKeeper   |

The limbo marker is always written first: a VERSION without it would make an empty directory look complete, and the
bookie would answer "no such entry" for entries that it had acknowledged. A new bookie also goes into limbo if the
cluster has ledgers, because another bookie, whose cookie was deleted, may have used its id; listing the ledgers then
shows whether it did.

A cookie has absolute paths, so it does not depend on the directory in which the bookie is started. Older cookies may
have relative paths, as in the settings; both are then resolved from the current directory.

Source: BookKeeper LegacyCookieValidation, which also refuses an interrupted first start, and BP-46 for limbo.
"""

import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from bindery_core.errors import BadVersion, Conflict, Corrupt, NoSuchNode
from bindery_core.formats.cookie import FILE_NAME, TEXT_SIZE_MAX, Cookie, Difference, describe, differences, parse
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore

from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_bookie.storage.io import reserve
from bindery_bookie.storage.io.disk import Disk

# Values of `storage.on_lost_storage`.
REPAIR: Final = "repair"
REFUSE: Final = "refuse"

_NEW_SUFFIX: Final = ".new"
_NO_DATA: Final = frozenset({FILE_NAME, limbo.FILE_NAME, reserve.FILE_NAME})
"""Files that a directory without data may contain, by their names up to the first dot."""


class WrongIdentity(Conflict):
    """This bookie must not serve from these disks. The message has the cause, the place, and the fix."""

    code = "wrong_identity"

    def __init__(self, message: str, *, sentence: str = "") -> None:
        """`sentence`: the message on one line, if it has a table."""
        super().__init__(message)
        self.sentence = sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a bookie that may start."""

    cookie: Cookie
    lost_directories: tuple[str, ...] = ()
    """Configured directories that this start found without their content. Their shards are in limbo."""
    is_new: bool = False
    """Whether the cluster had no cookie of this bookie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The id and the directories in the settings. The order of the directories is significant."""

    bookie_id: BookieId
    journal_dirs: tuple[str, ...]
    ledger_dirs: tuple[str, ...]
    cluster_options: str = ""
    """The options that name the cluster, for the commands in messages: `--zookeeper ... --ledgers-root ...`."""

    @property
    def directories(self) -> tuple[str, ...]:
        """Journal and ledger directories, each once."""
        return tuple(dict.fromkeys((*self.journal_dirs, *self.ledger_dirs)))

    @property
    def shards_count(self) -> int:
        return max(len(self.journal_dirs), len(self.ledger_dirs))

    def cookie(self, instance_id: str) -> Cookie:
        """Return the expected cookie, with absolute paths."""
        return absolute(
            Cookie(
                bookie_id=self.bookie_id,
                journal_dirs=self.journal_dirs,
                ledger_dirs=self.ledger_dirs,
                instance_id=instance_id,
            )
        )

    def directories_of(self, shard: int) -> tuple[str, str]:
        """Return the configured (journal, ledger) directory."""
        return self.journal_dirs[shard % len(self.journal_dirs)], self.ledger_dirs[shard % len(self.ledger_dirs)]

    def places_of(self, shard: int) -> tuple[str, str]:
        """Return the shard's places of (journal, entry logs and index): `current`, or `shard-<i>/current` if shared."""
        journals, ledgers = len(self.journal_dirs), len(self.ledger_dirs)
        journal_dir, ledger_dir = self.directories_of(shard)
        return self._place(journal_dir, shard, journals), self._place(ledger_dir, shard, ledgers)

    def _place(self, directory: str, shard: int, directories_count: int) -> str:
        sharing = range(shard % directories_count, self.shards_count, directories_count)
        return f"{directory}/current" if len(sharing) == 1 else f"{directory}/shard-{shard}/current"

    def command(self, verb: str) -> str:
        """Return `bindery bookie cookie <verb>` with the options of this claim."""
        options = ["--bookie-id", self.bookie_id, "--journal-dir", ",".join(self.journal_dirs)]
        options += ["--ledger-dir", ",".join(self.ledger_dirs)]
        return " ".join(
            filter(None, (f"bindery bookie cookie {verb}", self.cluster_options, *map(shlex.quote, options)))
        )


async def establish_identity(
    cookies: CookieStore,
    disk: Disk,
    claim: Claim,
    *,
    has_ledgers: Callable[[], Awaitable[bool]],
    now_ms: int,
    on_lost_storage: str = REPAIR,
) -> Identity:
    """Compare the cookies, and write the missing ones of a new bookie or a lost directory.

    `has_ledgers`: whether the cluster has any ledger; called if a cookie or data is missing. `now_ms`: the wall clock.
    `on_lost_storage`: REPAIR or REFUSE. Raises WrongIdentity; nothing was written then.
    """
    assert on_lost_storage in (REPAIR, REFUSE)
    expected = claim.cookie(await instance_id_of(cookies))
    found = await cookies.read(claim.bookie_id)
    texts = {f"{directory}/current/{FILE_NAME}": read_version(disk, directory) for directory in claim.directories}
    without = [d for d, text in zip(claim.directories, texts.values(), strict=True) if text is None]
    if found is not None:
        texts = {f"the cookie of {claim.bookie_id} in ZooKeeper": found.value, **texts}
    _compare(claim, expected, texts)
    used = [directory for directory in claim.directories if not is_empty(disk, directory, claim.shards_count)]
    if found is None and used:
        raise WrongIdentity(_unknown_to_cluster(claim, used))
    if found is not None and without:
        unmarked = [directory for directory in without if directory in used]
        if unmarked:
            raise WrongIdentity(_data_without_version(claim, unmarked))
        if on_lost_storage == REFUSE:
            raise WrongIdentity(_disk_lost(claim, without))
    for shard, reason in await _incomplete(disk, claim, without, is_new=found is None, has_ledgers=has_ledgers):
        write_marker(disk, claim.places_of(shard)[1], reason, now_ms)
    for directory in without:
        write_version(disk, directory, expected.text())
    if found is None:
        await cookies.write(claim.bookie_id, expected.text(), version=None)
        return Identity(cookie=expected, is_new=True)
    return Identity(cookie=expected, lost_directories=tuple(without))


def cluster_options(*, zookeeper: str, ledgers_root: str) -> str:
    """Return the options of `bindery bookie cookie` that name the cluster."""
    return f"--zookeeper {shlex.quote(zookeeper)} --ledgers-root {shlex.quote(ledgers_root)}"


def absolute(cookie: Cookie) -> Cookie:
    """Return the cookie with absolute paths; relative ones are resolved from the current directory."""
    return replace(
        cookie,
        journal_dirs=tuple(map(os.path.abspath, cookie.journal_dirs)),
        ledger_dirs=tuple(map(os.path.abspath, cookie.ledger_dirs)),
        index_dirs=None if cookie.index_dirs is None else tuple(map(os.path.abspath, cookie.index_dirs)),
    )


async def any_ledger(ledger_ids: AsyncIterator[LedgerId]) -> bool:
    """Return whether `LedgerManager.list()` yields any ledger, for `has_ledgers`."""
    async for _ in ledger_ids:
        return True
    return False


async def _incomplete(
    disk: Disk, claim: Claim, without: Sequence[str], *, is_new: bool, has_ledgers: Callable[[], Awaitable[bool]]
) -> list[tuple[int, str]]:
    """Return (shard, reason) of each shard that may have lost data."""
    suspects: dict[int, str] = {}
    lost: dict[int, str] = {}
    empty = shards_without_data(disk, claim)
    for shard in range(claim.shards_count):
        gone = [directory for directory in claim.directories_of(shard) if directory in without]
        if is_new:
            suspects[shard] = "the bookie is new, but its id may not be"
        elif gone:
            lost[shard] = f"storage lost: {', '.join(dict.fromkeys(gone))}"
        elif shard in empty:  # lost, or never created: the power failed after the cookie was written
            suspects[shard] = f"nothing is stored in {', '.join(empty[shard])}"
    if suspects and await has_ledgers():
        lost |= suspects
    return sorted(lost.items())


async def instance_id_of(cookies: CookieStore) -> str:
    """Return the cluster's id. Raises WrongIdentity if there is no cluster."""
    try:
        return await cookies.instance_id()
    except NoSuchNode as error:
        raise WrongIdentity("the cluster was never initialized; run `bindery cluster init` first") from error


def read_version(disk: Disk, directory: str) -> bytes | None:
    """Return the cookie in a directory; None without one."""
    try:
        file = disk.open_read(f"{directory}/current/{FILE_NAME}")
    except FileNotFoundError:
        return None
    try:
        return file.read_at(0, TEXT_SIZE_MAX)
    finally:
        file.close()


def write_version(disk: Disk, directory: str, text: bytes) -> None:
    """Write the VERSION file atomically: after a crash it has either its old or its new content."""
    current = f"{directory}/current"
    disk.make_directories(current)
    new = f"{FILE_NAME}{_NEW_SUFFIX}"
    if new in disk.list_names(current):
        disk.remove(f"{current}/{new}")
    file = disk.create(f"{current}/{new}")
    try:
        file.write_at(text, 0)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{current}/{new}", f"{current}/{FILE_NAME}")
    disk.sync_directory(current)


def is_empty(disk: Disk, directory: str, shards_count: int) -> bool:
    """Return whether a configured directory has no data of any shard."""
    places = [f"{directory}/current", *(f"{directory}/shard-{shard}/current" for shard in range(shards_count))]
    return not any(_data(disk, place) for place in places)


def shards_without_data(disk: Disk, claim: Claim) -> dict[int, list[str]]:
    """Return the shards without journal or ledgers, with the directories that are empty."""
    empty = {
        shard: [place for place in dict.fromkeys(claim.places_of(shard)) if not _data(disk, place)]
        for shard in range(claim.shards_count)
    }
    return {shard: places for shard, places in empty.items() if places}


def _data(disk: Disk, place: str) -> list[str]:
    return [name for name in disk.list_names(place) if name.partition(".")[0] not in _NO_DATA]


def _compare(claim: Claim, expected: Cookie, texts: dict[str, bytes | None]) -> None:
    """Raise WrongIdentity with all differences in one message. `texts`: cookies by place."""
    wrong: list[str] = []
    in_short: list[str] = []
    fields: set[str] = set()
    other_ids: set[str] = set()
    for where, text in texts.items():
        if text is None:
            continue
        try:
            cookie = absolute(parse(text))
        except (Corrupt, BadVersion) as error:
            wrong.append(f"{where} cannot be read: {error}")
            in_short.append(wrong[-1])
            continue
        problems = differences(expected, cookie)
        if problems:
            wrong.append(f"{where} does not match the settings and the cluster:\n{describe(problems)}")
            in_short.append(f"{where} has {_in_short(problems)}")
            fields |= {problem.field for problem in problems}
            other_ids |= {cookie.bookie_id} - {expected.bookie_id}
    if wrong:
        advice = _advice(claim, fields, other_ids)
        sentence = f"these are not the disks of {claim.bookie_id}: {', '.join(in_short)}; {' '.join(advice)}"
        raise WrongIdentity("\n".join((*wrong, *advice)), sentence=sentence)


def _in_short(problems: Sequence[Difference]) -> str:
    """Return the form `bookie id b1, not b0`. Index directories are left out if ledger directories differ."""
    fields = {problem.field for problem in problems}
    shown = [p for p in problems if p.field != "index directories" or "ledger directories" not in fields]
    return " and ".join(f"{problem.field} {problem.found}, not {problem.expected}" for problem in shown)


def _advice(claim: Claim, fields: set[str], other_ids: set[str]) -> list[str]:
    if "instance id" in fields:
        return [
            "The data is another cluster's. Start with that cluster's --zookeeper and --ledgers-root; for a new "
            "bookie, empty the directories."
        ]
    advice = []
    if other_ids:
        known = ", ".join(sorted(other_ids))
        advice.append(f"These are disks of {known}. Were disks swapped? Put them back, or start with the right id.")
    if not fields - {"bookie id"}:
        return [*advice, _adopt(claim)]
    # Another number or order cannot be adopted: it would assign ledgers to other shards.
    return [
        *advice,
        "Start with the directories that the cookie names, in that order.",
        _adopt(claim, which="these disks, as many as before and in the same order,"),
    ]


def _adopt(claim: Claim, which: str = "these disks") -> str:
    return f"To assign {which} to this bookie as they are: {claim.command('adopt')}"


def _disk_lost(claim: Claim, directories: list[str]) -> str:
    return (
        f"{claim.bookie_id} has a cookie in the cluster, but no {FILE_NAME} file in: {', '.join(directories)}\n"
        "Is a disk not mounted? Mount it and start again. If it is permanently lost, start with "
        "--storage-on-lost-storage=repair: the bookie then denies no entry that it may have lost, and copies the lost "
        "entries from other bookies."
    )


def _data_without_version(claim: Claim, directories: list[str]) -> str:
    return (
        f"these directories contain data, but no {FILE_NAME} file with its owner: {', '.join(directories)}\n"
        "Is the right disk mounted there? If the data is not needed, empty them: the bookie then copies its entries "
        f"from other bookies.\n{_adopt(claim)}"
    )


def _unknown_to_cluster(claim: Claim, directories: list[str]) -> str:
    return (
        f"{claim.bookie_id} has no cookie in this cluster, but these directories contain its data: "
        f"{', '.join(directories)}\n"
        "Was it decommissioned, or is this another cluster's ZooKeeper? Start it with the right --zookeeper and "
        f"--ledgers-root; to reuse the disks for a new bookie, empty the directories first.\n{_adopt(claim)}"
    )
