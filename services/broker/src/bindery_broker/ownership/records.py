"""JSON of owners and brokers in the metadata, in a form that brokers of Apache Pulsar read.

| record       | node                         | JSON of Pulsar         | read by Pulsar brokers for             |
|--------------|------------------------------|------------------------|----------------------------------------|
| OwnerRecord  | `/namespace/T/N/<bundle>`    | NamespaceEphemeralData | lookups, redirects of admin calls      |
| BrokerRecord | `/loadbalance/brokers/<h:p>` | LocalBrokerData        | a list; where bundles may be assigned  |

`bindery` marks both as those of this program; Pulsar ignores members that it does not know. Addresses of the binary
protocol are empty, because brokers of Bindery do not have it. Pulsar's load managers assign a bundle only to brokers
that serve persistent topics and that have their own `loadManagerClassName`. A broker of Bindery says neither, so none
of them sends it a bundle that Pulsar's clients could not use. `docs/adr/0020` has the reasons.
Source: Pulsar 4.0, NamespaceEphemeralData, LocalBrokerData, LoadManagerShared, BrokerLoadManagerClassFilter.
"""

from typing import Final
from urllib.parse import urlsplit

import msgspec
from bindery_core.version import VERSION

LOAD_MANAGER: Final = "bindery"
"""Not the class of a load manager of Pulsar's."""


class OwnerRecord(msgspec.Struct, rename="camel", frozen=True):
    """Owner of a bundle. Members that Pulsar leaves out are empty."""

    http_url: str = ""
    native_url: str = ""
    native_url_tls: str = ""
    http_url_tls: str = ""
    disabled: bool = False
    """Whether the owner gives the bundle up: Pulsar's lookups fail then, and clients repeat them."""
    advertised_listeners: dict[str, object] = {}
    bindery: bool = False

    @property
    def is_pulsar(self) -> bool:
        """Whether the owner is a Pulsar broker. A broker of Bindery without the mark has no address for its clients."""
        return not self.bindery and bool(self.native_url or self.native_url_tls)


class BrokerRecord(msgspec.Struct, rename="camel", frozen=True):
    """A live broker. Members that are left out have Pulsar's defaults: no load, no bundles."""

    web_service_url: str = ""
    broker_id: str = ""
    persistent_topics_enabled: bool = False
    non_persistent_topics_enabled: bool = False
    broker_version_string: str = VERSION
    load_report_type: str = "LocalBrokerData"
    load_manager_class_name: str = LOAD_MANAGER
    bindery: bool = False
    draining: bool = False
    """Whether the broker gives its bundles up, and takes no others."""


def broker_id(url: str) -> str:
    """Return the name of a broker: `host:port` of its web service."""
    return urlsplit(url).netloc


def encode_broker(url: str, *, draining: bool = False) -> bytes:
    record = BrokerRecord(web_service_url=url, broker_id=broker_id(url), bindery=True, draining=draining)
    return msgspec.json.encode(record)


def may_take_bundles(value: bytes) -> bool:
    """Return whether the record is that of a broker of Bindery that is not being drained."""
    found = _addresses(value)
    return found.bindery and not found.draining


def is_pulsar_broker(value: bytes) -> bool:
    """Return whether the record is that of a Pulsar broker, which has an address for Pulsar's clients."""
    found = _addresses(value)
    return bool(found.pulsarServiceUrl or found.pulsarServiceUrlTls) and not found.bindery


def web_url(value: bytes) -> str:
    """Return the address of the web service in the record of a broker of either kind; empty if it has none."""
    found = _addresses(value)
    return found.webServiceUrl or found.webServiceUrlTls or ""


def http_url_of(value: bytes) -> str:
    """Return the address of the web service in the record of an owner, also one that gives the bundle up; empty: it has
    none."""
    try:
        record = msgspec.json.decode(value, type=OwnerRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return record.http_url or record.http_url_tls


def _addresses(value: bytes) -> "_Addresses":
    try:
        return msgspec.json.decode(value, type=_Addresses)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Addresses()


class _Addresses(msgspec.Struct):
    webServiceUrl: str | None = None
    webServiceUrlTls: str | None = None
    pulsarServiceUrl: str | None = None
    pulsarServiceUrlTls: str | None = None
    bindery: bool = False
    draining: bool = False
