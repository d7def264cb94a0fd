"""The numbers a user of the ledger client may turn. Components (store, clock, randomness) are handed in beside them."""

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How patient, how greedy and how suspicious a ledger client is. Times in seconds, sizes in bytes."""

    wire_version: int = 3
    """Protocol for adds and plain reads: 3, or 2, which costs less to code. All else goes in 3, on a connection beside.

    Source: BookKeeper's useV2WireProtocol."""

    batch_reads: bool = True
    """In wire version 2: read consecutive entries in one request. Bookies that cannot are found out, and asked singly.

    Source: BookKeeper's batchReadEnabled."""

    bookie_info_interval_s: float = 0.0
    """How often bookies are asked for their free space, by which new ledgers are then spread; 0: never.

    Source: BookKeeper's getBookieInfoIntervalSeconds, a day; off there too unless diskWeightBasedPlacementEnabled."""

    connect_timeout_s: float = 5.0
    """Longest a connect to a bookie may take, with TLS handshake and authentication.

    Source: BookKeeper's clientConnectTimeoutMillis is 10 000."""

    reconnect_pause_s: float = 0.2
    """Pause after a failed connect, in which requests to that bookie fail at once; doubles with every failure."""

    reconnect_pause_s_max: float = 5.0
    """Where the doubling ends: a bookie that came back is found again within this time."""

    add_timeout_s: float = 5.0
    """A bookie that has not answered an add by then counts as failed. Source: BookKeeper's addEntryTimeoutSec."""

    add_quorum_timeout_s: float = 30.0
    """An add without its ack quorum by then fails with AddTimeout and breaks the handle: its outcome is unknown.

    Longer than `add_timeout_s`, so that failed bookies are replaced first."""

    read_timeout_s: float = 5.0
    """A bookie that has not answered a read by then is passed over. Source: BookKeeper's readEntryTimeoutSec."""

    speculative_read_s: float = 2.0
    """With no answer by then the next replica is asked too; 0: never. Source: BookKeeper's speculativeReadTimeout."""

    fence_timeout_s: float = 1.0
    """How long `delete` waits for fences. Best effort: dead bookies must not block retention."""

    recovery_timeout_s: float = 60.0
    """Longest a whole recovery may take before it fails with TryAgain and leaves the ledger IN_RECOVERY."""

    replacement_retry_s: float = 5.0
    """While a ledger goes on without a failed bookie, how often a spare is looked for.

    Also how long, at first, a bookie that failed in a ledger once more is not taken for it again."""

    recovery_batch_entries: int = 32
    """Entries that recovery reads ahead. Source: BookKeeper's recoveryReadBatchSize is 1, a round trip per entry."""

    metadata_timeout_s: float = 15.0
    """Longest a metadata change may be retried while ZooKeeper cannot be asked, before MetadataUnavailable."""

    in_flight_entries_max: int = 2000
    """Entries of one ledger that may wait for confirmation; then `add_many` waits."""

    in_flight_bytes_max: int = 32 * MIB
    """Payload bytes of one ledger that may wait for confirmation. One larger `add_many` is let through alone."""

    client_bytes_max: int = 64 * MIB
    """Payload bytes of all ledgers of a client that may wait for confirmation; then every `add_many` waits."""

    connection_bytes_max: int = 128 * MIB
    """Bytes of requests to one bookie that may be unsent or unanswered; then the bookie counts as failed.

    Above `client_bytes_max`, so that only a bookie that lags behind its peers can get there."""

    frame_size_max: int = 5 * MIB
    """Longest frame either way, its length word included. Source: BookKeeper's nettyMaxFrameSizeBytes."""

    read_batch_entries_max: int = 500
    """Entries asked for at once in one `read`; a longer range is read in steps."""

    read_batch_bytes_max: int = 16 * MIB
    """Bytes that one step of a `read` aims not to exceed, by the size of the entries that came before."""

    explicit_lac_idle_s: float = 0.05
    """After this long without an add, tell the bookies of the last confirmed entry, so that tailing readers see it.

    Source: BookKeeper's explicitLacInterval, off there; a tailing reader then lags one entry behind for ever."""

    long_poll_s: float = 10.0
    """How long a bookie is asked to hold a long poll. Below common idle limits of middle boxes."""

    lac_refresh_s: float = 0.2
    """Pause before a long poll that failed is sent again; bookies deny a ledger until its first entry came to them."""

    quarantine_s: float = 30.0
    """How long a bookie that failed is avoided when others will do. Source: BookKeeper has 1800 s, off by default."""

    revisit_timeout_s: float = 1.0
    """When there are too few bookies, how long those that could not be reached are tried once more."""

    timer_tick_s: float = 0.05
    """Granularity of request deadlines: one timer for all requests of a connection instead of one each."""

    def __post_init__(self) -> None:
        assert self.wire_version in (2, 3)
        assert self.bookie_info_interval_s >= 0
        assert 0 < self.reconnect_pause_s <= self.reconnect_pause_s_max
        assert 0 < self.add_timeout_s <= self.add_quorum_timeout_s, "a failed bookie must be noticed first"
        assert self.speculative_read_s >= 0
        assert self.in_flight_entries_max >= 1
        assert self.in_flight_bytes_max <= self.client_bytes_max < self.connection_bytes_max
        assert self.recovery_batch_entries >= 1
        assert self.read_batch_entries_max >= 1
        assert 0 < self.timer_tick_s < min(self.add_timeout_s, self.read_timeout_s)
