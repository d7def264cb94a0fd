"""Records of tenants, namespaces and clusters."""

from typing import Any

import pytest
from bindery_broker.namespaces import records
from bindery_core.errors import BadRequest, Corrupt


def test_a_record_keeps_its_members_and_their_values() -> None:
    data = b'{"a":1.10,"b":123456789012345678901234567890,"c":"\xc3\xa9","d":[null,true,{}]}'
    assert records.decode(records.encode(records.decode(data, path="/x")), path="/x") == records.decode(data, path="/x")
    assert records.decode(data, path="/x")["b"] == 123456789012345678901234567890
    assert records.decode(b"", path="/x") == {}


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff", b"[" * 100_000, b" " * 300_000])
def test_what_is_no_record_is_corrupt_and_named(data: bytes) -> None:
    with pytest.raises(Corrupt) as caught:
        records.decode(data, path="/admin/policies/t/n")
    assert caught.value.facts["path"] == "/admin/policies/t/n"


def test_a_new_namespace_has_the_bundles_that_brokers_use() -> None:
    policies = records.new_namespace(cluster="c")
    assert policies["bundles"]["boundaries"] == ["0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"]
    assert policies["bundles"]["numBundles"] == 4
    assert not records.is_deleted(policies)
    assert records.is_deleted({"deleted": True})


FOUR = ["0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff"]


@pytest.mark.parametrize(
    ("given", "boundaries"),
    [
        (None, FOUR),
        ({}, FOUR),
        ({"numBundles": -1, "boundaries": ["0x1"]}, FOUR),
        ({"numBundles": 1}, ["0x00000000", "0xffffffff"]),
        ({"numBundles": 3, "boundaries": []}, ["0x00000000", "0x55555555", "0xaaaaaaaa", "0xffffffff"]),
        (
            {"numBundles": 7, "boundaries": ["0xffffffff", "0x0", "256", "0x100"]},
            ["0x00000000", "0x00000100", "0xffffffff"],
        ),
    ],
)
def test_bundles_of_a_new_namespace_are_those_that_pulsar_makes(given: Any, boundaries: list[str]) -> None:
    """Values of PoliciesUtil.getBundles and NamespacesBase.validateBundlesData of Pulsar 4.0.7."""
    assert records.bundles_data(given) == {"boundaries": boundaries, "numBundles": len(boundaries) - 1}


@pytest.mark.parametrize("count", [1, 2, 5, 64, 1000, records.BUNDLES_MAX])
def test_any_number_of_bundles_divides_all_hashes(count: int) -> None:
    found = records.bundles_data({"numBundles": count})
    assert found["numBundles"] == count
    values = [int(text, 16) for text in found["boundaries"]]
    assert values == [*(index * (2**32 // count) for index in range(count)), 2**32 - 1]
    assert len(records.encode(found)) < 16_384


@pytest.mark.parametrize(
    "given",
    [
        4,
        [],
        {"numBundles": "4"},
        {"numBundles": True},
        {"numBundles": records.BUNDLES_MAX + 1},
        {"numBundles": 2, "boundaries": "0x00000000"},
        {"numBundles": 2, "boundaries": ["0x00000000", "x"]},
        {"numBundles": 2, "boundaries": ["0x00000000", 1]},
        {"numBundles": 2, "boundaries": ["0x00000001", "0xffffffff"]},
        {"numBundles": 2, "boundaries": ["0x00000000", "0xfffffffe"]},
        {"numBundles": 2, "boundaries": ["-1", "0x00000000", "0xffffffff"]},
        {"numBundles": 2, "boundaries": [hex(one) for one in range(records.BUNDLES_MAX + 2)] + ["0xffffffff"]},
    ],
    ids=lambda given: str(given)[:60],
)
def test_bundles_that_divide_nothing_are_refused(given: Any) -> None:
    with pytest.raises(BadRequest):
        records.bundles_data(given)
