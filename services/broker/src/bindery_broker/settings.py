"""Settings of the broker process."""

from typing import Annotated

from bindery_identity.followed import FollowedFile
from bindery_kit.access.audit_settings import AuditLogSettings
from bindery_kit.access.authentication_settings import AuthenticationSettings
from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.http_settings import HttpSettings
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check, group
from bindery_kit.configuration.tls_settings import HttpTlsSettings, PeerTlsSettings
from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings
from bindery_recovery.bookie_access import BookieAccess

from bindery_broker.access.settings import AuthorizationSettings
from bindery_broker.balancing.settings import BalancingSettings
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.limits.accounts import NO_OVERRIDES, Accounts, Overrides, Owner, OwnerLimits, decode_overrides
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.namespaces.policies import EffectivePolicies
from bindery_broker.ownership.listeners import Listeners, parse_listeners
from bindery_broker.producers.deduplication import DeduplicationLimits
from bindery_broker.topics.topics import TopicLimits

MIB = 2**20


class ClientSettings(BookieAccess):
    """Credentials that the broker presents to bookies, and the racks on which it places ledgers."""

    model_config = SettingsConfigDict(env_prefix="BROKER_CLIENT_")


class PortTlsSettings(HttpTlsSettings):
    """TLS on the HTTP port. The files are followed: new connections use the newest ones."""

    model_config = SettingsConfigDict(env_prefix="BROKER_HTTP_TLS_")


class PortSettings(HttpSettings):
    """Checks and limits of the HTTP port. They apply to all clients, authenticated or not."""

    model_config = SettingsConfigDict(env_prefix="BROKER_HTTP_")

    tls: PortTlsSettings = group(PortTlsSettings)
    """TLS on the HTTP port."""


class PeersSettings(PeerTlsSettings):
    """How this broker calls other brokers: calls for topics that they own are forwarded to them."""

    model_config = SettingsConfigDict(env_prefix="BROKER_PEERS_")

    connections_max: Annotated[int, Ge(0), Le(16)] = 2
    """Maximum number of connections to any other broker; all requests that are passed on to it run over them. 0: each
    request takes a connection of its own, as with brokers of earlier versions."""

    requests_max: Annotated[int, Ge(16), Le(1_000_000)] = 10_000
    """Maximum number of requests in progress that other brokers have sent over such connections. Above it, they get
    429. One connection can have 4,096. Each takes about 20 KiB while it waits."""


class AuthSettings(AuthenticationSettings):
    """Authentication of clients. It is required as soon as a file of keys or passwords, OpenID issuers, or a role of
    certificates are configured."""

    model_config = SettingsConfigDict(env_prefix="BROKER_AUTH_")


class ZooKeeperAccess(ZooKeeperAccessSettings):
    """TLS and credentials for ZooKeeper. Files are read again before each connection if they have changed."""

    model_config = SettingsConfigDict(env_prefix="BROKER_ZOOKEEPER_ACCESS_")


class AuditSettings(AuditLogSettings):
    """The audit log: one JSON line before each administrative change, one before its answer, and one for each refused
    request (401, 403)."""

    model_config = SettingsConfigDict(env_prefix="BROKER_AUDIT_LOG_")


