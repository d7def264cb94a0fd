"""Find the last entries of ledgers that are not closed, by concurrent requests to the bookies of the last ensembles.

One READ_LAC request per bookie and ledger returns the explicit LAC and the last entry, whose header holds the LAC that
the writer knew and the ledger's length. Both count only if their digests are valid. Nothing is fenced.

The answers suffice if no entry can have been acknowledged by the other bookies alone. Otherwise the LAC is unknown,
unless a bookie reported one in the last segment: entries up to that LAC are also expected on bookies that did not
answer.
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
"""Maximum number of concurrent requests per bookie."""
_DENIED: Final = (int(Status.NO_ENTRY), int(Status.NO_LEDGER))
_ANSWERED: Final = (int(Status.OK), *_DENIED)
"""Statuses that count as an answer. IO_ERROR with an explicit LAC counts too: BookKeeper sends it if there is no
entry."""


async def read_tails(
    pool: BookiePool, ledgers: Mapping[LedgerId, LedgerMetadata], *, timeout_s: float
) -> dict[LedgerId, Tail]:
    """Return a Tail for each of `ledgers`. Bookies that do not answer, or are not registered, contribute nothing."""
    ids_by_bookie: defaultdict[BookieId, list[LedgerId]] = defaultdict(list)
    for ledger_id, metadata in ledgers.items():
        for bookie_id in dict.fromkeys(metadata.last_segment.ensemble):
            ids_by_bookie[bookie_id].append(ledger_id)
    answers: defaultdict[LedgerId, dict[BookieId, ReadLacResponse]] = defaultdict(dict)
    for found in await asyncio.gather(
        *(_read_lacs(pool, b, ids, timeout_s=timeout_s) for b, ids in ids_by_bookie.items())
    ):
        for bookie_id, response in found:
            answers[LedgerId(response.ledger_id)][bookie_id] = response
    return {ledger_id: tail_of(ledger_id, metadata, answers[ledger_id]) for ledger_id, metadata in ledgers.items()}


def tail_of(ledger_id: LedgerId, metadata: LedgerMetadata, answers: Mapping[BookieId, ReadLacResponse]) -> Tail:
    """Combine the responses of the last ensemble. Pure."""
    digester = Digester(metadata.digest_type or DIGEST_TYPE_UNTOLD, metadata.password or b"")
    lac: int | None = None
    length, length_at = 0, -1
    held: dict[BookieId, int] = {}
    for bookie_id, response in answers.items():
        if response.status not in _ANSWERED and not (response.status == Status.IO_ERROR and response.lac_body):
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


def _is_enough(metadata: LedgerMetadata, answered: Collection[BookieId]) -> bool:
    """Whether every acknowledged entry of the last segment is stored on at least one bookie that `answered`."""
    return is_covered(
        [index for index, member in enumerate(metadata.last_segment.ensemble) if member in answered],
        ensemble_size=metadata.ensemble_size,
        write_quorum=metadata.write_quorum,
        ack_quorum=metadata.ack_quorum,
    )


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


async def _read_lacs(
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
