"""Listeners: the setting, and what records of other brokers say."""

import json

import msgspec
import pytest
from bindery_broker.ownership.listeners import (
    LISTENERS_MAX,
    Listener,
    authority,
    hosts_of,
    listeners_of,
    parse_listeners,
    with_port,
)
from bindery_broker.ownership.records import OwnerRecord, decode_broker, encode_broker, own_record
from bindery_broker.settings import BrokerSettings

BOTH = "external:https://b0.example.com:8443, lan:http://10.0.0.7,external:http://b0.example.com"


def test_a_name_has_an_address_for_each_scheme() -> None:
    found = parse_listeners(BOTH)
    assert found == {
        "external": Listener("http://b0.example.com", "https://b0.example.com:8443"),
        "lan": Listener("http://10.0.0.7"),
    }
    assert found["external"].url(scheme="http") == "http://b0.example.com"
    assert found["external"].url(scheme="https") == "https://b0.example.com:8443"
    assert found["lan"].url(scheme="https") == "http://10.0.0.7"
    assert hosts_of(found) == {"b0.example.com", "10.0.0.7"}
    assert parse_listeners("") == parse_listeners(" , ") == {}
    assert hosts_of(parse_listeners("six:http://[2001:db8::1]:8080")) == {"2001:db8::1"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("external", "is not NAME:URL"),
        ("https://b0.example.com", "is not NAME:URL"),
        (":http://b0", "is not NAME:URL"),
        (f"{'a' * 65}:http://b0", "is not NAME:URL"),
        ("ex ternal:http://b0", "is not NAME:URL"),
        ("external:pulsar://b0:6650", "begins with http:// or "),
        ("external:http://b0/path", "and no path"),
        ("external:http://user@b0", "and no path"),
        ("external:http://b0?x=1", "and no path"),
        ("external:http://b0:0", "perhaps a port"),
        ("external:http://b0:65536", "perhaps a port"),
        ("external:http://", "has a host"),
        ("external:http://b0\r\nx: y", "and no path"),
        ("external:http://a,external:http://b", "external has two addresses of one scheme"),
        ("external:http://a:80,lan:http://A", "belongs to external and to lan"),
        (",".join(f"n{i}:http://b{i}" for i in range(LISTENERS_MAX + 1)), "at most 16 names"),
    ],
)
def test_a_setting_that_is_wrong_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        BrokerSettings(advertised_listeners=text)


def test_records_have_them_in_the_form_of_pulsar() -> None:
    found = parse_listeners(BOTH)
    wanted = {
        "external": {"brokerHttpUrl": "http://b0.example.com", "brokerHttpsUrl": "https://b0.example.com:8443"},
        "lan": {"brokerHttpUrl": "http://10.0.0.7"},
    }
    owner = msgspec.json.encode(OwnerRecord.of("http://b0:8080", found))
    broker = encode_broker(own_record("http://b0:8080", found))
    for stored in (owner, broker):
        assert json.loads(stored)["advertisedListeners"] == wanted
    decoded = msgspec.json.decode(owner, type=OwnerRecord).advertised_listeners
    assert listeners_of(decoded) == listeners_of(decode_broker(broker).advertised_listeners or {}) == found


def test_what_cannot_be_read_is_left_out() -> None:
    pulsar = {"brokerServiceUrl": "pulsar://b1:6650", "brokerServiceUrlTls": None}
    stored = {
        "native": pulsar,
        "both": {**pulsar, "brokerHttpUrl": "http://b1:8080", "brokerHttpsUrl": None},
        "forged": {"brokerHttpUrl": "http://b1\r\nset-cookie: a=b"},
        "script": {"brokerHttpUrl": "javascript:alert(1)//"},
        "a b": {"brokerHttpUrl": "http://b1"},
        "text": "http://b1",
        "number": {"brokerHttpUrl": 1},
    }
    assert listeners_of(stored) == {"both": Listener("http://b1:8080")}
    many = {f"n{i}": {"brokerHttpUrl": f"http://b{i}"} for i in range(LISTENERS_MAX + 5)}
    assert len(listeners_of(many)) == LISTENERS_MAX


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://B0.example.com", "b0.example.com:80"),
        ("http://b0.example.com:80", "B0.example.com"),
        ("https://b0.example.com:443", "b0.example.com"),
        ("https://b0.example.com:8443", "b0.example.com:8443"),
        ("http://[2001:DB8::1]:80", "[2001:db8::1]"),
    ],
)
def test_an_address_and_the_host_of_its_requests_are_compared(url: str, host: str) -> None:
    assert authority(url) == with_port(host, scheme=url.partition(":")[0])
    assert authority(url) != with_port(f"{host}1", scheme=url.partition(":")[0])
