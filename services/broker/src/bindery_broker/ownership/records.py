"""JSON of owners and brokers in the metadata, in a form that brokers of Apache Pulsar read.

| record       | node                         | JSON of Pulsar         | read by Pulsar brokers for             |
|--------------|------------------------------|------------------------|----------------------------------------|
| OwnerRecord  | `/namespace/T/N/<bundle>`    | NamespaceEphemeralData | lookups, redirects of admin calls      |
| BrokerRecord | `/loadbalance/brokers/<h:p>` | LocalBrokerData        | a list; where bundles may be assigned  |
| LeaderRecord | `/loadbalance/leader`        | LeaderBroker           | where unowned bundles are assigned     |

`bindery` marks the first two as those of this program; Pulsar ignores members that it does not know. Addresses of the
binary protocol are empty, because brokers of Bindery do not have it. An address is that of plain HTTP or that of HTTPS,
as the port serves.

Pulsar's load managers assign a bundle only to brokers that serve persistent topics and that have their own
`loadManagerClassName`. A broker of Bindery says neither, so none of them sends it a bundle that Pulsar's clients could
not use. `docs/adr/0020` has the reasons. Load is stored under Pulsar's names, but the bundles are in a member of our
own (`binderyBundles`): a Pulsar leader would unload and split those in its own members `bundles` and `lastStats`.
Source: Pulsar 4.0, NamespaceEphemeralData, LocalBrokerData, LeaderBroker, LoadManagerShared,
BrokerLoadManagerClassFilter, ThresholdShedder, BundleSplitterTask.
"""

from typing import Final
from urllib.parse import urlsplit

import msgspec
from bindery_core.errors import Corrupt
from bindery_core.version import VERSION

from bindery_broker.ownership.listeners import Listeners

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

    @classmethod
    def of(cls, url: str, listeners: Listeners | None = None) -> "OwnerRecord":
        """Return the record of a broker of Bindery. `url`: address of its port, of either scheme."""
        return cls(
            http_url="" if is_https(url) else url,
            http_url_tls=url if is_https(url) else "",
            advertised_listeners=dict(listeners or {}),
            bindery=True,
        )

    @property
    def url(self) -> str:
        """Address of the web service, of either scheme; empty: it has none."""
        return self.http_url or self.http_url_tls

    @property
    def is_pulsar(self) -> bool:
        """Whether the owner is a Pulsar broker. A broker of Bindery without the mark has no address for its clients."""
        return not self.bindery and bool(self.native_url or self.native_url_tls)


class Usage(msgspec.Struct, frozen=True):
    """Use of a resource. Source: Pulsar's ResourceUsage."""

    usage: float = 0.0
    limit: float = 0.0
    """0: not known."""

    @property
    def percent(self) -> float:
        return self.usage / self.limit * 100 if self.limit > 0 else 0.0


class BundleLoad(msgspec.Struct, frozen=True, array_like=True):
    """Load of a bundle: rates per second over the last ten seconds, and numbers of what is loaded.

    Stored as a JSON array in this order. Members are only added at the end. Pulsar's NamespaceBundleStats has the same.
    """

    msg_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    msg_throughput_in: float = 0.0
    """Bytes per second; `_out` as well."""
    msg_throughput_out: float = 0.0
    topics: int = 0
    consumers: int = 0
    producers: int = 0


def pulsar_load(load: BundleLoad) -> dict[str, float]:
    """Return the load of a bundle as Pulsar's NamespaceBundleStats."""
    return {
        "msgRateIn": load.msg_rate_in,
        "msgThroughputIn": load.msg_throughput_in,
        "msgRateOut": load.msg_rate_out,
        "msgThroughputOut": load.msg_throughput_out,
        "consumerCount": load.consumers,
        "producerCount": load.producers,
        "topics": load.topics,
        "cacheSize": 0,
    }


