"""NewLedger: defaults and the quorums that are possible."""

import pytest
from bindery_client.ledger.new_ledger import LedgerOptions, NewLedger
from bindery_core.errors import BadRequest
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 2, 1), (5, 3, 2), (3, 3, 3)])
def test_possible_quorums_are_stored(sizes: tuple[int, int, int]) -> None:
    ensemble_size, write_quorum, ack_quorum = sizes
    new = NewLedger(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)
    metadata = new.metadata(tuple(BookieId(f"b{number}") for number in range(ensemble_size)))
    assert (metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum) == sizes


@pytest.mark.parametrize("sizes", [(3, 3, 0), (3, 2, 3), (2, 3, 2), (0, 0, 0), (3, 3, -1)])
def test_impossible_quorums_are_refused_with_their_values(sizes: tuple[int, int, int]) -> None:
    ensemble_size, write_quorum, ack_quorum = sizes
    with pytest.raises(BadRequest) as raised:
        NewLedger(ensemble_size=ensemble_size, write_quorum=write_quorum, ack_quorum=ack_quorum)
    assert raised.value.facts == {
        "ensemble_size": ensemble_size,
        "write_quorum": write_quorum,
        "ack_quorum": ack_quorum,
    }


def test_the_metadata_of_a_new_ledger_has_the_defaults_or_the_given_options() -> None:
    default = NewLedger()
    assert (default.ensemble_size, default.write_quorum, default.ack_quorum) == (3, 3, 2)
    assert default.digest_type is DigestType.CRC32C
    assert not default.deferred_sync
    ensemble = (BookieId("a"), BookieId("b"), BookieId("c"))
    metadata = NewLedger(digest_type=DigestType.MAC, password=b"p", custom={"k": b"v"}).metadata(ensemble)
    assert (metadata.digest_type, metadata.password, metadata.custom) == (DigestType.MAC, b"p", {"k": b"v"})
    assert metadata.last_segment.ensemble == ensemble
    assert default.metadata(ensemble).custom == {}


def test_the_options_are_the_fields_of_a_new_ledger() -> None:
    assert set(LedgerOptions.__annotations__) == set(NewLedger.__dataclass_fields__)
