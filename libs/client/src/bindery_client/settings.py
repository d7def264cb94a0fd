"""Settings of the ledger client. Components (store, clock, random source) are passed in separately."""

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """Timeouts, limits and retry intervals of a ledger client. Times are in seconds, sizes in bytes."""

    wire_version: int = 3
    """Version of the wire protocol of adds and reads: 3, or 2, which is cheaper to encode.

    Recovery adds, fencing reads and all other requests use version 3, on a second connection. Source: BookKeeper's
    useV2WireProtocol."""

    batch_reads: bool = True
    """Whether consecutive entries are read in one request, in wire version 2.

    A bookie that does not support such requests is detected and then read entry by entry. Source: BookKeeper's
    batchReadEnabled."""

    bookie_info_interval_s: float = 0.0
    """Interval at which the free disk space of bookies is polled; new ledgers prefer bookies with more of it. 0: never.

    Source: BookKeeper's getBookieInfoIntervalSeconds, a day; off there too unless diskWeightBasedPlacementEnabled."""

    connect_timeout_s: float = 5.0
    """Timeout for connecting to a bookie, including the TLS handshake and authentication.

    Source: BookKeeper's clientConnectTimeoutMillis is 10 000."""

    reconnect_pause_s: float = 0.2
    """Delay after the first failed attempt to connect; requests to that bookie fail at once meanwhile.

    Doubles each time."""

    reconnect_pause_s_max: float = 5.0
    """Maximum delay between attempts to connect: a bookie that returns is in use again within this time."""

    min_racks_per_write_quorum: int = 2
    """Minimum number of racks of each write quorum, as far as it has that many bookies. Placement prefers more anyway.

    Source: BookKeeper's minNumRacksPerWriteQuorum."""

    enforce_min_racks_per_write_quorum: bool = False
    """Whether ledgers are not created, and failed bookies not replaced, if write quorums would be on fewer racks.

    Source: BookKeeper's enforceMinNumRacksPerWriteQuorum."""

    add_timeout_s: float = 5.0
    """Time after which a bookie that has not answered an add counts as failed.

    Source: BookKeeper's addEntryTimeoutSec."""

    add_quorum_timeout_s: float = 30.0
    """Time after which an add without its ack quorum fails with AddTimeout.

    Its outcome is unknown and the handle is broken.

    Longer than `add_timeout_s`, so that failed bookies are replaced first."""

    read_timeout_s: float = 5.0
    """Time after which a bookie that has not answered a read counts as failed for it.

    Source: BookKeeper's readEntryTimeoutSec."""

    speculative_read_s: float = 2.0
    """Time without a response after which the next replica is read as well; 0: never.

    Source: BookKeeper's speculativeReadTimeout."""

    fence_timeout_s: float = 1.0
    """Maximum time that `delete` waits for bookies to fence the ledger.

    Best effort: dead bookies must not block retention."""

    recovery_timeout_s: float = 60.0
    """Time after which a recovery fails with TryAgain; the ledger then remains IN_RECOVERY."""

    replacement_retry_s: float = 5.0
    """Interval at which a replacement is searched for while a ledger continues without a failed bookie.

    Also the first delay before a bookie that failed in a ledger twice may be chosen for it again."""

    recovery_batch_entries: int = 32
    """Maximum number of entries that recovery reads ahead.

    Source: BookKeeper's recoveryReadBatchSize is 1, that is, one round trip per entry."""

    metadata_timeout_s: float = 15.0
    """Time for which a metadata change is retried while ZooKeeper is unreachable.

    Then it raises MetadataUnavailable."""

    in_flight_entries_max: int = 2000
    """Maximum number of unconfirmed entries of one ledger; at the limit `add_many` waits."""

    in_flight_bytes_max: int = 32 * MIB
    """Maximum payload bytes of unconfirmed entries of one ledger. A single larger `add_many` is allowed alone."""

    client_bytes_max: int = 64 * MIB
    """Maximum payload bytes of unconfirmed entries of all ledgers of a client; at the limit every `add_many` waits."""

    connection_bytes_max: int = 128 * MIB
    """Maximum bytes of unsent or unanswered requests to one bookie; beyond it the bookie counts as failed.

    Greater than `client_bytes_max`, so that only a bookie that is slower than its peers can reach it."""

    frame_size_max: int = 5 * MIB
    """Maximum size of a frame in either direction, including its length field.

    Source: BookKeeper's nettyMaxFrameSizeBytes."""

    read_batch_entries_max: int = 500
    """Maximum number of entries that one step of a `read` requests; a longer range is read in several steps."""

    read_batch_bytes_max: int = 16 * MIB
    """Target for the bytes of one step of a `read`, estimated from the sizes of the entries read before."""

    explicit_lac_idle_s: float = 0.05
    """Time without an add after which bookies are sent the last confirmed entry id, so that tailing readers see it.

    Source: BookKeeper's explicitLacInterval, off there; a tailing reader then stays one entry behind."""

    long_poll_s: float = 10.0
    """Time that a bookie may hold a long poll. Below the usual idle timeouts of proxies and firewalls."""

    lac_refresh_s: float = 0.2
    """Delay before a failed long poll is repeated.

    A bookie refuses long polls until it stores the ledger's first entry."""

    quarantine_s: float = 30.0
    """Time for which a failed bookie is avoided if others are available.

    Source: BookKeeper's is 1800 s, off by default."""

    revisit_timeout_s: float = 1.0
    """Timeout for connecting to unreachable bookies once more when too few others are available."""

    timer_tick_s: float = 0.05
    """Granularity of request timeouts: each connection has one timer for all its requests."""

    def __post_init__(self) -> None:
        assert self.wire_version in (2, 3)
        assert self.bookie_info_interval_s >= 0
        assert self.min_racks_per_write_quorum >= 1
        assert 0 < self.reconnect_pause_s <= self.reconnect_pause_s_max
        assert 0 < self.add_timeout_s <= self.add_quorum_timeout_s, "a bookie must count as failed before the add does"
        assert self.speculative_read_s >= 0
        assert self.in_flight_entries_max >= 1
        assert self.in_flight_bytes_max <= self.client_bytes_max < self.connection_bytes_max
        assert self.recovery_batch_entries >= 1
        assert self.read_batch_entries_max >= 1
        assert 0 < self.timer_tick_s < min(self.add_timeout_s, self.read_timeout_s)
