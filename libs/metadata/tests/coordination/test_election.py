"""The auditor election has one leader at a time, and a former leader cannot write."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NotLeader,
    VersionConflict,
)
from bindery_metadata.coordination import election as election_module
from bindery_metadata.coordination.election import AuditorElection, Leadership, current_auditor
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import Check, Create, MetadataStore, SessionState, Set
from store_environments import StoreEnvironment, until

LAYOUT = LedgersLayout()
ELECTION = LAYOUT.auditor_election


class Candidate:
    """A running candidate, and a record of its terms."""

    def __init__(self, store: MetadataStore, name: str) -> None:
        self.store = store
        self.election = AuditorElection(store, LAYOUT, name=name)
        self.terms: list[Leadership] = []
        self.leading = 0
        self.ends = asyncio.Event()
        """When set, `lead` returns."""
        self.fails: Exception | None = None
        self.task = asyncio.create_task(self.election.run(self.lead))

    async def lead(self, leadership: Leadership) -> None:
        self.terms.append(leadership)
        self.leading += 1
        try:
            if self.fails:
                raise self.fails
            await self.ends.wait()
        finally:
            self.leading -= 1

    async def stop(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BinderyError):
            await self.task


@pytest.fixture
async def candidates(environment: StoreEnvironment) -> AsyncIterator[list[Candidate]]:
    """The candidates of a test. They are stopped after the test."""
    made: list[Candidate] = []
    yield made
    for candidate in made:
        await candidate.stop()


@pytest.fixture
def stand(candidates: list[Candidate]):
    def stand(store: MetadataStore, name: str) -> Candidate:
        candidates.append(Candidate(store, name))
        return candidates[-1]

    return stand


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(election_module, "RETRY_S", 0.05)


async def votes(store: MetadataStore) -> list[str]:
    with contextlib.suppress(NoSuchNode):
        return await store.children(ELECTION)
    return []


# --- one leads --------------------------------------------------------------------------------------------------------


async def test_a_single_candidate_leads_and_is_named_in_bookkeepers_nodes(store: MetadataStore, stand) -> None:
    assert await current_auditor(store, LAYOUT) is None
    one = stand(store, "b-1:3181")
    await until(lambda: one.leading)
    [name] = await votes(store)
    assert name == "V_0000000000"
    vote = await store.get(f"{ELECTION}/{name}")
    assert (vote.data, vote.stat.ephemeral_owner) == (b'bookieId: "b-1:3181"\n', store.session_id)
    assert (await store.get(ELECTION)).data == b'bookieId: "b-1:3181"\n'
    assert await current_auditor(store, LAYOUT) == "b-1:3181"
    [term] = one.terms
    assert (term.vote_path, term.session_id) == (f"{ELECTION}/{name}", store.session_id)
    assert term.is_certain
    assert await term.verify()


async def test_exactly_one_of_many_candidates_leads_at_any_time(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    all_of_them = [stand(store, f"one-{n}") for n in range(4)] + [stand(other, f"other-{n}") for n in range(4)]
    led: list[str] = []
    for _ in range(len(all_of_them)):
        await until(lambda: sum(candidate.leading for candidate in all_of_them) == 1)
        for _ in range(5):
            await asyncio.sleep(0.005)
            assert sum(candidate.leading for candidate in all_of_them) == 1
        [leader] = [candidate for candidate in all_of_them if candidate.leading]
        assert await current_auditor(store, LAYOUT) == leader.election._name
        led.append(leader.election._name)
        await leader.election.resign()
        assert not leader.leading
        assert leader.task.done()
    assert sorted(led) == sorted(candidate.election._name for candidate in all_of_them)
    assert await votes(store) == []


async def test_a_waiting_candidate_watches_only_its_predecessor() -> None:
    tree = MemoryTree()
    stores = [tree.connect() for _ in range(4)]
    made = []
    for n, store in enumerate(stores):
        made.append(Candidate(store, f"c{n}"))
        while len(await votes(stores[0])) <= n:
            await asyncio.sleep(0.001)
    await until(lambda: made[0].leading)
    reads = [0] * 4
    for n, store in enumerate(stores):
        children = store.children

        async def counted(path, *, watch=None, n=n, children=children):
            reads[n] += 1
            return await children(path, watch=watch)

        store.children = counted
    await made[2].stop()
    await until(lambda: reads[3])
    await asyncio.sleep(0.02)
    assert (reads[1], reads[3]) == (0, 1)  # only the successor of the stopped candidate read again
    assert not made[3].leading
    for candidate in made:
        await candidate.stop()


async def test_a_lower_vote_of_bookkeeper_leads(store: MetadataStore, other: MetadataStore, stand) -> None:
    await other.create(f"{ELECTION}/V_", b'bookieId: "java:3181"\n', ephemeral=True, sequential=True, make_parents=True)
    one = stand(store, "b-1:3181")
    while len(await votes(store)) < 2:
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.05)
    assert not one.leading
    assert await current_auditor(store, LAYOUT) == "java:3181"
    await other.delete(f"{ELECTION}/V_0000000000", version=None)
    await until(lambda: one.leading)


async def test_votes_are_ordered_by_number_and_unknown_nodes_skipped(store: MetadataStore) -> None:
    for name, text in (
        ("V_10000000001", b'bookieId: "late"'),
        ("V_9000000000", b'bookieId:"early"'),
        ("V_x", b""),
        ("0000000001", b""),
    ):
        await store.create(f"{ELECTION}/{name}", text, make_parents=True)
    assert await current_auditor(store, LAYOUT) == "early"
    await store.create(f"{ELECTION}/V_0000000001", b"\xff not a vote")
    assert await current_auditor(store, LAYOUT) is None


# --- ends of leadership -----------------------------------------------------------------------------------------------


async def test_the_next_candidate_leads_after_the_leaders_session_ends(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    [term] = one.terms
    known_at: list[tuple[SessionState, bool]] = []
    store.on_session_change(lambda state: known_at.append((state, term.is_over)))
    await environment.expire(store)
    assert (SessionState.LOST, True) in known_at
    await until(lambda: two.leading and not one.leading)
    assert term.is_over
    assert not term.is_certain
    assert not await term.verify()
    while len(await votes(other)) < 2:  # the first candidate stands again, after the second
        await asyncio.sleep(0.002)
    await two.election.resign()
    await until(lambda: one.leading)
    assert len(one.terms) == 2


async def test_a_disconnected_leader_continues(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    await environment.suspend(store)
    await asyncio.sleep(0.1)
    assert one.leading
    assert not one.terms[0].is_certain
    assert not two.leading
    await environment.resume(store)
    assert one.terms[0].is_certain
    assert await one.terms[0].verify()
    await asyncio.sleep(0.1)
    assert (len(one.terms), len(two.terms)) == (1, 0)


async def test_a_write_of_a_former_leader_fails_before_it_is_notified(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    """The leader is not notified of the end of its session, like a process that continues after a long stop."""
    vote = await store.create(f"{ELECTION}/V_", ephemeral=True, sequential=True, make_parents=True)
    stale = Leadership(store, name="stale", vote_path=vote, version=0, session_id=store.session_id)
    await stale.multi([Create("/before")])
    await environment.expire(store)
    two = stand(other, "two")
    await until(lambda: two.leading)
    assert not stale.is_over
    with pytest.raises(NotLeader):
        await stale.multi([Create("/after"), Set("/before", b"stale", None)])
    assert await other.exists("/after") is None
    assert (await other.get("/before")).data == b""
    assert stale.is_over
    await two.terms[0].multi([Create("/after")])


async def test_a_leader_disconnected_for_longer_than_its_session_does_not_write_afterwards(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    [term] = one.terms
    await environment.suspend(store)
    await environment.end_session(store)
    await until(lambda: two.leading)
    assert one.leading  # the candidate has not been notified
    assert not term.is_over
    write = asyncio.create_task(term.multi([Create("/stale")]))
    await asyncio.sleep(0.05)
    await environment.resume(store)
    with pytest.raises(NotLeader):
        await write
    assert await other.exists("/stale") is None
    await until(lambda: not one.leading)
    assert two.leading


async def test_the_deletion_of_a_vote_by_an_operator_ends_the_term_and_a_new_one_follows(
    store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    await other.delete(one.terms[0].vote_path, version=None)
    await until(lambda: len(one.terms) == 2)
    assert one.terms[0].is_over
    with pytest.raises(NotLeader):
        await one.terms[0].multi([])
    assert await one.terms[1].verify()
    assert one.leading == 1


async def test_a_vote_changed_by_hand_ends_the_term(store: MetadataStore, other: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    await other.set(one.terms[0].vote_path, b"x", version=None)
    await until(lambda: len(one.terms) == 2 and one.leading == 1)
    assert one.terms[0].is_over
    assert len(await votes(store)) == 1


async def test_resigning_ends_the_leadership_at_once(store: MetadataStore, other: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    await one.election.resign()
    assert one.task.done()
    assert len(await votes(store)) == 1
    await until(lambda: two.leading)
    await one.election.resign()  # without a running candidacy, this has no effect


async def test_a_candidate_that_waits_can_resign(store: MetadataStore, other: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    await two.election.resign()
    assert two.terms == []
    assert len(await votes(store)) == 1


async def test_cancelling_the_candidacy_removes_the_vote(store: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    await one.stop()
    assert not one.leading
    assert await votes(store) == []


async def test_if_lead_ends_the_next_candidate_leads(store: MetadataStore, other: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    one.fails, one.terms[0]._over = NotLeader(), False
    one.ends.set()
    await until(lambda: two.leading)
    await two.election.resign()
    await until(lambda: len(one.terms) >= 3)  # a candidate that failed leads again, after a delay each time
    one.fails = None


async def test_an_unexpected_error_of_lead_is_raised(store: MetadataStore, stand) -> None:
    one = stand(store, "one")
    one.fails = ZeroDivisionError("a defect")
    with pytest.raises(ZeroDivisionError):
        await one.task
    assert await votes(store) == []
    await one.election.resign()  # must return
    one.task = asyncio.create_task(asyncio.sleep(0))


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_vote_whose_response_was_lost_is_found_again(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand, applied: bool
) -> None:
    await other.create(ELECTION, make_parents=True)
    environment.lose_next_write(store, applied=applied)
    one = stand(store, "one")
    await until(lambda: one.leading)
    assert len(await votes(other)) == 1
    await one.election.resign()
    assert await votes(other) == []


async def test_a_lost_vote_of_another_candidate_in_the_same_session_is_not_adopted(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    environment.lose_next_write(store, applied=True)
    two = stand(store, "two")
    while len(await votes(other)) < 2:
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.2)
    assert (one.leading, two.leading) == (1, 0)
    assert len(await votes(other)) == 2
    await one.election.resign()
    await until(lambda: two.leading)


async def test_votes_of_other_candidates_with_the_same_name_are_not_adopted() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    one = Candidate(store, "same")
    await until(lambda: one.leading)
    create = store.create

    async def after_the_other_stood(path, *args, **kwargs):
        store.create = create
        await other.create(path, b'bookieId: "same"\n', ephemeral=True, sequential=True)
        store.lose_next_write(applied=False)
        return await create(path, *args, **kwargs)

    store.create = after_the_other_stood
    two = Candidate(store, "same")
    while len(await votes(other)) < 3:
        await asyncio.sleep(0.002)
    await one.election.resign()
    await asyncio.sleep(0.1)
    assert not two.leading  # the second vote belongs to the other candidate
    await other.delete(f"{ELECTION}/V_0000000001", version=None)
    await until(lambda: two.leading)
    await two.stop()


async def test_a_waiting_candidate_keeps_its_vote_and_place_during_an_outage(
    environment: StoreEnvironment, store: MetadataStore, other: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    two = stand(other, "two")
    while len(await votes(store)) < 2:
        await asyncio.sleep(0.002)
    before = await votes(store)
    await environment.suspend(other)
    await asyncio.sleep(0.1)
    await environment.resume(other)
    await asyncio.sleep(0.2)
    assert await votes(store) == before
    await one.election.resign()
    await until(lambda: two.leading)
    assert await votes(store) == before[1:]


async def test_few_requests_are_sent_while_the_store_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MemoryTree()
    store = tree.connect(operation_timeout_s=0.01)
    requested = 0
    send = store._send

    async def counted(*args, **kwargs):
        nonlocal requested
        requested += 1
        return await send(*args, **kwargs)

    monkeypatch.setattr(store, "_send", counted)
    tree.suspend(store)
    one = Candidate(store, "one")
    await asyncio.sleep(0.5)
    assert 2 <= requested <= 12  # every RETRY_S + the timeout of the store
    tree.resume(store)
    await until(lambda: one.leading)
    requested = 0
    await asyncio.sleep(0.2)
    assert requested == 0  # an undisturbed leader sends no request
    tree.suspend(store)
    await asyncio.sleep(0.5)
    assert requested <= 12
    assert one.leading
    await one.stop()


async def test_a_vote_that_could_not_be_deleted_is_deleted_before_a_new_one_is_created() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    one = Candidate(store, "one")
    await until(lambda: one.leading)
    for _ in range(2):
        store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "delete")
    one.ends.set()
    await until(lambda: len(one.terms) >= 2)
    assert len(await votes(other)) <= 1
    await one.stop()


# --- guarded writes ---------------------------------------------------------------------------------------------------


async def test_errors_of_the_operations_do_not_end_the_leadership(store: MetadataStore, stand) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    [term] = one.terms
    await store.create("/there")
    for ops, error in (
        ([Create("/there")], AlreadyExists),
        ([Create("/no/parent")], NoSuchNode),
        ([Set("/none", b"", None)], NoSuchNode),
        ([Set("/there", b"", 5)], VersionConflict),
        ([Check("/there", 5)], VersionConflict),
        ([Create("/new"), Check("/none", 0)], NoSuchNode),
    ):
        with pytest.raises(error):
            await term.multi(ops)
    assert await store.exists("/new") is None
    assert not term.is_over
    path, stat = await term.multi([Create("/new"), Set("/there", b"x", 0)])
    assert path == "/new"
    assert stat is not None


async def test_a_lost_response_of_a_guarded_write_raises_outcome_unknown(
    environment: StoreEnvironment, store: MetadataStore, stand
) -> None:
    one = stand(store, "one")
    await until(lambda: one.leading)
    await asyncio.sleep(0.05)
    environment.lose_next_write(store, applied=True)
    with pytest.raises(MetadataOutcomeUnknown):
        await one.terms[0].multi([Create("/done")])
    assert await store.exists("/done") is not None
    assert not one.terms[0].is_over


async def test_an_error_without_a_path_is_resolved_by_a_read() -> None:
    tree = MemoryTree()
    store = tree.connect()
    vote = await store.create(f"{ELECTION}/V_", ephemeral=True, sequential=True, make_parents=True)
    term = Leadership(store, name="n", vote_path=vote, version=0, session_id=store.session_id)
    store.fail_next(NoSuchNode())
    with pytest.raises(NoSuchNode):
        await term.multi([Create("/x")])
    assert not term.is_over
    await store.delete(vote, version=None)
    store.fail_next(NoSuchNode())
    with pytest.raises(NotLeader):
        await term.multi([Create("/x")])
