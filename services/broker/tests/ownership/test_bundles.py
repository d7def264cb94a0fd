"""Namespace bundles: the same names and ranges as in Pulsar."""

import zlib

from bindery_broker.ownership.bundles import BUNDLE_COUNT, Bundle
from bindery_pulsar.topic_name import TopicName


def test_bundle_names_cover_the_ring():
    assert [Bundle("t", "n", number).name for number in range(BUNDLE_COUNT)] == [
        "0x00000000_0x40000000",
        "0x40000000_0x80000000",
        "0x80000000_0xc0000000",
        "0xc0000000_0xffffffff",
    ]
    assert Bundle("t", "n", 3).owner_path == "/namespace/t/n/0xc0000000_0xffffffff"


def test_the_crc32_of_a_topics_name_lies_in_the_range_of_its_bundle():
    for local in "abcdefghij":
        position = zlib.crc32(f"persistent://public/default/{local}".encode())
        bundle = Bundle.of(TopicName.parse(f"public/default/{local}"))
        lower, upper = (int(part, 16) for part in bundle.name.split("_"))
        assert lower <= position <= upper
