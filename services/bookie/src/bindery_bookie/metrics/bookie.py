"""BookieMetrics: what the server counts, under BookKeeper's names, so that its dashboards show our bookies too.

| metric                                                   | shape   | meaning                                         |
|----------------------------------------------------------|---------|-------------------------------------------------|
| bookkeeper_server_<OP>_REQUEST                           | summary | a request from its arrival to its answer, ms    |
| bookkeeper_server_<OP>                                   | summary | the same: no queue stands before the work       |
| bookkeeper_server_ADD_ENTRY_IN_PROGRESS, READ_...        | gauge   | requests without an answer yet                  |
| bookkeeper_server_ADD_ENTRY_BLOCKED, READ_...            | gauge   | those of them that wait for room                |
| bookkeeper_server_ADD_ENTRY_REJECTED, READ_...           | counter | answered TOO_MANY_REQUESTS                      |
| bookie_BOOKIE_ADD_ENTRY, bookie_add_entry, READ, read    | summary | as bookkeeper_server_ADD_ENTRY, READ_ENTRY      |
| bookie_BOOKIE_FORCE_LEDGER                               | counter | force requests                                  |
| bookie_WRITE_BYTES, bookie_READ_BYTES                    | counter | entry bytes taken, entry bytes given            |
| bookie_SERVER_STATUS                                     | gauge   | 1 writable, 0 read-only, -1 not registered      |
| bookie_ledger_num_dirs, bookie_JOURNAL_DIRS              | gauge   | directories                                     |
| bookie_ledger_writable_dirs                              | gauge   | ledger directories that are not full            |
| bookie_ledger_dir_<path>_usage                           | gauge   | per cent of its disk in use                     |
| bindery_bookie_storage_<name>                            | gauge   | each number of StorageStats, by shard           |
| bindery_bookie_connections, _long_polls, ..._size        | gauge   | now                                             |
| bindery_bookie_bad_frames                                | counter | connections ended for bytes that are no request |
| bindery_bookie_auth_failures                             | counter | connections whose client is not who it must be  |

Journal, caches, flush and garbage collection: `storage_metrics`. OP: ADD_ENTRY, READ_ENTRY, READ_ENTRY_FENCE,
READ_ENTRY_LONG_POLL, WRITE_LAC, READ_LAC, FORCE_LEDGER, GET_BOOKIE_INFO, GET_LIST_OF_ENTRIES_OF_LEDGER. Summaries carry
`success` and quantiles over the last one to two minutes, to 10 %. Text is made only when somebody asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_kit.observability.metrics_page import Page, labels, metric_name
from bindery_kit.observability.op_stat import Operation, OpStat

from bindery_bookie.metrics.storage_metrics import ShardMetrics, add_storage
from bindery_bookie.storage.stats import StorageStats

OPERATIONS: Final = (
    "ADD_ENTRY",
    "READ_ENTRY",
    "READ_ENTRY_FENCE",
    "READ_ENTRY_LONG_POLL",
    "WRITE_LAC",
    "READ_LAC",
    "FORCE_LEDGER",
    "GET_BOOKIE_INFO",
    "GET_LIST_OF_ENTRIES_OF_LEDGER",
)
_STORAGE_NAMES: Final = {
    "ADD_ENTRY": ("bookie_BOOKIE_ADD_ENTRY", "bookie_add_entry"),
    "READ_ENTRY": ("bookie_BOOKIE_READ_ENTRY", "bookie_read_entry"),
    "GET_LIST_OF_ENTRIES_OF_LEDGER": ("bookie_BOOKIE_GET_LIST_OF_ENTRIES_OF_LEDGER",),
}
"""Names under which BookKeeper measures the same at other depths. We have one depth, so one number."""

Samples = Callable[[], Sequence[tuple[Mapping[str, str], float]]]
"""Labels and value of each sample of a figure, as of now."""


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """A journal or ledger directory as metrics show it."""

    path: str
    kind: str
    """`ledger` or `journal`."""
    usage: float
    """Part of its disk in use, 0 .. 1."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class _Figure:
    """A number that somebody else owns."""

    kind: str
    help: str
    read: Samples


