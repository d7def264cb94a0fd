"""The identity of a stopped bookie's disks is compared, adopted and retired, as a start accepts it afterwards."""

import random
from pathlib import Path

import pytest
from bindery_bookie.membership.identity import Claim, WrongIdentity, establish_identity, instance_id_of
from bindery_bookie.offline import disk_identity
from bindery_bookie.offline.disk_identity import IN_ZOOKEEPER, CannotAdopt, CannotRetire, DiskIdentity
from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.corruption.limbo import read_marker, remove_marker
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.formats.cookie import Cookie, Difference, parse
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, MetadataRollbackSuspected, RollbackReport
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryTree
from bookie_offline_locks import held

ID = BookieId("bookie-0")
LAYOUT = LedgersLayout()


class Machine:
    """The directories of one bookie, and the cluster in which it starts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = MemoryTree().connect()
        self.cookies = CookieStore(self.store, LAYOUT)
        self.ledgers = LedgerManager(self.store, LAYOUT, randomness=random.Random(1))
        self.memberships = MembershipStore(self.store, clock_ms=lambda: 1)

    async def initialize(self, seed: int = 1) -> None:
        await initialize_cluster(self.store, LAYOUT, randomness=random.Random(seed))

    def paths(self, names: str) -> tuple[str, ...]:
        return tuple(f"{self.root}/{name}" for name in names.split(","))

    def claim(self, bookie_id: BookieId = ID, *, journals: str = "j", ledgers: str = "l") -> Claim:
        return Claim(bookie_id=bookie_id, journal_dirs=self.paths(journals), ledger_dirs=self.paths(ledgers))

    def identity(
        self, bookie_id: BookieId = ID, *, journals: str = "j", ledgers: str = "l", now_ms: int = 77
    ) -> DiskIdentity:
        settings = BookieSettings(
            bookie_id=bookie_id,
            journal_dir=",".join(self.paths(journals)),
            ledger_dir=",".join(self.paths(ledgers)),
            zookeeper="zk:2181",
        )
        return DiskIdentity(settings, self.store, LAYOUT, self.ledgers, clock_ms=lambda: now_ms)

    async def start(self, claim: Claim | None = None) -> None:
        """Establish the identity as a bookie does, end its limbo, and store data in each directory."""
        claim = claim or self.claim()
        await establish_identity(self.cookies, RealDisk(), claim, has_ledgers=self._has_ledgers, now_ms=1)
        for shard in range(claim.shards_count):
            for place in claim.places_of(shard):
                Path(place).mkdir(parents=True, exist_ok=True)
                (Path(place) / "data").write_bytes(b"entries")

    async def _has_ledgers(self) -> bool:
        return True

    def healed(self, claim: Claim | None = None) -> None:
        claim = claim or self.claim()
        for shard in range(claim.shards_count):
            remove_marker(RealDisk(), claim.places_of(shard)[1])

    def limbo(self, claim: Claim | None = None) -> dict[int, str]:
        claim = claim or self.claim()
        markers = {at: read_marker(RealDisk(), claim.places_of(at)[1]) for at in range(claim.shards_count)}
        return {shard: marker.reason for shard, marker in markers.items() if marker is not None}

    def version(self, name: str = "l") -> Path:
        return self.root / name / "current" / "VERSION"

    async def cookie(self, bookie_id: BookieId = ID) -> bytes | None:
        found = await self.cookies.read(bookie_id)
        return None if found is None else found.value

    async def put_ledger(self, *ensembles: tuple[str, ...]) -> LedgerId:
        segments = tuple(Segment(EntryId(at), tuple(map(BookieId, one))) for at, one in enumerate(ensembles))
        count = len(ensembles[0])
        metadata = LedgerMetadata(ensemble_size=count, write_quorum=count, ack_quorum=1, segments=segments)
        return (await self.ledgers.create(metadata))[0]


@pytest.fixture
async def machine(tmp_path: Path) -> Machine:
    """A bookie that was started once and has data."""
    machine = Machine(tmp_path)
    await machine.initialize()
    await machine.start()
    machine.healed()
    return machine


# --- compare


async def test_a_good_bookie_has_the_same_cookie_everywhere(machine: Machine) -> None:
    comparison = await machine.identity().compare()
    assert comparison.differences() == {}
    assert list(comparison.found) == [IN_ZOOKEEPER, f"{machine.root}/j", f"{machine.root}/l"]
    assert [one.where for one in comparison.found.values()] == [
        "ZooKeeper",
        f"{machine.root}/j/current/VERSION",
        f"{machine.root}/l/current/VERSION",
    ]
    assert {one.cookie for one in comparison.found.values()} == {comparison.expected}
    assert comparison.expected == Cookie(
        bookie_id=ID,
        journal_dirs=machine.paths("j"),
        ledger_dirs=machine.paths("l"),
        instance_id=await instance_id_of(machine.cookies),
    )
    assert comparison.zookeeper_version == 0


async def test_missing_and_unreadable_cookies_differ(machine: Machine) -> None:
    machine.version("j").unlink()
    machine.version("l").write_bytes(b"\0" * 50)
    await machine.cookies.delete(ID, version=0)
    comparison = await machine.identity().compare()
    assert comparison.zookeeper_version is None
    damaged = comparison.found[f"{machine.root}/l"]
    assert damaged.cookie is None
    assert damaged.problem
    none = [Difference("cookie", "(as above)", "(none)")]
    assert comparison.differences() == {
        IN_ZOOKEEPER: none,
        f"{machine.root}/j": none,
        f"{machine.root}/l": [Difference("cookie", "(as above)", damaged.problem)],
    }


async def test_another_id_differs_in_every_place(machine: Machine) -> None:
    comparison = await machine.identity(BookieId("bookie-1")).compare()
    other = [Difference("bookie id", "bookie-1", "bookie-0")]
    assert comparison.differences() == {
        IN_ZOOKEEPER: [Difference("cookie", "(as above)", "(none)")],
        f"{machine.root}/j": other,
        f"{machine.root}/l": other,
    }


async def test_without_a_cluster_nothing_is_compared(tmp_path: Path) -> None:
    with pytest.raises(WrongIdentity):
        await Machine(tmp_path).identity().compare()


# --- adopt


async def test_adopting_good_disks_plans_nothing(machine: Machine) -> None:
    adoption = await machine.identity().adopt(apply=True)
    assert adoption.plan == ()
    assert machine.limbo() == {}
    found = await machine.cookies.read(ID)
    assert found is not None
    assert found.version == 0


async def test_a_plan_is_not_applied_unless_asked(machine: Machine) -> None:
    await machine.cookies.delete(ID, version=0)
    machine.version("j").unlink()
    adoption = await machine.identity().adopt(apply=False)
    assert adoption.plan == (
        f"shard 0 goes into limbo: adopted {machine.root}/j, which had no readable cookie",
        f"write {machine.root}/j/current/VERSION",
        "write the cookie of bookie-0 in ZooKeeper",
    )
    assert adoption.comparison.zookeeper_version is None
    assert await machine.cookie() is None
    assert not machine.version("j").exists()
    assert machine.limbo() == {}


async def test_a_deleted_cookie_is_restored_in_limbo(machine: Machine) -> None:
    """Another bookie may have run with this id meanwhile and acknowledged entries."""
    await machine.cookies.delete(ID, version=0)
    with pytest.raises(WrongIdentity):
        await machine.start()
    await machine.identity(now_ms=88).adopt(apply=True)
    assert machine.limbo() == {0: "adopted; ZooKeeper had no cookie of this bookie"}
    marker = read_marker(RealDisk(), f"{machine.root}/l/current")
    assert marker is not None
    assert marker.since_ms == 88
    assert await machine.cookie() == machine.version().read_bytes()
    await machine.start()


async def test_a_cookie_of_another_cluster_in_zookeeper_is_replaced_in_limbo(machine: Machine) -> None:
    old = parse(machine.version().read_bytes())
    foreign = Cookie(
        bookie_id=ID, journal_dirs=old.journal_dirs, ledger_dirs=old.ledger_dirs, instance_id="another-cluster"
    )
    await machine.cookies.write(ID, foreign.text(), version=0)
    adoption = await machine.identity().adopt(apply=True)
    assert adoption.plan == (
        "shard 0 goes into limbo: adopted; the cookie in ZooKeeper named another bookie or cluster",
        "write the cookie of bookie-0 in ZooKeeper",
    )
    assert await machine.cookie() == machine.version().read_bytes()
    await machine.start()


async def test_moved_directories_are_adopted_without_limbo(machine: Machine) -> None:
    """The same disks at other mount points have all their data."""
    (machine.root / "l").rename(machine.root / "moved")
    moved = machine.claim(ledgers="moved")
    with pytest.raises(WrongIdentity):
        await machine.start(moved)
    adoption = await machine.identity(ledgers="moved").adopt(apply=True)
    assert adoption.plan == (
        f"write {machine.root}/j/current/VERSION",
        f"write {machine.root}/moved/current/VERSION",
        "write the cookie of bookie-0 in ZooKeeper",
    )
    assert machine.limbo(moved) == {}
    cookie = await machine.cookie()
    assert cookie is not None
    assert parse(cookie).ledger_dirs == machine.paths("moved")
    await machine.start(moved)


async def test_another_bookies_disks_are_adopted_in_limbo(machine: Machine) -> None:
    other = machine.claim(BookieId("bookie-1"))
    adoption = await machine.identity(BookieId("bookie-1")).adopt(apply=True)
    assert adoption.plan == (
        f"shard 0 goes into limbo: adopted {machine.root}/l, which belonged to bookie-0",
        f"write {machine.root}/j/current/VERSION",
        f"write {machine.root}/l/current/VERSION",
        "write the cookie of bookie-1 in ZooKeeper",
    )
    await machine.start(other)
    assert await machine.cookie(BookieId("bookie-1")) == machine.version().read_bytes()


async def test_only_the_shards_of_an_unreadable_directory_go_into_limbo(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.initialize()
    claim = machine.claim(ledgers="l0,l1")
    await machine.start(claim)
    machine.healed(claim)
    machine.version("l1").unlink()
    await machine.identity(ledgers="l0,l1").adopt(apply=True)
    assert machine.limbo(claim) == {1: f"adopted {tmp_path}/l1, which had no readable cookie"}
    assert machine.version("l1").read_bytes() == machine.version("l0").read_bytes()


async def test_directories_without_data_go_into_limbo(machine: Machine) -> None:
    (machine.root / "l" / "current" / "data").unlink()
    adoption = await machine.identity().adopt(apply=True)
    assert adoption.plan == (f"shard 0 goes into limbo: adopted; no data in {machine.root}/l/current",)
    assert list(machine.limbo()) == [0]


async def test_a_directory_that_had_no_cookie_is_reported_rather_than_its_missing_data(machine: Machine) -> None:
    (machine.root / "l" / "current" / "data").unlink()
    machine.version("l").unlink()
    adoption = await machine.identity().adopt(apply=False)
    assert adoption.plan[0] == f"shard 0 goes into limbo: adopted {machine.root}/l, which had no readable cookie"


async def test_another_clusters_disks_are_refused(machine: Machine) -> None:
    """Ledger 7 of the other cluster is another ledger, which a bookie in limbo would serve."""
    other = Machine(machine.root)
    await other.initialize(2)
    with pytest.raises(CannotAdopt, match=f"{machine.root}/j/current/VERSION is of another cluster"):
        await other.identity().adopt(apply=True)
    assert await other.cookie() is None
    assert machine.limbo() == {}
    assert CannotAdopt.code == "cannot_adopt"


async def test_another_number_of_directories_is_refused(machine: Machine) -> None:
    with pytest.raises(CannotAdopt) as raised:
        await machine.identity(ledgers="l,more").adopt(apply=True)
    assert str(raised.value) == (
        f"ZooKeeper names 1 ledger directories in this order: {machine.root}/l; the settings name {machine.root}/l, "
        f"{machine.root}/more. Number and order of the directories determine where a ledger is stored: use those of "
        "the cookie"
    )
    with pytest.raises(CannotAdopt, match="ZooKeeper names 1 journal directories in this order"):
        await machine.identity(journals="j,more").adopt(apply=True)
    assert not (machine.root / "more").exists()


async def test_another_order_of_directories_is_refused(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.initialize()
    await machine.start(machine.claim(ledgers="l,more"))
    with pytest.raises(CannotAdopt, match="Number and order of the directories"):
        await machine.identity(ledgers="more,l").adopt(apply=True)


@pytest.mark.parametrize("read_only", [False, True])
async def test_nothing_is_changed_while_the_bookie_is_registered(machine: Machine, read_only: bool) -> None:
    await machine.cookies.delete(ID, version=0)
    await BookieRegistration(machine.store, LAYOUT, ID).register(read_only=read_only)
    with pytest.raises(CannotAdopt, match="bookie-0 is registered: stop it first"):
        await machine.identity().adopt(apply=True)
    with pytest.raises(CannotRetire, match="bookie-0 is registered: stop it first"):
        await machine.identity().retire(wipe_version=False, force=True)
    assert await machine.cookie() is None


async def test_nothing_is_adopted_or_wiped_while_a_bookie_runs_on_the_directories(machine: Machine) -> None:
    lock = machine.root / "l" / "current" / "index" / "LOCK"
    lock.parent.mkdir()
    lock.touch()
    running = f"runs on {machine.root}/l/current: stop it first"
    with held(lock):
        with pytest.raises(CannotAdopt, match=running):
            await machine.identity().adopt(apply=False)
        with pytest.raises(CannotRetire, match=running):
            await machine.identity().retire(wipe_version=True, force=False)
        assert await machine.cookie() is not None
        assert (await machine.identity().retire(wipe_version=False, force=False)).had_cookie, "it touches no file"


async def test_an_interrupted_adoption_is_finished_by_the_next(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limbo is recorded before any VERSION file is written; a bookie refuses to start in between."""
    machine.version().unlink()
    await machine.cookies.delete(ID, version=0)

    def fail(*arguments: object) -> None:
        raise OSError(5, "the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(disk_identity, "write_version", fail)
        with pytest.raises(OSError, match="the power is gone"):
            await machine.identity().adopt(apply=True)
    assert list(machine.limbo()) == [0]
    assert await machine.cookie() is None
    with pytest.raises(WrongIdentity):
        await machine.start()
    await machine.identity().adopt(apply=True)
    assert list(machine.limbo()) == [0]
    await machine.start()


# --- retire


async def test_retire_removes_only_the_cookie(machine: Machine) -> None:
    await machine.put_ledger(("bookie-7", "bookie-8"))
    retirement = await machine.identity().retire(wipe_version=False, force=False)
    assert (retirement.bookie_id, retirement.had_cookie, retirement.ledgers_count) == (ID, True, 0)
    assert (retirement.wiped, retirement.cleared_intent) == ((), None)
    assert await machine.cookie() is None
    assert machine.version().exists()
    again = await machine.identity().retire(wipe_version=False, force=False)
    assert not again.had_cookie


async def test_retire_is_refused_while_a_rollback_of_the_metadata_is_suspected(machine: Machine) -> None:
    """The newest ledgers that name the bookie may be missing in it."""
    known = KnownLedgersStore(machine.store, instance_id=await machine.cookies.instance_id())
    report = RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10)
    await known.update(lambda one: one.with_report("bookie-7", report))
    with pytest.raises(MetadataRollbackSuspected, match="the cookie of bookie-0 is not removed"):
        await machine.identity().retire(wipe_version=False, force=False)
    assert await machine.cookie() is not None
    assert (await machine.identity().retire(wipe_version=False, force=True)).had_cookie


