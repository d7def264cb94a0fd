"""How topics are cut into ledgers, how long they are kept, what they may hold in memory."""

from typing import Annotated

from bindery_kit.configuration.bounds import Ge, Gt
from bindery_kit.configuration.settings import Settings, SettingsConfigDict

MIB = 2**20


class ManagedLedgerSettings(Settings):
    """Ledgers of topics and cursors."""

    model_config = SettingsConfigDict(env_prefix="BROKER_LEDGER_")

    ensemble_size: Annotated[int, Ge(1)] = 3
    """Bookies that a ledger is spread over."""

    write_quorum: Annotated[int, Ge(1)] = 3
    """Copies of each entry. With four bookies one may be lost for good and healed."""

    ack_quorum: Annotated[int, Ge(1)] = 2
    """Copies on disk before an entry is acknowledged."""

    entries_max: Annotated[int, Ge(1)] = 50_000
    """Entries after which a topic goes on in a new ledger. Source: Pulsar's managedLedgerMaxEntriesPerLedger."""

    size_max: Annotated[int, Ge(1)] = 2048 * MIB
    """Payload bytes after which a topic goes on in a new ledger. Source: managedLedgerMaxSizePerLedgerMbytes."""

    age_s_max: Annotated[float, Gt(0)] = 240 * 60
    """Age in seconds after which a topic goes on in a new ledger, if this one holds anything: what is closed can be
    trimmed. Source: managedLedgerMaxLedgerRolloverTimeMinutes."""

    age_s_min: Annotated[float, Ge(0)] = 600
    """Seconds that a ledger lives before entries or size may end it, so that a fast topic does not flood the metadata.
    0: no minimum. Source: managedLedgerMinLedgerRolloverTimeMinutes."""

    pending_size_max: Annotated[int, Ge(1)] = 64 * MIB
    """Payload bytes that one topic holds unacknowledged; more is refused with TooManyRequests."""

    add_timeout_s: Annotated[float, Gt(0)] = 30
    """Longest an add waits while no ledger can be written. What was certainly not stored then fails with TryAgain,
    the rest with AddTimeout."""

    operation_timeout_s: Annotated[float, Gt(0)] = 30
    """Longest a single call to bookies or ZooKeeper may take, an add apart."""

    retry_pause_s: Annotated[float, Gt(0)] = 0.1
    """First pause before trying again to recover or create a ledger or to write metadata; doubles."""

    retry_pause_s_max: Annotated[float, Gt(0)] = 5

    cache_size_max: Annotated[int, Ge(0)] = 64 * MIB
    """Payload bytes of recent entries kept for readers that follow the end, all topics of the broker together."""

    read_handles_max: Annotated[int, Ge(1)] = 16
    """Closed ledgers that one topic keeps open for reading."""

    retention_acked_s: Annotated[float, Ge(0)] = 0
    """Seconds a closed ledger is kept once every subscription acknowledged all of it."""

    retention_unsubscribed_s: Annotated[float, Ge(0)] = 7 * 24 * 3600
    """Seconds a closed ledger is kept where there is no subscription at all."""

    cursor_entries_max: Annotated[int, Ge(1)] = 50_000
    """Records after which a cursor goes on in a new cursor ledger. Source: managedLedgerCursorMaxEntriesPerLedger."""

    cursor_age_s_max: Annotated[float, Gt(0)] = 14_400
    """Age in seconds of a cursor ledger at which the next record goes into a new one."""

    cursor_record_size_max: Annotated[int, Ge(1024)] = 4 * MIB
    """Bytes of a cursor's state when stored. More (a million scattered holes) is refused with TooManyRequests rather
    than forgotten."""

    cursor_inline_size_max: Annotated[int, Ge(256)] = 32_768
    """Bytes of cursor state that may stand in its znode: after a clean close and while no cursor ledger can be
    written. Source: Pulsar limits it to 1000 ranges."""
