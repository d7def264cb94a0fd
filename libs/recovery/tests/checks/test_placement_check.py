"""Adherence of ensembles and ledgers to the placement policy, and the counters of a check of all ledgers."""

import pytest
from bindery_core.errors import Corrupt, MetadataUnavailable
from bindery_core.ids import BookieId
from bindery_recovery.checks.placement_check import Adherence, check_placement, judge_ensemble, judge_ledger
from scripted import ScriptedClient, bookies, ledger
from simulated import simulate

ONE_RACK = dict.fromkeys(bookies("b1", "b2", "b3", "b4"), "/default-rack")
TWO_RACKS = {**dict.fromkeys(bookies("b1", "b2", "b3"), "/a"), BookieId("b4"): "/b"}


@pytest.mark.parametrize(
    ("ensemble", "write_quorum", "racks", "unwanted", "expected"),
    [
        (("b1", "b2", "b3"), 3, ONE_RACK, (), Adherence.STRICT),
        (("b1", "b2", "b1"), 3, ONE_RACK, (), Adherence.FAIL),
        (("b1", "b2", "b3"), 3, ONE_RACK, ("b2",), Adherence.FAIL),
        (("b1", "b2", "b3"), 3, ONE_RACK, ("b4",), Adherence.STRICT),
        (("b1", "b2", "b3"), 3, TWO_RACKS, (), Adherence.SOFT),
        (("b1", "b2", "b4"), 3, TWO_RACKS, (), Adherence.STRICT),
        (("b1", "b2", "b4"), 2, TWO_RACKS, (), Adherence.SOFT),
        (("b1", "b4"), 1, TWO_RACKS, (), Adherence.STRICT),
        (("b1", "b2", "gone"), 3, ONE_RACK, (), Adherence.STRICT),
        (("b1", "b2", "b3"), 3, {}, (), Adherence.STRICT),
    ],
)
def test_an_ensemble_is_judged_by_its_members_and_racks(ensemble, write_quorum, racks, unwanted, expected) -> None:  # type: ignore[no-untyped-def]
    assert judge_ensemble(ensemble, write_quorum=write_quorum, racks=racks, unwanted=unwanted) is expected


def test_the_worst_ensemble_decides_the_adherence_of_a_ledger() -> None:
    metadata = ledger(("b1", "b2", "b4"), ("b1", "b2", "b3"), firsts=(0, 5))
    assert judge_ledger(metadata, racks=TWO_RACKS) is Adherence.SOFT
    assert judge_ledger(metadata, racks=TWO_RACKS, unwanted=bookies("b4")) is Adherence.FAIL


def test_closed_ledgers_are_counted_by_adherence() -> None:
    client = ScriptedClient(
        {
            1: ledger(("b1", "b2", "b4")),
            2: ledger(("b1", "b2", "b3")),
            3: ledger(("b1", "b1", "b4")),
            4: ledger(("b1", "b1", "b4"), last=None),
            5: Corrupt("garbage"),
            7: Corrupt("garbage"),
        }
    )
    client.deleted_since = {6}
    result = simulate(check_placement(client, racks=TWO_RACKS))
    assert result.to_json() == {
        "ledgers": 3,
        "open_ledgers": 1,
        "unreadable": 2,
        "strict": 1,
        "soft": 1,
        "failed": 1,
    }
    assert result.failed_ids == [3]


def test_the_ids_of_misplaced_ledgers_are_kept_up_to_a_limit() -> None:
    client = ScriptedClient({n: ledger(("b1", "b1", "b4")) for n in range(1002)})
    result = simulate(check_placement(client, racks=ONE_RACK))
    assert result.failed == 1002
    assert result.failed_ids == list(range(1000))


def test_an_outage_during_the_check_returns_no_result() -> None:
    client = ScriptedClient({1: ledger(("b1", "b2", "b4")), 2: MetadataUnavailable("away")})
    with pytest.raises(MetadataUnavailable):
        simulate(check_placement(client, racks=ONE_RACK))
