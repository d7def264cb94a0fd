"""BookieMetrics: the metrics of the server, under BookKeeper's names, so that its dashboards work for these bookies.

| metric                                                   | shape   | meaning                                         |
|----------------------------------------------------------|---------|-------------------------------------------------|
| bookkeeper_server_<OP>_REQUEST                           | summary | a request from its arrival to its response, ms  |
| bookkeeper_server_<OP>                                   | summary | the same: requests do not wait in a queue       |
| bookkeeper_server_ADD_ENTRY_IN_PROGRESS, READ_...        | gauge   | requests in progress                            |
| bookkeeper_server_ADD_ENTRY_BLOCKED                      | gauge   | adds that wait for a write cache                |
| bookkeeper_server_READ_ENTRY_BLOCKED                     | gauge   | reads that wait for the budget of reads         |
| bookkeeper_server_ADD_ENTRY_REJECTED, READ_...           | counter | answered with TOO_MANY_REQUESTS                 |
| bookie_BOOKIE_ADD_ENTRY, bookie_add_entry, READ, read    | summary | as bookkeeper_server_ADD_ENTRY, READ_ENTRY      |
| bookie_BOOKIE_FORCE_LEDGER                               | counter | force requests                                  |
| bookie_WRITE_BYTES, bookie_READ_BYTES                    | counter | bytes of entries stored, of entries read        |
| bookie_SERVER_STATUS                                     | gauge   | 1 writable, 0 read-only, -1 not registered      |
| bookie_ledger_num_dirs, bookie_JOURNAL_DIRS              | gauge   | directories                                     |
| bookie_ledger_writable_dirs                              | gauge   | ledger directories that are not full            |
| bookie_ledger_dir_<path>_usage                           | gauge   | percentage of its file system in use            |
| bindery_bookie_storage_<name>                            | gauge   | each number of StorageStats, by shard           |
| bindery_bookie_connections, _long_polls, ..._size        | gauge   | current values                                  |
| bindery_bookie_bad_frames                                | counter | connections closed because of malformed frames  |
| bindery_bookie_auth_failures                             | counter | connections without accepted credentials        |
| bindery_bookie_forbidden_requests                        | counter | requests that the roles of clients forbid       |
| bindery_bookie_connections_ended_total                   | counter | connections that a limit ended, by reason       |
| bindery_bookie_held_bytes, _held_bytes_max               | gauge   | bytes that slow clients hold, by kind; limits   |

Journal, caches, flush and garbage collection: `storage_metrics`. OP: ADD_ENTRY, READ_ENTRY, READ_ENTRY_FENCE,
READ_ENTRY_LONG_POLL, WRITE_LAC, READ_LAC, FORCE_LEDGER, GET_BOOKIE_INFO, GET_LIST_OF_ENTRIES_OF_LEDGER. Summaries have
the label `success` and quantiles over the last one to two minutes, within 10 %. The text is rendered per request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_kit.observability.metrics_page import Page, labels, metric_name
from bindery_kit.observability.op_stat import Operation, OpStat

from bindery_bookie.metrics.storage_metrics import ShardMetrics, add_storage
from bindery_bookie.storage.stats import StorageStats

# Operations with a summary of their own, <OP> in the table above.
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
"""Names under which BookKeeper measures the same operation in other layers. Here they have the same value."""

Samples = Callable[[], Sequence[tuple[Mapping[str, str], float]]]
"""Labels and value of each sample of a figure, as of now."""


@dataclass(frozen=True, slots=True)
class DirectoryUsage:
    """A journal or ledger directory, for the metrics."""

    path: str
    kind: str
    """`ledger` or `journal`."""
    usage: float
    """Fraction of its disk in use, 0 .. 1."""
    is_full: bool


@dataclass(frozen=True, slots=True)
class _Figure:
    """A number that another part of the process owns."""

    kind: str
    help: str
    read: Samples


class BookieMetrics:
    """`clock`: monotonic seconds. `storage`: StorageStats of each shard, in order. `render` reads figures of other
    parts."""

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
        self.forbidden = 0
        """Requests of the ledger port that the client's roles do not allow."""
        self.directories: Callable[[], Sequence[DirectoryUsage]] = tuple
        self.reads_blocked: Callable[[], int] = lambda: 0
        if storage is None or isinstance(storage, StorageStats):
            storage = [storage or StorageStats()]
        self.shards = [ShardMetrics(at, stats, clock) for at, stats in enumerate(storage)]
        self._figures: dict[str, _Figure] = {}
        self._broken_figures = 0

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add the gauge `name`; `render` reads its value."""
        self.figure(name, "gauge", help, lambda: [({}, read())])

    def counter(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add the counter `name`; `render` reads its value."""
        self.figure(name, "counter", help, lambda: [({}, read())])

    def figure(self, name: str, kind: str, help: str, read: Samples) -> None:
        """Add a gauge or a counter with labels; `read` returns any number of samples."""
        self._figures[name] = _Figure(kind, help, read)

    def render(self) -> bytes:
        """Return the page, in any state of the bookie: a figure that cannot be read is left out and counted."""
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
        help = "A request from its arrival to its response, milliseconds."
        for name, operation in self.operations.items():
            names = (f"bookkeeper_server_{name}_REQUEST", f"bookkeeper_server_{name}", *_STORAGE_NAMES.get(name, ()))
            page.summaries(names, help, _outcomes(operation))

    def _add_counts(self, page: Page) -> None:
        forces = self.operations["FORCE_LEDGER"]
        for name, help, value in (
            ("bookkeeper_server_ADD_ENTRY_REJECTED", "Adds answered with TOO_MANY_REQUESTS.", self.adds_rejected),
            ("bookkeeper_server_READ_ENTRY_REJECTED", "Reads answered with TOO_MANY_REQUESTS.", self.reads_rejected),
            ("bookie_BOOKIE_FORCE_LEDGER", "Force requests.", forces.success.count + forces.failure.count),
            ("bookie_WRITE_BYTES", "Bytes of entries stored.", self.write_bytes),
            ("bookie_READ_BYTES", "Bytes of entries read.", self.read_bytes),
            ("bindery_bookie_auth_failures", "Connections without accepted credentials.", self.auth_failures),
            ("bindery_bookie_forbidden_requests", "Requests that the roles of clients forbid.", self.forbidden),
            ("bindery_bookie_bad_frames", "Connections closed because of malformed frames.", self.bad_frames),
        ):
            page.add(name, "counter", help, [("", value)])
        adds_blocked = sum(shard.stats.waiting_adds for shard in self.shards)
        for name, help, value in (
            ("bookkeeper_server_ADD_ENTRY_IN_PROGRESS", "Adds in progress.", self.adds_in_progress),
            ("bookkeeper_server_READ_ENTRY_IN_PROGRESS", "Reads in progress.", self.reads_in_progress),
            ("bookkeeper_server_ADD_ENTRY_BLOCKED", "Adds that wait for a write cache.", adds_blocked),
            ("bookkeeper_server_READ_ENTRY_BLOCKED", "Reads that wait for the budget.", self.reads_blocked()),
        ):
            page.add(name, "gauge", help, [("", value)])

    def _add_directories(self, page: Page) -> None:
        directories = self.directories()
        ledger = [one for one in directories if one.kind == "ledger"]
        for name, help, value in (
            ("bookie_ledger_num_dirs", "Ledger directories.", len(ledger)),
            (
                "bookie_ledger_writable_dirs",
                "Ledger directories that are not full.",
                sum(not one.is_full for one in ledger),
            ),
            ("bookie_JOURNAL_DIRS", "Journal directories.", len(directories) - len(ledger)),
        ):
            page.add(name, "gauge", help, [("", value)])
        for one in directories:
            page.add(
                f"bookie_{one.kind}_dir_{metric_name(one.path)}_usage",
                "gauge",
                "Percentage of the file system in use, including the bookie's reserve.",
                [("", 100 * one.usage)],
            )


def _outcomes(operation: Operation) -> list[tuple[str, OpStat]]:
    return [('success="true"', operation.success), ('success="false"', operation.failure)]