class BookieMetrics:
    """`clock`: monotonic seconds. `storage`: of each shard, in their order. What others own is read when asked for."""

    def __init__(
        self, *, clock: Callable[[], float], storage: StorageStats | Sequence[StorageStats] | None = None
    ) -> None:
        self.operations = {name: Operation(clock) for name in OPERATIONS}
        self.adds_in_progress = 0
        self.reads_in_progress = 0
        self.adds_rejected = 0
        self.reads_rejected = 0
        self.write_bytes = 0
        self.read_bytes = 0
        self.bad_frames = 0
        self.auth_failures = 0
        self.directories: Callable[[], Sequence[DirectoryUsage]] = tuple
        self.reads_blocked: Callable[[], int] = lambda: 0
        if storage is None or isinstance(storage, StorageStats):
            storage = [storage or StorageStats()]
        self.shards = [ShardMetrics(at, stats, clock) for at, stats in enumerate(storage)]
        self._figures: dict[str, _Figure] = {}
        self._broken_figures = 0

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Show `read()` under `name` whenever metrics are asked for."""
        self.figure(name, "gauge", help, lambda: [({}, read())])

    def counter(self, name: str, help: str, read: Callable[[], float]) -> None:
        """As `gauge`, for a number that only grows."""
        self.figure(name, "counter", help, lambda: [({}, read())])

    def figure(self, name: str, kind: str, help: str, read: Samples) -> None:
        """As `gauge` or `counter`, with labels: none, one or many samples."""
        self._figures[name] = _Figure(kind, help, read)

    def render(self) -> bytes:
        """The page. In every state of the bookie: a figure that cannot be told now is left out, and counted."""
        page = Page()
        self._add_operations(page)
        self._add_counts(page)
        self._add_directories(page)
        add_storage(page, self.shards)
        for name, figure in self._figures.items():
            try:
                samples = [(labels(pairs), value) for pairs, value in figure.read()]
            except Exception:
                self._broken_figures += 1
                continue
            page.add(name, figure.kind, figure.help, samples)
        page.add(
            "bindery_bookie_metrics_broken", "counter", "Metrics that failed to compute.", [("", self._broken_figures)]
        )
        return page.render()

    def _add_operations(self, page: Page) -> None:
        help = "A request from its arrival to its answer, milliseconds."
        for name, operation in self.operations.items():
            names = (f"bookkeeper_server_{name}_REQUEST", f"bookkeeper_server_{name}", *_STORAGE_NAMES.get(name, ()))
            page.summaries(names, help, _outcomes(operation))

    def _add_counts(self, page: Page) -> None:
        forces = self.operations["FORCE_LEDGER"]
        for name, help, value in (
            ("bookkeeper_server_ADD_ENTRY_REJECTED", "Adds answered TOO_MANY_REQUESTS.", self.adds_rejected),
            ("bookkeeper_server_READ_ENTRY_REJECTED", "Reads answered TOO_MANY_REQUESTS.", self.reads_rejected),
            ("bookie_BOOKIE_FORCE_LEDGER", "Force requests.", forces.success.count + forces.failure.count),
            ("bookie_WRITE_BYTES", "Entry bytes taken.", self.write_bytes),
            ("bookie_READ_BYTES", "Entry bytes given.", self.read_bytes),
            ("bindery_bookie_auth_failures", "Clients that did not show who they are.", self.auth_failures),
            ("bindery_bookie_bad_frames", "Connections ended for bytes that are no request.", self.bad_frames),
        ):
            page.add(name, "counter", help, [("", value)])
        adds_blocked = sum(shard.stats.waiting_adds for shard in self.shards)
        for name, help, value in (
            ("bookkeeper_server_ADD_ENTRY_IN_PROGRESS", "Adds without an answer yet.", self.adds_in_progress),
            ("bookkeeper_server_READ_ENTRY_IN_PROGRESS", "Reads without an answer yet.", self.reads_in_progress),
            ("bookkeeper_server_ADD_ENTRY_BLOCKED", "Adds that wait for a write cache.", adds_blocked),
            ("bookkeeper_server_READ_ENTRY_BLOCKED", "Reads that wait for room.", self.reads_blocked()),
        ):
            page.add(name, "gauge", help, [("", value)])

    def _add_directories(self, page: Page) -> None:
        directories = self.directories()
        ledger = [one for one in directories if one.kind == "ledger"]
        for name, help, value in (
            ("bookie_ledger_num_dirs", "Ledger directories.", len(ledger)),
            ("bookie_ledger_writable_dirs", "Ledger directories with room.", sum(not one.is_full for one in ledger)),
            ("bookie_JOURNAL_DIRS", "Journal directories.", len(directories) - len(ledger)),
        ):
            page.add(name, "gauge", help, [("", value)])
        for one in directories:
            page.add(
                f"bookie_{one.kind}_dir_{metric_name(one.path)}_usage",
                "gauge",
                "Per cent in use.",
                [("", 100 * one.usage)],
            )


def _outcomes(operation: Operation) -> list[tuple[str, OpStat]]:
    return [('success="true"', operation.success), ('success="false"', operation.failure)]
