"""A value with the version that it was read with."""

import dataclasses

import pytest
from bindery_metadata.stores.versioned import Versioned


def test_the_creation_time_is_unknown_unless_given() -> None:
    assert Versioned("x", 3) == Versioned("x", 3, created_ms=0)
    assert Versioned("x", 3) != Versioned("x", 4)


def test_a_value_keeps_its_version() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Versioned("x", 3).version = 4  # type: ignore[misc]
