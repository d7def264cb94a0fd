"""Znode paths equal those of Pulsar, and names that a path cannot hold are refused."""

from collections.abc import Callable

import pytest
from bindery_core.errors import BadRequest
from bindery_pulsar import znode_layout as layout


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (layout.tenant_policies("acme"), "/admin/policies/acme"),
        (layout.namespace_policies(tenant="acme", namespace="shop"), "/admin/policies/acme/shop"),
        (layout.local_policies(tenant="acme", namespace="shop"), "/admin/local-policies/acme/shop"),
        (layout.managed_ledgers(tenant="acme", namespace="shop"), "/managed-ledgers/acme/shop/persistent"),
        (
            layout.managed_ledger(tenant="acme", namespace="shop", topic="a/b c"),
            "/managed-ledgers/acme/shop/persistent/a%2Fb+c",
        ),
        (
            layout.cursor(tenant="acme", namespace="shop", topic="t", subscription="s/1"),
            "/managed-ledgers/acme/shop/persistent/t/s%2F1",
        ),
        (
            layout.partitioned_topic(tenant="acme", namespace="shop", topic="t~1"),
            "/admin/partitioned-topics/acme/shop/persistent/t%7E1",
        ),
        (
            layout.bundle_owner(tenant="acme", namespace="shop", bundle="0x00000000_0x40000000"),
            "/namespace/acme/shop/0x00000000_0x40000000",
        ),
        (layout.broker("host-1.example.com:8080"), "/loadbalance/brokers/host-1.example.com:8080"),
        (layout.CLUSTERS_ROOT, "/admin/clusters"),
        (layout.LEADER, "/loadbalance/leader"),
        (layout.PRODUCER_NAME_COUNTER, "/counters/producer-name"),
    ],
)
def test_paths_equal_those_of_pulsar(path: str, expected: str) -> None:
    assert path == expected


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("topic", "topic"),
        ("aZ09.-*_", "aZ09.-*_"),
        ("a b+c", "a+b%2Bc"),
        ("a/b~c%", "a%2Fb%7Ec%25"),
        ("ü€", "%C3%BC%E2%82%AC"),
        ("...", "..."),
    ],
)
def test_names_are_encoded_as_in_html_forms(name: str, encoded: str) -> None:
    assert layout.encode_name(name) == encoded
    assert layout.decode_name(encoded) == name


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_a_path_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="not a name that a path can hold"):
        layout.encode_name(name)


def test_half_a_character_is_refused() -> None:
    with pytest.raises(BadRequest) as caught:
        layout.encode_name("a\ud800")
    assert caught.value.facts == {"name": r"'a\ud800'"}


def test_a_part_that_is_not_utf_8_is_not_decoded() -> None:
    with pytest.raises(UnicodeDecodeError):
        layout.decode_name("%FF")


def namespaced(function: Callable[..., str], **more: str) -> Callable[[str], str]:
    return lambda name: function(tenant="acme", namespace=name, **more)


def tenanted(function: Callable[..., str], **more: str) -> Callable[[str], str]:
    return lambda name: function(tenant=name, namespace="shop", **more)


PATHS = {
    "tenant of policies": layout.tenant_policies,
    "tenant": tenanted(layout.namespace_policies),
    "namespace": namespaced(layout.namespace_policies),
    "namespace of local policies": namespaced(layout.local_policies),
    "namespace of topics": namespaced(layout.managed_ledgers),
    "namespace of a partitioned topic": namespaced(layout.partitioned_topic, topic="t"),
    "namespace of a bundle": namespaced(layout.bundle_owner, bundle="b"),
    "bundle": lambda name: layout.bundle_owner(tenant="acme", namespace="shop", bundle=name),
    "broker": layout.broker,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "a\n", "a~"])
def test_names_with_other_characters_are_refused(path: Callable[[str], str], name: str) -> None:
    with pytest.raises(BadRequest, match=r"not a (tenant|namespace|bundle|broker) name"):
        path(name)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("name", ["a", "a-b=c:d.e_F9", "..."])
def test_names_of_the_usual_characters_are_accepted(path: Callable[[str], str], name: str) -> None:
    assert f"/{name}" in path(name)


@pytest.mark.parametrize(
    ("lower", "upper", "name"),
    [
        (0, 0xFFFFFFFF, "0x00000000_0xffffffff"),
        (0x40000000, 0x80000000, "0x40000000_0x80000000"),
        (0, 1, "0x00000000_0x00000001"),
    ],
)
def test_a_bundle_is_named_by_its_range(lower: int, upper: int, name: str) -> None:
    assert layout.bundle_name(lower=lower, upper=upper) == name


@pytest.mark.parametrize(("lower", "upper"), [(-1, 1), (1, 1), (2, 1), (0, 0x1_0000_0000)])
def test_a_range_that_is_no_bundle_has_no_name(lower: int, upper: int) -> None:
    with pytest.raises(AssertionError):
        layout.bundle_name(lower=lower, upper=upper)
