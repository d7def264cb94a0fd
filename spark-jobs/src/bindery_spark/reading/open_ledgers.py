"""How far ledgers go that are not closed: what the bookies of their last ensembles tell, all asked side by side.

One READ_LAC request a bookie and ledger gives the explicit LAC and the last entry, whose header holds the LAC that the
writer knew and the ledger's length. Both are believed only if their digests verify. Nothing is fenced.

What some bookies tell is enough as long as no entry can be acknowledged by the silent ones alone. Else nobody can tell
how far the last segment goes, unless somebody told of entries in it: those are looked for on the silent ones, too.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_client.connection.pool import BookiePool
from bindery_core.digest import Digester
from bindery_core.entry import unpack, unpack_lac
from bindery_core.errors import BinderyError, DigestMismatch
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.quorum import is_covered
from bindery_core.wire import v3
from bindery_core.wire.messages import ReadLacRequest, ReadLacResponse, Status

from bindery_spark.reading.fragments import Tail

REQUESTS_MAX: Final = 500
"""To one bookie at once."""
_DENIED: Final = (int(Status.NO_ENTRY), int(Status.NO_LEDGER))
_TOLD: Final = (int(Status.OK), *_DENIED)
"""And IO_ERROR with an explicit LAC: what BookKeeper answers where there is no entry."""


async def ask_tails(
    pool: BookiePool, ledgers: Mapping[LedgerId, LedgerMetadata], *, timeout_s: float
) -> dict[LedgerId, Tail]:
    """A Tail for each of `ledgers`. Bookies that do not answer, or are not registered, tell nothing."""
    asked: defaultdict[BookieId, list[LedgerId]] = defaultdict(list)
    for ledger_id, metadata in ledgers.items():
        for bookie_id in dict.fromkeys(metadata.last_segment.ensemble):
            asked[bookie_id].append(ledger_id)
    answers: defaultdict[LedgerId, dict[BookieId, ReadLacResponse]] = defaultdict(dict)
    for found in await asyncio.gather(*(_ask(pool, b, ids, timeout_s=timeout_s) for b, ids in asked.items())):
        for bookie_id, response in found:
            answers[LedgerId(response.ledger_id)][bookie_id] = response
    return {ledger_id: tail_of(ledger_id, metadata, answers[ledger_id]) for ledger_id, metadata in ledgers.items()}


def tail_of(ledger_id: LedgerId, metadata: LedgerMetadata, answers: Mapping[BookieId, ReadLacResponse]) -> Tail:
    """What the answers of the last ensemble come to. Pure."""
    digester = Digester(metadata.digest_type or DIGEST_TYPE_UNTOLD, metadata.password or b"")
    lac: int | None = None
    length, length_at = 0, -1
    held: dict[BookieId, int] = {}
    for bookie_id, response in answers.items():
        if response.status not in _TOLD and not (response.status == Status.IO_ERROR and response.lac_body):
            continue
        known = -1
        if response.lac_body:
            try:
                known = unpack_lac(digester, response.lac_body, ledger_id=ledger_id)
            except DigestMismatch:
                if not response.last_entry_body:
                    continue
        if response.last_entry_body:
            try:
                entry = unpack(digester, response.last_entry_body, ledger_id=ledger_id, entry_id=None)
            except DigestMismatch:
                continue
            known = max(known, entry.lac)
            held[bookie_id] = entry.entry_id
            if entry.entry_id > length_at:
                length, length_at = entry.length, entry.entry_id
        else:
            held[bookie_id] = -1
        lac = known if lac is None else max(lac, known)
    if lac is not None and lac < metadata.last_segment.first_entry_id and not _is_enough(metadata, held):
        lac = None
    return Tail(lac, length, length_at, held)


def _is_enough(metadata: LedgerMetadata, told: Collection[BookieId]) -> bool:
    """Whether those who `told` would know of every acknowledged entry of the last segment."""
    return is_covered(
        [index for index, member in enumerate(metadata.last_segment.ensemble) if member in told],
        ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum,
    )  # fmt: skip


class _Sink:
    def __init__(self, bookie_id: BookieId, count: int) -> None:
        self._bookie_id = bookie_id
        self._left = count
        self.found: list[tuple[BookieId, ReadLacResponse]] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        self._left -= len(responses)
        self.found += [(bookie_id, each) for each in responses if isinstance(each, ReadLacResponse)]
        if self._left <= 0:
            self._end()

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        self._end()

    expired = failed

    def _end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _ask(
    pool: BookiePool, bookie_id: BookieId, ids: Sequence[LedgerId], *, timeout_s: float
) -> list[tuple[BookieId, ReadLacResponse]]:
    found: list[tuple[BookieId, ReadLacResponse]] = []
    for start in range(0, len(ids), REQUESTS_MAX):
        batch = ids[start : start + REQUESTS_MAX]
        requests = [ReadLacRequest(pool.txn_id(), ledger_id) for ledger_id in batch]
        sink = _Sink(bookie_id, len(requests))
        frames = b"".join(map(v3.encode_request, requests))
        pool.connection(bookie_id).send(frames, [each.txn_id for each in requests], sink, timeout_s=timeout_s)
        await sink.done
        found += sink.found
        if not sink.found:
            break
    return found
