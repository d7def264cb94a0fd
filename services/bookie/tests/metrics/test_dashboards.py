"""A bookie exports every metric that the public Grafana dashboards query, except the metrics in EXCLUDED.

Only the names are copied here, from the queries of the dashboards, taken in November 2026 from
streamnative/apache-pulsar-grafana-dashboard (kubernetes, privatecloud, template), lhotari/pulsar-grafana-dashboards
(bookkeeper, bookkeeper-compaction) and apache/pulsar (grafana/dashboards). BookKeeper itself ships none.
"""

import random
import re
import time
from pathlib import Path

import httpx
import pytest
from bindery_bookie.process import BookieProcess
from bindery_bookie.settings import BookieSettings
from bindery_kit.process.runtime import Shutdown
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree

DASHBOARDS = {
    "streamnative": """
        bookie_DELETED_LEDGER_COUNT bookie_DELETED_LEDGER_TOTAL bookie_MAJOR_COMPACTION_TOTAL
        bookie_MINOR_COMPACTION_COUNT bookie_MINOR_COMPACTION_TOTAL bookie_READ_BYTES
        bookie_RECLAIMED_COMPACTION_SPACE_BYTES bookie_RECLAIMED_DELETION_SPACE_BYTES bookie_SERVER_STATUS
        bookie_WRITE_BYTES bookie_entries_count bookie_journal_JOURNAL_ADD_ENTRY
        bookie_journal_JOURNAL_ADD_ENTRY_count bookie_journal_JOURNAL_CB_QUEUE_SIZE
        bookie_journal_JOURNAL_FORCE_WRITE_QUEUE_SIZE bookie_journal_JOURNAL_QUEUE_SIZE bookie_journal_JOURNAL_SYNC
        bookie_journal_JOURNAL_SYNC_count bookie_ledger_dir__pulsar_data_bookkeeper_ledgers_0_usage
        bookie_ledger_writable_dirs bookie_ledgers_count bookie_read_cache_hits bookie_read_cache_misses
        bookie_read_cache_size bookie_write_cache_size bookkeeper_server_ADD_ENTRY
        bookkeeper_server_ADD_ENTRY_BLOCKED bookkeeper_server_ADD_ENTRY_IN_PROGRESS
        bookkeeper_server_ADD_ENTRY_REQUEST bookkeeper_server_ADD_ENTRY_REQUEST_count
        bookkeeper_server_ADD_ENTRY_count bookkeeper_server_READ_ENTRY_BLOCKED
        bookkeeper_server_READ_ENTRY_IN_PROGRESS bookkeeper_server_READ_ENTRY_REQUEST
        bookkeeper_server_READ_ENTRY_REQUEST_count bookkeeper_server_READ_ENTRY_count
        """,
    "lhotari": """
        bookie_ACTIVE_ENTRY_LOG_TOTAL bookie_ACTIVE_LEDGER_TOTAL bookie_DELETED_LEDGER_TOTAL
        bookie_MAJOR_COMPACTION_TOTAL bookie_READ_BYTES bookie_RECLAIMED_COMPACTION_SPACE_BYTES
        bookie_RECLAIMED_DELETION_SPACE_BYTES bookie_SERVER_STATUS bookie_WRITE_BYTES bookie_entries_count
        bookie_journal_JOURNAL_ADD_ENTRY bookie_journal_JOURNAL_ADD_ENTRY_count
        bookie_journal_JOURNAL_FORCE_WRITE_QUEUE_SIZE bookie_journal_JOURNAL_QUEUE_SIZE bookie_journal_JOURNAL_SYNC
        bookie_journal_JOURNAL_SYNC_count bookie_ledger_writable_dirs bookie_ledgers_count bookie_read_cache_hits
        bookie_read_cache_misses bookie_read_cache_size bookie_read_entry_count
        bookie_readahead_batch_count_count bookie_readahead_batch_count_sum bookie_write_cache_size
        bookkeeper_server_ADD_ENTRY bookkeeper_server_ADD_ENTRY_count bookkeeper_server_READ_ENTRY
        bookkeeper_server_READ_ENTRY_count bookkeeper_server_thread_executor_queue
        """,
    "apache/pulsar": """
        bookie_READ_BYTES bookie_WRITE_BYTES bookie_journal_JOURNAL_QUEUE_LATENCY bookie_journal_JOURNAL_QUEUE_SIZE
        bookie_journal_JOURNAL_SYNC bookie_journal_JOURNAL_SYNC_count bookie_storage_entries_count
        bookie_storage_ledgers_count bookie_storage_read_cache_size bookie_storage_write_cache_size
        bookkeeper_server_ADD_ENTRY bookkeeper_server_ADD_ENTRY_count bookkeeper_server_READ_ENTRY
        bookkeeper_server_READ_ENTRY_count
        """,
}
EXCLUDED = {
    "bookie_entries_count": "an exact count would have to read the whole index",
    "bookie_storage_entries_count": "the same",
    "bookie_storage_ledgers_count": "an old name of bookie_ledgers_count",
    "bookie_storage_read_cache_size": "an old name of bookie_read_cache_size",
    "bookie_storage_write_cache_size": "an old name of bookie_write_cache_size",
    "bookie_journal_JOURNAL_CB_QUEUE_SIZE": "callbacks run right after the sync of the journal, so they never queue",
    "bookkeeper_server_thread_executor_queue": "a bookie has no thread pool in which requests wait",
}
SAMPLE = re.compile(r"(\w+)(?:\{.*\})? \S+")


