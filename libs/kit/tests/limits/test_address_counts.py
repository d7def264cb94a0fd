"""AddressCounts: connections per address."""

from typing import Any

import pytest
from bindery_kit.limits.address_counts import NO_ADDRESS, AddressCounts, group_of


@pytest.mark.parametrize(
    ("peer", "group"),
    [
        (("10.0.0.1", 5000), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5000, 0, 0), "10.0.0.1"),
        (("2001:db8::1", 5000, 0, 0), "2001:db8::/64"),
        (("2001:db8::ffff:1:2:3", 5000, 0, 0), "2001:db8::/64"),
        (("2001:db8:0:1::1", 5000, 0, 0), "2001:db8:0:1::/64"),
        (("fe80::1%eth0", 5000, 0, 2), "fe80::/64"),
        (("::1", 5000, 0, 0), "::/64"),
        (("not:an:address", 1), "not:an:address"),
        (("", 0), NO_ADDRESS),
        ((), NO_ADDRESS),
        ("", NO_ADDRESS),
        ("/run/socket", NO_ADDRESS),
        (None, NO_ADDRESS),
    ],
)
def test_groups(peer: Any, group: str) -> None:
    assert group_of(peer) == group


def test_groups_are_forgotten_with_their_last_connection() -> None:
    counts = AddressCounts()
    assert [counts.add("a"), counts.add("a"), counts.add("b")] == [1, 2, 1]
    assert (counts.count("a"), counts.count("b"), counts.count("c"), len(counts)) == (2, 1, 0, 2)
    counts.remove("a")
    counts.remove("b")
    assert (counts.count("a"), counts.count("b"), len(counts)) == (1, 0, 1)
    counts.remove("a")
    assert len(counts) == 0
    with pytest.raises(KeyError):
        counts.remove("a")


def test_the_largest_group_is_found() -> None:
    counts = AddressCounts()
    assert counts.largest is None
    for group in ("a", "b", "b", "c"):
        counts.add(group)
    assert counts.largest == "b"
    counts.remove("b")
    assert counts.largest == "a"
