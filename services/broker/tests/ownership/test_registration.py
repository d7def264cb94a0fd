"""The registration of a broker as live: its znode, and what restores it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from bindery_broker.ownership.records import own_record
from bindery_broker.ownership.registration import Registration
from bindery_core.errors import MetadataUnavailable
from bindery_core.version import VERSION
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_simulation.instant import InstantLoop

URL = "http://10.0.0.7:8080"
PATH = "/loadbalance/brokers/10.0.0.7:8080"
RECORD = own_record(URL)
EXPECTED: dict[str, Any] = {
    "webServiceUrl": "http://10.0.0.7:8080",
    "webServiceUrlTls": None,
    "pulsarServiceUrl": None,
    "pulsarServiceUrlTls": None,
    "brokerId": "10.0.0.7:8080",
    "persistentTopicsEnabled": False,
    "nonPersistentTopicsEnabled": False,
    "cpu": {"usage": 0.0, "limit": 0.0},
    "numBundles": 0,
    "brokerVersionString": VERSION,
    "loadReportType": "LocalBrokerData",
    "loadManagerClassName": "bindery",
    "advertisedListeners": {},
    "bindery": True,
    "draining": False,
}
"""Members that a Pulsar broker reads, and the marks of this program. A Pulsar leader would unload `bundles`, and split
those in `lastStats`: the record has neither."""


def registration(leases: Any) -> Registration:
    return Registration(leases, name="10.0.0.7:8080", record=lambda: RECORD)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run on an event loop without real time."""
    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(work)


async def owner_of(tree: MemoryTree) -> int | None:
    """Return the session that holds the registration; None: there is none."""
    stat = await tree.connect().exists(PATH)
    return stat.ephemeral_owner if stat is not None else None


class OneLease:
    """A lease that the test ends."""

    def __init__(self) -> None:
        self.is_held = True
        self.releases = 0
        self.release_error: Exception | None = None
        self.lose: Callable[[], None] = lambda: None

    def on_lost(self, listener: Callable[[], None]) -> None:
        self.lose = listener

    async def release(self) -> None:
        self.releases += 1
        if self.release_error is not None:
            raise self.release_error


class ScriptedLeases:
    """Answers each acquisition with the next of `answers`; the last one for ever."""

    def __init__(self, *answers: OneLease | Exception | None) -> None:
        self.answers = list(answers)
        self.asked_at: list[float] = []

    async def acquire(self, path: str, value: bytes) -> OneLease | None:
        self.asked_at.append(asyncio.get_running_loop().time())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def cancelled(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_znode_has_the_address_in_the_format_of_pulsar() -> None:
    tree = MemoryTree()
    store = tree.connect()
    lease = await registration(Leases(store)).register()
    assert lease is not None
    assert lease.path == PATH
    node = await store.get(PATH)
    assert node.stat.ephemeral_owner == store.session_id
    found = msgspec.json.decode(node.data)
    assert {name: found[name] for name in EXPECTED} == EXPECTED
    assert not {"bundles", "lastStats"} & found.keys()


async def test_a_registration_of_another_session_is_not_taken() -> None:
    tree = MemoryTree()
    first = tree.connect()
    assert await registration(Leases(first)).register() is not None
    assert await registration(Leases(tree.connect())).register() is None
    assert await owner_of(tree) == first.session_id


def test_a_lost_registration_is_created_again() -> None:
    async def scenario() -> None:
        tree = MemoryTree()
        store = tree.connect()
        task = asyncio.ensure_future(registration(Leases(store)).run())
        await asyncio.sleep(0.1)
        assert await owner_of(tree) == store.session_id
        await tree.connect().delete(PATH, version=None)
        await asyncio.sleep(0.1)
        assert await owner_of(tree) == store.session_id
        former = store.session_id
        tree.expire(store)
        await asyncio.sleep(0.1)
        assert await owner_of(tree) == store.session_id != former
        await cancelled(task)
        assert await owner_of(tree) is None

    run(scenario())


def test_the_registration_of_a_killed_predecessor_is_awaited() -> None:
    async def scenario() -> None:
        tree = MemoryTree()
        killed: MemoryStore = tree.connect()
        await registration(Leases(killed)).register()
        store = tree.connect()
        task = asyncio.ensure_future(registration(Leases(store)).run())
        await asyncio.sleep(10)
        assert await owner_of(tree) == killed.session_id
        tree.expire(killed)
        await asyncio.sleep(1.1)
        assert await owner_of(tree) == store.session_id
        await cancelled(task)

    run(scenario())


def test_a_failed_attempt_is_repeated_each_second() -> None:
    async def scenario() -> None:
        lease = OneLease()
        leases: Any = ScriptedLeases(MetadataUnavailable("made up"), None, MetadataUnavailable("made up"), lease)
        began = asyncio.get_running_loop().time()
        task = asyncio.ensure_future(registration(leases).run())
        await asyncio.sleep(60)
        assert leases.asked_at == [began, began + 1, began + 2, began + 3]
        await cancelled(task)
        assert lease.releases == 1

    run(scenario())


def test_a_lease_that_is_not_held_is_not_released() -> None:
    async def scenario() -> None:
        lease = OneLease()
        leases: Any = ScriptedLeases(lease)
        task = asyncio.ensure_future(registration(leases).run())
        await asyncio.sleep(1)
        lease.is_held = False
        await cancelled(task)
        assert lease.releases == 0

    run(scenario())


def test_a_lost_lease_is_forgotten_when_the_next_attempt_fails() -> None:
    """The store may still report it as held."""

    async def scenario() -> None:
        lease = OneLease()
        leases: Any = ScriptedLeases(lease, MetadataUnavailable("made up"))
        task = asyncio.ensure_future(registration(leases).run())
        await asyncio.sleep(1)
        lease.lose()
        await asyncio.sleep(4.5)
        assert len(leases.asked_at) == 6
        await cancelled(task)
        assert lease.releases == 0

    run(scenario())


def test_an_error_of_the_release_does_not_replace_the_cancellation() -> None:
    async def scenario() -> None:
        lease = OneLease()
        lease.release_error = MetadataUnavailable("made up")
        leases: Any = ScriptedLeases(lease)
        task = asyncio.ensure_future(registration(leases).run())
        await asyncio.sleep(1)
        await cancelled(task)
        assert lease.releases == 1

    run(scenario())