async def test_retire_removes_the_version_files_on_request_and_no_data(machine: Machine) -> None:
    retirement = await machine.identity().retire(wipe_version=True, force=False)
    assert retirement.wiped == (f"{machine.root}/j", f"{machine.root}/l")
    assert not machine.version("j").exists()
    assert not machine.version("l").exists()
    assert (machine.root / "l" / "current" / "data").exists()
    assert (await machine.identity().retire(wipe_version=True, force=False)).wiped == ()


async def test_retire_is_refused_while_ledgers_name_the_bookie(machine: Machine) -> None:
    named = [await machine.put_ledger(("bookie-7",), (ID,)) for _ in range(21)]
    other = await machine.put_ledger(("bookie-7",))
    assert (named, other) == (list(range(21)), 21)
    with pytest.raises(CannotRetire) as raised:
        await machine.identity().retire(wipe_version=True, force=False)
    assert str(raised.value).splitlines()[0] == (
        "21 ledgers still name bookie-0: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, ..."
    )
    assert await machine.cookie() is not None
    assert machine.version().exists()
    forced = await machine.identity().retire(wipe_version=False, force=True)
    assert forced.ledgers_count == 21
    assert await machine.cookie() is None
    assert CannotRetire.code == "cannot_retire"


async def test_up_to_twenty_ledgers_are_all_named(machine: Machine) -> None:
    for _ in range(20):
        await machine.put_ledger((ID,))
    with pytest.raises(CannotRetire) as raised:
        await machine.identity().retire(wipe_version=False, force=False)
    assert str(raised.value).splitlines()[0].endswith("17, 18, 19")


