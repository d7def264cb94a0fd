"""Identity: whether these disks are this bookie's, in this cluster. Asked at each start, before anything is opened.

The same cookie stands in ZooKeeper (`cookies/<bookie id>`) and in each directory (`current/VERSION`); expected is what
settings and the cluster's INSTANCEID say.

| in ZooKeeper | in the directories          | verdict                                                                 |
|--------------|-----------------------------|-------------------------------------------------------------------------|
| another one, or another one in some directory | refused: expected and found side by side                          |
| yes          | in all                      | good                                                                    |
| yes          | missing in some             | refused: a disk is new, empty or not mounted; serving would mean saying |
|              |                             | "no such entry" of what was lost                                        |
| no           | none, or all else is empty  | a new bookie, or one whose first start was cut short: the cookie is     |
|              |                             | written, to the directories first                                       |
| no           | some hold other files       | refused: decommissioned, or the wrong ZooKeeper                         |

Source: BookKeeper LegacyCookieValidation, which also refuses the start that was cut short.
"""

from bindery_core.cookie import FILE_NAME, TEXT_SIZE_MAX, Cookie, describe, differences, parse
from bindery_core.errors import Conflict, NoSuchNode
from bindery_core.ids import BookieId
from bindery_metadata.cookies import CookieStore

from bindery_bookie.storage.disk import Disk

_NEW_SUFFIX = ".new"


class WrongIdentity(Conflict):
    """This bookie must not serve from these disks. The message is for an operator: what, where, what to do."""

    code = "wrong_identity"


async def establish_identity(
    cookies: CookieStore, disk: Disk, *, bookie_id: BookieId, journal_dir: str, ledger_dir: str
) -> Cookie:
    """Compare the cookies, write those of a new bookie, return the one in force. Raises WrongIdentity."""
    try:
        instance_id = await cookies.instance_id()
    except NoSuchNode as error:
        raise WrongIdentity("the cluster was never initialised; run `bindery cluster init` first") from error
    expected = Cookie(
        bookie_id=bookie_id, journal_dirs=(journal_dir,), ledger_dirs=(ledger_dir,), instance_id=instance_id
    )
    directories = list(dict.fromkeys((*expected.journal_dirs, *expected.ledger_dirs)))
    found = await cookies.read(bookie_id)
    if found is not None:
        _compare(expected, found.value, where=f"the cookie of {bookie_id} in ZooKeeper")
    without = []
    for directory in directories:
        text = _read(disk, directory)
        if text is None:
            without.append(directory)
        else:
            _compare(expected, text, where=f"{directory}/current/{FILE_NAME}")
    if found is not None:
        if without:
            raise WrongIdentity(_disk_lost(bookie_id, without))
        return expected
    used = [directory for directory in directories if not _is_empty(disk, directory)]
    if used:
        raise WrongIdentity(_unknown_to_cluster(bookie_id, used))
    for directory in without:
        _write(disk, directory, expected.text())
    await cookies.write(bookie_id, expected.text(), version=None)
    return expected


def _compare(expected: Cookie, text: bytes, *, where: str) -> None:
    problems = differences(expected, parse(text))
    if problems:
        raise WrongIdentity(
            f"{where} is not what the settings and the cluster say:\n{describe(problems)}\n"
            "Start the bookie with the id, the directories and the ZooKeeper it was made with. If it is meant to be a "
            "new one, give it empty directories and an id of its own."
        )


def _disk_lost(bookie_id: BookieId, directories: list[str]) -> str:
    return (
        f"{bookie_id} is known to the cluster, but there is no {FILE_NAME} file in: {', '.join(directories)}\n"
        "Is a disk not mounted? Mount it and start again. If it is lost for good, let the cluster heal from the other "
        f"copies, remove the cookie of {bookie_id} from ZooKeeper, and start it with all directories empty."
    )


def _unknown_to_cluster(bookie_id: BookieId, directories: list[str]) -> str:
    return (
        f"{bookie_id} has no cookie in this cluster, but these directories hold its data: {', '.join(directories)}\n"
        "Was it decommissioned, or is this another cluster's ZooKeeper? Start it with the right --zookeeper and "
        "--ledgers-root; to use the disks anew, empty the directories first."
    )


def _read(disk: Disk, directory: str) -> bytes | None:
    try:
        file = disk.open_read(f"{directory}/current/{FILE_NAME}")
    except FileNotFoundError:
        return None
    try:
        return file.read_at(0, TEXT_SIZE_MAX)
    finally:
        file.close()


def _is_empty(disk: Disk, directory: str) -> bool:
    return all(name.startswith(FILE_NAME) for name in disk.list_names(f"{directory}/current"))


def _write(disk: Disk, directory: str, text: bytes) -> None:
    """The file is there with all of its text, or not at all, whatever happens in between."""
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
