"""Prometheus metrics of recovery.

| names                              | defined by   | about                                                           |
|------------------------------------|--------------|-----------------------------------------------------------------|
| replication_auditor_...            | BookKeeper   | this process, as the auditor                                    |
| replication_replication_worker_... | BookKeeper   | this process, as a worker                                       |
| bindery_recovery_this_...          | Bindery      | this process                                                    |
| bindery_recovery_...               | Bindery      | the cluster (`progress`), as last read by this process          |

Operations have BookKeeper's form, a summary in ms by success. If several operations end between two reads of this page,
only the last one is counted. A failed operation counts with the duration 0. Source: BookKeeper's AuditorStats and
ReplicationStats.
"""

from collections.abc import Callable
from math import nan
from typing import Final

from bindery_kit.observability.metrics_page import Page, labels
from bindery_kit.observability.op_stat import OpStat
from bindery_metadata.layout.layout import CheckKind

from bindery_recovery.service import RecoveryService

AUDITOR: Final = "replication_auditor"
WORKER: Final = "replication_replication_worker"
OURS: Final = "bindery_recovery"

_CHECK_TIMES: Final = {
    CheckKind.LEDGERS: ("CHECK_ALL_LEDGERS_TIME", "Checking copies of all ledgers, ms."),
    CheckKind.PLACEMENT: ("PLACEMENT_POLICY_CHECK_TIME", "Checking the placement of all ledgers, ms."),
    CheckKind.REPLICAS: ("REPLICAS_CHECK_TIME", "Checking the lists of entries of all ledgers, ms."),
}
_RESULTS: Final = (
    (CheckKind.PLACEMENT, "failed", "NUM_LEDGERS_NOT_ADHERING_TO_PLACEMENT_POLICY", "Ledgers that are misplaced."),
    (
        CheckKind.PLACEMENT,
        "soft",
        "NUM_LEDGERS_SOFTLY_ADHERING_TO_PLACEMENT_POLICY",
        "Ledgers on fewer racks than possible.",
    ),
    (
        CheckKind.REPLICAS,
        "ledgers_without_replica",
        "NUM_LEDGERS_HAVING_NO_REPLICA_OF_AN_ENTRY",
        "Ledgers with an entry without a replica.",
    ),
)


