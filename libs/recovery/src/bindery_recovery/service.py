"""Recovery as one object, for the process that runs it: an auditor, or a bookie with embedded recovery.

| part     | does                                                                                                   |
|----------|--------------------------------------------------------------------------------------------------------|
| election | is a candidate for auditor; while elected, `auditor` marks under-replicated ledgers                    |
| worker   | repairs marked ledgers, `settings.workers` at a time, whether or not this process is the leader        |
| progress | reads the state of recovery in the whole cluster, for metrics                                          |
| watcher  | restarts a part that fails, and requests the end of the process if one fails too often                 |

All parts share one session of the metadata store and one ledger client, which the caller provides. A session must have
only one service: a second one would treat the locks of the first as its own.

`stop` ends the worker first, which releases its locks, and then resigns leadership, so that the next auditor finds
unlocked marks.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from bindery_client.ledger.api import LedgerClient
from bindery_core.errors import BinderyError
from bindery_core.sources import RandomSource
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.bookies.membership import MembershipStore
from bindery_metadata.coordination.election import AuditorElection
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.auditor import Auditor, AuditorLimits
from bindery_recovery.budget import RepairBudget
from bindery_recovery.cluster.cluster_view import ClusterReader
from bindery_recovery.death_watcher import DeathWatcher
from bindery_recovery.repair.worker import ReplicationWorker
from bindery_recovery.reporting.progress import ProgressCollector
from bindery_recovery.settings import RecoverySettings

ELECTION: Final = "election"
WORKER: Final = "worker"
PROGRESS: Final = "progress"
PROGRESS_INTERVAL_S: Final = 10.0
"""Interval in seconds at which the progress is read."""

log = get_logger(__name__)


class RecoveryService:
    """Call `prepare`, run `run` as a task, then call `stop`. `name`: unique among all processes. `clock_ms`: wall
    clock."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        client: LedgerClient,
        *,
        settings: RecoverySettings,
        name: str,
        randomness: RandomSource,
        clock_ms: Callable[[], int],
        ask_exit: Callable[[str], None],
        limits: AuditorLimits | None = None,
    ) -> None:
        """`ask_exit(reason)` is called once if recovery cannot continue in this process."""
        self.name = name
        self.settings = settings
        self.marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms, worker_name=name)
        self.records = RecoveryRecords(store)
        self.memberships = MembershipStore(store, clock_ms=clock_ms)
        self.budget = RepairBudget(
            bytes_per_s_max=settings.bytes_per_s_max,
            bytes_per_s_min=settings.bytes_per_s_min,
            entries_in_flight_max=settings.entries_in_flight_max,
            target_ms=settings.foreground_p99_target_ms,
        )
        self.auditor = Auditor(
            client,
            store,
            layout,
            self.marks,
            self.records,
            self.memberships,
            settings=settings,
            clock_ms=clock_ms,
            randomness=randomness,
            limits=limits,
            racks=client.racks,
        )
        self.worker = ReplicationWorker(
            name=name,
            store=store,
            client=client,
            marks=self.marks,
            records=self.records,
            read_cluster=ClusterReader(client, self.memberships, CookieStore(store, layout), clock_ms=clock_ms).read,
            budget=self.budget,
            settings=settings,
            clock_ms=clock_ms,
            randomness=randomness,
        )
        self.progress = ProgressCollector(
            store, layout, marks=self.marks, records=self.records, memberships=self.memberships, clock_ms=clock_ms
        )
        self.election = AuditorElection(store, layout, name=name)
        self.watcher = DeathWatcher(ask_exit=ask_exit)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        self._add(ELECTION, lambda: self.election.run(self.auditor.lead))
        if settings.workers:
            self._add(WORKER, self.worker.run)
        self._add(PROGRESS, self._keep_progress)

    @property
    def is_leader(self) -> bool:
        """Whether this process is the leader, as of its last notification."""
        leadership = self.election.leadership
        return leadership is not None and not leadership.is_over

    async def prepare(self) -> None:
        """Create missing znodes. Raises BadVersion if the marks of the cluster have another format;
        MetadataUnavailable."""
        await self.marks.prepare()

    async def run(self) -> None:
        """Run until cancelled, or until a part has failed too often and `ask_exit` was called."""
        await self.watcher.run()

    async def stop(self) -> None:
        """Stop the worker, then resign leadership. The caller then cancels `run`, which ends the other parts.
        Idempotent."""
        self._is_stopping = True
        worker = self._running.get(WORKER)
        if worker is not None:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
        await self.election.resign()
        await self.memberships.close()

    async def _keep_progress(self) -> None:
        while True:
            try:
                await self.progress.get()
            except BinderyError as error:
                log.info("progress_not_read", **error_fields(error))
            await asyncio.sleep(PROGRESS_INTERVAL_S)

    def _add(self, name: str, part: Callable[[], Awaitable[None]]) -> None:
        """Add a part to the watcher. After `stop` was called, its end does not count as a failure."""

        async def run() -> None:
            if not self._is_stopping:
                task = asyncio.ensure_future(part())
                self._running[name] = task
                try:
                    await asyncio.wait({task})
                finally:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                if not self._is_stopping:
                    task.result()
                    return
            await asyncio.Event().wait()

        self.watcher.add(name, run)
