"""Namespace bundles: the same names and ranges as in Pulsar."""

import zlib

import pytest
from bindery_broker.ownership.bundles import HASH_MAX, Bundle, bundles_of, parse_boundaries
from bindery_core.errors import Corrupt
from bindery_pulsar.topic_name import TopicName

PATH = "/admin/policies/t/n"


def test_bundle_names_cover_the_ring():
    assert [bundle.name for bundle in bundles_of("t", "n")] == [
        "0x00000000_0x40000000",
        "0x40000000_0x80000000",
        "0x80000000_0xc0000000",
        "0xc0000000_0xffffffff",
    ]
    assert bundles_of("t", "n")[3].owner_path == "/namespace/t/n/0xc0000000_0xffffffff"


@pytest.mark.parametrize("count", [1, 3, 4, 16, 100])
def test_the_crc32_of_a_topics_name_lies_in_the_range_of_its_bundle(count):
    boundaries = parse_boundaries({"numBundles": count}, path=PATH)
    bundles = bundles_of("public", "default", boundaries)
    assert len(bundles) == count
    for local in "abcdefghij":
        name = TopicName.parse(f"public/default/{local}")
        position = zlib.crc32(f"persistent://public/default/{local}".encode())
        bundle = Bundle.of(name, boundaries)
        lower, upper = (int(part, 16) for part in bundle.name.split("_"))
        assert lower <= position < upper
        assert [one for one in bundles if one.contains(name)] == [bundle]
    assert not bundles[0].contains(TopicName.parse("public/other/a"))


class At(TopicName):
    """A name with any hash."""

    bundle_position = property(lambda self: int(self.local, 16))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("position", "number"),
    [("0", 0), ("3fffffff", 0), ("40000000", 1), ("c0000000", 3), ("fffffffe", 3), ("ffffffff", 3)],
)
def test_boundaries_belong_to_the_bundle_that_they_begin(position, number):
    name = At.of(tenant="t", namespace="n", local=position)
    bundles = bundles_of("t", "n")
    assert Bundle.of(name) == bundles[number]
    assert [bundle.contains(name) for bundle in bundles].index(True) == number


def test_boundaries_of_pulsar():
    texts = ["0x00000000", "0x20000000", "0x40000000", "0xffffffff"]
    assert parse_boundaries({"boundaries": texts, "numBundles": 3}, path=PATH) == (0, 2**29, 2**30, HASH_MAX)
    assert parse_boundaries({"boundaries": [], "numBundles": 2}, path=PATH) == (0, 2**31, HASH_MAX)
    assert parse_boundaries(None, path=PATH) is None


@pytest.mark.parametrize(
    "bundles",
    [
        {},
        3,
        {"boundaries": "0x00000000"},
        {"boundaries": ["x", "y"]},
        {"boundaries": ["0x00000000"]},
        {"boundaries": ["0x00000001", "0xffffffff"]},
        {"boundaries": ["0x00000000", "0xfffffffe"]},
        {"boundaries": ["0x00000000", "0x20000000", "0x20000000", "0xffffffff"]},
        {"numBundles": 0},
    ],
)
def test_bundles_that_cannot_be_read_are_reported(bundles):
    with pytest.raises(Corrupt):
        parse_boundaries(bundles, path=PATH)