class RecoveryMetrics:
    """Metrics of one process. `clock`: monotonic seconds."""

    def __init__(self, service: RecoveryService, *, clock: Callable[[], float]) -> None:
        self._service = service
        self._clock = clock
        self._stats: dict[tuple[str, bool], OpStat] = {}
        self._seen: dict[str, int] = {}
        """Number of completions of each operation at the last read."""

    def add_to(self, page: Page) -> None:
        self._observe()
        self._add_auditor(page)
        self._add_worker(page)
        self._add_process(page)
        self._add_cluster(page)

    # --- BookKeeper's ---------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        audit = self._service.auditor.state.audit
        self._ended("AUDIT_BOOKIES_TIME", audit.audits, audit.duration_s * 1000)
        self._ended("BOOKIE_TO_LEDGERS_MAP_CREATION_TIME", audit.audits, audit.index_s * 1000)
        self._ended("NUM_UNDER_REPLICATED_LEDGERS", audit.audits, audit.marked)
        self._ended("AUDIT_BOOKIES_TIME", audit.postponed, 0.0, ok=False)
        for kind, check in self._service.auditor.state.checks.items():
            name, _ = _CHECK_TIMES[kind]
            self._ended(name, check.finished_ms, check.duration_s * 1000)

    def _ended(self, name: str, turn: int, value: float, *, ok: bool = True) -> None:
        """Record `value` if the operation has ended since the last call: `turn` has changed and is not 0."""
        key = f"{name}:{ok}"
        if turn not in (0, self._seen.get(key, 0)):
            self._seen[key] = turn
            self._stat(name, ok).observe(value)

    def _stat(self, name: str, ok: bool) -> OpStat:
        return self._stats.setdefault((name, ok), OpStat(self._clock))

    def _add_auditor(self, page: Page) -> None:
        state = self._service.auditor.state
        times = {
            "AUDIT_BOOKIES_TIME": "Duration of an audit for lost bookies, ms.",
            "BOOKIE_TO_LEDGERS_MAP_CREATION_TIME": "Duration of metadata reads in an audit for lost bookies, ms.",
            "NUM_UNDER_REPLICATED_LEDGERS": "Ledgers that an audit marked.",
            **dict(_CHECK_TIMES.values()),
        }
        for name, text in times.items():
            stats = [(f'success="{str(ok).lower()}"', self._stat(name, ok)) for ok in (True, False)]
            page.summary(f"{AUDITOR}_{name}", text, stats)
        page.add(f"{AUDITOR}_election_attempts", "counter", "Terms of this process as auditor.", [("", state.terms)])
        watch = self._service.auditor.watch
        returns = 0 if watch is None else sum(watch.lost.flaps.values())
        page.add(
            f"{AUDITOR}_NUM_DELAYED_BOOKIE_AUDITS_CANCELLED",
            "counter",
            "Bookies that returned within their delay, in this term.",
            [("", returns)],
        )
        for kind, member, name, text in _RESULTS:
            value = state.checks[kind].result.get(member)
            if isinstance(value, int):
                page.add(f"{AUDITOR}_{name}", "gauge", text, [("", value)])

    def _add_worker(self, page: Page) -> None:
        stats = self._service.worker.stats
        copied = stats.ledgers_healed - stats.ledgers_without_need
        for name, text, value in (
            ("NUM_FULL_OR_PARTIAL_LEDGERS_REPLICATED", "Ledgers healed by this process.", copied),
            ("NUM_ENTRIES_WRITTEN", "Entries copied by this process.", stats.entries_copied),
            (
                "NUM_DEFER_LEDGER_LOCK_RELEASE_OF_FAILED_LEDGER",
                "Attempts that did not heal their ledger.",
                stats.attempts_failed,
            ),
        ):
            page.add(f"{WORKER}_{name}", "counter", text, [("", value)])

    # --- ours -----------------------------------------------------------------------------------------------------

    def _add_process(self, page: Page) -> None:
        service, stats = self._service, self._service.worker.stats
        gauges = (
            ("this_leads", "1: this process is the auditor.", int(service.is_leader)),
            ("this_budget_bytes_per_second", "Current rate limit of copying.", service.budget.bytes_per_s),
            ("this_entries_in_flight", "Entries that this process is copying.", service.budget.entries_in_flight),
            (
                "this_foreground_p99_seconds",
                "Recent 99th percentile of response times of bookies; NaN: no requests.",
                nan if service.budget.foreground_p99_ms is None else service.budget.foreground_p99_ms / 1000,
            ),
            ("this_parked_ledgers", "Marked ledgers that this process retries later.", service.worker.parked),
            ("this_ledgers_in_work", "Marked ledgers that this process has under way.", len(service.worker.current)),
        )
        for name, text, value in gauges:
            page.add(f"{OURS}_{name}", "gauge", text, [("", value)])
        counters = (
            ("this_bytes_copied_total", "Bytes copied by this process.", stats.bytes_copied),
            ("this_entries_copied_total", "Replicas of entries written by this process.", stats.entries_copied),
            ("this_ledgers_healed_total", "Ledgers whose mark this process removed.", stats.ledgers_healed),
            (
                "this_ledgers_fenced_total",
                "Open ledgers that this process closed to repair them.",
                stats.ledgers_fenced,
            ),
            ("this_replicas_moved_total", "Replicas that this process moved to other racks.", stats.replicas_moved),
            ("this_attempts_failed_total", "Attempts that did not repair their ledger.", stats.attempts_failed),
            ("this_locks_lost_total", "Repaired ledgers whose mark was kept.", stats.locks_lost),
            ("this_busy_seconds_total", "Seconds spent on marked ledgers.", stats.seconds_busy),
            ("this_audits_postponed_total", "Audits that were postponed.", service.auditor.state.audit.postponed),
        )
        for name, text, value in counters:
            page.add(f"{OURS}_{name}", "counter", text, [("", value)])
        deaths = [(labels({"part": name}), state.deaths) for name, state in service.watcher.states.items()]
        page.add(f"{OURS}_this_part_deaths_total", "counter", "Failures of parts, which were then restarted.", deaths)
        marked = service.auditor.state.audit.marked_total
        page.add(
            f"{OURS}_this_ledgers_marked_total",
            "counter",
            "Ledgers that audits of this process marked, by reason.",
            [(labels({"reason": str(reason)}), count) for reason, count in sorted(marked.items())],
        )

        findings = service.auditor.state.closings.findings
        page.add(
            f"{OURS}_this_closing_looks_total",
            "counter",
            "Checks of ledgers with a closing record, by finding.",
            [(labels({"finding": str(finding)}), count) for finding, count in sorted(findings.items())],
        )

    def _add_cluster(self, page: Page) -> None:
        progress = self._service.progress.latest
        if progress is None:
            return
        stuck = sum(progress.by_obstacle.values())
        obstacles = {"none": progress.marked - stuck, **progress.by_obstacle}
        page.add(
            f"{OURS}_marked_ledgers",
            "gauge",
            "Under-replicated ledgers by obstacle.",
            [(labels({"obstacle": name}), count) for name, count in sorted(obstacles.items())],
        )
        ages = [(labels({"le": limit}), count) for limit, count in progress.age_counts.items()]
        page.add(f"{OURS}_marked_ledgers_by_age", "gauge", "Ledgers under-replicated for at most `le` seconds.", ages)
        gauges = (
            ("unrecoverable_ledgers", "Ledgers with entries that have no intact replica.", progress.unrecoverable),
            ("copying_ledgers", "Ledgers that a worker has locked.", progress.copying),
            ("oldest_mark_age_seconds", "Age of the oldest mark; 0: none.", progress.oldest_mark_age_s or 0),
            ("bytes_left", "Bytes to copy, as far as known.", progress.bytes_left),
            ("entries_left", "Replicas to create, as far as known.", progress.entries_left),
            ("bytes_per_second", "Current rate of copying.", progress.rate_bytes_per_s),
            (
                "eta_seconds",
                "Estimated time until everything is copied; NaN: unknown.",
                nan if progress.eta_s is None else progress.eta_s,
            ),
            ("paused", "1: recovery is paused.", int(not progress.is_enabled)),
            ("auditor_elected", "1: there is an auditor.", int(progress.auditor is not None)),
            ("workers", "Processes that copy.", len(progress.workers)),
            (
                "closing_notes",
                "Ledgers with a closing record that were not found whole yet.",
                progress.closings.pending,
            ),
            (
                "oldest_closing_note_age_seconds",
                "Age of the oldest closing record; 0: none.",
                progress.closings.oldest_age_s or 0,
            ),
            ("draining_bookies", "Bookies that are being emptied.", len(progress.draining)),
            ("maintained_bookies", "Bookies in maintenance.", len(progress.maintenance)),
        )
        for name, text, value in gauges:
            page.add(f"{OURS}_{name}", "gauge", text, [("", value)])
        placement = progress.placement
        ledgers = {
            "to_move": max(0, placement.total - placement.done),
            "moved": placement.done,
            "moving": placement.moving,
            "waiting": placement.waiting,
            "stuck": placement.stuck,
        }
        page.add(
            f"{OURS}_placement_ledgers",
            "gauge",
            "Ledgers on fewer racks than possible, in the last run that moved them.",
            [(labels({"state": name}), count) for name, count in ledgers.items()],
        )
        page.add(f"{OURS}_racks", "gauge", "Racks with writable bookies; 0: unknown.", [("", placement.racks)])
        phases: dict[str, int] = {}
        for bookie in progress.lost:
            phases[bookie.phase] = phases.get(bookie.phase, 0) + 1
        page.add(
            f"{OURS}_absent_bookies",
            "gauge",
            "Absent bookies by phase.",
            [(labels({"phase": phase}), phases.get(phase, 0)) for phase in ("waiting", "forced", "handled")],
        )
