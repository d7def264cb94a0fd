"""The check of a bookie's identity: accepted starts, refused starts, and the errors for operators."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from bindery_bookie.membership.identity import (
    REFUSE,
    REPAIR,
    Claim,
    Identity,
    WrongIdentity,
    establish_identity,
    instance_id_of,
    read_version,
    write_version,
)
from bindery_bookie.storage.corruption.limbo import read_marker, remove_marker
from bindery_bookie.storage.io.disk import Disk, RealDisk
from bindery_core.formats.cookie import Cookie, parse
from bindery_core.ids import BookieId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_simulation.disk import CrashableDisk

ID = BookieId("bookie-0")


class Machine:
    """The directories of a bookie, and a cluster that has ledgers by default."""

    def __init__(self, root: str | Path, disk: Disk | None = None, *, journals: int = 1, ledgers: int = 1) -> None:
        self.disk = disk or RealDisk()
        self.claim = Claim(
            bookie_id=ID,
            journal_dirs=tuple(f"{root}/journal{number or ''}" for number in range(journals)),
            ledger_dirs=tuple(f"{root}/ledger{number or ''}" for number in range(ledgers)),
            cluster_options="--zookeeper zk:2181",
        )
        self.journal, self.ledger = Path(self.claim.journal_dirs[0]), Path(self.claim.ledger_dirs[0])
        self.store = MemoryTree().connect()
        self.cookies = CookieStore(self.store, LedgersLayout())
        self.cluster_has_ledgers = True

    async def start(
        self, *, bookie_id: BookieId = ID, claim: Claim | None = None, on_lost_storage: str = REPAIR
    ) -> Identity:
        """Check the identity as a start does; if it succeeds, store a file in each shard."""
        if claim is None:
            mine = self.claim
            claim = Claim(
                bookie_id=bookie_id,
                journal_dirs=mine.journal_dirs,
                ledger_dirs=mine.ledger_dirs,
                cluster_options=mine.cluster_options,
            )
        identity = await establish_identity(
            self.cookies,
            self.disk,
            claim,
            has_ledgers=self._has_ledgers,
            now_ms=1_000,
            on_lost_storage=on_lost_storage,
        )
        for shard in range(claim.shards_count):
            for place in claim.places_of(shard):
                self.put(f"{place}/data-{shard}")
        return identity

    def put(self, path: str, content: bytes = b"entries") -> None:
        directory, _, name = path.rpartition("/")
        if name not in self.disk.list_names(directory):
            self.disk.make_directories(directory)
            file = self.disk.create(path)
            file.write_at(content, 0)
            file.sync()
            file.close()
            self.disk.sync_directory(directory)

    def empty(self, directory: Path) -> None:
        for place in [f"{directory}/current", *(f"{directory}/shard-{shard}/current" for shard in range(4))]:
            for name in self.disk.list_names(place):
                self.disk.remove(f"{place}/{name}")

    def file(self, directory: Path) -> Path:
        return directory / "current" / "VERSION"

    def repaired(self) -> None:
        """End the limbo of all shards."""
        for shard in range(self.claim.shards_count):
            remove_marker(self.disk, self.claim.places_of(shard)[1])

    @property
    def limbo(self) -> dict[int, str]:
        """Return the reason for each shard that is in limbo."""
        markers = {
            shard: read_marker(self.disk, self.claim.places_of(shard)[1]) for shard in range(self.claim.shards_count)
        }
        return {shard: marker.reason for shard, marker in markers.items() if marker is not None}

    async def _has_ledgers(self) -> bool:
        return self.cluster_has_ledgers


async def in_a_cluster(machine: Machine) -> Machine:
    await initialize_cluster(machine.store, LedgersLayout(), randomness=random.Random(1))
    return machine


@pytest.fixture
async def machine(tmp_path: Path) -> Machine:
    return await in_a_cluster(Machine(tmp_path))


async def refusal(machine: Machine, claim: Claim | None = None, **options: str) -> str:
    machine.repaired()
    with pytest.raises(WrongIdentity) as refused:
        await machine.start(claim=claim, **options)
    assert not machine.limbo, "a refused start writes nothing"
    return str(refused.value)


async def test_a_new_bookie_writes_the_same_cookie_everywhere(machine: Machine) -> None:
    machine.cluster_has_ledgers = False
    identity = await machine.start()
    found = await machine.cookies.read(ID)
    assert found is not None
    assert found.value == machine.file(machine.journal).read_bytes() == machine.file(machine.ledger).read_bytes()
    assert parse(found.value) == identity.cookie
    assert identity.cookie.instance_id == await machine.cookies.instance_id()
    assert identity.lost_directories == ()
    assert not machine.limbo


async def test_a_new_bookie_in_a_cluster_with_ledgers_goes_into_limbo(machine: Machine) -> None:
    """If the cookie was deleted and the disks were emptied, this id may have acknowledged entries before."""
    identity = await machine.start()
    assert identity.lost_directories == ()
    assert machine.limbo == {0: "the bookie is new, but its id may not be"}


async def test_a_known_bookie_starts_again_and_changes_nothing(machine: Machine) -> None:
    first = await machine.start()
    machine.repaired()
    assert first.is_new
    assert await machine.start() == replace(first, is_new=False)
    found = await machine.cookies.read(ID)
    assert found is not None
    assert found.version == 0
    assert not machine.limbo


async def test_journal_and_ledgers_may_share_a_directory(machine: Machine) -> None:
    both = Claim(bookie_id=ID, journal_dirs=(str(machine.ledger),), ledger_dirs=(str(machine.ledger),))
    await machine.start(claim=both)
    machine.repaired()
    await machine.start(claim=both)
    assert not machine.limbo


async def test_an_interrupted_first_start_is_completed(tmp_path: Path) -> None:
    """The power fails at some operation, and unsynced bytes are kept, torn or lost. The next start completes it."""
    for operations in range(12):
        disk = CrashableDisk()
        machine = await in_a_cluster(Machine("", disk))
        machine.cluster_has_ledgers = operations % 2 == 0
        disk.cut_after(operations)
        try:
            await machine.start()
        except OSError:
            machine.disk = disk.after_power_cut(operations)
        else:
            assert operations >= 10, "it takes more than that"
        was_known = await machine.cookies.read(ID) is not None
        await machine.start()
        if was_known:  # the cookie was written, the storage perhaps not, which looks like a loss
            assert set(machine.limbo) <= {0}
        found = await machine.cookies.read(ID)
        assert found is not None
        for directory in machine.claim.directories:
            assert machine.disk.open_read(f"{directory}/current/VERSION").read_at(0, 10_000) == found.value


async def test_another_id_is_refused_with_both_values_and_the_command(machine: Machine) -> None:
    await machine.start()
    text = await refusal(machine, bookie_id=BookieId("bookie-1"))
    assert "journal/current/VERSION does not match the settings and the cluster" in text
    assert "ledger/current/VERSION does not match the settings and the cluster" in text
    assert "field      expected  found" in text
    assert "bookie id  bookie-1  bookie-0" in text
    assert "These are disks of bookie-0." in text
    assert (
        "bindery bookie cookie adopt --zookeeper zk:2181 --bookie-id bookie-1 "
        f"--journal-dir {machine.journal} --ledger-dir {machine.ledger}"
    ) in text


async def test_swapped_disks_of_two_bookies_are_refused_by_both(tmp_path: Path) -> None:
    first = await in_a_cluster(Machine(tmp_path / "a"))
    second = Machine(tmp_path / "b")
    second.store, second.cookies = first.store, first.cookies
    other = Claim(bookie_id=BookieId("bookie-1"), journal_dirs=("/j",), ledger_dirs=("/l",))
    same = Claim(bookie_id=ID, journal_dirs=("/j",), ledger_dirs=("/l",))
    first.disk, second.disk = CrashableDisk(), CrashableDisk()
    await first.start(claim=same)
    await second.start(claim=other)
    first.disk, second.disk = second.disk, first.disk
    assert "disks of bookie-1. Were disks swapped?" in await refusal(first, same)
    assert "disks of bookie-0. Were disks swapped?" in await refusal(second, other)


async def test_other_directories_are_refused(machine: Machine, tmp_path: Path) -> None:
    await machine.start()
    moved = Claim(bookie_id=ID, journal_dirs=machine.claim.journal_dirs, ledger_dirs=(f"{tmp_path}/elsewhere",))
    text = await refusal(machine, moved)
    assert "the cookie of bookie-0 in ZooKeeper does not match" in text
    assert f"{tmp_path}/elsewhere  {machine.ledger}" in text
    assert not (tmp_path / "elsewhere").exists(), "a refused start writes nothing"


async def test_more_directories_than_before_are_refused(machine: Machine, tmp_path: Path) -> None:
    """Ledgers would be assigned to other shards."""
    await machine.start()
    more = Claim(
        bookie_id=ID,
        journal_dirs=machine.claim.journal_dirs,
        ledger_dirs=(*machine.claim.ledger_dirs, f"{tmp_path}/more"),
    )
    text = await refusal(machine, more)
    assert f"{machine.ledger},{tmp_path}/more  {machine.ledger}" in text
    assert "as many as before and in the same order" in text, "others are not adopted"


async def test_leftovers_of_another_cluster_are_detected_before_the_bookie_joins(machine: Machine) -> None:
    await machine.start()
    other = Machine(machine.journal.parent)
    await initialize_cluster(other.store, LedgersLayout(), randomness=random.Random(2))
    text = await refusal(other)
    assert "instance id" in text
    assert "another cluster's" in text
    assert await other.cookies.read(ID) is None


async def test_an_empty_disk_of_a_known_bookie_gets_a_limbo_marker_before_its_version_file(machine: Machine) -> None:
    """Serving from it would answer "no such entry" for everything that the bookie had acknowledged."""
    await machine.start()
    machine.repaired()
    machine.empty(machine.ledger)
    identity = await machine.start()
    assert identity.lost_directories == (str(machine.ledger),)
    assert machine.limbo == {0: f"storage lost: {machine.ledger}"}
    assert machine.file(machine.ledger).read_bytes() == machine.file(machine.journal).read_bytes()


async def test_an_empty_disk_is_refused_with_on_lost_storage_refuse(machine: Machine) -> None:
    await machine.start()
    machine.repaired()
    machine.empty(machine.ledger)
    text = await refusal(machine, on_lost_storage=REFUSE)
    assert f"no VERSION file in: {machine.ledger}\n" in text
    assert "not mounted" in text
    assert not machine.file(machine.ledger).exists()


async def test_a_lost_directory_puts_its_own_shards_into_limbo(tmp_path: Path) -> None:
    machine = await in_a_cluster(Machine(tmp_path, journals=2, ledgers=3))
    assert machine.claim.places_of(2) == (f"{tmp_path}/journal/shard-2/current", f"{tmp_path}/ledger2/current")
    assert machine.claim.places_of(1) == (f"{tmp_path}/journal1/current", f"{tmp_path}/ledger1/current")
    await machine.start()
    machine.repaired()
    await machine.start()
    assert not machine.limbo
    machine.empty(tmp_path / "ledger1")
    await machine.start()
    assert machine.limbo == {1: f"storage lost: {tmp_path}/ledger1"}
    machine.repaired()
    machine.empty(tmp_path / "journal")
    assert (await machine.start()).lost_directories == (f"{tmp_path}/journal",)
    assert set(machine.limbo) == {0, 2}


async def test_a_directory_with_only_a_version_goes_into_limbo(machine: Machine) -> None:
    """The data was removed, or the first start was interrupted."""
    await machine.start()
    version = machine.file(machine.ledger).read_bytes()
    machine.empty(machine.ledger)
    machine.put(f"{machine.ledger}/current/VERSION", version)
    machine.put(f"{machine.ledger}/current/reserve", b"\0" * 10)
    await machine.start()
    assert machine.limbo == {0: f"nothing is stored in {machine.ledger}/current"}


@pytest.mark.parametrize("lost", ["journal", "ledger"])
async def test_no_power_cut_leaves_a_version_file_without_a_limbo_marker(lost: str) -> None:
    """At every operation of the start after a loss, a directory has VERSION only if its LIMBO is durable."""
    operations = 0
    while True:
        disk = CrashableDisk()
        machine = await in_a_cluster(Machine("", disk))
        machine.cluster_has_ledgers = False
        await machine.start()
        machine.empty(Path(f"/{lost}"))
        for directory in machine.claim.directories:
            disk.sync_directory(f"{directory}/current")
        disk.cut_after(operations)
        try:
            identity = await establish_identity(
                machine.cookies,
                disk,
                machine.claim,
                has_ledgers=machine._has_ledgers,
                now_ms=1_000,
            )
        except OSError:
            identity = None
        survivor = disk.after_power_cut(operations)
        if f"/{lost}/current/VERSION" in survivor.paths():
            assert "/ledger/current/LIMBO" in survivor.paths(), operations
            marker = read_marker(survivor, "/ledger/current")
            assert marker is not None
            assert marker.reason == f"storage lost: /{lost}"
        if identity is not None:
            assert f"/{lost}/current/VERSION" in survivor.paths()
            break
        machine.disk = survivor
        await machine.start()  # completes the interrupted start
        assert "/ledger/current/LIMBO" in survivor.paths()
        operations += 1
    assert operations >= 6


async def test_data_without_a_version_is_refused(machine: Machine) -> None:
    """An old disk was mounted, or a copy restored: its owner is unknown."""
    await machine.start()
    machine.file(machine.ledger).unlink()
    text = await refusal(machine)
    assert f"no VERSION file with its owner: {machine.ledger}\n" in text
    assert "cookie adopt" in text


async def test_a_deleted_cookie_is_refused_with_the_command_that_restores_it(machine: Machine) -> None:
    await machine.start()
    await machine.cookies.delete(ID, version=0)
    text = await refusal(machine)
    assert f"no cookie in this cluster, but these directories contain its data: {machine.journal}" in text
    assert "decommissioned" in text
    assert "bindery bookie cookie adopt --zookeeper zk:2181" in text
    assert await machine.cookies.read(ID) is None


async def test_entries_without_any_cookie_are_refused(machine: Machine) -> None:
    (machine.journal / "current").mkdir(parents=True)
    (machine.journal / "current" / "1.txn").write_bytes(b"records")
    assert "contain its data" in await refusal(machine)


async def test_a_cluster_that_is_not_initialized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongIdentity, match="bindery cluster init"):
        await Machine(tmp_path).start()


@pytest.mark.parametrize("content", [b"\x00" * 100, b"2\nold\n", b""])
async def test_a_damaged_version_file_is_refused_with_its_path(machine: Machine, content: bytes) -> None:
    await machine.start()
    machine.file(machine.journal).write_bytes(content)
    text = await refusal(machine)
    assert f"{machine.file(machine.journal)} cannot be read: " in text
    assert "cookie adopt" in text


async def test_a_cookie_has_absolute_paths_wherever_the_bookie_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = await in_a_cluster(Machine("data/bookie"))
    identity = await machine.start()
    assert identity.cookie.journal_dirs == (f"{tmp_path}/data/bookie/journal",)
    assert parse((tmp_path / "data/bookie/ledger/current/VERSION").read_bytes()) == identity.cookie
    machine.repaired()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    machine.claim = Machine(tmp_path / "data/bookie").claim
    assert (await machine.start()).cookie == identity.cookie
    assert not machine.limbo
    assert "ledger directories" in await refusal(machine, Machine("data/bookie").claim)


async def test_a_relative_cookie_of_an_older_start_still_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    machine = await in_a_cluster(Machine("data/bookie"))
    await machine.start()
    machine.repaired()
    instance_id = await instance_id_of(machine.cookies)
    relative = Cookie(
        bookie_id=ID,
        journal_dirs=machine.claim.journal_dirs,
        ledger_dirs=machine.claim.ledger_dirs,
        instance_id=instance_id,
    )
    for directory in machine.claim.directories:
        write_version(machine.disk, directory, relative.text())
    found = await machine.cookies.read(ID)
    assert found is not None
    await machine.cookies.write(ID, relative.text(), version=found.version)
    for claim in (machine.claim, Machine(tmp_path / "data/bookie").claim):
        await machine.start(claim=claim)
        assert not machine.limbo
    assert read_version(machine.disk, machine.claim.ledger_dirs[0]) == relative.text()
