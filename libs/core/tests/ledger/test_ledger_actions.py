"""Actions are plain values: equal by content, frozen, and with the usual case as default."""

import dataclasses

import pytest
from bindery_core.errors import TryAgain
from bindery_core.ids import BookieId
from bindery_core.ledger import ledger_actions
from bindery_core.ledger.ledger_actions import ChangeEnsemble, Confirm, Fail, SendAdds, SendReads

B0 = BookieId("b0")


def test_an_action_without_options_is_that_of_a_writer_or_reader() -> None:
    assert SendAdds(B0, [1], [b"frame"]).recovery is False
    assert SendReads(B0, (1,)).fence is False
    assert ChangeEnsemble({0: B0}, 5).publish is True


def test_actions_are_compared_by_their_content() -> None:
    assert SendAdds(B0, [1, 2], [b"a", b"b"]) == SendAdds(B0, [1, 2], [b"a", b"b"], False)
    assert SendReads(B0, (1,), True) != SendReads(B0, (1,))
    assert Confirm(1, 2) != Confirm(1, 3)
    error = TryAgain("later")
    assert Fail(error) == Fail(error)
    assert Fail(error) != Fail(TryAgain("later")), "errors are compared by identity"


@pytest.mark.parametrize(
    "kind", [kind for kind in vars(ledger_actions).values() if dataclasses.is_dataclass(kind) and
             kind.__module__ == ledger_actions.__name__], ids=lambda kind: kind.__name__)  # fmt: skip
def test_an_action_cannot_be_changed(kind: type) -> None:
    action = kind(*(None for _ in dataclasses.fields(kind)))
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        action.bookie_id = B0