@pytest.fixture
async def page(tmp_path: Path) -> str:
    """/metrics of a bookie that just started. Its ledger directory has the name that Pulsar's images use."""
    tree = MemoryTree()
    await initialize_cluster(tree.connect(), LedgersLayout(), randomness=random.Random(1))

    async def connect():  # type: ignore[no-untyped-def]
        return tree.connect()

    settings = BookieSettings(
        port=0,
        http_port=0,
        bookie_id="b0",
        journal_dir=str(tmp_path / "journal"),
        ledger_dir=str(tmp_path / "ledgers-0"),
    )
    process = BookieProcess(
        settings, Shutdown(), connect=connect, clock=time.monotonic, wall_clock_ms=lambda: 1_700_000_000_000
    )
    try:
        await process.start()
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"http://127.0.0.1:{process.http_port}/metrics")
    finally:
        await process.stop()
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return answer.text.replace(str(tmp_path).replace("/", "_").replace("-", "_"), "_pulsar_data_bookkeeper")


async def test_every_queried_metric_is_exported_or_excluded(page: str) -> None:
    exported = {match.group(1) for line in page.splitlines() if (match := SAMPLE.fullmatch(line))}
    for dashboard, names in DASHBOARDS.items():
        missing = set(names.split()) - exported - EXCLUDED.keys()
        assert not missing, f"{dashboard} queries {sorted(missing)}"
    assert not exported & EXCLUDED.keys(), "excluded although it is exported"
    queried = {name for names in DASHBOARDS.values() for name in names.split()}
    assert queried >= EXCLUDED.keys(), "excluded although no dashboard queries it"


async def test_labels_and_types_match_the_queries(page: str) -> None:
    for name in ("bookkeeper_server_ADD_ENTRY", "bookkeeper_server_READ_ENTRY", "bookie_journal_JOURNAL_SYNC"):
        for part in ("0.5", "0.99", "0.999", "1.0"):
            assert re.search(rf'^{name}{{(.*,)?success="true",quantile="{part}"}} NaN$', page, re.MULTILINE), name
        assert f"# TYPE {name} summary" in page
    assert re.search(r"^bookie_SERVER_STATUS 1$", page, re.MULTILINE)
    assert "# TYPE bookie_WRITE_BYTES counter" in page
    assert re.search(r"^bookie_ledgers_count 0$", page, re.MULTILINE)
    for line in (
        'bindery_bookie_limbo{shard="0"} 0',
        'bindery_bookie_limbo_ledgers{shard="0"} 0',
        "bindery_bookie_damage 0",
        'bindery_bookie_gc_running{shard="0",kind="major"} 0',
        'bindery_bookie_scrub_quarantined{shard="0"} 0',
        "bindery_bookie_metrics_broken 0",
    ):
        assert f"\n{line}\n" in page, line
    assert len(re.findall(r'^bindery_bookie_directory_writable{path=".*"} 1$', page, re.MULTILINE)) == 2
    assert re.search(r"^process_resident_memory_bytes ", page, re.MULTILINE)


def test_excluded_metrics_are_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "bookie-http.md").read_text()
    for name in EXCLUDED:
        assert f"`{name}`" in text
