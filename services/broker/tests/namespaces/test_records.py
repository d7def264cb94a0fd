"""Records of tenants, namespaces and clusters."""

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
    records.check_bundles(policies)
    assert policies["bundles"]["numBundles"] == 4
    assert not records.is_deleted(policies)
    assert records.is_deleted({"deleted": True})


@pytest.mark.parametrize(
    "bundles", [{"numBundles": 8}, {"numBundles": 4, "boundaries": ["0x00000000", "0x10000000"]}, 4, {}]
)
def test_other_bundles_are_refused(bundles: object) -> None:
    with pytest.raises(BadRequest, match="4 equal bundles"):
        records.check_bundles({"bundles": bundles})


def test_no_bundles_stand_for_the_default() -> None:
    records.check_bundles({})
    records.check_bundles({"bundles": {"numBundles": 4}})
