"""Bounds admit values up to their limit, with or without the limit itself."""

import pytest
from bindery_kit.configuration.bounds import Bound, Ge, Gt, Le, Lt


@pytest.mark.parametrize(
    ("bound", "admitted", "text"),
    [
        (Ge(5), [False, True, True], "at least 5"),
        (Gt(5), [False, False, True], "more than 5"),
        (Le(5), [True, True, False], "at most 5"),
        (Lt(5), [True, False, False], "less than 5"),
        (Ge(4.5), [False, True, True], "at least 4.5"),
    ],
    ids=str,
)
def test_a_bound_admits_one_side_and_names_its_limit(bound: Bound, admitted: list[bool], text: str) -> None:
    assert [bound.admits(value) for value in (4, 5, 6)] == admitted
    assert str(bound) == text
