"""The ledgers that a shard without its storage may have held are found by their metadata."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance.limbo_listing import CHUNK, READS_MAX, LimboListing, names_bookie
from bindery_bookie.storage.corruption.limbo import LimboLedger, LimboPhase, LimboState
from bindery_core.digest import master_key
from bindery_core.errors import BadVersion, Corrupt, MetadataUnavailable, NoSuchLedger, Unauthorized
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.stores.versioned import Versioned

MINE = BookieId("b-0")


def metadata(*ensembles: tuple[str, ...], password: bytes | None = b"pw") -> LedgerMetadata:
    segments = tuple(Segment(EntryId(10 * at), tuple(map(BookieId, one))) for at, one in enumerate(ensembles))
    count = len(ensembles[0])
    return LedgerMetadata(ensemble_size=count, write_quorum=count, ack_quorum=1, segments=segments, password=password)


OURS = metadata(("b-0",))
OTHERS = metadata(("b-1",))


class Repair:
    """The limbo of one shard."""

    def __init__(self, shard: "Shard") -> None:
        self.shard = shard
        self.entered: list[list[LimboLedger]] = []
        self.events: list[str] = []

    async def enter_limbo_ledgers(self, ledgers: Sequence[LimboLedger]) -> None:
        assert self.events == []
        self.entered.append(list(ledgers))

    async def finish_listing(self) -> None:
        assert self.shard.limbo is not None
        self.shard.limbo.phase = LimboPhase.REPAIRING
        self.events.append("finished")

    async def limbo_ledger_ids(self) -> Sequence[int]:
        return [one.ledger_id for part in self.entered for one in part]

    async def end_limbo(self) -> None:
        self.shard.limbo = None
        self.events.append("ended")


class Shard:
    def __init__(self, phase: LimboPhase | None = LimboPhase.LISTING) -> None:
        self.limbo = None if phase is None else LimboState("the disk is empty", 5, phase)
        self.repair = Repair(self)

    @property
    def ids(self) -> list[int]:
        return [one.ledger_id for part in self.repair.entered for one in part]


class Cluster:
    """Ledgers by id: their metadata, or the error of reading it. A read sees what the last `sync` saw."""

    def __init__(self, ledgers: dict[int, LedgerMetadata | Exception]) -> None:
        self.ledgers = ledgers
        self.reads: list[int] = []
        self.synced_at: list[int] = []
        """Number of reads before each `sync`."""
        self.fail_at: set[int] = set()
        """Numbers of the reads that fail once, because the session is lost."""
        self.at_once = self.at_once_max = 0

    async def sync(self) -> None:
        self.synced_at.append(len(self.reads))

    async def list(self) -> AsyncIterator[LedgerId]:
        for ledger_id in sorted(self.ledgers):
            yield LedgerId(ledger_id)

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        self.reads.append(ledger_id)
        number = len(self.reads)
        self.at_once += 1
        self.at_once_max = max(self.at_once_max, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        if number in self.fail_at:
            self.fail_at.discard(number)
            raise MetadataUnavailable("the session is lost")
        found = self.ledgers[ledger_id]
        if isinstance(found, Exception):
            raise found
        return Versioned(found, 0)


async def run(cluster: Cluster, *shards: Shard) -> list[int]:
    """List, and return the progress."""
    progress: list[int] = []
    made: Any = shards
    await LimboListing(made, cluster, MINE, sync=cluster.sync, progress=progress.append).run()
    return progress


def test_a_ledger_names_a_bookie_in_any_of_its_ensembles() -> None:
    assert names_bookie(metadata(("b-1", "b-0")), MINE)
    assert names_bookie(metadata(("b-1",), ("b-0",)), MINE)
    assert not names_bookie(metadata(("b-1",), ("b-01",)), MINE)


async def test_ledgers_that_name_the_bookie_go_into_limbo_with_their_keys() -> None:
    shard = Shard()
    cluster = Cluster({1: OURS, 2: OTHERS, 3: metadata(("b-1",), ("b-0",), password=None)})
    assert await run(cluster, shard) == [3]
    assert shard.repair.entered == [[LimboLedger(1, master_key(b"pw")), LimboLedger(3, b"")]]
    assert shard.repair.events == ["finished"]
    assert shard.limbo is not None
    assert (shard.limbo.left, shard.limbo.listed) == (2, 3)


async def test_a_shard_without_such_ledgers_leaves_limbo() -> None:
    shard = Shard()
    await run(Cluster({1: OTHERS}), shard)
    assert shard.repair.entered == []
    assert shard.repair.events == ["finished", "ended"]


async def test_without_ledgers_the_shard_leaves_limbo() -> None:
    shard = Shard()
    cluster = Cluster({})
    assert await run(cluster, shard) == []
    assert shard.repair.events == ["finished", "ended"]
    assert cluster.synced_at == [0]


async def test_a_deleted_ledger_is_left_out_and_unreadable_metadata_is_not() -> None:
    shard = Shard()
    broken = {1: NoSuchLedger(ledger_id=1), 2: Corrupt("bad"), 3: BadVersion("new")}
    await run(Cluster(dict(broken)), shard)
    assert shard.repair.entered == [[LimboLedger(2, b""), LimboLedger(3, b"")]]


@pytest.mark.parametrize("phase", [None, LimboPhase.REPAIRING])
async def test_nothing_is_read_if_no_shard_needs_it(phase: LimboPhase | None) -> None:
    cluster = Cluster({1: OURS})
    shard = Shard(phase)
    assert await run(cluster, shard) == []
    assert (cluster.reads, cluster.synced_at, shard.repair.events) == ([], [], [])


async def test_only_ledgers_of_shards_that_need_it_are_read() -> None:
    shards = [Shard(None), Shard(), Shard(LimboPhase.REPAIRING), Shard()]
    cluster = Cluster(dict.fromkeys(range(12), OURS))
    assert await run(cluster, *shards) == [6]
    assert sorted(cluster.reads) == [1, 3, 5, 7, 9, 11]
    assert [shard.ids for shard in shards] == [[], [1, 5, 9], [], [3, 7, 11]]
    assert [shard.limbo and (shard.limbo.listed, shard.limbo.left) for shard in shards] == [
        None,
        (3, 3),
        (0, 0),
        (3, 3),
    ]


async def test_metadata_is_read_in_batches_after_a_sync() -> None:
    cluster = Cluster(dict.fromkeys(range(2 * READS_MAX + 1), OTHERS))
    assert await run(cluster, Shard()) == [64, 128, 129]
    assert cluster.at_once_max == 64
    assert cluster.synced_at == [0, 0, 64, 128], "at the beginning, and before each batch"


async def test_a_full_last_batch_is_followed_by_no_empty_one() -> None:
    cluster = Cluster(dict.fromkeys(range(READS_MAX), OTHERS))
    assert await run(cluster, Shard()) == [64]
    assert cluster.synced_at == [0, 0]


async def test_an_interrupted_listing_continues_after_the_last_complete_batch() -> None:
    shard = Shard()
    cluster = Cluster(dict.fromkeys(range(2 * READS_MAX), OURS))
    cluster.fail_at = {70}
    began = asyncio.get_running_loop().time()
    assert await run(cluster, shard) == [64, 128]
    assert len(cluster.reads) == 3 * READS_MAX
    assert sorted(set(shard.ids)) == list(range(128))
    assert cluster.synced_at == [0, 0, 64, 128, 128], "a new session may be with a server that lags"
    assert asyncio.get_running_loop().time() - began >= 1.0
    assert shard.limbo is not None
    assert shard.limbo.listed == 128


async def test_an_unexpected_error_ends_the_listing() -> None:
    shard = Shard()
    with pytest.raises(Unauthorized):
        await run(Cluster({1: Unauthorized("no")}), shard)
    assert shard.repair.events == []


async def test_ledgers_are_stored_in_chunks() -> None:
    shard, other = Shard(), Shard()
    cluster = Cluster(dict.fromkeys(range(0, 2 * CHUNK + 200, 2), OURS))
    cluster.ledgers[1] = OURS
    await run(cluster, shard, other)
    sizes = [len(part) for part in shard.repair.entered]
    assert sum(sizes) == 2100
    assert sizes[0] == 2047, "the first batch that reaches the chunk"
    assert len(sizes) == 2
    assert other.ids == [1]


async def test_a_chunk_is_stored_as_soon_as_it_is_full() -> None:
    shard = Shard()
    others = dict.fromkeys(range(CHUNK, 32 * READS_MAX), OTHERS)
    cluster = Cluster({**dict.fromkeys(range(CHUNK), OURS), **others, 3000: OURS, 3001: OURS})
    await run(cluster, shard)
    assert [len(part) for part in shard.repair.entered] == [2000, 2]
