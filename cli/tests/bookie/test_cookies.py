"""`bindery bookie cookie show|adopt|retire`, compared with what a bookie accepts when it starts."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from bindery.common import operator, output
from bindery.main import app
from bindery_bookie.membership.identity import REPAIR, Claim, Identity, WrongIdentity, establish_identity
from bindery_bookie.offline import disk_identity
from bindery_bookie.storage.corruption.limbo import read_marker, remove_marker
from bindery_bookie.storage.io.disk import RealDisk
from bindery_core.errors import BadRequest
from bindery_core.formats.cookie import parse
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from typer.testing import CliRunner, Result

ID = BookieId("bookie-0")
LAYOUT = LedgersLayout()


class Machine:
    """The directories of one bookie, and clusters in which it can start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = self.new_cluster(1)

    def new_cluster(self, seed: int) -> MemoryTree:
        tree = MemoryTree()
        asyncio.run(initialize_cluster(tree.connect(), LAYOUT, randomness=random.Random(seed)))
        return tree

    def claim(self, bookie_id: BookieId = ID, *, journal: str = "j", ledgers: str = "l") -> Claim:
        return Claim(
            bookie_id=bookie_id,
            journal_dirs=tuple(f"{self.root}/{name}" for name in journal.split(",")),
            ledger_dirs=tuple(f"{self.root}/{name}" for name in ledgers.split(",")),
        )

    def start(self, claim: Claim | None = None) -> Identity:
        """Create the cookies as a bookie does, then store data in each directory."""

        async def has_ledgers() -> bool:
            return True

        claim = claim or self.claim()
        cookies = CookieStore(self.tree.connect(), LAYOUT)
        identity = asyncio.run(
            establish_identity(cookies, RealDisk(), claim, has_ledgers=has_ledgers, now_ms=1, on_lost_storage=REPAIR)
        )
        for shard in range(claim.shards_count):
            for place in claim.places_of(shard):
                Path(place).mkdir(parents=True, exist_ok=True)
                (Path(place) / "data").write_bytes(b"entries")
        return identity

    def healed(self, claim: Claim | None = None) -> None:
        claim = claim or self.claim()
        for shard in range(claim.shards_count):
            remove_marker(RealDisk(), claim.places_of(shard)[1])

    def limbo(self, claim: Claim | None = None) -> list[str]:
        claim = claim or self.claim()
        markers = [read_marker(RealDisk(), claim.places_of(shard)[1]) for shard in range(claim.shards_count)]
        return [marker.reason for marker in markers if marker is not None]

    def cookie(self, bookie_id: BookieId = ID) -> bytes | None:
        found = asyncio.run(CookieStore(self.tree.connect(), LAYOUT).read(bookie_id))
        return None if found is None else found.value

    def delete_cookie(self) -> None:
        asyncio.run(CookieStore(self.tree.connect(), LAYOUT).delete(ID, version=0))

    def run(self, verb: str, *options: str, claim: Claim | None = None) -> Result:
        claim = claim or self.claim()
        named = ["--bookie-id", claim.bookie_id, "--journal-dir", ",".join(claim.journal_dirs)]
        named += ["--ledger-dir", ",".join(claim.ledger_dirs)]
        return CliRunner().invoke(app, ["bookie", "cookie", verb, *named, *options])


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)

    @asynccontextmanager
    async def connected_store(zookeeper: str) -> AsyncIterator[MetadataStore]:
        yield machine.tree.connect()

    monkeypatch.setattr(operator, "connected_store", connected_store)
    machine.start()
    machine.healed()
    return machine


def facts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_of_a_good_bookie_exits_with_0(machine: Machine) -> None:
    result = machine.run("show", "--json")
    assert result.exit_code == 0
    assert facts(result)["same"]
    assert facts(result)["expected"]["ledger_dirs"] == f"{machine.root}/l"
    assert machine.run("show").stdout.count(": the same") == 3


def test_show_prints_the_differences_and_the_command(machine: Machine) -> None:
    (machine.root / "l" / "current" / "VERSION").unlink()
    result = machine.run("show", claim=machine.claim(BookieId("bookie-1")))
    assert result.exit_code == 3
    assert "bookie id  bookie-1  bookie-0" in result.stdout
    assert "cookie  (as above)  (none)" in result.stdout
    assert "bindery bookie cookie adopt --zookeeper 127.0.0.1:2181 --ledgers-root /ledgers --bookie-id" in result.stdout


