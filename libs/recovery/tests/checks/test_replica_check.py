"""Counts of entries with too few copies, compared with a count entry by entry; ledgers that hang and bookies that do
not answer."""

import asyncio
import random

import pytest
from bindery_core.errors import BookieUnavailable, Corrupt, MetadataUnavailable, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId
from bindery_core.placement.write_set import write_set
from bindery_recovery.checks.replica_check import (
    Lack,
    ReplicaCheckResult,
    Shortage,
    check_replicas,
    count_shortage,
    find_lacks,
)
from scripted import RANDOM_BOOKIES, ScriptedClient, ledger, random_ledger
from simulated import simulate


def figures(**changed: int) -> dict[str, int]:
    return {**ReplicaCheckResult().to_json(), **changed}


def naive(metadata: LedgerMetadata, held: dict[BookieId, list[int] | None]) -> Shortage:
    counts = []
    for entry_id in range(metadata.last_entry_id + 1):
        ensemble = metadata.segment_of(entry_id).ensemble  # type: ignore[arg-type]
        members = write_set(entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
        holders = [held[ensemble[index]] for index in members]
        counts.append(sum(entries is None or entry_id in entries for entries in holders))
    return Shortage(
        sum(count == 0 for count in counts),
        sum(count < metadata.ack_quorum for count in counts),
        sum(count < metadata.write_quorum for count in counts),
    )


@pytest.mark.parametrize("seed", range(300))
def test_counts_by_ranges_equal_counts_entry_by_entry(seed: int) -> None:
    rng = random.Random(seed)
    metadata = random_ledger(rng)
    held: dict[BookieId, list[int] | None] = {}
    runs = {}
    for bookie_id in RANDOM_BOOKIES:
        if rng.random() < 0.1:
            held[bookie_id], runs[bookie_id] = None, None
            continue
        entries = [e for e in range(60) if rng.random() < 0.8]
        held[bookie_id] = entries
        joined: list[tuple[int, int]] = []
        for entry_id in entries:
            if joined and sum(joined[-1]) == entry_id and rng.random() < 0.8:  # runs may touch
                joined[-1] = (joined[-1][0], joined[-1][1] + 1)
            else:
                joined.append((entry_id, 1))
        runs[bookie_id] = joined
    assert count_shortage(metadata, runs) == naive(metadata, held)


@pytest.mark.parametrize("seed", range(100))
def test_lacks_found_by_ranges_equal_lacks_found_entry_by_entry(seed: int) -> None:
    rng = random.Random(seed)
    metadata = random_ledger(rng)
    held: dict[BookieId, list[int] | None] = {
        bookie_id: None if rng.random() < 0.1 else [e for e in range(60) if rng.random() < 0.8]
        for bookie_id in RANDOM_BOOKIES
    }
    expected: dict[BookieId, list[int]] = {}
    for entry_id in range(metadata.last_entry_id + 1):
        ensemble = metadata.segment_of(entry_id).ensemble  # type: ignore[arg-type]
        for index in write_set(
            entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        ):
            listed = held[ensemble[index]]
            if listed is not None and entry_id not in listed:
                expected.setdefault(ensemble[index], []).append(entry_id)
    runs = {b: None if entries is None else [(e, 1) for e in entries] for b, entries in held.items()}
    assert find_lacks(metadata, runs) == {b: Lack(len(entries), entries[0]) for b, entries in expected.items()}


def test_lacks_before_between_and_after_the_listed_entries_are_found() -> None:
    metadata = ledger(("b1", "b2"), last=9)
    b1, b2 = BookieId("b1"), BookieId("b2")
    assert find_lacks(metadata, {b1: [(0, 10)], b2: [(0, 20)]}) == {}
    assert find_lacks(metadata, {b1: [(2, 3), (6, 2)], b2: None}) == {b1: Lack(5, 0)}
    assert find_lacks(metadata, {b1: [(0, 9)], b2: []}) == {b1: Lack(1, 9), b2: Lack(10, 0)}
    assert find_lacks(metadata, {b1: [(0, 8), (3, 2), (9, 5)], b2: [(12, 1)]}) == {b1: Lack(1, 8), b2: Lack(10, 0)}


def test_the_lacks_of_several_segments_are_added() -> None:
    metadata = ledger(("b1", "b2"), ("b1", "b3"), firsts=(0, 5), last=9)
    held = {BookieId("b1"): [(0, 4), (6, 4)], BookieId("b2"): [(0, 5)], BookieId("b3"): [(5, 5)]}
    assert find_lacks(metadata, held) == {BookieId("b1"): Lack(2, 4)}


def test_entries_listed_twice_count_once() -> None:
    metadata = ledger(("b1",), last=9, ack_quorum=1)
    assert count_shortage(metadata, {BookieId("b1"): [(0, 5), (3, 4)]}) == Shortage(3, 3, 3)


def test_an_entry_is_counted_once_for_each_quorum_that_it_misses() -> None:
    client = ScriptedClient(
        {1: ledger(("b1", "b2", "b3")), 2: ledger(("b1", "b2", "b3")), 3: ledger(("b1", "b2", "b3"))}
    )
    client.entries[1, "b1"] = [(0, 7)]  # 7, 8, 9 have two copies
    client.entries[2, "b1"] = client.entries[2, "b2"] = client.entries[2, "b3"] = [(0, 9)]  # 9 has none
    result = simulate(check_replicas(client))
    assert result.to_json() == figures(
        ledgers=3,
        ledgers_without_replica=1,
        entries_without_replica=1,
        ledgers_below_ack_quorum=1,
        entries_below_ack_quorum=1,
        ledgers_below_write_quorum=2,
        entries_below_write_quorum=4,
    )


def test_an_unreachable_bookie_counts_as_holding_all_entries_and_one_without_the_ledger_as_holding_none() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3")), 2: ledger(("b1", "b2", "b3"))})
    client.entries[1, "b1"] = BookieUnavailable("down")
    client.entries[2, "b1"] = NoSuchLedger("the bookie stores no entries of this ledger")
    result = simulate(check_replicas(client))
    assert result.to_json() == figures(
        ledgers=2, unanswered=1, ledgers_below_write_quorum=1, entries_below_write_quorum=10
    )


def test_a_ledger_that_hangs_does_not_stop_the_walk() -> None:
    client = ScriptedClient({n: ledger(("b1", "b2", "b3")) for n in range(50)})
    for n in (3, 4, 5, 17):
        client.entries[n, "b2"] = None
    result = simulate(check_replicas(client, ledgers_in_flight=2, ledger_timeout_s=120))
    assert result.to_json() == figures(ledgers=46, hung=4)


def test_by_default_sixteen_ledgers_are_checked_at_a_time_for_two_minutes_each() -> None:
    async def seconds() -> float:
        client = ScriptedClient({n: ledger(("b1",), ack_quorum=1) for n in range(40)})
        client.entries[39, "b1"] = None
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await check_replicas(client)).to_json() == figures(ledgers=39, hung=1)
        assert client.in_flight_max == 16
        return loop.time() - began

    assert simulate(seconds()) == pytest.approx(120, abs=0.1)


