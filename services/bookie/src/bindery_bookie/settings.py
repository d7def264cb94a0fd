"""BookieSettings: what an operator may turn, by flag (`--port`), environment (`BOOKIE_PORT`) or default."""

import os
import socket
from typing import Annotated, Final, TypeVar

from bindery_core.errors import BadRequest
from bindery_core.ids import BOOKIE_ID_SIZE_MAX, BookieId, validate_bookie_id
from bindery_core.wire.framing import FRAME_SIZE_MAX
from bindery_kit.configuration.bounds import Ge, Gt, Le
from bindery_kit.configuration.settings import Settings, SettingsConfigDict, check, group

from bindery_bookie import memory
from bindery_bookie.access.security import AuthSettings, TlsSettings
from bindery_bookie.storage.settings import StorageSettings

KIB: Final = 1024
MIB: Final = 1024 * KIB

_RESERVE_EXTRA: Final = 16 * MIB
"""Bytes of the reserve beyond the write caches: entry-log headers, the index, LastLogMark."""

SettingsT = TypeVar("SettingsT", bound=Settings)

Port = Annotated[int, Ge(0), Le(65535)]


class ServerSettings(Settings):
    """What the ledger port admits. Memory for clients is bounded by `adds_size_max` + `reads_size_max` + one
    unfinished frame a connection."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_SERVER_")

    frame_size_max: Annotated[int, Ge(4 * KIB), Le(64 * MIB)] = FRAME_SIZE_MAX
    """Largest frame, its length field included. Bytes. A larger one ends its connection. All bookies and clients of a
    cluster need the same. Source: BookKeeper's nettyMaxFrameSizeBytes."""

    connections_max: Annotated[int, Ge(1), Le(100_000)] = 2000
    """More connections are closed at once. A client holds one a bookie."""

    adds_size_max: Annotated[int, Ge(64 * KIB), Le(64 * 1024 * MIB)] = 64 * MIB
    """Bytes of adds that may wait for their journal. Beyond, nothing more is read from the connections that send adds
    until half of it is answered: TCP passes the pressure on."""

    reads_size_max: Annotated[int, Ge(64 * KIB), Le(64 * 1024 * MIB)] = 64 * MIB
    """Bytes of answers to reads that may be under way or unsent, over all connections. Beyond, reads wait."""

    pending_reads_max: Annotated[int, Ge(1), Le(10_000_000)] = 200_000
    """Reads of all connections that may wait for room; beyond: TOO_MANY_REQUESTS. About 200 bytes each."""

    batch_read_size_max: Annotated[int, Ge(0), Le(64 * MIB)] = 5 * MIB
    """Bytes of one answer to a batch read, but for its first entry. Source: BookKeeper's maxBatchReadSize."""

    unsent_size_max: Annotated[int, Ge(4 * KIB), Le(1024 * MIB)] = 128 * KIB
    """Bytes unsent on one connection before nothing more is read from it. A client that does not read its answers
    stops only itself. Below it unsent answers are in no budget, so many connections multiply it."""

    unsent_time_max_s: Annotated[float, Gt(0), Le(86400)] = 30.0
    """A client that takes less than half of `unsent_size_max` of its answers in this time is cut off, if others wait
    for the bytes of `reads_size_max` that it holds. Seconds; it is noticed after twice as many at the latest. Taken is
    what left the process: the system's buffers let a slow client take nothing for a while, then a MiB or more at once.
    Compare BookKeeper's waitTimeoutOnResponseBackpressureMs, which drops the answers of such a client."""

    operations_max: Annotated[int, Ge(1), Le(100_000)] = 1000
    """Operations other than adds and plain reads (fences, forces, LACs) under way on one connection; it waits then."""

    long_polls_max: Annotated[int, Ge(0), Le(1_000_000)] = 10_000
    """Long-poll reads parked at a time, over all connections; beyond: TOO_MANY_REQUESTS. About 4 KiB each."""

    long_poll_timeout_max_s: Annotated[float, Gt(0), Le(86400)] = 300.0
    """Longest a read is parked whatever it asks for. Seconds. Answering early is legal: the client asks again."""

    drain_timeout_s: Annotated[float, Ge(0), Le(600)] = 5.0
    """At the end: how long adds under way may take to be answered before connections are cut. Seconds."""


