"""The names that a setting lists for a role."""

import pytest
from bindery_core.errors import BadRequest
from bindery_kit.access.allowed_names import EVERYBODY, NAMES_MAX, AllowedNames


def parse(text: str) -> AllowedNames:
    return AllowedNames.parse(text, setting="auth.admin_roles")


def test_a_star_allows_everybody():
    assert parse(" * ") == EVERYBODY
    assert EVERYBODY.is_everybody
    assert EVERYBODY.allows("anyone")


def test_names_are_compared_exactly():
    names = parse("alice, ops@example.com ,")
    assert not names.is_everybody
    assert [names.allows(name) for name in ("alice", "ops@example.com", "Alice", "alic", "")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("text", ["", " ", ","])
def test_nothing_allows_nobody(text: str):
    assert not parse(text).is_everybody
    assert not parse(text).allows("alice")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("alice,*", "has \\* beside names"),
        ("a\u2028b", "no client can have"),
        ("x" * 300, "no client can have"),
        (",".join(f"n{n}" for n in range(NAMES_MAX + 1)), "too many names"),
    ],
)
def test_text_that_restricts_nothing_or_nobody_is_refused(text: str, reason: str):
    with pytest.raises(BadRequest, match=f"auth.admin_roles.*{reason}"):
        parse(text)