def test_open_deleted_and_unreadable_ledgers_are_left_out() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3"), last=None), 2: Corrupt("garbage")})
    client.deleted_since = {3}
    assert simulate(check_replicas(client)).to_json() == figures(unreadable=1)


def test_a_ledger_deleted_during_its_check_is_not_counted() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3"))})

    class Deleting(ScriptedClient):
        async def entries_on(self, ledger_id, bookie_id):  # type: ignore[no-untyped-def]
            self.deleted_since.add(ledger_id)
            raise NoSuchLedger("the bookie stores no entries of this ledger")

    client = Deleting(client.ledgers)
    assert simulate(check_replicas(client)).to_json() == figures()


def test_a_ledger_repaired_during_its_check_is_counted_again() -> None:
    class Repairing(ScriptedClient):
        async def entries_on(self, ledger_id, bookie_id):  # type: ignore[no-untyped-def]
            if bookie_id == "b3":
                self.ledgers[ledger_id] = ledger(("b1", "b2", "b4"))
                raise NoSuchLedger("the bookie stores no entries of this ledger")
            return await super().entries_on(ledger_id, bookie_id)

    client = Repairing({1: ledger(("b1", "b2", "b3"))})
    assert simulate(check_replicas(client)).to_json() == figures(ledgers=1)


def test_an_outage_of_the_metadata_ends_the_check() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3")), 2: MetadataUnavailable("away")})
    with pytest.raises(MetadataUnavailable):
        simulate(check_replicas(client))


def test_the_metadata_of_a_whole_ledger_is_read_once() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3"))})
    simulate(check_replicas(client))
    assert client.asked == [1] * (1 + 3), "once by the check, and once by the client for each list of entries"