def test_the_variables_of_the_bookie_apply(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKIE_BOOKIE_ID", ID)
    monkeypatch.setenv("BOOKIE_JOURNAL_DIR", f"{machine.root}/j")
    monkeypatch.setenv("BOOKIE_LEDGER_DIR", f"{machine.root}/l")
    assert CliRunner().invoke(app, ["bookie", "cookie", "show"]).exit_code == 0


@pytest.mark.parametrize("verb", ["show", "adopt"])
def test_default_directories_are_not_compared(machine: Machine, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.chdir(machine.root)
    named = {"--bookie-id": ID, "--journal-dir": f"{machine.root}/j"}
    result = CliRunner().invoke(app, ["bookie", "cookie", verb, *(word for pair in named.items() for word in pair)])
    assert isinstance(result.exception, BadRequest)
    assert "no such directory: " in str(result.exception)


# -- adopt ------------------------------------------------------------------------------------------------------------


def test_adopt_changes_nothing_if_the_cookies_match(machine: Machine) -> None:
    result = machine.run("adopt", "--yes")
    assert result.exit_code == 0
    assert "nothing to do" in result.stdout
    assert not machine.limbo()


def test_adopt_without_yes_only_prints(machine: Machine) -> None:
    machine.delete_cookie()
    result = machine.run("adopt", "--json")
    assert result.exit_code == 1
    assert facts(result)["plan"] == [
        "shard 0 goes into limbo: adopted; ZooKeeper had no cookie of this bookie",
        "write the cookie of bookie-0 in ZooKeeper",
    ]
    assert "--yes" in result.stderr
    assert machine.cookie() is None
    assert not machine.limbo()


def test_a_deleted_cookie_is_restored_in_limbo(machine: Machine) -> None:
    """Another bookie may have run with this id meanwhile and acknowledged entries."""
    machine.delete_cookie()
    with pytest.raises(WrongIdentity):
        machine.start()
    assert machine.run("adopt", "--yes").exit_code == 0
    assert machine.limbo() == ["adopted; ZooKeeper had no cookie of this bookie"]
    assert machine.cookie() == (machine.root / "l" / "current" / "VERSION").read_bytes()
    machine.start()


def test_moved_directories_are_adopted_without_limbo(machine: Machine) -> None:
    """The same disks at other mount points have all their data."""
    (machine.root / "l").rename(machine.root / "moved")
    moved = machine.claim(ledgers="moved")
    with pytest.raises(WrongIdentity):
        machine.start(moved)
    assert machine.run("adopt", "--yes", claim=moved).exit_code == 0
    assert not machine.limbo(moved)
    assert machine.start(moved).lost_directories == ()
    cookie = machine.cookie()
    assert cookie is not None
    assert parse(cookie).ledger_dirs == (f"{machine.root}/moved",)


def test_data_without_a_version_and_another_bookies_disks_are_adopted_in_limbo(machine: Machine) -> None:
    (machine.root / "l" / "current" / "VERSION").unlink()
    assert machine.run("adopt", "--yes").exit_code == 0
    assert machine.limbo() == [f"adopted {machine.root}/l, which had no readable cookie"]
    machine.start()
    other = machine.claim(BookieId("bookie-1"))
    machine.healed()
    assert machine.run("adopt", "--yes", claim=other).exit_code == 0
    (reason,) = machine.limbo()
    assert reason.endswith("which belonged to bookie-0")
    machine.start(other)
    assert machine.cookie(BookieId("bookie-1")) is not None


def test_a_damaged_version_is_replaced(machine: Machine) -> None:
    (machine.root / "j" / "current" / "VERSION").write_bytes(b"\0" * 50)
    assert machine.run("adopt", "--yes").exit_code == 0
    assert machine.limbo()
    machine.start()


def test_another_clusters_disks_are_refused(machine: Machine) -> None:
    """Ledger 7 of the other cluster is another ledger, which a bookie in limbo would serve."""
    machine.tree = machine.new_cluster(2)
    result = machine.run("adopt", "--yes")
    assert "is of another cluster" in str(result.exception)
    assert machine.cookie() is None
    assert not machine.limbo()


@pytest.mark.parametrize("ledgers", ["l,more", "more,l"])
def test_another_number_or_order_of_directories_is_refused(machine: Machine, ledgers: str) -> None:
    if ledgers == "more,l":
        two = Machine(machine.root / "two")
        machine.root, machine.tree = two.root, two.tree
        machine.start(machine.claim(ledgers="l,more"))
    result = machine.run("adopt", "--yes", claim=machine.claim(ledgers=ledgers))
    assert "Number and order of the directories determine where a ledger is stored" in str(result.exception)


def test_adopt_is_refused_while_the_bookie_is_registered(machine: Machine) -> None:
    machine.delete_cookie()

    async def register() -> None:
        await BookieRegistration(machine.tree.connect(), LAYOUT, ID).register(read_only=True)

    asyncio.run(register())
    for verb in (("adopt", "--yes"), ("retire",)):
        result = machine.run(*verb)
        assert "bookie-0 is registered: stop it first" in str(result.exception)
    assert machine.cookie() is None


def test_an_interrupted_adoption_is_finished(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limbo is recorded before any VERSION file is written; a bookie refuses to start in between."""
    (machine.root / "l" / "current" / "VERSION").unlink()
    machine.delete_cookie()

    def fail(*arguments: Any) -> None:
        raise OSError(5, "the power is gone")

    with monkeypatch.context() as patch:
        patch.setattr(disk_identity, "write_version", fail)
        assert isinstance(machine.run("adopt", "--yes").exception, OSError)
    assert machine.limbo()
    with pytest.raises(WrongIdentity):
        machine.start()
    assert machine.run("adopt", "--yes").exit_code == 0
    assert machine.limbo()
    machine.start()


# -- retire -----------------------------------------------------------------------------------------------------------


def put_ledger(machine: Machine, *ensemble: str) -> None:
    async def put() -> None:
        manager = LedgerManager(machine.tree.connect(), LAYOUT, randomness=random.Random(1))
        metadata = LedgerMetadata(
            ensemble_size=len(ensemble),
            write_quorum=len(ensemble),
            ack_quorum=1,
            segments=(Segment(EntryId(0), tuple(map(BookieId, ensemble))),),
        )
        await manager.create(metadata)

    asyncio.run(put())


def test_retire_removes_the_cookie_and_on_request_the_versions(machine: Machine) -> None:
    put_ledger(machine, "bookie-7", "bookie-8")
    result = machine.run("retire", "--wipe-version", "--json")
    assert result.exit_code == 0
    assert facts(result)["removed"]
    assert len(facts(result)["wiped"]) == 2
    assert machine.cookie() is None
    assert not (machine.root / "l" / "current" / "VERSION").exists()
    assert (machine.root / "l" / "current" / "data").exists(), "entries are not ours to remove"
    assert "it had no cookie" in machine.run("retire").stdout


def test_retire_is_refused_while_ledgers_name_the_bookie(machine: Machine) -> None:
    for _ in range(60):
        put_ledger(machine, "bookie-7", ID)
    put_ledger(machine, "bookie-7", "bookie-8")
    result = machine.run("retire")
    assert str(result.exception).startswith("60 ledgers still name bookie-0: 0, 1, 2")
    assert machine.cookie() is not None
    unasked = machine.run("retire", "--force")  # no terminal
    assert unasked.exit_code == 2
    assert "add --yes" in unasked.stderr
    assert machine.cookie() is not None
    forced = machine.run("retire", "--force", "--yes")
    assert "60 ledgers still name it" in forced.stdout
    assert machine.cookie() is None
    assert (machine.root / "l" / "current" / "VERSION").exists()


def memberships(machine: Machine) -> MembershipStore:
    return MembershipStore(machine.tree.connect(), clock_ms=lambda: 1)


@pytest.mark.parametrize("intent", [Intent.DRAINING, Intent.MAINTENANCE])
def test_a_new_bookie_with_a_retired_id_is_an_ordinary_member(machine: Machine, intent: Intent) -> None:
    asyncio.run(memberships(machine).set(ID, intent))
    machine.delete_cookie()  # as after a retire that was interrupted after it removed the cookie
    result = machine.run("retire")
    assert f"its state {intent.value} was cleared" in result.stdout
    assert asyncio.run(memberships(machine).all()) == {}
    assert facts(machine.run("retire", "--json"))["forgotten_intent"] is None


def test_retire_keeps_the_intent_of_a_removed_bookie_and_of_one_that_ledgers_name(machine: Machine) -> None:
    asyncio.run(memberships(machine).set(ID, Intent.REMOVED))
    assert facts(machine.run("retire", "--json"))["forgotten_intent"] is None
    assert asyncio.run(memberships(machine).get(ID)).intent is Intent.REMOVED
    put_ledger(machine, "bookie-7", ID)
    asyncio.run(memberships(machine).set(ID, Intent.DRAINING))
    assert facts(machine.run("retire", "--force", "--yes", "--json"))["forgotten_intent"] is None
    assert asyncio.run(memberships(machine).get(ID)).intent is Intent.DRAINING


@pytest.mark.parametrize(("answer", "exit_code"), [("n", 1), ("y", 0)])
def test_a_confirmation_is_required_before_copies_are_lost(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, answer: str, exit_code: int
) -> None:
    put_ledger(machine, "bookie-7", ID)
    asked: list[str] = []

    def confirm(question: str, **options: Any) -> bool:
        asked.append(question)
        return answer == "y"

    monkeypatch.setattr(output, "is_interactive", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    result = machine.run("retire", "--force")
    assert (result.exit_code, len(asked)) == (exit_code, 1)
    assert (machine.cookie() is None) == (answer == "y")