class LimitSettings(Settings):
    """Rates and numbers that a client, a tenant or a namespace may use on this broker; 0: no limit.

    A client is the role that it has proved, or its address if it has proved none.
    """

    model_config = SettingsConfigDict(env_prefix="BROKER_LIMITS_")

    principal_requests_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum requests per second of one client."""

    principal_bytes_in_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the request bodies of one client."""

    principal_bytes_out_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the response bodies of one client."""

    principal_connections_max: Annotated[int, Ge(0), Le(100_000)] = 0
    """Maximum number of connections of one client that have a request in progress. Idle ones are limited by
    `http.connections_per_address_max`."""

    principal_topics_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum number of topics that one client creates per minute; each partition counts."""

    tenant_requests_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum requests per second to one tenant and everything in it."""

    tenant_bytes_in_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the bodies of requests to one tenant."""

    tenant_bytes_out_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the bodies of responses to such requests."""

    tenant_connections_max: Annotated[int, Ge(0), Le(100_000)] = 0
    """Maximum number of connections with a request to one tenant in progress."""

    tenant_topics_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum number of topics created per minute in one tenant; each partition counts."""

    namespace_requests_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum requests per second to one namespace and its topics."""

    namespace_bytes_in_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the bodies of requests to one namespace."""

    namespace_bytes_out_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum bytes per second of the bodies of responses to such requests."""

    namespace_connections_max: Annotated[int, Ge(0), Le(100_000)] = 0
    """Maximum number of connections with a request to one namespace in progress."""

    namespace_topics_rate: Annotated[float, Ge(0), Le(1e15)] = 0.0
    """Maximum number of topics created per minute in one namespace; each partition counts."""

    burst_s: Annotated[float, Ge(0.01), Le(3600)] = 1.0
    """Seconds of a rate that may be used at once after a pause. A minute of the rates of topics."""

    wait_ms_max: Annotated[int, Ge(0), Le(30_000)] = 2_000
    """Maximum milliseconds that a request above a rate waits for its turn. One that would wait longer gets 429 at once.
    Requests that wait keep their connections, and up to 64 KiB of their bodies."""

    by_address: bool = True
    """Limit clients that have proved no role by their address; an IPv6 network of 64 bits counts as one address. False:
    only by tenant and namespace, for example if all clients come through one proxy."""

    overrides_file: str = ""
    """JSON file with other limits of single roles, addresses, tenants and namespaces, read again when it changes.
    Empty: none."""

    tracked_max: Annotated[int, Ge(100), Le(10_000_000)] = 10_000
    """Maximum number of clients, tenants and namespaces whose use is in memory, about 1 KiB each. Above it, the one
    that was not used for the longest time is forgotten, if possible one that has nothing to wait for."""

    def overrides(self) -> FollowedFile[Overrides] | None:
        """Return the file of overrides; None: there is none. Raises BadRequest."""
        return FollowedFile(self.overrides_file, decode_overrides) if self.overrides_file else None

    def accounts(self, overrides: FollowedFile[Overrides] | None = None) -> Accounts:
        """Return the accounts with these limits, and with what `overrides` has at each time."""
        client = self._limits("principal")
        return Accounts(
            {
                Owner.ROLE: client,
                Owner.ADDRESS: client,
                Owner.TENANT: self._limits("tenant"),
                Owner.NAMESPACE: self._limits("namespace"),
            },
            burst_s=self.burst_s,
            wait_s_max=self.wait_ms_max / 1000,
            tracked_max=self.tracked_max,
            overrides=(lambda: NO_OVERRIDES) if overrides is None else (lambda: overrides.value),
        )

    def _limits(self, kind: str) -> OwnerLimits:
        return OwnerLimits(**{name: getattr(self, f"{kind}_{name}") for name in OwnerLimits.__struct_fields__})


class BrokerSettings(Settings):
    """The broker: topics over HTTP, stored in replicated ledgers."""

    model_config = SettingsConfigDict(env_prefix="BROKER_")

    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback requires authentication (`auth.*`) or --insecure."""

    port: Annotated[int, Ge(0), Le(65_535)] = 8080
    """HTTP port; 0: any free port."""

    insecure: bool = False
    """Listen where other machines can connect, without authentication: for trusted networks only."""

    advertised_url: str = ""
    """Address at which other brokers reach this one, as `http://host:port`, or `https://` with
    `http.tls`. Empty: the address it listens on."""

    advertised_listeners: str = ""
    """Addresses for clients in other networks, as `NAME:URL`, separated by commas: `external:https://b0.example.com`.
    With `redirect=true`, a client is redirected to the owner's address of the listener that it names (`listener`), or
    through which its request came. Each broker has addresses of its own. Source: Pulsar's advertisedListeners."""

    zookeeper: str = "127.0.0.1:2181"
    """ZooKeeper servers: `host:port`, separated by commas. A path after the last one is the chroot, the node that is
    used as the root of ZooKeeper: `a:2181,b:2181/messaging`."""

    zookeeper_session_ms: Annotated[int, Ge(1_000), Le(600_000)] = 10_000
    """ZooKeeper session timeout in milliseconds: the time until other brokers can take the topics of a dead broker."""

    zookeeper_connect_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 0.0
    """Seconds that the start waits for ZooKeeper, and for a cluster in it, before the process ends with exit code 1.
    0: no limit."""

    ledgers_root: str = "/ledgers"
    """Root of the ledgers' metadata in ZooKeeper, as created by `bindery cluster init`."""

    cluster_name: str = "bindery"
    """Name of the cluster in Pulsar's records: rates, and the clusters that serve a namespace, are stored by this name.
    All brokers must have the same. `bindery cluster init` creates the first namespace for `bindery`."""

    ledger: ManagedLedgerSettings = group(ManagedLedgerSettings)
    """Ledgers of topics and cursors."""

    client: ClientSettings = group(ClientSettings)
    """Credentials presented to bookies."""

    zookeeper_access: ZooKeeperAccess = group(ZooKeeperAccess)
    """TLS, credentials and access lists of the connection to ZooKeeper."""

    http: PortSettings = group(PortSettings)
    """Checks and limits of the HTTP port."""

    auth: AuthSettings = group(AuthSettings)
    """Authentication of clients and of other brokers."""

    authorization: AuthorizationSettings = group(AuthorizationSettings)
    """Which roles may do what."""

    peers: PeersSettings = group(PeersSettings)
    """Certificates for calls to other brokers."""

    audit_log: AuditSettings = group(AuditSettings)
    """Record of administrative changes and refused requests."""

    balancing: BalancingSettings = group(BalancingSettings)
    """How bundles of topics are spread over the brokers."""

    limits: LimitSettings = group(LimitSettings)
    """Rates and numbers that a client, a tenant or a namespace may use."""

    log_level: str = "info"
    """debug, info, warning or error."""

    access_log: bool = False
    """Write one log line per finished request. Off by default: a broker serves thousands of requests per second."""

    auto_create_topics: bool = True
    """Create a topic when a message is produced to it or received from it. Source: Pulsar's allowAutoTopicCreation."""

    request_bytes_max: Annotated[int, Ge(1_024)] = 16 * MIB
    """Maximum bytes of one produce request."""

    control_bytes_max: Annotated[int, Ge(1_024)] = MIB
    """Maximum bytes of any other request's body."""

    in_flight_bytes_max: Annotated[int, Ge(1_024)] = 64 * MIB
    """Maximum bytes of request bodies in memory, those of `http.bodies_size_max` included. Above it, the body that has
    been arriving longest is ended with 429, and if complete bodies take all of it, new ones are. A body takes about
    four times its bytes while its messages are stored; four bodies of the maximum size fit into a container of
    512 MiB."""

    messages_per_request_max: Annotated[int, Ge(1), Le(10_000)] = 10_000
    """Maximum number of messages of one produce request."""

    receive_wait_ms_max: Annotated[int, Ge(0), Le(30_000)] = 30_000
    """Maximum wait of one receive in milliseconds; longer ones are shortened. Below the usual 60 s of proxies."""

    topics_max: Annotated[int, Ge(1)] = 10_000
    """Maximum number of loaded topics. At the limit the topic that has been idle longest is closed."""

    topic_idle_s: Annotated[float, Gt(0)] = 3600
    """Seconds after which an empty topic without requests is closed."""

    read_ahead_bytes_max: Annotated[int, Ge(0)] = 64 * MIB
    """Maximum bytes of messages, over all subscriptions, that are read before a consumer requests them. There are also
    20,000 messages at most, and none of a subscription without a call for 10 seconds. Above it, each call reads only
    what it delivers, so consumers that receive few messages of a large batch at a time are slower."""

    response_bytes_max: Annotated[int, Ge(8 * MIB)] = 64 * MIB
    """Maximum bytes of messages in responses, from before they are read until the clients have read them. Above it,
    receives wait and are then refused with 429, and responses whose clients read too slowly are ended. At least one
    entry, which takes up to 5 MiB, must fit."""

    decoded_bytes_max: Annotated[int, Ge(8 * MIB)] = 16 * MIB
    """Maximum bytes of one entry once it is decompressed, with 400 bytes for each message of a large batch. A larger
    entry is delivered as one message with its payload as stored."""

    compaction_keys_bytes_max: Annotated[int, Ge(MIB)] = 64 * MIB
    """Maximum bytes of memory that the keys of a topic take while it is compacted, with 300 bytes for each: some
    200,000 keys. A topic with more keys is not compacted. Two topics are compacted at a time."""

    metrics_topics_max: Annotated[int, Ge(0)] = 1_000
    """Maximum number of topics with metrics of their own in /metrics; ten times as many subscriptions. The other
    topics are summed by namespace. 0: namespaces only, like Pulsar's exposeTopicLevelMetricsInPrometheus=false."""

    subscriptions_per_topic_max: Annotated[int, Ge(1)] = 1_000
    """Maximum number of subscriptions of one topic."""

    partitions_per_topic_max: Annotated[int, Ge(1), Le(10_000)] = 256
    """Maximum number of partitions of a partitioned topic. A receive asks each partition, and waits at each of them.
    Source: Pulsar's maxNumPartitionsPerPartitionedTopic, which is 0, without a limit, by default."""

    consumers_per_subscription_max: Annotated[int, Ge(1)] = 1_000
    """Maximum number of consumer sessions of one subscription."""

    unacked_max: Annotated[int, Ge(1)] = 50_000
    """Maximum number of unacknowledged messages of one subscription; at the limit no new ones are delivered."""

    unacked_per_consumer_max: Annotated[int, Ge(1)] = 10_000
    """Maximum number of unacknowledged messages of one consumer."""

    delayed_delivery_max_delay_s: Annotated[int, Ge(0)] = 0
    """Maximum seconds from the publishing of a message to its delivery time; a message with a longer delay is refused.
    0: no limit. Source: Pulsar's delayedDeliveryMaxDelayInMillis."""

    idempotency_window_s: Annotated[int, Ge(1), Le(86_400)] = 300
    """Seconds for which a broker remembers the `Idempotency-Key` of a request after its messages were stored. Within
    them, a repeated request gets the same answer."""

    idempotency_keys_max: Annotated[int, Ge(1), Le(250_000)] = 100_000
    """Maximum number of idempotency keys that the broker remembers, about half a KiB each. At the limit, requests with
    new keys are refused with 429. Requests with more than four entries count as more."""

    maintenance_interval_s: Annotated[float, Gt(0)] = 60
    """Seconds between rounds of maintenance, which delete unneeded ledgers and close idle topics. Pulsar's is 120."""

    held_request_s_max: Annotated[float, Gt(0), Le(60)] = 5.0
    """Maximum seconds that a request waits while its topic moves to another broker. Then it gets 503, with nothing
    done."""

    held_requests_max: Annotated[int, Ge(1)] = 10_000
    """Maximum number of requests that wait while their topics move. Others get 503 at once. Their bodies count in
    `in_flight_bytes_max`."""

    drain_bundles_max: Annotated[int, Ge(1), Le(64)] = 4
    """Maximum number of bundles that a broker hands over at the same time when it is drained or stops."""

    stop_timeout_s: Annotated[float, Gt(0)] = 30
    """Maximum seconds of a stop: three fifths for handing bundles over to other brokers, one fifth for requests in
    progress, one fifth for closing the topics that are left. A broker that has no bundles left stops at once."""

    @check
    def _consistent(self) -> None:
        if self.authorization.enabled and not self.auth.is_set:
            raise ValueError(
                "authorization.enabled needs authentication, because roles come from it: set auth.tokens_keys_file, "
                "auth.passwords_file or auth.certificate_role"
            )
        if self.authorization.enabled and not self.auth.broker_token_file:
            raise ValueError(
                "authorization.enabled needs a token of the broker itself, because what brokers do for one another is "
                "checked, too: create one (`bindery tokens create --subject broker --output broker.token ...`), name "
                "it with auth.broker_token_file, and add its role to auth.proxy_roles and to "
                "authorization.super_user_roles"
            )
        if self.auth.anonymous_role and self.auth.anonymous_role in self.authorization.super_users:
            raise ValueError(
                f"auth.anonymous_role ({self.auth.anonymous_role}) must not be one of authorization.super_user_roles: "
                "every client without credentials could do everything. Remove it from one of them"
            )
        parse_listeners(self.advertised_listeners)
        if self.http.tls.is_set and self.advertised_url.lower().startswith("http:"):
            raise ValueError(
                f"advertised_url ({self.advertised_url}) must begin with https: because of http.tls, the port serves "
                "https only, and other brokers could not reach this one"
            )
        if self.request_bytes_max > self.in_flight_bytes_max:
            raise ValueError("request_bytes_max must not exceed in_flight_bytes_max")
        if self.unacked_per_consumer_max > self.unacked_max:
            raise ValueError("unacked_per_consumer_max must not exceed unacked_max")
        if not self.ledger.ack_quorum <= self.ledger.write_quorum <= self.ledger.ensemble_size:
            raise ValueError(
                f"BROKER_LEDGER_ACK_QUORUM ({self.ledger.ack_quorum}) must not exceed BROKER_LEDGER_WRITE_QUORUM "
                f"({self.ledger.write_quorum}), which must not exceed BROKER_LEDGER_ENSEMBLE_SIZE "
                f"({self.ledger.ensemble_size})"
            )

    @property
    def listeners(self) -> Listeners:
        return parse_listeners(self.advertised_listeners)

    def default_policies(self) -> EffectivePolicies:
        """Return the policies of topics for which neither the topic nor its namespace sets any."""
        return EffectivePolicies(
            delay_s_max=self.delayed_delivery_max_delay_s,
            auto_create_topics=self.auto_create_topics,
            subscriptions_max=self.subscriptions_per_topic_max,
            consumers_per_subscription_max=self.consumers_per_subscription_max,
            unacked_per_consumer_max=self.unacked_per_consumer_max,
            unacked_per_subscription_max=self.unacked_max,
        )

    def topic_limits(self) -> TopicLimits:
        return TopicLimits(
            topics_max=self.topics_max,
            subscriptions_max=self.subscriptions_per_topic_max,
            consumers_max=self.consumers_per_subscription_max,
            idle_s_max=self.topic_idle_s,
            read_ahead_bytes_max=self.read_ahead_bytes_max,
            response_bytes_max=self.response_bytes_max,
            decoded_bytes_max=self.decoded_bytes_max,
            compaction_keys_bytes_max=self.compaction_keys_bytes_max,
            deduplication=DeduplicationLimits(keys_max=self.idempotency_keys_max, window_s=self.idempotency_window_s),
            dispatch=DispatchLimits(
                unacked_max=self.unacked_max, unacked_per_consumer_max=self.unacked_per_consumer_max
            ),
        )
