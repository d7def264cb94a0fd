"""BookieSettings: the settings of a bookie, by flag (`--port`), environment variable (`BOOKIE_PORT`) or default."""

import os
import socket
from typing import Annotated, Final, TypeVar

from bindery_core.errors import BadRequest
from bindery_core.ids import BOOKIE_ID_SIZE_MAX, BookieId, validate_bookie_id
from bindery_core.wire.framing import FRAME_SIZE_MAX
from bindery_kit.access.audit_settings import AuditLogSettings
from bindery_kit.admin.token_settings import AdminTokenSettings
from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.http_settings import AdminHttpSettings
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check, group
from bindery_kit.configuration.tls_settings import HttpTlsSettings
from bindery_kit.configuration.zookeeper_access import ZooKeeperAccessSettings

from bindery_bookie import memory
from bindery_bookie.access.security import AuthProvider, AuthSettings, TlsSettings
from bindery_bookie.storage.settings import StorageSettings

KIB: Final = 1024
MIB: Final = 1024 * KIB

_RESERVE_EXTRA: Final = 16 * MIB
"""Bytes of the reserve beyond the write caches: entry-log headers, the index, LastLogMark."""

SettingsT = TypeVar("SettingsT", bound=Settings)

Port = Annotated[int, Ge(0), Le(65535)]


class ServerSettings(Settings):
    """Limits of the ledger port. `docs/limits.md` lists what a client can make a bookie hold, and its limit."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_SERVER_")

    frame_size_max: Annotated[int, Ge(4 * KIB), Le(64 * MIB)] = FRAME_SIZE_MAX
    """Maximum frame size in bytes, including the length field. A larger frame ends its connection. All bookies and
    clients of a cluster must use the same value. Source: BookKeeper's nettyMaxFrameSizeBytes."""

    connections_max: Annotated[int, Ge(1), Le(100_000)] = 2000
    """Maximum number of connections. At the limit, one that has never sent a complete request is closed, or of the
    client address that has the most, the one that has been idle longest. If all have adds in progress, a new one is
    closed at once. A client opens one connection per bookie."""

    connections_per_address_max: Annotated[int, Ge(0), Le(100_000)] = 0
    """Maximum number of connections of one client address; an IPv6 network of 64 bits counts as one address. At the
    limit, one of the same address is closed. 0: half of `connections_max`. Set it to `connections_max` if all clients
    come from one address."""

    first_request_timeout_s: Annotated[float, Gt(0), Le(3600)] = 60.0
    """Seconds after which a connection without a complete request is closed. Later, connections may be idle without a
    limit, because clients keep them for their next request."""

    unfinished_size_max: Annotated[int, Ge(64 * KIB), Le(64 * 1024 * MIB)] = 64 * MIB
    """Maximum bytes of incomplete frames, over all connections, and at least `frame_size_max`. Above it, the connection
    whose frame has been incomplete longest is closed. From half of it on, large frames wait for others. Frames whose
    rest the bookie does not read, because of those, or of adds or operations of all clients, may take twice as many
    bytes again."""

    unread_size_max: Annotated[int, Ge(256 * KIB), Le(64 * 1024 * MIB)] = 32 * MIB
    """Maximum bytes of responses that clients have not read, over all connections, except those that `reads_size_max`
    counts. 64 KiB of the system's buffer are added for each client that has unread responses. Above it, the connection
    that has had unread responses longest is closed."""

    transfer_grace_s: Annotated[float, Gt(0), Le(3600)] = 30.0
    """Seconds that the rest of a frame may take to arrive, and that a client may leave responses unread. Beyond it,
    `transfer_rate_min` applies."""

    transfer_rate_min: Annotated[float, Gt(0), Le(1024 * MIB)] = 16 * KIB
    """Minimum bytes per second, in the mean, at which a frame must arrive and responses must be read. A slower
    connection is closed."""

    handshakes_max: Annotated[int, Ge(1), Le(100_000)] = 200
    """Maximum number of TLS handshakes in progress. Above it, the oldest of the client address with the most of them is
    ended. Each takes about 100 KiB."""

    secured_connections_max: Annotated[int, Ge(1), Le(100_000)] = 200
    """Maximum number of connections with TLS; each can take 300 KiB, and takes about 50 KiB if its requests are small.
    At the limit, one of them is closed as at `connections_max`. One address may have the same part of them as of all
    connections."""

    adds_size_max: Annotated[int, Ge(64 * KIB), Le(64 * 1024 * MIB)] = 64 * MIB
    """Maximum bytes of adds that wait for the journal. Above it, the bookie stops reading from connections that send
    adds until half of the bytes are answered, so that TCP slows the clients down."""

    reads_size_max: Annotated[int, Ge(64 * KIB), Le(64 * 1024 * MIB)] = 64 * MIB
    """Maximum bytes of read responses that are being prepared or unsent, over all connections. Above it, reads wait,
    except that addresses that have none may have half as much again in all."""

    pending_reads_max: Annotated[int, Ge(1), Le(10_000_000)] = 200_000
    """Maximum number of reads that wait for `reads_size_max`, over all connections; further ones are answered with
    TOO_MANY_REQUESTS, except 16 of each connection. Each takes about 200 bytes."""

    batch_read_size_max: Annotated[int, Ge(0), Le(64 * MIB)] = 5 * MIB
    """Maximum bytes of one response to a batch read, not counting its first entry. Source: BookKeeper's
    maxBatchReadSize."""

    unsent_size_max: Annotated[int, Ge(4 * KIB), Le(1024 * MIB)] = 128 * KIB
    """Unsent bytes on one connection above which the bookie stops reading from it, so that a client that does not read
    its responses stops only itself. Read responses beyond this size count towards `reads_size_max`, others towards
    `unread_size_max`."""

    unsent_time_max_s: Annotated[float, Gt(0), Le(86400)] = 2.0
    """Seconds after which a client is disconnected if it read less than half of `unsent_size_max` of its responses
    while others wait for the bytes of `reads_size_max`, or the operations, that it holds. Others wait up to a quarter
    longer. Longer than pauses of healthy clients, such as garbage collection. Bytes count as read when they leave the
    process. Compare BookKeeper's waitTimeoutOnResponseBackpressureMs, which drops such responses."""

    operations_max: Annotated[int, Ge(1), Le(100_000)] = 1000
    """Maximum number of concurrent operations other than adds and plain reads (fences, forces, LACs) on one connection.
    At the limit, the bookie stops reading from the connection."""

    operations_total_max: Annotated[int, Ge(1), Le(1_000_000)] = 2000
    """The same over all connections, without long polls. At the limit, the bookie stops reading from connections that
    send more; beyond twice that, it answers with TOO_MANY_REQUESTS. A connection that has only two in progress is
    served in any case. Each takes about 2 KiB."""

    long_polls_max: Annotated[int, Ge(0), Le(1_000_000)] = 5000
    """Maximum number of waiting long-poll reads, over all connections. At the limit, the one that has waited longest is
    answered early; its client repeats it. Each takes about 1 KiB, and 2 KiB while it is answered. 0: all are answered
    with TOO_MANY_REQUESTS."""

    long_poll_timeout_max_s: Annotated[float, Gt(0), Le(86400)] = 300.0
    """Maximum seconds that a long-poll read waits, whatever timeout it requests. A client repeats a read that is
    answered early."""

    drain_timeout_s: Annotated[float, Ge(0), Le(600)] = 5.0
    """Maximum seconds that a stop waits for adds in progress before it closes the connections."""


