"""Find orphaned data of a bookie: entries of deleted ledgers, or of ledgers whose metadata names other bookies.

The bookie lists its ledgers and entries before the metadata is read. A ledger's metadata is created before its first
entry, so if a listed ledger has no metadata, the ledger was deleted. Entries are listed, not read, so these rows have
no digests. Entries beyond the LAC of a ledger that is not closed are legal and not reported here.

| row                | meaning                                                                      |
|--------------------|------------------------------------------------------------------------------|
| segment NO_SEGMENT | an entry of a ledger without metadata, or whose metadata names other bookies |
| another segment    | an entry beyond a closed ledger's end                                        |
| entry_id -1, error | the bookie could not list the ledger's entries, or (NO_LEDGER) its ledgers   |
"""

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterable, Sequence
from http.client import HTTPException
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from bindery_client.connection.pool import BookiePool
from bindery_client.ledger.bookie_requests import EntryList
from bindery_client.ledger.requests import LedgerRequests
from bindery_core.digest import Digester
from bindery_core.errors import BadRequest, BinderyError, Corrupt, NoSuchLedger
from bindery_core.formats.bookie_service_info import HTTP, HTTPS
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState
from bindery_core.ids import ID_MAX, BookieId, LedgerId
from bindery_identity.tls import client_tls

from bindery_spark.reading.fragments import is_expected
from bindery_spark.reading.reader import MetadataReader, Sink
from bindery_spark.schemas import NO_LEDGER, NO_SEGMENT

LEDGERS_PATH: Final = "/api/v1/bookie/ledgers"
"""Path of the list of ledgers in a bookie's admin HTTP API."""
READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent requests for lists of entries."""
_ANY_DIGEST: Final = Digester(DigestType.DUMMY)
"""Requests for lists of entries verify no digest."""

Runs = Sequence[tuple[int, int]]
"""Runs of consecutive entries: (first entry id, number of entries)."""


class Unlisted(Exception):
    """A bookie did not list its ledgers."""


async def held_ledgers(
    pool: BookiePool, bookie_id: BookieId, *, timeout_s: float, ca_file: str = ""
) -> Iterable[range]:
    """Return the ids of the bookie's ledgers as ascending ranges, from its admin HTTP API. Raises Unlisted.

    `ca_file`: CA certificates that sign those of https ports; empty: those that the system trusts.
    """
    record = pool.directory.bookies.get(bookie_id)
    if record is None:
        raise Unlisted("unreachable: bookie is not registered")
    endpoint = next((e for e in record.info.endpoints if e.protocol in (HTTP, HTTPS)), None)
    if endpoint is None:
        raise Unlisted("unlisted: the bookie has no admin HTTP API that lists its ledgers")
    url = f"{endpoint.protocol}://{endpoint.host}:{endpoint.port}{LEDGERS_PATH}"
    try:
        runs = await asyncio.to_thread(_get, url, timeout_s, ca_file)
        return [range(int(first), int(last) + 1) for first, last in runs]
    except (OSError, HTTPException, ValueError, KeyError, TypeError, BadRequest) as error:
        raise Unlisted(f"unlisted: the bookie's admin HTTP API did not list its ledgers: {error!r}"[:300]) from error


def _get(url: str, timeout_s: float, ca_file: str) -> Any:
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler({})
    ]  # bookies are reached without a proxy
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=client_tls(ca_file=ca_file).context))
    direct = urllib.request.build_opener(*handlers)
    with direct.open(url, timeout=timeout_s) as response:
        return json.load(response)["ledgers"]


def unexpected_of(metadata: LedgerMetadata | None, bookie_id: BookieId, held: Runs) -> Iterable[tuple[int, int]]:
    """Return (segment, entry id) of the unexpected entries, ascending. `metadata` None: the ledger does not exist."""
    if metadata is None:
        return [(NO_SEGMENT, entry_id) for first, count in held for entry_id in range(first, first + count)]
    end = int(metadata.last_entry_id) if metadata.state is LedgerState.CLOSED else ID_MAX
    found = []
    for first, count in held:
        for entry_id in range(first, first + count):
            if not is_expected(metadata, bookie_id, entry_id):
                found.append((NO_SEGMENT, entry_id))
            elif entry_id > end:
                found.append((len(metadata.segments) - 1, entry_id))
    return found


async def read_unexpected(
    pool: BookiePool,
    metadata: MetadataReader,
    bookie_id: BookieId,
    wanted: tuple[int, int],
    *,
    timeout_s: float,
    rows: Sink,
    ca_file: str = "",
) -> AsyncIterator[pa.RecordBatch]:
    """Yield rows of the ledgers first..last (inclusive). No request is in flight when a batch is yielded.

    `ca_file`: as of `held_ledgers`.
    """
    try:
        runs = await held_ledgers(pool, bookie_id, timeout_s=timeout_s, ca_file=ca_file)
    except Unlisted as error:
        rows.add_unlisted(NO_LEDGER, NO_SEGMENT, str(error))
        yield rows.take()
        return
    first, last = wanted
    ids = iter(LedgerId(each) for run in runs for each in run if first <= each <= last)
    while batch := list(islice(ids, READS_IN_FLIGHT)):
        for ledger_id, held in await asyncio.gather(*(_list(pool, bookie_id, each, timeout_s) for each in batch)):
            if isinstance(held, str):
                rows.add_unlisted(ledger_id, NO_SEGMENT, held)
            elif held:
                await _report(rows, metadata, bookie_id, ledger_id, held)
        if rows.is_full:
            yield rows.take()
    if len(rows):
        yield rows.take()


async def _list(
    pool: BookiePool, bookie_id: BookieId, ledger_id: LedgerId, timeout_s: float
) -> tuple[LedgerId, Runs | str]:
    requests = LedgerRequests(ledger_id, _ANY_DIGEST, pool)
    try:
        return ledger_id, await EntryList(requests, bookie_id).run(timeout_s=timeout_s)
    except NoSuchLedger:
        return ledger_id, ()
    except BinderyError as error:
        return ledger_id, f"unlisted: {error}"


async def _report(rows: Sink, metadata: MetadataReader, bookie_id: BookieId, ledger_id: LedgerId, held: Runs) -> None:
    try:
        known: LedgerMetadata | None = await metadata.read(ledger_id)
    except NoSuchLedger:
        known = None
    except Corrupt:
        return  # the expected entries are unknown; the finding METADATA_UNREADABLE reports the ledger
    by_segment: dict[int, list[int]] = {}
    for segment, entry_id in unexpected_of(known, bookie_id, held):
        by_segment.setdefault(segment, []).append(entry_id)
    for segment, entry_ids in by_segment.items():
        rows.add_unexpected(ledger_id, segment, entry_ids)
