"""Every outcome of the cookie check: what starts, what is refused, and what the operator reads then."""

import random
from pathlib import Path

import pytest
from bindery_bookie.identity import WrongIdentity, establish_identity
from bindery_bookie.storage.disk import RealDisk
from bindery_core.cookie import Cookie, parse
from bindery_core.errors import Corrupt
from bindery_core.ids import BookieId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.cookies import CookieStore
from bindery_metadata.layout import LedgersLayout
from bindery_metadata.memory import MemoryTree

ID = BookieId("bookie-0")


class Machine:
    """Two directories and a cluster."""

    def __init__(self, root: Path) -> None:
        self.journal, self.ledger = root / "journal", root / "ledger"
        self.store = MemoryTree().connect()
        self.cookies = CookieStore(self.store, LedgersLayout())

    async def start(self, *, bookie_id: BookieId = ID, ledger: Path | None = None) -> Cookie:
        return await establish_identity(
            self.cookies,
            RealDisk(),
            bookie_id=bookie_id,
            journal_dir=str(self.journal),
            ledger_dir=str(ledger or self.ledger),
        )

    def file(self, directory: Path) -> Path:
        return directory / "current" / "VERSION"


@pytest.fixture
async def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    await initialize_cluster(machine.store, LedgersLayout(), randomness=random.Random(1))
    return machine


async def test_a_new_bookie_writes_the_same_cookie_everywhere(machine: Machine) -> None:
    cookie = await machine.start()
    found = await machine.cookies.read(ID)
    assert found is not None
    assert found.value == machine.file(machine.journal).read_bytes() == machine.file(machine.ledger).read_bytes()
    assert parse(found.value) == cookie
    assert cookie.instance_id == await machine.cookies.instance_id()


async def test_a_known_bookie_starts_again_and_changes_nothing(machine: Machine) -> None:
    first = await machine.start()
    (machine.ledger / "current" / "0.log").write_bytes(b"entries")
    assert await machine.start() == first
    found = await machine.cookies.read(ID)
    assert found is not None
    assert found.version == 0


async def test_journal_and_ledgers_may_share_a_directory(machine: Machine) -> None:
    machine.journal = machine.ledger
    await machine.start()
    await machine.start()


async def test_a_first_start_that_was_cut_short_is_finished(machine: Machine) -> None:
    """Power went after the first of the files, or before the cookie reached ZooKeeper."""
    await machine.start()
    await machine.cookies.delete(ID, version=0)
    await machine.start()
    await machine.cookies.delete(ID, version=0)
    machine.file(machine.ledger).rename(machine.ledger / "current" / "VERSION.new")
    await machine.start()
    assert machine.file(machine.ledger).read_bytes() == machine.file(machine.journal).read_bytes()


async def test_another_id_is_refused_with_both_sides(machine: Machine) -> None:
    await machine.start()
    with pytest.raises(WrongIdentity) as refused:
        await machine.start(bookie_id=BookieId("bookie-1"))
    text = str(refused.value)
    assert "journal/current/VERSION is not what the settings and the cluster say" in text
    assert "field      expected  found" in text
    assert "bookie id  bookie-1  bookie-0" in text


async def test_another_directory_is_refused(machine: Machine, tmp_path: Path) -> None:
    await machine.start()
    with pytest.raises(WrongIdentity, match="the cookie of bookie-0 in ZooKeeper is not") as refused:
        await machine.start(ledger=tmp_path / "elsewhere")
    assert f"{tmp_path}/elsewhere  {machine.ledger}" in str(refused.value)
    assert not (tmp_path / "elsewhere").exists(), "a refused start writes nothing"


async def test_another_cluster_is_refused(machine: Machine) -> None:
    await machine.start()
    other = Machine(machine.journal.parent)
    await initialize_cluster(other.store, LedgersLayout(), randomness=random.Random(2))
    with pytest.raises(WrongIdentity, match="instance id"):
        await other.start()


async def test_an_empty_disk_under_a_known_bookie_is_refused(machine: Machine) -> None:
    """Serving from it would answer "no such entry" for everything that the bookie had acknowledged."""
    await machine.start()
    machine.file(machine.ledger).unlink()
    with pytest.raises(WrongIdentity, match=r"there is no VERSION file in: .*/ledger\n.*not mounted"):
        await machine.start()
    assert not machine.file(machine.ledger).exists()


async def test_a_bookie_without_cookie_but_with_entries_is_refused(machine: Machine) -> None:
    await machine.start()
    (machine.ledger / "current" / "0.log").write_bytes(b"entries")
    await machine.cookies.delete(ID, version=0)
    with pytest.raises(
        WrongIdentity, match=r"no cookie in this cluster, .* hold its data: .*/ledger\n.*decommissioned"
    ):
        await machine.start()
    assert await machine.cookies.read(ID) is None


async def test_entries_without_any_cookie_are_refused(machine: Machine) -> None:
    (machine.journal / "current").mkdir(parents=True)
    (machine.journal / "current" / "1.txn").write_bytes(b"records")
    with pytest.raises(WrongIdentity, match="hold its data"):
        await machine.start()


async def test_a_cluster_that_was_never_initialised_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongIdentity, match="bindery cluster init"):
        await Machine(tmp_path).start()


async def test_a_damaged_version_file_is_damage(machine: Machine) -> None:
    await machine.start()
    machine.file(machine.journal).write_bytes(b"\x00" * 100)
    with pytest.raises(Corrupt, match="not a cookie"):
        await machine.start()