class AdminSettings(AdminTokenSettings):
    """Tokens of operators for the HTTP API, instead of those of `auth`. If other machines can connect, changes of the
    whole cluster are refused without them: `/api/v1/autorecovery/...` and the deletion of ledgers."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_ADMIN_")


class PortTlsSettings(HttpTlsSettings):
    """TLS on the HTTP port. The files are followed: new connections use the newest ones."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_HTTP_TLS_")


class PortSettings(AdminHttpSettings):
    """Checks and limits of the HTTP port. They apply to all clients, authenticated or not."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_HTTP_")

    tls: PortTlsSettings = group(PortTlsSettings)
    """TLS on the HTTP port."""


class AuditSettings(AuditLogSettings):
    """The audit log of the HTTP port: one JSON line before each change, one before its answer, and one for each refused
    request (401, 403)."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_AUDIT_LOG_")


class RepairSettings(Settings):
    """Credentials that this bookie presents to other bookies when it reads lost entries from them. Empty: its own
    certificate or secret, because all bookies of a cluster require the same of their clients."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_REPAIR_")

    token_file: str = ""
    """File that contains the token to present."""

    ca_file: str = ""
    """File of CA certificates that signed the other bookies' certificates (PEM). Empty: `tls.ca_file`; if that is empty
    too, repair does not use TLS."""

    certificate_file: str = ""
    """File of the certificate to present (PEM). Empty: the bookie's own certificate, if bookies require one."""

    key_file: str = ""
    """File of the private key of that certificate (PEM, not encrypted)."""

    check_hostname: bool = True
    """Whether the certificate of a bookie must contain the host name that is used to connect to it."""


