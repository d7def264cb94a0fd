"""BookieSettings: what an operator may turn, by flag (`--port`), environment (`BOOKIE_PORT`) or default."""

import socket
from typing import Annotated, Final

from annotated_types import Ge, Gt, Le
from bindery_core.ids import BookieId, validate_bookie_id
from bindery_core.wire.framing import FRAME_SIZE_MAX
from bindery_kit.settings import Settings
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from bindery_bookie.security import AuthSettings, TlsSettings
from bindery_bookie.storage.settings import StorageSettings

KIB: Final = 1024
MIB: Final = 1024 * KIB

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

    unsent_size_max: Annotated[int, Ge(4 * KIB), Le(1024 * MIB)] = 1 * MIB
    """Bytes unsent on one connection before nothing more is read from it. A client that does not read its answers
    stops only itself."""

    operations_max: Annotated[int, Ge(1), Le(100_000)] = 1000
    """Operations other than adds and plain reads (fences, forces, LACs) under way on one connection; it waits then."""

    long_polls_max: Annotated[int, Ge(0), Le(1_000_000)] = 10_000
    """Long-poll reads parked at a time, over all connections; beyond: TOO_MANY_REQUESTS. About 4 KiB each."""

    long_poll_timeout_max_s: Annotated[float, Gt(0), Le(86400)] = 300.0
    """Longest a read is parked whatever it asks for. Seconds. Answering early is legal: the client asks again."""

    drain_timeout_s: Annotated[float, Ge(0), Le(600)] = 5.0
    """At the end: how long adds under way may take to be answered before connections are cut. Seconds."""


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
    """Directory of the journal, best on a disk of its own. Empty: `storage.journal_directory`."""

    ledger_dir: str = ""
    """Directory of entry logs and index. Empty: `storage.ledger_directory`."""

    zookeeper_session_timeout_s: Annotated[float, Ge(1), Le(300)] = 10.0
    """A bookie that is silent for so long is taken for dead. Seconds. Source: BookKeeper's zkTimeout."""

    zookeeper_connect_timeout_s: Annotated[float, Gt(0), Le(3600)] = 60.0
    """How long the start waits for ZooKeeper before it gives up. Seconds."""

    disk_usage_max: Annotated[float, Gt(0), Le(1)] = 0.95
    """Part of the ledger disk in use above which the bookie turns read-only. Source: BookKeeper, diskUsageThreshold."""

    disk_usage_low: Annotated[float, Gt(0), Le(1)] = 0.90
    """Part in use below which it turns writable again. Lower than `disk_usage_max`, so that it does not flap."""

    disk_check_interval_s: Annotated[float, Gt(0), Le(3600)] = 10.0
    """Seconds between two looks at the disk. Source: BookKeeper's diskCheckInterval."""

    high_priority_free_size_min: Annotated[int, Ge(0)] = 1024 * MIB
    """Bytes that must be free for a read-only bookie to go on taking adds of high priority (recovery). Source:
    BookKeeper's minUsableSizeForHighPriorityWrites."""

    log_level: str = "info"
    """debug, info, warning or error."""

    auth: AuthSettings = Field(default_factory=AuthSettings)
    tls: TlsSettings = Field(default_factory=TlsSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    storage: StorageSettings = Field(default_factory=StorageSettings)

    def resolved_storage(self) -> StorageSettings:
        """The storage settings with `journal_dir` and `ledger_dir` put in."""
        changes = {"journal_directory": self.journal_dir, "ledger_directory": self.ledger_dir}
        return self.storage.model_copy(update={name: value for name, value in changes.items() if value})

    def resolved_host(self) -> str:
        """What others reach us by."""
        if self.advertised_host:
            return self.advertised_host
        return socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104

    def resolved_bookie_id(self, *, port: int) -> BookieId:
        """`port`: the one bound. Raises BadRequest for an id that cannot be a znode of BookKeeper's."""
        return validate_bookie_id(self.bookie_id or f"{self.resolved_host()}:{port}")