class RepairSettings(Settings):
    """How this bookie gets past the others when it fetches from them what it lost. Empty: as they ask of clients by the
    settings that all bookies share, with its own certificate or secret."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_REPAIR_")

    token_file: str = ""
    """File that holds the token to show."""

    ca_file: str = ""
    """Certificates of the authority that signed the other bookies' (PEM). Empty: `tls.ca_file`; with neither, repair
    does not use TLS."""

    certificate_file: str = ""
    """The certificate to show (PEM). Empty: the bookie's own where a certificate is asked for."""

    key_file: str = ""
    """The key of that certificate (PEM, not encrypted)."""

    check_hostname: bool = True
    """Whether a bookie's certificate must name the host that it is reached by."""


class BookieSettings(Settings):
    """The bookie: stores ledger entries durably and serves them."""

    model_config = SettingsConfigDict(env_prefix="BOOKIE_")

    zookeeper: str = "127.0.0.1:2181"
    """ZooKeeper servers, `host:port` joined by commas."""

    ledgers_root: str = "/ledgers"
    """The cluster's root znode. Source: BookKeeper's zk://host/ledgers."""

    bookie_id: str = ""
    """Who this bookie is, for good: entries are found by it. Empty: `<advertised host>:<port>`. Never an address that
    may change while the disks live on."""

    host: str = "127.0.0.1"
    """Address to listen on, for both ports. Anything but loopback needs --insecure: nobody is asked for a password."""

    advertised_host: str = ""
    """Name or address that clients reach this bookie by. Empty: `host`, or this machine's name for a wildcard."""

    port: Port = 3181
    """Port of the ledger protocol. 0: a free one."""

    http_port: Port = 8000
    """Port of metrics, probes and the admin API. 0: a free one."""

    insecure: bool = False
    """Listen where other machines can connect, without authentication."""

    journal_dir: str = ""
    """Directory of the journal, best on a disk of its own; several joined by commas. Empty:
    `storage.journal_directory`. A bookie has max(journal, ledger directories) shards, each with a journal and a ledger
    directory; their number and order are for good, as the cookie says."""

    ledger_dir: str = ""
    """Directory of entry logs and index; several joined by commas. Empty: `storage.ledger_directory`."""

    memory_size_max: Annotated[int, Ge(memory.SIZE_MIN), Le(1024 * 1024 * MIB)] = 384 * MIB
    """Bytes of memory that the process is to take at most. Caches and budgets that are not set follow from it (module
    `memory` has the formula); over a budget, connections wait or are told TOO_MANY_REQUESTS."""

    zookeeper_session_timeout_s: Annotated[float, Ge(1), Le(300)] = 10.0
    """A bookie that is silent for so long is taken for dead. Seconds. Source: BookKeeper's zkTimeout."""

    zookeeper_connect_timeout_s: Annotated[float, Ge(0), Le(86_400)] = 60.0
    """How long the start waits for ZooKeeper, and for a cluster in it, before the process gives up with exit code 1.
    Seconds; 0: for ever."""

    maintenance_s: Annotated[float, Ge(0), Le(7 * 86400)] = 600.0
    """How long this bookie may be away after an orderly stop before others copy what it holds: `bindery-bookie-prestop`
    says so to the cluster, and the bookie ends it once it serves again. Seconds; 0: the auditor's delay alone."""

    disk_usage_max: Annotated[float, Gt(0), Le(1)] = 0.95
    """Part of the ledger disk in use above which the bookie turns read-only. Source: BookKeeper, diskUsageThreshold."""

    disk_usage_low: Annotated[float, Gt(0), Le(1)] = 0.90
    """Part in use below which it turns writable again. Lower than `disk_usage_max`, so that it does not flap."""

    disk_usage_warn: Annotated[float, Gt(0), Le(1)] = 0.90
    """Part in use above which a warning is shown. Source: BookKeeper's diskUsageWarnThreshold."""

    disk_check_interval_s: Annotated[float, Gt(0), Le(3600)] = 10.0
    """Seconds between two looks at the disk. Source: BookKeeper's diskCheckInterval."""

    high_priority_free_size_min: Annotated[int, Ge(0)] = 1024 * MIB
    """Bytes that must be free for a read-only bookie to go on taking adds of high priority (recovery). Source:
    BookKeeper's minUsableSizeForHighPriorityWrites."""

    autorecovery_embedded: bool = False
    """Heal the cluster from inside this bookie: it stands for auditor, and copies what lacks copies. For clusters
    without auditor processes. Settings: `BOOKIE_RECOVERY_...` in the environment, called as an auditor's. Source:
    BookKeeper's autoRecoveryDaemonEnabled."""

    log_level: str = "info"
    """debug, info, warning or error."""

    auth: AuthSettings = group(AuthSettings)
    tls: TlsSettings = group(TlsSettings)
    repair: RepairSettings = group(RepairSettings)
    server: ServerSettings = group(ServerSettings)
    storage: StorageSettings = group(StorageSettings)

    @check
    def _derive_memory(self) -> None:
        """Give every budget that was not set its share of `memory_size_max`."""
        storage = _with_defaults(self.storage, memory.derived("storage", self.memory_size_max))
        storage = _with_defaults(storage, {"reserve_size": 2 * storage.write_cache_size_max + _RESERVE_EXTRA})
        server = _with_defaults(self.server, memory.derived("server", self.memory_size_max))
        vars(self).update(storage=storage, server=server)

    @check
    def _check_disk_usage(self) -> None:
        if self.disk_usage_low > self.disk_usage_max:
            raise ValueError(
                f"disk_usage_low ({self.disk_usage_low:g}) must not be above disk_usage_max ({self.disk_usage_max:g}): "
                "at the limit the bookie would turn read-only and back all the time"
            )

    @check
    def _check_directories(self) -> None:
        """Two shards in one place would remove each other's files: what counts is where a name leads."""
        for directories in (self.journal_dirs, self.ledger_dirs):
            if len(set(map(os.path.realpath, directories))) != len(directories):
                raise ValueError(f"a directory is named twice: {', '.join(directories)}")

    @property
    def journal_dirs(self) -> tuple[str, ...]:
        """The journal's directories, in order."""
        return _split(self.journal_dir) or (self.storage.journal_directory,)

    @property
    def ledger_dirs(self) -> tuple[str, ...]:
        """The ledgers' directories, in order."""
        return _split(self.ledger_dir) or (self.storage.ledger_directory,)

    def resolved_storages(self) -> list[StorageSettings]:
        """The storage settings of each shard: shard i uses journal directory `i mod J` and ledger directory `i mod L`.

        A directory of one shard holds its files in `current`, one of several in `shard-<i>/current`. Budgets are
        divided among the shards.
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
        """What others reach us by."""
        if self.advertised_host:
            return self.advertised_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104

    def resolved_bookie_id(self, *, port: int) -> BookieId:
        """`port`: the one bound. Raises BadRequest for an id that cannot be a znode of BookKeeper's."""
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
)


def _split(directories: str) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in directories.split(",")) if part)


def _place(directories: tuple[str, ...], shard: int, shards: int) -> str:
    count = len(directories)
    directory = directories[shard % count]
    is_shared = len(range(shard % count, shards, count)) > 1
    return f"{directory}/shard-{shard}" if is_shared else directory


def _with_defaults(settings: SettingsT, values: dict[str, int]) -> SettingsT:
    """`settings` with `values` where nothing was set, within their bounds; they still count as defaults."""
    kind = type(settings)
    return settings.with_defaults({name: memory.allowed(kind, name, value) for name, value in values.items()})
