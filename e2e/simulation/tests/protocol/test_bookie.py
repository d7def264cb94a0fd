"""The model of a bookie gives the guarantees that the protocol requires."""

from bindery_core.ids import BookieId
from bindery_simulation.protocol.bookie import FENCED, NO_ENTRY, OK, UNKNOWN, Bookie


def test_a_bookie_keeps_acknowledged_data_over_a_crash() -> None:
    bookie = Bookie(BookieId("b0"))
    frame = bytes(8) + bytes(8) + (3).to_bytes(8, "big") + bytes(12) + b"x"
    assert bookie.add(4, frame, recovery=False) == OK
    bookie.fence()
    bookie.is_up = False
    bookie.restart()
    assert bookie.read(4) == (OK, frame)
    assert bookie.read(-1) == (OK, frame)
    assert bookie.lac == 3
    assert bookie.add(5, frame, recovery=False) == FENCED
    assert bookie.add(5, frame, recovery=True) == OK


def test_a_bookie_in_limbo_denies_nothing_and_rejects_ordinary_adds() -> None:
    bookie = Bookie(BookieId("b0"))
    frame = bytes(36) + b"x"
    bookie.add(0, frame, recovery=False)
    bookie.lose_storage(is_listed=True)
    assert bookie.read(0) == bookie.read(-1) == (UNKNOWN, None)
    assert bookie.add(1, frame, recovery=False) == FENCED
    bookie.lose_storage(is_listed=False)
    assert bookie.read(0) == (NO_ENTRY, None)