class BrokerRecord(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """A live broker and its load. Members that are missing have their defaults: no load, no bundles."""

    web_service_url: str | None = None
    web_service_url_tls: str | None = None
    pulsar_service_url: str | None = None
    pulsar_service_url_tls: str | None = None
    broker_id: str = ""
    persistent_topics_enabled: bool = False
    non_persistent_topics_enabled: bool = False
    cpu: Usage = Usage()
    """Percent of one core; the limit is 100, because the event loop of a broker uses one core at most."""
    memory: Usage = Usage()
    """MiB: resident memory of the process, and the limit of its container or the memory of the machine."""
    msg_throughput_in: float = 0.0
    msg_throughput_out: float = 0.0
    msg_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    last_update: int = 0
    """Milliseconds since 1970."""
    num_topics: int = 0
    num_bundles: int = 0
    num_consumers: int = 0
    num_producers: int = 0
    broker_version_string: str = ""
    load_report_type: str = "LocalBrokerData"
    load_manager_class_name: str = ""
    advertised_listeners: dict[str, object] | None = None
    bindery: bool = False
    draining: bool = False
    """Whether the broker gives its bundles up. It gets no others then."""
    weight: float = 0.0
    """Load of all its bundles in units (`balancing.weights`)."""
    bindery_bundles: dict[str, BundleLoad] = {}
    """By `tenant/namespace/0x..._0x...`: the bundles with the most load, of at most `num_bundles`."""

    @property
    def url(self) -> str:
        """Address of the web service, of either scheme; empty: it has none."""
        return self.web_service_url or self.web_service_url_tls or ""

    @property
    def is_pulsar(self) -> bool:
        """Whether it is a Pulsar broker, which has an address for Pulsar's clients."""
        return bool(self.pulsar_service_url or self.pulsar_service_url_tls) and not self.bindery


class LeaderRecord(msgspec.Struct, rename="camel", frozen=True):
    """The leader. Both members are there in Pulsar 4; older ones have the address only."""

    broker_id: str | None = None
    service_url: str | None = None

    @property
    def name(self) -> str:
        """`host:port`."""
        return self.broker_id or broker_id(self.service_url or "")


def is_https(url: str) -> bool:
    return urlsplit(url).scheme == "https"


def broker_id(url: str) -> str:
    """Return the name of a broker: `host:port` of its web service."""
    return urlsplit(url).netloc


def own_record(url: str, listeners: Listeners | None = None) -> BrokerRecord:
    """Return the record of a broker of Bindery without load. `url`: address of its port, of either scheme."""
    return BrokerRecord(
        web_service_url=None if is_https(url) else url,
        web_service_url_tls=url if is_https(url) else None,
        broker_id=broker_id(url),
        broker_version_string=VERSION,
        load_manager_class_name=LOAD_MANAGER,
        advertised_listeners=dict(listeners or {}),
        bindery=True,
    )


def encode_broker(record: BrokerRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_broker(value: bytes) -> BrokerRecord:
    """Return the record of a broker of either kind. One that cannot be read has its addresses at most."""
    try:
        return _DECODER.decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    try:
        found = msgspec.json.decode(value, type=_Addresses)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return BrokerRecord()
    return BrokerRecord(**msgspec.structs.asdict(found))


def decode_leader(value: bytes, *, path: str) -> LeaderRecord:
    """Return the record of the leader. `path`: for the error. Raises Corrupt."""
    try:
        return msgspec.json.decode(value, type=LeaderRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt("the record of the leader cannot be read", path=path) from error


def is_pulsar_broker(value: bytes) -> bool:
    """Return whether the record is that of a Pulsar broker, which has an address for Pulsar's clients."""
    return decode_broker(value).is_pulsar


def web_url(value: bytes) -> str:
    """Return the address of the web service in the record of a broker of either kind; empty if it has none."""
    return decode_broker(value).url


def http_url_of(value: bytes) -> str:
    """Return the address of the web service in the record of an owner, also one that gives the bundle up; empty: it has
    none."""
    try:
        return msgspec.json.decode(value, type=OwnerRecord).url
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""


class _Addresses(msgspec.Struct, rename="camel"):
    """The members of BrokerRecord that say of which kind a broker is, and where."""

    web_service_url: str | None = None
    web_service_url_tls: str | None = None
    pulsar_service_url: str | None = None
    pulsar_service_url_tls: str | None = None
    bindery: bool = False


_DECODER: Final = msgspec.json.Decoder(BrokerRecord)
