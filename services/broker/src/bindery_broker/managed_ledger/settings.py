"""Settings of the ledgers of topics and cursors: size, age, retention and memory."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt
from bindery_kit.configuration.settings import Settings, SettingsConfigDict

MIB = 2**20


class ManagedLedgerSettings(Settings):
    """Ledgers of topics and cursors."""

    model_config = SettingsConfigDict(env_prefix="BROKER_LEDGER_")

    ensemble_size: Annotated[int, Ge(1)] = 3
    """Number of bookies that store a ledger."""

    write_quorum: Annotated[int, Ge(1)] = 3
    """Number of copies of each entry. With four bookies, one can be lost permanently and its copies are restored."""

    ack_quorum: Annotated[int, Ge(1)] = 2
    """Number of copies on disk before an entry is acknowledged."""

    entries_max: Annotated[int, Ge(1)] = 50_000
    """Entries after which a topic continues in a new ledger. Source: Pulsar's managedLedgerMaxEntriesPerLedger."""

    size_max: Annotated[int, Ge(1)] = 2048 * MIB
    """Payload bytes after which a topic continues in a new ledger. Source: managedLedgerMaxSizePerLedgerMbytes."""

    age_s_max: Annotated[float, Gt(0)] = 240 * 60
    """Age in seconds after which a topic continues in a new ledger, if the present one holds anything: only closed
    ledgers can be trimmed. Source: managedLedgerMaxLedgerRolloverTimeMinutes."""

    age_s_min: Annotated[float, Ge(0)] = 600
    """Minimum age in seconds at which entries or size end a ledger, so that a fast topic does not flood the metadata.
    0: no minimum. Source: managedLedgerMinLedgerRolloverTimeMinutes."""

    inactive_s_max: Annotated[float, Gt(0)] = 1800
    """Seconds without a new entry after which the ledger of a topic is closed, and seconds without a change after which
    the state of a subscription is moved from its ledger to ZooKeeper. Idle topics then take less memory and need no
    recovery at the next owner; the next entry starts a new ledger. Source: Pulsar's
    managedLedgerInactiveLedgerRolloverTimeSeconds, which is 0, never, by default."""

    pending_size_max: Annotated[int, Ge(1)] = 64 * MIB
    """Maximum payload bytes of unanswered adds of one topic; more are refused with TooManyRequests."""

    add_timeout_s: Annotated[float, Gt(0)] = 30
    """Maximum seconds that an add waits while no ledger can be written. Then adds that are certainly not stored fail
    with TryAgain, the others with AddTimeout."""

    operation_timeout_s: Annotated[float, Gt(0)] = 30
    """Maximum seconds of a single call to bookies or ZooKeeper, except adds."""

    retry_pause_s: Annotated[float, Gt(0)] = 0.1
    """First pause in seconds before a retry to recover or create a ledger or to write metadata; it doubles."""

    retry_pause_s_max: Annotated[float, Gt(0)] = 5
    """Maximum pause in seconds before such a retry."""

    cache_size_max: Annotated[int, Ge(0)] = 64 * MIB
    """Maximum bytes of cached entries over all topics of the broker, with 200 bytes for each. Three quarters keep the
    entries that were written last, for consumers at the end of a topic; consumers that catch up share the rest."""

    read_handles_max: Annotated[int, Ge(1)] = 16
    """Maximum number of closed ledgers that one topic keeps open for reading."""

    retention_acked_s: Annotated[float, Ge(0)] = 0
    """Seconds that a closed ledger is kept once every subscription acknowledged all of it."""

    retention_unsubscribed_s: Annotated[float, Ge(0)] = 7 * 24 * 3600
    """Seconds that a closed ledger is kept if the topic has no subscription."""

    cursor_entries_max: Annotated[int, Ge(1)] = 50_000
    """Records after which a cursor continues in a new cursor ledger. Source: managedLedgerCursorMaxEntriesPerLedger."""

    cursor_age_s_max: Annotated[float, Gt(0)] = 14_400
    """Age in seconds at which a cursor ledger is replaced by a new one: at the next record, or in the next round of
    maintenance."""

    cursor_size_max: Annotated[int, Ge(1)] = 32 * MIB
    """Bytes of records after which a cursor continues in a new cursor ledger, if they are 8 times those of its last
    snapshot."""

    cursor_changes_size_max: Annotated[int, Ge(1)] = MIB
    """Bytes of changes after which the next record of a cursor is a snapshot of its whole state, if they are twice
    those of its last snapshot. A change counts 64 bytes in addition. The loading of a topic reads the changes."""

    cursor_state_size_max: Annotated[int, Ge(1024)] = 256 * MIB
    """Maximum bytes of the stored state of a cursor, about. Acknowledgements that exceed it are refused with
    TooManyRequests. A million acknowledgements with a gap after each take 160 KiB."""

    cursor_inline_size_max: Annotated[int, Ge(256)] = 32_768
    """Maximum bytes of the state of a cursor in its znode: after a clean close, and while no cursor ledger can be
    written. Independently of it, the znode has at most 1000 ranges, as in Pulsar."""