class ZooKeeperAccess(ZooKeeperAccessSettings):
    """TLS and credentials for ZooKeeper. Files are read again before each connection if they have changed."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_ZOOKEEPER_ACCESS_")


class BookieSettings(Settings):
    """The bookie: stores ledger entries durably and serves them."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_")

    zookeeper: str = "127.0.0.1:2181"
    """ZooKeeper servers: `host:port`, separated by commas. A path after the last one is the chroot, the node that is
    used as the root of ZooKeeper: `a:2181,b:2181/messaging`."""

    ledgers_root: str = "/ledgers"
    """Root znode of the cluster. Source: BookKeeper's zk://host/ledgers."""

    bookie_id: str = ""
    """Permanent id of this bookie; ledger metadata locates entries by it. Empty: `<advertised host>:<port>`. Do not use
    an address that may change while the disks are kept."""

    rack: str = ""
    """Failure domain of this bookie, a rack or a zone, in one or two levels: `/zone-a` or `/region/zone-a`. The bookie
    writes it to `/bookies`, where clients and Pulsar's brokers read it: entries are stored in several racks if
    possible. Empty: the entry there, if there is one, stays as it is."""

    rack_file: str = ""
    """File that contains the rack, instead of `rack`. A missing or empty file: as if no rack were set."""

    host: str = "127.0.0.1"
    """Address to listen on, for both ports. An address other than loopback requires authentication (`auth.provider`) or
    --insecure."""

    advertised_host: str = ""
    """Host name or address under which clients connect to this bookie. Empty: `host`, or the name of this machine if
    `host` is a wildcard."""

    port: Port = 3181
    """Port of the ledger protocol. 0: any free port."""

    http_port: Port = 8000
    """Port of metrics, probes and the admin API. 0: any free port."""

    insecure: bool = False
    """Allow addresses that other machines can reach, although clients are not authenticated. Changes of the whole
    cluster over HTTP are refused there without `admin` tokens."""

    journal_dir: str = ""
    """Directory of the journal, preferably on a separate disk; several are separated by commas. Empty:
    `storage.journal_directory`. The number of shards is the larger of the numbers of journal and ledger directories;
    each shard has one of both. Their number and order are permanent, because the cookie contains them."""

    ledger_dir: str = ""
    """Directory of entry logs and index; several are separated by commas. Empty: `storage.ledger_directory`."""

    memory_size_max: Annotated[int, Ge(memory.SIZE_MIN), Le(1024 * 1024 * MIB)] = 384 * MIB
    """Target for the maximum memory of the process in bytes. Caches and budgets that are not set are derived from it
    (the module `memory` has the formula). Above a budget, connections wait or get TOO_MANY_REQUESTS."""

    zookeeper_session_timeout_s: Annotated[float, Ge(1), Le(300)] = 10.0
    """ZooKeeper session timeout in seconds: a bookie that does not answer for this long counts as down. Source:
    BookKeeper's zkTimeout."""

    zookeeper_connect_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 60.0
    """Maximum seconds that the start waits for ZooKeeper and for an initialized cluster. After that the process ends
    with exit code 1. 0: no limit."""

    maintenance_s: Annotated[float, Ge(0), Le(7 * 86400)] = 600.0
    """Seconds after a planned stop during which the entries of this bookie are not re-replicated.
    `bindery-bookie-prestop` starts this maintenance, and the bookie ends it when it serves again. 0: only the auditor's
    delay applies."""

    disk_usage_max: Annotated[float, Gt(0), Le(1)] = 0.95
    """Used fraction of a disk above which the bookie becomes read-only. Source: BookKeeper's diskUsageThreshold."""

    disk_usage_low: Annotated[float, Gt(0), Le(1)] = 0.90
    """Used fraction below which the bookie becomes writable again. Lower than `disk_usage_max`, so that the state does
    not alternate."""

    disk_usage_warn: Annotated[float, Gt(0), Le(1)] = 0.90
    """Used fraction above which the bookie warns. Source: BookKeeper's diskUsageWarnThreshold."""

    disk_check_interval_s: Annotated[float, Gt(0), Le(3600)] = 10.0
    """Seconds between two checks of the disks. Source: BookKeeper's diskCheckInterval."""

    high_priority_free_size_min: Annotated[int, Ge(0)] = 1024 * MIB
    """Minimum free bytes for a read-only bookie to accept adds of high priority (recovery). Source: BookKeeper's
    minUsableSizeForHighPriorityWrites."""

    autorecovery_embedded: bool = False
    """Run recovery of the cluster inside this bookie: it takes part in the election of the auditor and copies
    under-replicated ledgers. For clusters without auditor processes. Its settings are those of an auditor, in
    environment variables `BOOKIE_RECOVERY_...`. Source: BookKeeper's autoRecoveryDaemonEnabled."""

    log_level: str = "info"
    """Minimum level of log events: debug, info, warning or error."""

    auth: AuthSettings = group(AuthSettings)
    admin: AdminSettings = group(AdminSettings)
    audit_log: AuditSettings = group(AuditSettings)
    tls: TlsSettings = group(TlsSettings)
    zookeeper_access: ZooKeeperAccess = group(ZooKeeperAccess)
    http: PortSettings = group(PortSettings)
    repair: RepairSettings = group(RepairSettings)
    server: ServerSettings = group(ServerSettings)
    storage: StorageSettings = group(StorageSettings)

    @check
    def _derive_memory(self) -> None:
        """Set every budget that was not set to its share of `memory_size_max`."""
        storage = _with_defaults(self.storage, memory.derived("storage", self.memory_size_max))
        storage = _with_defaults(storage, {"reserve_size": 2 * storage.write_cache_size_max + _RESERVE_EXTRA})
        server = _with_defaults(self.server, memory.derived("server", self.memory_size_max))
        vars(self).update(storage=storage, server=server)

    @check
    def _check_rack(self) -> None:
        if self.rack and self.rack_file:
            raise ValueError(f"rack ({self.rack}) and rack_file ({self.rack_file}) are both set: remove one of them")

    @check
    def _check_disk_usage(self) -> None:
        if self.disk_usage_low > self.disk_usage_max:
            raise ValueError(
                f"disk_usage_low ({self.disk_usage_low:g}) must not be above disk_usage_max ({self.disk_usage_max:g}): "
                "the bookie would alternate between read-only and writable"
            )

    @check
    def _check_directories(self) -> None:
        """Reject a directory that is named twice, because two shards in one directory would remove each other's files.

        Symbolic links are resolved.
        """
        for directories in (self.journal_dirs, self.ledger_dirs):
            if len(set(map(os.path.realpath, directories))) != len(directories):
                raise ValueError(f"a directory is named twice: {', '.join(directories)}")

    @property
    def ledger_port_authenticates(self) -> bool:
        """Whether clients of the ledger port must authenticate."""
        return self.auth.provider is not AuthProvider.NONE

    @property
    def http_port_authenticates(self) -> bool:
        """Whether HTTP requests that change something need a token."""
        return self.ledger_port_authenticates or self.admin.is_set

    @property
    def journal_dirs(self) -> tuple[str, ...]:
        """The journal's directories, in order."""
        return _split(self.journal_dir) or (self.storage.journal_directory,)

    @property
    def ledger_dirs(self) -> tuple[str, ...]:
        """The ledgers' directories, in order."""
        return _split(self.ledger_dir) or (self.storage.ledger_directory,)

    def resolved_storages(self) -> list[StorageSettings]:
        """Return the storage settings of each shard.

        With J journal directories and L ledger directories, shard i uses journal directory `i mod J` and ledger
        directory `i mod L`. A directory that only one shard uses has the files in `current`, a shared one in
        `shard-<i>/current`. Budgets are divided among the shards.
        """
        journals, ledgers = self.journal_dirs, self.ledger_dirs
        shards = max(len(journals), len(ledgers))
        shares = memory.divided(self.storage, dict.fromkeys(_SHARED_BY_SHARDS, shards))
        return [
            self.storage.model_copy(
                update={
                    **shares,
                    "journal_directory": _place(journals, shard, shards),
                    "ledger_directory": _place(ledgers, shard, shards),
                }
            )
            for shard in range(shards)
        ]

    def resolved_host(self) -> str:
        """Return the host under which clients and other bookies connect to this bookie."""
        if self.advertised_host:
            return self.advertised_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104

    def resolved_bookie_id(self, *, port: int) -> BookieId:
        """Return the bookie's id. `port`: the bound port.

        Raises BadRequest for an id that is no valid name of a znode in BookKeeper's layout.
        """
        text = self.bookie_id or f"{self.resolved_host()}:{port}"
        try:
            return validate_bookie_id(text)
        except BadRequest as error:
            raise BadRequest(
                f"not a bookie id: {text!r}; set BOOKIE_BOOKIE_ID to letters, digits and any of - . : _, at most "
                f"{BOOKIE_ID_SIZE_MAX} of them"
            ) from error


_SHARED_BY_SHARDS: Final = (
    "write_cache_size_max",
    "reserve_size",
    "waiting_size_max",
    "read_cache_size_max",
    "read_job_size_max",
    "read_queue_entries_max",
    "ledgers_max",
    "tombstones_max",
    "index_block_cache_size",
    "index_write_buffer_size",
    "dead_size_min",
)


def _split(directories: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in directories.split(",")) if part)


def _place(directories: tuple[str, ...], shard: int, shards: int) -> str:
    count = len(directories)
    directory = directories[shard % count]
    is_shared = len(range(shard % count, shards, count)) > 1
    return f"{directory}/shard-{shard}" if is_shared else directory


def _with_defaults(settings: SettingsT, values: dict[str, int]) -> SettingsT:
    """Return `settings` with `values`, limited to their bounds, as the defaults of settings that were not set."""
    kind = type(settings)
    return settings.with_defaults({name: memory.allowed(kind, name, value) for name, value in values.items()})