async def test_ledgers_of_every_batch_are_counted(machine: Machine) -> None:
    for _ in range(102):
        await machine.put_ledger((ID,))
    assert (await machine.identity().retire(wipe_version=False, force=True)).ledgers_count == 102


async def test_a_ledger_deleted_while_the_metadata_is_searched_names_nothing(machine: Machine) -> None:
    first, second = [await machine.put_ledger((ID,)) for _ in range(2)]
    ledgers = machine.ledgers

    class Lagging:
        """A manager whose list still has a deleted ledger."""

        def list(self) -> object:
            return ledgers.list()

        async def read(self, ledger_id: LedgerId) -> object:
            if ledger_id == first:
                await ledgers.delete(first)
            return await ledgers.read(ledger_id)

    machine.ledgers = Lagging()  # type: ignore[assignment]
    assert (await machine.identity().retire(wipe_version=False, force=True)).ledgers_count == 1
    assert second == 1


@pytest.mark.parametrize("intent", [Intent.DRAINING, Intent.MAINTENANCE])
async def test_the_intent_for_a_retired_bookie_is_cleared(machine: Machine, intent: Intent) -> None:
    """A new bookie with this id is an ordinary member."""
    await machine.memberships.set(ID, intent)
    assert (await machine.identity().retire(wipe_version=False, force=False)).cleared_intent is intent
    assert await machine.memberships.all() == {}
    assert (await machine.identity().retire(wipe_version=False, force=False)).cleared_intent is None


async def test_the_intent_of_a_removed_bookie_and_of_one_that_ledgers_name_is_kept(machine: Machine) -> None:
    await machine.memberships.set(ID, Intent.REMOVED)
    assert (await machine.identity().retire(wipe_version=False, force=False)).cleared_intent is None
    assert (await machine.memberships.get(ID)).intent is Intent.REMOVED
    await machine.put_ledger((ID,))
    await machine.memberships.set(ID, Intent.DRAINING)
    assert (await machine.identity().retire(wipe_version=False, force=True)).cleared_intent is None
    assert (await machine.memberships.get(ID)).intent is Intent.DRAINING
