"""Proposals to mark ledgers."""

from bindery_spark.audit.findings.actions import Proposal, proposal_text, proposals
from finished_runs import missing
from frames import finding


def test_a_ledger_has_one_proposal_with_all_its_bookies() -> None:
    found = [
        missing(),
        missing(bookie="b:3181", first=0, last=0),
        finding("MISSING_MARK", 7, action="mark"),
        finding("STALE_ENSEMBLE", 8, bookie="c:3181", action="mark"),
        finding("REPLICA_DIVERGENCE", 9, bookie="c:3181", action="inspect"),
        finding("UNREADABLE_BOOKIE", None, bookie="c:3181"),
    ]
    first, second = proposals(found)
    assert first == Proposal(7, ("a:3181", "b:3181"), "entry_missing", 4, ("MISSING_MARK", "MISSING_REPLICA"))
    assert second == Proposal(8, ("c:3181",), "bookie_lost", None, ("STALE_ENSEMBLE",))
    assert proposal_text(first) == "mark ledger 7 for a:3181, b:3181: MISSING_MARK, MISSING_REPLICA, 4 copies"
    assert [Proposal.from_json(one.to_json()) for one in (first, second)] == [first, second]


def test_the_number_of_copies_is_known_only_if_all_findings_of_copies_are_runs_of_entries() -> None:
    def count(*more: dict) -> int | None:
        (proposal,) = proposals([missing(), *more])
        return proposal.missing_entries

    assert count() == 3
    assert count(finding("NOT_HEALED", 7, action="mark")) == 3
    assert count({**missing(bookie="b:3181"), "kind": "DIGEST_MISMATCH"}) == 6
    assert count(finding("STALE_ENSEMBLE", 7, bookie="c:3181", action="mark")) is None
    (only_mark,) = proposals([finding("MISSING_MARK", 7, action="mark")])
    assert (only_mark.missing_entries, only_mark.reason, only_mark.bookies) == (None, "bookie_lost", ())
    assert proposal_text(only_mark) == "mark ledger 7: MISSING_MARK"
