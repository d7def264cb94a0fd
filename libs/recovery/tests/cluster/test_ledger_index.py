"""The index of ledgers by bookie is complete or not returned; shares follow the write sets."""

import pytest
from bindery_core.errors import BadVersion, BinderyError, Corrupt, MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_recovery.cluster import ledger_index
from bindery_recovery.cluster.ledger_index import Share, build_index, share_of
from scripted import ScriptedClient, bookies, ledger
from simulated import simulate

B1, B2, B3, B4 = bookies("b1", "b2", "b3", "b4")


def test_a_ledger_is_listed_for_each_requested_bookie_that_a_segment_names() -> None:
    client = ScriptedClient(
        {
            1: ledger(("b1", "b2", "b3")),
            2: ledger(("b2", "b3", "b4")),
            3: ledger(("b2", "b3", "b4"), ("b1", "b3", "b4"), firsts=(0, 5), last=None),
            2**40: ledger(("b1", "b4", "b3"), ("b1", "b2", "b3"), firsts=(0, 5)),
        }
    )
    index = simulate(build_index(client, {B1, B4}.__contains__))
    assert list(index.ledgers_of(B1)) == [1, 3, 2**40]
    assert list(index.ledgers_of(B4)) == [2, 3, 2**40]
    assert index.bookies_by_ledger([B4, B1]) == {1: (B1,), 2: (B4,), 3: (B1, B4), 2**40: (B1, B4)}
    assert index.ledger_count == 4
    assert {b: totals.ledgers for b, totals in index.totals.items()} == {B1: 3, B2: 4, B3: 4, B4: 3}
    assert (index.totals[B1].entries, index.totals[B1].length) == (10 + 0 + 10, 2000)
    assert index.is_complete
    with pytest.raises(AssertionError):
        index.ledgers_of(B2)


def test_reads_in_flight_are_bounded() -> None:
    client = ScriptedClient({n: ledger(("b1", "b2", "b3")) for n in range(200)})
    index = simulate(build_index(client, {B1}.__contains__, reads_in_flight=7))
    assert len(index.ledgers_of(B1)) == 200
    assert client.in_flight_max == 7


@pytest.mark.parametrize("where", ["metadata", "listing"])
def test_an_outage_during_the_read_returns_no_index(where: str) -> None:
    client = ScriptedClient({n: ledger(("b1", "b2", "b3")) for n in range(20)})
    if where == "metadata":
        client.ledgers[13] = MetadataUnavailable("away")  # type: ignore[index]
    else:
        client.listing_fails_at = 13
    with pytest.raises(BinderyError):
        simulate(build_index(client, {B1}.__contains__))


def test_deleted_ledgers_are_left_out_and_unreadable_ones_are_recorded() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b3")), 3: Corrupt("garbage"), 4: BadVersion("of the future")})
    client.deleted_since = {2}
    index = simulate(build_index(client, {B1}.__contains__))
    assert list(index.ledgers_of(B1)) == [1]
    assert index.unreadable == {3: "garbage", 4: "of the future"}
    assert not index.is_complete
    assert index.ledger_count == 3


def test_all_unreadable_ledgers_are_counted_and_only_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_index, "UNREADABLE_KEPT_MAX", 2)
    index = simulate(build_index(ScriptedClient({n: Corrupt("garbage") for n in range(3)}), {B1}.__contains__))
    assert (list(index.unreadable), index.unreadable_count, index.ledger_count) == ([0, 1], 3, 3)


@pytest.mark.parametrize("write_quorum", [2, 3])
@pytest.mark.parametrize("last", [-1, 0, 4, 5, 17])
def test_a_share_is_the_number_of_entries_in_the_fragments_of_the_bookies(write_quorum: int, last: int) -> None:
    metadata = ledger(
        ("b1", "b2", "b3"), ("b4", "b2", "b3"), firsts=(0, 4), last=max(last, 3), write_quorum=write_quorum
    )
    for wanted in ({B1}, {B4}, {B2, B3}):
        listed = sum(len(f.entry_ids) for f in closed_fragments(metadata) if f.bookie_id in wanted)
        assert share_of(metadata, wanted) == Share(listed, 1000 * listed // (metadata.last_entry_id + 1))


def test_the_share_of_an_open_ledger_counts_only_closed_segments() -> None:
    metadata = ledger(("b1", "b2", "b3"), ("b1", "b2", "b4"), firsts=(0, 5), last=None)
    assert share_of(metadata, {B1}) == Share(5, None)
    assert share_of(metadata, {BookieId("b4")}) == Share(0, None)


def test_the_share_of_an_empty_ledger_is_zero() -> None:
    assert share_of(ledger(("b1", "b2", "b3"), last=-1, length=0), {B1}) == Share(0, 0)
