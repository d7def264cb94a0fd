"""Ids of bookies: the characters that BookKeeper accepts, and no others."""

import pytest
from bindery_core.errors import BadRequest
from bindery_core.ids import BOOKIE_ID_SIZE_MAX, ID_MAX, INVALID_ENTRY_ID, validate_bookie_id


def test_the_limits_of_ids() -> None:
    assert ID_MAX == 0x7FFF_FFFF_FFFF_FFFF
    assert INVALID_ENTRY_ID == -1
    assert BOOKIE_ID_SIZE_MAX == 255


@pytest.mark.parametrize(
    "text", ["b", "10.0.0.1:3181", "host-1.example.com:3181", "a_b", "Z9", ";<=>?@[\\]^", "x" * 255, "readonly1"]
)
def test_a_legal_id_is_returned(text: str) -> None:
    assert validate_bookie_id(text) == text


@pytest.mark.parametrize("text", ["", "x" * 256, "readonly", "a b", "a/b", "b\n", "a,b", "`", "{", "ä", "a+b"])
def test_another_id_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(BadRequest, match="not a bookie id") as caught:
        validate_bookie_id(text)
    assert caught.value.facts == {"bookie_id": text}
